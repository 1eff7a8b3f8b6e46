"""Who has come: the processes of a group wait for each other before they exchange anything.

A collective that one process does not come to ends, after minutes, in an error that does not say
whose fault it was; with NCCL it ends the process. So where this library lets processes exchange
something, each first says where it is, in the store of strings through which the group was made.
That works with any backend, asks nothing of a GPU and takes about a millisecond; it is for
rare moments (an evaluation, a checkpoint), not for every step.

Every process numbers its calls, so number 7 is the same call everywhere as long as all do the
same; where they do not, both places are told. The verdict on a call is written once: by the last
that comes, or by the first that has waited too long. One that comes later reads it, too.
"""

import contextlib
import functools
import json
import os
import socket
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torch_lawa.errors import RankError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["absence_explained", "roll_call"]

_SHARE = 0.9  # of the group's timeout, at which NCCL would end a process before it can speak
_AFTERWARDS = 5.0  # seconds in which all have noticed the same failure; torchrun gives them 30
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.05  # seconds between two looks at the store
_LOOK_AROUND = 0.5  # seconds between two looks whether the processes of this machine live
_MANY = 8


def roll_call(where: str, group: "ProcessGroup | None" = None) -> None:
    """Return when every process of a group has come to `where`; else say which one did not.

    The group is that of all processes by default. It waits a little less than the group's timeout.
    """
    group = group if group is not None else torch.distributed.group.WORLD
    if group is None or torch.distributed.get_rank(group) < 0:
        return
    try:
        verdict = _call(group, where, _SHARE * _timeout(group))
    except torch.distributed.DistError as error:
        raise RankError(
            f"the store of the process group does not answer at {where} ({_first_line(error)}): "
            "the process that keeps it, rank 0 or torchrun, has probably ended. Look there, and "
            "start again from the last checkpoint."
        ) from error
    if verdict["absent"]:
        raise RankError(_absence(verdict))
    if len(verdict["places"]) > 1:
        raise RankError(
            f"the processes are at different places: {_places(verdict)}. All of them must make the "
            "same calls in the same order: look for a condition that depends on the rank, or on a "
            "value that differs between ranks."
        )


@contextlib.contextmanager
def absence_explained() -> Iterator[None]:
    """Where a collective inside the block fails, say which processes do not answer any more.

    All that do are here a moment later: the same failure, or the same timeout, sent them.
    """
    try:
        yield
    except RuntimeError as error:
        group = torch.distributed.group.WORLD
        if group is None or not _of_an_exchange(error):
            raise
        verdict: dict[str, Any] = {"absent": {}}
        with contextlib.suppress(torch.distributed.DistError):  # the store is gone as well
            verdict = _call(group, "a roll call after a failed exchange", _AFTERWARDS)
        if not verdict["absent"]:
            raise
        raise RankError(_absence(verdict)) from error


def _call(group: "ProcessGroup", where: str, seconds: float) -> dict[str, Any]:
    """Answer one call; the verdict on it."""
    ranks = torch.distributed.get_process_group_ranks(group)
    store = _store(group)
    if store is None or len(ranks) == 1:
        return {"absent": {}, "places": {where: ranks}}
    me = torch.distributed.get_rank()
    number = store.add(f"{me}.calls", 1)
    store.set(f"{number}.{me}", json.dumps({"where": where, **_this_process()}))
    if store.add(f"{number}.here", 1) == len(ranks):
        verdict = _decide(store, number, ranks, ranks, seconds)
    elif _appears(store, number, ranks, seconds):
        verdict = json.loads(store.get(f"{number}.verdict"))
    else:
        came = [rank for rank in ranks if store.check([f"{number}.{rank}"])]
        verdict = _decide(store, number, ranks, came, seconds)
    # Nobody reads of the call before the last any more: all have come to the last one.
    mine = ["here", "verdict"] if me == ranks[0] else []
    with contextlib.suppress(torch.distributed.DistError):  # who keeps the store may have left
        for name in (str(me), *mine):
            store.delete_key(f"{number - 2}.{name}")
    return verdict


def _decide(
    store: Any, number: int, ranks: Sequence[int], came: Sequence[int], seconds: float
) -> dict[str, Any]:
    """Who is absent, and where the others are; what was decided first holds for all."""
    last = {**_words(store, number - 1, set(ranks) - set(came)), **_words(store, number, came)}
    ended = [rank for rank, words in last.items() if _has_ended(words)]
    absent = {rank: last.get(rank) for rank in ranks if rank not in came or rank in ended}
    places: dict[str, list[int]] = {}
    for rank in came:
        places.setdefault(last[rank]["where"], []).append(rank)
    verdict = {"absent": absent, "ended": ended, "places": places, "seconds": seconds}
    written = store.compare_set(f"{number}.verdict", "", json.dumps(verdict))
    decided: dict[str, Any] = json.loads(written)
    return decided


def _appears(store: Any, number: int, ranks: Sequence[int], seconds: float) -> bool:
    """Whether there is a verdict in time, and before a process of this machine has ended.

    It looks again and again: `store.wait` would keep Ctrl-C and other users of the store waiting.
    """
    begin = time.monotonic()
    pause, next_look = _FIRST_PAUSE, begin + _LOOK_AROUND
    neighbours: list[dict[str, Any]] | None = None
    while not store.check([f"{number}.verdict"]):
        now = time.monotonic()
        if now > begin + seconds:
            return False
        if now > next_look:
            if neighbours is None:
                known = _words(store, number - 1, ranks).values()
                neighbours = [words for words in known if words["machine"] == _machine()]
            if any(map(_has_ended, neighbours)):
                return False
            next_look = now + _LOOK_AROUND
        time.sleep(pause)
        pause = min(1.3 * pause, _LONGEST_PAUSE)
    return True


def _words(store: Any, number: int, ranks: Collection[int]) -> dict[int, dict[str, Any]]:
    """What ranks said at a call, of those that came."""
    keys = {rank: f"{number}.{rank}" for rank in ranks}
    if not keys or not store.check(list(keys.values())):  # all of them, in one question
        keys = {rank: key for rank, key in keys.items() if store.check([key])}
    said = store.multi_get(list(keys.values())) if keys else []
    return {rank: json.loads(words) for rank, words in zip(keys, said, strict=True)}


def _this_process() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": socket.gethostname(), "machine": _machine()}


@functools.cache
def _machine() -> str | None:
    """Where process numbers mean the same: one machine since its start, one container."""
    try:
        start = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{start} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return None


def _has_ended(process: dict[str, Any]) -> bool:
    """Whether a process of this machine is known to be no more, or only its entry is."""
    if process["machine"] is None or process["machine"] != _machine():
        return False
    try:
        state = Path(f"/proc/{process['pid']}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    return state in ("Z", "X")


def _store(group: "ProcessGroup") -> Any:
    """A corner of the store through which the group was made; None where there is none (MPI)."""
    store = _whole_store(group)
    return None if store is None else torch.distributed.PrefixStore("torch_lawa", store)  # type: ignore[attr-defined]


def _whole_store(group: "ProcessGroup") -> Any:
    return torch.distributed.distributed_c10d._get_process_group_store(group)


def _timeout(group: "ProcessGroup") -> float:
    """In seconds. Not every backend tells its own; the store has that of all processes."""
    backends = [group._get_backend(device) for device in group._device_types]
    told = [getattr(getattr(b, "options", None), "_timeout", None) for b in backends]
    known = [timeout for timeout in told if timeout is not None]
    timeout = min(known) if known else _whole_store(group).timeout
    return float(timeout.total_seconds())


def _of_an_exchange(error: RuntimeError) -> bool:
    """Whether it comes of processes that did not reach each other: gloo's have no class."""
    words = ("gloo", "NCCL", "pair closure", "Connection ")
    return isinstance(error, torch.distributed.DistError) or any(w in str(error) for w in words)


def _absence(verdict: dict[str, Any]) -> str:
    """Of those that are known to have ended where there are any: the rest may wait for them."""
    absent = {int(rank): last for rank, last in verdict["absent"].items()}
    ended = verdict["ended"]
    blamed = {rank: absent[rank] for rank in ended or absent}
    places = list(verdict["places"])
    place = places[0] if len(places) == 1 else f"the others ({_places(verdict)})"
    before = [
        f"Rank {rank} was last at {last['where']} (pid {last['pid']} on {last['host']})."
        for rank, last in blamed.items()
        if last
    ]
    who = f"{_ranks(blamed)} of {torch.distributed.get_world_size()}"
    if ended:
        what = f"ended and did not come to {place}: killed, or out of memory?"
    else:
        what = (
            f"did not come to {place} within {verdict['seconds']:.3g} s: killed, standing still, "
            "or not making this call at all?"
        )
    told = " ".join([f"{who} {what}", *before[:_MANY]])
    return f"{told} Look there, and start again from the last checkpoint."


def _places(verdict: dict[str, Any]) -> str:
    return "; ".join(f"{_ranks(at)} at {place}" for place, at in verdict["places"].items())


def _ranks(ranks: Sequence[int] | dict[int, Any]) -> str:
    named = [str(rank) for rank in ranks]
    if len(named) > _MANY:
        return f"ranks {', '.join(named[:_MANY])}, ... ({len(named)} of them)"
    return f"rank{'s' if len(named) > 1 else ''} {', '.join(named)}"


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
