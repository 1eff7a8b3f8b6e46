"""Ranks that agree: they exchange values, take the same decisions, and succeed or fail together."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torch_lawa.errors import ConfigError, OutputError, RankError
from torch_lawa.masters import weights_of
from torch_lawa.ranks.barrier import barrier, explain_missing_ranks
from torch_lawa.shards import reshard, sharding_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "FailTogether",
    "all_gather",
    "all_true",
    "check_same_call",
    "check_same_choice",
    "check_same_decision",
    "rank_and_size",
]


def rank_and_size(group: "ProcessGroup | None" = None) -> tuple[int, int]:
    """The rank of this process in a group (by default, of all), and its size; else 0 of 1."""
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def all_gather(where: str, value: Any, group: "ProcessGroup | None" = None) -> list[Any]:
    """The values of all ranks of a group, by rank; an error names a rank that is missing."""
    barrier(where, group)
    values = [value] * torch.distributed.get_world_size(group)
    with explain_missing_ranks(where):
        torch.distributed.all_gather_object(values, value, group)
    return values


# A snapshot needs no communication. Before the first one all ranks that hold a part of the model
# check that they make the same call, with the same schedule; where a loss decides whether a
# snapshot is due, they compare their decisions every time.


def check_same_call(model: nn.Module | Mapping[str, Tensor], where: str) -> None:
    """Wait for the ranks that hold the other shards of a model; an error names those elsewhere.

    Ranks that hold copies of the same shard (as between the nodes of hybrid sharding) are not
    asked: one set of copies may be averaged and the other not.
    """
    for group in _groups(model, copies=False):
        barrier(where, group)


def check_same_decision(model: nn.Module | Mapping[str, Tensor], due: bool, call: int) -> None:
    """Refuse a snapshot that only some ranks of a sharded model would take."""
    for group in _groups(model, copies=True):
        decisions = all_gather(f"averager.step, call {call}", due, group)
        if len(set(decisions)) > 1:
            ranks = torch.distributed.get_process_group_ranks(group)
            due_on = ", ".join(str(r) for r, yes in zip(ranks, decisions, strict=True) if yes)
            raise ConfigError(
                f"at call {call} of averager.step the schedule takes a snapshot on some ranks only "
                f"(rank {due_on} of {len(ranks)}), so their shards would be of different steps: "
                "pass the same loss on every rank (all-reduce it)."
            )


def check_same_choice(model: nn.Module, k: int, group: "ProcessGroup | None") -> None:
    """Refuse a window that only some ranks chose, of a sharded model or of the group's ranks."""
    for each in _sharing(model, group):
        ks = all_gather("choosing a window", k, each)
        if len(set(ks)) > 1:
            raise ConfigError(
                f"the ranks chose different windows (k = {', '.join(map(str, ks))}), so they would "
                "serve different weights: evaluate to the same value on every rank (all-reduce it)."
            )


def all_true(where: str, model: nn.Module, yes: bool, group: "ProcessGroup | None") -> bool:
    """Whether it is true on all ranks that share a model, or that are in the group."""
    for each in _sharing(model, group):
        yes = all(all_gather(where, yes, each))
    return yes


def _sharing(model: nn.Module, group: "ProcessGroup | None") -> "list[ProcessGroup]":
    groups = _groups(model, copies=True)
    if group is not None and torch.distributed.get_world_size(group) > 1:
        groups.append(group)
    return groups


def _groups(model: nn.Module | Mapping[str, Tensor], *, copies: bool) -> "list[ProcessGroup]":
    """The groups of several ranks that share a model, in the same order on all of them."""
    found: dict[str, ProcessGroup] = {}
    if not isinstance(model, nn.Module | Mapping):
        return []  # refused when a snapshot is taken of it
    if isinstance(model, nn.Module):
        reshard(model)  # after a forward pass without a backward pass parameters may be gathered
    for tensor in weights_of(model) if isinstance(model, nn.Module) else model.values():
        if (sharding := sharding_of(tensor)) is not None:
            for group in sharding.groups(copies=copies):
                found[group.group_name] = group
    return list(found.values())


class FailTogether:
    """The ranks of the default process group: they all complete a piece of work, or all raise.

    A rank that fails inside `failing` reports it; the others raise at their next `exchange`. So
    between two exchanges a rank may fail by itself, and only `collective` may hold a collective.
    Without a process group, or with `per_process`, there is one rank.

    >>> ranks = FailTogether(per_process=True)
    >>> with ranks.failing():
    ...     ranks.exchange("the start", 42)
    [42]
    """

    def __init__(self, *, per_process: bool = False) -> None:
        self.rank, self.size = (0, 1) if per_process else rank_and_size()
        self._settled = False  # whether the other ranks know how this ends, or can no longer learn

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """An exception in this block is raised on all ranks."""
        try:
            yield
        except Exception as error:
            if not self._settled:
                reason = " ".join(str(error).split()) or repr(error)
                own = f"rank {self.rank} failed, so nothing was written: {reason}"
                first = self._report(own)
                with contextlib.suppress(RankError):  # this error says more
                    self._exchange("", first, None)
                self._settled = True
                if first != own:
                    raise OutputError(first) from None
            raise

    def exchange(self, where: str, value: Any = None) -> list[Any]:
        """The values of all ranks, by rank; raises if one of them has failed."""
        answers = self._exchange(where, self._reported(), value)
        for problem, _ in answers:
            if problem:
                self._settled = True
                raise OutputError(problem)
        return [value for _, value in answers]

    @contextlib.contextmanager
    def collective(self, where: str) -> Iterator[None]:
        """Communication of all ranks at once: a rank that fails inside cannot report it."""
        self._settled = True
        with explain_missing_ranks(where):
            yield
        self._settled = False

    def _exchange(self, where: str, problem: str, value: Any) -> list[Any]:
        self._settled = True
        answers = self._all_gather(where, (problem, value))
        self._settled = False
        return answers

    def _all_gather(self, where: str, value: Any) -> list[Any]:
        """Without a barrier: this is called for every tensor of an export."""
        values = [value] * self.size
        if self.size > 1:
            with explain_missing_ranks(where or "an error"):
                torch.distributed.all_gather_object(values, value)
        return values

    def _report(self, problem: str) -> str:
        """Announce a failure; returns `problem`, or that of a rank that made this one stop."""
        return problem

    def _reported(self) -> str:
        """The failure that a rank has announced since the last exchange, if any."""
        return ""
