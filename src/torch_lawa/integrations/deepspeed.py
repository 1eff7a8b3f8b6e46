"""DeepSpeed: the averager works with an engine as with any model, for ZeRO stages 0 to 3.

```python
engine, *_ = deepspeed.initialize(model=model, config=config)
averager = LatestWeightAverager(k=6, schedule=Every(100))
...
engine.step()
averager.step(engine)
save_checkpoint(engine, averager, "run")  # instead of engine.save_checkpoint("run")
```

An engine trains float32 masters and rounds them to the weights that forward passes use. ZeRO cuts
the masters into flat runs, one per parameter and rank (`FlatShard`). Snapshots are taken of these
runs where they are; nothing is gathered. A swap writes the mean into the masters and lets DeepSpeed
round and distribute it, as after an optimizer step.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torch_lawa.errors import ConfigError
from torch_lawa.flat_shards import FlatShard, FlatSharding
from torch_lawa.masters import Masters
from torch_lawa.selection import live_tensors
from torch_lawa.shards import local
from torch_lawa.swap import ordinary_mode, refuse_if_swapped

if TYPE_CHECKING:
    from torch_lawa.averager import LatestWeightAverager

__all__ = ["load_checkpoint", "masters_of", "put_average", "save_checkpoint"]

_WINDOW = "averager"  # in the folder of a checkpoint
_MASTERS = "_lawa_masters"  # an attribute of engines


def save_checkpoint(
    engine: nn.Module,
    averager: "LatestWeightAverager",
    folder: str | os.PathLike[str],
    tag: str | None = None,
    **options: Any,
) -> None:
    """Like `engine.save_checkpoint(folder, tag, ...)`, with the window in the checkpoint.

    DeepSpeed has no hook for this: its `client_state` is saved by one rank, and every rank has its
    own part of the window. The window is complete before the file `latest` names the checkpoint, so
    that whenever the run is killed, the latest checkpoint has its window. Call it on every rank.
    """
    from torch_lawa.integrations.window_files import save_window

    refuse_if_swapped(engine, "save_checkpoint was called")
    made: Any = engine
    name = str(tag) if tag is not None else f"global_step{made.global_steps}"
    rank = made.local_rank if made.use_node_local_storage() else made.global_rank
    save_window(averager, engine, Path(folder) / name / _WINDOW, writes=rank == 0)
    made.save_checkpoint(os.fspath(folder), name, **options)


def load_checkpoint(
    engine: nn.Module,
    averager: "LatestWeightAverager",
    folder: str | os.PathLike[str],
    tag: str | None = None,
    *,
    window: str | os.PathLike[str] | None = None,
    **options: Any,
) -> tuple[str | None, Any]:
    """Like `engine.load_checkpoint(folder, tag, ...)`, with the window that was saved with it.

    The window may have been saved by another number of ranks, and with another stage of ZeRO.
    DeepSpeed's own checkpoint may not: convert it with `ds_to_universal`, load that folder, and
    give the folder of the original checkpoint as `window`, such as "run/global_step100". Without a
    window in the checkpoint the averager begins a new one. Call it on every rank.
    """
    from torch_lawa.integrations.window_files import load_window

    refuse_if_swapped(engine, "load_checkpoint was called")
    made: Any = engine
    path, client_state = made.load_checkpoint(os.fspath(folder), tag, **options)
    if path is None:
        return path, client_state
    held = Path(window) if window is not None else Path(path).parent
    if load_window(averager, engine, held / _WINDOW) is None:
        if window is not None:
            raise ConfigError(
                f"window={os.fspath(window)!r}: there is no window of an averager in this folder. "
                "Give the folder of a checkpoint that save_checkpoint of this module wrote."
            )
        averager.reset()
    return path, client_state


def put_average(engine: nn.Module, average: Mapping[str, Tensor]) -> None:
    """Make an average, as `averager.average()` returned it, the weights of an engine for good."""
    masters = masters_of(engine)
    with ordinary_mode():
        for name, tensor in live_tensors(engine).items():
            if name in average:
                tensor.copy_(local(average[name]))
        if masters is not None:
            masters.round_into_copies()


def masters_of(engine: nn.Module) -> Masters | None:
    """The masters of an engine; None if its parameters are what is trained (float32, no ZeRO)."""
    optimizer: Any = engine.optimizer
    kind = _KINDS.get(type(optimizer).__name__)
    if kind is None and not hasattr(optimizer, "optimizer"):
        _refuse(engine, optimizer)
        return None
    known: _EngineMasters | None = vars(engine).get(_MASTERS)
    if known is None or not known.valid(optimizer) or _offloaded(optimizer):
        _refuse(engine, optimizer)
        assert kind is not None  # else refused
        known = vars(engine)[_MASTERS] = kind(engine)
    return known


def _refuse(engine: Any, optimizer: Any) -> None:
    """Raise for an engine whose weights are elsewhere than this module knows."""
    problem = None
    if any(base.__name__ == "PipelineEngine" for base in type(engine).__mro__):
        problem = "a pipeline, each rank of which has other parameters"
    elif engine.has_moe_layers:
        problem = "experts (MoE), which each rank has others of"
    elif engine.mp_world_size > 1 or engine.autotp_size() > 1:
        problem = "tensor parallelism"
    elif any(
        str(getattr(offload.device, "value", offload.device)) == "nvme"
        for offload in (engine.zero_offload_optimizer(), engine.zero_offload_param())
        if offload is not None
    ):
        problem = "offload to NVMe"
    elif _offloaded(optimizer):
        raise ConfigError(
            "the states of this DeepSpeed engine are offloaded: call engine.reload_states() first."
        )
    elif hasattr(optimizer, "optimizer") and type(optimizer).__name__ not in _KINDS:
        problem = f"the optimizer {type(optimizer).__name__}"
    elif any(hasattr(p, "ds_id") for p in engine.parameters()) and not hasattr(
        optimizer, "fp32_partitioned_groups_flat"
    ):
        problem = "ZeRO-3 without an optimizer"
    if problem is not None:
        raise ConfigError(
            f"this DeepSpeed engine has {problem}, which online averaging does not support: "
            "average the checkpoints of the run instead (`lawa average`)."
        )


def _offloaded(optimizer: Any) -> bool:
    """Whether `engine.offload_states` has moved something away."""
    return bool(getattr(optimizer, "offloaded_states", None))


class _EngineMasters(Masters, ABC):
    """Finds the masters of an engine's parameters once, until they move."""

    def __init__(self, engine: nn.Module) -> None:
        found: Any = engine
        self._optimizer: Any = found.optimizer
        self._device_type: str = found.device.type
        self._module: nn.Module = found.module
        with torch.no_grad():
            self._masters = self._find_all()
        self._places = self._where()

    def valid(self, optimizer: object) -> bool:
        """Whether everything is still where it was."""
        return optimizer is self._optimizer and self._where() == self._places

    def of(self, tensor: Tensor) -> Tensor:
        """The master of a parameter; any other tensor itself."""
        return self._masters.get(id(tensor), tensor)

    def _where(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._memory()]

    @abstractmethod
    def _memory(self) -> Iterator[Tensor]:
        """The tensors that hold all masters."""

    @abstractmethod
    def _find_all(self) -> dict[int, Tensor]:
        """The masters by the ids of the parameters."""

    def _shard(self, run: Tensor, shape: torch.Size, start: int, group: Any) -> FlatShard:
        values = run.detach().view(-1)
        return FlatShard(
            values, FlatSharding(shape, start, values.numel(), group, self._device_type)
        )


class _Zero12(_EngineMasters):
    """ZeRO 1 and 2: each group of parameters is one flat tensor, of which a rank has one part."""

    # Attributes of the optimizer, which has a list with one entry per group in each.
    _masters_at = "single_partition_of_fp32_groups"  # this rank's part
    _copies_at = "parallel_partitioned_bit16_groups"  # the parts of all ranks
    _flat_at = "bit16_groups_flat"  # those parts in one tensor

    def _memory(self) -> Iterator[Tensor]:
        yield from getattr(self._optimizer, self._masters_at)

    def _find_all(self) -> dict[int, Tensor]:
        found = (p for p in self._module.parameters() if hasattr(p, "_hp_mapping"))
        return {id(p): self._find(p) for p in found}  # others are frozen, or not optimized

    def _find(self, parameter: Any) -> Tensor:
        groups, found_in = getattr(self._optimizer, self._masters_at), parameter._hp_mapping
        if found_in is None:  # other ranks hold all of it
            return self._shard(groups[0][:0], parameter.shape, 0, parameter._dp_group)
        at = found_in.hp_fragment_address
        run = groups[found_in.param_group_index][at.start : at.start + at.numel]
        start = found_in.lp_fragment_address.start
        return self._shard(run, parameter.shape, start, parameter._dp_group)

    def working_copies(self) -> Sequence[Tensor]:
        """This rank's part of each group's low-precision weights."""
        ranks = map(torch.distributed.get_rank, self._optimizer.real_dp_process_group)
        parts = getattr(self._optimizer, self._copies_at)
        return [group[rank] for group, rank in zip(parts, ranks, strict=True)]

    def round_into_copies(self) -> None:
        """As DeepSpeed does after a step."""
        self._optimizer.update_lp_params()

    def share_copies(self) -> None:
        """The second half of what DeepSpeed does after a step."""
        from deepspeed.runtime.utils import all_gather_dp_groups

        all_gather_dp_groups(
            groups_flat=getattr(self._optimizer, self._flat_at),
            partitioned_param_groups=getattr(self._optimizer, self._copies_at),
            dp_process_group=self._optimizer.real_dp_process_group,
            start_alignment_factor=self._optimizer.nccl_start_alignment_factor,
            allgather_bucket_size=self._optimizer.allgather_bucket_size,
        )


class _Bf16(_Zero12):
    """The optimizer for bfloat16 with float32 gradients: ZeRO 1 under other names."""

    _masters_at = "fp32_groups_flat_partition"
    _copies_at = "bf16_partitioned_groups"
    _flat_at = "bf16_groups_flat"


class _Zero3(_EngineMasters):
    """ZeRO 3: each parameter is cut into equal runs, the last of which is padded."""

    def _memory(self) -> Iterator[Tensor]:
        yield from self._optimizer.fp32_partitioned_groups_flat
        yield from (p.ds_tensor for p in self._module.parameters() if not p.requires_grad)  # type: ignore[attr-defined]

    def _find_all(self) -> dict[int, Tensor]:
        return {id(p): self._find(p) for p in self._module.parameters()}

    def _find(self, parameter: Any) -> Tensor:
        position = self._optimizer.grad_position.get(self._optimizer.get_param_id(parameter))
        if position is None:  # frozen: the 16-bit run is all there is
            run = parameter.ds_tensor.view(-1)
        else:
            group, offset, numel = position
            run = self._optimizer.fp32_partitioned_groups_flat[group][offset : offset + numel]
        rank = torch.distributed.get_rank(parameter.ds_process_group)
        start = min(rank * run.numel(), parameter.ds_numel)
        run = run[: parameter.ds_numel - start]  # without the padding
        return self._shard(run, parameter.ds_shape, start, parameter.ds_process_group)

    def working_copies(self) -> Sequence[Tensor]:
        """The 16-bit runs of this rank."""
        found: list[Tensor] = self._optimizer.fp16_partitioned_groups_flat
        return found

    def round_into_copies(self) -> None:
        """As DeepSpeed does in a step: first free what is gathered, then gather what stays so."""
        self._optimizer.checkpoint_event_prologue()
        for group in range(len(self._optimizer.fp16_groups)):
            self._optimizer._reassign_or_swap_out_partitioned_parameters(group)
        self._optimizer.checkpoint_event_epilogue()

    def share_copies(self) -> None:
        """Free what is gathered; gather the small parameters that stay so."""
        self._optimizer.checkpoint_event_prologue()
        self._optimizer.checkpoint_event_epilogue()


class _Replicated(_EngineMasters):
    """16-bit training without ZeRO: every rank has all masters."""

    def _memory(self) -> Iterator[Tensor]:
        for _, master in self._pairs():
            yield master

    def _find_all(self) -> dict[int, Tensor]:
        return {id(copy): master for copy, master in self._pairs()}

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        groups = self._optimizer.fp16_groups
        if hasattr(self._optimizer, "fp32_groups"):
            masters = self._optimizer.fp32_groups
        else:
            flats = (flat.detach() for flat in self._optimizer.fp32_groups_flat)
            unflatten: Any = torch._utils._unflatten_dense_tensors
            masters = [unflatten(f, group) for f, group in zip(flats, groups, strict=True)]
        for copies, own in zip(groups, masters, strict=True):
            yield from zip(copies, own, strict=True)

    def working_copies(self) -> Sequence[Tensor]:
        """The parameters."""
        return [copy for copy, _ in self._pairs()]

    def round_into_copies(self) -> None:
        """Round every master."""
        for copy, master in self._pairs():
            copy.copy_(master)

    def share_copies(self) -> None:
        """Every rank has its own."""


# By the class of the engine's optimizer.
_KINDS: dict[str, Any] = {
    "DeepSpeedZeroOptimizer": _Zero12,
    "BF16_Optimizer": _Bf16,
    "DeepSpeedZeroOptimizer_Stage3": _Zero3,
    "FP16_Optimizer": _Replicated,
    "FP16_UnfusedOptimizer": _Replicated,
}
