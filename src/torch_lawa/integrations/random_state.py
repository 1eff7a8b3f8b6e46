"""Random states that extra work inside a run must not change."""

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch

__all__ = ["preserved_rng"]


@contextlib.contextmanager
def preserved_rng(device: torch.device, seed: int | None = None) -> Iterator[None]:
    """Restore the random states of Python, NumPy and torch after the block.

    A run that is averaged then trains as it would without: a data loader alone draws one number.
    With a `seed`, the block itself always draws the same numbers.

    >>> _ = torch.manual_seed(0)
    >>> with preserved_rng(torch.device("cpu")):
    ...     first = torch.rand(1)
    >>> bool(torch.rand(1) == first)
    True
    """
    devices = range(torch.cuda.device_count()) if device.type == "cuda" else ()
    state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            if seed is not None:
                random.seed(seed)
                np.random.seed(seed)
                torch.manual_seed(seed)
            yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)
