"""Checkpoints in timm's format; timm itself is not needed to write them."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from torch_lawa.averager import LatestWeightAverager
from torch_lawa.errors import ConfigError, LayoutError
from torch_lawa.integrations.torch_swa import from_averaged_model, plain_state_dict
from torch_lawa.masters import is_sharded_model
from torch_lawa.swap import refuse_if_swapped

__all__ = ["timm_checkpoint"]


def timm_checkpoint(
    model: nn.Module, averaged: LatestWeightAverager | AveragedModel, **entries: Any
) -> dict[str, Any]:
    """A dict for `torch.save` with the raw and the averaged weights, as timm's loaders read it.

    `timm.models.load_checkpoint(model, path)` loads the averaged weights, and with `use_ema=False`
    the raw ones; so do timm's scripts with and without `--use-ema`. They are stored under
    `state_dict_ema` and `state_dict`, each complete and named as in the unwrapped model. Until the
    averager is ready there are no averaged weights, and timm's loaders load the raw ones.

    `entries` are stored as well: `epoch=epoch` and `optimizer=optimizer.state_dict()` for
    `timm.models.resume_checkpoint`, `averager=averager.state_dict()` to resume the window.

    If the model has BatchNorm layers, pass the result of `to_averaged_model` after `update_bn`; an
    averager gives the statistics of the newest snapshot.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> averager = LatestWeightAverager(k=2)
    >>> for value in (1.0, 2.0):
    ...     _ = model.weight.data.fill_(value)
    ...     averager.collect(model)
    >>> checkpoint = timm_checkpoint(model, averager, epoch=1)
    >>> checkpoint["state_dict_ema"]["weight"].item(), checkpoint["state_dict"]["weight"].item()
    (1.5, 2.0)
    """
    taken = {"state_dict", "state_dict_ema"} & entries.keys()
    if taken:
        raise ConfigError(
            f"{taken.pop()!r} is made from the model and the averager: rename this entry."
        )
    if is_sharded_model(model):
        raise LayoutError(
            "the model is sharded, and timm reads whole tensors: save the model and the averager "
            "with torch.distributed.checkpoint, and average those files with `lawa average`."
        )
    refuse_if_swapped(model, "timm_checkpoint was called")  # its raw weights are not in it now
    raw = plain_state_dict(model)
    # From version 2 on (which timm's savers write), timm resumes at the next epoch.
    checkpoint = {"state_dict": raw, "version": 2, **entries}
    if isinstance(averaged, AveragedModel):
        checkpoint["state_dict_ema"] = _complete(raw, from_averaged_model(averaged))
    elif averaged.ready:
        checkpoint["state_dict_ema"] = _complete(raw, averaged.average())
    return checkpoint


def _complete(raw: Mapping[str, Tensor], averaged: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The averaged weights in the model's order, with the frozen ones that were not averaged."""
    for name, tensor in averaged.items():
        if name not in raw or raw[name].shape != tensor.shape:
            found = f"shape {tuple(raw[name].shape)}" if name in raw else "no such tensor"
            raise LayoutError(
                f"tensor {name!r} was averaged with shape {tuple(tensor.shape)} and this model has "
                f"{found}: pass the model that was collected from."
            )
    return {**raw, **averaged}
