"""The window beside each checkpoint that Lightning writes: `epoch=3.ckpt` and `epoch=3.ckpt.lawa`.

Lightning tells a callback neither where a checkpoint goes nor when it is removed. Its strategy is
told, in every process, so this stands between the two. (A `CheckpointIO`, the official plugin, is
asked in one process only, and not at all when sharded checkpoints are saved.)

Both files carry the same token. The window is written whole under another name, then comes the
checkpoint, then the window takes its place; loading takes the window with the checkpoint's token.
So a run that is killed at any moment leaves a checkpoint that can be resumed with its own window.
"""

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from torch_lawa.averager import LatestWeightAverager
from torch_lawa.errors import StateError, SwapError
from torch_lawa.integrations.lightning.batch_norm import Statistics
from torch_lawa.integrations.lightning.names import (
    LightningModule,
    Strategy,
    Trainer,
    rank_zero_warn,
)
from torch_lawa.integrations.lightning.shards import (
    let_go,
    num_owners,
    sharded,
    trained_model,
    window_key,
)
from torch_lawa.integrations.lightning.side_files import PENDING, SUFFIX, SideFile
from torch_lawa.swap import refuse_if_swapped

__all__ = ["Averaging", "accompany"]

_KEY = "torch_lawa"  # in the checkpoint
_ATTRIBUTE = "_lawa_companion"  # of the strategy


class Averaging(Protocol):
    """What is asked of the callback."""

    name: str
    statistics: Statistics

    @property
    def averager(self) -> LatestWeightAverager:
        """Its window."""

    @property
    def lending(self) -> bool:
        """Whether the model holds averaged weights for an evaluation."""

    def begin_again(self, pl_module: LightningModule) -> None:
        """Begin a new window, of this model."""

    def serves(self, trainer: Trainer) -> bool:
        """Whether there is an average of the trainer's model."""

    def lend(self, trainer: Trainer) -> None:
        """Give the model the averaged weights."""

    def take_back(self) -> None:
        """Give it its own again."""


def accompany(trainer: Trainer, callback: Averaging) -> None:
    """From now on the checkpoints of this trainer have the callback's window beside them."""
    companion = vars(trainer.strategy).get(_ATTRIBUTE)
    if companion is None or companion.trainer is not trainer:
        companion = _Companion(trainer, companion)
        setattr(trainer.strategy, _ATTRIBUTE, companion)
    if not any(known is callback for known in companion.callbacks):
        companion.callbacks.append(callback)


class _Companion:
    """Stands before four methods of a strategy."""

    def __init__(self, trainer: Trainer, before: "_Companion | None") -> None:
        self.trainer = trainer
        self.callbacks: list[Averaging] = []
        own: Strategy | _Companion = trainer.strategy if before is None else before
        names = ("save_checkpoint", "load_checkpoint", "remove_checkpoint")
        for name in (*names, "lightning_module_state_dict"):
            # A strategy that had another trainer before is not wrapped a second time.
            setattr(self, f"_{name}", getattr(own, name if before is None else f"_{name}"))
            setattr(trainer.strategy, name, getattr(self, name))

    _save_checkpoint: Any
    _load_checkpoint: Any
    _remove_checkpoint: Any
    _lightning_module_state_dict: Any

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights for a checkpoint: those that are being trained, also during an evaluation."""
        lending = [callback for callback in self.callbacks if callback.lending]
        for callback in lending:
            callback.take_back()
        state: dict[str, Any] = self._lightning_module_state_dict()
        if lending:
            # They may be the live tensors, which are about to change again.
            state = {
                name: value.clone() if isinstance(value, Tensor) else value
                for name, value in state.items()
            }
        for callback in lending:
            callback.lend(self.trainer)
        return state

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Write the window, then the checkpoint, then give the window its name."""
        options = {"storage_options": storage_options}
        if self._lent_by_hand():  # an export of the average: no state to resume from
            self._save_checkpoint(checkpoint, filepath, **options)
            return
        path = str(filepath)
        if sharded(trained_model(self.trainer)):
            path = self.trainer.strategy.broadcast(path)  # every process writes there
        file = SideFile(path + SUFFIX)
        token = uuid.uuid4().hex  # rank 0 writes both files, so it need not be the same elsewhere
        checkpoint[_KEY] = {"window": token}
        self._write(file, token)
        try:
            self._save_checkpoint(checkpoint, filepath, **options)
        except BaseException:
            if self.trainer.is_global_zero:
                file.discard_pending()
            raise
        if self.trainer.is_global_zero:
            file.publish()

    def load_checkpoint(self, checkpoint_path: str | Path, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint and the window that belongs to it, or none where it has none."""
        checkpoint = self._load_checkpoint(checkpoint_path, *args, **kwargs)
        for callback in self.callbacks:
            callback.begin_again(self.trainer.lightning_module)
        note = checkpoint.get(_KEY)
        if note is not None:
            self._read(str(checkpoint_path), note["window"])
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
            SideFile(f"{filepath}{SUFFIX}").remove()

    def _lent_by_hand(self) -> bool:
        if any(callback.lending for callback in self.callbacks):
            return False
        try:
            refuse_if_swapped(trained_model(self.trainer), "")
        except SwapError:
            return True
        return False

    def _write(self, file: SideFile, token: str) -> None:
        model = trained_model(self.trainer)
        averages: dict[str, dict[str, Any]] = {
            callback.name: {
                "k": callback.averager.k,
                "batch_norm": callback.statistics.state_dict(callback.averager),
            }
            for callback in self.callbacks
        }
        state = {"version": 1, "token": token, "averages": averages}
        if sharded(model):
            state["ranks"] = num_owners(self.trainer)
            if self.trainer.is_global_zero:
                file.discard_pending()
            self.trainer.strategy.barrier()
            shards = self._shards(self.callbacks)
            file.write_shards(shards, state if self.trainer.is_global_zero else None)
        elif self.trainer.is_global_zero:
            for callback in self.callbacks:
                averages[callback.name]["averager"] = callback.averager.state_dict()
            file.write(state)

    def _shards(self, callbacks: list[Averaging]) -> dict[str, LatestWeightAverager]:
        """The windows by the names that they have in a sharded checkpoint."""
        model = trained_model(self.trainer)
        let_go(model)
        for callback in callbacks:
            callback.averager.bind(model)  # its names, also before the first snapshot
        return {
            window_key(callback.name, self.trainer): callback.averager for callback in callbacks
        }

    def _read(self, checkpoint: str, token: str) -> None:
        file, state = self._find(checkpoint, token)
        if file is None:
            rank_zero_warn(
                f"{checkpoint}{SUFFIX} is not there: the checkpoint goes on with an empty window. "
                "Keep the two files together to resume exactly."
            )
            return
        saved = state["averages"]
        self._check(file, state)
        known = [callback for callback in self.callbacks if callback.name in saved]
        if len(known) < len(self.callbacks):
            rank_zero_warn(f"{file.path} has windows of the names {sorted(saved)} only.")
        if file.is_folder:
            file.read_shards(self._shards(known))
        for callback in known:
            if not file.is_folder:
                callback.averager.load_state_dict(saved[callback.name]["averager"])
            callback.statistics.load_state_dict(saved[callback.name]["batch_norm"])

    def _check(self, file: SideFile, state: dict[str, Any]) -> None:
        """Refuse a window that this run cannot take, and say which one could."""
        problem = ""
        if file.is_folder != sharded(trained_model(self.trainer)):
            was = "sharded" if file.is_folder else "whole in every process"
            problem = f"the model was {was} when it was saved, and is not now: keep the strategy"
        elif file.is_folder:
            ranks, now = state["ranks"], self.trainer.world_size
            if ranks is not None and ranks != now:
                problem = f"FSDP cut it up for {ranks} processes, and now there are {now}"
            for callback in self.callbacks:
                k = state["averages"].get(callback.name, {}).get("k")
                if k is not None and k < callback.averager.k:
                    problem = f"it was saved with k={k}, and shards go into no larger window"
        if problem:
            raise StateError(
                f"{file.path}: {problem}. Resume as it was, or remove it to begin a new window."
            )

    def _find(self, checkpoint: str, token: str) -> tuple[SideFile | None, dict[str, Any]]:
        """The window of one checkpoint among those that may be its own."""
        found = None
        for path in _places(checkpoint):
            file = SideFile(path)
            if file.exists():
                state = file.read()
                if state.get("token") == token:
                    return file, state
                found = path
        if found is not None:
            raise StateError(
                f"{found} is not the window of {checkpoint}: one of the two was replaced. Resume "
                "from another checkpoint, or remove the window to begin a new one."
            )
        return None, {}


def _places(checkpoint: str) -> Iterator[str]:
    """`last.ckpt` may be a link to another checkpoint, which has the window."""
    real = Path(checkpoint)
    names = [checkpoint]
    if real.is_symlink():
        names.insert(0, str(real.resolve()))
    for name in names:
        yield name + SUFFIX
        yield name + SUFFIX + PENDING
