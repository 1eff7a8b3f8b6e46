"""The campaign: LAWA_FAULTS_SECONDS in all, LAWA_FAULTS_SEED; a short slice unless given."""

import json
import os
from collections.abc import Callable, Iterator

import pytest
from support.campaign import Campaign

SLICE = 8.0  # seconds for all tests of the campaign together, as a part of `make test`


@pytest.fixture
def campaign(request: pytest.FixtureRequest) -> Iterator[Campaign]:
    """This test's share of the time."""
    items = [
        item for item in request.session.items if "campaign" in getattr(item, "fixturenames", ())
    ]
    total = float(os.environ.get("LAWA_FAULTS_SECONDS", SLICE))
    made = Campaign(total / len(items), int(os.environ.get("LAWA_FAULTS_SEED", "0")))
    yield made
    request.node.user_properties.append(("trials", made.trials))


@pytest.fixture
def trials() -> Callable[[str, int], None]:
    """Record a number of trials of one kind in the file LAWA_FAULTS_LOG, as a line of JSON."""

    def count_trials(kind: str, number: int) -> None:
        if log := os.environ.get("LAWA_FAULTS_LOG"):
            with open(log, "a") as file:
                file.write(json.dumps({"kind": kind, "trials": number}) + "\n")

    return count_trials
