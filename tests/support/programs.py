"""Python programs that tests start, read, signal and kill, without the seconds that PyTorch takes.

Each is forked from the server of `support.ranks`, which has imported PyTorch. Tests of imports and
of options of Python itself need `subprocess`.
"""

import atexit
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from support.ranks import FORKING

LAWA = "from torch_lawa.cli.main import main; main()"


class Program:
    """`python -c code words`, with one thread of PyTorch; `stdout` can be read while it runs."""

    def __init__(
        self,
        code: str,
        *words: object,
        folder: Path | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        reader, writer = FORKING.Pipe(duplex=False)
        self._folder = tempfile.TemporaryDirectory()
        self._errors = Path(self._folder.name) / "stderr"
        self._errors.touch()
        self._process = FORKING.Process(
            target=_run,
            args=(
                code,
                [*map(str, words)],
                str(folder or Path.cwd()),
                {**os.environ, **(environ or {})},  # the server has that of its own start
                writer,
                str(self._errors),
            ),
        )
        self._process.start()
        writer.close()
        self.stdout = os.fdopen(os.dup(reader.fileno()), "r")
        reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End it where it has not ended."""
        self.kill()
        self._process.join()
        self.stdout.close()
        self._folder.cleanup()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    @property
    def stderr(self) -> str:
        """What it has written there so far."""
        return self._errors.read_text()

    def send_signal(self, number: int) -> None:
        """Nothing happens to one that has ended, as with `subprocess`."""
        assert self._process.pid is not None
        if self._process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float = 60) -> int:
        """Its exit code, as of `subprocess`."""
        self._process.join(timeout)
        assert self._process.exitcode is not None, "still running"
        return self._process.exitcode

    def communicate(self, timeout: float = 60) -> tuple[str, str]:
        """The rest of what it says, until it has ended."""
        said = self.stdout.read()
        self.wait(timeout)
        return said, self.stderr


def _run(
    code: str,
    words: list[str],
    folder: str,
    environ: dict[str, str],
    stdout: Connection,
    stderr: str,
) -> None:
    os.dup2(stdout.fileno(), 1)
    stdout.close()
    os.dup2(os.open(stderr, os.O_WRONLY), 2)
    # New streams: those of the server remember what kind of file it had there.
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    torch.set_num_threads(1)
    sys.argv = ["-c", *words]
    try:
        exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})
    finally:
        atexit._run_exitfuncs()
