"""A task in the background that an interrupt may hit while it starts."""

import threading
import time

import pytest

from torch_lawa.offline.threads import BackgroundTask


def test_a_task_that_was_ended_before_it_began_never_begins() -> None:
    done: list[int] = []
    task = BackgroundTask(lambda: done.append(1))
    task.end()
    task.start()
    assert not task.wait(0.05)
    assert not done


def test_ending_waits_for_a_task_whose_start_was_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`Thread.start` waits for the thread; an interrupt there leaves it running, with no ident."""
    began, done = threading.Event(), []

    def act() -> None:
        began.set()
        time.sleep(0.1)
        done.append(1)  # removes its temporary files

    task = BackgroundTask(act)
    task.start()
    assert began.wait(5)
    monkeypatch.setattr(threading.Thread, "ident", None)
    task.end()
    assert done
