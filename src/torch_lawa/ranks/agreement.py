"""Processes that hold parts of one model take snapshots together, or learn at once who does not.

A snapshot itself asks nobody. Before the first one all see that they do the same, with the same
schedule; where a loss decides, they compare their answers every time.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from torch_lawa.errors import ConfigError
from torch_lawa.ranks.barrier import roll_call
from torch_lawa.shards import is_sharded, reshard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["agree", "meet"]


def meet(model: nn.Module | Mapping[str, Tensor], where: str) -> None:
    """Wait for the processes among which tensors are cut; an error names those elsewhere.

    Copies of the same part (as between the nodes of hybrid sharding) are not asked: one set of
    them may be averaged and the other not.
    """
    for group in _groups(model, copies=False):
        roll_call(where, group)


def agree(model: nn.Module | Mapping[str, Tensor], due: bool, call: int) -> None:
    """Refuse a snapshot that only some processes of a sharded model would take."""
    for group in _groups(model, copies=True):
        roll_call(f"averager.step, call {call}", group)
        ranks = torch.distributed.get_process_group_ranks(group)
        answers: list[bool] = [due] * len(ranks)
        torch.distributed.all_gather_object(answers, due, group)
        if len(set(answers)) > 1:
            taking = ", ".join(str(r) for r, answer in zip(ranks, answers, strict=True) if answer)
            raise ConfigError(
                f"at call {call} of averager.step the schedule takes a snapshot on some ranks only "
                f"(rank {taking} of {len(ranks)}), and their shards would be of different moments: "
                "pass the same loss on every rank (all-reduce it)."
            )


def _groups(model: nn.Module | Mapping[str, Tensor], *, copies: bool) -> "list[ProcessGroup]":
    """The groups of more than one process that share a model, in one order in all of them."""
    found: dict[str, ProcessGroup] = {}
    if not isinstance(model, nn.Module | Mapping):
        return []  # refused when a snapshot is taken of it
    if isinstance(model, nn.Module):
        reshard(model)  # after a forward pass without a backward one, parameters may be gathered
    for tensor in model.parameters() if isinstance(model, nn.Module) else model.values():
        if not is_sharded(tensor):
            continue
        mesh = tensor.device_mesh  # type: ignore[attr-defined]
        for dim, placement in enumerate(tensor.placements):  # type: ignore[attr-defined]
            if mesh.size(dim) > 1 and (copies or not placement.is_replicate()):
                group = mesh.get_group(dim)
                found[group.group_name] = group
    return list(found.values())
