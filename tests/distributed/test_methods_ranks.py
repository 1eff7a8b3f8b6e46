"""Averaging methods on several ranks: shards have the bits of whole weights, and ranks agree."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import same_bits
from support.ranks import on_ranks
from support.sharded import Net, refill
from support.training import smoke_plan
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lawa_lab.methods.fitting import Fitted, FittingData
from lawa_lab.methods.registry import RingMethod, parse_method
from lawa_lab.recipes.loop import make_task
from lawa_lab.recipes.runtime import choose_worker, process_group
from lawa_lab.recipes.trainer import Trainer
from torch_lawa import LatestWeightAverager
from torch_lawa.errors import ConfigError

TESTS = str(Path(__file__).parents[1])
ELEMENTWISE = (
    "ema:0.9", "corrected-ema:0.9", "bema:0.5:0.2", "two-tailed", "greedy-soup", "phase",
    "swag:3:0.5", "horizon:0.5:3", "dense:0.5:3", "swa:2", "growing-ema:0.25",
)  # fmt: skip
WHOLE = ("twa:1:2", "rna:0.1", "rna-per-tensor:0.1")


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def served(text: str, model: nn.Module) -> dict[str, Tensor]:
    method, ring = parse_method(text), LatestWeightAverager(3, min_snapshots=1)
    averager = method.read(ring) if isinstance(method, RingMethod) else method.build(model)

    def validate() -> float:
        return sum(float(t.double().square().sum()) for t in whole(model).values())

    for step in range(7):
        refill(model, step)
        ring.collect(model)
        averager.step(model)
        if step in (2, 6) and isinstance(averager, Fitted):
            averager.fit(FittingData(model, lambda: iter(()), lambda _: torch.zeros(()), validate))
    with averager.swapped_into(model):
        return whole(model)


def sharded(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in (*ELEMENTWISE, *WHOLE):
        torch.manual_seed(0)
        model = Net()
        for layer in (model.wide, model.narrow):
            fully_shard(layer)
        fully_shard(model)
        try:
            found[text] = served(text, model)
        except ConfigError as error:
            found[text] = str(error)
    return found


def test_shards_have_the_bits_of_whole_weights() -> None:
    for found in on_ranks(2, sharded):
        for text in ELEMENTWISE:
            torch.manual_seed(0)
            for name, tensor in served(text, Net()).items():
                assert same_bits(found[text][name], tensor), (text, name)
        assert all("without fsdp" in found[text] for text in WHOLE)


def learned(rank: int) -> list[tuple[float, ...]]:
    """The weights that this rank learned in a run of copies (DDP)."""
    sys.path.insert(0, TESTS)
    worker = choose_worker("cpu")
    plan = smoke_plan("digits", validation_fraction=0.3, horizon=0.5, methods=("twa:1:3", "phase"))
    with process_group(worker):
        trainer = Trainer(plan, make_task(plan, worker), worker)
        for batch in trainer.batches():
            trainer.train_step(batch)
            if trainer.averager.schedule.due(trainer.step):
                trainer.collect()
            if trainer.step == 12:
                break
        trainer.evaluate(None)
        return [method.weights for method in trainer.methods.values()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("ranks", [2])
def test_ranks_learn_and_choose_the_same(ranks: int) -> None:
    first, second = on_ranks(ranks, learned, join=False)
    assert first == second
    assert len(set(first[0])) > 1  # not the uniform mean it started from
