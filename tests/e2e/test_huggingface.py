"""Folders written by Transformers and PEFT, averaged, load again with `from_pretrained`."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torch_lawa.offline.average import average_checkpoints, run_average
from torch_lawa.offline.options import AverageOptions
from torch_lawa.offline.plan import plan_average

os.environ["HF_HUB_OFFLINE"] = "1"
transformers: Any = pytest.importorskip("transformers")

STEPS = [10, 20, 30]


def tiny_model() -> Any:
    config = transformers.GPT2Config(
        vocab_size=50,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.GPT2LMHeadModel(config)


def shake(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = Tokenizer(WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")


def train(run: Path, shard_size: str, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """What a Trainer leaves behind: three checkpoints, and the state of each."""
    torch.manual_seed(0)
    model, states = tiny_model().to(dtype), []
    for step in STEPS:
        shake(model)
        folder = run / f"checkpoint-{step}"
        model.save_pretrained(folder, max_shard_size=shard_size)
        tokenizer().save_pretrained(folder)
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "epoch": 0.5}))
        torch.save({"state": {}}, folder / "optimizer.pt")
        states.append({name: t.clone() for name, t in model.state_dict().items()})
    return states


@pytest.mark.parametrize("shard_size", ["1GB", "8KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_causal_model_loads_again(tmp_path: Path, shard_size: str, dtype: torch.dtype) -> None:
    states = train(tmp_path / "run", shard_size, dtype)
    average_checkpoints(tmp_path / "run", tmp_path / "mean", last=3)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "mean", dtype="auto")
    assert loaded.dtype == dtype
    assert loaded.lm_head.weight.data_ptr() == loaded.transformer.wte.weight.data_ptr()
    found = loaded.state_dict()
    assert set(found) == set(states[0])
    for name, tensor in found.items():
        total = states[0][name].double() + states[1][name].double() + states[2][name].double()
        assert torch.equal(tensor, (total / 3).to(dtype)), name
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "mean")
    assert again("a b")["input_ids"] == [1, 2]
    names = {path.name for path in (tmp_path / "mean").iterdir()}
    assert "generation_config.json" in names
    assert not names & {"optimizer.pt", "trainer_state.json"}
    if shard_size == "8KB":
        assert "model.safetensors.index.json" in names
        assert len([n for n in names if n.endswith(".safetensors")]) > 1


def test_one_file_becomes_shards_and_back(tmp_path: Path) -> None:
    train(tmp_path / "run", "1GB", torch.float32)
    average_checkpoints(
        tmp_path / "run", tmp_path / "shards", last=2, options=AverageOptions(max_shard_size=8000)
    )
    average_checkpoints(
        tmp_path / "shards",
        tmp_path / "whole",
        options=AverageOptions(layout="single", dtype="bf16"),
    )
    shards = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "shards")
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype="auto")
    assert whole.dtype == torch.bfloat16
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, shards.state_dict()[name].bfloat16()), name


def test_an_adapter_loads_again(tmp_path: Path) -> None:
    peft: Any = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True)
    model, states = peft.get_peft_model(tiny_model(), config), []
    for step in STEPS:
        shake(model)
        model.save_pretrained(tmp_path / "run" / f"checkpoint-{step}")
        states.append(peft.get_peft_model_state_dict(model))
        states[-1] = {name: t.clone() for name, t in states[-1].items()}
    plan = plan_average(tmp_path / "run", tmp_path / "mean", last=3)
    run_average(plan)
    assert any("product" in note for note in plan.notes)
    loaded = peft.PeftModel.from_pretrained(tiny_model(), tmp_path / "mean")
    found = peft.get_peft_model_state_dict(loaded)
    assert set(found) == set(states[0])
    for name, tensor in found.items():
        total = states[0][name].double() + states[1][name].double() + states[2][name].double()
        assert torch.equal(tensor, (total / 3).float()), name
