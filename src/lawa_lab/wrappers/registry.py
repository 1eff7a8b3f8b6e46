"""The table of wrappers, from which `--wrap`, its help and the names of runs follow.

A wrapper is one file in `lawa_lab/wrappers/catalog`: a frozen dataclass whose fields are its
settings, with a `build` that returns a `BuiltWrapper`, decorated with `register_wrapper`. It is
typed as its name and its settings, separated by colons: `lookahead:5:0.8`.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, TypeVar

from lawa_lab.registry import Registry, Typed, parse_typed
from torch_lawa.errors import ConfigError

if TYPE_CHECKING:
    from lawa_lab.wrappers.base import BuiltWrapper, WrappedRun

__all__ = [
    "WRAPPERS",
    "Wrapper",
    "name_wrapped",
    "parse_wrappers",
    "register_wrapper",
]


@dataclasses.dataclass(frozen=True)
class Wrapper(Typed, abc.ABC):
    """A method that changes training, and its settings; every field is a number."""

    gradients: ClassVar[int] = 1  # per step: the cost of a run, in epochs of gradients
    moves_weights: ClassVar[bool] = True  # other than by the optimizer's step
    rivals: ClassVar[bool] = True  # whether it is one of those of which a run has at most one

    def __str__(self) -> str:
        """As it is typed; without the settings if all of them are the defaults."""
        fields = dataclasses.fields(self)
        usual = all(getattr(self, item.name) == item.default for item in fields)
        return self.name if usual else super().__str__()

    @abc.abstractmethod
    def build(self, run: "WrappedRun") -> "BuiltWrapper":
        """The wrapper of a run, before its first step."""


WRAPPERS: Registry[type[Wrapper]] = Registry("wrapper", "lawa_lab.wrappers.catalog")

AnyWrapper = TypeVar("AnyWrapper", bound=Wrapper)


def register_wrapper(wrapper: type[AnyWrapper]) -> type[AnyWrapper]:
    """Register a wrapper under its `name`; used as a class decorator."""
    WRAPPERS.add(wrapper.name, wrapper)
    return wrapper


def parse_wrappers(texts: Sequence[str], optimizer: str) -> list[Wrapper]:
    """The wrappers of an optimizer, innermost first.

    >>> parse_wrappers(["sam:0.1", "lookahead"], "sgd")
    [Sam(rho=0.1), Lookahead(k=5, alpha=0.8)]
    """
    found = [parse_typed(WRAPPERS, text) for text in texts]
    names = [wrapper.name for wrapper in found]
    if len(set(names)) != len(names):
        raise ConfigError(f"wrap={','.join(texts)}: name each wrapper once")
    rivals = [wrapper.name for wrapper in found if wrapper.rivals]
    if len(rivals) > 1:
        raise ConfigError(
            f"wrap={','.join(texts)}: {' and '.join(rivals)} would both move the weights, each "
            "unaware of the other. Use one of them; sam and rescue go with any."
        )
    moving = [wrapper.name for wrapper in found if wrapper.moves_weights]
    if moving and optimizer.startswith("schedule-free"):
        raise ConfigError(
            f"wrap={','.join(texts)}: {moving[0]} moves the weights, and optimizer={optimizer} "
            "computes them from two sequences of its own. Use sgd, adam or adamw."
        )
    return found


def name_wrapped(texts: Sequence[str], optimizer: str) -> str:
    """The name of an optimizer with its wrappers.

    >>> name_wrapped(["sam:0.1", "lookahead:5:0.8"], "sgd")
    'lookahead(sam:0.1(sgd))'
    """
    name = optimizer
    for wrapper in parse_wrappers(texts, optimizer):
        name = f"{wrapper}({name})"
    return name
