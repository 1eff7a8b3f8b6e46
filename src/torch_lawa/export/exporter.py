"""Running an export: every rank averages its part of a tensor, rank 0 writes the whole tensor."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from torch_lawa.errors import ConfigError, StateError
from torch_lawa.export.folder_writer import FolderWriter
from torch_lawa.export.plan import ExportPlan
from torch_lawa.export.together import Together
from torch_lawa.shards import Sharding
from torch_lawa.window import Window

__all__ = ["export_average", "gather_tensor"]

# Values are gathered as bits: every backend supports these dtypes, none supports all dtypes.
_BITS = {1: torch.uint8, 2: torch.bfloat16, 4: torch.int32, 8: torch.int64}


def export_average(
    window: Window,
    folder: str | os.PathLike[str],
    plan_it: Callable[[], ExportPlan],
    *,
    overwrite: bool,
) -> None:
    """Write what `plan_it` plans to `folder`. All ranks call it; if one fails, all raise.

    A rank needs memory for its window, for one whole tensor (twice while it is gathered) and for
    averaging its part of that tensor.
    """
    together = Together(per_process=window.per_process)
    with together.failing(), ExitStack() as stack:
        target = _local(folder)
        plan = plan_it()
        if together.size > 1 and not window.seen:
            raise StateError(
                "the averager was loaded and has not seen a model since, so it does not know how "
                "its tensors are sharded: pass the model, or call averager.bind(model) first."
            )
        together.check(plan.signature)
        writer = None
        if together.rank == 0:
            writer = stack.enter_context(FolderWriter(target, plan, overwrite=overwrite))
        means = window.one_by_one(plan.n, plan.weights)
        for tensor in (tensor for file in plan.files for tensor in file.tensors):
            sharding = window.shardings.get(tensor.name)
            if sharding is not None and _is_split(sharding):
                part = means.make(tensor.name, tensor.dtype, _device(sharding))
                together.check()  # no rank enters the collective unless all can
                with together.collective():
                    whole = gather_tensor(part, sharding)
                del part
            elif writer is not None:
                whole = means.make(tensor.name, tensor.dtype)
            else:
                continue
            if writer is not None:
                writer.write(tensor, whole)
            del whole  # before the next one is allocated
        if writer is not None:
            writer.finish()
        together.check()
        if writer is not None:
            writer.publish()
        together.check()


def gather_tensor(part: Tensor, sharding: Sharding) -> Tensor:
    """The whole tensor, on every rank of the mesh."""
    bits = sharding.whole(part.view(_BITS[part.dtype.itemsize]))
    whole: Tensor = bits.full_tensor()  # type: ignore[attr-defined]
    return whole.view(part.dtype)


def _is_split(sharding: Sharding) -> bool:
    dims = zip(sharding.placements, sharding.mesh.shape, strict=True)
    return any(size > 1 and not placement.is_replicate() for placement, size in dims)


def _device(sharding: Sharding) -> torch.device:
    """The device on which the mesh gathers; the snapshots may be in host memory."""
    kind = sharding.mesh.device_type
    if kind == "cpu":
        return torch.device(kind)
    return torch.device(kind, torch.get_device_module(kind).current_device())


def _local(folder: str | os.PathLike[str]) -> Path:
    if "://" in os.fspath(folder):
        raise ConfigError(
            f"{os.fspath(folder)!r}: exports are written to a local folder; give a path."
        )
    return Path(folder)
