"""Many windows at many steps in one pass: each checkpoint is read once, not once for every k.

A piece of every checkpoint is decoded once and all windows are summed from it. Results that are
only to be evaluated lie in a scratch folder, as many at a time as its disk has room for; windows of
a later batch read again only the checkpoints that they share with the one before.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_lawa.checkpoints.find.select import FoundCheckpoint, find_checkpoints, select
from torch_lawa.checkpoints.formats.registry import open_checkpoint
from torch_lawa.checkpoints.storage.paths import LocalPath, Location, parse_location
from torch_lawa.coefficients import Coefficients, name_coefficients, parse_coefficients
from torch_lawa.errors import ConfigError
from torch_lawa.mean.kernels import PIECE, make_pieces
from torch_lawa.metrics import MetricsWriter, Row, read_metrics
from torch_lawa.offline.average import metadata_of
from torch_lawa.offline.changes import refusing_changes
from torch_lawa.offline.engine import (
    Meter,
    Stopped,
    default_threads,
    in_threads,
    pieces_of,
    read_piece,
    value_width,
)
from torch_lawa.offline.matching import PlannedTensor, match_tensors
from torch_lawa.offline.plan import Input, plan_found, plan_opened
from torch_lawa.offline.reuse import is_made
from torch_lawa.offline.writing import writing
from torch_lawa.units import format_bytes

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Evaluator", "SweepPlan", "Window", "plan_sweep", "run_sweep"]

Evaluator = Callable[["dict[str, Tensor]"], Mapping[str, Any]]

# Bytes of the results of all windows that are in memory at a time, for each thread.
_RESULTS = 1 << 22
_SHARE_OF_DISK = 0.5
_OPEN_FILES = 256  # a system may allow a process no more than a thousand


@dataclass(frozen=True)
class Window:
    """The k checkpoints that end at one of them; k = 1 is that checkpoint itself."""

    k: int
    end: int  # position of the newest among all checkpoints of the sweep
    step: int | None
    epoch: int | None

    @property
    def positions(self) -> range:
        """Of its checkpoints, oldest first."""
        return range(self.end - self.k + 1, self.end + 1)

    @property
    def name(self) -> str:
        """For its file: unique in a sweep, sorted as the run went."""
        number = f"step-{self.step}" if self.step is not None else f"epoch-{self.epoch}"
        return f"{number}-k-{self.k}"


@dataclass(frozen=True)
class SweepPlan:
    """Which windows of which checkpoints. Print it; `run_sweep` runs it."""

    found: tuple[FoundCheckpoint, ...]
    windows: tuple[Window, ...]
    coefficients: str
    rule: Coefficients
    result_bytes: int  # of one result
    notes: tuple[str, ...]
    key: str | None

    def __str__(self) -> str:
        ks = sorted({w.k for w in self.windows})
        ends = sorted({w.end for w in self.windows})
        first, newest = self.found[ends[0]].label, self.found[ends[-1]].label
        lines = [
            f"Sweep of {len(self.found)} checkpoints ({self.coefficients}): "
            f"k = {', '.join(map(str, ks))}, ending at {len(ends)} of them ({first} to {newest}).",
            f"{len(self.windows)} results of {format_bytes(self.result_bytes)}.",
        ]
        return "\n".join([*lines, *(f"Note: {note}" for note in self.notes)])


def plan_sweep(
    run: Input | Sequence[Input],
    ks: Sequence[int],
    *,
    at: Sequence[int] | None = None,
    start: int | None = None,
    stop: int | None = None,
    every: int | None = None,
    coefficients: Coefficients | str = "uniform",
    key: str | None = None,
) -> SweepPlan:
    """Plan windows of each `k` that end at the steps `at` (every checkpoint by default).

    A window is made where all its k checkpoints are there.
    """
    if not ks or min(ks) < 1 or len(set(ks)) != len(ks):
        raise ConfigError(f"k = {list(ks)}: give different whole numbers from 1 on, such as 2,4,6.")
    rule = parse_coefficients(coefficients) if isinstance(coefficients, str) else coefficients
    inputs = [run] if isinstance(run, str | os.PathLike) else list(run)
    chosen = select(find_checkpoints(inputs, key=key), start=start, stop=stop, every=every)
    found = chosen.found
    if chosen.ordered_by == "given":
        raise ConfigError(
            f"{inputs[0]}: a sweep needs checkpoints with steps or epochs (in names or inside)."
        )
    numbers = [f.step if chosen.ordered_by == "step" else f.epoch for f in found]
    missing = [step for step in at or () if step not in numbers]
    if missing:
        raise ConfigError(
            f"there is no checkpoint at {missing[0]}; there are {', '.join(map(str, numbers[:20]))}"
            + (" ..." if len(numbers) > 20 else "")
        )
    by_step = chosen.ordered_by == "step"
    windows = tuple(
        Window(k, end, f.step if by_step else None, f.epoch)
        for end, f in enumerate(found)
        if at is None or numbers[end] in at
        for k in sorted(ks)
        if k <= end + 1
    )
    too_long = [k for k in ks if not any(w.k == k for w in windows)]
    if too_long:
        raise ConfigError(
            f"k = {too_long[0]}: no window has that many checkpoints (there are {len(found)})."
        )
    newest = found[windows[-1].end]
    probe = plan_found([newest], LocalPath("sweep.safetensors"), key=key, rule=rule, name="")
    name = name_coefficients(rule)
    return SweepPlan(tuple(found), windows, name, rule, probe.bytes_written, chosen.notes, key)


def run_sweep(
    plan: SweepPlan,
    *,
    evaluator: Evaluator | None = None,
    metrics: Path | None = None,
    output: Input | None = None,
    scratch: Path | None = None,
    labels: Mapping[str, Any] | None = None,
    threads: int | None = None,
    meter: Meter | None = None,
    on_row: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Make every result; evaluate it, or write it to the folder `output`, or both.

    Rows that `metrics` has already are not made again, nor are results that `output` has, so a
    sweep that was stopped goes on.
    """
    if evaluator is None and output is None:
        raise ConfigError("a sweep needs an evaluator, an output folder, or both.")
    if evaluator is not None and output is not None and not parse_location(output).local:
        raise ConfigError(
            f"{output}: results that are evaluated must lie here; write them to a path, or sweep "
            "once for the evaluator and once for the URL."
        )
    meter = meter or Meter()
    todo = _without_known(plan, metrics)
    rows: list[Row] = []
    facts = {**(labels or {}), "coefficients": plan.coefficients}
    with ExitStack() as stack:
        writer = stack.enter_context(MetricsWriter(metrics)) if metrics else None
        if output is None:
            aside = tempfile.TemporaryDirectory(prefix="lawa-sweep-", dir=scratch)
            folder: Location = LocalPath(stack.enter_context(aside))
        else:
            folder = parse_location(output)
        locations = {w: folder.child(f"{w.name}.safetensors") for w in todo}
        made = [w for w in todo if output is not None and _is_made(plan, w, locations[w])]
        there = set(made)
        left = [w for w in todo if w not in there]
        batches = list(_batches(left, plan, folder, keep=output is not None))
        meter.total = sum(_bytes_read(batch, plan) for batch in batches)
        for batch in (made, *batches):
            if batch is not made:
                _make(plan, batch, locations, threads, meter)
            for window in batch if evaluator else ():
                if meter.stopped:
                    raise Stopped
                row = _evaluate(evaluator, locations[window], window, facts)  # type: ignore[arg-type]
                rows.append(row)
                if writer:
                    writer.write(row)
                if on_row:
                    on_row(row)
                if output is None:
                    Path(str(locations[window])).unlink()
    return rows


def _without_known(plan: SweepPlan, metrics: Path | None) -> list[Window]:
    if metrics is None or not metrics.exists():
        return list(plan.windows)
    known = set()
    for row in read_metrics(metrics):
        how = None if row.get("k") is None else row.get("coefficients")  # a raw one has none
        known.add((row.get("step"), row.get("epoch"), row.get("k"), how))
    return [
        w
        for w in plan.windows
        if (w.step, w.epoch, _k(w), None if w.k == 1 else plan.coefficients) not in known
    ]


def _k(window: Window) -> int | None:
    return None if window.k == 1 else window.k


def _is_made(plan: SweepPlan, window: Window, location: Location) -> bool:
    found = [plan.found[at] for at in window.positions]
    return is_made(location, found, plan.rule.weights(window.k), plan.coefficients, plan.key)


def _batches(
    windows: Sequence[Window], plan: SweepPlan, folder: Location, *, keep: bool
) -> Iterator[list[Window]]:
    """As many results at a time as there is room for, on the disk and in open files."""
    limit = _OPEN_FILES
    if not keep and isinstance(folder, LocalPath):
        stat = os.statvfs(folder.path)
        room = stat.f_bavail * stat.f_frsize * _SHARE_OF_DISK
        limit = max(1, min(limit, int(room // max(1, plan.result_bytes))))
    for start in range(0, len(windows), limit):
        yield list(windows[start : start + limit])


def _needed(batch: Sequence[Window]) -> list[int]:
    """Positions of the checkpoints that take part, each once."""
    return sorted({at for window in batch for at in window.positions})


def _bytes_read(batch: Sequence[Window], plan: SweepPlan) -> int:
    return len(_needed(batch)) * plan.result_bytes


def _make(
    plan: SweepPlan,
    batch: Sequence[Window],
    locations: Mapping[Window, Location],
    threads: int | None,
    meter: Meter,
) -> None:
    """All results of a batch in one pass over the checkpoints that they need."""
    needed = _needed(batch)
    index = {at: i for i, at in enumerate(needed)}
    with ExitStack() as stack:
        opened = [
            stack.enter_context(open_checkpoint(plan.found[at].location, key=plan.key))
            for at in needed
        ]
        match_tensors(opened)  # all of them, also where no window has two of them
        plans = [
            plan_opened(
                [plan.found[at] for at in w.positions],
                [opened[index[at]] for at in w.positions],
                locations[w],
                rule=plan.rule,
                name=plan.coefficients,
                key=plan.key,
            )
            for w in batch
        ]
        sinks = [stack.enter_context(writing(p.output, metadata_of(p), p.aliases)) for p in plans]
        ranges = [range(index[w.positions[0]], index[w.end] + 1) for w in batch]
        windows = [(at, p.weights) for at, p in zip(ranges, plans, strict=True)]
        tensors = plans[0].output.shards[0].tensors
        widest = max((value_width(t.target.dtype) for t in tensors), default=8)
        length = min(PIECE // 2, max(1 << 12, _RESULTS // (len(batch) * widest)))

        def work(todo: Iterator[tuple[PlannedTensor, int, int]]) -> None:
            pieces = make_pieces(length)
            for tensor, first, last in todo:
                code, target = tensor.source.dtype, tensor.target.dtype
                begin, end = first * value_width(code), last * value_width(code)
                meter.add((end - begin) * len(opened))
                if tensor.rule == "newest":
                    for at, sink in zip(ranges, sinks, strict=True):
                        newest = read_piece(opened[at[-1]], tensor.name, begin, end)
                        sink.write(tensor.name, begin, newest)
                    continue
                raws = (read_piece(c, tensor.name, begin, end) for c in opened)
                means = pieces.means(raws, windows, code, target)
                for sink, made in zip(sinks, means, strict=True):
                    sink.write(tensor.name, first * value_width(target), made)

        with refusing_changes(opened):
            in_threads(threads or default_threads(opened), pieces_of(tensors, length), work, meter)


def _evaluate(
    evaluator: Evaluator,
    location: Location,
    window: Window,
    facts: Mapping[str, Any],
) -> Row:
    from torch_lawa.checkpoints.formats.safetensors import read_header
    from torch_lawa.checkpoints.formats.safetensors_torch import load_tensors

    path = Path(str(location))
    began = time.perf_counter()
    state = load_tensors(path, read_header(path))
    with open_checkpoint(location) as made:
        state.update({name: state[kept] for name, kept in made.aliases.items()})
    values = evaluator(state)
    seconds = time.perf_counter() - began
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"the evaluator returned {type(values).__name__}: it must return named values, such as "
            "{'test_loss': 0.1}."
        )
    moment = {"step": window.step, "epoch": window.epoch}
    return {
        **facts,
        **{name: number for name, number in moment.items() if number is not None},
        "weights": "raw" if window.k == 1 else "averaged",
        "k": _k(window),
        "batch_norm": None,
        **{name: _plain(name, value) for name, value in values.items()},
        "evaluate_seconds": seconds,
    }


def _plain(name: str, value: Any) -> float | int | str | None:
    """What a metrics file can hold: of arrays and tensors the one number they are."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(
            f"the evaluator returned {type(value).__name__} as {name!r}: return one number, such "
            "as value.item()."
        ) from None
