"""Greedy soups (Wortsman et al., 2022): checkpoints join a mean while validation improves."""

import math
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from lawa_lab.methods.fitting import FittingData
from lawa_lab.methods.ring import RingAverage
from torch_lawa.errors import ConfigError
from torch_lawa.offline.average import average_checkpoints

__all__ = ["GreedySoup", "greedy_members", "greedy_soup"]


def greedy_members(number: int, score: Callable[[Sequence[int]], float]) -> list[int]:
    """Which of the members 0 to `number` - 1 make up the greedy soup, in ascending order.

    `score` returns the loss of the mean of some members. Members are tried from the lowest loss of
    their own to the highest; one joins if the loss becomes lower. It takes 2 `number` - 1 scores.

    >>> points = [0.0, 5.0, 2.0, 11.0]
    >>> def loss(members):  # the distance of their mean from 3
    ...     return abs(sum(points[i] for i in members) / len(members) - 3)
    >>> greedy_members(4, loss)  # 2 first, then 5 is tried (3.5) and 0 and 11
    [1, 2]
    """
    alone = {member: score([member]) for member in range(number)}
    first, *others = sorted(alone, key=lambda m: (math.isnan(alone[m]), alone[m], -m))
    soup, best = [first], alone[first]
    for member in others:
        trial = sorted([*soup, member])
        if (loss := score(trial)) < best:
            soup, best = trial, loss
    return soup


class GreedySoup(RingAverage):
    """The greedy soup of the snapshots of a window, chosen by validation loss."""

    validates = True

    def chosen(self, data: FittingData, n: int) -> Sequence[float]:
        """1 for members, 0 for others."""

        def weights(members: Sequence[int]) -> list[float]:
            return [float(i in members) for i in range(n)]

        def score(members: Sequence[int]) -> float:
            with self.swapped(data.model, weights(members)):
                return data.validate()

        return weights(greedy_members(n, score))


def greedy_soup(
    checkpoints: Sequence[str | os.PathLike[str]],
    evaluate: Callable[[Path], float],
    output: str | os.PathLike[str],
) -> list[int]:
    """Write the greedy soup of checkpoint files, of one run or of several; returns its members.

    `evaluate` is given the file of a mean and returns its validation loss. Each mean is streamed
    from the files of its members, so memory is bounded.
    """
    if not checkpoints:
        raise ConfigError("greedy_soup: give the checkpoints to choose from.")

    def averaged(members: Sequence[int], to: Path) -> Path:
        average_checkpoints([checkpoints[member] for member in members], to)
        return to

    with tempfile.TemporaryDirectory() as scratch:

        def score(members: Sequence[int]) -> float:
            name = "-".join(map(str, members)) + Path(output).suffix
            return evaluate(averaged(members, Path(scratch) / name))

        members = greedy_members(len(checkpoints), score)
    averaged(members, Path(output))
    return members
