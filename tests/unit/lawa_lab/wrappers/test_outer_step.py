"""The step that Lookahead, periodic SWA and outer Nesterov share, where none of them goes."""

from types import SimpleNamespace
from typing import Any

import torch

from lawa_lab.vector import Vector
from lawa_lab.wrappers.outer_step import OuterStep


def test_the_first_period_starts_from_the_weights_after_the_start() -> None:
    weights = torch.zeros(1)
    run: Any = SimpleNamespace(weights=Vector({"w": weights}))
    step = OuterStep(run, period=2, rate=0.5, start=3)
    found = []
    for _ in range(5):
        step.step(lambda: None, lambda gradient: weights.add_(1.0))
        found.append(weights.item())
    assert found == [1, 2, 3, 4, 4]  # halfway from 3 to 5, not from 0
