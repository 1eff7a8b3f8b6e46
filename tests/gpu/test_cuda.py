"""On a real GPU: the asynchronous path never races, and every mean has the CPU's bits."""

import gc

import pytest
import torch
from support.cuda import settled
from support.models import round_fraction, same_bits, true_mean
from torch import nn

from torch_lawa import DiskStore, LatestWeightAverager

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STORES = ["host", "device", "disk"]


def make(kind: str, tmp_path, **options) -> LatestWeightAverager:  # type: ignore[no-untyped-def]
    return LatestWeightAverager(
        store=DiskStore(tmp_path / "window") if kind == "disk" else kind, **options
    )


def assert_mean(got: torch.Tensor, history: list[torch.Tensor]) -> None:
    """The float64 mean, rounded once. PyTorch rounds to bfloat16 twice, so where it differs, exact
    fractions decide."""
    total = history[0].double()
    for tensor in history[1:]:
        total = total + tensor.double()
    got, want = got.detach().cpu().flatten(), (total / len(history)).to(got.dtype).flatten()
    odd = (got != want).nonzero().flatten()
    assert odd.numel() <= 3
    exact = true_mean([tensor.flatten()[odd] for tensor in history])
    assert got[odd].double().tolist() == [round_fraction(m, got.dtype) for m in exact]


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("sliding", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_that_move_on_at_once_do_not_change_the_snapshot(
    kind: str, sliding: bool, dtype: torch.dtype, tmp_path
) -> None:  # type: ignore[no-untyped-def]
    """Overwrite the weights as soon as `collect` returns, while copies are under way."""
    model = nn.Sequential(nn.Linear(1500, 2000), nn.Linear(2000, 1000)).cuda().to(dtype)
    averager = make(kind, tmp_path, k=3, _sliding=sliding)
    history: list[list[torch.Tensor]] = []
    for i in range(30):
        with torch.no_grad():
            for p in model.parameters():
                p.normal_()
        history.append([p.detach().cpu() for p in model.parameters()])
        averager.collect(model)
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(float("nan"))  # poison: seen in the mean if the copy was late
        if i >= 2 and i % 3 != 1:
            windows = list(zip(*history[-3:], strict=True))
            for got, window in zip(averager.average().values(), windows, strict=True):
                assert_mean(got, list(window))
            with averager.swapped_into(model):
                for p, window in zip(model.parameters(), windows, strict=True):
                    assert_mean(p, list(window))
            assert all(p.isnan().all() for p in model.parameters())


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_samples_have_the_bits_of_a_cpu(kind: str, dtype: torch.dtype, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Sums and divisions on the device, while the weights move on; 3 is no power of two."""
    model = nn.Sequential(nn.Linear(700, 900), nn.Linear(900, 300)).cuda().to(dtype)
    averager = make(kind, tmp_path, k=3, samples=3)
    reference = LatestWeightAverager(k=3, samples=3)
    for i in range(26):
        with torch.no_grad():
            for p in model.parameters():
                p.normal_()
        reference.collect({name: t.cpu() for name, t in model.state_dict().items()})
        averager.collect(model)
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(float("nan"))
        if averager.ready and i % 4 != 1:
            want = reference.average()
            for name, tensor in averager.average().items():
                assert same_bits(tensor.cpu(), want[name])
            with averager.swapped_into(model):
                for name, tensor in model.state_dict().items():
                    assert same_bits(tensor.cpu(), want[name])


@pytest.mark.parametrize("kind", STORES)
def test_collecting_from_several_streams(kind: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    weight = torch.zeros(4_000_000, device="cuda")
    averager = make(kind, tmp_path, k=4)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()  # the weight is made
    for i in range(40):
        stream = streams[i % 3]
        stream.wait_stream(streams[(i - 1) % 3])
        with torch.cuda.stream(stream):
            weight.fill_(float(i))
            averager.collect({"w": weight})
            weight.fill_(-1e9)
        if i >= 3 and i % 5 == 0:
            assert averager.average()["w"].unique().tolist() == [i - 1.5]


def test_the_host_store_adds_one_copy_to_the_gpu() -> None:
    model = nn.Linear(5000, 5000).cuda()
    size = sum(p.numel() * 4 for p in model.parameters())
    before = settled()
    averager = LatestWeightAverager(k=8)
    for _ in range(20):
        averager.collect(model)
    averager.wait()
    assert torch.cuda.max_memory_allocated() - before <= size + 3 * 2**20  # blocks are rounded up


@pytest.mark.parametrize("k", [3, 7])
@pytest.mark.parametrize("kind", ["host", "device"])
def test_a_mean_of_float64_weights_is_divided(kind: str, k: int, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """CUDA makes a division by a number of the host a product with its reciprocal, which rounds
    twice: a third of the values would have another last bit than on a CPU."""
    model = nn.Linear(500, 500, dtype=torch.float64, device="cuda")
    averager, history = make(kind, tmp_path, k=k), []
    for _ in range(k):
        with torch.no_grad():
            model.weight.normal_()
        history.append(model.weight.detach().cpu().clone())
        averager.collect(model)
    total = history[0]
    for tensor in history[1:]:
        total = total + tensor
    assert same_bits(averager.average()["weight"].cpu(), total / k)
    with averager.swapped_into(model):
        assert same_bits(model.weight.detach().cpu(), total / k)


def test_state_saved_from_the_gpu_goes_on_there(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model = nn.Linear(300, 300).cuda()
    for kind in ("host", "device"):
        whole, first = make(kind, tmp_path, k=3), make(kind, tmp_path, k=3)
        second = make(kind, tmp_path, k=3)
        for i in range(8):
            with torch.no_grad():
                model.weight.normal_()
            whole.collect(model)
            if i < 4:
                first.collect(model)
            if i == 3:
                torch.save(first.state_dict(), tmp_path / "s.pt")
                second.load_state_dict(
                    torch.load(tmp_path / "s.pt", weights_only=True, map_location="cpu")
                )
            if i > 3:
                second.collect(model)
                for a, b in zip(whole.average().values(), second.average().values(), strict=True):
                    assert same_bits(a.cpu(), b.cpu())


def test_cuda_graphs_stay_valid() -> None:
    model = nn.Linear(64, 64).cuda()
    averager = LatestWeightAverager(k=2)
    averager.collect(model)
    with torch.no_grad():
        model.weight.add_(1.0)
    averager.collect(model)
    x = torch.randn(8, 64, device="cuda")
    gc.collect()  # what unlocks its host memory waits for the GPU, which ends a capture
    with torch.no_grad():
        warm = torch.cuda.Stream()
        with torch.cuda.stream(warm):
            model(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
        graph.replay()
        raw = y.clone()
        with averager.swapped_into(model):
            graph.replay()
            assert torch.equal(y, model(x))
            assert not torch.equal(y, raw)
        graph.replay()
        assert torch.equal(y, raw)


def test_dropping_an_averager_in_the_middle_of_a_copy() -> None:
    weight = torch.zeros(20_000_000, device="cuda")
    for _ in range(20):
        averager = LatestWeightAverager(k=2)
        averager.collect({"w": weight})
        del averager
    torch.cuda.synchronize()
