"""What every test shares."""

import gc
import signal

import pytest
import torch
from hypothesis import HealthCheck, settings

# Every run draws new examples, but none may fail for being slow on a busy machine.
settings.register_profile(
    "default", deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
settings.load_profile("default")

# A shell's background jobs ignore these, and so would the programs that tests start and then stop.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True, scope="module")
def _quick_collections_of_garbage() -> None:
    """What is imported by now is not searched again; Transformers collects in every run."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The number of trials of the fault campaign (tests/faults)."""
    reports = [r for kind in terminalreporter.stats.values() for r in kind]
    trials = {
        r.nodeid: value
        for r in reports
        for name, value in getattr(r, "user_properties", ())
        if name == "trials"
    }
    if trials:
        for test, number in sorted(trials.items()):
            terminalreporter.write_line(f"{number:>8,} trials: {test}")
        terminalreporter.write_line(f"{sum(trials.values()):>8,} trials of the fault campaign")
