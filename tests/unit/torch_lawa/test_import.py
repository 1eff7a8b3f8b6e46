"""The public API: its list, its documentation, and what importing it costs."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import torch_lawa

pytestmark = pytest.mark.slow

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


def test_the_names_that_are_loaded_are_those_that_type_checkers_see() -> None:
    tree = ast.parse(Path(torch_lawa.__file__).read_text())
    imported = {
        (alias.asname, node.module)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    expected = {(name, f"torch_lawa.{module}") for name, module in torch_lawa._MODULES.items()}
    assert imported == expected | {("errors", "torch_lawa"), ("__version__", "torch_lawa._version")}


def test_no_other_name_is_there() -> None:
    assert set(dir(torch_lawa)) == set(torch_lawa.__all__)
    assert not hasattr(torch_lawa, "nothing")


@pytest.mark.parametrize("name", sorted(set(torch_lawa.__all__) - {"__version__"}))
def test_every_public_name_is_documented_with_an_example(name: str) -> None:
    documented = inspect.getdoc(getattr(torch_lawa, name)) or ""
    assert documented
    # A plan is shown where it is run; the doctests of all modules run in the suite.
    assert ">>>" in documented or name in ("errors", "plan_sweep", "run_sweep")


def test_every_error_is_a_lawa_error_of_the_right_kind() -> None:
    for name in torch_lawa.errors.__all__:
        error = getattr(torch_lawa.errors, name)
        assert error.__doc__
        if name not in ("LawaError", "NonFiniteWarning"):
            assert issubclass(error, torch_lawa.errors.LawaError)
            assert issubclass(error, ValueError | OSError | RuntimeError)


def test_the_averager_loads_neither_export_nor_checkpoint_formats() -> None:
    """A training loop that saves no export does not pay for it."""
    loaded = modules_after("from torch_lawa import LatestWeightAverager; LatestWeightAverager()")
    unwanted = ("torch_lawa.export", "torch_lawa.checkpoints", "torch_lawa.offline")
    assert not [name for name in loaded if name.startswith(unwanted)]
