"""A copy from a GPU to host memory in pieces, so that other copies get their turn in between.

A GPU performs its copies to the host one after the other, and it turns to another stream only when
nothing more is enqueued on this one. While a snapshot of a billion parameters is copied,
`loss.item()` would wait 80 ms for all of it, even if it is enqueued in pieces, two at a time. So a
thread enqueues the next piece when the last one has arrived.
"""

import contextlib
import ctypes
import threading
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Feed"]

_PIECE = 64 << 20  # bytes: 1.2 ms over PCIe 5; with smaller ones, the gaps between them count


class Feed:
    """Copies pairs of flat tensors (target, source) on `stream`, in the order given.

    `stream` already waits for whatever writes the sources. Whoever needs the targets, or wants to
    overwrite the sources, calls `hurry` or `wait`, which do what the thread has left undone.
    """

    def __init__(
        self, stream: torch.cuda.Stream, copies: Sequence[tuple[Tensor, Tensor]] = ()
    ) -> None:
        self._stream = stream
        # The whole tensors, because host memory is unpinned when its tensor is dropped.
        self._copies = copies
        self._left = deque(copies)  # of the first one, what is left of it
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Copy in the background; what is small is enqueued at once."""
        if sum(source.nbytes for _, source in self._left) > _PIECE:
            # No daemon: the interpreter waits for it before it frees the memory.
            self._thread = threading.Thread(target=self._run, name="lawa-feed")
            with contextlib.suppress(RuntimeError):  # no more threads, or the interpreter exits
                self._thread.start()
                return
        self.hurry()

    def hurry(self) -> torch.cuda.Event:
        """Enqueue all that is left; the event is reached when everything has been copied."""
        with self._lock:
            while self._left:
                self._enqueue(self._left[0][1].nbytes)
            event: torch.cuda.Event = self._stream.record_event()
            return event

    def wait(self) -> None:
        """Return when everything has been copied; other copies still get their turn."""
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()
        self.hurry().synchronize()

    def _run(self) -> None:
        with contextlib.suppress(Exception):  # `hurry` meets the same error in the caller's thread
            if not _allow_captures():
                self.hurry()
            while True:
                with self._lock:
                    if not self._left:
                        return
                    event = self._enqueue(_PIECE)
                event.synchronize()

    def _enqueue(self, nbytes: int) -> torch.cuda.Event:
        """Enqueue the next piece; one that is interrupted is repeated, never left out."""
        target, source = self._left[0]
        numel = max(1, nbytes // source.element_size())
        with torch.cuda.stream(self._stream):
            target[:numel].copy_(source[:numel], non_blocking=True)
        # Not a blocking one, which wakes the thread up 0.3 ms late.
        event: torch.cuda.Event = self._stream.record_event()
        if numel < len(source):
            self._left[0] = target[numel:], source[numel:]
        else:
            self._left.popleft()
        if not self._left:
            self._copies = ()
        return event


def _allow_captures() -> bool:
    """Whether this thread may wait for events while another one captures a CUDA graph.

    Otherwise CUDA would invalidate the graph: by default, a capture forbids such calls to every
    thread that has not asked to be left out.
    """
    mode = ctypes.c_int(1)  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    try:
        exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return False
    return int(exchange(ctypes.byref(mode))) == 0
