"""A tiny language model, its data and a Trainer that averages, for tests of the integration."""

import copy
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from torch_lawa.integrations.transformers import (
    LatestWeightAveragingCallback,
    LatestWeightAveragingTrainer,
)

WINDOW = Path("averaged", "window.pt")
MODEL = Path("averaged", "model")


def tiny_model(seed: int = 0) -> LlamaForCausalLM:
    """With dropout, so that training takes random numbers."""
    set_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=13,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=16,
            attention_dropout=0.3,
        )
    )


def texts(seed: int, count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 13, (count, 6), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


TRAIN, VALID, OTHER = texts(1, 32), texts(2, 8), texts(3, 8)  # 8 batches of 4 an epoch


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    given: dict[str, Any] = {
        "max_steps": 12,
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "logging_steps": 2,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "learning_rate": 0.03,
        "lr_scheduler_type": "constant",
        "seed": 7,
        **options,
    }
    return TrainingArguments(
        str(folder),
        use_cpu=given.pop("use_cpu", True),
        report_to=given.pop("report_to", "none"),
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **given,
    )


class Recorder(TrainerCallback):  # type: ignore[misc]
    """The weights after every optimizer step, by its number."""

    def __init__(self) -> None:
        self.weights: dict[int, dict[str, Tensor]] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.weights[state.global_step] = weights_of(kwargs["model"])

    def mean(self, *steps: int) -> dict[str, Tensor]:
        return mean([self.weights[step] for step in steps])


class Fails(TrainerCallback):  # type: ignore[misc]
    """Raises at an event of one step."""

    def __init__(self, event: str, step: int, *, metric: str = "") -> None:
        def fail(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == step and metric in kwargs.get("metrics", {metric: 0}):
                raise RuntimeError("a hook failed")

        setattr(self, event, fail)


def trainer(
    folder: Path,
    *callbacks: TrainerCallback,
    model: nn.Module | None = None,
    kind: type[Trainer] = LatestWeightAveragingTrainer,
    train_dataset: Any = TRAIN,
    eval_dataset: Any = VALID,
    **options: Any,
) -> Trainer:
    return kind(
        model=tiny_model() if model is None else model,
        args=arguments(folder, **options),
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        callbacks=list(callbacks),
    )


def averaging(k: int = 3, **options: Any) -> LatestWeightAveragingCallback:
    return LatestWeightAveragingCallback(k, **options)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Whole, also those of a sharded model; every process must ask."""
    state = model.state_dict()
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()
        for name, tensor in state.items()
    }


def mean(snapshots: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """In float64, rounded once: what every average must be, to the last bit."""
    return {
        name: (sum(s[name].double() for s in snapshots) / len(snapshots)).to(first.dtype)
        if first.is_floating_point()
        else first
        for name, first in snapshots[-1].items()
    }


def loss_of(model: nn.Module, weights: dict[str, Tensor], data: list[dict[str, Tensor]]) -> float:
    """As a Trainer measures it that knows nothing of averaging."""
    judged = copy.deepcopy(model)
    judged.load_state_dict(weights)
    with tempfile.TemporaryDirectory() as folder:
        plain = Trainer(judged, arguments(Path(folder), save_strategy="no"), eval_dataset=data)
        return float(plain.evaluate()["eval_loss"])


def saved(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Bit for bit; a file leaves out what is tied."""
    return bool(found) and all(torch.equal(found[name], expected[name]) for name in found)


def history(trained: Trainer, name: str) -> dict[int, float]:
    """What was logged under a name, by step."""
    return {row["step"]: row[name] for row in trained.state.log_history if name in row}
