"""Conversion to `diffusers.training_utils.EMAModel`, the average of Diffusers' training scripts."""

from typing import TYPE_CHECKING, Any

from torch import nn

from torch_lawa.averager import LatestWeightAverager
from torch_lawa.errors import LayoutError
from torch_lawa.masters import is_sharded_model
from torch_lawa.selection import unwrap

if TYPE_CHECKING:
    from diffusers.training_utils import EMAModel

__all__ = ["to_ema_model"]


def to_ema_model(
    averager: LatestWeightAverager, model: nn.Module, k: int | None = None, **settings: Any
) -> "EMAModel":
    """An `EMAModel` of Diffusers whose weights are the averager's mean.

    Its `save_pretrained("unet_ema")` writes the folder that `EMAModel.from_pretrained` and the
    model's own `from_pretrained` load. Its `optimization_step` is the step of the newest snapshot,
    so that an EMA continues from the mean; one that begins at 0 forgets it in its first `step`.

    Args:
        averager: Its window, or the `k` newest snapshots of it, are averaged.
        model: The model that was collected from, of Diffusers. It is unchanged.
        k: How many of the newest snapshots to average; all by default.
        settings: Arguments of `EMAModel`, such as `decay=0.9999` or `use_ema_warmup=True`.
    """
    from diffusers.training_utils import EMAModel

    inside: Any = unwrap(model)
    if is_sharded_model(model):
        raise LayoutError(
            "the model is sharded, and an EMAModel holds whole tensors: write the mean with "
            "averager.save_pretrained(folder, model), which EMAModel.from_pretrained loads."
        )
    if not hasattr(inside, "save_config"):
        raise LayoutError(
            f"{type(inside).__name__} is not a model of Diffusers, so EMAModel cannot save it: use "
            "averager.save_pretrained, or torch_lawa.integrations.torch_swa.to_averaged_model."
        )
    about = {"model_cls": type(inside), "model_config": inside.config}
    with averager.swapped_into(model, k):
        ema = EMAModel(inside.parameters(), **about, **settings)
    ema.optimization_step = averager.snapshot_steps[-1]
    return ema
