"""Errors of the operating system, with the name of the file that they are about."""

import contextlib
import os
from collections.abc import Iterator

__all__ = ["named_errors"]


@contextlib.contextmanager
def named_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add `path` to system errors without one, as calls on open files raise them.

    >>> try:
    ...     with named_errors("a.pt"):
    ...         raise OSError(28, "No space left on device")
    ... except OSError as error:
    ...     print(error)
    [Errno 28] No space left on device: 'a.pt'
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = os.fspath(path)
        raise
