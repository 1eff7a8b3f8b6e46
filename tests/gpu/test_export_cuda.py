"""Exports from a GPU: the same files as from a CPU, and shards gathered where the mesh is."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.cuda import one_rank
from support.models import same_bits
from torch import Tensor, nn

from torch_lawa import LatestWeightAverager
from torch_lawa.shards import MeshSharding

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(70, 33), nn.BatchNorm1d(33), nn.Linear(33, 5)).requires_grad_()


def collected(model: nn.Module, store: str) -> LatestWeightAverager:
    averager = LatestWeightAverager(k=3, store=store)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        with torch.no_grad():
            for parameter in model.parameters():
                value = torch.randn(parameter.shape, generator=generator)
                part = parameter.data
                (part.to_local() if hasattr(part, "to_local") else part).copy_(value)
        averager.collect(model)
    return averager


def assert_same(a: Path, b: Path) -> None:
    found, expected = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert same_bits(found[name], tensor), name


@pytest.mark.parametrize("store", ["host", "device"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_the_same_file_as_from_a_cpu(store: str, dtype: torch.dtype | None, tmp_path: Path) -> None:
    collected(net(), store).save_pretrained(tmp_path / "cpu", dtype=dtype)
    collected(net().to(DEVICE), store).save_pretrained(tmp_path / "gpu", dtype=dtype)
    assert_same(tmp_path / "gpu", tmp_path / "cpu")


@pytest.mark.parametrize("store", ["host", "device"])
def test_parts_move_to_the_mesh_to_be_gathered(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process has whole parts; it is made to gather them all the same."""
    from torch.distributed.fsdp import fully_shard

    devices = []
    gather = MeshSharding.gather

    def watched(sharding: MeshSharding, part: Tensor) -> Tensor:
        devices.append(part.device.type)
        return gather(sharding, part)

    monkeypatch.setattr(MeshSharding, "gather", watched)
    monkeypatch.setattr(MeshSharding, "is_split", True)
    collected(net(), store).save_pretrained(tmp_path / "plain")
    with one_rank(tmp_path, "nccl" if DEVICE == "cuda" else "gloo"):
        averager = collected(fully_shard(net().to(DEVICE)), store)
        averager.save_pretrained(tmp_path / "sharded")
    assert devices == [DEVICE] * 6
    assert_same(tmp_path / "sharded", tmp_path / "plain")
