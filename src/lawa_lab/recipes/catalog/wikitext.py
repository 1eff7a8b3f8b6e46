"""Section 3.2 of the paper: RoBERTa-Base, masked-language modelling on WikiText-103."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lawa_lab.recipes.config import LearningRateSchedule, OptimizerName, TrainConfig, setting
from lawa_lab.recipes.registry import register_recipe
from torch_lawa.errors import ConfigError

if TYPE_CHECKING:
    from lawa_lab.recipes.task import Task, Worker

__all__ = ["WikiTextConfig"]


@register_recipe
@dataclass(frozen=True, kw_only=True)
class WikiTextConfig(TrainConfig):
    """RoBERTa-Base on WikiText-103."""

    recipe: ClassVar[str] = "wikitext103-roberta"
    about: ClassVar[str] = "RoBERTa-Base on WikiText-103 with Adam, 200 epochs (section 3.2)."
    from_paper: ClassVar[bool] = True
    smoke_values: ClassVar[dict[str, Any]] = {
        "epochs": 4,
        "batch_size": 8,
        "micro_batch_size": None,
        "warmup_steps": 4,
        "ks": (2, 3),
        "width": 64,
        "depth": 2,
        "sequence_length": 32,
        "vocabulary": 400,
    }

    batch_size: int = setting(2048, "Sequences per step, over all processes.")
    micro_batch_size: int | None = setting(
        64,
        "Sequences per forward pass and process; gradients are accumulated over the step.",
    )
    optimizer: OptimizerName = setting(
        "adamw", "Optimizer. The paper says Adam; fairseq's decouples weight decay, as AdamW does."
    )
    learning_rate: float = 5e-4
    schedule: LearningRateSchedule = "linear"
    warmup_steps: int = 10_000
    weight_decay: float = setting(
        0.01, "Weight decay. Ours: from fairseq's recipe, which the paper follows.", minimum=0
    )
    beta2: float = setting(0.98, "Adam's beta2. Ours: fairseq's.", below=1)
    epsilon: float = setting(1e-6, "Adam's epsilon. Ours: fairseq's.")
    ks: tuple[int, ...] = (6, 3, 10, 16)
    width: int = setting(
        768,
        "Hidden size; each head has 64 units, the feed-forward layer 4 times the hidden size.",
    )
    depth: int = setting(12, "Number of layers.")
    dropout: float = setting(0.1, "Dropout of hidden units and attention.", minimum=0, below=1)
    sequence_length: int = setting(512, "Tokens per sequence.", minimum=4)
    vocabulary: int = setting(
        50_265,
        "Size of the byte-level BPE vocabulary, trained on the training text; at least 261 (256 "
        "bytes and 5 special tokens).",
        minimum=261,
    )
    mask_fraction: float = setting(
        0.15, "Fraction of tokens to mask and predict, redrawn for each batch.", below=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width > 64 and self.width % (self.width // 64):
            raise ConfigError(
                f"width={self.width}: must be a multiple of its {self.width // 64} heads"
            )

    def make_task(self, data: Path | None, *, seed: int, worker: "Worker", smoke: bool) -> "Task":
        """The text in `data` (default: the folder `data`), or a synthetic one."""
        from lawa_lab.recipes.tasks.masked_language import MaskedLanguageTask, load_wikitext_tokens

        tokens = load_wikitext_tokens(self, data, smoke=smoke)
        return MaskedLanguageTask(self, tokens, seed=seed, worker=worker)
