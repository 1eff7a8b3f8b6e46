"""The window beside each checkpoint that Lightning writes: `.lawa/epoch=3.ckpt.window`.

Lightning does not tell a callback where a checkpoint is written or when it is removed. It does
tell the strategy, in every process, so four methods of the strategy are wrapped. (A
`CheckpointIO`, the official plugin, is called in one process only, and not for sharded
checkpoints.)
"""

import uuid
from pathlib import Path
from typing import Any

from torch import Tensor

from torch_lawa.checkpoints.formats.torch_pickle.state_dicts import refuse_window
from torch_lawa.errors import StateError, SwapError
from torch_lawa.integrations.lightning._compat import Trainer, rank_zero_warn
from torch_lawa.integrations.lightning.average import ModuleAverage
from torch_lawa.integrations.lightning.strategies import (
    has_flat_shards,
    release_gathered,
    sharded,
    trained_model,
)
from torch_lawa.integrations.window_files import SavedWindows, window_beside
from torch_lawa.swap import refuse_if_swapped

__all__ = ["attach_windows"]

_KEY = "torch_lawa"  # in the checkpoint
_ATTRIBUTE = "_lawa_checkpoints"  # of the strategy


def attach_windows(trainer: Trainer, average: ModuleAverage) -> None:
    """From now on the checkpoints of this trainer have the average's window beside them."""
    wrapper = vars(trainer.strategy).get(_ATTRIBUTE)
    if wrapper is None or wrapper.trainer is not trainer:
        wrapper = _StrategyWrapper(trainer, wrapper)
        setattr(trainer.strategy, _ATTRIBUTE, wrapper)
    if not any(known is average for known in wrapper.averages):
        wrapper.averages.append(average)


class _StrategyWrapper:
    """Replaces four methods of a strategy, and calls the originals."""

    _save_checkpoint: Any
    _load_checkpoint: Any
    _remove_checkpoint: Any
    _lightning_module_state_dict: Any

    def __init__(self, trainer: Trainer, before: "_StrategyWrapper | None") -> None:
        self.trainer = trainer
        self.averages: list[ModuleAverage] = []
        names = ("save_checkpoint", "load_checkpoint", "remove_checkpoint")
        for name in (*names, "lightning_module_state_dict"):
            # A strategy that another trainer used before is not wrapped a second time.
            own = getattr(trainer.strategy, name) if before is None else getattr(before, f"_{name}")
            setattr(self, f"_{name}", own)
            setattr(trainer.strategy, name, getattr(self, name))

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights for a checkpoint: the trained ones, also during an evaluation."""
        swapped = [average for average in self.averages if average.swapped]
        for average in swapped:
            average.restore()
        state: dict[str, Any] = self._lightning_module_state_dict()
        if swapped:
            # They may be the live tensors, which are about to change again.
            state = {
                name: value.clone() if isinstance(value, Tensor) else value
                for name, value in state.items()
            }
        for average in swapped:
            average.swap_in(self.trainer)
        return state

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Write the window, then the checkpoint, then rename the window."""
        if self._exports_average():  # which has no state to resume from
            self._save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            return
        model = trained_model(self.trainer)
        path = str(filepath)
        if sharded(model):
            path = self.trainer.strategy.broadcast(path)  # every process writes there
            release_gathered(model)
        window = window_beside(path)
        token = uuid.uuid4().hex  # rank 0 writes both files: the other ranks' are not used
        checkpoint[_KEY] = {"window": token}
        window.write(
            {average.name: average.averager for average in self.averages},
            model,
            writes=self.trainer.is_global_zero,
            notes={
                "averages": {average.name: average.state_dict() for average in self.averages},
                "ranks": self.trainer.world_size if has_flat_shards(model) else None,
            },
            token=token,
            sharded=sharded(model),
            rank=self._rank(),
        )
        try:
            self._save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        except BaseException:
            if self.trainer.is_global_zero:
                window.discard_pending()
            raise
        if self.trainer.is_global_zero:
            window.publish()

    def load_checkpoint(self, checkpoint_path: str | Path, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint and its window; the window is empty if the checkpoint has none."""
        checkpoint = self._load_checkpoint(checkpoint_path, *args, **kwargs)
        refuse_window(checkpoint, checkpoint_path)
        for average in self.averages:
            average.begin(self.trainer.lightning_module)
        entry = checkpoint.get(_KEY)
        if entry is not None:
            self._load(str(checkpoint_path), entry["window"])
        elif self.trainer.state.fn != "fit":
            rank_zero_warn(
                f"{checkpoint_path} was saved without LatestWeightAveraging: it is evaluated with "
                "its own weights."
            )
        return checkpoint

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint and its window."""
        self._remove_checkpoint(filepath)
        if self.trainer.is_global_zero:
            window_beside(str(filepath)).remove()

    def _exports_average(self) -> bool:
        """Whether the model holds averaged weights that no evaluation swapped in."""
        if any(average.swapped for average in self.averages):
            return False
        try:
            refuse_if_swapped(trained_model(self.trainer), "")
        except SwapError:
            return True
        return False

    def _load(self, checkpoint: str, token: str) -> None:
        saved = _find(checkpoint, token)
        if saved is None:
            rank_zero_warn(
                f"{window_beside(checkpoint).path} is missing: the run resumes with an empty "
                "window. Keep the two files together to resume exactly."
            )
            return
        model = trained_model(self.trainer)
        with saved.reading():
            ranks, notes = saved.notes["ranks"], dict(saved.notes["averages"])
        if ranks not in (None, self.trainer.world_size):
            raise StateError(
                f"{saved.path}: FSDP sharded it for {ranks} processes, and now there are "
                f"{self.trainer.world_size}. Resume on {ranks}, or remove it to begin a new window."
            )
        if saved.sharded and not sharded(model):
            raise StateError(
                f"{saved.path}: the model was sharded when it was saved, and is not now. Resume "
                "with the same strategy, or remove it to begin a new window."
            )
        known = {average.name: average for average in self.averages if average.name in notes}
        if len(known) < len(self.averages):
            rank_zero_warn(f"{saved.path} has windows of the names {sorted(notes)} only.")
        release_gathered(model)
        saved.load(
            {name: average.averager for name, average in known.items()},
            model,
            sharded=sharded(model),
            rank=self._rank(),
        )
        with saved.reading():
            for name, average in known.items():
                average.load_state_dict(notes[name])

    def _rank(self) -> int | None:
        """The rank that owns flat shards; DTensors may be loaded by any number of processes."""
        flat = has_flat_shards(trained_model(self.trainer))
        return self.trainer.global_rank if flat else None


def _find(checkpoint: str, token: str) -> SavedWindows | None:
    """The window that carries the checkpoint's token; None if there is no window at all."""
    paths, other = [checkpoint], None
    if Path(checkpoint).is_symlink():  # `last.ckpt` may be a link to the checkpoint with the window
        paths.insert(0, str(Path(checkpoint).resolve()))
    for path in paths:
        for saved in window_beside(path).read():
            if saved.token == token:
                return saved
            other = saved
    if other is not None:
        raise StateError(
            f"{other.path} is not the window of {checkpoint}: one of the two was replaced. Resume "
            "from another checkpoint, or remove the window to begin a new one."
        )
    return None
