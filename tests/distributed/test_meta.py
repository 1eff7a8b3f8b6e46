"""A model built on the meta device and materialised later averages as a plain one does."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.ranks import on_ranks
from support.sharded import refill
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from torch_lawa import LatestWeightAverager
from torch_lawa.errors import LayoutError

K, STEPS = 2, 4


def net() -> nn.Module:
    """Uneven parts over two ranks, and a tied weight, which `to_empty` must leave tied."""
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 5), nn.Linear(7, 5))
    model[3].weight = model[2].weight
    return model


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return fully_shard(net())


def collect(model: nn.Module, averager: LatestWeightAverager, steps: range) -> None:
    for step in steps:
        refill(model, step)
        averager.collect(model, step=step)


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors.items()}
    return {name: tensor.clone() for name, tensor in found.items()}


def materialised(rank: int, folder: str) -> dict[str, Any]:
    model, averager = on_meta(), LatestWeightAverager(k=K)
    refused = []
    for act in (averager.bind, averager.collect, averager.step):
        with pytest.raises(LayoutError) as error:
            act(model)
        refused.append(str(error.value))
    assert len(averager) == 0
    model.to_empty(device="cpu")
    assert model[2].weight is model[3].weight  # type: ignore[index]
    averager.bind(model)  # its memory is there, whatever is in it
    collect(model, averager, range(1, STEPS + 1))
    raw = whole(dict(model.state_dict()))
    with averager.swapped_into(model):
        inside = whole(dict(model.state_dict()))
    after = whole(dict(model.state_dict()))
    dcp.save({"model": model.state_dict(), "averager": averager}, checkpoint_id=folder)
    return {
        "refused": refused,
        "average": whole(averager.average()),
        "inside": inside,
        "restored": all(torch.equal(raw[name], after[name]) for name in raw),
        "loaded": loaded(folder),
        "moved": moved(),
    }


def loaded(folder: str) -> dict[str, Tensor]:
    """An averager that was there before the model had memory, filled from a checkpoint with it."""
    averager, model = LatestWeightAverager(k=K), on_meta()
    model.to_empty(device="cpu")
    averager.bind(model)
    state = {"model": model.state_dict(), "averager": averager}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    assert averager.snapshot_steps == [STEPS - 1, STEPS]
    collect(model, averager, range(STEPS + 1, STEPS + 2))
    return whole(averager.average())


def moved() -> dict[str, Tensor]:
    """`to_empty` gives a model other memory: what was bound before must not be read."""
    averager, model = LatestWeightAverager(k=K), on_meta()
    model.to_empty(device="cpu")
    averager.bind(model)
    collect(model, averager, range(1, STEPS))
    model.to_empty(device="cpu")
    collect(model, averager, range(STEPS, STEPS + 1))
    return whole(averager.average())


def expected(last: int) -> dict[str, Tensor]:
    """The mean by hand, in float64; buffers of the newest."""
    model, snapshots = net(), []
    for step in range(last - K + 1, last + 1):
        refill(model, step)
        snapshots.append({n: t.double().clone() for n, t in model.state_dict().items()})
    mean = {n: torch.stack([s[n] for s in snapshots]).sum(0) / K for n in snapshots[0]}
    buffers = {name for name, _ in model.named_buffers()}
    return {
        name: (snapshots[-1][name] if name in buffers else mean[name]).to(tensor.dtype)
        for name, tensor in model.state_dict().items()
    }


def test_materialised_later_is_averaged_alike(tmp_path: Path) -> None:
    for found in on_ranks(2, materialised, str(tmp_path)):
        for message in found["refused"]:
            assert "'0.weight' is on the meta device" in message
            assert "materialise the model first" in message
        assert found["restored"]
        for key, last in (("average", 4), ("inside", 4), ("loaded", 5), ("moved", 4)):
            means = expected(last)
            assert found[key].keys() == means.keys()
            for name, tensor in means.items():
                assert torch.equal(found[key][name], tensor), (key, name)
