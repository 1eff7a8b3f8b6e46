"""Diffusers' own loaders on averages, and the code of docs/guides/diffusers.md.

`make test-finetuning` runs it; what needs no Diffusers is tested in
tests/unit/torch_lawa/offline/test_diffusers_folders.py.
"""

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.guides import blocks
from support.models import round_fraction, same_bits, true_mean
from torch import Tensor, nn

from torch_lawa import LatestWeightAverager, average_checkpoints
from torch_lawa.cli import main
from torch_lawa.errors import LayoutError

pytest.importorskip("diffusers", reason="Diffusers is not installed here: make test-finetuning")

from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from diffusers.training_utils import EMAModel
from peft import LoraConfig
from transformers import CLIPTextConfig, CLIPTextModel

from torch_lawa.integrations.diffusers import to_ema_model

WEIGHTS = "diffusion_pytorch_model.safetensors"
LORA = "pytorch_lora_weights.safetensors"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def tiny_unet() -> UNet2DConditionModel:
    torch.manual_seed(1)
    return UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=(4, 8),
        layers_per_block=1,
        cross_attention_dim=8,
        attention_head_dim=2,
        norm_num_groups=2,
    )


def tiny_pipeline(unet: UNet2DConditionModel) -> StableDiffusionPipeline:
    text = CLIPTextConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=9,
        max_position_embeddings=8,
    )
    vae = AutoencoderKL(block_out_channels=(4,), latent_channels=4, norm_num_groups=2)
    return StableDiffusionPipeline(
        vae=vae,
        text_encoder=CLIPTextModel(text),
        tokenizer=None,
        unet=unet,
        scheduler=DDIMScheduler(steps_offset=1, clip_sample=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


class Bench:
    """What the guide takes for granted: a UNet, its training, and a record of its weights."""

    def __init__(self) -> None:
        self.history: list[dict[str, Tensor]] = []
        self.validated: list[dict[str, Tensor]] = []
        self.names: dict[str, Any] = {
            "unet": tiny_unet(),
            "train_step": self.step,
            "train_loader": range(6),
            "validate": lambda unet: self.validated.append(state_of(unet)),
            "StableDiffusionPipeline": StableDiffusionPipeline,
        }

    def step(self, unet: nn.Module, batch: object) -> None:
        with torch.no_grad():
            for parameter in unet.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        self.history.append(state_of(unet))

    def run(self, code: str) -> None:
        """One block; a run of 6 steps, so that a schedule of 500 is one of 2, or of 200 of 1."""
        for long, short in (("Every(500)", "Every(2)"), ("Every(200)", "Every(1)")):
            code = code.replace(long, short)
        self.history.clear()
        exec(code.replace("k=6", "k=3").replace("k=10", "k=6"), self.names)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def mean(states: list[dict[str, Tensor]], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """By hand, rounded once; torch rounds float64 to 16 bits by way of float32."""
    found = {}
    for name, tensor in states[0].items():
        values = true_mean([state[name] for state in states])
        rounded = [round_fraction(value, dtype) for value in values]
        found[name] = torch.tensor(rounded, dtype=torch.float64).to(dtype).view(tensor.shape)
    return found


def equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        same_bits(tensor, expected[name]) for name, tensor in found.items()
    )


def holds(ema: EMAModel, model: nn.Module, expected: Mapping[str, Tensor]) -> bool:
    names = [name for name, _ in model.named_parameters()]
    return equal(dict(zip(names, ema.shadow_params, strict=True)), expected)


def settings_of(ema: EMAModel) -> dict[str, Any]:
    return {name: value for name, value in ema.state_dict().items() if name != "shadow_params"}


def test_the_loop_of_the_guide() -> None:
    bench = Bench()
    (code,) = blocks("diffusers.md", "Averaged weights of Diffusers models")
    bench.run(code)
    expected = mean(bench.history[1::2])
    assert equal(bench.validated[0], expected)
    assert equal(state_of(bench.names["unet"]), expected)  # from_pretrained
    assert equal(load_file(f"averaged/unet/{WEIGHTS}"), expected)


def test_the_ema_of_the_guide() -> None:
    bench = Bench()
    theirs, ours = blocks("diffusers.md", "Where scripts use EMAModel")
    bench.run(theirs)
    bench.run(ours)
    unet, loaded, expected = bench.names["unet"], bench.names["loaded"], mean(bench.history)
    assert holds(loaded, unet, expected)
    assert (loaded.decay, loaded.optimization_step) == (0.999, 6)
    config, own = (json.loads(Path(run, "unet_ema/config.json").read_text())
                   for run in ("lawa", "ema"))  # fmt: skip
    assert config == own  # both trained for 6 steps
    assert equal(state_of(UNet2DConditionModel.from_pretrained("lawa/unet_ema")), expected)


def test_an_ema_continues_from_the_average_and_not_from_the_newest_weights() -> None:
    unet, averager = tiny_unet(), LatestWeightAverager(k=3)
    bench = Bench()
    for step in (1000, 2000, 3000):
        bench.step(unet, None)
        averager.collect(unet, step=step)
    expected, newest = mean(bench.history), bench.history[-1]
    ema = to_ema_model(averager, unet, decay=0.999)
    assert equal(state_of(unet), newest)
    ema.step(unet.parameters())
    decay = (1 + 3000) / (10 + 3000)
    for name, found in zip(dict(unet.named_parameters()), ema.shadow_params, strict=True):
        torch.testing.assert_close(found, decay * expected[name] + (1 - decay) * newest[name])

    averager.save_pretrained("plain", unet)
    plain = EMAModel.from_pretrained("plain", UNet2DConditionModel)
    assert holds(plain, unet, expected)
    assert plain.optimization_step == 0
    plain.step(unet.parameters())  # what the guide warns of
    for name, found in zip(dict(unet.named_parameters()), plain.shadow_params, strict=True):
        torch.testing.assert_close(found, newest[name])


def test_a_smaller_window_and_another_model() -> None:
    unet, averager, bench = tiny_unet(), LatestWeightAverager(k=3), Bench()
    for _ in range(3):
        bench.step(unet, None)
        averager.collect(unet)
    assert holds(to_ema_model(averager, unet, k=2), unet, mean(bench.history[1:]))
    other, of_other = nn.Linear(2, 2), LatestWeightAverager(k=1)
    of_other.collect(other)
    with pytest.raises(LayoutError, match="not a model of Diffusers"):
        to_ema_model(of_other, other)


@pytest.mark.parametrize("how", [{}, {"max_shard_size": 20_000}, {"dtype": torch.bfloat16}])
def test_exports_load_as_what_diffusers_saves(how: dict[str, Any]) -> None:
    unet, averager, bench = tiny_unet(), LatestWeightAverager(k=2), Bench()
    for _ in range(2):
        bench.step(unet, None)
        averager.collect(unet)
    averager.save_pretrained("ours", torch.compile(unet, backend="eager"), **how)
    unet.save_pretrained("theirs")
    config, own = (json.loads(Path(folder, "config.json").read_text())
                   for folder in ("ours", "theirs"))  # fmt: skip
    assert config == own
    dtype = how.get("dtype", torch.float32)
    loaded, info = UNet2DConditionModel.from_pretrained(
        "ours", torch_dtype=dtype, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert equal(state_of(loaded), mean(bench.history, dtype))
    assert Path("ours", f"{WEIGHTS}.index.json").exists() == ("max_shard_size" in how)
    sizes = sum(t.numel() for t in EMAModel.from_pretrained("ours", type(unet)).shadow_params)
    assert sizes == sum(parameter.numel() for parameter in unet.parameters())


def training_run(bench: Bench) -> tuple[UNet2DConditionModel, EMAModel, LatestWeightAverager]:
    """As the training scripts save: the model and its EMA in each checkpoint."""
    unet, averager = bench.names["unet"], LatestWeightAverager(k=6)
    ema = EMAModel(
        unet.parameters(), decay=0.9, model_cls=UNet2DConditionModel, model_config=unet.config
    )
    for step in range(500, 4001, 500):
        bench.step(unet, None)
        ema.step(unet.parameters())
        averager.collect(unet, step=step)
        unet.save_pretrained(f"run/checkpoint-{step}/unet")
        ema.save_pretrained(f"run/checkpoint-{step}/unet_ema")
        torch.save({"state": {}}, f"run/checkpoint-{step}/optimizer.bin")
        StableDiffusionPipeline.save_lora_weights(
            f"lora-run/checkpoint-{step}",
            unet_lora_layers={"a.lora_A.weight": torch.full((2, 2), float(step))},
        )
    return unet, ema, averager


def commands() -> list[list[str]]:
    (text,) = blocks("diffusers.md", "Checkpoints on disk", "")
    return [shlex.split(line, comments=True)[1:] for line in text.splitlines()]


def test_the_commands_of_the_guide() -> None:
    bench = Bench()
    unet, ema, averager = training_run(bench)
    for words in commands():
        assert main._run(words) == 0
    expected = mean(bench.history[-6:])
    assert equal(state_of(UNet2DConditionModel.from_pretrained("averaged/unet")), expected)
    assert holds(EMAModel.from_pretrained("averaged/unet", type(unet)), unet, expected)
    averager.save_pretrained("online", unet)
    assert equal(load_file(f"online/{WEIGHTS}"), load_file(f"averaged/unet/{WEIGHTS}"))
    assert Path("online/config.json").read_text() == Path("averaged/unet/config.json").read_text()

    folders = [f"run/checkpoint-{step}/unet_ema/{WEIGHTS}" for step in range(1500, 4001, 500)]
    of_emas = mean([load_file(file) for file in folders])
    loaded = EMAModel.from_pretrained("averaged/unet_ema", type(unet))
    assert holds(loaded, unet, of_emas)
    assert settings_of(loaded) == settings_of(ema)
    assert equal(state_of(UNet2DConditionModel.from_pretrained("averaged/unet_ema")), of_emas)

    half = UNet2DConditionModel.from_pretrained("averaged/bf16", torch_dtype=torch.bfloat16)
    assert equal(state_of(half), mean(bench.history[-6:], torch.bfloat16))
    lora = load_file(f"averaged/lora/{LORA}")
    assert lora["unet.a.lora_A.weight"].unique().tolist() == [2750.0]


def test_a_pipeline_takes_the_average_of_its_model() -> None:
    bench = Bench()
    unet = bench.names["unet"]
    pipeline = tiny_pipeline(unet)
    for step in (1, 2, 3):
        bench.step(unet, None)
        pipeline.save_pretrained(f"run/checkpoint-{step}")
    average_checkpoints(["run/checkpoint-*/unet"], "averaged", last=2)
    averaged = UNet2DConditionModel.from_pretrained("averaged")
    taken = StableDiffusionPipeline.from_pretrained(
        "run/checkpoint-3", unet=averaged, tokenizer=None
    )
    assert equal(state_of(taken.unet), mean(bench.history[1:]))
    average_checkpoints(["run/checkpoint-*/vae"], "vae", last=2)
    assert equal(state_of(AutoencoderKL.from_pretrained("vae")), state_of(pipeline.vae))


def test_a_variant_is_read_and_written_without_its_name() -> None:
    bench = Bench()
    unet = bench.names["unet"].half()
    for step in (1, 2):
        bench.step(unet, None)
        unet.save_pretrained(f"run/checkpoint-{step}/unet", variant="fp16")
    average_checkpoints("run", "averaged", last=2)
    loaded = UNet2DConditionModel.from_pretrained("averaged", torch_dtype=torch.float16)
    assert equal(state_of(loaded), mean(bench.history, torch.float16))


def factors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of LoRA, whatever the adapter is called."""
    adapter = re.compile(r"\.default(_0)?\.")
    return {adapter.sub(".", name): t for name, t in state.items() if ".lora_" in name}


def test_the_lora_of_the_guide() -> None:
    bench = Bench()
    bench.names |= {"pipeline": tiny_pipeline(tiny_unet())}
    (imports,) = blocks("diffusers.md", "Averaged weights of Diffusers models")
    exec(imports.split("averager =")[0], bench.names)
    (code,) = blocks("diffusers.md", "LoRA")
    bench.run(code)
    trained, loaded = bench.names["unet"], bench.names["pipeline"].unet
    assert all(".lora_" in name for name in bench.names["averager"].average())
    assert equal(factors(state_of(loaded)), factors(mean(bench.history[1::2])))
    assert loaded.peft_config["default_0"].lora_alpha == 8
    inputs = torch.randn(1, 4, 8, 8), 1, torch.randn(1, 3, 8)
    with bench.names["averager"].swapped_into(trained):
        assert torch.equal(loaded(*inputs).sample, trained(*inputs).sample)


def test_a_run_of_lora_weights() -> None:
    """The file of Diffusers, beside what Accelerate saves; `lora_alpha` is in the metadata."""
    bench, averager = Bench(), LatestWeightAverager(k=2, frozen="omit")
    unet = bench.names["unet"]
    unet.requires_grad_(False)
    unet.add_adapter(LoraConfig(r=2, lora_alpha=16, target_modules=["to_q"]))
    for step in (500, 1000):
        bench.step(unet, None)
        averager.collect(unet, step=step)
        unet.save_lora_adapter(f"run/checkpoint-{step}")
        torch.save({}, f"run/checkpoint-{step}/optimizer.bin")
    average_checkpoints("run", "offline", last=2)
    with averager.swapped_into(unet):
        unet.save_lora_adapter("online")
    assert equal(load_file(f"offline/{LORA}"), load_file(f"online/{LORA}"))
    loaded = tiny_unet()
    loaded.load_lora_adapter("offline", prefix=None, use_safetensors=True)
    assert equal(factors(state_of(loaded)), factors(mean(bench.history)))
    assert loaded.peft_config["default_0"].lora_alpha == 16

    unet.peft_config["default"].lora_alpha = 4
    unet.save_lora_adapter("run/checkpoint-1500")
    with pytest.raises(LayoutError, match="lora_alpha is 16, but 4"):
        average_checkpoints("run", "refused", last=2)
    with pytest.raises(LayoutError, match="save_lora_adapter"):
        averager.save_pretrained("refused", unet)
