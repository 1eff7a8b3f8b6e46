"""The saved form of an averager: plain containers, numbers and tensors, checked before use.

There are two. A *list* of the snapshots that are there, for `torch.save`. And k *slots*, the
newest snapshot first, whose names do not depend on how many are filled, for
`torch.distributed.checkpoint`: it loads into what `state_dict` returns, so that must have all its
names before anything was collected. Sharded tensors are DTensors in slots, which it loads on any
number of processes.
"""

import copy
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_lawa.errors import StateError
from torch_lawa.shards import local
from torch_lawa.stores.base import Content, Snapshot
from torch_lawa.window import Window

__all__ = ["Saved", "pack", "pack_slots", "pickled", "unpack"]

_LIST, _SLOTS = 1, 2  # versions


@dataclass(frozen=True)
class Saved:
    """A state that was checked."""

    counters: dict[str, Any]
    contents: list[Content]
    dtypes: dict[str, torch.dtype]
    ties: dict[str, str]


def pack(counters: dict[str, Any], window: Window, *, k: int) -> dict[str, Any]:
    """Named tensors, snapshot by snapshot, so that any layout, device or store can load them."""
    contents = window.contents()
    dtypes = {name: dtype for name, (_, dtype) in window.averaged.signature().items()}
    return {
        "version": _LIST,
        "k": k,
        "counters": counters,
        "snapshots": [
            {"index": c.snapshot.index, "step": c.snapshot.step, "tensors": dict(c.averaged)}
            for c in contents
        ],
        "kept": dict(contents[-1].kept) if contents else {},
        "dtypes": {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()},
        "ties": dict(window.ties),
    }


def pack_slots(counters: dict[str, Any], window: Window, *, k: int) -> dict[str, Any]:
    """The same names whatever was collected: k slots, zeros in those that are empty."""
    contents = window.contents()
    newest = contents[-1].kept if contents else window.kept.zeros()
    slots = [content.averaged for content in reversed(contents)]
    slots += [window.averaged.zeros() for _ in range(k - len(slots))]

    def whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        parts = window.shardings
        return {n: parts[n].whole(t) if n in parts else t for n, t in tensors.items()}

    notes = {
        "counters": counters,
        "snapshots": [[c.snapshot.index, c.snapshot.step] for c in contents],
        "dtypes": {
            n: str(d).removeprefix("torch.") for n, (_, d) in window.averaged.signature().items()
        },
        "ties": dict(window.ties),
    }
    return {
        "version": _SLOTS,
        # One text: its entries come and go, and their names would be names of the checkpoint.
        "notes": json.dumps(notes),
        "slots": {str(age): whole(tensors) for age, tensors in enumerate(slots)},
        "kept": whole(newest),
    }


def unpack(state: Mapping[str, Any]) -> Saved:
    """Check a saved state from end to end; raises before anything was changed."""
    version = state.get("version") if isinstance(state, Mapping) else None
    if version not in (_LIST, _SLOTS):
        raise StateError(
            f"this is not a saved averager, or one of another version (version {version!r}, "
            f"expected {_LIST} or {_SLOTS}): pass what averager.state_dict() returned."
        )
    try:
        notes = state if version == _LIST else json.loads(state["notes"])
        counters = dict(notes["counters"])
        for key in ("num_steps", "num_collected"):
            counters[key] = int(counters[key])
        counters["schedule"], _ = dict(counters["schedule"]), counters["schedule_kind"]
        kept = {str(name): local(tensor) for name, tensor in state["kept"].items()}
        ties = {str(alias): str(name) for alias, name in notes["ties"].items()}
        dtypes = {str(name): _dtype(text) for name, text in notes["dtypes"].items()}
        rows = notes["snapshots"] if version == _LIST else _rows(notes["snapshots"], state["slots"])
        contents = [
            Content(Snapshot(int(row["index"]), int(row["step"])), dict(row["tensors"]), kept)
            for row in rows
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StateError(
            f"the saved averager is damaged ({error!r}): load the checkpoint it came from again."
        ) from None
    _check_tensors(contents, dtypes, kept)
    return Saved(counters, contents, dtypes, ties)


def pickled(averager: Any, options: dict[str, Any]) -> tuple[Any, ...]:
    """What `__reduce__` returns for an averager made with these options."""
    file = io.BytesIO()
    torch.save(averager.state_dict(), file)
    return _restored, (type(averager), copy.deepcopy(options), file.getvalue())


def _restored(make: Callable[..., Any], options: dict[str, Any], state: bytes) -> Any:
    averager = make(**options)
    averager.load_state_dict(torch.load(io.BytesIO(state), weights_only=True))
    return averager


def _dtype(text: str) -> torch.dtype:
    found = getattr(torch, text)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"torch.{text} is no dtype")
    return found


def _rows(snapshots: list[Any], slots: Mapping[str, Mapping[str, Tensor]]) -> list[dict[str, Any]]:
    """Slots as rows, oldest first; of more snapshots than there are slots, the newest."""
    if snapshots and not slots.get("0"):
        raise StateError(
            f"{len(snapshots)} snapshots were saved and none was loaded: the averager did not know "
            "their names. Call averager.bind(model) before torch.distributed.checkpoint.load."
        )
    filled = list(enumerate(reversed(snapshots)))[: len(slots)]
    return [
        {
            "index": index,
            "step": step,
            "tensors": {name: local(tensor) for name, tensor in slots[str(age)].items()},
        }
        for age, (index, step) in reversed(filled)
    ]


def _check_tensors(
    contents: list[Content], dtypes: dict[str, torch.dtype], kept: dict[str, Tensor]
) -> None:
    for content in contents:
        where = f"the saved snapshot of step {content.snapshot.step}"
        if set(content.averaged) != set(dtypes):
            odd = sorted(set(content.averaged) ^ set(dtypes))[0]
            raise StateError(f"{where} does not match the others: tensor {odd!r}.")
        for name, tensor in content.averaged.items():
            first = contents[0].averaged[name]
            if not isinstance(tensor, Tensor) or tensor.shape != first.shape:
                raise StateError(f"{where}: tensor {name!r} is missing or has another shape.")
    for name, value in kept.items():
        if not isinstance(value, Tensor):
            raise StateError(f"the saved averager: {name!r} is not a tensor.")
    indices = [content.snapshot.index for content in contents]
    if indices != sorted(set(indices)):
        raise StateError("the saved snapshots are out of order.")
