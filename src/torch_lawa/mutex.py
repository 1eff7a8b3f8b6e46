"""One call at a time: the lock of an object that several threads may use."""

import functools
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

__all__ = ["one_at_a_time"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Locked(Protocol):
    """An object with a lock; reentrant, since its methods call each other."""

    _lock: threading.RLock


_S = TypeVar("_S", bound=Locked)


def one_at_a_time(
    method: Callable[Concatenate[_S, _P], _R],
) -> Callable[Concatenate[_S, _P], _R]:
    """Method decorator: other threads wait until the call has returned.

    >>> class Counter:
    ...     def __init__(self) -> None:
    ...         self._lock, self.value = threading.RLock(), 0
    ...     @one_at_a_time
    ...     def add(self, n: int) -> int:
    ...         self.value += n
    ...         return self.value
    >>> Counter().add(2)
    2
    """

    @functools.wraps(method)
    def call(self: _S, /, *arguments: _P.args, **options: _P.kwargs) -> _R:
        with self._lock:
            return method(self, *arguments, **options)

    return call
