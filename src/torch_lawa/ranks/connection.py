"""Ranks connected by torchrun's key-value store alone: work on files needs no process group.

Values go through the store with the barrier. A thread writes a heartbeat, so that a rank may take
as long as it needs for its share, and stops the work when another rank has failed.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed.rendezvous import rendezvous

from torch_lawa.errors import ConfigError, RankError
from torch_lawa.ranks.agreement import FailTogether
from torch_lawa.ranks.barrier import Members, exchange, heartbeat_key
from torch_lawa.ranks.world import TIMEOUT, World

__all__ = ["Work", "connected"]

_HEARTBEATS = 10  # within the timeout, but at least one per second
_LAST_SECONDS = 5.0  # in which the other ranks read the last values, if rank 0 hosts the store


class Work(Protocol):
    """What a rank does meanwhile."""

    done: int  # bytes
    stopped: bool

    def add(self, num_bytes: int) -> None:
        """Count bytes that another rank has done."""
        ...

    def stop(self) -> None:
        """Stop as soon as possible."""
        ...


@contextlib.contextmanager
def connected(world: World, work: Work) -> Iterator[FailTogether]:
    """Connect the ranks of a job for the duration of the block. Rank 0 counts the work of all."""
    store = _open_store(world)
    ranks = _StoreRanks(world, torch.distributed.PrefixStore("torch_lawa", store), work)  # type: ignore[attr-defined]
    ranks.beat()
    ended = threading.Event()
    thread = threading.Thread(target=ranks.keep_beating, args=(ended,), daemon=True)
    thread.start()
    try:
        ranks.exchange("the start")
        yield ranks
    finally:
        ended.set()
        thread.join()
        ranks.leave()


class _StoreRanks(FailTogether):
    """All ranks of a job, through the store."""

    def __init__(self, world: World, store: Any, work: Work) -> None:
        super().__init__(per_process=True)
        self.rank, self.size = world.rank, world.size
        self._timeout, self._store, self._work = world.timeout, store, work
        self._members = Members(store, range(world.size), world.rank, world.size, heartbeats=True)
        self._num_beats = 0
        self._counted = [0] * world.size
        self._interrupted = False  # whether the work stopped because of another rank

    def _all_gather(self, where: str, value: Any) -> list[Any]:
        """Exchange values as JSON: what comes over the network is data, never code."""
        texts = exchange(self._members, where, self._timeout, json.dumps(value))
        return [json.loads(text) for text in texts]

    def _report(self, problem: str) -> str:
        """Announce a failure; the first one is kept, and makes the other ranks stop."""
        first = problem
        with contextlib.suppress(torch.distributed.DistError):
            first = self._store.compare_set("failed", "", problem).decode()
        return first if self._interrupted else problem

    def _reported(self) -> str:
        """The failure that was announced first, if any."""
        with contextlib.suppress(torch.distributed.DistError):
            if self._store.check(["failed"]):
                return str(self._store.get("failed").decode())
        return ""

    def keep_beating(self, ended: threading.Event) -> None:
        """Beat until `ended`; if the store is gone, the next exchange raises."""
        with contextlib.suppress(torch.distributed.DistError):
            while not ended.wait(min(1.0, self._timeout / _HEARTBEATS)):
                self.beat()
                self._watch()

    def beat(self) -> None:
        """Show that this rank is alive, and how many bytes it has done."""
        self._num_beats += 1
        done = self._work.done - sum(self._counted)
        self._store.set(heartbeat_key(self.rank), f"{self._num_beats} {done}")

    def _watch(self) -> None:
        if self._work.stopped and not self._interrupted:
            self._report(f"rank {self.rank} was stopped by a signal.")
        elif self._store.check(["failed"]):
            self._interrupted = True
            self._work.stop()
        if self.rank == 0:
            for rank in range(1, self.size):
                key = heartbeat_key(rank)
                if self._store.check([key]):
                    done = int(self._store.get(key).split()[1])
                    self._work.add(done - self._counted[rank])
                    self._counted[rank] = done

    def leave(self) -> None:
        """Rank 0 leaves last, if it hosts the store."""
        with contextlib.suppress(torch.distributed.DistError):
            left = self._store.add("left", 1)
            deadline = time.monotonic() + min(_LAST_SECONDS, self._timeout)
            hosting = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
            while hosting and left < self.size and time.monotonic() < deadline:
                time.sleep(0.02)
                left = self._store.add("left", 0)


def _open_store(world: World) -> Any:
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        timeout = timedelta(seconds=world.timeout)
        store, _, _ = next(rendezvous("env://", timeout=timeout))
    except ValueError as error:
        raise ConfigError(
            f"{error}. Start the command with torchrun; for one process unset WORLD_SIZE."
        ) from None
    except torch.distributed.DistError as error:
        raise RankError(
            f"rank {world.rank} of {world.size} found no store at {address}, or not all ranks "
            f"connected to it, within {world.timeout:g} s ({TIMEOUT}): "
            f"{str(error).partition(chr(10))[0]}"
        ) from None
    return store
