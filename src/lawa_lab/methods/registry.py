"""The table of comparison methods, from which `--methods`, its help and rows follow.

A method is one file in `lawa_lab/methods/catalog`: a frozen dataclass whose fields are the method's
parameters, with a `build` that returns an `Averager`, decorated with `register_method`. It is typed
as its name and its parameters, separated by colons: `ema:0.999`. A method that only weights the
snapshots of the run's own window is a `RingMethod`, which keeps no snapshots itself. An averager
that has a `fit` is given training and validation data before each evaluation: see `fitting.py`.
"""

import abc
import dataclasses
from typing import TYPE_CHECKING, TypeVar

from lawa_lab.registry import Registry, Typed, parse_typed
from torch_lawa.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from torch_lawa.averager import LatestWeightAverager
    from torch_lawa.averager_protocol import Averager

__all__ = ["METHODS", "Method", "RingMethod", "parse_method", "register_method"]


@dataclasses.dataclass(frozen=True)
class Method(Typed, abc.ABC):
    """One averaging method and its parameters; every field is a number."""

    @abc.abstractmethod
    def build(self, model: "nn.Module") -> "Averager":
        """The averager of a model; `step` is called after every optimizer step.

        Its `kind` is `str(self)`. Import torch inside this method.
        """


@dataclasses.dataclass(frozen=True)
class RingMethod(Method):
    """A method that reads a window which is there already, and so costs no memory of its own."""

    def build(self, model: "nn.Module") -> "Averager":
        """Not possible: the window of the run is needed."""
        raise ConfigError(f"{self} reads the snapshots of a window: use read(averager)")

    @abc.abstractmethod
    def read(self, ring: "LatestWeightAverager") -> "Averager":
        """The averager that reads this window; it must not collect. Import torch inside."""


METHODS: Registry[type[Method]] = Registry("method", "lawa_lab.methods.catalog")

AnyMethod = TypeVar("AnyMethod", bound=Method)


def register_method(method: type[AnyMethod]) -> type[AnyMethod]:
    """Register a method under its `name`; used as a class decorator."""
    METHODS.add(method.name, method)
    return method


def parse_method(text: str) -> Method:
    """A method from its name and parameters.

    >>> parse_method("ema:0.999")
    Ema(decay=0.999)
    """
    return parse_typed(METHODS, text)
