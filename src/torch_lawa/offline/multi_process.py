"""Carry out a plan with all ranks of a job: the same bytes as one process, all or nothing.

Rank 0 plans, creates the files at their full size under a temporary name and sends the plan. Every
rank fills its share and flushes it. When all have, rank 0 publishes the result. The ranks read the
same inputs and write to the same file system; both functions below make the same exchanges.
"""

import contextlib
import hashlib
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch_lawa.checkpoints.formats.base import Checkpoint, TensorSpec
from torch_lawa.checkpoints.formats.registry import open_checkpoint
from torch_lawa.checkpoints.storage.paths import LocalPath, Location, parse_location
from torch_lawa.coefficients import Weights
from torch_lawa.errors import LayoutError, OutputError, RankError
from torch_lawa.offline.average import (
    Result,
    check_unchanged,
    hash_files,
    metadata_of,
    open_inputs,
    per_input,
)
from torch_lawa.offline.changes import refusing_changes
from torch_lawa.offline.engine import Span, average_spans, value_width
from torch_lawa.offline.matching import PlannedTensor
from torch_lawa.offline.options import check_threads
from torch_lawa.offline.output_files import OutputFile, SafetensorsSink, writing
from torch_lawa.offline.plan import AveragePlan
from torch_lawa.offline.threads import Meter, default_threads
from torch_lawa.ranks.agreement import FailTogether

__all__ = ["BLOCK", "average_as_other_rank", "average_as_rank_0", "share_cuts", "spans_between"]

# Shares are whole blocks, so no two ranks write to the same page: of two such writes a file system
# that several machines share may lose one. This is the largest page in use today.
BLOCK = 1 << 16

_SAMPLES, _SAMPLED = 8, 4096

# Where the ranks exchange something, as error messages call it.
_INPUTS = "the choice of inputs"
_HASHES = "the end of hashing"
_LAYOUT = "the layout of the files"
_VALUES = "the end of writing"
_PUBLISHED = "the published result"


def average_as_rank_0(
    plan: AveragePlan,
    ranks: FailTogether,
    *,
    local_size: int,
    threads: int | None = None,
    digests: bool = False,
    meter: Meter,
) -> Result:
    """Like `run_average`, with the help of the other ranks; raises if one of them fails."""
    started = time.perf_counter()
    with ExitStack() as stack:
        opened = open_inputs(plan, stack, threads)
        threads = threads or default_threads(opened, local_size)
        meter.total = plan.bytes_read
        ranks.exchange(
            _INPUTS,
            {
                "inputs": [_absolute(i.location) for i in plan.inputs],
                "key": plan.key,
                "fingerprints": [_fingerprint(checkpoint) for checkpoint in opened],
                "digests": digests,
            },
        )
        hashes = None
        if digests:
            files = [file for checkpoint in opened for file in checkpoint.files]
            meter.total += sum(file.size for file in files)
            mine = hash_files(files[:: ranks.size], threads, meter)
            hashes = per_input(opened, _interleaved(ranks.exchange(_HASHES, mine)))
        with (
            writing(plan.output, metadata_of(plan, hashes), plan.aliases, shared=True) as sink,
            ranks.failing(),  # inside: the files are removed when no rank writes to them any more
            refusing_changes(opened),
        ):
            before = time.perf_counter()
            task = _SharedWork.of(plan, sink, ranks.size)
            ranks.exchange(_LAYOUT, asdict(task))
            spans = task.spans(0)
            found = average_spans(opened, plan.weights, spans, sink, threads=threads, meter=meter)
            sink.flush()
            reports = ranks.exchange(_VALUES, found)
            engine_seconds = time.perf_counter() - before
        with contextlib.suppress(RankError, OutputError):  # too late for a rank to fail
            ranks.exchange(_PUBLISHED)
    shown = {_absolute(c.location): str(c.location) for c in opened}  # as this rank names them
    not_finite = {}
    for name in sorted({name for report in reports for name in report}):
        where = next((report[name] for report in reports if report.get(name)), "")
        not_finite[name] = shown.get(where, where)
    return Result.of(plan, started, engine_seconds, not_finite)


def average_as_other_rank(
    ranks: FailTogether, *, local_size: int, threads: int | None, meter: Meter
) -> None:
    """Do this rank's share of the plan of rank 0; returns when the result is published."""
    with ranks.failing(), ExitStack() as stack:
        check_threads(threads)
        sent = ranks.exchange(_INPUTS)[0]
        locations = [parse_location(name) for name in sent["inputs"]]
        opened = [stack.enter_context(open_checkpoint(p, key=sent["key"])) for p in locations]
        _check_fingerprints(opened, sent["fingerprints"])
        threads = threads or default_threads(opened, local_size)
        if sent["digests"]:
            files = [file for checkpoint in opened for file in checkpoint.files]
            mine = hash_files(files[ranks.rank :: ranks.size], threads, meter)
            ranks.exchange(_HASHES, mine)
        task = _SharedWork.from_json(ranks.exchange(_LAYOUT)[0])
        check_unchanged([tensor for file in task.files for tensor, _ in file.tensors], opened)
        sink = _open_sink(task, ranks.rank)
        stack.callback(sink.close)
        spans = task.spans(ranks.rank)
        with refusing_changes(opened):
            not_finite = average_spans(
                opened, task.weights, spans, sink, threads=threads, meter=meter
            )
        sink.flush()
        sink.close()
        ranks.exchange(_VALUES, not_finite)
        ranks.exchange(_PUBLISHED)


@dataclass(frozen=True)
class _SharedWork:
    """Which bytes of which files the ranks write, with which weights."""

    folder: str
    weights: Weights
    files: tuple[OutputFile, ...]
    cuts: tuple[int, ...]

    @classmethod
    def of(cls, plan: AveragePlan, sink: SafetensorsSink, num_shares: int) -> "_SharedWork":
        """Split the work of a plan into one share per rank."""
        num_averaged = sum(w != 0.0 for w in plan.weights.numerators)
        cuts = share_cuts(sink.files, num_shares, num_averaged)
        return cls(os.path.abspath(sink.folder), plan.weights, tuple(sink.files), tuple(cuts))

    def spans(self, rank: int) -> list[Span]:
        """The share of a rank."""
        return spans_between(self.files, self.cuts[rank], self.cuts[rank + 1])

    @classmethod
    def from_json(cls, sent: dict[str, Any]) -> "_SharedWork":
        """The work that rank 0 sent: `asdict` of its own, as JSON."""

        def spec(dtype: str, shape: list[int]) -> TensorSpec:
            return TensorSpec(dtype, tuple(shape))

        def tensor(source: dict[str, Any], target: dict[str, Any], **rest: Any) -> PlannedTensor:
            return PlannedTensor(source=spec(**source), target=spec(**target), **rest)

        files = [
            OutputFile(
                f["file"], f["size"], tuple((tensor(**t), start) for t, start in f["tensors"])
            )
            for f in sent["files"]
        ]
        weights = Weights(tuple(sent["weights"]["numerators"]), sent["weights"]["divisor"])
        return cls(sent["folder"], weights, tuple(files), tuple(sent["cuts"]))


def share_cuts(files: Sequence[OutputFile], num_shares: int, num_averaged: int) -> list[int]:
    """Where each share begins, and where the last one ends.

    Positions count through all files, each of which begins at a whole block; a cut may be in the
    middle of a tensor. The cost of a value is its bytes: read once for each of `num_averaged`
    checkpoints (once if it comes from the newest), written once.
    """
    stretches = []  # where each begins, its values, the bytes and the cost of one
    for tensor, begin, _ in _positions(files):
        width, source = value_width(tensor.target.dtype), value_width(tensor.source.dtype)
        reads = num_averaged if tensor.rule == "average" else 1
        stretches.append((begin, tensor.target.nbytes // width, width, source * reads + width))
    total = sum(num_values * cost for _, num_values, _, cost in stretches)
    dues = iter([total * i // num_shares for i in range(1, num_shares)])
    cuts, done, due = [0], 0, next(dues, None)
    for begin, num_values, width, cost in stretches:
        while due is not None and due < done + num_values * cost:
            at = begin + (due - done) // cost * width
            cuts.append((at + BLOCK // 2) // BLOCK * BLOCK)
            due = next(dues, None)
        done += num_values * cost
    end = sum(_blocks(file) for file in files) * BLOCK
    return [*cuts, *[end] * (num_shares + 1 - len(cuts))]


def spans_between(files: Iterable[OutputFile], begin: int, end: int) -> list[Span]:
    """The parts of tensors from position `begin` to `end`, both at whole blocks."""
    spans = []
    for tensor, start, stop in _positions(files):
        first, last = max(start, begin), min(stop, end)
        if first < last:
            width = value_width(tensor.target.dtype)
            # Every tensor starts at a multiple of its width, so no cut is inside of a value.
            assert (first - start) % width == 0
            assert (last - start) % width == 0
            spans.append((tensor, (first - start) // width, (last - start) // width))
    return spans


def _positions(files: Iterable[OutputFile]) -> Iterable[tuple[PlannedTensor, int, int]]:
    base = 0
    for file in files:
        for tensor, start in file.tensors:
            yield tensor, base + start, base + start + tensor.target.nbytes
        base += _blocks(file) * BLOCK


def _blocks(file: OutputFile) -> int:
    return -(-file.size // BLOCK)


def _open_sink(task: _SharedWork, rank: int) -> SafetensorsSink:
    """The files that a rank writes to, as rank 0 has created them."""
    names = {tensor.name for tensor, _, _ in task.spans(rank)}
    files = [f for f in task.files if any(tensor.name in names for tensor, _ in f.tensors)]
    try:
        return SafetensorsSink(Path(task.folder), files)
    except FileNotFoundError as error:
        raise OutputError(
            f"{error.filename}: does not exist here, but rank 0 has just written it. Write to a "
            "file system that all ranks share."
        ) from None


def _interleaved(hashes: Sequence[Sequence[str]]) -> list[str]:
    """The hashes in the order of the files: rank r of n has hashed files r, r + n, r + 2n, ..."""
    num_files = sum(map(len, hashes))
    return [hashes[i % len(hashes)][i // len(hashes)] for i in range(num_files)]


def _absolute(location: Location) -> str:
    """A name that is valid in a process with another working directory."""
    return os.path.abspath(location.path) if isinstance(location, LocalPath) else str(location)


def _check_fingerprints(opened: Sequence[Checkpoint], fingerprints: Sequence[str]) -> None:
    for checkpoint, fingerprint in zip(opened, fingerprints, strict=True):
        if _fingerprint(checkpoint) != fingerprint:
            raise LayoutError(
                f"{checkpoint.location}: is not the same checkpoint as on rank 0. All ranks must "
                "read the same files."
            )


def _fingerprint(checkpoint: Checkpoint) -> str:
    """A hash of its tensors and, if it is local, of some of their values."""
    digest = hashlib.sha256()
    names = list(checkpoint.tensors)
    for name in names:
        digest.update(f"{name} {checkpoint.tensors[name]}\n".encode())
    if checkpoint.location.local:
        for name in names[:: -(-len(names) // _SAMPLES) or 1]:
            end = min(_SAMPLED, checkpoint.tensors[name].nbytes)
            digest.update(checkpoint.read(name, 0, end).tobytes())
    return digest.hexdigest()
