"""What every test shares."""

import gc
import signal
from collections import Counter

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
    counts: Counter[str] = Counter()
    for report in {id(r): r for some in terminalreporter.stats.values() for r in some}.values():
        if getattr(report, "when", "") == "teardown":
            counts.update(dict(report.user_properties).get("trials", {}))
    if counts:
        kinds = ", ".join(f"{number:,} {kind}" for kind, number in sorted(counts.items()))
        terminalreporter.write_line(f"{sum(counts.values()):,} trials: {kinds}")
