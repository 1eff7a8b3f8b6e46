"""LAtest Weight Averaging: keep the k latest checkpoints of a run and serve their mean.

Names are loaded when they are first used, so that `import torch_lawa` (and the command line)
does not pay for PyTorch before it is needed.
"""

import importlib
from typing import TYPE_CHECKING, Any

from torch_lawa._version import __version__

if TYPE_CHECKING:
    from torch_lawa.averager import LatestWeightAverager
    from torch_lawa.batch_norm import recalibrate_batch_norm
    from torch_lawa.coefficients import Annealing, Explicit, Exponential, Uniform
    from torch_lawa.offline import average_checkpoints, plan_average
    from torch_lawa.schedule import Every, OnPlateau
    from torch_lawa.stores.disk import DiskStore

_HOMES = {
    "LatestWeightAverager": "torch_lawa.averager",
    "recalibrate_batch_norm": "torch_lawa.batch_norm",
    "Uniform": "torch_lawa.coefficients",
    "Exponential": "torch_lawa.coefficients",
    "Explicit": "torch_lawa.coefficients",
    "Annealing": "torch_lawa.coefficients",
    "Every": "torch_lawa.schedule",
    "OnPlateau": "torch_lawa.schedule",
    "DiskStore": "torch_lawa.stores.disk",
    "plan_average": "torch_lawa.offline",
    "average_checkpoints": "torch_lawa.offline",
}

__all__ = [
    "Annealing",
    "DiskStore",
    "Every",
    "Explicit",
    "Exponential",
    "LatestWeightAverager",
    "OnPlateau",
    "Uniform",
    "__version__",
    "average_checkpoints",
    "plan_average",
    "recalibrate_batch_norm",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'torch_lawa' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
