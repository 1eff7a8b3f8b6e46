"""Every mistake a user can make, by name.

All are `ValueError`s underneath. A message says what was wrong, where, and what to do next.
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


class LawaError(ValueError):
    """Base of every error that torch_lawa raises on purpose."""


class ConfigError(LawaError):
    """An argument has a value that cannot work."""


class NotReadyError(LawaError):
    """An average was asked for before there was enough to average."""


class LayoutError(LawaError):
    """A model's tensors do not fit the ones collected before."""


class SwapError(LawaError):
    """Averaged weights were lent, or snapshots taken, at the wrong moment."""


class StateError(LawaError):
    """A saved averager state cannot be loaded."""


class StoreError(LawaError):
    """A snapshot store cannot be opened, written or read."""


class FormatError(LawaError):
    """A checkpoint or metrics file is not what it claims to be."""


class DataError(LawaError):
    """Training data that is missing or damaged."""


class OutputError(LawaError):
    """A result cannot be written where it was asked for."""


class BatchNormError(LawaError):
    """BatchNorm statistics could not be re-estimated."""


class RankError(LawaError):
    """Some processes of a group are not where the others are."""


class NonFiniteWarning(UserWarning):
    """A snapshot in the window holds NaN or Inf, so the mean does too."""
