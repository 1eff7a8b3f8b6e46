"""The autograd mode that averaging runs in, whatever mode the caller is in."""

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["ordinary_mode"]


@contextlib.contextmanager
def ordinary_mode() -> Iterator[None]:
    """No gradients, and no inference tensors: those could not be written to later.

    >>> with torch.inference_mode(), ordinary_mode():
    ...     torch.ones(1).is_inference()
    False
    """
    with torch.inference_mode(False), torch.no_grad():
        yield
