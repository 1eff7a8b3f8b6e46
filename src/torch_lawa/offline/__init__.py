"""Average, sweep, watch, inspect and compare checkpoints on disk or on a server.

Every act is one call. An average or a sweep can also be planned first (`plan_average`,
`plan_sweep`), printed, and then run (`run_average`, `run_sweep`).
"""

from collections.abc import Sequence

from torch_lawa.offline.average import Result, run_average
from torch_lawa.offline.inspecting.comparison import compare_checkpoints
from torch_lawa.offline.inspecting.difference import Difference
from torch_lawa.offline.inspecting.inspection import Inspection, inspect_checkpoint
from torch_lawa.offline.options import DEFAULTS, AverageOptions
from torch_lawa.offline.plan import AveragePlan, Input, plan_average
from torch_lawa.offline.sweep import SweepPlan, plan_sweep, run_sweep, sweep_checkpoints
from torch_lawa.offline.watching.watcher import Averaged, watch_run

__all__ = [
    "AverageOptions",
    "AveragePlan",
    "Averaged",
    "Difference",
    "Inspection",
    "Result",
    "SweepPlan",
    "average_checkpoints",
    "compare_checkpoints",
    "inspect_checkpoint",
    "plan_average",
    "plan_sweep",
    "run_average",
    "run_sweep",
    "sweep_checkpoints",
    "watch_run",
]


def average_checkpoints(
    inputs: Input | Sequence[Input],
    output: Input,
    *,
    last: int | None = None,
    at: int | None = None,
    start: int | None = None,
    stop: int | None = None,
    every: int | None = None,
    weights: Sequence[float] | None = None,
    overwrite: bool = False,
    threads: int | None = None,
    digests: bool = False,
    options: AverageOptions = DEFAULTS,
) -> Result:
    """Average checkpoints: `plan_average`, which describes the arguments, and `run_average`.

    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from torch_lawa.checkpoints.formats.safetensors_torch import save_tensors
    >>> run, mean = Path(tempfile.mkdtemp()), Path(tempfile.mkdtemp()) / "mean.safetensors"
    >>> for step in (100, 200, 300):
    ...     save_tensors(run / f"step_{step}.safetensors", {"w": torch.ones(2)})
    >>> average_checkpoints(run, mean, last=2, options=AverageOptions(dtype="bf16")).bytes_written
    4
    """
    plan = plan_average(
        inputs,
        output,
        last=last,
        at=at,
        start=start,
        stop=stop,
        every=every,
        weights=weights,
        overwrite=overwrite,
        options=options,
    )
    return run_average(plan, threads=threads, digests=digests)
