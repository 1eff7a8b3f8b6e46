"""Section 3.1 of the paper: ResNet-50 on ImageNet, or on any folder of images."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lawa_lab.recipes.config import TrainConfig, setting
from lawa_lab.recipes.registry import register_recipe

if TYPE_CHECKING:
    from lawa_lab.recipes.task import Task, Worker

__all__ = ["ImageNetConfig"]

_IN_MEMORY_BYTES = 4 * 2**30
_EVALUATE_BATCH_SIZE = 250


@register_recipe
@dataclass(frozen=True, kw_only=True)
class ImageNetConfig(TrainConfig):
    """ResNet-50 on a folder of images.

    A small set (Tiny-ImageNet at its 64 pixels) is decoded once and kept on the device, augmented
    like CIFAR-100: padded, cropped, flipped. ImageNet itself is streamed, with random resized
    crops.
    """

    recipe: ClassVar[str] = "imagenet-resnet50"
    about: ClassVar[str] = "ResNet-50 on ImageNet with SGD, 90 epochs (the paper's section 3.1)."
    from_paper: ClassVar[bool] = True
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

    epochs: int | float = 90
    learning_rate: float = setting(
        0.1, "Peak learning rate. Ours: from PyTorch's example, for a batch size of 256."
    )
    weight_decay: float = setting(1e-4, "Weight decay. Ours: from PyTorch's example.", minimum=0)
    ks: tuple[int, ...] = (6, 3, 10, 16)
    batch_norm_batches: int = setting(
        40,
        "Number of training batches used to re-estimate BatchNorm statistics; the paper uses all.",
    )
    width: int = setting(64, "Channels of the first stage.")
    image_size: int = setting(224, "Input image size in pixels.")
    num_workers: int = setting(8, "Data-loading processes per training process.", minimum=0)

    def make_task(self, data: Path | None, *, seed: int, worker: "Worker", smoke: bool) -> "Task":
        """Images from `data` (default: the folder `data`), or synthetic ones."""
        import torch

        from lawa_lab.recipes.data.image_folder import decode_all, find_images
        from lawa_lab.recipes.data.images import Images, smoke_images
        from lawa_lab.recipes.models.resnet import resnet50
        from lawa_lab.recipes.tasks.images import ImageTask
        from lawa_lab.recipes.tasks.streamed_images import StreamedImageTask

        shared: dict[str, Any] = {
            "seed": seed,
            "worker": worker,
            "batch_size": self.batch_size,
            "batch_norm_batches": self.batch_norm_batches,
            "evaluate_batch_size": _EVALUATE_BATCH_SIZE,
            "prefix": "valid",
        }

        def build(num_classes: int) -> Any:
            return lambda: resnet50(num_classes, stem="image", width=self.width)

        def in_memory(images: Images) -> ImageTask:
            return ImageTask(
                images=images,
                build=build(images.num_classes),
                padding=self.image_size // 8,
                **shared,
            )

        if smoke:
            return in_memory(smoke_images(10, self.image_size, 160, 64, seed=0))
        found = find_images(Path("data") if data is None else data)
        num_classes = len(found.class_names)
        num_images = len(found.train_paths) + len(found.val_paths)
        if num_images * 3 * self.image_size**2 > _IN_MEMORY_BYTES:
            return StreamedImageTask(
                found=found,
                size=self.image_size,
                build=build(num_classes),
                num_workers=self.num_workers,
                **shared,
            )
        num_threads = max(1, self.num_workers)
        return in_memory(
            Images(
                decode_all(found.train_paths, self.image_size, num_threads),
                torch.tensor(found.train_labels),
                decode_all(found.val_paths, self.image_size, num_threads),
                torch.tensor(found.val_labels),
                num_classes=num_classes,
            )
        )
