"""How a run is spread over processes: one process, copies of the model (DDP), or shards (FSDP2).

Each strategy says how the model is wrapped, when gradients are synchronised, how whole weights are
gathered for a file, and how the state of a run is written to and read from its folder.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lawa_lab.recipes.run_folder import RunFolder
from lawa_lab.recipes.task import Worker
from torch_lawa.averager import LatestWeightAverager
from torch_lawa.checkpoints.storage.atomic import publish, remove
from torch_lawa.errors import ConfigError, OutputError, StateError
from torch_lawa.selection import unwrap
from torch_lawa.shards import local

if TYPE_CHECKING:
    from torch.distributed.checkpoint.api import CheckpointException

__all__ = ["Copies", "ParallelName", "Shards", "State", "choose_parallel"]

ParallelName: TypeAlias = Literal["ddp", "fsdp"]
State: TypeAlias = dict[str, Any]


def choose_parallel(name: ParallelName, worker: Worker) -> "SingleProcess":
    """The strategy for this number of processes."""
    if name not in ("ddp", "fsdp"):
        raise ConfigError(f"parallel={name!r}: choose from ddp and fsdp.")
    if name == "fsdp":
        return Shards(worker)
    return Copies(worker) if worker.world_size > 1 else SingleProcess(worker)


class SingleProcess:
    """One process."""

    compiles = True  # by default on a GPU

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def prepare(self, model: nn.Module) -> None:
        """Change the model in place, before it has an optimizer."""
        if self.worker.device.type == "cuda":
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def trained(self, forward: nn.Module) -> nn.Module:
        """The module that training calls."""
        return forward

    def micro_batch(
        self, model: nn.Module, *, last: bool
    ) -> contextlib.AbstractContextManager[Any]:
        """Around a micro-batch: gradients are synchronised once per step, with the last one."""
        return contextlib.nullcontext()

    def synchronize_buffers(self, model: nn.Module) -> None:
        """Broadcast the buffers of rank 0: evaluations are split over the ranks."""

    def whole(self, model: nn.Module) -> dict[str, Tensor]:
        """Whole weights for a file; called on every rank, complete on rank 0."""
        return dict(model.state_dict())

    def state_of(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        parts: Mapping[str, Any],
        progress: Mapping[str, Any],
    ) -> State:
        """Everything that the rest of the run depends on, in the form that `save` writes."""
        return {
            **progress,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            **{name: part.state_dict() for name, part in parts.items()},
        }

    def restore(
        self,
        state: State,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        parts: Mapping[str, Any],
    ) -> Mapping[str, Any]:
        """Put a loaded state back into its objects; returns the progress."""
        try:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            for name, part in parts.items():
                part.load_state_dict(state[name])
        except (KeyError, RuntimeError) as error:
            raise StateError(f"the checkpoint does not match this run: {error}") from None
        return state

    def save(self, state: State, folder: RunFolder) -> None:
        """Write a checkpoint; called on every rank."""
        if self.worker.rank == 0:
            folder.save(state)

    def load(self, folder: RunFolder, current: Callable[[], State]) -> State | None:
        """The checkpoint in the folder, or None; `current` returns the state before loading."""
        if folder.shards.exists():
            raise StateError(
                f"{folder.shards} was saved by a sharded run: resume it with --parallel fsdp."
            )
        return folder.load()


class Copies(SingleProcess):
    """Every rank has the whole model; gradients are averaged (DDP)."""

    def trained(self, forward: nn.Module) -> nn.Module:
        """Wrapped in DDP."""
        device = self.worker.device
        return DistributedDataParallel(
            forward, device_ids=[device.index] if device.type == "cuda" else None
        )

    def micro_batch(
        self, model: nn.Module, *, last: bool
    ) -> contextlib.AbstractContextManager[Any]:
        """Gradients are accumulated locally until the last micro-batch."""
        assert isinstance(model, DistributedDataParallel)
        return contextlib.nullcontext() if last else model.no_sync()

    def synchronize_buffers(self, model: nn.Module) -> None:
        """Broadcast from rank 0: in training, each rank has its own BatchNorm statistics."""
        self.worker.barrier("broadcasting the buffers of rank 0")
        for buffer in model.buffers():
            torch.distributed.broadcast(local(buffer), 0)


class Shards(Copies):
    """Every rank has a shard of every weight; layers are gathered one at a time (FSDP2)."""

    compiles = False  # each kind of layer is compiled separately: a minute for a small ResNet

    def prepare(self, model: nn.Module) -> None:
        """Shard the layers of every list of layers, then the rest.

        Weights keep the default memory format, the only one that FSDP2 supports.
        """
        from torch.distributed.fsdp import fully_shard

        for layer in list(_layers(model)):
            fully_shard(layer)
        fully_shard(model)

    def trained(self, forward: nn.Module) -> nn.Module:
        """The model itself."""
        return forward

    def micro_batch(
        self, model: nn.Module, *, last: bool
    ) -> contextlib.AbstractContextManager[Any]:
        """Gradients are accumulated locally until the last micro-batch."""
        inner: Any = unwrap(model)  # of torch.compile
        inner.set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    def whole(self, model: nn.Module) -> dict[str, Tensor]:
        """Gathered one tensor at a time into the memory of rank 0."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        self.worker.barrier("gathering the weights")
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole: dict[str, Any] = get_model_state_dict(model, options=options)
        return whole

    def state_of(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        parts: Mapping[str, Any],
        progress: Mapping[str, Any],
    ) -> State:
        """State dicts of shards; `torch.distributed.checkpoint` reads those of the parts."""
        from torch.distributed.checkpoint.state_dict import (
            get_model_state_dict,
            get_optimizer_state_dict,
        )

        self.synchronize_buffers(model)  # one copy is written, by whichever rank
        for part in parts.values():
            if isinstance(part, LatestWeightAverager):
                part.bind(model)  # the names must be known before the first snapshot
        return {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer),
            **parts,
            "progress": dict(progress),
        }

    def restore(
        self,
        state: State,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        parts: Mapping[str, Any],
    ) -> Mapping[str, Any]:
        """The parts were restored in place by `load`."""
        from torch.distributed.checkpoint.state_dict import (
            set_model_state_dict,
            set_optimizer_state_dict,
        )

        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, optim_state_dict=state["optimizer"])
        progress: Mapping[str, Any] = state["progress"]
        return progress

    def save(self, state: State, folder: RunFolder) -> None:
        """Every rank writes its shards; the folder is renamed when all of them are written."""
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_saver import save

        if self.worker.rank == 0:
            remove(folder.unfinished)
        self.worker.barrier("writing a checkpoint")
        try:
            save(state, checkpoint_id=folder.unfinished)
        except CheckpointException as error:
            raise OutputError(
                f"{folder.shards} cannot be written ({_failures(error)}); the previous checkpoint, "
                "if there is one, is unchanged."
            ) from None
        self.worker.barrier("the end of writing a checkpoint")
        if self.worker.rank == 0:
            publish(folder.unfinished, folder.shards)
        self.worker.barrier("renaming a checkpoint")

    def load(self, folder: RunFolder, current: Callable[[], State]) -> State | None:
        """From the shards of any number of ranks, into the tensors of the current state."""
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_loader import load

        if folder.checkpoint.exists():
            raise StateError(
                f"{folder.checkpoint} was not saved by a sharded run: resume it without "
                "--parallel fsdp."
            )
        if not folder.shards.exists():
            return None
        state = current()
        try:
            load(state, checkpoint_id=folder.shards)
        except CheckpointException as error:
            raise StateError(
                f"{folder.shards} cannot be read ({_failures(error)}). Remove it to start over."
            ) from None
        return state


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """The layers of the outermost lists of layers; a list inside a layer is part of that layer."""
    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            yield from (layer for layer in child if any(True for _ in layer.parameters()))
        else:
            yield from _layers(child)


def _failures(error: "CheckpointException") -> str:
    """What failed on each rank, without the tracebacks."""
    return "; ".join(f"rank {rank}: {failure}" for rank, (failure, _) in error.failures.items())
