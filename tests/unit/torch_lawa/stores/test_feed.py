"""Copies in pieces, with a GPU that is made of lists: what is enqueued, by whom, and when."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.interrupts import Interrupt
from torch import Tensor

from torch_lawa.stores import feed
from torch_lawa.stores.feed import Feed

PIECES = 10


class Gpu:
    """A stream whose work is done when the test says so."""

    def __init__(self) -> None:
        self.enqueued = self.done = self.most = 0
        self.moved = threading.Condition()
        self.broken = False

    def record_event(self) -> "Event":
        return Event(self)

    def finish(self, number: int = 10**6) -> None:
        """Do that much of what is enqueued."""
        with self.moved:
            self.done = min(self.done + number, self.enqueued)
            self.moved.notify_all()

    def until(self, condition: Callable[[], bool]) -> None:
        with self.moved:
            assert self.moved.wait_for(condition, timeout=10)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.number = gpu, gpu.enqueued

    def synchronize(self) -> None:
        if self.gpu.broken and threading.current_thread() is not threading.main_thread():
            raise RuntimeError("CUDA error")
        self.gpu.until(lambda: self.gpu.done >= self.number)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    made, copy = Gpu(), Tensor.copy_

    def counted(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        with made.moved:
            copy(target, source)
            made.enqueued += 1
            made.most = max(made.most, made.enqueued - made.done)
            made.moved.notify_all()
        return target

    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(Tensor, "copy_", counted)
    monkeypatch.setattr(feed, "_allow_captures", lambda: True)
    monkeypatch.setattr(feed, "_PIECE", 64)
    yield made
    made.finish()


def pair(pieces: int = PIECES) -> tuple[Tensor, Tensor]:
    values = torch.arange(16.0 * pieces - 3)  # the last piece is shorter
    return torch.full_like(values, -1.0), values


def test_the_thread_enqueues_one_piece_at_a_time(gpu: Gpu) -> None:
    copies = [pair(), pair()]
    made = Feed(gpu, copies)  # type: ignore[arg-type]
    made.start()
    for done in range(2 * PIECES - 1):
        gpu.until(lambda done=done: gpu.enqueued == done + 1)  # type: ignore[misc]
        gpu.finish(1)
    gpu.until(lambda: gpu.enqueued == 2 * PIECES)
    gpu.finish()
    made.wait()
    assert gpu.most == 1
    assert all(torch.equal(target, source) for target, source in copies)


def test_hurry_enqueues_the_rest_and_waits_for_nothing(gpu: Gpu) -> None:
    target, source = pair()
    made = Feed(gpu, [(target, source)])  # type: ignore[arg-type]
    made.start()
    gpu.until(lambda: gpu.enqueued == 1)
    assert not torch.equal(target, source)
    event = made.hurry()
    assert gpu.enqueued == 2  # in one piece: each takes time, and room in a queue
    assert gpu.done == 0
    assert event.number == 2  # type: ignore[attr-defined]
    assert torch.equal(target, source)
    gpu.finish()
    made.wait()
    assert gpu.enqueued == 2


def test_waiting_leaves_room_for_others(gpu: Gpu) -> None:
    made = Feed(gpu, [pair()])  # type: ignore[arg-type]
    made.start()
    waiter = threading.Thread(target=made.wait)
    waiter.start()
    gpu.until(lambda: gpu.enqueued == 1)
    time.sleep(0.05)
    assert gpu.enqueued == 1
    assert waiter.is_alive()
    while waiter.is_alive():
        gpu.finish(1)
    assert gpu.most == 1
    assert gpu.enqueued == PIECES


@pytest.mark.parametrize(
    "copies", [[], [pair(1)], [(torch.zeros(8), torch.ones(8)), (torch.zeros(8), torch.ones(8))]]
)
def test_little_is_enqueued_at_once(gpu: Gpu, copies: list[tuple[Tensor, Tensor]]) -> None:
    made = Feed(gpu, copies)  # type: ignore[arg-type]
    made.start()
    assert gpu.enqueued == len(copies)
    assert made._thread is None
    assert all(torch.equal(target, source) for target, source in copies)


def test_without_a_thread_everything_is_enqueued_at_once(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    made = Feed(gpu, [pair()])  # type: ignore[arg-type]
    made.start()
    assert gpu.enqueued == 1
    assert not made._left


def test_where_captures_cannot_be_allowed_the_thread_waits_for_no_event(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "_allow_captures", lambda: False)
    made = Feed(gpu, [pair()])  # type: ignore[arg-type]
    made.start()
    assert made._thread is not None
    made._thread.join(timeout=10)
    assert gpu.enqueued == 1
    assert gpu.done == 0


def test_a_thread_that_fails_leaves_its_pieces_to_the_caller(gpu: Gpu) -> None:
    target, source = pair()
    gpu.broken = True
    made = Feed(gpu, [(target, source)])  # type: ignore[arg-type]
    made.start()
    assert made._thread is not None
    made._thread.join(timeout=10)
    assert 0 < gpu.enqueued < PIECES
    made.hurry()
    assert torch.equal(target, source)


def test_an_interrupted_piece_is_repeated(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = [pair() for _ in range(6)]
    made = Feed(gpu, copies)  # type: ignore[arg-type]
    copy, calls = Tensor.copy_, []

    def interrupted(*arguments: Any, **options: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return copy(*arguments, **options)

    monkeypatch.setattr(Tensor, "copy_", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.hurry()
    made.hurry()
    assert all(torch.equal(target, source) for target, source in copies)
    assert len(calls) == len(copies) + 1


def test_the_memory_is_dropped_with_the_last_piece(gpu: Gpu) -> None:
    made = Feed(gpu, [pair()])  # type: ignore[arg-type]
    assert made._copies
    made.hurry()
    assert not made._copies


def test_interrupted_anywhere_it_still_copies_everything(gpu: Gpu) -> None:
    def trial(at: int | None) -> Interrupt:
        copies = [pair(3), pair(1)]
        made = Feed(gpu, copies)  # type: ignore[arg-type]
        with contextlib.suppress(KeyboardInterrupt), Interrupt(at, [Path(feed.__file__)]) as place:
            made.start()
            made.hurry()
        gpu.finish()
        made.hurry()
        assert all(torch.equal(target, source) for target, source in copies), place.where
        assert not made._lock.locked(), place.where
        if made._thread is not None and made._thread.ident is not None:
            while made._thread.is_alive():
                gpu.finish()
        return place

    places = trial(None).count
    assert places > 20
    for at in range(1, places + 1):
        trial(at)
