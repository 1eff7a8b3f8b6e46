"""A barrier that names the rank that is missing, or that is at a different call.

A collective that one rank never joins fails after minutes, with an error that does not say which
rank it was; NCCL ends the whole process. So before ranks exchange anything, each writes where it is
to the key-value store through which its process group was created. This works with every backend,
needs no GPU and takes about a millisecond. It is for rare events (an evaluation, a checkpoint), not
for every step.

Every rank numbers its calls, so call 7 is the same call on all ranks as long as they make the same
calls. The verdict on a call is written once: by the last rank to arrive, or by the first that has
waited too long. A rank that arrives later reads the same verdict.
"""

import contextlib
import functools
import json
import os
import socket
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torch_lawa.errors import RankError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Members", "barrier", "exchange", "explain_missing_ranks", "heartbeat_key"]

_SHARE = 0.9  # of the group's timeout, at which NCCL would end a process before it can report
_AFTER_FAILURE = 5.0  # seconds in which all have noticed the same failure; torchrun gives them 30
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.05  # seconds between two looks at the store
_LIVENESS_PAUSE = 0.5  # seconds between two checks of whether the other ranks are alive
_MANY = 8


@dataclass(frozen=True)
class Members:
    """The ranks that synchronise, and the store that connects them."""

    store: Any
    ranks: Sequence[int]
    rank: int
    world_size: int
    heartbeats: bool = False  # whether each changes its `heartbeat_key` for as long as it is alive


def heartbeat_key(rank: int) -> str:
    """Where a rank shows that it is alive."""
    return f"heartbeat.{rank}"


def barrier(where: str, group: "ProcessGroup | None" = None) -> None:
    """Return when every rank of a group has reached `where`; else raise, naming the missing ones.

    The default group is that of all ranks. A little less than the group's timeout is waited.
    """
    group = group if group is not None else torch.distributed.group.WORLD
    if group is not None and torch.distributed.get_rank(group) >= 0:
        members = _members(group)
        if members is not None:
            exchange(members, where, _SHARE * _timeout(group))


def exchange(members: Members, where: str, seconds: float, value: str = "") -> list[str]:
    """The barrier itself; each rank may bring a value, and gets those of all, by rank.

    A rank gives up on another that has not arrived after `seconds`; where ranks have heartbeats,
    after as many seconds without one. An empty `where` fits every other: a rank that has failed
    uses it.
    """
    try:
        verdict, number = _call(members, where, seconds, value)
        if verdict["absent"]:
            raise RankError(_describe_absence(verdict))
        if len(verdict["locations"]) > 1:
            raise RankError(
                f"the ranks are at different calls: {_places(verdict)}. All ranks must make the "
                "same calls in the same order: look for a condition that depends on the rank, or "
                "on a value that differs between ranks."
            )
        if not value:
            return []
        return [
            text.decode()
            for text in members.store.multi_get([f"{number}.{r}.value" for r in members.ranks])
        ]
    except torch.distributed.DistError as error:
        raise RankError(
            f"the store of the process group does not answer at {where or 'an error'} "
            f"({_first_line(error)}): the process that hosts it, rank 0 or torchrun, has probably "
            "ended. Look at its output, and start again."
        ) from error


@contextlib.contextmanager
def explain_missing_ranks(where: str = "a collective") -> Iterator[None]:
    """If a collective inside the block fails, name the ranks that no longer answer.

    Those that do arrive here a moment later, with the same failure or the same timeout.
    """
    try:
        yield
    except RuntimeError as error:
        group = torch.distributed.group.WORLD
        if group is None or not _is_communication(error):
            raise
        members = _members(group)
        verdict: dict[str, Any] = {"absent": {}}
        with contextlib.suppress(torch.distributed.DistError):  # the store is gone as well
            if members is not None:
                after = f"the barrier after {where} failed"
                verdict, _ = _call(members, after, _AFTER_FAILURE)
        if not verdict["absent"]:
            raise
        raise RankError(_describe_absence(verdict)) from error


def _call(
    members: Members, where: str, seconds: float, value: str = ""
) -> tuple[dict[str, Any], int]:
    """Arrive at the next call; the verdict on it, and its number."""
    store, ranks, me = members.store, members.ranks, members.rank
    number = store.add(f"{me}.calls", 1)
    if value:
        store.set(f"{number}.{me}.value", value)
    store.set(f"{number}.{me}", json.dumps({"where": where, **_this_process()}))
    if store.add(f"{number}.arrived", 1) == len(ranks):
        verdict = _decide(members, number, (), seconds)
    else:
        lost = _wait(members, number, seconds)
        if lost is None:
            verdict = json.loads(store.get(f"{number}.verdict"))
        else:
            verdict = _decide(members, number, lost, seconds)
    # No rank reads anything of the call before the last any more: all have arrived at the last.
    mine = [str(me), f"{me}.value", *(["arrived", "verdict"] if me == ranks[0] else [])]
    with contextlib.suppress(torch.distributed.DistError):  # the store may have ended by now
        for name in mine:
            store.delete_key(f"{number - 2}.{name}")
    return verdict, number


def _wait(members: Members, number: int, seconds: float) -> set[int] | None:
    """Wait for the verdict: None when it is there, else the ranks to give up on.

    That is after `seconds`, or at once if a process of this machine has ended. The store is polled:
    `store.wait` would block Ctrl-C and the other threads that use the store.
    """
    store, ranks = members.store, members.ranks
    begin = time.monotonic()
    heard, beats = dict.fromkeys(ranks, begin), dict[int, bytes]()
    pause, next_check = _FIRST_PAUSE, begin + _LIVENESS_PAUSE
    neighbours: dict[int, dict[str, Any]] | None = None
    while not store.check([f"{number}.verdict"]):
        now = time.monotonic()
        if now > next_check:
            next_check = now + _LIVENESS_PAUSE
            if neighbours is None:
                known = _words(store, number - 1, ranks)
                neighbours = {r: w for r, w in known.items() if w["machine"] == _machine()}
            ended = {rank for rank, words in neighbours.items() if _has_ended(words)}
            if ended:
                return ended
            if members.heartbeats:
                for rank, beat in _read(store, {r: heartbeat_key(r) for r in ranks}).items():
                    if beats.get(rank) != beat:
                        beats[rank], heard[rank] = beat, now
        lost = {rank for rank, when in heard.items() if now - when > seconds}
        if lost:
            arrived = set(_words(store, number, ranks))
            if lost - arrived or len(arrived) == len(ranks):
                return lost
        time.sleep(pause)
        pause = min(1.3 * pause, _LONGEST_PAUSE)
    return None


def _decide(members: Members, number: int, lost: Collection[int], seconds: float) -> dict[str, Any]:
    """Which ranks are absent, and where the others are; the first verdict holds for all ranks."""
    store, ranks = members.store, members.ranks
    arrived = _words(store, number, ranks)
    last = {**_words(store, number - 1, set(ranks) - set(arrived)), **arrived}
    ended = [rank for rank, words in last.items() if _has_ended(words)]
    absent = ended or [rank for rank in ranks if rank in lost and rank not in arrived]
    locations: dict[str, list[int]] = {}
    for rank, words in arrived.items():
        if words["where"]:
            locations.setdefault(words["where"], []).append(rank)
    verdict = {
        "absent": {rank: last.get(rank) for rank in absent},
        "ended": bool(ended),
        "locations": locations,
        "seconds": seconds,
        "world_size": members.world_size,
    }
    written = store.compare_set(f"{number}.verdict", "", json.dumps(verdict))
    decided: dict[str, Any] = json.loads(written)
    return decided


def _words(store: Any, number: int, ranks: Collection[int]) -> dict[int, dict[str, Any]]:
    """What the ranks wrote at a call, of those that have arrived."""
    read = _read(store, {rank: f"{number}.{rank}" for rank in ranks})
    return {rank: json.loads(words) for rank, words in read.items()}


def _read(store: Any, keys: Mapping[int, str]) -> dict[int, bytes]:
    """What is stored under keys, of those that exist: reading one that does not would block."""
    if not keys or not store.check(list(keys.values())):  # all of them, in one request
        keys = {rank: key for rank, key in keys.items() if store.check([key])}
    return dict(zip(keys, store.multi_get(list(keys.values())), strict=True)) if keys else {}


def _this_process() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": socket.gethostname(), "machine": _machine()}


@functools.cache
def _machine() -> str | None:
    """Identifies where process ids are unique: one machine since it booted, one container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return None


def _has_ended(process: Mapping[str, Any]) -> bool:
    """Whether a process of this machine is known to have ended, or is a zombie."""
    if process["machine"] is None or process["machine"] != _machine():
        return False
    try:
        state = Path(f"/proc/{process['pid']}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    return state in ("Z", "X")


def _members(group: "ProcessGroup") -> Members | None:
    """The ranks of a group; None if there is nobody to wait for, or no store (MPI)."""
    ranks, store = torch.distributed.get_process_group_ranks(group), _store(group)
    if store is None or len(ranks) == 1:
        return None
    own = torch.distributed.PrefixStore("torch_lawa", store)  # type: ignore[attr-defined]
    return Members(own, ranks, torch.distributed.get_rank(), torch.distributed.get_world_size())


def _store(group: "ProcessGroup") -> Any:
    return torch.distributed.distributed_c10d._get_process_group_store(group)


def _timeout(group: "ProcessGroup") -> float:
    """The timeout of a group in seconds; that of its store if no backend has one."""
    backends = [group._get_backend(device) for device in group._device_types]
    timeouts = [getattr(getattr(b, "options", None), "_timeout", None) for b in backends]
    known = [timeout for timeout in timeouts if timeout is not None]
    timeout = min(known) if known else _store(group).timeout
    return float(timeout.total_seconds())


def _is_communication(error: RuntimeError) -> bool:
    """Whether ranks failed to reach each other: gloo's errors have no class of their own."""
    words = ("gloo", "NCCL", "pair closure", "Connection ")
    return isinstance(error, torch.distributed.DistError) or any(w in str(error) for w in words)


def _describe_absence(verdict: dict[str, Any]) -> str:
    absent = {int(rank): last for rank, last in verdict["absent"].items()}
    locations = list(verdict["locations"])
    location = " or ".join(locations) or "the other ranks"
    who = f"{_ranks(absent)} of {verdict['world_size']}"
    if verdict["ended"]:
        what = f"ended before reaching {location}: killed, or out of memory?"
    else:
        what = (
            f"did not reach {location} within {verdict['seconds']:.3g} s: killed, hanging, or not "
            "making this call at all?"
        )
    before = [
        f"Rank {rank} was last at {last['where'] or 'an error'} (pid {last['pid']} on "
        f"{last['host']})."
        for rank, last in absent.items()
        if last
    ]
    sentences = " ".join([f"{who} {what}", *before[:_MANY]])
    return f"{sentences} Look at its output, and start again."


def _places(verdict: dict[str, Any]) -> str:
    return "; ".join(f"{_ranks(at)} at {location}" for location, at in verdict["locations"].items())


def _ranks(ranks: Collection[int]) -> str:
    named = [str(rank) for rank in ranks]
    if len(named) > _MANY:
        return f"ranks {', '.join(named[:_MANY])}, ... ({len(named)} in all)"
    return f"rank{'s' if len(named) > 1 else ''} {', '.join(named)}"


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
