"""The errors torch_lawa raises on purpose; each says what was wrong, where, and what to do next.

Misuse (a wrong argument, state or file) is a `ValueError`; a file system or a network that failed
is an `OSError`; ranks that are out of step are a `RuntimeError`. All of them are `LawaError`s.
"""

__all__ = [
    "BatchNormError",
    "ConfigError",
    "DataError",
    "FormatError",
    "LawaError",
    "LayoutError",
    "NonFiniteWarning",
    "NotReadyError",
    "OutputError",
    "RankError",
    "StateError",
    "StoreError",
    "SwapError",
]


class LawaError(Exception):
    """Base class of every error that torch_lawa raises on purpose."""


class ConfigError(LawaError, ValueError):
    """An argument has an invalid value."""


class NotReadyError(LawaError, ValueError):
    """An average was requested before there were enough snapshots."""


class LayoutError(LawaError, ValueError):
    """A model's tensors do not match the ones collected before."""


class SwapError(LawaError, ValueError):
    """Averaged weights were swapped in, or a snapshot was taken, at the wrong moment."""


class StateError(LawaError, ValueError):
    """A saved averager state cannot be loaded."""


class FormatError(LawaError, ValueError):
    """A checkpoint or metrics file is not what it claims to be."""


class DataError(LawaError, ValueError):
    """Training data is missing or damaged."""


class BatchNormError(LawaError, ValueError):
    """BatchNorm statistics could not be re-estimated."""


class StoreError(LawaError, OSError):
    """A snapshot store cannot be opened, written or read."""


class OutputError(LawaError, OSError):
    """A result cannot be written to its destination."""


class RankError(LawaError, RuntimeError):
    """A rank is missing from, or at a different call than, the rest of its process group."""


class NonFiniteWarning(UserWarning):
    """A snapshot in the window holds NaN or Inf, so the mean does too."""
