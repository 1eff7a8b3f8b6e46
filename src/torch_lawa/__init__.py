"""LAtest Weight Averaging: keep the k latest checkpoints of a run and provide their mean.

The names below are the complete public API, together with the modules of `torch_lawa.integrations`.
Every other module is internal and may change without notice.

Names are loaded when they are first used, so that `import torch_lawa` (and the command line) does
not import PyTorch before it is needed.
"""

import importlib
from typing import TYPE_CHECKING, Any

from torch_lawa import errors as errors
from torch_lawa._version import __version__ as __version__

if TYPE_CHECKING:  # the same names for type checkers; a test compares the two lists
    from torch_lawa.averager import LatestWeightAverager as LatestWeightAverager
    from torch_lawa.averager_protocol import Averager as Averager
    from torch_lawa.batch_norm import recalibrate_batch_norm as recalibrate_batch_norm
    from torch_lawa.coefficients import Annealing as Annealing
    from torch_lawa.coefficients import Blend as Blend
    from torch_lawa.coefficients import Coefficients as Coefficients
    from torch_lawa.coefficients import Explicit as Explicit
    from torch_lawa.coefficients import Exponential as Exponential
    from torch_lawa.coefficients import Recent as Recent
    from torch_lawa.coefficients import Uniform as Uniform
    from torch_lawa.coefficients import Weights as Weights
    from torch_lawa.coefficients import register_coefficients as register_coefficients
    from torch_lawa.evaluation import evaluate_side_by_side as evaluate_side_by_side
    from torch_lawa.integrations.torch_swa import from_averaged_model as from_averaged_model
    from torch_lawa.integrations.torch_swa import to_averaged_model as to_averaged_model
    from torch_lawa.metrics import MetricsWriter as MetricsWriter
    from torch_lawa.offline.average import average_checkpoints as average_checkpoints
    from torch_lawa.offline.average import run_average as run_average
    from torch_lawa.offline.inspect.comparison import compare_checkpoints as compare_checkpoints
    from torch_lawa.offline.inspect.inspection import inspect_checkpoint as inspect_checkpoint
    from torch_lawa.offline.options import AverageOptions as AverageOptions
    from torch_lawa.offline.plan import plan_average as plan_average
    from torch_lawa.offline.sweep import run_sweep as run_sweep
    from torch_lawa.offline.sweep import sweep_checkpoints as sweep_checkpoints
    from torch_lawa.offline.sweep_plan import plan_sweep as plan_sweep
    from torch_lawa.offline.watch.watcher import watch_run as watch_run
    from torch_lawa.schedule import Every as Every
    from torch_lawa.schedule import Horizon as Horizon
    from torch_lawa.schedule import OnPlateau as OnPlateau
    from torch_lawa.schedule import Schedule as Schedule
    from torch_lawa.schedule import register_schedule as register_schedule
    from torch_lawa.spike_rescue import SpikeRescue as SpikeRescue
    from torch_lawa.stores.disk import DiskStore as DiskStore
    from torch_lawa.window_choice import WindowChoice as WindowChoice
    from torch_lawa.window_choice import WindowChooser as WindowChooser
    from torch_lawa.window_choice import WindowSearch as WindowSearch

_PUBLIC = {
    "averager": ("LatestWeightAverager",),
    "averager_protocol": ("Averager",),
    "batch_norm": ("recalibrate_batch_norm",),
    "coefficients": (
        "Annealing",
        "Blend",
        "Coefficients",
        "Explicit",
        "Exponential",
        "Recent",
        "Uniform",
        "Weights",
        "register_coefficients",
    ),
    "evaluation": ("evaluate_side_by_side",),
    "integrations.torch_swa": ("from_averaged_model", "to_averaged_model"),
    "metrics": ("MetricsWriter",),
    "offline.average": ("average_checkpoints", "run_average"),
    "offline.inspect.comparison": ("compare_checkpoints",),
    "offline.inspect.inspection": ("inspect_checkpoint",),
    "offline.options": ("AverageOptions",),
    "offline.plan": ("plan_average",),
    "offline.sweep": ("run_sweep", "sweep_checkpoints"),
    "offline.sweep_plan": ("plan_sweep",),
    "offline.watch.watcher": ("watch_run",),
    "schedule": ("Every", "Horizon", "OnPlateau", "Schedule", "register_schedule"),
    "spike_rescue": ("SpikeRescue",),
    "stores.disk": ("DiskStore",),
    "window_choice": ("WindowChoice", "WindowChooser", "WindowSearch"),
}
_MODULES = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = sorted(["__version__", "errors", *_MODULES])


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'torch_lawa' has no attribute {name!r}")
    return getattr(importlib.import_module(f"torch_lawa.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
