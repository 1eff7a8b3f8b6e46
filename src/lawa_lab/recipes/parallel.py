"""How a recipe runs on several processes: alone, each with a copy (DDP), or in shards (FSDP2).

Each way says how the model is wrapped, when gradients are exchanged, how the whole weights are had
for a file, and how a checkpoint to resume from is written and read.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lawa_lab.recipes.optimizers import Lookahead
from lawa_lab.recipes.run_folder import RunFolder
from lawa_lab.recipes.task import Place
from torch_lawa.checkpoints.storage.atomic import publish, remove
from torch_lawa.errors import ConfigError, OutputError, StateError
from torch_lawa.ranks.barrier import barrier
from torch_lawa.selection import unwrap
from torch_lawa.shards import local

if TYPE_CHECKING:
    from torch.distributed.checkpoint.api import CheckpointException

    from lawa_lab.recipes.trainer import Trainer

__all__ = ["Alone", "Copies", "Parallel", "Shards", "choose_parallel"]

Parallel: TypeAlias = Literal["ddp", "fsdp"]


def choose_parallel(name: Parallel, place: Place) -> "Alone":
    """The way for this number of processes."""
    if name not in ("ddp", "fsdp"):
        raise ConfigError(f"parallel={name!r}: choose from ddp and fsdp.")
    if name == "fsdp":
        return Shards(place)
    return Copies(place) if place.world_size > 1 else Alone(place)


class Alone:
    """One process."""

    compiles = True  # on a GPU, unless told otherwise

    def __init__(self, place: Place) -> None:
        self.place = place

    def prepare(self, model: nn.Module) -> None:
        """Change the model in place, before it has an optimizer."""
        if self.place.device.type == "cuda":
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def trained(self, forward: nn.Module) -> nn.Module:
        """What training calls."""
        return forward

    def step_part(self, model: nn.Module, *, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Around a micro-batch: gradients are exchanged once a step, with the last one."""
        return contextlib.nullcontext()

    def settle(self, model: nn.Module) -> None:
        """Give all processes the buffers of the first, as evaluations are shared among them."""

    def whole(self, model: nn.Module) -> dict[str, Tensor]:
        """Whole weights for a file; called in every process, needed in the first."""
        return dict(model.state_dict())

    def save(self, trainer: "Trainer", folder: RunFolder) -> None:
        """Write a checkpoint; called in every process."""
        state = trainer.state_dict()
        if self.place.rank == 0:
            folder.save(state)

    def load(self, trainer: "Trainer", folder: RunFolder) -> bool:
        """Go on from the checkpoint, if there is one."""
        self._recover(folder)
        if folder.shards.exists():
            raise StateError(
                f"{folder.shards} was saved by a run in shards: resume it with --parallel fsdp."
            )
        state = folder.load()
        if state is None:
            self._begin(folder)
        else:
            trainer.load_state_dict(state)
        return state is not None

    def _recover(self, folder: RunFolder) -> None:
        """The first process puts right what a killed run left, before the others look."""
        if self.place.rank == 0:
            folder.recover()
        if self.place.world_size > 1:
            barrier("the beginning of the run")

    def _begin(self, folder: RunFolder) -> None:
        """Without a checkpoint the run writes anew what one that was killed has written."""
        if self.place.rank == 0:
            folder.cut_metrics(-1)
            folder.cut_trajectory(-1)


class Copies(Alone):
    """Every process has the whole model; gradients are averaged (DDP)."""

    def trained(self, forward: nn.Module) -> nn.Module:
        """Wrapped in DDP."""
        device = self.place.device
        return DistributedDataParallel(
            forward, device_ids=[device.index] if device.type == "cuda" else None
        )

    def step_part(self, model: nn.Module, *, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Gradients stay here until the last micro-batch."""
        assert isinstance(model, DistributedDataParallel)
        return contextlib.nullcontext() if last else model.no_sync()

    def settle(self, model: nn.Module) -> None:
        """From the first process: BatchNorm statistics are each process's own in training."""
        barrier("giving all processes the buffers of the first")
        for buffer in model.buffers():
            torch.distributed.broadcast(local(buffer), 0)


class Shards(Copies):
    """Every process has a part of every weight; they are gathered layer by layer (FSDP2)."""

    compiles = False  # layer by layer, each kind anew: a minute for a small residual net

    def prepare(self, model: nn.Module) -> None:
        """Shard the layers of every list of layers, then the rest.

        Weights keep their usual order in memory, the only one that FSDP2 takes.
        """
        from torch.distributed.fsdp import fully_shard

        for layer in list(_layers(model)):
            fully_shard(layer)
        fully_shard(model)

    def trained(self, forward: nn.Module) -> nn.Module:
        """The model itself."""
        return forward

    def step_part(self, model: nn.Module, *, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Gradients stay here until the last micro-batch."""
        inner: Any = unwrap(model)  # of torch.compile
        inner.set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    def whole(self, model: nn.Module) -> dict[str, Tensor]:
        """Gathered, one tensor after the other, into the first process's memory."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        barrier("gathering the weights")
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole: dict[str, Any] = get_model_state_dict(model, options=options)
        return whole

    def save(self, trainer: "Trainer", folder: RunFolder) -> None:
        """Every process writes its shards; the folder gets its name when all of them are there."""
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_saver import save

        self.settle(trainer.model)  # of what all have one copy is written, whoever's it is
        if self.place.rank == 0:
            remove(folder.unfinished)
        barrier("writing a checkpoint")
        state = self._state(trainer)
        try:
            save(state, checkpoint_id=folder.unfinished)
        except CheckpointException as error:
            raise OutputError(
                f"{folder.shards} cannot be written ({_failures(error)}); the one before it, if "
                "there is one, is as it was."
            ) from None
        barrier("a checkpoint that is written")
        if self.place.rank == 0:
            publish(folder.unfinished, folder.shards)
        barrier("a checkpoint in its place")

    def load(self, trainer: "Trainer", folder: RunFolder) -> bool:
        """From shards of any number of processes."""
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict import (
            set_model_state_dict,
            set_optimizer_state_dict,
        )
        from torch.distributed.checkpoint.state_dict_loader import load

        self._recover(folder)
        if folder.checkpoint.exists():
            raise StateError(
                f"{folder.checkpoint} was not saved by a run in shards: resume it without "
                "--parallel fsdp."
            )
        if not folder.shards.exists():
            self._begin(folder)
            return False
        state = self._state(trainer)
        try:
            load(state, checkpoint_id=folder.shards)
        except CheckpointException as error:
            raise StateError(
                f"{folder.shards} cannot be read ({_failures(error)}). Remove it to begin anew."
            ) from None
        set_model_state_dict(trainer.model, state["model"])
        set_optimizer_state_dict(
            trainer.model, _inner(trainer), optim_state_dict=state["optimizer"]
        )
        trainer.progress = state["progress"]
        if isinstance(trainer.optimizer, Lookahead):
            trainer.optimizer.load_slow(state["slow"].values(), trainer.step)
        return True

    def _state(self, trainer: "Trainer") -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import (
            get_model_state_dict,
            get_optimizer_state_dict,
        )

        trainer.averager.bind(trainer.model)  # its names, also before the first snapshot
        state: dict[str, Any] = {
            "model": get_model_state_dict(trainer.model),
            "optimizer": get_optimizer_state_dict(trainer.model, _inner(trainer)),
            "averager": trainer.averager,
            "progress": trainer.progress,
        }
        if isinstance(trainer.optimizer, Lookahead):
            slow = trainer.optimizer.slow
            state["slow"] = {str(place): tensor for place, tensor in enumerate(slow)}
        return state


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """Those of the outermost lists of layers; a list inside of a layer is part of it."""
    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            yield from (layer for layer in child if any(True for _ in layer.parameters()))
        else:
            yield from _layers(child)


def _failures(error: "CheckpointException") -> str:
    """What went wrong, rank by rank, without the tracebacks of all."""
    return "; ".join(f"rank {rank}: {failure}" for rank, (failure, _) in error.failures.items())


def _inner(trainer: "Trainer") -> torch.optim.Optimizer:
    optimizer = trainer.optimizer
    return optimizer.inner if isinstance(optimizer, Lookahead) else optimizer
