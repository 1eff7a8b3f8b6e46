"""A second pass over the loaders of a run that leaves no trace in it."""

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from torch_lawa.integrations.lightning._compat import CombinedLoader

__all__ = ["generator_states", "second_pass"]


@contextlib.contextmanager
def second_pass(loaders: Any) -> Iterator[Iterable[Any]]:
    """The batches of loaders that may be in the middle of an iteration, without disturbing it."""
    combined = CombinedLoader(loaders, "max_size_cycle")
    states = generator_states(combined.flattened)
    combined.flattened = [_copied(loader) for loader in combined.flattened]
    try:
        yield (batch for batch, _, _ in combined)
    finally:
        for generator, state in states.items():
            generator.set_state(state)


def generator_states(loaders: Iterable[Any]) -> dict[torch.Generator, Tensor]:
    """The states of the loaders' own random generators, to be restored later."""
    states: dict[torch.Generator, Tensor] = {}
    for loader in loaders:
        generator = getattr(loader, "generator", None)
        if isinstance(generator, torch.Generator):
            states[generator] = generator.get_state()
        states.update(generator_states(_samplers(loader).values()))
    return states


def _copied(loader: Any) -> Any:
    """A copy with samplers of its own, since a sampler may count how often it is used."""
    try:
        other = copy.copy(loader)
    except TypeError:
        return loader  # an iterator: there is only one
    for name, sampler in _samplers(other).items():
        vars(other)[name] = _copied(sampler)
    if isinstance(other, DataLoader):
        # Persistent workers belong to the running iteration, which a second one would end.
        vars(other).update(_iterator=None, persistent_workers=False)
    return other


def _samplers(loader: Any) -> dict[str, Any]:
    """The samplers of a loader, or of a sampler, by the names of its attributes."""
    found = {
        name: value
        for name, value in getattr(loader, "__dict__", {}).items()
        if name in ("sampler", "batch_sampler", "_sampler", "dataset") and value is not None
    }
    # With several processes Lightning wraps a user's sampler in the "dataset" of another one.
    if not hasattr(found.get("dataset"), "_sampler"):
        found.pop("dataset", None)
    return found
