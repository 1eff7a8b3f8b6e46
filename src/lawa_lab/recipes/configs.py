"""What each recipe is made of: every hyper-parameter, with the paper's value as its default.

Pure Python, so that `lawa train RECIPE --help` answers at once. Where the paper (sections 3 and B)
says nothing, the value is the usual one of the code it cites, and the field says so: "ours".
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from torch_lawa.coefficients import parse_coefficients
from torch_lawa.errors import ConfigError
from torch_lawa.validation import one_of

__all__ = [
    "RECIPES",
    "Cifar100Config",
    "DigitsConfig",
    "ImageNetConfig",
    "TrainConfig",
    "WikiTextConfig",
    "find_recipe",
]

Optimizer = Literal["sgd", "adam", "adamw"]
LearningRateSchedule = Literal["cosine", "linear", "constant"]


def _(default: Any, help: str) -> Any:
    """A field with what `--help` says of it."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What all recipes have in common; each sets its own defaults."""

    recipe: ClassVar[str]
    module: ClassVar[str]  # where `make_task` is
    about: ClassVar[str]
    # What `--smoke` changes: seconds on a CPU, with made-up data.
    smoke_values: ClassVar[dict[str, Any]]
    num_threads: ClassVar[int | None] = None  # on a CPU; None: as many as PyTorch takes

    epochs: int = _(200, "Passes over the training data.")
    batch_size: int = _(256, "Examples in a step, over all processes.")
    micro_batch_size: int | None = _(
        None, "Examples that one process runs at a time; gradients are added up over a step."
    )
    optimizer: Optimizer = _("sgd", "")
    learning_rate: float = _(0.1, "The highest.")
    schedule: LearningRateSchedule = _(
        "cosine", "How the learning rate falls after the warm-up: to 0, or not at all."
    )
    warmup_steps: int = _(0, "Steps in which the learning rate rises from 0.")
    weight_decay: float = _(5e-4, "")
    momentum: float = _(0.9, "Of SGD; the first beta of Adam.")
    beta2: float = _(0.999, "The second beta of Adam.")
    epsilon: float = _(1e-8, "Of Adam.")
    clip_norm: float | None = _(None, "Largest norm of the gradient.")
    lookahead: bool = _(False, "Wrap the optimizer in Lookahead.")
    lookahead_alpha: float = _(0.8, "How far the slow weights follow the fast ones.")
    lookahead_k: int = _(5, "Steps of the fast weights for one of the slow ones.")

    nu: int | None = _(None, "Take a snapshot every so many steps, not after each epoch.")
    ks: tuple[int, ...] = _((6, 10), "Windows to evaluate; the first is the one reported first.")
    coefficients: tuple[str, ...] = _(
        ("uniform",), "Coefficients to evaluate, such as uniform,exponential:0.9."
    )
    batch_norm: tuple[str, ...] = _(
        ("re-estimated",), "BatchNorm statistics of an average: re-estimated, copied, or both."
    )
    batch_norm_batches: int = _(20, "Batches of training data that re-estimate BatchNorm.")
    evaluate_every: int = _(1, "Evaluate after every so many snapshots, and after the last.")
    variants_every: int = _(
        1, "Evaluate all but the first average only at every so many evaluations, and the last."
    )

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            self._check(item.name, getattr(self, item.name))
        if min(self.ks, default=0) < 1 or len(set(self.ks)) != len(self.ks):
            raise ConfigError(f"ks={list(self.ks)}: give different numbers from 1 on, such as 6,10")
        if not self.coefficients or not self.batch_norm:
            raise ConfigError("coefficients and batch_norm: name at least one of each")
        for rule in self.coefficients:
            parse_coefficients(rule)
        for policy in self.batch_norm:
            one_of("batch_norm", policy, ("re-estimated", "copied"))
        one_of("optimizer", self.optimizer, get_args(Optimizer))
        one_of("schedule", self.schedule, get_args(LearningRateSchedule))

    def _check(self, name: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return
        at_least = 0 if name in _MAY_BE_ZERO else 1 if isinstance(value, int) else None
        if not math.isfinite(value):
            raise ConfigError(f"{name}={value}: must be a finite number")
        if at_least is not None and value < at_least:
            raise ConfigError(f"{name}={value}: must be at least {at_least}")
        if at_least is None and value <= 0:
            raise ConfigError(f"{name}={value}: must be positive")
        if name in ("momentum", "beta2", "dropout") and value >= 1:
            raise ConfigError(f"{name}={value}: must be below 1")
        if name == "lookahead_alpha" and value > 1:
            raise ConfigError(f"{name}={value}: must be at most 1")

    def smoke(self) -> "TrainConfig":
        """The same recipe in seconds, to see that it runs."""
        return dataclasses.replace(self, **self.smoke_values)

    @property
    def run_name(self) -> str:
        """The name of its series in reports: what tells runs of one recipe apart."""
        inner = f"lookahead({self.optimizer})" if self.lookahead else self.optimizer
        return inner if self.schedule == type(self).schedule else f"{inner}, {self.schedule} rate"


_MAY_BE_ZERO = {
    "weight_decay",
    "momentum",
    "warmup_steps",
    "max_shift",
    "padding",
    "noise",
    "dropout",
    "num_workers",
}


@dataclass(frozen=True, kw_only=True)
class DigitsConfig(TrainConfig):
    """The demo: a small convolutional net on scikit-learn's digits."""

    recipe: ClassVar[str] = "digits"
    module: ClassVar[str] = "lawa_lab.recipes.digits"
    about: ClassVar[str] = "A small conv net on scikit-learn's digits, on a CPU in 15 s; no data."
    smoke_values: ClassVar[dict[str, Any]] = {"epochs": 4, "ks": (2,), "width": 4}
    # More threads cost more than they bring at this size, and their number would change the bits.
    num_threads: ClassVar[int | None] = 1

    epochs: int = _(50, "Passes over the training data.")
    batch_size: int = _(32, "Examples in a step, over all processes.")
    learning_rate: float = _(0.2, "The highest.")
    ks: tuple[int, ...] = _((6,), "Windows to evaluate; the first is the one reported first.")
    batch_norm: tuple[str, ...] = _(
        ("re-estimated", "copied"),
        "BatchNorm statistics of an average: re-estimated, copied, or both.",
    )
    batch_norm_batches: int = _(28, "Batches of training data that re-estimate BatchNorm.")
    width: int = _(16, "Channels of the first convolution.")
    max_shift: int = _(1, "Pixels by which an image is shifted at most.")
    noise: float = _(0.3, "Deviation of the noise added to an image.")
    test_fraction: float = _(0.5, "How much of the data is held out.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.test_fraction < 1.0:
            raise ConfigError(f"test_fraction={self.test_fraction}: must lie between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class Cifar100Config(TrainConfig):
    """Appendix B of the paper: ResNet-34 on CIFAR-100, against SGD and Lookahead."""

    recipe: ClassVar[str] = "cifar100-resnet34"
    module: ClassVar[str] = "lawa_lab.recipes.cifar100"
    about: ClassVar[str] = "ResNet-34 on CIFAR-100 with SGD, 200 epochs (the paper's appendix B)."
    smoke_values: ClassVar[dict[str, Any]] = {
        "epochs": 4,
        "batch_size": 32,
        "learning_rate": 0.05,
        "ks": (2, 3),
        "batch_norm_batches": 2,
        "variants_every": 1,
        "width": 4,
    }

    weight_decay: float = _(5e-4, "Ours: the paper says only that its values are common ones.")
    ks: tuple[int, ...] = _(
        (10, 6, 3, 16), "Windows to evaluate; the first is the one reported first."
    )
    coefficients: tuple[str, ...] = _(
        ("uniform", "exponential:0.9"), "Coefficients to evaluate, such as uniform,exponential:0.9."
    )
    batch_norm: tuple[str, ...] = _(
        ("re-estimated", "copied"),
        "BatchNorm statistics of an average: re-estimated, copied, or both.",
    )
    batch_norm_batches: int = _(10, "Batches of training data that re-estimate BatchNorm. Ours.")
    variants_every: int = _(
        5, "Evaluate all but the first average only at every so many evaluations, and the last."
    )
    width: int = _(64, "Channels of the first stage.")
    padding: int = _(4, "Ours: pixels around an image before a random crop (and a random flip).")


@dataclass(frozen=True, kw_only=True)
class ImageNetConfig(TrainConfig):
    """Section 3.1 of the paper: ResNet-50 on ImageNet, or on any folder of images."""

    recipe: ClassVar[str] = "imagenet-resnet50"
    module: ClassVar[str] = "lawa_lab.recipes.imagenet"
    about: ClassVar[str] = "ResNet-50 on ImageNet with SGD, 90 epochs (the paper's section 3.1)."
    smoke_values: ClassVar[dict[str, Any]] = {
        "epochs": 4,
        "batch_size": 16,
        "learning_rate": 0.05,
        "ks": (2, 3),
        "batch_norm_batches": 2,
        "width": 4,
        "image_size": 32,
        "num_workers": 0,
    }

    epochs: int = _(90, "Passes over the training data.")
    learning_rate: float = _(
        0.1, "The highest. Ours: that of PyTorch's example, for a batch of 256."
    )
    weight_decay: float = _(1e-4, "Ours: that of PyTorch's example.")
    ks: tuple[int, ...] = _(
        (6, 3, 10, 16), "Windows to evaluate; the first is the one reported first."
    )
    batch_norm_batches: int = _(
        40, "Batches of training data that re-estimate BatchNorm; the paper takes all of them."
    )
    width: int = _(64, "Channels of the first stage.")
    image_size: int = _(224, "Pixels that the net sees.")
    num_workers: int = _(8, "Processes that read images, for each process that trains.")


@dataclass(frozen=True, kw_only=True)
class WikiTextConfig(TrainConfig):
    """Section 3.2 of the paper: RoBERTa-Base, masked-language modelling on WikiText-103."""

    recipe: ClassVar[str] = "wikitext103-roberta"
    module: ClassVar[str] = "lawa_lab.recipes.wikitext"
    about: ClassVar[str] = "RoBERTa-Base on WikiText-103 with Adam, 200 epochs (section 3.2)."
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

    batch_size: int = _(2048, "Sequences in a step, over all processes.")
    micro_batch_size: int | None = _(
        64, "Sequences that one process runs at a time; gradients are added up over a step."
    )
    optimizer: Optimizer = _(
        "adamw", "The paper says Adam; fairseq's keeps weight decay apart, as AdamW does."
    )
    learning_rate: float = _(5e-4, "The highest.")
    schedule: LearningRateSchedule = _(
        "linear", "How the learning rate falls after the warm-up: to 0, or not at all."
    )
    warmup_steps: int = _(10_000, "Steps in which the learning rate rises from 0.")
    weight_decay: float = _(0.01, "Ours: that of fairseq's recipe, which the paper follows.")
    beta2: float = _(0.98, "The second beta of Adam. Ours: fairseq's.")
    epsilon: float = _(1e-6, "Of Adam. Ours: fairseq's.")
    ks: tuple[int, ...] = _(
        (6, 3, 10, 16), "Windows to evaluate; the first is the one reported first."
    )
    width: int = _(768, "Hidden units; a head has 64 of them, the feed-forward layer four times.")
    depth: int = _(12, "Layers.")
    dropout: float = _(0.1, "Of hidden units and attention.")
    sequence_length: int = _(512, "Tokens in a sequence.")
    vocabulary: int = _(50_265, "Tokens of the byte-level BPE, trained on the training text.")
    mask_fraction: float = _(0.15, "Tokens to be predicted, drawn anew each time.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width > 64 and self.width % (self.width // 64):
            raise ConfigError(
                f"width={self.width}: must be a multiple of its {self.width // 64} heads"
            )
        if self.sequence_length < 4:
            raise ConfigError(f"sequence_length={self.sequence_length}: must be at least 4")
        if self.vocabulary < 261:
            raise ConfigError(
                f"vocabulary={self.vocabulary}: must be at least 261, a token for every byte and 5 "
                "special ones"
            )
        if not self.mask_fraction < 1.0:
            raise ConfigError(f"mask_fraction={self.mask_fraction}: must lie between 0 and 1")


RECIPES: dict[str, type[TrainConfig]] = {
    config.recipe: config
    for config in (DigitsConfig, Cifar100Config, ImageNetConfig, WikiTextConfig)
}


def find_recipe(name: str) -> type[TrainConfig]:
    """The configuration of a recipe.

    >>> find_recipe("cifar100-resnet34")().epochs
    200
    """
    if name not in RECIPES:
        raise ConfigError(f"there is no recipe {name!r}: choose from {', '.join(RECIPES)}")
    return RECIPES[name]
