"""The asynchronous path on real streams, with its races made wide and its memory poisoned.

`torch.cuda._sleep` delays a stream where an order matters, and memory that is not yet written holds
NaN: a copy that comes too early or too late copies it. The controls at the end take
one order away at a time and must see that, or the tests above prove nothing.
"""

import gc
import random
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cuda import DEVICE, Poison, Weights, agree, make, settled, sleep
from torch import Tensor, nn

from torch_lawa import LatestWeightAverager
from torch_lawa.stores import feed, memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 1 << 20
STORES = ["host", "device", "disk"]


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[Poison]:
    sleep(0)
    found, copy = Poison(), memory.Stage.copy
    monkeypatch.setattr(feed, "_PIECE", MIB // 4)  # most snapshots are fed from a thread

    def poisoned(stage: memory.Stage, buffers: list[Any], tensors: Any) -> None:
        found.copy(stage, lambda: copy(stage, buffers, tensors), buffers)

    monkeypatch.setattr(memory.Stage, "copy", poisoned)
    yield found
    torch.cuda.synchronize()


@pytest.mark.parametrize("numel", [1, 1000, 65_537, 1_000_003, 3_000_000])
@pytest.mark.parametrize("kind", STORES)
def test_no_poison_in_any_snapshot(kind: str, numel: int, poison: Poison, tmp_path: Path) -> None:
    """Hundreds of snapshots, more than the window holds before anybody looks."""
    chance = random.Random(numel)
    poison.late = lambda: chance.choice([0.0, 0.0, 0.05, 0.5, 3.0])
    weights, averager = Weights(numel), make(kind, tmp_path, k=4)
    for _ in range(4 if kind == "disk" else 16):
        for _ in range(chance.choice([1, 2, 4, 5, 7]) + (4 - len(averager))):
            sleep(chance.choice([0.0, 0.0, 0.5, 2.0]))  # training is behind
            weights.move()
            averager.collect(weights.tensors)
            weights.poison()
        assert agree(averager, weights)


@pytest.mark.parametrize("kind", STORES)
def test_weights_that_move_on_on_another_stream(kind: str, poison: Poison, tmp_path: Path) -> None:
    """The contract of any CUDA work: a stream that overwrites waits for the one that collected."""
    poison.late = lambda: 1.0
    weights, averager = Weights(300_000), make(kind, tmp_path, k=3)
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    for i in range(30 if kind != "disk" else 8):
        sleep(1.0)
        weights.move()
        averager.collect(weights.tensors)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            weights.poison()
        main.wait_stream(side)
        if i % 5 == 4:
            assert agree(averager, weights)


@pytest.mark.parametrize("kind", STORES)
def test_collected_on_streams_in_turn_and_read_on_another(
    kind: str, poison: Poison, tmp_path: Path
) -> None:
    """The averager orders its own memory, whatever streams it is called on."""
    poison.late = lambda: 1.0
    weights, averager = Weights(300_000), make(kind, tmp_path, k=3)
    streams = [torch.cuda.Stream() for _ in range(3)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())  # the weights were made there
    for i in range(30 if kind != "disk" else 9):
        stream = streams[i % 3]
        stream.wait_stream(streams[(i - 1) % 3])
        with torch.cuda.stream(stream):
            sleep(3.0)
            weights.move()
            averager.collect(weights.tensors)
            weights.poison()
        if i >= 2 and i % 3 == 1:
            assert agree(averager, weights)  # on the default stream, which waited for nobody


@pytest.mark.parametrize("kind", ["host", "device"])
def test_streams_that_know_nothing_of_each_other(kind: str, poison: Poison, tmp_path: Path) -> None:
    """The later snapshot is the later one, also where its stream comes first."""
    poison.late = lambda: 1.0
    slow, quick = torch.cuda.Stream(), torch.cuda.Stream()
    first, second = (torch.zeros(300_000, device=DEVICE) for _ in range(2))
    averager = make(kind, tmp_path, k=1)
    torch.cuda.synchronize()
    for i in range(10):
        with torch.cuda.stream(slow):
            sleep(5.0)
            first.fill_(-1.0)
            averager.collect({"w": first})
        with torch.cuda.stream(quick):
            second.fill_(i)
            averager.collect({"w": second})
        torch.cuda.synchronize()  # whatever comes late has come
        assert averager.average()["w"].unique().tolist() == [i]


@pytest.mark.parametrize("kind", ["host", "device"])
def test_a_mean_read_on_one_stream_while_another_collects(
    kind: str, poison: Poison, tmp_path: Path
) -> None:
    weight, reading = torch.zeros(300_000, device=DEVICE), torch.cuda.Stream()
    averager = make(kind, tmp_path, k=2)
    for i in range(10):
        for value in (i, i + 2.0):
            weight.fill_(value)
            averager.collect({"w": weight})
        with torch.cuda.stream(reading):
            sleep(5.0)
            mean = averager.average(device=DEVICE)["w"]
        weight.fill_(float("nan"))
        for _ in range(2):  # the snapshots of the mean leave the window
            averager.collect({"w": weight})
        torch.cuda.synchronize()
        assert mean.unique().tolist() == [i + 1.0]


@pytest.mark.parametrize("kind", ["host", "device"])
def test_a_model_that_lives_on_a_stream_of_its_own(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    stream = torch.cuda.Stream()
    taken: list[Tensor] = []
    with torch.cuda.stream(stream):
        model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)).to(DEVICE)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        averager = make(kind, tmp_path, k=3)
        x = torch.randn(64, 512, device=DEVICE)
        for _ in range(12):
            sleep(1.0)
            (model(x) - x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            averager.collect(model)
            taken.append(model[0].weight.detach().clone())
        nn.init.constant_(model[0].weight, 7.0)
    mean = averager.average()["0.weight"].cpu()  # on the default stream
    stream.synchronize()
    exact = sum(t.cpu().double() for t in taken[-3:]) / 3
    assert torch.equal(mean, exact.float())
    with torch.cuda.stream(stream):
        raw = model[0].weight.detach().clone()
        sleep(5.0)
        with averager.swapped_into(model):
            averaged = model[0].weight.detach().clone()
        back = model[0].weight.detach().clone()
    stream.synchronize()
    assert torch.equal(averaged.cpu(), exact.float())
    assert torch.equal(raw, back)


@pytest.mark.parametrize("kind", STORES)
def test_collecting_holds_nobody_and_wait_waits(kind: str, tmp_path: Path) -> None:
    weight = torch.zeros(2_000_000, device=DEVICE)
    averager = make(kind, tmp_path, k=2)
    for _ in range(3):  # memory is made and page-locked on the way, and kernels are loaded
        weight.fill_(0.0)
        averager.collect({"w": weight})
    averager.wait()
    sleep(0)
    torch.cuda.synchronize()
    sleep(400.0)  # a long training step
    start = time.perf_counter()
    for i in range(1 if kind == "disk" else 2):  # a disk holds back the second one, as documented
        weight.fill_(i + 1.0)
        averager.collect({"w": weight})
    held = time.perf_counter() - start
    averager.wait()
    waited = time.perf_counter() - start
    assert held < 0.1
    assert waited > 0.2
    # Nothing is left to do: what is there now can be read without asking anybody.
    last = averager.state_dict()["snapshots"][-1]["tensors"]["w"]
    assert last.unique().tolist() == [1.0 if kind == "disk" else 2.0]


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_number_is_read_while_a_snapshot_is_copied(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The control is one piece: then the number waits for all of it."""
    loss, weight = torch.ones((), device=DEVICE), torch.zeros(1 << 28, device=DEVICE)  # 1 GiB
    waits = {}
    for piece in (feed._PIECE, 1 << 31):
        monkeypatch.setattr(feed, "_PIECE", piece)
        averager, spent = make(kind, tmp_path / str(piece), k=1), []
        for i in range(3):
            weight.fill_(i)
            averager.collect({"w": weight})
            torch.cuda.current_stream().synchronize()
            start = time.perf_counter()
            loss.item()
            spent.append(time.perf_counter() - start)
            averager.wait()
        assert [float(x) for x in averager.average()["w"].aminmax()] == [2.0, 2.0]
        waits[piece] = sorted(spent)[1]
    few, all_ = waits.values()
    print(f"{kind}: .item() takes {1e3 * few:.2f} ms with pieces, {1e3 * all_:.2f} ms without")
    assert few < 0.3 * all_
    assert all_ > 0.01


def test_a_graph_is_captured_while_a_snapshot_is_copied(tmp_path: Path) -> None:
    """A thread that waits for CUDA events would invalidate the capture of another thread."""
    weight, averager = torch.zeros(1 << 28, device=DEVICE), make("host", tmp_path, k=1)
    x, y = torch.ones(1000, device=DEVICE), torch.zeros(1000, device=DEVICE)
    averager.collect({"w": weight})
    for i in range(1, 6):
        averager.wait()
        weight.fill_(i)
        torch.cuda.synchronize()
        averager.collect({"w": weight})
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(200):
                y.add_(x)
                time.sleep(5e-5)  # about as long as the copy
        y.zero_()
        graph.replay()
        assert y.unique().tolist() == [200.0]
        assert [float(x) for x in averager.average()["w"].aminmax()] == [i, i]


@pytest.mark.parametrize("kind", ["host", "disk"])
@pytest.mark.parametrize("door", ["average", "swap", "state", "load"])
def test_reading_while_a_copy_is_under_way(
    kind: str, door: str, poison: Poison, tmp_path: Path
) -> None:
    model = nn.Linear(700, 700, bias=False).to(DEVICE)
    averager = make(kind, tmp_path, k=2)
    for value in (1.0, 2.0, 4.0):
        averager.wait()
        poison.late = lambda value=value: 150.0 if value == 4.0 else 0.0
        nn.init.constant_(model.weight, value)
        averager.collect(model)
    nn.init.constant_(model.weight, 64.0)
    start = time.perf_counter()
    if door == "average":
        found = averager.average()["weight"]
    elif door == "swap":
        with averager.swapped_into(model):
            found = model.weight.detach().clone()
    elif door == "state":
        tensors = [s["tensors"]["weight"] for s in averager.state_dict()["snapshots"]]
        found = torch.stack([t.clone() for t in tensors]).mean(0)
    else:
        other = LatestWeightAverager(k=2, store="device")
        other.load_state_dict(averager.state_dict())
        found = other.average()["weight"]
    assert time.perf_counter() - start > 0.05
    assert found.unique().tolist() == [3.0]
    assert model.weight.detach().unique().tolist() == [64.0]


@pytest.mark.parametrize("act", ["drop", "reset"])
@pytest.mark.parametrize("kind", ["host", "device"])
def test_memory_that_is_let_go_of_during_a_copy(
    kind: str, act: str, poison: Poison, tmp_path: Path
) -> None:
    """Who gets that memory next finds it its own, on the host and on the GPU."""
    poison.late = lambda: 10.0
    side = torch.cuda.Stream()
    for _ in range(5):
        torch.cuda.empty_cache()  # what is asked for next is what was let go of last
        weight = torch.zeros(3_000_000, device=DEVICE)
        averager = make(kind, tmp_path, k=2)
        averager.collect({"w": weight})  # the device store's memory belongs to this stream
        averager.collect({"w": weight})
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            sleep(20.0)
            averager.collect({"w": weight})  # and is written to from that one
        if act == "drop":
            del averager
            gc.collect()
        else:
            averager.reset()
        host = [torch.full((3_000_000,), 1.0) for _ in range(3)]
        gpu = [torch.full((3_000_000,), 1.0, device=DEVICE) for _ in range(4)]
        torch.cuda.synchronize()
        assert all(tensor.unique().tolist() == [1.0] for tensor in (*host, *gpu))
        del host, gpu, weight


def anonymous() -> int:
    """The process's own memory in bytes; files that are mapped do not count."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError("this system does not tell")


@pytest.mark.parametrize("kind", STORES)
def test_a_snapshot_every_step_does_not_grow(kind: str, tmp_path: Path) -> None:
    """300 steps, nobody waits for the GPU: the next snapshot must."""
    model = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    averager, x = make(kind, tmp_path, k=3), torch.randn(32, 1024, device=DEVICE)
    gpu: list[tuple[int, int]] = []
    host: list[int] = []
    mean: dict[str, Tensor] = {}
    for step in range(60 if kind == "disk" else 300):
        (model(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        averager.collect(model)
        if step % 20 == 9:
            with averager.swapped_into(model), torch.no_grad():
                model(x)
            mean = averager.average()
            mean.clear()
        if step >= 20:
            gpu.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
            host.append(anonymous())
    averager.wait()
    assert len({allocated for allocated, _ in gpu}) == 1
    assert max(gpu[len(gpu) // 2 :]) <= max(gpu[: len(gpu) // 2])
    early, late = max(host[: len(host) // 3]), max(host[2 * len(host) // 3 :])
    assert late - early < 8 * MIB  # a snapshot is 16 MiB


@pytest.mark.parametrize(
    ("options", "copies"),
    [({}, 1.0), ({"storage_dtype": torch.bfloat16}, 0.5), ({"frozen": "omit"}, 0.9)],
    ids=["as it is", "stored in 16 bits", "frozen omitted"],
)
@pytest.mark.parametrize("kind", ["host", "disk"])
def test_collecting_adds_at_most_one_copy(
    kind: str, options: dict[str, Any], copies: float, tmp_path: Path
) -> None:
    model = nn.ModuleList(nn.Linear(997, 100 * (i % 7) + 1) for i in range(60)).to(DEVICE)
    frozen = nn.Linear(2000, 2000).to(DEVICE).requires_grad_(False)
    model.append(frozen)
    size = sum(p.numel() * 4 for p in model.parameters())
    if options.get("frozen") == "omit":
        copies = 1 - sum(p.numel() * 4 for p in frozen.parameters()) / size
    elif "storage_dtype" in options:  # frozen parameters are kept as they are
        copies = 0.5 + sum(p.numel() * 2 for p in frozen.parameters()) / size
    before = settled()
    averager = make(kind, tmp_path, k=4, **options)
    for _ in range(12 if kind == "host" else 6):
        averager.collect(model)
    averager.wait()
    added = torch.cuda.max_memory_allocated() - before
    assert added <= copies * size + 3 * MIB  # PyTorch rounds each of two blocks up
    assert added >= 0.9 * copies * size  # or this measures something else


def test_page_locking_that_fails_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA runtime remembers the failure; the next kernel must not be blamed for it."""
    runtime = torch.cuda.cudart()

    class Refusing:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            return int(runtime.cudaHostRegister(0, size, flags))

    monkeypatch.setattr(torch.cuda, "cudart", Refusing)
    weight, averager = torch.zeros(1_000_000, device=DEVICE), LatestWeightAverager(k=2)
    for i in range(2):
        weight.fill_(i)
        with pytest.warns(UserWarning, match="could not be pinned"):
            averager.collect({"w": weight})
        weight.fill_(float("nan"))
    assert averager.average()["w"].unique().tolist() == [0.5]


def test_small_buffers_that_share_a_page_are_locked() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        averager = LatestWeightAverager(k=40)
        for i in range(50):
            averager.collect({"w": torch.full((5,), float(i), device=DEVICE)})
    assert averager.average()["w"].tolist() == [29.5] * 5


def without_waiting_for_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.Stream, "wait_stream", lambda self, other: None)


def without_waiting_for_the_staging_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = memory.Stage.copy

    def eager(stage: memory.Stage, buffers: list[Any], tensors: Any) -> None:
        stage._feeds.clear()
        copy(stage, buffers, tensors)

    monkeypatch.setattr(memory.Stage, "copy", eager)


def without_waiting_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.Stage, "wait", lambda self: None)


@pytest.mark.parametrize(
    "broken",
    [
        without_waiting_for_training,
        without_waiting_for_the_staging_memory,
        without_waiting_for_the_host,
    ],
)
def test_control_the_poison_shows_where_an_order_is_missing(
    broken: Callable[[pytest.MonkeyPatch], None], poison: Poison, tmp_path: Path
) -> None:
    weights, averager = Weights(200_000), make("host", tmp_path, k=3)
    poison.late = lambda: 20.0

    def three() -> None:
        for _ in range(3):
            sleep(60.0 if broken is without_waiting_for_training else 0.0)
            weights.move()
            averager.collect(weights.tensors)
            weights.poison()

    three()
    assert agree(averager, weights)
    with pytest.MonkeyPatch.context() as patch:
        broken(patch)
        three()
        assert not agree(averager, weights)
        torch.cuda.synchronize()
    three()
    assert agree(averager, weights)


def test_control_a_device_store_without_its_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    weights, averager, stream = Weights(200_000), make("device", tmp_path, k=2), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    monkeypatch.setattr(memory.DeviceStore, "wait", lambda self: None)
    with torch.cuda.stream(stream):
        for _ in range(2):
            weights.move()
            averager.collect(weights.tensors)
        torch.cuda.synchronize()
        sleep(100.0)
        weights.move()
        averager.collect(weights.tensors)
    assert not agree(averager, weights)
