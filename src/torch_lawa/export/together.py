"""Several processes that end one piece of work together: all succeed, or all raise."""

import contextlib
from collections.abc import Iterator

import torch

from torch_lawa.errors import LayoutError, OutputError
from torch_lawa.ranks.barrier import absence_explained, roll_call

__all__ = ["Together"]


class Together:
    """This process among those that export.

    A process that fails says so; the others hear of it when they next `check`. So whatever lies
    between two checks may fail in one process alone, and no collective may lie there.

    >>> together = Together(per_process=True)
    >>> with together.failing():
    ...     together.check()
    >>> together.rank
    0
    """

    def __init__(self, *, per_process: bool = False) -> None:
        dist = torch.distributed
        shared = not per_process and dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if shared else 0
        self.size = dist.get_world_size() if shared else 1
        self._told = False  # whether the others know how this ends, or cannot be told
        if shared:
            roll_call("averager.save_pretrained")

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """What fails in here fails everywhere."""
        try:
            yield
        except Exception as error:
            if not self._told:
                self._exchange(str(error) or repr(error), "")  # the others wait for an answer
            raise

    def check(self, note: str = "") -> None:
        """Go on if all can, and all have the same note; else all raise."""
        answers = self._exchange("", note)
        for rank, (problem, _) in enumerate(answers):
            if problem:
                self._told = True
                raise OutputError(f"rank {rank} failed, so nothing was written: {problem}")
        for rank, (_, theirs) in enumerate(answers):
            if theirs != answers[0][1]:
                self._told = True
                raise LayoutError(
                    f"rank {rank} has other tensors or snapshots to export than rank 0 "
                    f"({theirs}; there {answers[0][1]}). Every rank must hold its part of the same "
                    "tensors, of the same steps (parts of a pipeline have to be exported one by "
                    "one), and be asked for the same."
                )

    @contextlib.contextmanager
    def collective(self) -> Iterator[None]:
        """Work that all do at the same time: one that fails in it cannot be heard."""
        self._told = True
        with absence_explained():
            yield
        self._told = False

    def _exchange(self, problem: str, note: str) -> list[tuple[str, str]]:
        answers = [(problem, note)] * self.size
        if self.size > 1:
            with self.collective():
                torch.distributed.all_gather_object(answers, (problem, note))
        return answers
