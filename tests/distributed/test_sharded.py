"""Sharded models: each process averages its part, and together they have the unsharded mean."""

import contextlib
import warnings
from typing import Any

import pytest
import torch
from support.ranks import on_ranks
from support.sharded import Net, refill
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from torch_lawa import Exponential, LatestWeightAverager

STEPS, K = 5, 3


def plain() -> Net:
    torch.manual_seed(0)
    return Net()


def sharded(how: str) -> nn.Module:
    net = plain()
    world_size = torch.distributed.get_world_size()
    if how == "fsdp":
        for layer in (net.wide, net.narrow, net.small):
            fully_shard(layer)
        return fully_shard(net)
    if how == "mixed":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(net.norm)  # BatchNorm on a CPU wants float32 parameters
        return fully_shard(net, mp_policy=policy, reshard_after_forward=False)
    if how == "offload":
        return fully_shard(net, offload_policy=CPUOffloadPolicy(pin_memory=False))
    if how == "tensor":
        mesh = init_device_mesh("cpu", (world_size,))
        plan: dict[str, Any] = {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
        return parallelize_module(net, mesh, plan)
    assert how == "2d"
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("data", "tensor"))
    plan = {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
    parallelize_module(net, mesh["tensor"], plan)
    return fully_shard(net, mesh=mesh["data"])


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(tensor).clone() for name, tensor in model.state_dict().items()}


def averages(rank: int, how: str, store: str) -> dict[str, Any]:
    """What a sharded model averages to, through every door."""
    model = sharded(how)
    averager = LatestWeightAverager(k=K, store=store)  # type: ignore[arg-type]
    tokens = torch.arange(8).view(8) % 11
    for step in range(STEPS):
        refill(model, step)
        averager.collect(model)
    raw = state(model)
    model.eval()
    with torch.no_grad():
        output = whole(model(tokens))  # leaves FSDP's root gathered
        averager.collect(model)  # the same weights once more: they are still the shards
        averager.collect(model)
        repeated = {name: whole(t) for name, t in averager.average().items()}
        refill(model, STEPS)
        averager.reset()
        for step in range(STEPS):
            refill(model, step)
            averager.collect(model)
        with averager.swapped_into(model):
            inside, swapped = state(model), whole(model(tokens))
        after = whole(model(tokens))
    found = averager.average()
    expected_types = {n: type(p.data) for n, p in model.state_dict().items()}
    assert {n: type(t) for n, t in found.items()} == expected_types
    model.load_state_dict(found)
    loaded = state(model)
    saved = averager.state_dict()
    again = LatestWeightAverager(k=K)
    again.load_state_dict(saved)
    again.collect(model)  # a model tells what its shards are parts of
    return {
        "average": {name: whole(tensor) for name, tensor in found.items()},
        "weighted": {
            n: whole(t) for n, t in averager.average(coefficients=Exponential(0.7)).items()
        },
        "inside": inside,
        "loaded": loaded,
        "raw": raw,
        "repeated": repeated,
        "outputs": (output, swapped, after),
        "resumed": {name: whole(tensor) for name, tensor in again.average(2).items()},
    }


def reference() -> dict[str, Any]:
    model = plain()
    snapshots = []
    for step in range(STEPS):
        refill(model, step)
        snapshots.append({n: t.double().clone() for n, t in model.state_dict().items()})
    window = snapshots[-K:]

    def mean(weights: list[float]) -> dict[str, Tensor]:
        return {
            n: sum(w * s[n] for w, s in zip(weights, window, strict=True)).to(t.dtype)  # type: ignore[union-attr]
            for n, t in model.state_dict().items()
        }

    third = {n: torch.stack([s[n] for s in window]).sum(0).div(K) for n in window[0]}
    average = {n: third[n].to(t.dtype) for n, t in model.state_dict().items()}
    return {"average": average, "weighted": mean([0.09, 0.21, 0.7]), "raw": snapshots[-1]}


CASES = [("fsdp", "host", 2), ("mixed", "device", 2), ("tensor", "host", 2)]
MORE = [
    ("offload", "host", 2), ("fsdp", "host", 3), ("fsdp", "device", 4), ("2d", "host", 4),
    ("tensor", "device", 4), ("mixed", "host", 3),
]  # fmt: skip


@pytest.mark.parametrize(
    ("how", "store", "world_size"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.matrix) for case in MORE)],
)
def test_together_the_shards_have_the_mean(how: str, store: str, world_size: int) -> None:
    expected = reference()
    for found in on_ranks(world_size, averages, how, store):
        for name, tensor in expected["average"].items():
            if "running" in name or "num_batches" in name or "frozen" in name:
                continue
            for door in ("average", "inside", "loaded"):
                assert torch.equal(found[door][name], tensor), (door, name)
            assert torch.equal(found["raw"][name].double(), expected["raw"][name]), name
            assert torch.equal(found["repeated"][name].double(), expected["raw"][name]), name
            torch.testing.assert_close(found["weighted"][name], expected["weighted"][name])
        raw, swapped, after = found["outputs"]
        assert torch.equal(raw, after)
        assert not torch.equal(raw, swapped)
        tied = found["average"]
        assert torch.equal(tied["embed.weight"], tied["head.weight"])


def placements(rank: int) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (2,))
    value = torch.arange(15.0).view(5, 3)
    sharding = {"rows": [Shard(0)], "columns": [Shard(1)], "copies": [Replicate()]}
    averager = LatestWeightAverager(k=2)
    for step in (0.0, 1.0):
        averager.collect({n: distribute_tensor(value + step, mesh, p) for n, p in sharding.items()})
    return {name: whole(tensor) for name, tensor in averager.average().items()}


def test_any_placement_of_a_state_dict() -> None:
    for found in on_ranks(2, placements):
        for name, tensor in found.items():
            assert torch.equal(tensor, torch.arange(15.0).view(5, 3) + 0.5), name


def not_a_number(rank: int) -> tuple[list[str], list[bool]]:
    """One rank's shard holds a NaN in one snapshot."""
    model = fully_shard(nn.Linear(4, 4, bias=False))
    averager = LatestWeightAverager(k=2)
    finite, warned = [], []
    for step in range(4):
        with torch.no_grad():
            part = model.weight.to_local()  # type: ignore[operator, union-attr]
            part.fill_(float("nan") if (rank, step) == (1, 1) else step)
        averager.collect(model)
        if averager.ready:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                mean = averager.average()["weight"].to_local()  # type: ignore[attr-defined]
            warned += [str(each.message) for each in caught]
            finite.append(bool(mean.isfinite().all()))
    return warned, finite


def test_a_nan_stays_on_its_rank_and_leaves_with_its_snapshot() -> None:
    (quiet, fine), (warned, hit) = on_ranks(2, not_a_number)
    assert (quiet, fine) == ([], [True, True, True])
    assert hit == [False, False, True]
    assert len(warned) == 1
    assert "step 2 has NaN or Inf in 'weight'" in warned[0]


def unfrozen(rank: int, how: str) -> dict[str, Tensor]:
    """The average of a model of which a layer is trained from the third snapshot on."""
    model = sharded(how) if how else plain()
    model.wide.requires_grad_(False)  # type: ignore[union-attr, operator]
    averager = LatestWeightAverager(k=STEPS)
    for step in range(STEPS):
        if step == 2:
            model.wide.requires_grad_(True)  # type: ignore[union-attr, operator]
        refill(model, step)
        averager.collect(model)
    return {name: whole(tensor) for name, tensor in averager.average().items()}


@pytest.mark.parametrize("how", ["fsdp", "tensor"])
def test_a_layer_that_is_unfrozen_during_the_run_is_averaged(how: str) -> None:
    expected = unfrozen(0, "")
    for found in on_ranks(2, unfrozen, how):
        for name in ("wide.weight", "wide.bias", "small.weight"):
            assert torch.equal(found[name], expected[name]), name


def convert_and_back(model: nn.Module, tokens: Tensor) -> None:
    model.double().float()


def fail_in_forward_pass(model: nn.Module, tokens: Tensor) -> None:
    def fail(*_: Any) -> None:
        raise KeyError

    handle = model.narrow.register_forward_pre_hook(fail)  # type: ignore[union-attr, operator]
    try:
        model(tokens)
    finally:
        handle.remove()


ACTS = {"convert": convert_and_back, "fail": fail_in_forward_pass}


def restored(rank: int, act: str) -> list[Any]:
    """Weights and outputs, before a swap and after it."""
    model = sharded("fsdp").eval()
    averager = LatestWeightAverager(k=2)
    for step in range(3):
        refill(model, step)
        averager.collect(model)
    tokens = torch.arange(8) % 11
    found: list[Any] = []
    with torch.no_grad():
        for _ in range(2):
            found += [whole(model(tokens)), state(model)]
            with contextlib.suppress(KeyError), averager.swapped_into(model):
                ACTS[act](model, tokens)
    return found


@pytest.mark.parametrize("act", ACTS)
def test_weights_are_restored_whatever_happens_to_the_shards(act: str) -> None:
    for output, before, same_output, after in on_ranks(2, restored, act):
        assert torch.equal(same_output, output)
        for name, tensor in before.items():
            assert torch.equal(after[name], tensor), name
