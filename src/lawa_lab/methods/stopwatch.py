"""Seconds spent on each averaging method, without waiting for the GPU after each step."""

import contextlib
import time
from collections.abc import Iterator

import torch

__all__ = ["Stopwatch"]


class Stopwatch:
    """Adds up seconds by name; on a GPU by events, which are read when `settle` is called.

    >>> watch = Stopwatch(torch.device("cpu"))
    >>> with watch("ema"):
    ...     pass
    >>> watch.settle() > 0, list(watch.seconds)
    (True, ['ema'])
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._recent = 0.0
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measure a block."""
        if self._cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))
        else:
            started = time.perf_counter()
            yield
            self._add(name, time.perf_counter() - started)

    def settle(self) -> float:
        """The seconds measured since the last call; the GPU must have finished its work."""
        for name, begin, end in self._events:
            self._add(name, begin.elapsed_time(end) / 1000.0)
        self._events.clear()
        recent, self._recent = self._recent, 0.0
        return recent

    def _add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self._recent += seconds
