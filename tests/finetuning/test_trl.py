"""TRL's trainers with averaging, and the code of docs/guides/trl.md (make test-finetuning)."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.guides import blocks
from support.models import same_bits
from torch import Tensor

from torch_lawa.cli import main

trl = pytest.importorskip("trl", reason="TRL is not installed here: make test-finetuning")
datasets = pytest.importorskip("datasets")

from peft import LoraConfig, PeftModel  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from torch_lawa.integrations.transformers import LatestWeightAveragingCallback  # noqa: E402

WORDS = [f"w{i}" for i in range(15)]
AVERAGED = Path("averaged", "model")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<unk>", "<s>", "</s>", *WORDS]
    model = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def tiny_llama() -> LlamaForCausalLM:
    """Saved once and loaded again: DPO loads its reference from the model's own path."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(WORDS) + 4,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
    )
    LlamaForCausalLM(config).save_pretrained("base")
    return AutoModelForCausalLM.from_pretrained("base", dtype=torch.float32)


def sentences(n: int) -> Any:
    picks = torch.randint(len(WORDS), (n, 6), generator=torch.Generator().manual_seed(n)).tolist()
    return datasets.Dataset.from_list([{"text": " ".join(WORDS[i] for i in p)} for p in picks])


def preferences(n: int) -> Any:
    texts = [row["text"].split() for row in sentences(n)]
    rows = [
        {"prompt": " ".join(t[:2]), "chosen": " ".join(t[2:]), "rejected": " ".join(t[:1:-1])}
        for t in texts
    ]
    return datasets.Dataset.from_list(rows)


def quick(config: type) -> Any:
    """A configuration for a run of a few steps on a CPU, whatever else the guide says."""
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "bf16": False}
    short = {"max_steps": 6, "per_device_train_batch_size": 2, "learning_rate": 0.05}

    def make(folder: str, **how: Any) -> Any:
        return config(folder, **{**quiet, **short, "max_length": 16, **how})

    return make


def names_of_guide() -> dict[str, Any]:
    names = {
        "SFTConfig": quick(trl.SFTConfig),
        "DPOConfig": quick(trl.DPOConfig),
        "LoraConfig": LoraConfig,
        "PeftModel": PeftModel,
        "model": tiny_llama(),
        "base": tiny_llama(),
        "tokenizer": tokenizer(),
        "train_dataset": sentences(12),
        "eval_dataset": sentences(5),
        "preferences": preferences(12),
    }
    (classes,) = blocks("trl.md", "Averaged weights in TRL")
    exec(classes, names)
    return names


def run(section: str, **changes: Any) -> Any:
    """The trainer of one section of the guide, after its training."""
    names = {**names_of_guide(), **changes}
    (code,) = blocks("trl.md", section)
    exec(code, names)
    return names


def mean(folders: Sequence[Path], file: str = "model.safetensors") -> dict[str, Tensor]:
    """By hand, of what the trainer saved itself."""
    saved = [load_file(folder / file) for folder in folders]
    return {
        name: (sum(state[name].double() for state in saved) / len(saved)).float()
        for name in saved[0]
    }


def checkpoints(folder: str, *steps: int) -> list[Path]:
    return [Path(folder, f"checkpoint-{step}") for step in steps]


def equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return bool(found) and all(same_bits(tensor, expected[name]) for name, tensor in found.items())


def history(trainer: Any, name: str) -> dict[int, float]:
    return {row["step"]: row[name] for row in trainer.state.log_history if name in row}


def test_sft_is_evaluated_saved_and_loaded() -> None:
    trainer = run("Supervised fine-tuning")["trainer"]
    expected = mean(checkpoints("sft", 2, 4, 6))
    folder = Path("sft/checkpoint-6") / AVERAGED
    assert equal(load_file(folder / "model.safetensors"), expected)
    assert (folder / "tokenizer.json").is_file()
    assert equal(dict(trainer.model.state_dict()), expected)  # the best model by the average
    assert equal(load_file("sft/final/model.safetensors"), expected)

    plain = trl.SFTTrainer(
        AutoModelForCausalLM.from_pretrained(folder),
        quick(trl.SFTConfig)("judged"),
        train_dataset=sentences(12),
        eval_dataset=sentences(5),
        processing_class=tokenizer(),
    ).evaluate()
    for name in ("loss", "mean_token_accuracy", "entropy"):
        averaged = history(trainer, f"eval_averaged_{name}")
        assert averaged == {6: pytest.approx(plain[f"eval_{name}"], rel=1e-6)}
        assert list(history(trainer, f"eval_{name}")) == [2, 4, 6]
    assert history(trainer, "eval_entropy")[6] != history(trainer, "eval_averaged_entropy")[6]


def test_sft_trains_as_without_averaging_and_resumes() -> None:
    names = run("Supervised fine-tuning")
    arguments = {
        "train_dataset": names["train_dataset"],
        "eval_dataset": names["eval_dataset"],
        "processing_class": names["tokenizer"],
    }
    how = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    plain = trl.SFTTrainer(tiny_llama(), quick(trl.SFTConfig)("plain", **how), **arguments)
    plain.train()
    for step in (2, 6):
        ours, theirs = (load_file(f"{run}/checkpoint-{step}/model.safetensors")
                        for run in ("sft", "plain"))  # fmt: skip
        assert equal(ours, theirs)

    resumed = names["AveragingSFTTrainer"](
        tiny_llama(),
        quick(trl.SFTConfig)("resumed", **how),
        callbacks=[LatestWeightAveragingCallback(k=3)],
        **arguments,
    )
    resumed.train(resume_from_checkpoint="sft/checkpoint-4")
    folder = Path("resumed/checkpoint-6") / AVERAGED
    assert equal(load_file(folder / "model.safetensors"), mean(checkpoints("sft", 2, 4, 6)))


def test_dpo_averages_the_policy_only() -> None:
    names = run("DPO")
    trainer = names["trainer"]
    expected = mean(checkpoints("dpo", 2, 4, 6))
    folder = Path("dpo/checkpoint-6") / AVERAGED
    assert equal(load_file(folder / "model.safetensors"), expected)
    assert equal(dict(trainer.ref_model.state_dict()), dict(tiny_llama().state_dict()))

    plain = trl.DPOTrainer(
        AutoModelForCausalLM.from_pretrained(folder),
        args=quick(trl.DPOConfig)("judged"),
        ref_model=tiny_llama(),
        train_dataset=preferences(12),
        eval_dataset=preferences(12),
        processing_class=tokenizer(),
    ).evaluate()
    for name in ("loss", "rewards/accuracies", "rewards/margins"):
        averaged = history(trainer, f"eval_averaged_{name}")
        assert averaged == {6: pytest.approx(plain[f"eval_{name}"], rel=1e-5)}
        assert list(history(trainer, f"eval_{name}")) == [2, 4, 6]


def test_the_best_model_by_a_metric_of_trl() -> None:
    by = "eval_averaged_rewards/margins"
    best = {"load_best_model_at_end": True, "metric_for_best_model": by, "greater_is_better": True}

    def config(folder: str, **how: Any) -> Any:
        return quick(trl.DPOConfig)(folder, **how, **best)

    trainer = run("DPO", DPOConfig=config)["trainer"]
    assert trainer.state.best_metric == history(trainer, by)[6]
    assert equal(dict(trainer.model.state_dict()), mean(checkpoints("dpo", 2, 4, 6)))


def test_one_pass_with_the_names_of_trl() -> None:
    def callback(k: int) -> LatestWeightAveragingCallback:
        return LatestWeightAveragingCallback(k, metrics="averaged")

    config = quick(trl.DPOConfig)
    trainer = run("DPO", LatestWeightAveragingCallback=callback, DPOConfig=config)["trainer"]
    logged = {name for row in trainer.state.log_history for name in row}
    assert "eval_rewards/margins" in logged
    assert not any("averaged" in name for name in logged)


def test_lora_keeps_the_adapter_only() -> None:
    names = run("LoRA")
    callback = names["trainer"]._averaging()
    collected = set(callback.averager.average())
    assert collected
    assert all("lora_" in name for name in collected)

    file = "adapter_model.safetensors"
    expected = mean(checkpoints("lora", 2, 4, 6), file)
    assert equal(load_file(Path("lora/checkpoint-6") / AVERAGED / file), expected)
    found = {n: t for n, t in names["adapted"].state_dict().items() if "lora_" in n}
    assert equal(found, {n.replace(".weight", ".default.weight"): t for n, t in expected.items()})

    (command,) = blocks("trl.md", "LoRA", "")
    assert main._run(command.split()[1:]) == 0
    assert equal(load_file(Path("averaged-adapter") / file), expected)
    config = json.loads(Path("averaged-adapter/adapter_config.json").read_text())
    assert config["r"] == 2
    PeftModel.from_pretrained(tiny_llama(), "averaged-adapter")


def test_lora_with_dpo() -> None:
    names = names_of_guide()
    trainer = names["AveragingDPOTrainer"](
        tiny_llama(),
        args=quick(trl.DPOConfig)("dpo", eval_strategy="steps", eval_steps=2, save_steps=2),
        train_dataset=preferences(12),
        eval_dataset=preferences(12),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"]),
        callbacks=[LatestWeightAveragingCallback(k=3)],
    )
    trainer.train()
    file = "adapter_model.safetensors"
    expected = mean(checkpoints("dpo", 2, 4, 6), file)
    folder = Path("dpo/checkpoint-6") / AVERAGED
    assert equal(load_file(folder / file), expected)
    assert not any("ref" in n.split(".") for n in trainer._averaging().averager.average())
    PeftModel.from_pretrained(tiny_llama(), folder)
