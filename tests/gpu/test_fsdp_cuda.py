"""FSDP2 on one GPU: shards are averaged in place, and training is not affected."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.cuda import make, one_rank, settled, sleep
from support.models import same_bits
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from torch_lawa import LatestWeightAverager, swap

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"
CASES = ["mixed", "offload"]
STORES = ["host", "device", "disk"]
K, STEPS, WIDTH = 3, 8, 257
MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of one: NCCL where it works, else gloo alone."""
    with one_rank(tmp_path_factory.mktemp("group"), "cpu:gloo,cuda:nccl", "gloo"):
        yield


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks that are sharded by themselves; a root with tied, frozen and integer tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.left, self.right = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.right.weight = self.left.weight
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 5)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        for block in self.blocks:
            x = block(x)
        return self.head(self.right(torch.relu(self.left(x))) + self.frozen(x))


def build(how: str) -> nn.Module:
    torch.manual_seed(0)
    net = Net()
    options: dict[str, Any] = {
        "mesh": init_device_mesh(DEVICE, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    if how == "offload":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=DEVICE == "cuda")
    for block in net.blocks:
        fully_shard(block, **options)
    return fully_shard(net, **options)


def part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def copy_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: part(tensor).detach().clone() for name, tensor in tensors.items()}


def inputs(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(32, WIDTH, generator=generator).to(DEVICE)


@dataclass
class Run:
    """One training run and what came of it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    taken: list[dict[str, Tensor]] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)


def train(how: str, averagers: Sequence[LatestWeightAverager] = (), *, look: bool = False) -> Run:
    """A few steps of Adam. With `look`, averages are read and swapped in between steps."""
    model = build(how)
    trained = [p for p in model.parameters() if p.requires_grad]
    run = Run(model, torch.optim.Adam(trained, lr=1e-2))
    for step in range(STEPS):
        loss = model(inputs(step)).float().square().mean()
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.losses.append(loss.detach())
        run.taken.append(copy_of(model.state_dict()))
        for averager in averagers:
            averager.collect(model)
        if look and step >= K - 1:
            model.eval()
            with torch.no_grad():
                model(inputs(99))  # leaves the root gathered
                for averager in averagers:
                    averager.average()
                    with averager.swapped_into(model):
                        model(inputs(99))
            model.train()
    return run


def mean_of(taken: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """float64 by hand, on the CPU; integers and frozen tensors from the newest."""
    window = [{n: t.cpu() for n, t in state.items()} for state in taken[-K:]]
    found = {}
    for name, newest in window[-1].items():
        if newest.is_floating_point() and "frozen" not in name:
            total = window[0][name].double()
            for state in window[1:]:
                total = total + state[name].double()
            newest = (total / K).to(newest.dtype)
        found[name] = newest
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert same_bits(part(found[name]).detach().cpu(), part(tensor).detach().cpu()), name


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("how", CASES)
def test_the_mean_of_the_shards(how: str, kind: str, tmp_path: Path) -> None:
    averager = make(kind, tmp_path, k=K)
    run = train(how, [averager])
    assert_same(averager.average(), mean_of(run.taken))
    types = {name: type(tensor) for name, tensor in run.model.state_dict().items()}
    assert {name: type(tensor) for name, tensor in averager.average().items()} == types
    assert any(kind is DTensor for kind in types.values())
    run.model.load_state_dict(averager.average())
    assert_same(run.model.state_dict(), mean_of(run.taken))


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("how", CASES)
def test_swapped_into_a_model_whose_root_is_gathered(how: str, kind: str, tmp_path: Path) -> None:
    averager, x = make(kind, tmp_path, k=K), inputs(99)
    run = train(how, [averager])
    model, other = run.model.eval(), build(how).eval()
    other.load_state_dict(averager.average())
    before = copy_of(model.state_dict())
    with torch.no_grad():
        raw, expected = model(x), other(x)
        newest = LatestWeightAverager(k=1)
        newest.collect(model)  # the shards, not what was gathered of them
        assert_same(newest.average(), before)
        model(x)
        with averager.swapped_into(model):
            assert_same(model.state_dict(), mean_of(run.taken))
            averaged = model(x)
        after = model(x)
    assert torch.equal(averaged, expected)
    assert torch.equal(after, raw)
    assert not torch.equal(averaged, raw)
    assert_same(model.state_dict(), before)


@pytest.mark.parametrize("how", CASES)
def test_training_goes_on_as_without(how: str, tmp_path: Path) -> None:
    """The same bits in losses, weights and optimizer, with three stores and many swaps."""
    plain, again = train(how), train(how)
    averaged = train(how, [make(kind, tmp_path, k=K) for kind in STORES], look=True)
    for other in (again, averaged):  # `again`: training must repeat itself for this to mean much
        assert torch.equal(torch.stack(plain.losses), torch.stack(other.losses))
        for a, b in zip(plain.taken, other.taken, strict=True):
            assert_same(a, b)
        states = [run.optimizer.state_dict()["state"] for run in (plain, other)]
        for index, state in states[0].items():
            assert_same(state, states[1][index])


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("how", CASES)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["save", "async_save"])
def test_saved_and_loaded_with_dcp(how: str, kind: str, asynchronous: bool, tmp_path: Path) -> None:
    averager = make(kind, tmp_path, k=K)
    run = train(how, [averager])
    want, folder = mean_of(run.taken), tmp_path / "checkpoint"
    state = {"model": run.model.state_dict(), "averager": averager}
    if asynchronous:
        pending: Any = dcp.async_save(
            state, checkpoint_id=folder, process_group=dist.new_group(backend="gloo")
        )
        with torch.no_grad():
            for parameter in run.model.parameters():
                part(parameter).fill_(7.0)  # training goes on, and the window moves
        for _ in range(K):
            averager.collect(run.model)
        pending.result()
    else:
        dcp.save(state, checkpoint_id=folder)
    model, loaded = build(how), make(kind, tmp_path / "other", k=K)
    loaded.bind(model)
    state = {"model": model.state_dict(), "averager": loaded}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    assert_same(model.state_dict(), run.taken[-1])
    assert loaded.snapshot_steps == list(range(STEPS - K + 1, STEPS + 1))
    assert_same(loaded.average(), want)
    with loaded.swapped_into(model):
        assert_same(model.state_dict(), want)
    loaded.collect(model)
    assert_same(loaded.average(), mean_of([*run.taken, run.taken[-1]]))


@pytest.mark.parametrize("how", CASES)
def test_collecting_shards_adds_at_most_one_copy(how: str) -> None:
    run = train(how)
    tensors = {id(t): part(t) for t in run.model.state_dict(keep_vars=True).values()}
    size = sum(t.numel() * t.element_size() for t in tensors.values() if t.is_cuda)
    before = settled()
    averager = LatestWeightAverager(k=4)
    for _ in range(10):
        averager.collect(run.model)
    averager.wait()
    added = torch.cuda.max_memory_allocated() - before
    assert added <= size + 3 * MIB  # PyTorch rounds each block up
    assert added >= 0.9 * size


@pytest.mark.parametrize("guarded", [True, False], ids=["as it is", "control: not waiting"])
def test_offloaded_weights_change_only_when_the_gpu_has_read_them(
    guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward pass orders its copies of the weights and returns; the GPU reads them later.

    Neither the swap after one nor the end of the block around one may overtake it.
    """
    averager, x = LatestWeightAverager(k=K), inputs(99)
    model = train("offload", [averager]).model.eval()
    other = build("offload").eval()
    other.load_state_dict(averager.average())
    with torch.no_grad():
        raw, expected = model(x), other(x)
        torch.cuda.synchronize()
        if not guarded:
            monkeypatch.setattr(swap, "_wait_for_copies", lambda tensors: None)
        sleep(300.0)
        late = model(x)
        with averager.swapped_into(model):
            sleep(300.0)
            averaged = model(x)
        torch.cuda.synchronize()
    assert (torch.equal(late, raw) and torch.equal(averaged, expected)) is guarded
