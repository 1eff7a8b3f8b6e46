"""The demo: a small convolutional net on scikit-learn's digits."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lawa_lab.recipes.config import TrainConfig, setting
from lawa_lab.recipes.registry import register_recipe
from torch_lawa.errors import ConfigError

if TYPE_CHECKING:
    from lawa_lab.recipes.task import Task, Worker

__all__ = ["DigitsConfig"]


@register_recipe
@dataclass(frozen=True, kw_only=True)
class DigitsConfig(TrainConfig):
    """A small convolutional net with BatchNorm; measured in `results/2026-11-15-digits-loop`."""

    recipe: ClassVar[str] = "digits"
    about: ClassVar[str] = (
        "A small convolutional net on scikit-learn's digits: 15 s on a CPU, no download."
    )
    reads_data: ClassVar[bool] = False  # the digits come with scikit-learn
    smoke_values: ClassVar[dict[str, Any]] = {"epochs": 4, "ks": (2,), "width": 4}
    # More threads are slower at this size, and their number would change the bits.
    num_threads: ClassVar[int | None] = 1

    epochs: int | float = 50
    batch_size: int = 32
    learning_rate: float = 0.2
    ks: tuple[int, ...] = (6,)
    batch_norm: tuple[str, ...] = ("re-estimated", "copied")
    batch_norm_batches: int = 28
    width: int = setting(16, "Channels of the first convolution.")
    max_shift: int = setting(1, "Largest random shift of an image, in pixels.", minimum=0)
    noise: float = setting(
        0.3, "Standard deviation of the Gaussian noise added to an image.", minimum=0
    )
    test_fraction: float = setting(0.5, "Fraction of the data used for testing.", below=1)
    validation_fraction: float = setting(
        0.0,
        "Hold out this fraction of the training images and evaluate on it instead of the test "
        "images, to choose hyper-parameters.",
        minimum=0,
        below=1,
    )
    evaluate_test: bool = setting(
        False,
        "With a validation fraction, also evaluate on the test images, to compare methods that use "
        "validation images during the run.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.evaluate_test and not self.validation_fraction:
            raise ConfigError(
                "--evaluate-test: without --validation-fraction, the run is evaluated on the test "
                "images anyway. Pass both, such as --validation-fraction 0.2, or neither."
            )

    def make_task(self, data: Path | None, *, seed: int, worker: "Worker", smoke: bool) -> "Task":
        """The digits; `data` is not used."""
        from lawa_lab.recipes.tasks.digits import DigitsTask, load_data

        return DigitsTask(self, load_data(self), seed=seed, worker=worker)
