"""The saved form of an averager: plain containers, numbers and tensors, validated on loading.

There are two forms. A *list* of the collected snapshots is for `torch.save`. The other has k
*slots*, newest snapshot first, whose names do not depend on how many are filled. It is for
`torch.distributed.checkpoint`, which loads into what `state_dict` returns and so needs all names
before anything was collected. Sharded tensors are DTensors in slots, and can be loaded on any
number of ranks.
"""

import copy
import io
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from torch_lawa.block_mean import Block, summed_dtype
from torch_lawa.errors import StateError
from torch_lawa.shards import local
from torch_lawa.stores.base import Content, Counters, Snapshot
from torch_lawa.validation import DAMAGE
from torch_lawa.window import SavedWindow, Window

__all__ = ["pack", "pack_slots", "pickled", "unpack", "without_newest"]

_LIST, _SLOTS = 1, 2  # versions


def pack(counters: Counters, window: Window) -> dict[str, Any]:
    """The list form: named tensors per snapshot, for any layout, device or store."""
    contents, block = window.contents(), window.sampled()
    # Samples without a snapshot: names and shapes, to tell frozen tensors from new ones.
    kept = contents[-1].kept if contents else {} if block is None else window.kept.zeros()
    return {
        "version": _LIST,
        "k": window.k,
        "counters": counters,
        "snapshots": [
            {"index": c.snapshot.index, "step": c.snapshot.step, "tensors": dict(c.averaged)}
            for c in contents
        ],
        "kept": dict(kept),
        "dtypes": _dtype_names(window),
        "ties": dict(window.ties),
        "excluded": list(window.excluded),
        **({"block": dict(vars(block))} if block is not None else {}),
    }


def pack_slots(counters: Counters, window: Window) -> dict[str, Any]:
    """The slots form: the same names however much was collected, with zeros in empty slots."""
    contents = window.contents()
    newest = contents[-1].kept if contents else window.kept.zeros()
    slots = [content.averaged for content in reversed(contents)]
    slots += [window.averaged.zeros() for _ in range(window.k - len(slots))]

    def whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        parts = window.shardings
        return {n: parts[n].whole(t) if n in parts else t for n, t in tensors.items()}

    block = window.sampled()
    notes = {
        "counters": counters,
        "snapshots": [[c.snapshot.index, c.snapshot.step] for c in contents],
        "dtypes": _dtype_names(window),
        "ties": dict(window.ties),
        "excluded": list(window.excluded),
        **({"block": [block.count, block.step]} if block is not None else {}),
    }
    return {
        "version": _SLOTS,
        # One string: its entries vary, and separate entries would become keys of the checkpoint.
        "notes": json.dumps(notes),
        "slots": {str(age): whole(tensors) for age, tensors in enumerate(slots)},
        "kept": whole(newest),
        **({} if window.block is None else {"block": whole(_total(window, block))}),
    }


def without_newest(state: Mapping[str, Any], first: int) -> dict[str, Any] | None:
    """A state without the snapshots from index `first` on, and without samples after them.

    None if it has neither. Counters are unchanged. Of the tensors that are not averaged there is
    one copy, which stays.
    """
    slots = state["version"] == _SLOTS
    notes = json.loads(state["notes"]) if slots else state
    rows = notes["snapshots"]
    num_kept = sum((row[0] if slots else row["index"]) < first for row in rows)
    if num_kept == len(rows) and not notes.get("block"):
        return None
    cut = {name: value for name, value in state.items() if name != "block"}
    if not slots:
        return {**cut, "snapshots": rows[:num_kept]}
    notes = {**notes, "snapshots": rows[:num_kept]}
    notes.pop("block", None)
    newest_first = list(state["slots"].values())[len(rows) - num_kept :]
    return {
        **cut,
        "notes": json.dumps(notes),
        "slots": {str(age): tensors for age, tensors in enumerate(newest_first)},
    }


def _total(window: Window, block: Block | None) -> dict[str, Tensor]:
    """The sum of a block, or zeros of its form."""
    if block is not None:
        return block.total
    own = {name: dtype for name, (_, dtype) in window.averaged.signature().items()}
    zeros = window.averaged.zeros()
    return {name: t.to(summed_dtype(own[name])) for name, t in zeros.items()}


def _dtype_names(window: Window) -> dict[str, str]:
    signature = window.averaged.signature()
    return {name: str(dtype).removeprefix("torch.") for name, (_, dtype) in signature.items()}


def unpack(state: Mapping[str, Any], window: Window) -> SavedWindow:
    """Validate a saved state completely; raises before anything is changed.

    The notes of a state in slots are those of one rank. With pipeline stages, ranks have tensors of
    different names: what is not noted of them is taken from the `window`, which is bound to the
    model of this rank.
    """
    version = state.get("version") if isinstance(state, Mapping) else None
    if version not in (_LIST, _SLOTS):
        raise StateError(
            f"this is not the state of an averager (version {version!r}, expected {_LIST} or "
            f"{_SLOTS}): pass what averager.state_dict() returned."
        )
    try:
        notes = state if version == _LIST else json.loads(state["notes"])
        counters: Counters = {
            "num_steps": int(notes["counters"]["num_steps"]),
            "num_collected": int(notes["counters"]["num_collected"]),
            "schedule_kind": str(notes["counters"]["schedule_kind"]),
            "schedule": dict(notes["counters"]["schedule"]),
        }
        kept = {str(name): local(tensor) for name, tensor in state["kept"].items()}
        ties = {str(alias): str(name) for alias, name in notes["ties"].items()}
        excluded = tuple(str(name) for name in notes.get("excluded", ()))
        dtypes = {str(name): _dtype(text) for name, text in notes["dtypes"].items()}
        rows = notes["snapshots"] if version == _LIST else _rows(notes["snapshots"], state["slots"])
        contents = [
            Content(Snapshot(int(row["index"]), int(row["step"])), dict(row["tensors"]), kept)
            for row in rows
        ]
        block = None if window.block is None else _block(state, notes)
        names = contents[-1].averaged if contents else {} if block is None else block.total
        if version == _SLOTS and names and window.seen:
            own = window.averaged.signature()
            dtypes = {n: dtypes[n] if n in dtypes else own[n][1] for n in names}
            ties = {**ties, **window.ties}
            ties = {alias: name for alias, name in ties.items() if name in names or name in kept}
            excluded = tuple(n for n in kept if n in {*excluded, *window.excluded})
    except DAMAGE as error:
        raise StateError(
            f"the saved averager state is damaged ({error!r}): load the checkpoint again."
        ) from None
    _check_tensors(contents, dtypes, kept, block)
    return SavedWindow(contents, dtypes, ties, excluded, kept, block, counters)


def _block(state: Mapping[str, Any], notes: Mapping[str, Any]) -> Block | None:
    """The samples after the newest snapshot; those of the slots form have their facts in notes."""
    if not notes.get("block"):
        return None
    if state is notes:
        count, step, total = (state["block"][name] for name in ("count", "step", "total"))
    else:
        (count, step), total = notes["block"], state["block"]
    if int(count) < 1:
        raise ValueError("a block without samples")
    return Block(int(count), int(step), {str(n): local(tensor) for n, tensor in total.items()})


def pickled(
    make: Callable[..., Any], arguments: dict[str, Any], counters: Counters, window: Window
) -> tuple[Any, ...]:
    """What `__reduce__` returns for an averager that was made with these arguments.

    In the form of one process, which copies shards as they are.
    """
    file = io.BytesIO()
    window.wait()
    torch.save(pack(counters, window), file)
    return _unpickled, (make, copy.deepcopy(arguments), file.getvalue())


def _unpickled(make: Callable[..., Any], arguments: dict[str, Any], state: bytes) -> Any:
    averager = make(**arguments)
    averager.load_state_dict(torch.load(io.BytesIO(state), weights_only=True))
    return averager


def _dtype(text: str) -> torch.dtype:
    found = getattr(torch, text)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"torch.{text} is not a dtype")
    return found


def _rows(snapshots: list[Any], slots: Mapping[str, Mapping[str, Tensor]]) -> list[dict[str, Any]]:
    """Slots as rows, oldest first; the newest ones if there are more snapshots than slots."""
    if snapshots and not slots.get("0"):
        raise StateError(
            f"{len(snapshots)} snapshots were saved, but none was loaded, since the averager did "
            "not know their names. Call averager.bind(model) before "
            "torch.distributed.checkpoint.load."
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
    contents: list[Content],
    dtypes: dict[str, torch.dtype],
    kept: dict[str, Tensor],
    block: Block | None,
) -> None:
    for content in contents:
        where = f"the saved snapshot of step {content.snapshot.step}"
        if set(content.averaged) != set(dtypes):
            odd = sorted(set(content.averaged) ^ set(dtypes))[0]
            raise StateError(
                f"{where}: tensor {odd!r} is not in all snapshots. Load the checkpoint again."
            )
        for name, tensor in content.averaged.items():
            first = contents[0].averaged[name]
            if not isinstance(tensor, Tensor) or tensor.shape != first.shape:
                raise StateError(
                    f"{where}: tensor {name!r} has another shape than in the oldest snapshot. Load "
                    "the checkpoint again."
                )
    if block is not None and (
        set(block.total) != set(dtypes)
        or not all(isinstance(tensor, Tensor) for tensor in block.total.values())
    ):
        raise StateError(
            "the saved samples after the newest snapshot have other tensors than the snapshots. "
            "Load the checkpoint again."
        )
    for name, value in kept.items():
        if not isinstance(value, Tensor):
            raise StateError(f"{name!r} in the saved averager state is not a tensor.")
    indices = [content.snapshot.index for content in contents]
    if indices != sorted(set(indices)):
        raise StateError("the saved snapshots are not in order. Load the checkpoint again.")
