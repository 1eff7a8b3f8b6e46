"""What processes must agree on: BatchNorm statistics, and when a snapshot is taken."""

import contextlib
import copy
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_lawa import (
    Every,
    LatestWeightAverager,
    OnPlateau,
    WindowChooser,
    recalibrate_batch_norm,
)
from torch_lawa.errors import BatchNormError, ConfigError, RankError
from torch_lawa.evaluation import evaluate_side_by_side


def batches(rank: int) -> list[Tensor]:
    """Of different numbers and sizes; rank 2 has none."""
    generator = torch.Generator().manual_seed(rank)
    sizes = ((8, 8, 3), (5,), ())[rank]
    return [rank + torch.randn(size, 4, generator=generator) for size in sizes]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.BatchNorm1d(6))


def statistics(model: nn.Module) -> list[Tensor]:
    return [buffer.clone() for name, buffer in model.named_buffers() if "running" in name]


def batch_norm(rank: int) -> dict[str, Any]:
    together, alone = net(), net()
    used = recalibrate_batch_norm(together, batches(rank), group=dist.group.WORLD)
    refused = None
    try:
        recalibrate_batch_norm(alone, batches(rank))
    except BatchNormError as error:
        refused = str(error)
    nobody = None
    before = statistics(alone)
    try:
        recalibrate_batch_norm(alone, [], group=dist.group.WORLD)
    except BatchNormError as error:
        nobody = str(error)
    assert all(map(torch.equal, before, statistics(alone)))
    averager = LatestWeightAverager(k=1)
    averager.collect(net())
    rows = evaluate_side_by_side(
        net(),
        averager,
        lambda model: {"mean": model[1].running_mean.double().sum().item()},  # type: ignore[index]
        loader=batches(rank),
        group=dist.group.WORLD,
    )
    return {
        "used": used,
        "together": statistics(together),
        "refused": refused,
        "nobody": nobody,
        "rows": [row["mean"] for row in rows],
    }


def test_statistics_are_those_of_all_batches() -> None:
    model = net()
    recalibrate_batch_norm(model, [batch for rank in range(3) for batch in batches(rank)])
    expected = statistics(model)
    found = on_ranks(3, batch_norm)
    assert [each["used"] for each in found] == [3, 1, 0]
    for each in found:
        for mine, ours, first in zip(each["together"], expected, found[0]["together"], strict=True):
            torch.testing.assert_close(mine, ours)
            assert torch.equal(mine, first)  # in every process the same bits
        assert each["rows"] == found[0]["rows"]
        assert "gave no batches" in each["nobody"]
    assert [each["refused"] is None for each in found] == [True, True, False]


def schedule(rank: int, same: bool) -> dict[str, Any]:
    model = fully_shard(nn.Linear(3, 3))
    averager = LatestWeightAverager(k=2, schedule=OnPlateau())
    took, error = [], None
    for loss in (3.0, 2.0, 2.5):
        with torch.no_grad():
            model(torch.ones(1, 3))  # a validation: the parameters stay gathered
        try:
            took.append(averager.step(model, loss=loss if same else loss - rank * loss))
        except ConfigError as raised:
            error = str(raised)
    # A model that is not sharded may be averaged on one rank only: nobody is asked.
    single = LatestWeightAverager(k=2, schedule=OnPlateau())
    if rank == 0:
        single.step(copy.deepcopy(nn.Linear(2, 2)), loss=1.0)
    return {"took": took, "error": error, "steps": averager.snapshot_steps}


def test_a_schedule_fires_on_all_ranks_or_on_none() -> None:
    for found in on_ranks(2, schedule, True):
        assert found == {"took": [False, False, True], "error": None, "steps": [3]}
    # The loss of rank 1 is 0 each time, which is no improvement after the first.
    for found in on_ranks(2, schedule, False):
        assert "call 2 of averager.step" in found["error"] or "call 3" in found["error"]
        assert "rank 1 of 2" in found["error"]
        assert found["steps"] in ([], [3])


def chosen(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    found: dict[str, Any] = {}
    for name, model, group in (
        ("sharded", fully_shard(nn.Linear(3, 3)), None),
        ("group", nn.Linear(3, 3), dist.group.WORLD),
    ):
        averager = LatestWeightAverager(k=2)
        # Raw and k = 2, twice; k = 1 is the raw weights.
        values = iter([2.0, 1.0, 2.0, 1.0 + 9.0 * rank])
        chooser = WindowChooser(averager, lambda model, values=values: next(values), group=group)
        for _ in range(2):
            averager.collect(model)
        found[name] = [chooser.choose(model).k]
        try:
            chooser.choose(model)
        except ConfigError as error:
            found[name].append(str(error))
    return found


def test_a_window_is_chosen_on_all_ranks_or_on_none() -> None:
    for found in on_ranks(2, chosen):
        for k, error in found.values():
            assert k == 2
            assert "k = 2, 0" in error


def counted(rank: int) -> dict[str, Any]:
    """Schedules that count calls: the same on all ranks, then another on each."""
    errors = []
    for nu in (10, 10 + rank):
        averager = LatestWeightAverager(k=2, schedule=Every(nu))
        model, error = fully_shard(nn.Linear(3, 3)), ""
        try:
            for _ in range(20):
                averager.step(model)
        except RankError as raised:
            error = str(raised)
        errors.append(error)
    return {"errors": errors, "steps": averager.snapshot_steps}


def test_ranks_with_different_schedules_are_told_at_the_first_call() -> None:
    for found in on_ranks(2, counted):
        same, different = found["errors"]
        assert same == ""
        assert "rank 0 at the first call of averager.step, Every(n=10" in different
        assert "rank 1 at the first call of averager.step, Every(n=11" in different
        assert found["steps"] == []


def lonely(rank: int) -> str:
    dist.init_process_group("gloo", timeout=timedelta(seconds=3))
    averager, error = LatestWeightAverager(k=2), ""
    model = fully_shard(nn.Linear(3, 3))
    if rank == 0:
        try:
            averager.collect(model, step=7)
        except RankError as raised:
            error = str(raised)
    with contextlib.suppress(RuntimeError):  # rank 1 waits no longer than rank 0 does
        dist.barrier()
    dist.destroy_process_group()
    return error


def test_collecting_on_some_ranks_only_is_an_error_and_not_a_hang() -> None:
    error, _ = on_ranks(2, lonely, join=False)
    assert "rank 1 of 2 did not reach the first call of averager.collect, of step 7" in error


def replicas(rank: int) -> list[int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))
    model = fully_shard(nn.Linear(4, 4), mesh=mesh)
    averager = LatestWeightAverager(k=1)
    if rank < 2:  # ranks 2 and 3 have the same parts
        averager.collect(model, step=5)
    return averager.snapshot_steps


@pytest.mark.matrix
def test_one_set_of_copies_may_collect_alone() -> None:
    assert on_ranks(4, replicas) == [[5], [5], [], []]
