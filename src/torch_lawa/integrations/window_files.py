"""A window beside the checkpoint of a framework: one file, or shards where the model has shards.

The framework decides when a checkpoint is written, where, and when it is removed; the whole window
goes into each, so that any one of them is enough to go on exactly.
"""

import warnings
from pathlib import Path

import torch
from torch import nn

from torch_lawa.averager import LatestWeightAverager
from torch_lawa.checkpoints.storage.atomic import clear_stale, remove, replacing
from torch_lawa.errors import StateError
from torch_lawa.shards import is_sharded_model, reshard

__all__ = ["load_window", "save_window"]

_SUFFIX = ".pt"


def save_window(
    averager: LatestWeightAverager, model: nn.Module, path: Path, *, writes: bool
) -> None:
    """Write the window of `model`; called in every process, and `writes` in one on each disk.

    Of a model in shards every process writes its own into the folder `path`
    (`torch.distributed.checkpoint`); of any other one process writes the file `path`.pt.
    """
    file = path.with_name(path.name + _SUFFIX)
    reshard(model)
    if is_sharded_model(model):
        from torch.distributed.checkpoint.state_dict_saver import save

        path.parent.mkdir(parents=True, exist_ok=True)
        averager.bind(model)  # its names, also before the first snapshot
        save({"averager": averager}, checkpoint_id=path)
        other = file
    else:
        other = path
        if writes:
            path.parent.mkdir(parents=True, exist_ok=True)
            clear_stale(file)
            with replacing(file) as out:
                torch.save(averager.state_dict(), out)
    if writes:
        remove(other)  # of an earlier run in the same place, and not of this one


def load_window(averager: LatestWeightAverager, model: nn.Module, path: Path) -> bool:
    """Go on from a window that `save_window` wrote; False where there is none."""
    file = path.with_name(path.name + _SUFFIX)
    reshard(model)
    if path.is_dir():
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_loader import load

        averager.reset()
        averager.bind(model)
        try:
            with warnings.catch_warnings():  # that there is only one process
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                load({"averager": averager}, checkpoint_id=path)
        except CheckpointException as error:  # says only which ranks failed, and holds why
            reason, _ = next(iter(error.failures.values()))
            hint = " Shards load into the k they were saved with, or a smaller one."
            raise _unreadable(path, reason, hint) from error
        return True
    if not file.is_file():
        return False
    if is_sharded_model(model):
        raise StateError(
            f"{file} was saved by a run whose model was not sharded, and this one is: resume it "
            "as it was, or remove the file to begin a new window."
        )
    try:
        state = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        raise _unreadable(file, error) from error
    try:
        averager.load_state_dict(state)
    except StateError as error:
        raise StateError(f"{file}: {error}") from None
    return True


def _unreadable(path: Path, error: BaseException, hint: str = "") -> StateError:
    reason = str(error).partition("\n")[0].removesuffix(".")
    return StateError(
        f"{path}: the window cannot be read: {reason}.{hint} Resume from an older checkpoint, or "
        "remove it to begin a new window."
    )
