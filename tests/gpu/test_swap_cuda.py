"""On a real GPU: a swap keeps the model's own values in the idle staging memory, and safely."""

from pathlib import Path

import pytest
import torch
from support.models import same_bits
from torch import Tensor, nn

from torch_lawa import DiskStore, LatestWeightAverager

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 2**20


def collected(
    kind: str, folder: Path, model: nn.Module, storage_dtype: torch.dtype | None = None
) -> LatestWeightAverager:
    store = DiskStore(folder / "window") if kind == "disk" else "host"
    averager = LatestWeightAverager(k=2, store=store, storage_dtype=storage_dtype)  # type: ignore[arg-type]
    for value in (1.0, 4.0):
        fill(model, value)
        averager.collect(model)
    fill(model, 7.0)
    return averager


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def values(tensor: Tensor) -> list[float]:
    return tensor.unique().tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("storage_dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["host", "disk"])
def test_the_gpu_holds_one_copy_more_swapped_or_not(
    kind: str, storage_dtype: torch.dtype | None, tmp_path: Path
) -> None:
    model = nn.Linear(16384, 8192, device="cuda")  # 512 MiB
    size = sum(p.numel() * 4 for p in model.parameters())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    averager = collected(kind, tmp_path, model, storage_dtype)
    averager.wait()
    for _ in range(3):
        with averager.swapped_into(model):
            assert values(model.weight) == [2.5]
            torch.cuda.synchronize()
            assert torch.cuda.memory_allocated() - before <= size + 3 * MIB
        assert values(model.weight) == [7.0]


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_snapshot_in_another_stream_right_after_waits_for_the_way_back(
    kind: str, tmp_path: Path
) -> None:
    model, other = nn.Linear(4000, 4000, device="cuda"), torch.cuda.Stream()
    averager = collected(kind, tmp_path, model)
    strange = {name: torch.full_like(p, -9.0) for name, p in model.named_parameters()}
    torch.cuda.synchronize()
    for _ in range(20):
        with averager.swapped_into(model):
            torch.cuda._sleep(2_000_000)  # the way back is ordered, and done later
        with torch.cuda.stream(other):
            averager.collect(strange)  # into the staging memory from which it comes
        assert values(model.weight) == [7.0]


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_snapshot_of_other_weights_while_swapped_takes_other_memory(
    kind: str, tmp_path: Path
) -> None:
    model = nn.Linear(4000, 4000, device="cuda")
    averager = collected(kind, tmp_path, model)
    strange = {name: torch.full_like(p, -9.0) for name, p in model.named_parameters()}
    with averager.swapped_into(model):
        averager.collect(strange)
        with pytest.raises(ZeroDivisionError), averager.swapped_into(nn.Linear(4000, 4000).cuda()):
            raise ZeroDivisionError
    assert values(model.weight) == [7.0]
    averager.collect(model)
    assert values(averager.average()["weight"]) == [-1.0]


def test_storage_narrower_than_the_weights_does_not_narrow_them() -> None:
    model = nn.Linear(100, 100, device="cuda")
    averager = LatestWeightAverager(k=1, storage_dtype=torch.bfloat16)
    averager.collect(model)
    own = model.weight.detach().clone()
    with averager.swapped_into(model):
        assert same_bits(model.weight.detach(), own.bfloat16().float())
    assert same_bits(model.weight.detach(), own)
