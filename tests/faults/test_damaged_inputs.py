"""Damaged checkpoints of every format: a clear error or a result, never a traceback or a remnant.

A trial damages one input of an average: bytes are flipped, cut off, inserted, repeated or replaced
by large numbers. What can still be read may be averaged; anything else must end in a `LawaError`
that names the file, in bounded time, without code being executed and without an output left over.
"""

import contextlib
import itertools
import json
import random
import shutil
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from support.campaign import Campaign, CountTrials
from support.damage import damaged_bytes
from support.deepspeed import save_zero, unpack_recorded
from support.megatron import unpack_run, write_torch_dist

from torch_lawa import AverageOptions, average_checkpoints, inspect_checkpoint
from torch_lawa.errors import LawaError

pytestmark = [pytest.mark.faults, pytest.mark.filterwarnings("ignore:.*torch.distributed")]

SECONDS = 10.0  # for one trial; a sound one takes milliseconds


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "layer.weight": torch.randn(6, 5, generator=generator),
        "layer.half": torch.randn(7, generator=generator).to(torch.bfloat16),
        "count": torch.tensor([3, 4]),
        "empty": torch.zeros(0, 2),
    }


def write_safetensors(path: Path, seed: int) -> None:
    save_file(tensors(seed), path / "model.safetensors", metadata={"step": str(seed)})


def write_sharded(path: Path, seed: int) -> None:
    names = {}
    for number, (name, tensor) in enumerate(tensors(seed).items()):
        file = f"model-{number + 1:05d}-of-00004.safetensors"
        save_file({name: tensor}, path / file)
        names[name] = file
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (path / "config.json").write_text(json.dumps({"model_type": "toy"}))


def write_torch(path: Path, seed: int) -> None:
    torch.save({"model": tensors(seed), "step": seed}, path / "model.pt")


def write_legacy(path: Path, seed: int) -> None:
    torch.save(tensors(seed), path / "model.pt", _use_new_zipfile_serialization=False)


def write_distributed(path: Path, seed: int) -> None:
    dcp.save(tensors(seed), checkpoint_id=path / "dcp", no_dist=True)


def write_megatron(path: Path, seed: int) -> None:
    write_torch_dist(path / "dcp", tensors(seed), seed)


def write_masters(path: Path, seed: int) -> None:
    run = unpack_run("0.9.0", path)
    (run / f"iter_{10 * seed:07d}").rename(path / "dcp")
    shutil.rmtree(run)


def write_adapter(path: Path, seed: int) -> None:
    lora = {f"base.{n}.lora_A.weight": t for n, t in tensors(seed).items() if t.ndim == 2}
    save_file(lora, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2}))


def write_zero(path: Path, seed: int, stage: int) -> None:
    found = tensors(seed)
    save_zero(
        path / f"global_step{seed}", [{"layer.weight": found["layer.weight"]}],
        stage=stage, ranks=2, buffers={"count": found["count"]}, step=seed,
        frozen={"layer.half": found["layer.half"]}, tied={"tied": "layer.weight"},
    )  # fmt: skip


def write_zero2(path: Path, seed: int) -> None:
    write_zero(path, seed, 2)


def write_zero3(path: Path, seed: int) -> None:
    write_zero(path, seed, 3)


def write_universal(path: Path, seed: int) -> None:
    unpack_recorded(path / "all")
    (path / f"all/zero2/universal/global_step{seed}").rename(path / f"global_step{seed}")
    shutil.rmtree(path / "all")


def write_orbax(path: Path, seed: int) -> None:
    recorded = Path(__file__).parents[1] / "jax_checkpoints" / "recorded"
    shutil.copytree(recorded / "run" / str(10 * seed), path, dirs_exist_ok=True)


def write_orbax_files(path: Path, seed: int) -> None:
    recorded = Path(__file__).parents[1] / "jax_checkpoints" / "recorded"
    shutil.copytree(recorded / "files", path, dirs_exist_ok=True)


WRITERS: dict[str, Callable[[Path, int], None]] = {
    "safetensors": write_safetensors,
    "sharded": write_sharded,
    "torch": write_torch,
    "legacy": write_legacy,
    "distributed": write_distributed,
    "megatron": write_megatron,
    "megatron masters": write_masters,
    "adapter": write_adapter,
    "zero2": write_zero2,
    "zero3": write_zero3,
    "zero universal": write_universal,
}
if find_spec("tensorstore"):  # in make test-jax
    WRITERS |= {"orbax": write_orbax, "orbax files": write_orbax_files}


@pytest.mark.parametrize("name", WRITERS)
def test_damaged_checkpoints(
    name: str, campaign: Campaign, trials: CountTrials, tmp_path: Path
) -> None:
    sound, trial, outputs = (tmp_path / part for part in ("sound", "trial", "outputs"))
    for seed in (1, 2):
        (sound / str(seed)).mkdir(parents=True)
        WRITERS[name](sound / str(seed), seed)
    chance = random.Random(f"{name} {campaign.seed}")
    options = AverageOptions(key="masters" if name == "megatron masters" else None)
    refused = 0
    for number in campaign.until_time_is_up(itertools.count()):
        shutil.rmtree(trial, ignore_errors=True)
        shutil.rmtree(outputs, ignore_errors=True)
        shutil.copytree(sound, trial)
        outputs.mkdir()
        victim = chance.choice(sorted(p for p in (trial / "2").rglob("*") if p.is_file()))
        victim.write_bytes(damaged_bytes(victim.read_bytes(), chance))
        inputs = [_checkpoint(trial / seed) for seed in ("1", "2")]
        began = time.monotonic()
        try:
            out = outputs / f"averaged{inputs[0].suffix}"
            average_checkpoints(inputs, out, options=options)
        except LawaError:
            refused += 1
            assert not list(outputs.iterdir()), f"trial {number}"
        with contextlib.suppress(LawaError):
            inspect_checkpoint(inputs[1], key=options.key)
        assert time.monotonic() - began < SECONDS, f"trial {number}: {victim.name}"
        trials("damaged checkpoints", 1)
    assert refused or number < 50


def _checkpoint(folder: Path) -> Path:
    inner = [path for path in folder.iterdir() if path.suffix == ".pt" or path.name == "dcp"]
    return inner[0] if inner else folder
