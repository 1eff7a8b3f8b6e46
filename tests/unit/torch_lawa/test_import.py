"""What importing costs, checked in a fresh interpreter."""

import subprocess
import sys

EXTRAS = ["lightning", "transformers", "accelerate", "matplotlib", "sklearn", "rich", "click"]


def modules_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_loads_no_extras_and_no_torch() -> None:
    assert not modules_after("import torch_lawa") & {"torch", "numpy", *EXTRAS}


def test_the_averager_loads_no_extras() -> None:
    loaded = modules_after("from torch_lawa import *; LatestWeightAverager(k=2)")
    assert "torch" in loaded
    assert not loaded & set(EXTRAS)


def test_every_public_name_is_there_and_no_other() -> None:
    import torch_lawa

    for name in torch_lawa.__all__:
        assert getattr(torch_lawa, name) is not None
    assert set(dir(torch_lawa)) == set(torch_lawa.__all__)
    assert not hasattr(torch_lawa, "nothing")


def test_the_averager_loads_neither_export_nor_checkpoint_formats() -> None:
    """A training loop that saves no export does not pay for it."""
    loaded = modules_after("from torch_lawa import LatestWeightAverager; LatestWeightAverager()")
    unwanted = ("torch_lawa.export", "torch_lawa.checkpoints", "torch_lawa.offline")
    assert not [name for name in loaded if name.startswith(unwanted)]
