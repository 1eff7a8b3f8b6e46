"""The averager in torch.distributed.checkpoint: saved on two ranks, loaded on any number."""

import warnings
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import on_ranks
from support.sharded import refill
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from torch_lawa import LatestWeightAverager
from torch_lawa.errors import LayoutError, StateError
from torch_lawa.selection import ModelParts, live_tensors

K = 3


def net(*, shard: bool) -> nn.Module:
    """Sizes that divide evenly by nothing; a tied weight; BatchNorm."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 5), nn.Linear(7, 5))
    model[3].weight = model[2].weight
    return fully_shard(model) if shard else model


def collect(model: nn.Module, averager: LatestWeightAverager, steps: range) -> None:
    for step in steps:
        refill(model, step)
        averager.collect(model, step=step)


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors.items()}
    return {name: tensor.clone() for name, tensor in found.items()}  # not what swaps will change


def save(rank: int, folder: str, num_steps: int, asynchronous: bool, samples: int = 1) -> None:
    model, averager = net(shard=True), LatestWeightAverager(k=K, samples=samples)
    collect(model, averager, range(1, num_steps + 1))
    state = {"model": model.state_dict(), "averager": averager}
    if not asynchronous:
        dcp.save(state, checkpoint_id=folder)
        return
    pending = dcp.async_save(state, checkpoint_id=folder, process_group=dist.new_group())
    collect(model, averager, range(50, 54))  # training goes on, the window moves
    pending.result()  # type: ignore[union-attr]


def load(rank: int, folder: str, shard: bool, k: int, samples: int = 1) -> dict[str, Any]:
    model, averager = net(shard=shard), LatestWeightAverager(k=k, samples=samples)
    averager.bind(model)
    state = {"model": model.state_dict(), "averager": averager}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    found = {"steps": averager.snapshot_steps, "num_collected": averager.num_collected}
    if averager.ready:
        found["average"] = whole(averager.average())
        with averager.swapped_into(model):
            found["inside"] = whole(dict(model.state_dict()))
    collect(model, averager, range(10, 12))
    found["later"] = whole(averager.average())
    return found


def uninterrupted(num_steps: int, k: int, samples: int = 1) -> dict[str, Any]:
    model, averager = net(shard=False), LatestWeightAverager(k=k, samples=samples)
    collect(model, averager, range(1, num_steps + 1))
    found: dict[str, Any] = {
        "steps": averager.snapshot_steps,
        "num_collected": averager.num_collected,
    }
    if averager.ready:
        found["average"] = found["inside"] = averager.average()
    collect(model, averager, range(10, 12))
    found["later"] = averager.average()
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    assert found["steps"] == expected["steps"]
    assert found["num_collected"] == expected["num_collected"]
    for key in ("average", "inside", "later"):
        for name, tensor in expected.get(key, {}).items():
            assert torch.equal(found[key][name], tensor), (key, name)


@pytest.mark.parametrize(
    ("world_size", "samples"),
    [(3, 1), (3, 2), *(pytest.param(n, 1, marks=pytest.mark.matrix) for n in (1, 2, 4))],
)
def test_loaded_on_any_number_of_ranks(world_size: int, samples: int, tmp_path: Path) -> None:
    on_ranks(2, save, str(tmp_path), 5, False, samples)
    for found in on_ranks(world_size, load, str(tmp_path), True, K, samples):
        assert_same(found, uninterrupted(5, K, samples))


@pytest.mark.matrix
@pytest.mark.parametrize(("num_steps", "k"), [(2, K), (5, 2)])
def test_a_window_that_is_not_full_and_a_smaller_one(
    num_steps: int, k: int, tmp_path: Path
) -> None:
    on_ranks(2, save, str(tmp_path), num_steps, False)
    for found in on_ranks(2, load, str(tmp_path), True, k):
        assert_same(found, uninterrupted(num_steps, k))


@pytest.mark.matrix
def test_saved_while_training_goes_on(tmp_path: Path) -> None:
    on_ranks(2, save, str(tmp_path), 5, True)
    for found in on_ranks(2, load, str(tmp_path), True, K):
        assert_same(found, uninterrupted(5, K))


def stages(rank: int, ranks: int) -> ModelParts:
    """Four pipeline stages, dealt out to the ranks in turn."""
    torch.manual_seed(0)
    layers = [nn.ModuleDict({f"layers_{i}": nn.Linear(3, 2)}) for i in range(4)]
    layers[3]["tied"] = layers[3]["layers_3"]
    return ModelParts(layers[rank::ranks])


def on_stages(rank: int, folder: str, ranks: int, resume: bool) -> dict[str, Tensor]:
    model = stages(rank, ranks)

    def collect(steps: range) -> None:
        for step in steps:
            for name, tensor in live_tensors(model).items():
                generator = torch.Generator().manual_seed(zlib.crc32(f"{name}{step}".encode()))
                tensor.data.copy_(torch.randn(tensor.shape, generator=generator))
            averager.collect(model, step=step)

    averager = LatestWeightAverager(k=K, exclude="*_*.bias")  # each rank has some
    averager.bind(model)
    if resume:
        dcp.load({"averager": averager}, checkpoint_id=folder)
    else:
        collect(range(1, 5))
        dcp.save({"averager": averager}, checkpoint_id=folder)
    collect(range(5, 6))
    average = averager.average()
    with averager.swapped_into(model):
        for name, tensor in live_tensors(model).items():
            assert torch.equal(average[name], tensor)
    return average


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_pipeline_stages_resume_on_other_ranks(tmp_path: Path, ranks: int) -> None:
    """Ranks have tensors of different names, and a checkpoint has the notes of one of them."""
    first = on_ranks(2, on_stages, str(tmp_path / "saved"), 2, False)
    again = on_ranks(ranks, on_stages, str(tmp_path / "saved"), ranks, True)
    expected = {name: tensor for each in first for name, tensor in each.items()}
    found = {name: tensor for each in again for name, tensor in each.items()}
    assert len(found) == 10
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_parts_with_the_same_names_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"two parts .* 'weight'"):
        ModelParts([nn.Linear(1, 1), nn.Linear(1, 1)])


def quietly(act: Any, *arguments: Any, **options: Any) -> Any:
    """Without a process group PyTorch warns that there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return act(*arguments, **options)


def test_one_process_without_a_group(tmp_path: Path) -> None:
    model, averager = net(shard=False), LatestWeightAverager(k=K)
    averager.bind(model)  # before it is saved, too: the form is that of a checkpoint
    collect(model, averager, range(1, 6))
    quietly(dcp.save, {"averager": averager}, checkpoint_id=tmp_path, no_dist=True)
    again = LatestWeightAverager(k=K)
    again.bind(model)
    quietly(dcp.load, {"averager": again}, checkpoint_id=tmp_path, no_dist=True)
    assert again.snapshot_steps == [3, 4, 5]
    for name, tensor in averager.average().items():
        assert torch.equal(again.average()[name], tensor)


def test_a_state_whose_names_were_not_known_is_refused() -> None:
    model, averager = net(shard=False), LatestWeightAverager(k=K)
    averager.bind(model)
    collect(model, averager, range(1, 4))
    state = {**averager.state_dict(), "slots": {}}
    other = LatestWeightAverager(k=K)
    with pytest.raises(StateError, match=r"averager\.bind\(model\)"):
        other.load_state_dict(state)
    assert len(other) == 0


def test_the_names_do_not_depend_on_what_was_collected() -> None:
    def names(value: Any, prefix: str = "") -> list[str]:
        if not isinstance(value, dict):
            return [prefix]
        return [found for key, inner in value.items() for found in names(inner, f"{prefix}.{key}")]

    model, averager = net(shard=False), LatestWeightAverager(k=K)
    averager.bind(model)
    before = names(averager.state_dict())
    for step in range(1, 6):
        collect(model, averager, range(step, step + 1))
        assert names(averager.state_dict()) == before
