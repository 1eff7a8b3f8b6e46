"""Folders that Diffusers wrote (tests/recorded/record_diffusers.py), averaged without it."""

import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.guides import ROOT
from support.models import brute_force, same_bits
from torch import Tensor

from torch_lawa import average_checkpoints, plan_average
from torch_lawa.errors import FormatError, LayoutError

WEIGHTS = "diffusion_pytorch_model.safetensors"
LORA = "pytorch_lora_weights.safetensors"
ARCHIVE = ROOT / "tests" / "recorded" / "diffusers.tar.xz"


@pytest.fixture(autouse=True)
def _recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(filter="data")


def mean(files: Sequence[str]) -> dict[str, Tensor]:
    states = [load_file(file) for file in files]
    return {
        name: torch.from_numpy(brute_force([state[name] for state in states])).to(tensor.dtype)
        for name, tensor in states[0].items()
    }


def equal(file: str, expected: dict[str, Tensor]) -> bool:
    found = load_file(file)
    return found.keys() == expected.keys() and all(
        same_bits(tensor, expected[name]) for name, tensor in found.items()
    )


def config(folder: str) -> dict[str, object]:
    return json.loads(Path(folder, "config.json").read_text())


def test_the_model_of_a_run_and_not_its_ema() -> None:
    plan = plan_average("run", "out", last=2)
    assert [str(found.location) for found in plan.inputs] == [
        "run/checkpoint-1000/unet",
        "run/checkpoint-1500/unet",
    ]
    assert [found.step for found in plan.inputs] == [1000, 1500]
    assert any("checkpoint-1500/unet_ema" in note and "EMA" in note for note in plan.notes)
    average_checkpoints("run", "out", last=2)
    assert equal(
        f"out/{WEIGHTS}", mean([f"run/checkpoint-{n}/unet/{WEIGHTS}" for n in (1000, 1500)])
    )
    assert config("out") == config("run/checkpoint-1500/unet")


def test_the_ema_where_a_pattern_says_so() -> None:
    """Steps are in the names of the folders above, and the EMA's settings are the newest's."""
    average_checkpoints(["run/checkpoint-*/unet_ema"], "out", at=1000, last=2)
    assert equal(
        f"out/{WEIGHTS}", mean([f"run/checkpoint-{n}/unet_ema/{WEIGHTS}" for n in (500, 1000)])
    )
    assert config("out") == config("run/checkpoint-1000/unet_ema")
    assert config("out")["optimization_step"] == 2


def test_shards_stay_shards() -> None:
    average_checkpoints("sharded", "out", last=3)
    index = json.loads(Path("out", f"{WEIGHTS}.index.json").read_text())
    theirs = json.loads(Path("sharded/checkpoint-1500/unet", f"{WEIGHTS}.index.json").read_text())
    assert index["weight_map"] == theirs["weight_map"]
    for file in set(index["weight_map"].values()):
        assert equal(
            f"out/{file}", mean([f"sharded/checkpoint-{n}/unet/{file}" for n in (500, 1000, 1500)])
        )


def test_a_variant_keeps_its_config_and_loses_its_name() -> None:
    average_checkpoints("variant", "out", last=2)
    fp16 = WEIGHTS.replace(".", ".fp16.")
    assert equal(
        f"out/{WEIGHTS}", mean([f"variant/checkpoint-{n}/unet/{fp16}" for n in (500, 1000)])
    )
    assert config("out") == config("variant/checkpoint-1000/unet")


def test_one_model_of_pipelines() -> None:
    with pytest.raises(FormatError, match=r"Diffusers pipeline .*checkpoint-\*/unet"):
        plan_average("pipelines", "out", last=2)
    average_checkpoints(["pipelines/checkpoint-*/vae"], "out", last=2)
    assert equal(
        f"out/{WEIGHTS}", mean([f"pipelines/checkpoint-{n}/vae/{WEIGHTS}" for n in (1000, 1500)])
    )


def test_checkpoints_of_several_models_need_a_pattern() -> None:
    for checkpoint in Path("run").iterdir():
        (checkpoint / "unet_ema").rename(checkpoint / "text_encoder")
    with pytest.raises(FormatError, match=r"several models .*'run/\*/unet'"):
        plan_average("run", "out", last=2)
    assert len(plan_average(["run/*/unet"], "out", last=2).inputs) == 2


def test_lora_weights_before_the_whole_model_of_accelerate() -> None:
    average_checkpoints("lora", "out", last=2)
    assert equal(f"out/{LORA}", mean([f"lora/checkpoint-{n}/{LORA}" for n in (500, 1000)]))
    with safe_open(f"out/{LORA}", "pt") as file:
        assert json.loads(file.metadata()["lora_adapter_metadata"])["lora_alpha"] == 8


@pytest.mark.parametrize(("text", "refused"), [('{"unet.lora_alpha": 4}', True), ("{", False)])
def test_lora_weights_that_are_scaled_differently(text: str, refused: bool) -> None:
    for alpha, name in (('{"unet.lora_alpha": 8}', "a"), (text, "b")):
        Path(name).mkdir()
        metadata = {"lora_adapter_metadata": alpha}
        save_file({"unet.lora_A.weight": torch.ones(2)}, f"{name}/{LORA}", metadata)
    if refused:
        with pytest.raises(LayoutError, match=r"unet\.lora_alpha is 8, but 4"):
            plan_average(["a", "b"], "out")
    else:  # not readable, so there is nothing to compare
        assert len(plan_average(["a", "b"], "out").inputs) == 2
