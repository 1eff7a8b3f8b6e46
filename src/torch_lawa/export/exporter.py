"""Running an export: every rank averages its part of a tensor, rank 0 writes the whole tensor."""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from torch_lawa.errors import ConfigError, LayoutError, StateError
from torch_lawa.export.folder_writer import FolderWriter
from torch_lawa.export.plan import ExportPlan
from torch_lawa.ranks.agreement import FailTogether
from torch_lawa.ranks.barrier import barrier
from torch_lawa.window import Window

__all__ = ["export_average"]


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
    ranks = FailTogether(per_process=window.store.per_process)
    if ranks.size > 1:
        barrier("averager.save_pretrained")
    with ranks.failing(), ExitStack() as stack:
        target = _local(folder)
        plan = plan_it()
        if ranks.size > 1 and not window.seen:
            raise StateError(
                "the averager was loaded and has not seen a model since, so it does not know how "
                "its tensors are sharded: pass the model, or call averager.bind(model) first."
            )
        _check_same(ranks.exchange("the plan of an export", plan.signature))
        writer = None
        if ranks.rank == 0:
            writer = stack.enter_context(FolderWriter(target, plan, overwrite=overwrite))
        means = window.mean_by_tensor(plan.n, plan.weights)
        for tensor in (tensor for file in plan.files for tensor in file.tensors):
            sharding = window.shardings.get(tensor.name)
            if sharding is not None and sharding.is_split:
                part = means.make(tensor.name, tensor.dtype, sharding.device)
                where = f"the gathering of {tensor.name}"
                ranks.exchange(where)  # no rank starts to gather what another does not have
                with ranks.collective(where):
                    whole = sharding.gather(part)
                del part
            elif writer is not None:
                whole = means.make(tensor.name, tensor.dtype)
            else:
                continue
            if writer is not None:
                writer.write(tensor, whole)
            del whole  # before the next one is allocated
        window.store.check_read()
        if writer is not None:
            writer.finish()
        ranks.exchange("the end of writing")
        if writer is not None:
            writer.publish()
        ranks.exchange("the published export")


def _check_same(signatures: Sequence[str]) -> None:
    for rank, signature in enumerate(signatures):
        if signature != signatures[0]:
            raise LayoutError(
                f"rank {rank} has other tensors or snapshots to export than rank 0 ({signature}; "
                f"rank 0: {signatures[0]}). Every rank must hold its shards of the same tensors, "
                "of the same steps, and be asked for the same (export the stages of a pipeline one "
                "by one)."
            )


def _local(folder: str | os.PathLike[str]) -> Path:
    if "://" in os.fspath(folder):
        raise ConfigError(
            f"{os.fspath(folder)!r}: exports are written to a local folder; give a path."
        )
    return Path(folder)
