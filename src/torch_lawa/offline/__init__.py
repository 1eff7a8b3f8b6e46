"""Averages of checkpoints that lie on disk: plan, then execute, a piece at a time."""

from torch_lawa.offline.average import Result
from torch_lawa.offline.average import run_average as average_checkpoints
from torch_lawa.offline.plan import Plan, plan_average

__all__ = ["Plan", "Result", "average_checkpoints", "plan_average"]
