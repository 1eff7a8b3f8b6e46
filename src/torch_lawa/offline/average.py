"""Carry out a plan: read every input once, write the result whole, note how it came about."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch_lawa.checkpoints.formats.base import Checkpoint
from torch_lawa.checkpoints.formats.registry import open_checkpoint
from torch_lawa.checkpoints.provenance import note_provenance, provenance
from torch_lawa.checkpoints.storage.paths import Location
from torch_lawa.errors import ConfigError
from torch_lawa.offline.changes import refusing_changes
from torch_lawa.offline.digests import hash_files
from torch_lawa.offline.engine import Meter, default_threads, run, whole
from torch_lawa.offline.filling import check_unchanged, plan_filling, whole_name
from torch_lawa.offline.leading import Leader
from torch_lawa.offline.plan import Plan
from torch_lawa.offline.writing import writing

__all__ = ["Result", "average_checkpoints", "metadata_of"]


@dataclass(frozen=True)
class Result:
    """What was done."""

    location: Location
    bytes_read: int
    bytes_written: int
    engine_seconds: float  # reading, averaging and writing, without start-up and flushing
    seconds: float
    # Tensors whose mean holds NaN or Inf: an input does, or the result's dtype is too narrow.
    not_finite: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "output": str(self.location),
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "engine_seconds": self.engine_seconds,
            "seconds": self.seconds,
            "not_finite": list(self.not_finite),
        }


def average_checkpoints(
    plan: Plan,
    *,
    threads: int | None = None,
    digests: bool = False,
    meter: Meter | None = None,
    leader: Leader | None = None,
) -> Result:
    """Carry out a plan; the bits do not depend on the number of threads.

    Until it is whole the result has a temporary name beside its own; on an error or Ctrl-C nothing
    is left. With `digests` the SHA-256 of every input file goes into the result's provenance. A
    `leader` shares the work with the other processes of its team (`offline/leading.py`).

    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from torch_lawa.checkpoints.formats.safetensors_torch import load_tensors, save_tensors
    >>> from torch_lawa.checkpoints.formats.safetensors import read_header
    >>> from torch_lawa.offline import plan_average
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for step, value in (100, 1.0), (200, 4.0):
    ...         tensors = {"w": torch.full((2,), value)}
    ...         save_tensors(Path(folder) / f"step_{step}.safetensors", tensors)
    ...     mean = Path(folder) / "mean.safetensors"
    ...     result = average_checkpoints(plan_average(folder, mean, last=2))
    ...     load_tensors(mean, read_header(mean))
    {'w': tensor([2.5000, 2.5000])}
    """
    if threads is not None and threads < 1:
        raise ConfigError(f"threads is {threads}; give at least 1.")
    started = time.perf_counter()
    meter = meter or Meter()
    with ExitStack() as stack:
        if leader is not None:
            stack.enter_context(leader.answering())
        opened = [
            stack.enter_context(open_checkpoint(i.location, key=plan.key)) for i in plan.inputs
        ]
        check_unchanged(plan.tensors, opened)
        num_threads = threads or default_threads(opened, leader.team.size_here if leader else 1)
        meter.total = plan.bytes_read
        if leader is not None:
            leader.gather()
        hashes = _digests(opened, num_threads, meter, leader) if digests else {}
        metadata = metadata_of(plan, hashes)
        shared = leader.meeting.values if leader else None
        with writing(plan.output, metadata, plan.aliases, shared) as sink, refusing_changes(opened):
            before = time.perf_counter()
            # In the order of the output, so that it is written front to back.
            spans = whole(tensor for file in sink.files for tensor, _ in file.tensors)
            if leader is not None:
                filling = plan_filling(plan, opened, sink.files, leader.team.size)
                leader.order(filling.to_json())
                spans = iter(filling.spans(leader.team.rank))
            not_finite = run(opened, plan.weights, spans, sink, threads=num_threads, meter=meter)
            if leader is not None:
                sink.flush()
                others = [name for reply in leader.collect() for name in reply["not_finite"]]
                not_finite = sorted({*not_finite, *others})
            engine_seconds = time.perf_counter() - before
    return Result(
        location=plan.output.location,
        bytes_read=plan.bytes_read,
        bytes_written=plan.bytes_written,
        engine_seconds=engine_seconds,
        seconds=time.perf_counter() - started,
        not_finite=tuple(not_finite),
    )


def metadata_of(plan: Plan, digests: dict[str, str] | None = None) -> dict[str, str]:
    """What the result says of itself: what the newest input said, and how it came about."""
    return note_provenance(_provenance(plan, digests), plan.metadata)


def _provenance(plan: Plan, digests: dict[str, str] | None = None) -> dict[str, Any]:
    """How a result came about, to be kept inside it."""
    inputs = []
    for planned in plan.inputs:
        entry: dict[str, Any] = {"path": str(planned.location), "bytes": planned.num_bytes}
        entry |= {"step": planned.step, "epoch": planned.epoch, "weight": planned.weight}
        found = {k: v for k, v in (digests or {}).items() if k.startswith(str(planned.location))}
        if found:
            entry["sha256"] = found
        inputs.append(entry)
    made = provenance(plan.coefficients, inputs)
    return made if plan.key is None else {**made, "key": plan.key}


def _digests(
    opened: Sequence[Checkpoint], threads: int, meter: Meter, leader: Leader | None
) -> dict[str, str]:
    """SHA-256 of every file that is read, by its name."""
    locations = [location for checkpoint in opened for location in checkpoint.files]
    meter.total += sum(location.size for location in locations)
    if leader is None:
        return hash_files(locations, threads, meter)
    leader.order({"act": "digest", "files": [whole_name(location) for location in locations]})
    size = leader.team.size
    found = hash_files(locations[::size], threads, meter)
    for rank, reply in zip(leader.others, leader.collect(), strict=True):
        found |= zip(map(str, locations[rank::size]), reply["digests"], strict=True)
    return found
