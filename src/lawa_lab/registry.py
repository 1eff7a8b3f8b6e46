"""Tables whose entries register themselves: one module per entry, no list to edit.

An entry may be `Typed`: a class whose objects are written as a name and numbers, `ema:0.999`.
"""

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from typing import ClassVar, TypeVar

from torch_lawa.errors import ConfigError
from torch_lawa.units import parse_number

__all__ = ["Registry", "Typed", "parse_typed", "typed_entries"]

Entry = TypeVar("Entry")


class Registry(Mapping[str, Entry]):
    """Entries by name: those of a package's modules, imported on first use, and any added later.

    The modules are imported for `--help`, so they must not import torch or a data library at the
    top.

    >>> colours: Registry[int] = Registry("colour")
    >>> colours.add("red", 1)
    >>> colours.find("blue")
    Traceback (most recent call last):
    torch_lawa.errors.ConfigError: there is no colour 'blue': choose from red
    """

    def __init__(self, kind: str, package: str | None = None) -> None:
        self.kind, self._package = kind, package
        self._entries: dict[str, Entry] = {}

    def add(self, name: str, entry: Entry) -> None:
        """Register an entry; a name can be taken only once."""
        if name in self._entries:
            raise ConfigError(f"the {self.kind} {name!r} is registered already")
        self._entries[name] = entry

    def remove(self, name: str) -> None:
        """Undo `add`."""
        del self._entries[name]

    def find(self, name: str) -> Entry:
        """The entry of that name; the error lists the names that exist."""
        if name not in self:
            raise ConfigError(f"there is no {self.kind} {name!r}: choose from {', '.join(self)}")
        return self[name]

    def __getitem__(self, name: str) -> Entry:
        return self._loaded()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaded())

    def __len__(self) -> int:
        return len(self._loaded())

    def _loaded(self) -> dict[str, Entry]:
        if self._package is not None:
            package, self._package = importlib.import_module(self._package), None
            for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
                importlib.import_module(module.name)
        return self._entries


@dataclasses.dataclass(frozen=True)
class Typed:
    """Something that is typed as its name and its parameters, separated by colons.

    Every field is a number.
    """

    name: ClassVar[str]
    typed: ClassVar[str]  # with its parameters, for `--help`

    @property
    def parameters(self) -> str:
        """The parameters as they are typed; they distinguish two entries of one name."""
        values = (getattr(self, item.name) for item in dataclasses.fields(self))
        return ":".join(format(value, ".12g") for value in values)

    def __str__(self) -> str:
        return f"{self.name}:{self.parameters}" if self.parameters else self.name

    def require(self, valid: bool, example: str, why: str = "") -> None:
        """Refuse parameters that are not valid, with an example of valid ones."""
        if not valid:
            text = f"{self.name}:{self.parameters}"
            reason = f"{why}; " if why else ""
            raise ConfigError(f"{text}: {reason}write it as {self.typed}, such as {example}")


AnyTyped = TypeVar("AnyTyped", bound=Typed)


def typed_entries(registry: Registry[type[AnyTyped]]) -> str:
    """All entries as they are typed, for help texts and errors."""
    return ", ".join(entry.typed for entry in registry.values())


def parse_typed(registry: Registry[type[AnyTyped]], text: str) -> AnyTyped:
    """An object from its name and parameters; the error says how to write it."""
    name, *words = text.split(":")
    entry = registry.find(name)
    try:
        return entry(*map(parse_number, words))
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{registry.kind} {text!r}: write it as {entry.typed}") from None
