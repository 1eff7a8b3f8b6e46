"""Average many windows of a run in one pass: each checkpoint is read once, not once for every k.

A piece of every checkpoint is decoded once, and all windows are summed from it. Results that are
only evaluated are kept in a scratch folder, as many at a time as its disk can hold; windows of a
later batch read again only the checkpoints that they share with earlier ones.
"""

import errno
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_lawa.checkpoints.find.discovery import (
    FoundCheckpoint,
)
from torch_lawa.checkpoints.formats.base import Checkpoint
from torch_lawa.checkpoints.formats.registry import open_checkpoint
from torch_lawa.checkpoints.storage.atomic import making, recover_all, staging
from torch_lawa.checkpoints.storage.paths import LocalPath, Location, parse_output
from torch_lawa.coefficients import Uniform, Weights, weights_at
from torch_lawa.errors import ConfigError, FormatError, OutputError
from torch_lawa.mean.kernels import PIECE, Bytes, Pieces, make_pieces
from torch_lawa.metrics import MetricsWriter, Row
from torch_lawa.offline.average import metadata_of
from torch_lawa.offline.changes import refusing_changes
from torch_lawa.offline.engine import cut_spans, read_piece, value_width, whole_tensors
from torch_lawa.offline.inspect.inspection import inspect_checkpoint
from torch_lawa.offline.matching import PlannedTensor, match_tensors
from torch_lawa.offline.options import DEFAULTS, AverageOptions, check_threads
from torch_lawa.offline.output_files import SafetensorsSink, writing
from torch_lawa.offline.plan import Input, plan_opened
from torch_lawa.offline.sweep_plan import SweepPlan, SweepWindow, plan_sweep
from torch_lawa.offline.sweep_rows import Evaluator, evaluate, newest_checkpoint, without_known
from torch_lawa.offline.threads import Meter, Stopped, default_threads, in_threads

__all__ = ["run_sweep", "sweep_checkpoints"]

_RESULTS = 1 << 22  # bytes of the results of all windows in memory at a time, per thread
_SHARE_OF_DISK = 0.5
_OPEN_FILES = 256  # a system may allow a process no more than a thousand


def sweep_checkpoints(
    inputs: Input | Sequence[Input],
    ks: Sequence[int] = (),
    *,
    horizons: Sequence[float] = (),
    evaluator: Evaluator | None = None,
    metrics: str | os.PathLike[str] | None = None,
    output: Input | None = None,
    at: Sequence[int] | None = None,
    start: int | None = None,
    stop: int | None = None,
    every: int | None = None,
    threads: int | None = None,
    options: AverageOptions = DEFAULTS,
) -> list[Row]:
    """Plan a sweep and run it: `plan_sweep` and `run_sweep` in one call.

    >>> import tempfile, torch
    >>> from torch_lawa.checkpoints.formats.safetensors_torch import save_tensors
    >>> run = Path(tempfile.mkdtemp())
    >>> for step in (100, 200, 300):
    ...     save_tensors(run / f"step_{step}.safetensors", {"w": torch.full((2,), float(step))})
    >>> rows = sweep_checkpoints(run, [2, 3], evaluator=lambda state: {"w": state["w"][0].item()})
    >>> [(row["step"], row["k"], row["w"]) for row in rows]
    [(200, 2, 150.0), (300, 2, 250.0), (300, 3, 200.0)]
    """
    plan = plan_sweep(
        inputs,
        ks,
        horizons=horizons,
        at=at,
        start=start,
        stop=stop,
        every=every,
        options=options,
    )
    return run_sweep(plan, evaluator=evaluator, metrics=metrics, output=output, threads=threads)


def run_sweep(
    plan: SweepPlan,
    *,
    evaluator: Evaluator | None = None,
    metrics: str | os.PathLike[str] | None = None,
    output: Input | None = None,
    scratch: Path | None = None,
    labels: Mapping[str, Any] | None = None,
    threads: int | None = None,
    meter: Meter | None = None,
    on_row: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Average every window; evaluate the results, write them to the folder `output`, or both.

    Rows that `metrics` already has and results that `output` already has are not computed again,
    so an interrupted sweep can be resumed. Rows of another run's checkpoints are refused.
    """
    check_threads(threads)
    if evaluator is None and output is None:
        raise ConfigError("a sweep needs an evaluator, an output folder, or both.")
    if evaluator is not None and output is not None and not parse_output(output).local:
        raise ConfigError(
            f"{output}: results to evaluate must be local files. Write them to a path, or sweep "
            "twice: once with the evaluator and once for the URL."
        )
    meter = meter or Meter()
    metrics = None if metrics is None else Path(metrics)
    todo = without_known(plan, metrics)
    rows: list[Row] = []
    facts = {**(labels or {}), "coefficients": plan.coefficients}
    writer = None
    with ExitStack() as stack:
        if metrics is not None:
            stack.enter_context(_writable(metrics))
        if output is None:
            base = Path(scratch or tempfile.gettempdir(), "lawa-sweep")
            folder: Location = LocalPath(stack.enter_context(staging(base, mode=0o700)))
        else:
            folder = parse_output(output)
            if isinstance(folder, LocalPath):
                _refuse_beside(folder.path, plan)
                recover_all(folder.path)  # also of windows that are not asked for again
        locations = {w: folder.child(f"{w.name}.safetensors") for w in todo}
        made = [w for w in todo if output is not None and _is_made(plan, w, locations[w])]
        known = set(made)
        left = [w for w in todo if w not in known]
        batches = list(_batches(left, plan, folder, keep=output is not None))
        meter.total = sum(len(_needed(batch)) for batch in batches) * plan.result_bytes
        for batch in (made, *batches):
            if batch is not made:
                _make(plan, batch, locations, threads, meter)
            for window in batch if evaluator else ():
                if meter.stopped:
                    raise Stopped
                newest = {"checkpoint": newest_checkpoint(plan, window, metrics)} if metrics else {}
                row = evaluate(evaluator, locations[window], window, facts | newest)  # type: ignore[arg-type]
                rows.append(row)
                if metrics is not None:
                    writer = writer or stack.enter_context(MetricsWriter(metrics))
                    writer.write(row)
                if on_row:
                    on_row(row)
                if output is None:
                    Path(str(locations[window])).unlink()
    return rows


@contextmanager
def _writable(metrics: Path) -> Iterator[None]:
    """Raise before the work if rows cannot be written; the first row creates the file.

    An empty file is not removed afterwards, because another sweep may have it open.
    """
    with making(metrics.parent):
        if not os.access(metrics if metrics.exists() else metrics.parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(metrics))
        yield


def _refuse_beside(folder: Path, plan: SweepPlan) -> None:
    """Refuse to write beside the checkpoints, where averages would be read as more of them."""
    run = folder.resolve()
    if any(
        isinstance(f.location, LocalPath) and f.location.path.parent.resolve() == run
        for f in plan.found
    ):
        raise OutputError(
            f"{folder}: has the checkpoints of the run, and averages in it would be read as more "
            f"of them. Write to another folder, such as {run.with_name(run.name + '-averaged')}."
        )


def _is_made(plan: SweepPlan, window: SweepWindow, location: Location) -> bool:
    """Whether `location` is already the mean of this window, by its provenance, tensors and date.

    False where nothing exists; anything else there is refused.
    """
    if not location.exists():
        return False
    found = [plan.found[at] for at in window.positions]
    weights = weights_at(plan.options.rule, [checkpoint.step for checkpoint in found])
    inputs = [
        (str(f.location), f.step, f.epoch, w / weights.divisor)
        for f, w in zip(found, weights.numerators, strict=True)
    ]
    expected = plan.coefficients, plan.options.key, inputs, plan.tensors
    if _contents(location) != expected or not _is_newer(location, found):
        raise OutputError(
            f"{location}: already exists, and is not the mean of these checkpoints as they are "
            "now. Remove it, or write elsewhere."
        )
    return True


def _contents(location: Location) -> tuple[object, ...]:
    try:
        existing = inspect_checkpoint(str(location))
    except FormatError:
        return ()
    made = existing.provenance or {}
    columns = ("path", "step", "epoch", "weight")
    rows = [row for row in made.get("inputs") or [] if isinstance(row, dict)]
    inputs = [tuple(row.get(column) for column in columns) for row in rows]
    return made.get("coefficients"), made.get("key"), inputs, existing.tensors


def _is_newer(location: Location, found: Sequence[FoundCheckpoint]) -> bool:
    """Whether a result was written after all of its inputs; unknown, so False, on a server."""
    if not isinstance(location, LocalPath):
        return False
    written = location.path.stat().st_mtime_ns
    return all(
        isinstance(f.location, LocalPath) and _last_written(f.location.path) <= written
        for f in found
    )


def _last_written(path: Path) -> int:
    files = [path, *path.iterdir()] if path.is_dir() else [path]
    return max(file.stat().st_mtime_ns for file in files)


def _batches(
    windows: Sequence[SweepWindow], plan: SweepPlan, folder: Location, *, keep: bool
) -> Iterator[list[SweepWindow]]:
    """As many results at a time as the disk and the limit of open files allow."""
    limit = _OPEN_FILES
    if not keep and isinstance(folder, LocalPath):
        stat = os.statvfs(folder.path)
        room = stat.f_bavail * stat.f_frsize * _SHARE_OF_DISK
        limit = max(1, min(limit, int(room // max(1, plan.result_bytes))))
    for start in range(0, len(windows), limit):
        yield list(windows[start : start + limit])


def _needed(batch: Sequence[SweepWindow]) -> list[int]:
    """The indices of the checkpoints of a batch, each once."""
    return sorted({at for window in batch for at in window.positions})


def _make(
    plan: SweepPlan,
    batch: Sequence[SweepWindow],
    locations: Mapping[SweepWindow, Location],
    threads: int | None,
    meter: Meter,
) -> None:
    """Make all results of a batch in one pass over the checkpoints that they need."""
    needed = _needed(batch)
    index = {at: i for i, at in enumerate(needed)}
    with ExitStack() as stack:
        opened = [
            stack.enter_context(open_checkpoint(plan.found[at].location, key=plan.options.key))
            for at in needed
        ]
        match_tensors(opened, plan.options)  # also those that are in no window together
        plans = [
            plan_opened(
                [plan.found[at] for at in w.positions],
                [opened[index[at]] for at in w.positions],
                locations[w],
                plan.options,
            )
            for w in batch
        ]
        sinks = [stack.enter_context(writing(p.output, metadata_of(p), p.aliases)) for p in plans]
        windows = [
            (range(index[w.positions[0]], index[w.end] + 1), p.weights)
            for w, p in zip(batch, plans, strict=True)
        ]
        tensors = plans[0].output.shards[0].tensors
        widest = max((value_width(t.target.dtype) for t in tensors), default=8)
        length = min(PIECE, max(1 << 12, _RESULTS // (len(batch) * widest)))
        work = _Pass(opened, windows, sinks, length, meter).run
        with refusing_changes(opened):
            pieces = cut_spans(whole_tensors(tensors), length)
            in_threads(threads or default_threads(opened), pieces, work, meter)


@dataclass(frozen=True)
class _Pass:
    """A pass over open checkpoints, in which all windows are averaged into their sinks."""

    opened: Sequence[Checkpoint]
    windows: Sequence[tuple[range, Weights]]  # indices in `opened`
    sinks: Sequence[SafetensorsSink]
    length: int  # values of a piece
    meter: Meter

    def run(self, todo: Iterator[tuple[PlannedTensor, int, int]]) -> None:
        """Average the pieces `todo`, in one thread."""
        pieces = make_pieces(self.length)
        for tensor, first, last in todo:
            width = value_width(tensor.source.dtype)
            begin, end = first * width, last * width
            self.meter.add((end - begin) * len(self.opened))
            results = self._newest if tensor.rule == "newest" else self._means
            at = first * value_width(tensor.target.dtype)
            for sink, made in zip(self.sinks, results(pieces, tensor, begin, end), strict=True):
                sink.write(tensor.name, at, made)

    def _means(self, pieces: Pieces, tensor: PlannedTensor, *span: int) -> Iterator[Bytes]:
        raws = (read_piece(c, tensor.name, *span) for c in self.opened)
        return pieces.means(raws, self.windows, tensor.source.dtype, tensor.target.dtype)

    def _newest(self, pieces: Pieces, tensor: PlannedTensor, *span: int) -> Iterator[Bytes]:
        code, target, single = tensor.source.dtype, tensor.target.dtype, Uniform().weights(1)
        for at, _ in self.windows:
            raw = read_piece(self.opened[at[-1]], tensor.name, *span)
            # A copy: the system cannot write from a mapping that has lost its file.
            yield raw.copy() if code == target else pieces.mean([raw], single, code, target)
