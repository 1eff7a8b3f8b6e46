"""Carry out a plan in one process: read every input once, publish the result whole.

The steps are functions of their own: `multi_process.py` builds the same run from them.
"""

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch_lawa.checkpoints.find.scores import Mode
from torch_lawa.checkpoints.formats.base import Checkpoint
from torch_lawa.checkpoints.formats.registry import open_checkpoint
from torch_lawa.checkpoints.provenance import note_provenance, provenance
from torch_lawa.checkpoints.storage.paths import Location
from torch_lawa.errors import LayoutError
from torch_lawa.garbage import paused_garbage_collection
from torch_lawa.offline.changes import refuse_damaged, refusing_changes
from torch_lawa.offline.engine import average_spans, whole_tensors
from torch_lawa.offline.matching import PlannedTensor
from torch_lawa.offline.options import DEFAULTS, AverageOptions, check_threads
from torch_lawa.offline.output_files import writing
from torch_lawa.offline.plan import AveragePlan, Input, plan_average
from torch_lawa.offline.threads import Meter, default_threads, in_threads

__all__ = [
    "Result",
    "average_checkpoints",
    "check_unchanged",
    "hash_files",
    "metadata_of",
    "open_inputs",
    "per_input",
    "run_average",
]

_HASHED = 1 << 22


@dataclass(frozen=True)
class Result:
    """What was done."""

    location: Location
    bytes_read: int
    bytes_written: int
    engine_seconds: float  # reading, averaging and writing, without start-up and flushing
    seconds: float
    not_finite: tuple[str, ...]  # tensors whose mean contains NaN or Inf
    # Those of them that are finite in every input: the sum, or the result's dtype, overflowed.
    overflowed: tuple[str, ...]
    not_finite_in: tuple[str, ...]  # the checkpoints that contain NaN or Inf, as far as was seen

    @classmethod
    def of(
        cls,
        plan: AveragePlan,
        started: float,
        engine_seconds: float,
        not_finite: Mapping[str, str],
    ) -> "Result":
        """The result of a plan that was begun when `time.perf_counter` returned `started`."""
        return cls(
            location=plan.output.location,
            bytes_read=plan.bytes_read,
            bytes_written=plan.bytes_written,
            engine_seconds=engine_seconds,
            seconds=time.perf_counter() - started,
            not_finite=tuple(not_finite),
            overflowed=tuple(name for name, where in not_finite.items() if not where),
            not_finite_in=tuple(dict.fromkeys(filter(None, not_finite.values()))),
        )

    def to_json(self) -> dict[str, Any]:
        """The same as JSON values."""
        return {
            "output": str(self.location),
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "engine_seconds": self.engine_seconds,
            "seconds": self.seconds,
            "not_finite": list(self.not_finite),
            "not_finite_in": list(self.not_finite_in),
            "overflowed": list(self.overflowed),
        }


def average_checkpoints(
    inputs: Input | Sequence[Input],
    output: Input,
    *,
    last: int | None = None,
    horizon: float | None = None,
    at: int | None = None,
    start: int | None = None,
    stop: int | None = None,
    every: int | None = None,
    best: int | None = None,
    metric: str | None = None,
    mode: Mode | None = None,
    metrics: Input | None = None,
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
        horizon=horizon,
        at=at,
        start=start,
        stop=stop,
        every=every,
        best=best,
        metric=metric,
        mode=mode,
        metrics=metrics,
        weights=weights,
        overwrite=overwrite,
        options=options,
    )
    return run_average(plan, threads=threads, digests=digests)


def run_average(
    plan: AveragePlan,
    *,
    threads: int | None = None,
    digests: bool = False,
    meter: Meter | None = None,
) -> Result:
    """Carry out a plan; the bits do not depend on the number of threads.

    Until it is complete the result has a temporary name next to its own; an error or Ctrl-C leaves
    nothing behind. With `digests` the SHA-256 of every input file goes into the result's
    provenance.

    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from torch_lawa.checkpoints.formats.safetensors_torch import load_tensors, save_tensors
    >>> from torch_lawa.checkpoints.formats.safetensors import read_header
    >>> from torch_lawa.offline.plan import plan_average
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for step, value in (100, 1.0), (200, 4.0):
    ...         tensors = {"w": torch.full((2,), value)}
    ...         save_tensors(Path(folder) / f"step_{step}.safetensors", tensors)
    ...     mean = Path(folder) / "mean.safetensors"
    ...     result = run_average(plan_average(folder, mean, last=2))
    ...     load_tensors(mean, read_header(mean))
    {'w': tensor([2.5000, 2.5000])}
    """
    started = time.perf_counter()
    meter = meter or Meter()
    with ExitStack() as stack:
        opened = open_inputs(plan, stack, threads)
        threads = threads or default_threads(opened)
        meter.total = plan.bytes_read
        hashes = None
        if digests:
            files = [file for checkpoint in opened for file in checkpoint.files]
            meter.total += sum(file.size for file in files)
            hashes = per_input(opened, hash_files(files, threads, meter))
        metadata = metadata_of(plan, hashes)
        with (
            writing(plan.output, metadata, plan.aliases, meter=meter) as sink,
            refusing_changes(opened),
        ):
            before = time.perf_counter()
            # In the order of the output, so that it is written front to back.
            spans = whole_tensors(tensor for file in sink.files for tensor, _ in file.tensors)
            not_finite = average_spans(
                opened, plan.weights, spans, sink, threads=threads, meter=meter
            )
            engine_seconds = time.perf_counter() - before
    return Result.of(plan, started, engine_seconds, not_finite)


def open_inputs(plan: AveragePlan, stack: ExitStack, threads: int | None) -> list[Checkpoint]:
    """Open the checkpoints of a plan, oldest first; refuse those that changed since."""
    check_threads(threads)
    with paused_garbage_collection():
        opened = [
            stack.enter_context(open_checkpoint(i.location, key=plan.key)) for i in plan.inputs
        ]
        check_unchanged(plan.tensors, opened)
    return opened


def check_unchanged(tensors: Sequence[PlannedTensor], opened: Sequence[Checkpoint]) -> None:
    """Refuse checkpoints that differ from those that the plan was made for."""
    for checkpoint in {id(c.tensors): c for c in opened}.values():  # equal headers share them
        for tensor in tensors:
            if checkpoint.tensors.get(tensor.name) != tensor.source:
                raise LayoutError(
                    f"{checkpoint.location}: tensor {tensor.name!r} changed since the plan was "
                    "made; plan again."
                )


def hash_files(files: Sequence[Location], threads: int, meter: Meter) -> list[str]:
    """The SHA-256 of each file, several files at a time."""
    found = [""] * len(files)

    def work(todo: Iterator[tuple[int, Location]]) -> None:
        for i, file in todo:
            source, digest = file.open(), hashlib.sha256()
            for begin in range(0, source.size, _HASHED):
                end = min(begin + _HASHED, source.size)
                digest.update(source.view(begin, end).data)
                meter.add(end - begin)
            refuse_damaged([file])
            source.close()
            found[i] = digest.hexdigest()

    in_threads(threads, enumerate(files), work, meter)
    return found


def per_input(opened: Sequence[Checkpoint], hashes: Sequence[str]) -> list[dict[str, str]]:
    """The hashes of all files of all checkpoints, one `{file: hash}` for each checkpoint."""
    following = iter(hashes)
    return [{str(file): next(following) for file in c.files} for c in opened]


def metadata_of(
    plan: AveragePlan, hashes: Sequence[Mapping[str, str]] | None = None
) -> dict[str, str]:
    """The metadata of the result: that of the newest input, and how the result was made."""
    inputs = []
    for i, planned in enumerate(plan.inputs):
        entry: dict[str, Any] = {"path": str(planned.location), "bytes": planned.num_bytes}
        entry |= {"step": planned.step, "epoch": planned.epoch, "weight": planned.weight}
        if planned.value is not None:
            entry["metric"] = {str(plan.metric): planned.value}
        if hashes is not None:
            entry["sha256"] = dict(hashes[i])
        inputs.append(entry)
    made = provenance(plan.coefficients, inputs)
    if plan.key is not None:
        made["key"] = plan.key
    return note_provenance(made, plan.metadata)
