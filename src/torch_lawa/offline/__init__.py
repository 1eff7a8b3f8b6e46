"""Averages of checkpoints that lie on disk: plan, then execute, a piece at a time."""

from torch_lawa.offline.average import Result, average_checkpoints
from torch_lawa.offline.comparison import compare_checkpoints
from torch_lawa.offline.inspection import inspect_checkpoint
from torch_lawa.offline.plan import Plan, plan_average
from torch_lawa.offline.sweep import plan_sweep, run_sweep
from torch_lawa.offline.watch import watch_run

__all__ = [
    "Plan",
    "Result",
    "average_checkpoints",
    "compare_checkpoints",
    "inspect_checkpoint",
    "plan_average",
    "plan_sweep",
    "run_sweep",
    "watch_run",
]
