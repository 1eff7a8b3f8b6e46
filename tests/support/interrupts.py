"""Ctrl-C at every place of the package's code where it can arrive.

CPython looks for signals when a function starts, after each call and at the end of each round of a
loop. `Interrupt` raises KeyboardInterrupt at the n-th of these places in the given files.
"""

import dis
import functools
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch_lawa

ROOT = Path(torch_lawa.__file__).parent
FILES = [
    *(ROOT / f"{name}.py" for name in ("averager", "averager_state", "window", "window_mean")),
    *(ROOT / f"{name}.py" for name in ("swap", "mutex", "selection", "mean/sliding_sum")),
    *sorted((ROOT / "stores").glob("*.py")),
]

_LOOKS_FOR_SIGNALS = ("CALL", "JUMP_BACKWARD")


class _Code:
    """Which instructions of a function are places to interrupt it."""

    def __init__(self, code: CodeType) -> None:
        bytecode = dis.Bytecode(code)
        self._names = {instruction.offset: instruction.opname for instruction in bytecode}
        self._ranges = bytecode.exception_entries  # type: ignore[attr-defined]

    def is_place(self, event: str, previous: int | None, offset: int) -> bool:
        """Whether an interrupt can arrive before the instruction at `offset`."""
        if previous is None:
            return event == "line"
        # CPython looks for signals at the end of an instruction, inside the `try` that it is in.
        looked = self._names[previous].startswith(_LOOKS_FOR_SIGNALS)
        return event == "opcode" and looked and self._handler(previous) == self._handler(offset)

    def _handler(self, offset: int) -> int | None:
        found = [entry.target for entry in self._ranges if entry.start <= offset < entry.end]
        return found[-1] if found else None


_code = functools.cache(_Code)


class Interrupt:
    """Raises KeyboardInterrupt at the n-th place in the block; without n it only counts them."""

    def __init__(self, at: int | None = None, files: Iterable[Path] = FILES) -> None:
        self._at, self._files = at, {str(path) for path in files}
        self.count = 0
        self.where = ""
        self.entering = ""  # the function that was interrupted before it did anything
        self._previous: dict[FrameType, int] = {}
        self._before: Any = None

    def __enter__(self) -> "Interrupt":
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        sys.settrace(self._before)
        self._previous.clear()

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in self._files or frame.f_code.co_name == "__del__":
            return None  # Python ignores what is raised in `__del__`
        frame.f_trace_opcodes = True
        return self._place

    def _place(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "return":
            self._previous.pop(frame, None)
        if event not in ("line", "opcode"):
            return self._place
        offset = frame.f_lasti
        if _code(frame.f_code).is_place(event, self._previous.get(frame), offset):
            if self.count == self._at:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {event}"
                self.entering = frame.f_code.co_qualname if frame not in self._previous else ""
                sys.settrace(self._before)
                self.count += 1
                raise KeyboardInterrupt
            self.count += 1
        if event == "opcode":
            self._previous[frame] = offset
        return self._place


def is_free(lock: Any) -> bool:
    """Whether another thread could take the lock."""
    taken: list[bool] = []

    def take() -> None:
        if lock.acquire(timeout=1):
            lock.release()
            taken.append(True)

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return bool(taken)
