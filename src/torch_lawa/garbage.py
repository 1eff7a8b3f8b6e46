"""Pauses of Python's garbage collector while many objects that stay alive are made."""

import contextlib
import gc
import threading
from collections.abc import Iterator

__all__ = ["paused_garbage_collection"]

_lock = threading.Lock()
_pauses = 0
_was_enabled = False


@contextlib.contextmanager
def paused_garbage_collection() -> Iterator[None]:
    """Pause the collector, which would traverse a growing heap again and again.

    Pauses may be nested, and overlap in several threads.

    >>> with paused_garbage_collection():
    ...     gc.isenabled()
    False
    """
    global _pauses, _was_enabled
    with _lock:
        if not _pauses:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if not _pauses and _was_enabled:
                gc.enable()
