"""Appendix B of the paper: ResNet-34 on CIFAR-100, against SGD and Lookahead."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lawa_lab.recipes.config import TrainConfig, setting
from lawa_lab.recipes.registry import register_recipe
from torch_lawa.errors import ConfigError

if TYPE_CHECKING:
    from lawa_lab.recipes.task import Task, Worker

__all__ = ["Cifar100Config"]


@register_recipe
@dataclass(frozen=True, kw_only=True)
class Cifar100Config(TrainConfig):
    """ResNet-34 on CIFAR-100."""

    recipe: ClassVar[str] = "cifar100-resnet34"
    about: ClassVar[str] = "ResNet-34 on CIFAR-100 with SGD, 200 epochs (the paper's appendix B)."
    from_paper: ClassVar[bool] = True
    smoke_values: ClassVar[dict[str, Any]] = {
        "epochs": 4,
        "batch_size": 32,
        "learning_rate": 0.05,
        "ks": (2, 3),
        "batch_norm_batches": 2,
        "variants_every": 1,
        "width": 4,
    }

    weight_decay: float = setting(
        5e-4, "Weight decay. Ours: the paper only says that it uses common values.", minimum=0
    )
    ks: tuple[int, ...] = (10, 6, 3, 16)
    coefficients: tuple[str, ...] = ("uniform", "exponential:0.9")
    batch_norm: tuple[str, ...] = ("re-estimated", "copied")
    batch_norm_batches: int = setting(
        10, "Number of training batches used to re-estimate BatchNorm statistics. Ours."
    )
    variants_every: int = 5
    width: int = setting(64, "Channels of the first stage.")
    padding: int = setting(
        4, "Padding in pixels before the random crop; images are also flipped. Ours.", minimum=0
    )

    held_out: int = setting(
        0,
        "Hold out this many training images, the same for all seeds, and evaluate on them instead "
        "of the test images, to choose hyper-parameters.",
        minimum=0,
    )
    evaluate_test: bool = setting(
        False,
        "With held-out images, also evaluate on the test images, to compare methods that use "
        "validation images during the run.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.evaluate_test and not self.held_out:
            raise ConfigError(
                "--evaluate-test: without --held-out, the run is evaluated on the test "
                "images anyway. Pass both, such as --held-out 5000, or neither."
            )

    def make_task(self, data: Path | None, *, seed: int, worker: "Worker", smoke: bool) -> "Task":
        """CIFAR-100 from `data` (default: the folder `data`), or synthetic images."""
        from lawa_lab.recipes.data.cifar import load_cifar100
        from lawa_lab.recipes.data.images import smoke_images
        from lawa_lab.recipes.models.resnet import resnet34
        from lawa_lab.recipes.tasks.images import ImageTask

        if smoke:
            images = smoke_images(10, 32, 160, 64, seed=0)
        else:
            images = load_cifar100(Path("data") if data is None else data)
        official = images if self.held_out and self.evaluate_test else None
        if self.held_out:
            images = images.hold_out(self.held_out)
        return ImageTask(
            images=images,
            build=functools.partial(resnet34, images.num_classes, stem="small", width=self.width),
            seed=seed,
            worker=worker,
            batch_size=self.batch_size,
            batch_norm_batches=self.batch_norm_batches,
            padding=self.padding,
            prefix="valid" if self.held_out else "test",
            official=official,
        )
