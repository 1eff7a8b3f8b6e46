"""Spike rescue on two ranks: one rank's bad batch takes both back, in copies and in shards."""

import math

import torch
from support.ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

from torch_lawa import LatestWeightAverager, SpikeRescue


def rescued(rank: int, sharded: bool) -> list[float]:
    model = nn.Linear(4, 2, bias=False)
    if sharded:
        fully_shard(model)
    averager = LatestWeightAverager(k=4)
    rescue = SpikeRescue(averager, history=4, optimizer_state="keep")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found: list[float] = []

    def put(value: float) -> None:
        parameter = model.weight
        local = parameter.to_local() if sharded else parameter  # type: ignore[operator]
        with torch.no_grad():
            local.fill_(value)

    def first() -> float:
        whole = model.weight.full_tensor() if sharded else model.weight  # type: ignore[operator]
        assert len(whole.unique()) == 1
        return float(whole[0, 0])

    for value in (1.0, 2.0, 3.0):
        put(value)
        averager.collect(model)
        assert not rescue(model, optimizer, 1.0)
    assert not rescue(model, optimizer, 1.0)
    put(99.0)
    averager.collect(model)  # a bad one, which is dropped
    assert rescue(model, optimizer, math.nan if rank == 1 else 1.0)
    found.append(first())
    put(50.0)
    # 1.0 and 3.5 on average are above twice the recent losses, on both ranks.
    assert rescue(model, optimizer, 1.0 if rank == 1 else 3.5)
    found.append(first())
    put(50.0)
    assert not rescue(model, optimizer, 1.0 if rank == 1 else 2.5)
    found.append(first())
    # A momentum that is not finite on one rank only is dropped on both.
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    if rank == 1:
        for state in optimizer.state.values():
            buffer = state["momentum_buffer"]
            (buffer.to_local() if sharded else buffer).fill_(math.nan)
    assert rescue(model, optimizer, math.inf)
    return [*found, first(), float(len(optimizer.state)), float(len(averager))]


def test_ranks_agree_in_copies() -> None:
    assert on_ranks(2, rescued, False) == [[2.0, 2.0, 50.0, 2.0, 0.0, 3.0]] * 2


def test_ranks_agree_in_shards() -> None:
    assert on_ranks(2, rescued, True) == [[2.0, 2.0, 50.0, 2.0, 0.0, 3.0]] * 2
