"""A plan as text of at most 80 columns, and as plain values for programs."""

import dataclasses
import textwrap
from collections.abc import Iterator
from typing import Any

from torch_lawa.capacity.estimate import Bytes, Cost
from torch_lawa.capacity.machine import GIB, RECORD, constants
from torch_lawa.capacity.verdict import Verdict, format_seconds, smallest_nu
from torch_lawa.units import format_bytes

__all__ = ["as_dict", "as_text"]

_WHERE = {"host": "in host memory", "device": "on the GPUs", "disk": "on disk"}
_SLIDING_FROM = 16  # where the averager's "auto" begins to slide


def as_text(cost: Cost, verdict: Verdict) -> str:
    """Everything a person wants to know, the verdict last."""
    parts = [
        _head(cost),
        _block("MEMORY", ("a GPU", "a node", "in all"), _memory(cost)),
        _block("TIME", ("each",), _time(cost)),
        _block("CHECKPOINT", ("in all",), _checkpoint(cost)),
        _constants(cost),
        *(_wrap(note) for note in _notes(cost)),
        _verdict(cost, verdict),
    ]
    return "\n\n".join(parts)


def as_dict(cost: Cost, verdict: Verdict) -> dict[str, Any]:
    """Bytes and seconds by name."""
    run = {**dataclasses.asdict(cost.run), "num_nodes": cost.run.num_nodes}
    del run["machine"]
    figures = {
        item.name: _plain(getattr(cost, item.name))
        for item in dataclasses.fields(cost)
        if item.name != "run"
    }
    return {
        "fits": verdict.fits,
        "problems": [dataclasses.asdict(problem) for problem in verdict.problems],
        "advice": list(verdict.advice),
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
    return dataclasses.asdict(value) if isinstance(value, Bytes) else value


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
    kind = "the window" if run.store == "device" else "one snapshot on its way"
    yield f"  averaging: {kind}", (format_bytes(cost.gpu_added),)
    if cost.gpu_lent:
        yield "  more, while the mean is in the model", (format_bytes(cost.gpu_lent),)
    if cost.gpu_left >= 0:
        left = f"  left of {machine.gpu_memory_gib:g} GiB, for activations"
        yield left, (format_bytes(cost.gpu_left),)
    if run.store != "device":
        kind = "the window" if run.store == "host" else "one snapshot on its way"
        yield f"RAM: {kind}", _sizes(cost.host)
        yield "  more, for what average() returns", _sizes(cost.host_result)
        share = cost.host_peak / (machine.host_ram_gib * GIB)
        yield f"  share of {machine.host_ram_gib:g} GiB", ("", _percent(share))
    if run.store == "disk":
        yield f"files: {run.k} and the one being written", _sizes(cost.disk)


def _time(cost: Cost) -> Iterator[_Row]:
    run = cost.run
    yield "collect holds the caller (Python)", (format_seconds(cost.collect_seconds),)
    yield "copy on the GPU, in training's stream", (format_seconds(cost.stream_seconds),)
    if cost.num_locked:
        first = f"first {cost.num_locked} snapshots" if cost.num_locked > 1 else "first snapshot"
        yield f"{first}: locking memory, more", (format_seconds(cost.lock_seconds),)
    if run.store != "device":
        way = "RAM" if run.store == "host" else "RAM and disk"
        yield f"on its way to {way}, behind training", (format_seconds(cost.behind_seconds),)
    if cost.write_seconds:
        yield "  of this, writing files", (format_seconds(cost.write_seconds),)
    interval = run.interval_seconds
    if interval is not None:
        yield "time between two snapshots (ν steps)", (format_seconds(interval),)
        yield "  training waits at each", (format_seconds(cost.wait_seconds or 0.0),)
        yield "  share of training held by snapshots", (_percent(cost.held_share or 0.0),)
    elif run.store != "device":
        nu = smallest_nu(run)
        if nu is not None:
            yield "smallest ν that nothing waits for", (f"{nu} step{'s' * (nu > 1)}",)
    yield f"read the mean of {run.k} into the model", (format_seconds(cost.read_seconds),)


def _checkpoint(cost: Cost) -> Iterator[_Row]:
    yield "weights and optimizer", (format_bytes(cost.checkpoint_plain),)
    yield "  more, with the window inside", (format_bytes(cost.checkpoint_window),)
    yield "  time to write that", (format_seconds(cost.checkpoint_seconds),)
    yield "state_dict() itself", ("no copy",)


def _constants(cost: Cost) -> str:
    lines = ["CONSTANTS"]
    for c in constants(cost.run.machine):
        value = f"{c.value:g} {c.unit}".strip()
        lines.append(f"--{c.name.replace('_', '-'):<16} {value:>13}   {c.source}")
    return "\n".join([*lines, f"H200: measured, {RECORD}. Assumed: give your own."])


def _notes(cost: Cost) -> Iterator[str]:
    run = cost.run
    if run.sharding == "ddp" and run.gpus_per_node > 1:
        yield (
            "Note: under DDP every rank keeps the whole window. One rank a node keeping it for all "
            f"would save {format_bytes(cost.saved_by_sharing)} a node; that is not implemented."
        )
    if run.k >= _SLIDING_FROM:
        yield (
            f"Note: from k = {_SLIDING_FROM} on, a mean that is read after every snapshot keeps a "
            f"sliding sum: {format_bytes(cost.sliding_bytes)} more for each GPU, where the window "
            "is, not counted above."
        )


def _verdict(cost: Cost, verdict: Verdict) -> str:
    if verdict.fits:
        text = f"FITS, with {format_bytes(cost.gpu_left)} a GPU left for activations."
        if cost.run.interval_seconds is None and cost.run.store != "device":
            behind = format_seconds(cost.behind_seconds)
            text += f" There must be {behind} between two snapshots: --nu and --step-seconds check."
        return _wrap(text)
    lines = ["DOES NOT FIT."]
    lines += [_wrap(f"- {problem.text}.", "  ") for problem in verdict.problems]
    if verdict.advice:
        lines += ["Any one of these would:", *(f"  {change}" for change in verdict.advice)]
    else:
        lines.append("No other store, dtype, k, ν or number of GPUs that was tried would.")
    return "\n".join(lines)


def _block(title: str, columns: tuple[str, ...], rows: Iterator[_Row]) -> str:
    lines = [_line(title, columns)]
    lines += [_line(label, cells) for label, cells in rows]
    return "\n".join(lines)


def _line(label: str, cells: tuple[str, ...]) -> str:
    return f"{label:<44}{''.join(f'{cell:>11}' for cell in cells)}".rstrip()


def _sizes(size: Bytes) -> tuple[str, ...]:
    return tuple(map(format_bytes, (size.gpu, size.node, size.total)))


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"


def _wrap(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 79, subsequent_indent=indent)
