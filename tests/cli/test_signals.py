"""Ctrl-C, SIGTERM and SIGHUP during long work."""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import torch

from torch_lawa.cli import main
from torch_lawa.cli.progress import run_with_progress
from torch_lawa.offline.average import run_average
from torch_lawa.offline.plan import plan_average
from torch_lawa.offline.threads import Meter, Stopped, in_threads
from torch_lawa.signals import StopRequest, interruptible

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="sends signals")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_each_of_them_interrupts(number: signal.Signals) -> None:
    with pytest.raises(KeyboardInterrupt), interruptible():
        signal.raise_signal(number)
    before = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    assert signal.getsignal(number) is before


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptible():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_asks_and_the_second_interrupts(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), StopRequest() as stop:
        assert not stop.requested
        signal.raise_signal(number)
        assert stop.event.wait(0)
        signal.raise_signal(number)
    assert stop.requested
    assert signal.getsignal(number) is before


def test_a_launcher_may_repeat_a_signal() -> None:
    with StopRequest(repeat_seconds=0.3) as stop:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)  # no interrupt: it is the same request
        assert stop.requested
        time.sleep(0.35)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_outside_the_main_thread_no_signal_is_handled() -> None:
    """Where Python would refuse to install a handler."""
    before, seen = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with StopRequest(), interruptible():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]


def test_work_ends_after_its_piece_and_is_cleaned_up() -> None:
    meter, cleaned = Meter(), []

    def act() -> None:
        def work(todo: Iterator[int]) -> None:
            for _ in todo:
                time.sleep(0.01)

        try:
            in_threads(2, iter(range(10_000)), work, meter)
        except Stopped:
            cleaned.append(True)
            raise

    timer = threading.Timer(0.2, signal.raise_signal, [signal.SIGTERM])
    timer.start()
    with pytest.raises(click.Abort):
        run_with_progress(act, meter, "", shown=False)
    assert cleaned == [True]


@pytest.mark.parametrize("begun", [False, True])
def test_a_conversion_ends_too(tmp_path: Path, begun: bool) -> None:
    """Before the PyTorch file is begun, and in the middle of it."""
    (tmp_path / "run").mkdir()
    for step in 1, 2:
        values = {f"w{i}": torch.full((50_000,), float(step)) for i in range(8)}
        torch.save(values, tmp_path / f"run/step_{step}.pt")
    written = []

    class InterruptedMeter(Meter):
        def proceed(self) -> None:
            staged = tmp_path.glob("mean.pt.*.partial/new/mean.pt.values")
            written.append(sum(path.with_suffix("").stat().st_size for path in staged))
            if written[-1] >= begun:
                self.stop()
            super().proceed()

    plan = plan_average(tmp_path / "run", tmp_path / "mean.pt", last=2)
    with pytest.raises(Stopped):
        run_average(plan, meter=InterruptedMeter())
    assert (written[-1] > 0) == begun
    assert written[-1] < (tmp_path / "run/step_1.pt").stat().st_size / 2
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_work_that_finishes_all_the_same_is_not_lost() -> None:
    def act() -> int:
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.2)
        return 7

    assert run_with_progress(act, Meter(), "", shown=False) == 7


@pytest.mark.parametrize(("interrupted", "code"), [(True, 130), (False, None)])
def test_an_interrupt_that_an_import_reports_as_its_own_error(
    interrupted: bool, code: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NumPy does."""

    def importing(*_: object, **__: object) -> None:
        try:
            if interrupted:
                signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            pass
        raise ImportError("failed to import")

    monkeypatch.setattr(main.lawa, "main", importing)
    if code is None:
        with pytest.raises(ImportError):
            main._run([])
    else:
        assert main._run([]) == code
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
