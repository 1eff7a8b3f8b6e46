"""The names we use of Lightning, from whichever of its two packages is installed.

`lightning.pytorch` and `pytorch_lightning` are the same code under two names, and a callback of
one does not work with a Trainer of the other. The package that was imported first is used.
"""

import importlib
import sys
from typing import TYPE_CHECKING

__all__ = [
    "Callback",
    "CombinedLoader",
    "DummyLogger",
    "EvaluationLoop",
    "LightningModule",
    "Logger",
    "Trainer",
    "rank_zero_warn",
]

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.loggers.logger import DummyLogger, Logger
    from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop as EvaluationLoop
    from lightning.pytorch.utilities.combined_loader import CombinedLoader
    from lightning_utilities.core.rank_zero import rank_zero_warn
else:
    _NAMES = ("lightning.pytorch", "pytorch_lightning")

    def _package() -> str:
        for name in (*(name for name in _NAMES if name in sys.modules), *_NAMES):
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                if error.name not in ("lightning", *_NAMES):
                    raise
            else:
                return name
        raise ModuleNotFoundError(
            "torch_lawa.integrations.lightning needs Lightning: pip install 'torch-lawa[lightning]'"
        )

    def _get(module: str, name: str) -> object:
        return getattr(importlib.import_module(f"{_found}{module}"), name)

    _found = _package()
    Callback, LightningModule, Trainer = (
        _get("", name) for name in ("Callback", "LightningModule", "Trainer")
    )
    CombinedLoader = _get(".utilities.combined_loader", "CombinedLoader")
    DummyLogger, Logger = (_get(".loggers.logger", name) for name in ("DummyLogger", "Logger"))
    EvaluationLoop = _get(".loops.evaluation_loop", "_EvaluationLoop")
    rank_zero_warn = _get(".utilities.rank_zero", "rank_zero_warn")
