"""Sharded models exported to one folder: the unsharded mean, no rank ever holding the whole."""

import ctypes
import errno
import gc
import os
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from support.models import same_bits
from support.ranks import on_ranks
from support.sharded import Net, refill
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from torch_lawa import (
    AverageOptions,
    DiskStore,
    LatestWeightAverager,
    average_checkpoints,
    inspect_checkpoint,
)
from torch_lawa.checkpoints.formats.safetensors_folder import FolderSink
from torch_lawa.export import exporter, folder_writer
from torch_lawa.shards import MeshSharding

STEPS, K = 4, 3
WEIGHTS = "model.safetensors"


def plain() -> Net:
    torch.manual_seed(0)
    return Net()


def sharded(how: str) -> nn.Module:
    net, size = plain(), dist.get_world_size()
    plan: dict[str, Any] = {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(net)
    if how == "offload":
        return fully_shard(net, offload_policy=CPUOffloadPolicy(pin_memory=False))
    if how == "tensor":
        return parallelize_module(net, init_device_mesh("cpu", (size,)), plan)
    if how == "2d":
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(net, mesh["tensor"], plan)
        return fully_shard(net, mesh=mesh["data"])
    if how == "replicas":  # parts of 2 ranks, the same on every pair
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("copies", "parts"))
        return fully_shard(net, mesh=mesh)
    assert how == "fsdp"
    for layer in (net.wide, net.narrow, net.small):
        fully_shard(layer)
    return fully_shard(net)


def collected(model: nn.Module, **how: Any) -> LatestWeightAverager:
    averager = LatestWeightAverager(k=K, **how)
    for step in range(STEPS):
        refill(model, step)
        averager.collect(model, step=step + 1)
    return averager


def mean_by_hand() -> dict[str, Tensor]:
    """float64, oldest first; what is not averaged as it was last."""
    model, states = plain(), []
    for step in range(STEPS):
        refill(model, step)
        states.append({n: t.clone() for n, t in model.state_dict().items()})
    trained = {n for n, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    return {
        name: torch.stack([s[name].double() for s in states[-K:]]).sum(0).div(K).float()
        if name in trained
        else newest
        for name, newest in states[-1].items()
    }


class Watched:
    """Counts what was gathered and is still alive when the next tensor is."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.most = 0
        self._live: dict[int, Any] = {}
        self.gather = MeshSharding.gather

    def __call__(self, sharding: MeshSharding, part: Tensor) -> Tensor:
        whole = self.gather(sharding, part)
        size = whole.numel() * whole.element_size()
        self.sizes.append(size)
        self._live[id(whole)] = weakref.ref(whole), size
        alive = [size for seen, size in self._live.values() if seen() is not None]
        self.most = max(self.most, sum(alive))
        return whole


def all_of_it(rank: int, folder: str) -> dict[str, str]:
    """Several tests' work on one pair of processes: starting them takes longer."""
    of_state_dicts(rank, f"{folder}/placements")
    of_transformers(rank, f"{folder}/transformers")
    return failures(rank, f"{folder}/failures")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, str]]]:
    folder = tmp_path_factory.mktemp("pair")
    return folder, on_ranks(2, all_of_it, str(folder))


def alone(how: str, folder: str) -> None:
    """One process, with a process group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        collected(sharded(how)).save_pretrained(f"{folder}/out")
    finally:
        dist.destroy_process_group()


def test_a_group_of_one(tmp_path: Path) -> None:
    alone("fsdp", str(tmp_path))
    found, expected = load_file(tmp_path / "out" / WEIGHTS), mean_by_hand()
    assert set(found) == set(expected) - {"head.weight"}
    for name, tensor in found.items():
        assert same_bits(tensor, expected[name]), name


def export(rank: int, hows: list[str], folder: str) -> dict[str, tuple[list[int], int]]:
    found = {}
    for how in hows:
        averager = collected(sharded(how))
        watched = Watched()
        monkey = pytest.MonkeyPatch()
        monkey.setattr(MeshSharding, "gather", partialmethod(watched))
        averager.save_pretrained(f"{folder}/{how}")
        monkey.undo()
        found[how] = watched.sizes, watched.most
        averager.save_pretrained(f"{folder}/{how}-bf16", dtype=torch.bfloat16)
        averager.save_pretrained(f"{folder}/{how}-shards", max_shard_size=200, k=2)
        dist.barrier()  # rank 0 alone writes; the folder is there when the call returns
        assert sorted(os.listdir(folder)).count(how) == 1
    return found


@pytest.mark.parametrize(
    ("world_size", "hows"),
    [
        pytest.param(1, ["fsdp", "ddp"], marks=pytest.mark.matrix),
        (2, ["fsdp", "tensor", "offload", "ddp"]),
        pytest.param(3, ["fsdp", "tensor"], marks=pytest.mark.matrix),
        pytest.param(4, ["fsdp", "2d", "replicas", "tensor"], marks=pytest.mark.matrix),
    ],
)
def test_the_unsharded_mean_from_any_shards(
    world_size: int, hows: list[str], tmp_path: Path
) -> None:
    answers = on_ranks(world_size, export, hows, str(tmp_path))
    expected = mean_by_hand()
    unsharded = collected(plain())
    names = set(expected) - {"head.weight"}
    for how in hows:
        assert os.listdir(tmp_path / how) == [WEIGHTS]
        found = load_file(tmp_path / how / WEIGHTS)
        assert set(found) == names
        for name in names:
            assert same_bits(found[name], expected[name]), (how, name)
        halved = load_file(tmp_path / f"{how}-bf16" / WEIGHTS)
        for name, tensor in unsharded.average(dtype=torch.bfloat16).items():
            if name in names and tensor.dtype == torch.bfloat16:
                assert same_bits(halved[name], tensor), (how, name)
        shards = {}
        for file in (tmp_path / f"{how}-shards").glob("*.safetensors"):
            shards |= load_file(file)
        assert set(shards) == names
        for name, tensor in unsharded.average(2).items():
            assert name not in names or same_bits(shards[name], tensor), (how, name)
        for sizes, most in (answer[how] for answer in answers):
            if world_size > 1 and how != "ddp":
                assert sizes
                assert most == max(sizes)  # one at a time
            else:
                assert not sizes
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".partial")]


def cut(whole: Tensor, mesh: Any, placement: Any, rank: int) -> DTensor:
    """As `distribute_tensor` would, which cannot send all dtypes."""
    part = whole
    if isinstance(placement, Shard):
        length = whole.shape[placement.dim]
        first = -(-length // 2)  # the first rank has more
        part = whole.narrow(placement.dim, rank * first, length - first if rank else first)
    return DTensor.from_local(
        part.contiguous(),
        mesh,
        [placement],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def of_state_dicts(rank: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    averager = LatestWeightAverager(k=2)
    for value in (1.0, 4.0):
        values = {
            "rows": (torch.arange(15.0).view(5, 3) + value, Shard(0)),
            "columns": (torch.arange(15.0).view(5, 3) + value, Shard(1)),
            "last": (torch.arange(24.0).view(2, 4, 3) + value, Shard(2)),
            "copies": (torch.arange(3.0) + value, Replicate()),
            "empty": (torch.zeros(0, 3), Shard(0)),
            "short": (torch.full((1,), value), Shard(0)),
            "complex": (torch.arange(5) * (1 + 1j) + value, Shard(0)),
            "float8": (torch.tensor([value, 2 * value]).to(torch.float8_e4m3fn), Shard(0)),
            "half": (torch.full((3,), value).half(), Shard(0)),
            "short integers": (torch.arange(5, dtype=torch.int16), Shard(0)),
            "booleans": (torch.tensor([True, False, True]), Shard(0)),
        }
        averager.collect({n: cut(t, mesh, p, rank) for n, (t, p) in values.items()})
    averager.save_pretrained(f"{folder}/out")


def test_any_placement_and_dtype(pair: tuple[Path, Any]) -> None:
    tmp_path = pair[0] / "placements"
    expected = {
        "rows": torch.arange(15.0).view(5, 3) + 2.5,
        "columns": torch.arange(15.0).view(5, 3) + 2.5,
        "last": torch.arange(24.0).view(2, 4, 3) + 2.5,
        "copies": torch.arange(3.0) + 2.5,
        "empty": torch.zeros(0, 3),
        "short": torch.tensor([2.5]),
        "complex": torch.arange(5) * (1 + 1j) + 2.5,
        "float8": torch.tensor([2.5, 5.0]).to(torch.float8_e4m3fn),
        "half": torch.full((3,), 2.5).half(),
        "short integers": torch.arange(5, dtype=torch.int16),
        "booleans": torch.tensor([True, False, True]),
    }
    found = load_file(tmp_path / "out" / WEIGHTS)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].to(torch.complex128), tensor.to(torch.complex128)), name


def no_room(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def failures(rank: int, folder: str) -> dict[str, str]:
    """The error on every rank, by what went wrong; no rank hangs."""
    told: dict[str, str] = {}

    def attempt(what: str, act: Callable[[], None]) -> None:
        try:
            act()
            told[what] = "nothing"
        except Exception as error:
            told[what] = f"{type(error).__name__}: {error}"
        dist.barrier()  # all are at the same location again

    averager = collected(sharded("fsdp"))
    out = f"{folder}/out"
    write, mean_by_tensor = FolderSink.write, exporter.Window.mean_by_tensor

    calls = 0

    def fail_later(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 3:
            no_room()
        write(*arguments)

    FolderSink.write = fail_later  # type: ignore[method-assign]
    attempt("full disk", lambda: averager.save_pretrained(out))
    FolderSink.write = write  # type: ignore[method-assign]
    folder_writer.publish, publish = no_room, folder_writer.publish
    attempt("no name", lambda: averager.save_pretrained(out))
    folder_writer.publish = publish

    def broken(*arguments: Any) -> Any:
        made = mean_by_tensor(*arguments)
        if rank == 1:
            made.make = no_room  # type: ignore[method-assign, assignment]
        return made

    exporter.Window.mean_by_tensor = broken  # type: ignore[method-assign]
    attempt("rank 1 cannot read", lambda: averager.save_pretrained(out))
    exporter.Window.mean_by_tensor = mean_by_tensor  # type: ignore[method-assign]
    early = LatestWeightAverager(k=2, min_snapshots=1)
    if rank == 0:
        early.collect({"w": torch.ones(3)})
    attempt("rank 1 has nothing", lambda: early.save_pretrained(out))
    attempt("k is too large", lambda: averager.save_pretrained(out, k=K + 1))
    stage = LatestWeightAverager(k=1)
    stage.collect({f"layer {rank}": torch.ones(3)})
    attempt("a pipeline", lambda: stage.save_pretrained(out))
    partial = LatestWeightAverager(k=1)
    mesh = init_device_mesh("cpu", (2,))
    partial.collect({"sum": DTensor.from_local(torch.ones(3), mesh, [Partial()])})
    attempt("partial", lambda: partial.save_pretrained(out))
    restored = LatestWeightAverager(k=K)
    restored.load_state_dict(averager.state_dict())
    attempt("unseen", lambda: restored.save_pretrained(out))
    attempt("seen", lambda: restored.save_pretrained(out, sharded("fsdp")))
    attempt("exists", lambda: averager.save_pretrained(out))
    attempt("replaced", lambda: averager.save_pretrained(out, overwrite=True))
    if rank == 1:
        solitary = LatestWeightAverager(k=1, store=DiskStore(f"{folder}/window", per_process=True))
        solitary.collect({"w": torch.ones(3)})
        solitary.save_pretrained(f"{folder}/by one")
    return told


def test_one_failure_is_everybodys(pair: tuple[Path, Any]) -> None:
    tmp_path, (first, second) = pair[0] / "failures", pair[1]
    out = tmp_path / "out"
    heard = "OutputError: rank 0 failed, so nothing was written: "
    full = f"{out}: cannot be written ([Errno 28] No space left on device)"
    for what in ("full disk", "no name"):
        assert first[what].startswith(f"OutputError: {full}")
        assert second[what].startswith(heard + full)
    assert first["rank 1 cannot read"].startswith("OutputError: rank 1 failed")
    assert "No space left" in first["rank 1 cannot read"]
    assert second["rank 1 cannot read"].startswith("OSError")
    nothing = "no average yet, with 0 of 1"
    assert f"rank 1 failed, so nothing was written: {nothing}" in first["rank 1 has nothing"]
    assert second["rank 1 has nothing"].startswith(f"NotReadyError: {nothing}")
    for told in (first, second):
        assert told["k is too large"].startswith("ConfigError")
        assert told["a pipeline"].startswith("LayoutError: rank 1 has other tensors")
        assert told["partial"].startswith("LayoutError: tensor 'sum' is a partial sum")
        assert told["unseen"].startswith("StateError: the averager was loaded")
        assert told["seen"] == told["replaced"] == "nothing"
    assert "exists already" in first["exists"]
    assert second["exists"].startswith(heard + f"{out}: exists already")
    assert sorted(os.listdir(tmp_path)) == ["by one", "out", "window"]
    expected, found = mean_by_hand(), load_file(out / WEIGHTS)
    for name, tensor in found.items():
        assert same_bits(tensor, expected[name]), name


def one_does_not_come(rank: int, folder: str) -> str:
    dist.init_process_group("gloo", timeout=timedelta(seconds=4))
    averager = LatestWeightAverager(k=1)
    averager.collect({"w": torch.ones(3)})
    try:
        if rank == 0:
            averager.save_pretrained(f"{folder}/out")
        return ""
    except Exception as error:
        return str(error)
    finally:
        time.sleep(0 if rank == 0 else 6)
        dist.destroy_process_group()


@pytest.mark.matrix
def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    told, _ = on_ranks(2, one_does_not_come, str(tmp_path), join=False)
    assert "rank 1" in told
    assert "averager.save_pretrained" in told
    assert os.listdir(tmp_path) == []


def tiny_gpt2() -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=6, vocab_size=13, n_positions=8, bos_token_id=1, eos_token_id=1
    )
    return transformers.GPT2LMHeadModel(config)


def of_transformers(rank: int, folder: str) -> None:
    model = tiny_gpt2()
    for block in model.transformer.h:
        fully_shard(block)
    fully_shard(model)
    averager = LatestWeightAverager(k=K)
    for step in range(STEPS):
        refill(model, step)
        averager.collect(model, step=step + 1)
        dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/run/step_{step + 1}")
    averager.save_pretrained(f"{folder}/out", model, max_shard_size="1kB")


def test_transformers_loads_it_and_files_give_the_same(pair: tuple[Path, Any]) -> None:
    """A sharded model with tied weights; its checkpoints of FSDP2 ranks, averaged on disk."""
    import transformers

    tmp_path = pair[0] / "transformers"
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert type(loaded) is transformers.GPT2LMHeadModel
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    model, averager = tiny_gpt2(), LatestWeightAverager(k=K)
    for step in range(STEPS):
        refill(model, step)
        averager.collect(model)
    for name, tensor in averager.average().items():
        assert same_bits(loaded.state_dict()[name], tensor), name
    assert loaded.lm_head.weight is loaded.transformer.wte.weight

    options = AverageOptions(max_shard_size=1000)
    average_checkpoints(tmp_path / "run", tmp_path / "offline", last=K, options=options)
    made = inspect_checkpoint(tmp_path / "offline").provenance
    assert [each["step"] for each in made["inputs"]] == [2, 3, 4]
    offline = {}
    for file in (tmp_path / "offline").glob("model-*-of-*.safetensors"):
        offline |= load_file(file)
    for name, tensor in averager.average().items():
        assert same_bits(offline[name], tensor), name


class Big(nn.Module):
    """400 MB in layers of 17 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2048, 2048, bias=False) for _ in range(24))


def peak(act: Callable[[], None]) -> int:
    """By how many bytes this process grows, at most, while it acts."""

    def read(key: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1]) * 1024
        raise AssertionError(key)

    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest so far
    before = read("VmRSS")
    act()
    return read("VmHWM") - before


def memory(rank: int, folder: str) -> tuple[int, int]:
    # Freed memory goes back at once; else the C library keeps up to 64 MB for the next tensor.
    mmap_threshold = -3
    assert ctypes.CDLL(None).mallopt(mmap_threshold, 1_000_000)
    with torch.device("meta"):
        model = Big()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    averager = LatestWeightAverager(k=2)
    for value in (1.0, 4.0):
        for parameter in model.parameters():
            parameter.data.to_local().fill_(value + rank)  # type: ignore[attr-defined]
        averager.collect(model)
    # What the first export ever loads (half of PyTorch) is not what is measured.
    collected(sharded("fsdp")).save_pretrained(f"{folder}/small")
    exported = peak(lambda: averager.save_pretrained(f"{folder}/out", max_shard_size="100MB"))

    def gather_all() -> None:
        whole = [t.full_tensor() for t in averager.average().values()]  # type: ignore[attr-defined]
        assert len(whole) == 24

    return exported, peak(gather_all)


@pytest.mark.matrix
@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux")
def test_no_rank_holds_the_whole_model(tmp_path: Path) -> None:
    size = 24 * 2048 * 2048 * 4
    for exported, gathered in on_ranks(2, memory, str(tmp_path)):
        assert exported < size / 7  # two or three tensors of 17 MB, not 24 of them
        assert gathered > size  # what the measure says of a rank that does
    found = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        found |= load_file(file)
    assert len(found) == 24
    for tensor in found.values():
        assert torch.equal(tensor[:1024], torch.full((1024, 2048), 2.5))
        assert torch.equal(tensor[1024:], torch.full((1024, 2048), 3.5))
