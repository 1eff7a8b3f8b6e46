"""The campaign: LAWA_FAULTS_SECONDS in all, LAWA_FAULTS_SEED; a short slice unless given.

LAWA_FAULTS_LOG names a file to which every test appends its numbers of trials as JSON lines.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.campaign import Campaign, CountTrials

SLICE = 8.0  # seconds for all tests of the campaign together, as a part of `make test`


@pytest.fixture
def campaign(request: pytest.FixtureRequest) -> Campaign:
    """This test's share of the time."""
    items = [
        item for item in request.session.items if "campaign" in getattr(item, "fixturenames", ())
    ]
    total = float(os.environ.get("LAWA_FAULTS_SECONDS", SLICE))
    return Campaign(total / len(items), int(os.environ.get("LAWA_FAULTS_SEED", "0")))


@pytest.fixture
def trials(request: pytest.FixtureRequest) -> Iterator[CountTrials]:
    """Counts this test's trials, for the log and for the summary in tests/conftest.py."""
    counts: Counter[str] = Counter()

    def count_trials(kind: str, number: int) -> None:
        counts[kind] += number

    yield count_trials
    request.node.user_properties.append(("trials", dict(counts)))
    if log := os.environ.get("LAWA_FAULTS_LOG"):
        lines = [json.dumps({"kind": kind, "trials": n}) for kind, n in counts.items()]
        with Path(log).open("a") as file:
            file.write("".join(f"{line}\n" for line in lines))  # at once: there are other workers
