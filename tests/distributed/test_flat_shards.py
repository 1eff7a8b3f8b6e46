"""Masters in flat runs that are cut anywhere: averaged, swapped, saved, and loaded by others."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from support.models import brute_force, same_bits
from support.ranks import on_ranks
from support.sharded import Net
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from torch_lawa import DiskStore, LatestWeightAverager
from torch_lawa.errors import ConfigError, LayoutError, SwapError
from torch_lawa.flat_shards import FlatShard, FlatSharding
from torch_lawa.integrations.window_files import load_window, save_window

STEPS, K = 4, 3
TOKENS = torch.arange(11)


def plain() -> Net:
    torch.manual_seed(0)
    return Net()


def whole(average: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in average.items()}


def averages(rank: int, seed: int, folder: str) -> dict[str, Any]:
    from support.deepspeed_stand_in import engine_for, refill

    engine, averager = engine_for(plain(), seed), LatestWeightAverager(k=K)
    engine.eval()
    snapshots = []
    for step in range(STEPS):
        snapshots.append(refill(engine, step))
        averager.collect(engine)
    refill(engine, STEPS)

    def state() -> list[Tensor]:
        flats = engine.optimizer.single_partition_of_fp32_groups
        return [t.clone() for t in (*flats, *engine.module.state_dict().values())]

    before = state()
    with torch.no_grad(), averager.swapped_into(engine):
        output = engine(TOKENS)
        inside = {n: t.clone() for n, t in engine.module.state_dict().items()}
        with pytest.raises(SwapError, match="collect"):
            averager.collect(engine)
    assert all(map(same_bits, before, state()))
    with pytest.raises(LayoutError, match="pass the engine"):
        averager.collect(engine.module)
    save_window(averager, engine, Path(folder) / "window", writes=rank == 0)
    averager.save_pretrained(Path(folder) / "exported", engine)
    average = averager.average()
    assert isinstance(average["wide.weight"], FlatShard)
    assert average["wide.weight"].shape == (8, 6)
    found = {"average": whole(average), "inside": inside, "output": output}
    found["sample"] = whole(averager.sample(seed=7))
    return {**found, "snapshots": snapshots}


def expected(snapshots: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    window = snapshots[-K:]
    return {n: torch.from_numpy(brute_force([s[n] for s in window])) for n in window[0]}


def sampled(snapshots: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    averager = LatestWeightAverager(k=K)
    for snapshot in snapshots:
        averager.collect(snapshot)
    return averager.sample(seed=7)


def loaded(rank: int, kind: str, folder: str) -> dict[str, Tensor]:
    from support.deepspeed_stand_in import engine_for

    model: Any = plain()
    if kind == "fsdp":
        model = fully_shard(model)
    elif kind == "engine":
        model = engine_for(model, 5)
    averager = LatestWeightAverager(k=K)
    assert load_window(averager, model, Path(folder) / "window") is not None
    assert averager.snapshot_steps == [2, 3, 4]
    return whole(averager.average())


@pytest.mark.parametrize(("ranks", "seed"), [(2, 1), (3, 2), (3, 3)])
def test_runs_that_are_cut_anywhere(ranks: int, seed: int, tmp_path: Path) -> None:
    for found in on_ranks(ranks, averages, seed, str(tmp_path)):
        mean, sample = expected(found["snapshots"]), sampled(found["snapshots"])
        model = plain().eval()
        for name, value in mean.items():
            assert same_bits(found["sample"][name], sample[name]), name
            assert same_bits(found["average"][name], value), name
            assert same_bits(found["inside"][name], value.float()), name
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.data = mean[name].float()
        for buffer in model.buffers():
            buffer.fill_(STEPS - 1)
        with torch.no_grad():
            assert same_bits(found["output"], model(TOKENS))
        assert same_bits(found["average"]["head.weight"], mean["embed.weight"])
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    for name, value in mean.items():
        assert same_bits(exported[name], value), name
    for others, kind in ((5 - ranks, "engine"), (2, "fsdp"), (1, "plain")):
        for average in on_ranks(others, loaded, kind, str(tmp_path)):
            for name, value in mean.items():
                # Only engines have masters in float64; for the others they are rounded.
                assert (
                    same_bits(average[name], value)
                    if kind == "engine"
                    else torch.allclose(average[name].double(), value)
                ), (kind, name)


def other_ways(rank: int, folder: str) -> list[dict[str, Tensor]]:
    """Copied, saved in the background, and stored on disk."""
    from support.deepspeed_stand_in import engine_for, refill

    engine, averager = engine_for(plain(), 1), LatestWeightAverager(k=2)
    stored = LatestWeightAverager(k=2, store=DiskStore(f"{folder}/disk"))
    for step in (1, 2, 3):
        refill(engine, step)
        averager.collect(engine)
        stored.collect(engine)
    stored.wait()
    del stored  # and so its claim on the folder
    copied = copy.deepcopy(averager)
    group = torch.distributed.new_group(backend="gloo")
    dcp.async_save(
        {"averager": averager}, checkpoint_id=f"{folder}/async", process_group=group
    ).result()  # type: ignore[union-attr]
    loaded = LatestWeightAverager(k=2)
    reopened = LatestWeightAverager(k=2, store=DiskStore(f"{folder}/disk"))
    for each in (copied, loaded, reopened):
        each.bind(engine)
    dcp.load({"averager": loaded}, checkpoint_id=f"{folder}/async")
    assert loaded.snapshot_steps == reopened.snapshot_steps == copied.snapshot_steps == [2, 3]
    return [whole(each.average()) for each in (averager, copied, loaded, reopened)]


def test_copied_saved_in_the_background_and_stored_on_disk(tmp_path: Path) -> None:
    for first, *others in on_ranks(2, other_ways, str(tmp_path)):
        for average in others:
            assert all(same_bits(average[name], value) for name, value in first.items())


def gathered(rank: int) -> list[tuple[Tensor, Tensor]]:
    found = []
    group = torch.distributed.group.WORLD
    assert group is not None
    for dtype in (
        torch.float32,
        torch.bfloat16,
        torch.float64,
        torch.float8_e4m3fn,
        torch.complex64,
    ):
        bits = torch.arange(7 * dtype.itemsize, dtype=torch.uint8) * 37 + 100
        value = bits.view(dtype)  # NaNs and negative zeros among them
        start, count = (0, 3) if rank == 0 else (3, 4)
        sharding = FlatSharding(torch.Size((7, 1)), start, count, group, "cpu")
        shard = sharding.whole(value[start : start + count].clone())
        copy = shard.detach().clone()
        assert "of (7, 1)" in repr(copy)
        assert isinstance(copy, FlatShard)
        found.append((copy.full_tensor().flatten().view(torch.uint8), bits))
    return found


def test_gathered_bits() -> None:
    for found in on_ranks(2, gathered):
        for whole_bits, bits in found:
            assert torch.equal(whole_bits, bits)


def refusals(rank: int) -> None:
    from support.deepspeed_stand_in import DeepSpeedEngine, DeepSpeedZeroOptimizer, engine_for

    averager = LatestWeightAverager(k=1)

    def refused(match: str, engine: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            averager.collect(engine)

    def changed(**facts: Any) -> Any:
        engine = engine_for(plain(), 0)
        for name, value in facts.items():
            setattr(engine, name, value)
        return engine

    refused("MoE", changed(has_moe_layers=True))
    refused("tensor parallelism", changed(mp_world_size=2))
    refused("NVMe", changed(offload=SimpleNamespace(device="nvme")))
    averager.collect(changed(offload=SimpleNamespace(device="cpu")))
    pipeline = type("PipelineEngine", (DeepSpeedEngine,), {})
    refused("a pipeline", pipeline(plain(), changed().optimizer))
    unknown = type("MiCS_Optimizer", (DeepSpeedZeroOptimizer,), {})
    refused("optimizer MiCS_Optimizer", DeepSpeedEngine(plain(), unknown((), ())))
    offloaded = changed()
    LatestWeightAverager(k=1).collect(offloaded)
    offloaded.optimizer.offloaded_states = {"hp_params"}
    refused("reload_states", offloaded)
    partitioned = plain()
    partitioned.wide.weight.ds_id = 3
    refused("without an optimizer", DeepSpeedEngine(partitioned, None))


def test_engines_that_are_refused() -> None:
    on_ranks(1, refusals)
