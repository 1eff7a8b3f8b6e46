"""docs/guides/transformers.md and accelerate.md: their code runs, and does what they say."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file
from support.guides import blocks
from support.transformers import TRAIN, VALID, arguments, history, same, tiny_model, weights_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from torch_lawa.errors import ConfigError
from torch_lawa.integrations.accelerate import register_averager
from torch_lawa.integrations.lightning import LatestWeightAveraging
from torch_lawa.integrations.transformers import (
    LatestWeightAveragingCallback,
    LatestWeightAveragingTrainer,
)
from torch_lawa.masters import require_visible_parameters


@pytest.fixture(autouse=True)
def _fresh_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)


def test_transformers_page() -> None:
    two_lines, mixin, when, best, resume = blocks("transformers.md")
    names: dict[str, Any] = {
        "model": tiny_model(),
        "args": arguments(Path("run")),
        "train_dataset": TRAIN,
        "eval_dataset": VALID,
    }
    exec(two_lines, names)
    trainer = names["trainer"]
    assert list(history(trainer, "eval_averaged_loss")) == [12]
    loaded = AutoModelForCausalLM.from_pretrained("run/checkpoint-12", subfolder="averaged/model")
    (callback,) = (
        c for c in trainer.callback_handler.callbacks if type(c) is LatestWeightAveragingCallback
    )
    average = callback.averager.average()
    assert same({n: average[n] for n in weights_of(loaded)}, weights_of(loaded))
    exec(mixin, names)
    assert issubclass(names["AveragingTrainer"], Trainer)
    exec(when, names)
    trainer.args.max_steps = 14
    exec(resume, names)
    assert list(history(trainer, "eval_averaged_loss")) == [12, 14]
    exec(best, names | {"TrainingArguments": TrainingArguments})


def test_choosing_in_a_framework() -> None:
    """The window grows with a run at a constant rate, and is evaluated from early on."""
    transformers, lightning = blocks("choosing.md", "In your framework")
    names: dict[str, Any] = {}
    exec(transformers, names)
    args: TrainingArguments = names["args"]
    args.max_steps, args.eval_steps, args.logging_steps, args.use_cpu = 60, 20, 1, True
    args.warmup_steps, args.report_to, args.save_strategy = 5, [], "no"
    args.dataloader_pin_memory = False
    trainer = LatestWeightAveragingTrainer(
        tiny_model(),
        args,
        train_dataset=TRAIN,
        eval_dataset=VALID,
        callbacks=[names["callback"]],
    )
    trainer.train()
    assert list(history(trainer, "eval_averaged_loss")) == [20, 40, 60]
    rates = history(trainer, "learning_rate")
    assert {rate for step, rate in rates.items() if step > 5} == {args.learning_rate}
    exec(lightning, names)
    [callback] = [c for c in names["trainer"].callbacks if type(c) is LatestWeightAveraging]
    assert callback.averager.k == 16


def test_accelerate_page() -> None:
    register, loop, steps, export, plain = blocks("accelerate.md")
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    seen: list[torch.Tensor] = []
    names: dict[str, Any] = {
        "torch": torch,
        "accelerator": Accelerator(cpu=True),
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": DataLoader(TensorDataset(torch.randn(8, 3), torch.randn(8, 1)), batch_size=4),
        "loss_function": nn.functional.mse_loss,
        "epochs": 7,
        "evaluate": lambda model: seen.append(model.weight.detach().clone()),
        "resuming": False,
    }
    exec(register, names)
    exec(loop, names)
    assert len(seen) == 2
    averager = names["averager"]
    assert torch.equal(seen[-1], averager.average()["weight"])
    assert Path("run/6/averager.pt").is_file()
    average = averager.average()
    averager.reset()
    names["accelerator"].load_state("run/6")
    assert same(averager.average(), average)
    exec(export, names)
    assert same(load_file("averaged/model.safetensors"), average)
    names["accelerator"].gradient_state._set_sync_gradients(True)
    exec(steps, names)
    exec(plain, names)
    exec(plain, names | {"resuming": True})


class FullyShardedDataParallel(nn.Linear):
    """By the name of PyTorch's."""


def test_parameters_that_cannot_be_seen_are_refused() -> None:
    hidden = nn.Linear(1, 1)
    require_visible_parameters(hidden)
    hidden.weight.ds_id = 3  # as DeepSpeed marks them
    with pytest.raises(ConfigError, match=r"ZeRO-3 .* give the engine"):
        require_visible_parameters(nn.Sequential(hidden))
    with pytest.raises(ConfigError, match="FSDP version 1"):
        register_averager(
            Accelerator(cpu=True), None, nn.Sequential(FullyShardedDataParallel(1, 1))
        )
