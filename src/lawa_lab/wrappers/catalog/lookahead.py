"""Lookahead: slow weights that follow the optimizer's fast ones."""

from dataclasses import dataclass
from typing import ClassVar

from lawa_lab.wrappers.base import WrappedRun
from lawa_lab.wrappers.outer_step import OuterStep
from lawa_lab.wrappers.registry import Wrapper, register_wrapper


@register_wrapper
@dataclass(frozen=True)
class Lookahead(Wrapper):
    """Every `k` steps slow += alpha * (fast - slow), and fast = slow (Zhang et al., 2019).

    The defaults are the paper's values for CIFAR-100.
    """

    name: ClassVar[str] = "lookahead"
    typed: ClassVar[str] = "lookahead[:K:ALPHA]"

    k: float = 5
    alpha: float = 0.8

    def __post_init__(self) -> None:
        valid = self.k >= 1 and self.k == int(self.k) and 0 < self.alpha <= 1
        self.require(valid, "lookahead:5:0.8")

    def build(self, run: WrappedRun) -> OuterStep:
        """The slow weights are the anchor of an outer step."""
        return OuterStep(run, period=int(self.k), rate=self.alpha)
