"""The settings that all recipes share, with the help text and bounds of each.

Pure Python, so that `lawa train RECIPE --help` answers at once. The defaults are the paper's
values, for recipes that are in it. Where the paper (sections 3 and B) says nothing, the value is
that of the code it cites, and the help text says "Ours".
"""

import abc
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from lawa_lab.methods.registry import METHODS, parse_method
from lawa_lab.registry import typed_entries
from lawa_lab.wrappers.registry import WRAPPERS, parse_wrappers
from torch_lawa.coefficients import name_coefficients, parse_coefficients
from torch_lawa.errors import ConfigError
from torch_lawa.validation import one_of

if TYPE_CHECKING:
    from lawa_lab.recipes.task import Task, Worker

__all__ = ["LearningRateSchedule", "OptimizerName", "TrainConfig", "setting"]

OptimizerName = Literal["sgd", "adam", "adamw", "schedule-free-sgd", "schedule-free-adamw"]
LearningRateSchedule = Literal["cosine", "linear", "constant"]
LandingShape = Literal["linear", "1-sqrt"]


def setting(
    default: Any,
    help: str,
    *,
    minimum: float | None = None,
    below: float | None = None,
) -> Any:
    """A field of a configuration: its default, help text and bounds.

    Without a `minimum`, an int must be at least 1 and a float above 0. A subclass that assigns a
    plain default (`epochs: int = 90`) inherits the help text and the bounds.
    """
    bounds = {"minimum": minimum, "below": below}
    return field(default=default, metadata={"help": help, **bounds})


@dataclass(frozen=True, kw_only=True)
class TrainConfig(abc.ABC):
    """What all recipes have in common; each sets its own defaults."""

    recipe: ClassVar[str]
    about: ClassVar[str]
    from_paper: ClassVar[bool] = False  # whether the defaults are the paper's
    reads_data: ClassVar[bool] = True  # whether `--data` names a folder that it needs
    # What `--smoke` changes: seconds on a CPU, with synthetic data.
    smoke_values: ClassVar[dict[str, Any]]
    num_threads: ClassVar[int | None] = None  # on a CPU; None: PyTorch's default

    epochs: int | float = setting(
        200, "Number of passes over the training data; may be fractional.", minimum=0
    )
    batch_size: int = setting(256, "Examples per step, over all processes.")
    micro_batch_size: int | None = setting(
        None,
        "Examples per forward pass and process; gradients are accumulated over the step "
        "[default: the whole batch of the process].",
    )
    optimizer: OptimizerName = setting("sgd", "Optimizer.")
    learning_rate: float = setting(0.1, "Peak learning rate.")
    schedule: LearningRateSchedule = setting(
        "cosine", "Learning-rate schedule after the warm-up; cosine and linear decay to 0."
    )
    land: float = setting(
        0.0,
        "Landing: fraction of the run, at its end, over which a constant learning rate decays to "
        "0; 0.2 is the usual warmup-stable-decay schedule.",
        minimum=0,
        below=1,
    )
    land_shape: LandingShape = setting("linear", "Shape of the decay in a landing.")
    warmup_steps: int = setting(0, "Steps of linear warm-up from 0.", minimum=0)
    weight_decay: float = setting(5e-4, "Weight decay.", minimum=0)
    momentum: float = setting(0.9, "SGD's momentum, or Adam's beta1.", minimum=0, below=1)
    beta2: float = setting(0.999, "Adam's beta2.", below=1)
    epsilon: float = setting(1e-8, "Adam's epsilon.")
    clip_norm: float | None = setting(None, "Clip the gradient norm to this value.")
    wrap: tuple[str, ...] = setting(
        (),
        "Methods that wrap the optimizer and change training, innermost first, such as "
        f"lookahead:5:0.8 or sam:0.05,rescue. Available: {typed_entries(WRAPPERS)}.",
    )

    nu: int | None = setting(
        None, "Take a snapshot and evaluate every NU steps [default: after each epoch]."
    )
    horizon: float | None = setting(
        None,
        "Space the snapshots so that the largest window always spans this fraction of the steps so "
        "far, such as 0.25 or 1/4; NU and epochs then only determine when to evaluate.",
        below=1,
    )
    samples: int = setting(
        1,
        "Make each snapshot the mean of this many samples of the weights, spread over the steps "
        "since the previous snapshot; use 16 with a horizon.",
    )
    ks: tuple[int, ...] = setting(
        (6, 10), "Window sizes to evaluate; the first is the main one in reports."
    )
    coefficients: tuple[str, ...] = setting(
        ("uniform",), "Coefficient rules to evaluate, such as uniform,exponential:0.9."
    )
    batch_norm: tuple[str, ...] = setting(
        ("re-estimated",), "BatchNorm statistics of averages: re-estimated, copied, or both."
    )
    batch_norm_batches: int = setting(
        20, "Number of training batches used to re-estimate BatchNorm statistics."
    )
    methods: tuple[str, ...] = setting(
        (),
        "Other averaging methods to evaluate, such as ema:0.99,ema:0.999. Available: "
        f"{typed_entries(METHODS)}.",
    )
    quantize: tuple[int, ...] = setting(
        (),
        "At the end, also evaluate the weights rounded to these numbers of bits, such as 8,4.",
    )
    choose_window: bool = setting(
        False,
        "Also report whichever of the raw weights and the windows is best on the validation data; "
        "this evaluates all of them and needs a recipe with valid_loss.",
    )
    evaluate_every: int = setting(
        1, "Evaluate every N epochs (or every N * NU steps), and after the last step."
    )
    evaluate_at: tuple[float, ...] = setting(
        (), "Also evaluate after these numbers of epochs, such as 0.25,0.5."
    )
    variants_every: int = setting(
        1, "Evaluate averages other than the first only at every N-th and the last evaluation."
    )

    @abc.abstractmethod
    def make_task(self, data: Path | None, *, seed: int, worker: "Worker", smoke: bool) -> "Task":
        """Load the data (from the folder `data`, or synthetic for a smoke run) and build the task.

        Import torch and data libraries inside this method.
        """

    def __post_init__(self) -> None:
        if self.epochs <= 0:
            raise ConfigError(f"epochs={self.epochs:g}: must be positive")
        for name, metadata in self.settings().items():
            _check(name, getattr(self, name), metadata)
        if min(self.ks, default=0) < 1 or len(set(self.ks)) != len(self.ks):
            raise ConfigError(
                f"ks={_listed(self.ks)}: give distinct whole numbers of at least 1, such as 6,10"
            )
        if not self.coefficients or not self.batch_norm:
            raise ConfigError("coefficients and batch_norm: give at least one of each")
        rules = {name_coefficients(parse_coefficients(text)) for text in self.coefficients}
        if len(rules) != len(self.coefficients):
            raise ConfigError(f"coefficients={','.join(self.coefficients)}: name each rule once")
        if len({str(parse_method(text)) for text in self.methods}) != len(self.methods):
            raise ConfigError(f"methods={','.join(self.methods)}: name each method once")
        if any(not 0 < epochs < math.inf for epochs in self.evaluate_at):
            raise ConfigError(f"evaluate_at={_listed(self.evaluate_at)}: give positive numbers")
        bits = set(self.quantize)
        if len(bits) != len(self.quantize) or not bits <= set(range(2, 17)):
            raise ConfigError(
                f"quantize={_listed(self.quantize)}: give distinct numbers of bits from 2 to 16"
            )
        for policy in self.batch_norm:
            one_of("batch_norm", policy, ("re-estimated", "copied"))
        if len(set(self.batch_norm)) != len(self.batch_norm):
            raise ConfigError(f"batch_norm={','.join(self.batch_norm)}: name each once")
        one_of("optimizer", self.optimizer, get_args(OptimizerName))
        parse_wrappers(self.wrap, self.optimizer)
        one_of("schedule", self.schedule, get_args(LearningRateSchedule))
        one_of("land_shape", self.land_shape, get_args(LandingShape))
        if self.schedule != "constant" and (self.land or self.schedule_free):
            option = f"land={self.land}" if self.land else f"optimizer={self.optimizer}"
            raise ConfigError(f"{option}: needs a constant rate. Set schedule=constant.")

    @classmethod
    def settings(cls) -> dict[str, Mapping[str, Any]]:
        """Help text and bounds of every field, in order."""
        return {item.name: _metadata(cls, item.name) for item in dataclasses.fields(cls)}

    def smoke(self) -> "TrainConfig":
        """The same recipe in seconds, to check that it runs."""
        return dataclasses.replace(self, **self.smoke_values)

    @property
    def schedule_free(self) -> bool:
        """Whether the optimizer keeps an average of its own."""
        return self.optimizer.startswith("schedule-free")


def _metadata(cls: type[TrainConfig], name: str) -> Mapping[str, Any]:
    """That of the field, or of the one whose default it replaces."""
    for base in cls.__mro__:
        item = vars(base).get("__dataclass_fields__", {}).get(name)
        if item is not None and item.metadata:
            found: Mapping[str, Any] = item.metadata
            return found
    raise TypeError(f"{cls.__name__}.{name}: give the field a help text with setting()")


def _listed(values: tuple[float, ...]) -> str:
    """As it is typed."""
    return ",".join(f"{value:g}" for value in values)


def _check(name: str, value: Any, bounds: Mapping[str, Any]) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    minimum, below = bounds["minimum"], bounds["below"]
    if minimum is None and isinstance(value, int):
        minimum = 1
    if not math.isfinite(value):
        raise ConfigError(f"{name}={value}: must be a finite number")
    if minimum is not None and value < minimum:
        raise ConfigError(f"{name}={value}: must be at least {minimum}")
    if minimum is None and value <= 0:
        raise ConfigError(f"{name}={value}: must be positive")
    if below is not None and value >= below:
        raise ConfigError(f"{name}={value}: must be below {below}")
