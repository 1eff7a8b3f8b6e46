"""The work of an export: every rank makes its part of a tensor, rank 0 writes the whole of it."""

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

# Values are gathered as bits: no backend knows all dtypes, and all of them know these.
_BITS = {1: torch.uint8, 2: torch.bfloat16, 4: torch.int32, 8: torch.int64}


def export_average(
    window: Window,
    folder: str | os.PathLike[str],
    plan_it: Callable[[], ExportPlan],
    *,
    overwrite: bool,
) -> None:
    """Write what `plan_it` plans to `folder`. All ranks call it; if one fails, all raise.

    A rank holds no more than its window, one tensor whole (twice while it is gathered) and what
    the mean of its part of that tensor takes.
    """
    together = Together(per_process=window.per_process)
    with together.failing(), ExitStack() as stack:
        target = _local(folder)
        plan = plan_it()
        if together.size > 1 and not window.seen:
            raise StateError(
                "the averager was loaded and has seen no model since, so it cannot tell what its "
                "tensors are parts of: pass the model, or call averager.bind(model) first."
            )
        together.check(plan.signature)
        writer = None
        if together.rank == 0:
            writer = stack.enter_context(FolderWriter(target, plan, overwrite=overwrite))
        means = window.mean_by_tensor(plan.n, plan.weights)
        for tensor in (tensor for file in plan.files for tensor in file.tensors):
            sharding = window.shardings.get(tensor.name)
            if sharding is not None and _is_split(sharding):
                part = means.make(tensor.name, tensor.dtype, _device(sharding))
                together.check()  # nobody begins to gather_tensor what another cannot give
                with together.collective():
                    whole = gather_tensor(part, sharding)
                del part
            elif writer is not None:
                whole = means.make(tensor.name, tensor.dtype)
            else:
                continue
            if writer is not None:
                writer.write(tensor, whole)
            del whole  # not two at a time
        if writer is not None:
            writer.finish()
        together.check()
        if writer is not None:
            writer.publish()
        together.check()


def gather_tensor(part: Tensor, sharding: Sharding) -> Tensor:
    """The whole tensor, on every process of the mesh."""
    bits = sharding.whole(part.view(_BITS[part.dtype.itemsize]))
    whole: Tensor = bits.full_tensor()  # type: ignore[attr-defined]
    return whole.view(part.dtype)


def _is_split(sharding: Sharding) -> bool:
    dims = zip(sharding.placements, sharding.mesh.shape, strict=True)
    return any(size > 1 and not placement.is_replicate() for placement, size in dims)


def _device(sharding: Sharding) -> torch.device:
    """Where the mesh gathers; the snapshots may lie in host memory."""
    kind = sharding.mesh.device_type
    if kind == "cpu":
        return torch.device(kind)
    return torch.device(kind, torch.get_device_module(kind).current_device())


def _local(folder: str | os.PathLike[str]) -> Path:
    if "://" in os.fspath(folder):
        raise ConfigError(f"{os.fspath(folder)!r}: an export is written to a local folder.")
    return Path(folder)
