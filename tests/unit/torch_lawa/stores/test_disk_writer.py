"""The thread that writes snapshots: jobs in order, whatever is interrupted."""

import threading

import pytest

from torch_lawa.stores import disk_writer
from torch_lawa.stores.disk_writer import Job, WriterThread


def test_jobs_are_done_in_order_and_once() -> None:
    writer, done = WriterThread(), list[int]()
    jobs = [Job(lambda i=i: done.append(i)) for i in range(5)]  # type: ignore[misc]
    for job in (*jobs, *jobs):
        writer.submit(job)
    jobs[-1].wait()
    assert done == [0, 1, 2, 3, 4]


def test_an_interrupted_start_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor has a thread then that it never ends, and the process hangs at its end."""
    writer, start = WriterThread(), threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        monkeypatch.setattr(threading.Thread, "start", start)
        start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    job, threads = Job(lambda: None), writer._threads
    with pytest.raises(KeyboardInterrupt):
        writer.submit(job)
    writer.submit(job)
    job.wait()
    assert job.done
    del writer
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


def test_a_thread_that_never_started_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    writer, start = WriterThread(), threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        monkeypatch.setattr(threading.Thread, "start", start)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    job = Job(lambda: None)
    with pytest.raises(KeyboardInterrupt):
        writer.submit(job)
    writer.submit(job)
    job.wait()


def test_work_that_is_left_is_done_at_the_end() -> None:
    writer, go, done = WriterThread(), threading.Event(), list[int]()
    writer.submit(Job(lambda: go.wait(10) and None))
    writer.submit(Job(lambda: done.append(1)))
    go.set()
    disk_writer._end(writer._jobs, writer._threads)
    assert done == [1]
