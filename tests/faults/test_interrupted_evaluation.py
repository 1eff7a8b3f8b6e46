"""Ctrl-C at every place of a window choice and of an evaluation.

The model has its own weights, statistics and modes afterwards, the choice is the old or the new
one, and the next call gives the right result.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support.campaign import Campaign, CountTrials
from support.interrupts import FILES, ROOT, Interrupt, is_free
from torch import Tensor, nn

from torch_lawa import (
    LatestWeightAverager,
    WindowChooser,
    evaluate_side_by_side,
    recalibrate_batch_norm,
)
from torch_lawa import swap as swaps

pytestmark = pytest.mark.faults

NAMES = ("window_choice", "evaluation", "batch_norm", "batch_norm_cache")
K = 4


def loader() -> list[Tensor]:
    return list(torch.randn(3, 8, 2, generator=torch.Generator().manual_seed(1)))


def cost(model: nn.Module) -> float:
    assert not model.training
    assert not torch.is_grad_enabled()
    return (model[0].weight.mean() - 3).square().item()  # type: ignore[index, operator, union-attr]


@dataclass
class Case:
    """Four snapshots of a model; the mean of the last two is the best."""

    model: nn.Sequential = field(
        default_factory=lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    )
    averager: LatestWeightAverager = field(default_factory=lambda: LatestWeightAverager(k=K))

    def __post_init__(self) -> None:
        self.model[2].eval()  # modes differ: each one must be restored
        for value in (9.0, 9.0, 2.0, 4.0):
            nn.init.constant_(self.model[0].weight, value)  # type: ignore[arg-type]
            self.averager.collect(self.model)
        self.chooser = WindowChooser(self.averager, cost, loader=loader())

    def modes(self) -> list[Any]:
        return [(m.training, getattr(m, "momentum", None)) for m in self.model.modules()]

    def values(self) -> list[list[float]]:
        return [tensor.flatten().tolist() for tensor in self.model.state_dict().values()]


def _choose(case: Case) -> None:
    assert case.chooser.choose(case.model).k == 2


def _serve(case: Case) -> None:
    with case.chooser.swapped_into(case.model):
        assert case.model[0].weight[0, 0].item() == 3.0  # type: ignore[index, union-attr]


def _compare(case: Case) -> None:
    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"cost": cost(model)}

    rows = evaluate_side_by_side(case.model, case.averager, evaluate, ks=[2, K], loader=loader())
    assert [row["cost"] for row in rows] == [1.0, 1.0, 0.0, 9.0]


Act = tuple[Callable[[Case], None], Callable[[Case], Any]]
ACTS: dict[str, Act] = {
    "choose": (lambda _: None, _choose),
    "choose again": (_choose, _choose),
    "serve": (_choose, _serve),
    "compare": (lambda _: None, _compare),
    "resume": (_choose, lambda case: case.chooser.load_state_dict({"k": 4, "num_decided": 7})),
    "recalibrate": (lambda _: None, lambda case: recalibrate_batch_norm(case.model, loader())),
}


def trial(act: str, at: int | None) -> int:
    """Interrupt the act at one place and check everything; returns how many places there are."""
    torch.manual_seed(0)
    prepare, do = ACTS[act]
    other = Case()
    torch.manual_seed(0)
    case = Case()
    for each in (other, case):
        prepare(each)
    old, values = other.chooser.state_dict(), other.values()
    do(other)
    new, modes = other.chooser.state_dict(), case.modes()
    kept: list[BaseException] = []  # as an interactive session keeps it
    interrupt = Interrupt(at, [*FILES, *(ROOT / f"{name}.py" for name in NAMES)])
    try:
        with interrupt:
            do(case)
    except KeyboardInterrupt as error:
        if interrupt.entering not in ("_Swap.__exit__", "_Served.__exit__"):
            kept.append(error)  # otherwise the weights return with this exception
    where = interrupt.where
    assert torch.is_grad_enabled(), where
    assert not swaps._swapped, where
    assert is_free(case.averager._lock), where
    assert case.modes() == modes, where
    assert case.values() in ([values, other.values()] if act == "recalibrate" else [values]), where
    assert case.chooser.state_dict() in (old, new), where
    _choose(case)
    _serve(case)
    _compare(case)
    assert case.modes() == modes, where
    return interrupt.count


def test_an_interrupt_anywhere_in_an_evaluation(campaign: Campaign, trials: CountTrials) -> None:
    draw = random.Random(campaign.seed)
    counts = {act: trial(act, None) for act in ACTS}
    for act in campaign.until_time_is_up(draw.choice(list(ACTS)) for _ in itertools.count()):
        at = draw.randrange(counts[act])
        try:
            trial(act, at)
        except BaseException as error:
            error.add_note(f"{act!r}, interrupted at place {at}")
            raise
        trials("interrupts", 1)
