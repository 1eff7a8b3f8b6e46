"""A small decoder language model on Wikipedia text, less than one epoch: ours, not the paper's."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lawa_lab.recipes.config import LearningRateSchedule, OptimizerName, TrainConfig, setting
from lawa_lab.recipes.registry import register_recipe
from torch_lawa.errors import ConfigError

if TYPE_CHECKING:
    from lawa_lab.recipes.task import Task, Worker

__all__ = ["DecoderConfig"]


@register_recipe
@dataclass(frozen=True, kw_only=True)
class DecoderConfig(TrainConfig):
    """A Llama-style decoder of 34 million parameters."""

    recipe: ClassVar[str] = "wikipedia-decoder"
    about: ClassVar[str] = "A Llama-style decoder (34 M) on Wikipedia text, at most one epoch."
    smoke_values: ClassVar[dict[str, Any]] = {
        "epochs": 1,
        "batch_size": 4,
        "warmup_steps": 4,
        "ks": (3, 2),
        "nu": 42,
        "width": 64,
        "depth": 1,
        "sequence_length": 16,
        "vocabulary": 300,
    }

    epochs: int | float = 1
    batch_size: int = setting(16, "Sequences per step, over all processes.")
    optimizer: OptimizerName = "adamw"
    learning_rate: float = 1e-3
    schedule: LearningRateSchedule = "constant"
    warmup_steps: int = 200
    weight_decay: float = setting(0.1, "Weight decay.", minimum=0)
    beta2: float = setting(0.99, "Adam's beta2.", below=1)
    clip_norm: float | None = 1.0
    nu: int | None = setting(
        250, "Evaluate every NU steps; without a horizon, also take a snapshot."
    )
    horizon: float | None = 0.25
    ks: tuple[int, ...] = (16, 8, 4)
    width: int = setting(512, "Hidden size, a multiple of 64; each head has 64 units.", minimum=64)
    depth: int = setting(8, "Number of layers.")
    sequence_length: int = setting(256, "Tokens per sequence.", minimum=4)
    vocabulary: int = setting(
        16_384,
        "Size of the byte-level BPE vocabulary, trained on the training text.",
        minimum=261,
    )
    evaluation_tokens: int = setting(
        2**18, "Number of tokens to evaluate of the validation text, and of the test text if any."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % 64:
            raise ConfigError(f"width={self.width}: must be a multiple of 64")

    def make_task(self, data: Path | None, *, seed: int, worker: "Worker", smoke: bool) -> "Task":
        """The text in `data` (default: the folder `data`), or a synthetic one."""
        from lawa_lab.recipes.tasks.language import LanguageTask, load_language_tokens

        tokens = load_language_tokens(self, data, smoke=smoke)
        return LanguageTask(self, tokens, seed=seed, worker=worker)
