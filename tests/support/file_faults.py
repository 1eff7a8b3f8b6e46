"""Programs that are killed, signalled or refused something at a chosen file-system call.

`FaultServer` compiles `file_faults.c` and starts `fault_server` with it preloaded. A program is
forked from that server, so a trial takes milliseconds.
"""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = ["Ended", "Fault", "FaultServer", "Program", "System"]

_ACTIONS = ("nothing", "kill", "fail", "fail from then on", "short", "signal")
_CHANGE, _READ = 1, 2
_NO_RENAME_FLAGS, _NO_LINKS = 1, 2


@dataclass(frozen=True)
class System:
    """A file system that lacks something, and the error with which it says so."""

    name: str = "complete"
    rename_flags: bool = True
    links: bool = True
    refusal: int = 0


@dataclass(frozen=True)
class Fault:
    """What happens at call number `at` in the program's folder; never, if that is negative."""

    action: str = "nothing"
    at: int = -1
    number: int = 0  # the error or the signal
    reads: bool = False  # whether calls that only read are counted, too

    def __str__(self) -> str:
        names = signal.Signals(self.number).name if self.action == "signal" else ""
        names = names or errno.errorcode.get(self.number, "")
        return f"{self.action} {names} at call {self.at}".replace("  ", " ")


@dataclass(frozen=True)
class Program:
    """Python code that runs in a folder, with a fault or a signal after some seconds."""

    code: str
    folder: Path
    fault: Fault = Fault()
    system: System = System()
    signal: tuple[int, float] | None = None
    container: bool = False  # as process 1 of a PID namespace of its own

    def to_json(self) -> dict[str, Any]:
        """The job for the server."""
        fault, system = self.fault, self.system
        return {
            "code": self.code,
            "folder": str(self.folder),
            "signal": self.signal,
            "container": self.container,
            "fault": [
                fault.at,
                _ACTIONS.index(fault.action),
                fault.number,
                _CHANGE | (_READ if fault.reads else 0),
                (not system.rename_flags) * _NO_RENAME_FLAGS | (not system.links) * _NO_LINKS,
                system.refusal,
            ],
        }


@dataclass(frozen=True)
class Ended:
    """How a program ended: `code` is None if it did not, `where` is the call with the fault."""

    code: int | None
    stdout: str
    stderr: str
    count: int
    where: str

    @property
    def killed(self) -> bool:
        """In this process, or as process 1 of a container."""
        return self.code in (-signal.SIGKILL, 128 + signal.SIGKILL)


class FaultServer:
    """Runs programs; a context manager."""

    def __init__(self, folder: Path) -> None:
        library = folder / "file_faults.so"
        source = Path(__file__).with_suffix(".c")
        command = ["cc", "-shared", "-fPIC", "-O1", "-fvisibility=hidden", "-o", str(library)]
        subprocess.run([*command, str(source), "-ldl"], check=True)
        paths = [str(Path(__file__).parents[1]), *sys.path]
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from support.fault_server import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **{k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")},
                "LD_PRELOAD": str(library),
                "PYTHONPATH": os.pathsep.join(paths),
                "SOURCE_DATE_EPOCH": "1700000000",
            },
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    @staticmethod
    def missing() -> str:
        """Why it cannot work here, if so."""
        if sys.platform != "linux":
            return "LD_PRELOAD and the calls of Linux"
        return "" if shutil.which("cc") else "needs a C compiler (cc)"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.communicate()

    def run(self, program: Program) -> Ended:
        """Run one program."""
        return self.run_all([program])[0]

    def run_all(self, programs: Sequence[Program]) -> list[Ended]:
        """Run several at the same time."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([p.to_json() for p in programs]) + "\n")
        self._process.stdin.flush()
        return [Ended(**found) for found in json.loads(self._process.stdout.readline())]
