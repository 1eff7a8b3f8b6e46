"""An estimate as text of at most 80 columns, and as JSON values."""

import dataclasses
import textwrap
from collections.abc import Iterator
from typing import Any

from torch_lawa.capacity.estimate import Cost, Sizes
from torch_lawa.capacity.fit import Fit, format_seconds, smallest_nu
from torch_lawa.capacity.machine import GIB, RECORD, constants
from torch_lawa.units import format_bytes

__all__ = ["as_dict", "as_text"]

_WHERE = {"host": "in host memory", "device": "on the GPUs", "disk": "on disk"}
_SLIDING_FROM = 16  # the averager keeps a sliding sum from this k on


def as_text(cost: Cost, fit: Fit) -> str:
    """All figures as text, the conclusion last."""
    parts = [
        _head(cost),
        _block("MEMORY", ("per GPU", "per node", "total"), _memory(cost)),
        _block("TIME", ("each",), _time(cost)),
        _block("CHECKPOINT", ("total",), _checkpoint(cost)),
        _constants(cost),
        *(_wrap(note) for note in _notes(cost)),
        _conclusion(cost, fit),
    ]
    return "\n\n".join(parts)


def as_dict(cost: Cost, fit: Fit) -> dict[str, Any]:
    """All figures by name, in bytes and seconds."""
    run = {**dataclasses.asdict(cost.run), "num_nodes": cost.run.num_nodes}
    del run["machine"]
    figures = {
        item.name: _plain(getattr(cost, item.name))
        for item in dataclasses.fields(cost)
        if item.name != "run"
    }
    return {
        "fits": fit.fits,
        "problems": [dataclasses.asdict(problem) for problem in fit.problems],
        "advice": list(fit.advice),
        "run": run,
        "cost": {
            **figures,
            "gpu_left": cost.gpu_left,
            "held_share": cost.held_share,
            "saved_by_sharing": cost.saved_by_sharing,
            "smallest_nu": smallest_nu(cost.run),
        },
        "constants": [
            {**dataclasses.asdict(c), "record": RECORD if c.measured else None}
            for c in constants(cost.run.machine)
        ],
        "notes": list(_notes(cost)),
    }


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if isinstance(value, Sizes) else value


def _head(cost: Cost) -> str:
    run = cost.run
    gpus = f"{run.gpus} GPU{'s' * (run.gpus > 1)}"
    nodes = f"{run.num_nodes} node{'s' * (run.num_nodes > 1)} of {run.gpus_per_node}"
    return (
        f"{run.params:,} parameters in {run.dtype}, {run.sharding.upper()} on {gpus} ({nodes})\n"
        f"A window of k = {run.k} {_WHERE[run.store]}, stored in {run.storage_dtype or run.dtype}"
    )


_Row = tuple[str, tuple[str, ...]]


def _memory(cost: Cost) -> Iterator[_Row]:
    run, machine = cost.run, cost.run.machine
    yield "one snapshot", _sizes(cost.snapshot)
    yield f"the window of {run.k}", _sizes(cost.window)
    copies = f"{machine.state_copies:g} copies of weights"
    yield f"GPU memory: training, {copies}", (format_bytes(cost.gpu_training),)
    kind = "the window" if run.store == "device" else "staging buffer"
    yield f"  averaging: {kind}", (format_bytes(cost.gpu_added),)
    if cost.gpu_swapped:
        yield "  more, while the mean is swapped in", (format_bytes(cost.gpu_swapped),)
    if cost.gpu_left >= 0:
        left = f"  left of {machine.gpu_memory_gib:g} GiB, for activations"
        yield left, (format_bytes(cost.gpu_left),)
    if run.store != "device":
        kind = "the window" if run.store == "host" else "staging buffer"
        yield f"RAM: {kind}", _sizes(cost.host)
        yield "  more, for the result of average()", _sizes(cost.host_result)
        share = cost.host_peak / (machine.host_ram_gib * GIB)
        yield f"  share of {machine.host_ram_gib:g} GiB", ("", _percent(share))
    if run.store == "disk":
        yield f"files: {run.k}, and the one being written", _sizes(cost.disk)


def _time(cost: Cost) -> Iterator[_Row]:
    run = cost.run
    yield "collect blocks Python", (format_seconds(cost.collect_seconds),)
    yield "copy on the GPU, in the training stream", (format_seconds(cost.stream_seconds),)
    if cost.num_locked:
        first = f"first {cost.num_locked} snapshots" if cost.num_locked > 1 else "first snapshot"
        yield f"{first}: page-locking, added", (format_seconds(cost.lock_seconds),)
    if run.store != "device":
        target = "RAM" if run.store == "host" else "RAM and disk"
        yield f"copy to {target}, in the background", (format_seconds(cost.behind_seconds),)
    if cost.write_seconds:
        yield "  of this, writing files", (format_seconds(cost.write_seconds),)
    interval = run.interval_seconds
    if interval is not None:
        yield "time between two snapshots (ν steps)", (format_seconds(interval),)
        yield "  training waits per snapshot", (format_seconds(cost.wait_seconds or 0.0),)
        yield "  share of training time", (_percent(cost.held_share or 0.0),)
    elif run.store != "device":
        nu = smallest_nu(run)
        if nu is not None:
            yield "smallest ν without waiting", (f"{nu} step{'s' * (nu > 1)}",)
    yield f"read the mean of {run.k} into the model", (format_seconds(cost.read_seconds),)


def _checkpoint(cost: Cost) -> Iterator[_Row]:
    yield "weights and optimizer state", (format_bytes(cost.checkpoint_plain),)
    yield "  more, for the window", (format_bytes(cost.checkpoint_window),)
    yield "  time to write the window", (format_seconds(cost.checkpoint_seconds),)
    yield "state_dict() itself", ("no copy",)


def _constants(cost: Cost) -> str:
    lines = ["CONSTANTS"]
    for c in constants(cost.run.machine):
        value = f"{c.value:g} {c.unit}".strip()
        lines.append(f"--{c.name.replace('_', '-'):<16} {value:>13}   {c.source}")
    return "\n".join([*lines, f"H200: measured ({RECORD}). Assumed: give your own value."])


def _notes(cost: Cost) -> Iterator[str]:
    run = cost.run
    if run.sharding == "ddp" and run.gpus_per_node > 1:
        yield (
            "Note: under DDP every rank keeps the whole window. Keeping it once per node would "
            f"save {format_bytes(cost.saved_by_sharing)} per node; that is not implemented."
        )
    if run.k >= _SLIDING_FROM:
        yield (
            f"Note: from k = {_SLIDING_FROM} on, reading the mean after every snapshot keeps a "
            f"sliding sum, which takes {format_bytes(cost.sliding_bytes)} more per GPU in the "
            "window's memory. It is not included above."
        )


def _conclusion(cost: Cost, fit: Fit) -> str:
    if fit.fits:
        text = f"FITS, with {format_bytes(cost.gpu_left)} per GPU left for activations."
        if cost.run.interval_seconds is None and cost.run.store != "device":
            behind = format_seconds(cost.behind_seconds)
            text += (
                f" Snapshots must be at least {behind} apart; give --nu and --step-seconds to "
                "check."
            )
        return _wrap(text)
    lines = ["DOES NOT FIT."]
    lines += [_wrap(f"- {problem.text}.", "  ") for problem in fit.problems]
    if fit.advice:
        lines += [
            "Any one of these options makes it fit:",
            *(f"  {change}" for change in fit.advice),
        ]
    else:
        lines.append("No other store, dtype, k, ν or number of GPUs that was tried makes it fit.")
    return "\n".join(lines)


def _block(title: str, columns: tuple[str, ...], rows: Iterator[_Row]) -> str:
    lines = [_line(title, columns)]
    lines += [_line(label, cells) for label, cells in rows]
    return "\n".join(lines)


def _line(label: str, cells: tuple[str, ...]) -> str:
    return f"{label:<44}{''.join(f'{cell:>11}' for cell in cells)}".rstrip()


def _sizes(size: Sizes) -> tuple[str, ...]:
    return tuple(map(format_bytes, (size.gpu, size.node, size.total)))


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"


def _wrap(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 79, subsequent_indent=indent)
