"""The saved form of an averager: plain containers, numbers and tensors, checked before use."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_lawa.errors import StateError
from torch_lawa.stores.base import Content, Snapshot
from torch_lawa.stores.window import Window

__all__ = ["Saved", "pack", "unpack"]

_VERSION = 1


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
        "version": _VERSION,
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


def unpack(state: Mapping[str, Any]) -> Saved:
    """Check a saved state from end to end; raises before anything was changed."""
    version = state.get("version") if isinstance(state, Mapping) else None
    if version != _VERSION:
        raise StateError(
            f"this is not a saved averager, or one of another version (version {version!r}, "
            f"expected {_VERSION}): pass what averager.state_dict() returned."
        )
    try:
        counters = dict(state["counters"])
        for key in ("num_steps", "num_collected"):
            counters[key] = int(counters[key])
        counters["schedule"], counters["schedule_kind"]
        kept = dict(state["kept"])
        ties = {str(alias): str(name) for alias, name in state["ties"].items()}
        dtypes = {str(name): getattr(torch, dtype) for name, dtype in state["dtypes"].items()}
        contents = [
            Content(Snapshot(int(row["index"]), int(row["step"])), dict(row["tensors"]), kept)
            for row in state["snapshots"]
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StateError(
            f"the saved averager is damaged ({error!r}): load the checkpoint it came from again."
        ) from None
    _check_tensors(contents, dtypes, kept)
    return Saved(counters, contents, dtypes, ties)


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
