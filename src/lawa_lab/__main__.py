"""`python -m lawa_lab` is the command `lawa` with the lab's verbs, installed or not."""

from lawa_lab.cli import VERBS
from torch_lawa.cli.main import main

if __name__ == "__main__":
    main(verbs=VERBS)
