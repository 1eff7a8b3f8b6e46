"""include and exclude on a sharded model: the same tensors and bits as on one process."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from support.models import assert_same_state
from support.ranks import on_ranks
from support.sharded import Net, refill
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from torch_lawa import Blend, DiskStore, LatestWeightAverager

OPTIONS: dict[str, Any] = {"k": 3, "exclude": ["head.*", "*.bias"]}  # head is tied to embed


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def collected(model: nn.Module, averager: LatestWeightAverager) -> LatestWeightAverager:
    for step in range(1, 5):
        refill(model, step)
        averager.collect(model, step=step)
    return averager


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors.items()}
    return {name: tensor.clone() for name, tensor in found.items()}  # not what swaps will change


def sharded(rank: int, folder: str) -> list[dict[str, Tensor]]:
    model = fully_shard(net())
    averager = collected(model, LatestWeightAverager(**OPTIONS))
    on_disk = collected(model, LatestWeightAverager(**OPTIONS, store=DiskStore(f"{folder}/window")))
    averager.save_pretrained(f"{folder}/exported")
    found = [whole(averager.average()), whole(on_disk.average())]
    with averager.swapped_into(model):
        found.append(whole(dict(model.state_dict())))
    refill(model, 9)  # live weights that are in no snapshot
    with averager.swapped_into(model, coefficients=Blend(0.6)):
        found.append(whole(dict(model.state_dict())))
    return found


def test_excluded_shards_stay_raw(tmp_path: Path) -> None:
    plain = net()
    expected = collected(plain, LatestWeightAverager(**OPTIONS)).average()
    raw = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    for name in ("embed.weight", "head.weight", "wide.bias"):
        assert torch.equal(expected[name], raw[name])
    assert not torch.equal(expected["wide.weight"], raw["wide.weight"])
    averager = collected(plain, LatestWeightAverager(**OPTIONS))
    refill(plain, 9)
    with averager.swapped_into(plain, coefficients=Blend(0.6)):
        blended = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    for *of_rank, blend in on_ranks(2, sharded, str(tmp_path)):
        for found in of_rank:
            assert_same_state(found, expected)
        assert_same_state(blend, blended)
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert_same_state(exported, {name: expected[name] for name in exported})
    assert "wide.weight" in exported
