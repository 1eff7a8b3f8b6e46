"""Carry out a plan: read every input once, write the result whole, note how it came about."""

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from torch_lawa._version import __version__
from torch_lawa.checkpoints.base import Checkpoint
from torch_lawa.checkpoints.opening import open_checkpoint
from torch_lawa.checkpoints.places import Place
from torch_lawa.errors import ConfigError, LayoutError
from torch_lawa.offline.engine import Meter, default_threads, in_threads, run
from torch_lawa.offline.plan import Plan
from torch_lawa.offline.writing import writing

__all__ = ["PROVENANCE", "Result", "average_checkpoints", "metadata_of", "provenance"]

PROVENANCE = "torch_lawa"  # the key of the metadata that says how a result was made
_HASHED = 1 << 22


@dataclass(frozen=True)
class Result:
    """What was done."""

    place: Place
    bytes_read: int
    bytes_written: int
    engine_seconds: float  # reading, averaging and writing, without start-up and flushing
    seconds: float
    not_finite: tuple[str, ...]  # tensors whose mean holds NaN or Inf, as an input does

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "output": str(self.place),
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
) -> Result:
    """Carry out a plan; the bits do not depend on the number of threads.

    Until it is whole the result has a temporary name beside its own; on an error or Ctrl-C nothing
    is left. With `digests` the SHA-256 of every input file goes into the result's provenance.

    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from torch_lawa.checkpoints.tensors import load_tensors, save_tensors
    >>> from torch_lawa.checkpoints.safetensors import read_header
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
        opened = [stack.enter_context(open_checkpoint(i.place, key=plan.key)) for i in plan.inputs]
        _check_unchanged(plan, opened)
        num_threads = threads or default_threads(opened)
        meter.total = plan.bytes_read
        hashes = _digests(opened, num_threads, meter) if digests else {}
        metadata = metadata_of(plan, hashes)
        with writing(plan.output, metadata, plan.aliases) as sink:
            before = time.perf_counter()
            # In the order of the output, so that it is written front to back.
            tensors = [t for shard in plan.output.shards for t in shard.tensors]
            not_finite = run(opened, plan.weights, tensors, sink, threads=num_threads, meter=meter)
            engine_seconds = time.perf_counter() - before
    return Result(
        place=plan.output.place,
        bytes_read=plan.bytes_read,
        bytes_written=plan.bytes_written,
        engine_seconds=engine_seconds,
        seconds=time.perf_counter() - started,
        not_finite=tuple(not_finite),
    )


def metadata_of(plan: Plan, digests: dict[str, str] | None = None) -> dict[str, str]:
    """What the result says of itself: what the newest input said, and how it came about."""
    made = json.dumps(provenance(plan, digests))
    return {"format": "pt", **plan.metadata, PROVENANCE: made}


def provenance(plan: Plan, digests: dict[str, str] | None = None) -> dict[str, Any]:
    """How a result came about, to be kept inside it."""
    inputs = []
    for planned in plan.inputs:
        entry: dict[str, Any] = {"path": str(planned.place), "bytes": planned.num_bytes}
        entry |= {"step": planned.step, "epoch": planned.epoch, "weight": planned.weight}
        found = {k: v for k, v in (digests or {}).items() if k.startswith(str(planned.place))}
        if found:
            entry["sha256"] = found
        inputs.append(entry)
    now = os.environ.get("SOURCE_DATE_EPOCH")
    date = datetime.fromtimestamp(int(now), UTC) if now else datetime.now(UTC)
    return {
        "version": __version__,
        "date": date.isoformat(timespec="seconds"),
        "coefficients": plan.coefficients,
        "inputs": inputs,
    }


def _check_unchanged(plan: Plan, opened: Sequence[Checkpoint]) -> None:
    for checkpoint in opened:
        for tensor in plan.tensors:
            if checkpoint.tensors.get(tensor.name) != tensor.source:
                raise LayoutError(
                    f"{checkpoint.place}: tensor {tensor.name!r} changed since the plan was made; "
                    "plan again."
                )


def _digests(opened: Sequence[Checkpoint], threads: int, meter: Meter) -> dict[str, str]:
    """SHA-256 of every file that is read, by its name."""
    found: dict[str, str] = {}
    places = [place for checkpoint in opened for place in checkpoint.files]
    meter.total += sum(place.size for place in places)

    def work(todo: Iterator[Place]) -> None:
        for place in todo:
            source, digest = place.open(), hashlib.sha256()
            for begin in range(0, source.size, _HASHED):
                end = min(begin + _HASHED, source.size)
                digest.update(source.view(begin, end).data)
                meter.add(end - begin)
            source.close()
            found[str(place)] = digest.hexdigest()

    in_threads(threads, iter(places), work, meter)
    return found
