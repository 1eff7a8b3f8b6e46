"""Errors of the operating system, with the name of the file that they are about."""

import contextlib
import os
from collections.abc import Iterator

__all__ = ["named_errors", "unwrapped_errors"]


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


@contextlib.contextmanager
def unwrapped_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise the system error about `path`, or Ctrl-C, that PyTorch hides behind its own error."""
    try:
        yield
    except BaseException as error:  # that of torch.distributed.checkpoint is not an Exception
        hidden = [error, *(failed for failed, _ in getattr(error, "failures", {}).values())]
        while hidden:
            found = hidden.pop()
            if isinstance(found, OSError) and found.errno is not None:
                raise OSError(found.errno, os.strerror(found.errno), os.fspath(path)) from error
            if isinstance(found, KeyboardInterrupt):
                raise KeyboardInterrupt from error
            hidden += [e for e in (found.__cause__, found.__context__) if e is not None]
        raise
