"""Samples of a sharded model: each rank draws its part, and together they are the whole sample."""

from typing import Any

import pytest
import torch
from support.models import same_bits
from support.ranks import on_ranks
from support.sharded import Net, refill
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from torch_lawa import LatestWeightAverager

K = 3


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors.items()}


def sampled(model: nn.Module) -> dict[str, Tensor]:
    averager = LatestWeightAverager(k=K)
    for step in range(K + 1):
        refill(model, step)
        averager.collect(model)
    again = LatestWeightAverager(k=K)
    again.load_state_dict(averager.state_dict())  # it has seen no model yet
    with torch.no_grad():
        model.eval()(torch.arange(4))  # after it FSDP2 keeps the root's parameters gathered
    with again.sampled_into(model, seed=5):
        inside = {name: t.clone() for name, t in whole(dict(model.state_dict())).items()}
    found = whole(averager.sample(seed=5))
    assert all(same_bits(found[name], inside[name]) for name in found)
    return found


def on_rank(rank: int, how: str) -> dict[str, Any]:
    model: nn.Module = Net()
    size = torch.distributed.get_world_size()
    plan: dict[str, Any] = {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
    if how == "tensor":
        parallelize_module(model, init_device_mesh("cpu", (size,)), plan)
    elif how == "2d":
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(model, mesh["tensor"], plan)
        fully_shard(model, mesh=mesh["data"])
    else:
        for layer in (model.wide, model.narrow):
            fully_shard(layer)
        fully_shard(model)
    return sampled(model)


@pytest.mark.parametrize(
    ("how", "ranks"),
    [
        ("fsdp", 2),
        ("tensor", 2),
        ("2d", 4),
        pytest.param("fsdp", 3, marks=pytest.mark.matrix),
    ],
)
def test_a_sample_does_not_depend_on_the_number_of_ranks(how: str, ranks: int) -> None:
    expected = sampled(Net())
    for found in on_ranks(ranks, on_rank, how):
        for name, tensor in expected.items():
            if not name.startswith("frozen"):  # made at random
                assert same_bits(found[name], tensor), name
