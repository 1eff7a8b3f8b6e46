"""`python -m torch_lawa` is the command `lawa`."""

from torch_lawa.cli.main import main

if __name__ == "__main__":
    main()
