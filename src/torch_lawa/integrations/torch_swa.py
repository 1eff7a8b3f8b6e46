"""Conversion to and from `torch.optim.swa_utils.AveragedModel`, PyTorch's averaged model."""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from torch_lawa.averager import LatestWeightAverager
from torch_lawa.errors import ConfigError, LayoutError
from torch_lawa.masters import is_sharded_model
from torch_lawa.selection import unwrap

__all__ = ["from_averaged_model", "plain_state_dict", "to_averaged_model"]

_COUNT = "n_averaged"


def to_averaged_model(
    averager: LatestWeightAverager, model: nn.Module, k: int | None = None
) -> AveragedModel:
    """A copy of `model` with the averager's mean, as an `AveragedModel` for torch's tools.

    Parameters are the mean of the window (or of its `k` newest snapshots), buffers follow the
    averager's rule, and `n_averaged` is the number of snapshots, so that `update_parameters` would
    continue the equal-weight average of all of them. If the model has BatchNorm layers, call
    `torch.optim.swa_utils.update_bn(loader, averaged)`. `model` is unchanged.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> averager = LatestWeightAverager(k=2)
    >>> for value in (1.0, 2.0):
    ...     _ = model.weight.data.fill_(value)
    ...     averager.collect(model)
    >>> averaged = to_averaged_model(averager, model)
    >>> averaged.module.weight.item(), averaged.n_averaged.item(), model.weight.item()
    (1.5, 2, 2.0)
    """
    if is_sharded_model(model):
        raise LayoutError(
            "the model is sharded, and PyTorch cannot copy it into an AveragedModel: evaluate "
            "inside `with averager.swapped_into(model)` instead."
        )
    # torch copies the model while the mean is swapped in, so that the copy has frozen parameters,
    # ties and hooks, too, and a model that does not match the window raises.
    with averager.swapped_into(model, k):
        averaged = AveragedModel(unwrap(model))
    averaged.n_averaged.fill_(k if k is not None else averager.num_averaged)
    return averaged


def from_averaged_model(source: AveragedModel | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of an `AveragedModel`, or of a saved state dict of one, by their plain names.

    The prefixes of AveragedModel, DDP and `torch.compile` are removed, and so is `n_averaged`: the
    result is for `model.load_state_dict` of the unwrapped model. The tensors are those of the
    source, not copies. timm's ModelEmaV2 and V3 use the same format.

    The snapshots of a mean cannot be recovered, so this is one state dict and not a window. To
    begin a window with it as the oldest snapshot, load it into the model and call
    `averager.collect(model)` before training continues.

    >>> averaged = AveragedModel(nn.Linear(1, 1))
    >>> list(averaged.state_dict())
    ['n_averaged', 'module.weight', 'module.bias']
    >>> list(from_averaged_model(averaged.state_dict()))
    ['weight', 'bias']
    """
    if isinstance(source, AveragedModel):
        return plain_state_dict(source.module)
    if not isinstance(source, Mapping):
        raise ConfigError(
            f"from_averaged_model: a {type(source).__name__} is no AveragedModel. Pass an "
            "AveragedModel or a saved state dict of one; other models are not averages."
        )
    state = {name: tensor for name, tensor in source.items() if name != _COUNT}
    if not state or not all(name.startswith("module.") for name in state):
        other = next((name for name in state if not name.startswith("module.")), None)
        found = "holds no weights" if other is None else f"has the tensor {other!r}"
        raise LayoutError(
            f"this state dict {found}, but in that of an AveragedModel every name begins with "
            "'module.': if it is the state dict of the unwrapped model, use it as it is."
        )
    # One prefix is AveragedModel's. More of them on every name are of a DDP model inside, which
    # may itself be compiled.
    state = _without_compile(state)
    while all(name.startswith("module.") for name in state):
        state = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    return state


def plain_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of a model without the prefixes of DDP and `torch.compile`."""
    return _without_compile(unwrap(model).state_dict())


def _without_compile(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("_orig_mod.", ""): tensor for name, tensor in state.items()}
