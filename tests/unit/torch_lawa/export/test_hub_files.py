"""Exports that Transformers and PEFT load, by their own loaders."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from torch_lawa import LatestWeightAverager
from torch_lawa.errors import LayoutError

transformers = pytest.importorskip("transformers")

TINY = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8, "vocab_size": 17}


def gpt2() -> Any:
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=8, vocab_size=17, n_positions=8, bos_token_id=1, eos_token_id=1
    )
    return transformers.GPT2LMHeadModel(config)


def roberta() -> Any:
    config = transformers.RobertaConfig(**TINY, intermediate_size=8, max_position_embeddings=12)
    return transformers.RobertaForMaskedLM(config)


def trained(model: nn.Module, **how: Any) -> tuple[LatestWeightAverager, dict[str, Tensor]]:
    """An averager of two snapshots, and their mean by hand."""
    torch.manual_seed(0)
    averager, total = LatestWeightAverager(k=2, **how), {}
    for _ in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.normal_()
        averager.collect(model)
        for name, tensor in model.state_dict().items():
            total[name] = total.get(name, 0.0) + tensor.double()
    return averager, {name: (sum_ / 2).float() for name, sum_ in total.items()}


@pytest.mark.parametrize(
    ("make", "auto", "files"),
    [
        (gpt2, "AutoModelForCausalLM", ["config.json", "generation_config.json"]),
        (roberta, "AutoModelForMaskedLM", ["config.json"]),
    ],
)
@pytest.mark.parametrize("how", [{}, {"max_shard_size": 1000}])
def test_from_pretrained_loads_it(
    make: Any, auto: str, files: list[str], how: dict[str, Any], tmp_path: Path
) -> None:
    model = make()
    averager, mean = trained(model)
    averager.save_pretrained(tmp_path / "out", torch.compile(model, backend="eager"), **how)
    found = sorted(os.listdir(tmp_path / "out"))
    assert [name for name in found if "model" not in name] == files
    loaded, info = getattr(transformers, auto).from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert type(loaded) is type(model)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert set(loaded.state_dict()) == set(mean)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, mean[name]), name
    tied = loaded.get_input_embeddings().weight, loaded.get_output_embeddings().weight
    assert tied[0] is tied[1]


def test_the_configuration_says_what_is_in_the_file(tmp_path: Path) -> None:
    model = gpt2()
    averager, mean = trained(model)
    averager.save_pretrained(tmp_path / "out", model, dtype=torch.bfloat16)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["GPT2LMHeadModel"]
    assert config["dtype"] == "bfloat16"
    assert model.config.architectures is None  # the model's own stays as it was
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    name = "transformer.wpe.weight"
    assert torch.equal(loaded.state_dict()[name], mean[name].bfloat16())


def test_a_model_that_was_converted_since_gives_its_configuration_alone(tmp_path: Path) -> None:
    model = gpt2()
    averager, mean = trained(model)
    averager.save_pretrained(tmp_path / "out", model.bfloat16())
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert "config.json" in os.listdir(tmp_path / "out")
    assert all(torch.equal(tensor, mean[name]) for name, tensor in found.items())


def test_without_the_model_there_are_weights_only(tmp_path: Path) -> None:
    averager, _ = trained(gpt2())
    averager.save_pretrained(tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]


def adapted(peft: Any, **how: Any) -> Any:
    config = peft.LoraConfig(
        **{"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True, **how}
    )
    torch.manual_seed(1)
    return peft.get_peft_model(gpt2(), config)


@pytest.mark.parametrize("frozen", ["keep", "omit"])
def test_an_adapter_is_written_as_peft_writes_it(frozen: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = adapted(peft, target_modules=["c_attn", "wpe"], modules_to_save=["ln_f"])
    averager, mean = trained(model, frozen=frozen)
    averager.save_pretrained(tmp_path / "out", model)
    assert sorted(os.listdir(tmp_path / "out")) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    theirs = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    assert set(load_file(tmp_path / "out" / "adapter_model.safetensors")) == set(theirs)
    base = model.get_base_model().__class__(model.config)
    base.load_state_dict(
        {n.replace(".base_layer", ""): t for n, t in _base_state(model).items()}, strict=False
    )
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "out")
    for name, tensor in loaded.state_dict().items():
        if "lora" in name or "modules_to_save" in name:
            assert torch.equal(tensor, mean[name]), name
    with averager.swapped_into(model):
        model.eval()
        expected = model(torch.arange(5).view(1, 5)).logits
    assert torch.equal(loaded.eval()(torch.arange(5).view(1, 5)).logits, expected)


def _base_state(model: Any) -> dict[str, Tensor]:
    prefix = "base_model.model."
    state = {n.removeprefix(prefix): t for n, t in model.state_dict().items()}
    return {
        n.replace(".original_module", ""): t
        for n, t in state.items()
        if "lora" not in n and "modules_to_save" not in n
    }


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"use_dora": True}, "LORA adapter with DoRA"),
        ({"bias": "all"}, "not part of the LoRA adapter 'default'"),
    ],
)
def test_other_adapters_are_left_to_peft(how: dict[str, Any], words: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = adapted(peft, **how)
    averager, _ = trained(model)
    with pytest.raises(LayoutError, match=words) as caught:
        averager.save_pretrained(tmp_path / "out", model)
    assert "averager.swapped_into(model): model.save_pretrained" in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_adapters_of_another_kind_or_number_are_left_to_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    other = peft.get_peft_model(
        gpt2(),
        peft.IA3Config(target_modules=["c_attn"], feedforward_modules=[], fan_in_fan_out=True),
    )
    averager, _ = trained(other)
    with pytest.raises(LayoutError, match="IA3 adapter"):
        averager.save_pretrained(tmp_path / "out", other)
    two = adapted(peft)
    two.add_adapter("second", peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    averager, _ = trained(two)
    with pytest.raises(LayoutError, match="adapters default, second"):
        averager.save_pretrained(tmp_path / "out", two)
    inside = gpt2()
    inside.add_adapter(peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    averager, _ = trained(inside)
    with pytest.raises(LayoutError, match="only a PeftModel"):
        averager.save_pretrained(tmp_path / "out", inside)
    assert os.listdir(tmp_path) == []


class Diffuser(nn.Module):
    """What a `ModelMixin` of Diffusers has; tests/finetuning uses real ones."""

    config_name = "config.json"

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def save_config(self, folder: str) -> None:
        config = {"_class_name": type(self).__name__, "_diffusers_version": "0", "width": 3}
        Path(folder, self.config_name).write_text(json.dumps(config))


@pytest.mark.parametrize("how", [{}, {"max_shard_size": 10}])
def test_a_model_of_diffusers_has_its_names(how: dict[str, Any], tmp_path: Path) -> None:
    model = Diffuser()
    averager, mean = trained(model)
    averager.save_pretrained(tmp_path / "out", model, **how)
    files = [path.name for path in (tmp_path / "out").glob("*.safetensors")]
    assert all(name.startswith("diffusion_pytorch_model") for name in files)
    assert len(files) == (2 if how else 1)
    found = {n: t for name in files for n, t in load_file(tmp_path / "out" / name).items()}
    assert found.keys() == mean.keys()
    assert all(torch.equal(found[name], mean[name]) for name in mean)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {"_class_name": "Diffuser", "_diffusers_version": "0", "width": 3}


def test_an_adapter_in_a_model_of_diffusers_is_left_to_diffusers(tmp_path: Path) -> None:
    model = Diffuser()
    averager, _ = trained(model)
    model.peft_config = {"default": object()}
    with pytest.raises(LayoutError, match=r"Diffuser has the adapters default.*save_lora_adapter"):
        averager.save_pretrained(tmp_path / "out", model)
    assert os.listdir(tmp_path) == []
