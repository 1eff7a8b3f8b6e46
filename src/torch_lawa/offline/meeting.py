"""Where the processes of a team meet: a hidden folder beside the output, in which names are news.

`beat.3.17.4096` says that rank 3 lives, for the 17th time, and has 4096 bytes done: one listing
tells everything, without a file being opened. Names are learnt by listing alone, which is fresh
also where a file system answers questions for a single name from a cache.
"""

import contextlib
import errno
import glob
import json
import os
import secrets
import socket
from pathlib import Path
from typing import Any

from torch_lawa.checkpoints.storage.atomic import TEMPORARY, clear_stale, remove
from torch_lawa.offline.team import Team

__all__ = ["Meeting", "clear_meetings", "find_meetings", "new_meeting"]

_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


class Meeting:
    """The folder, as one process uses it."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self._rank = folder, rank
        self._beat: str | None = None
        self._num_beats = 0

    @property
    def values(self) -> Path:
        """The folder in which the result is made."""
        return self.folder / "values"

    def names(self) -> set[str] | None:
        """All that was said so far; None where the folder is no more."""
        try:
            return set(os.listdir(self.folder))
        except OSError as error:
            return None if error.errno in _GONE else set()  # of a moment's trouble, no news

    def say(self, *words: object) -> None:
        """A name, and nothing in the file."""
        self._path(".".join(map(str, words))).touch()

    def post(self, name: str, content: Any) -> None:
        """A name with something to read, which is whole when the name is seen."""
        draft = self._path(f"draft.{self._rank}")
        draft.write_text(json.dumps(content))
        os.replace(draft, self._path(name))

    def read(self, name: str) -> Any:
        """What was posted under a name."""
        return json.loads(self._path(name).read_text())

    def introduce(self) -> None:
        """Say where this process runs, for messages about it."""
        self.post(f"who.{self._rank}", f"{socket.gethostname()}, pid {os.getpid()}")

    def beat(self, done: int) -> None:
        """Say that this process lives, and how many bytes it has done."""
        self._num_beats += 1
        beat = f"beat.{self._rank}.{self._num_beats}.{done}"
        try:
            if self._beat is None:
                raise FileNotFoundError
            os.rename(self._path(self._beat), self._path(beat))
        except FileNotFoundError:
            self.say(beat)
        self._beat = beat

    def _path(self, name: str) -> Path:
        return self.folder / name


def new_meeting(target: Path, team: Team) -> Meeting:
    """A folder that no process has seen before, whatever an earlier job left."""
    clear_meetings(target)
    name = f"{_hidden(target).name}.{os.getpid()}.{team.job}.{secrets.token_hex(8)}{TEMPORARY}"
    folder = target.with_name(name)
    folder.mkdir()
    meeting = Meeting(folder, team.rank)
    meeting.introduce()
    return meeting


def find_meetings(target: Path, team: Team) -> list[Meeting]:
    """Folders that this job may have made, or an earlier one like it."""
    hidden, names = _hidden(target).name, []
    with contextlib.suppress(OSError):
        names = os.listdir(target.parent)
    return [
        Meeting(target.with_name(name), team.rank)
        for name in sorted(names)
        if name.startswith(f"{hidden}.") and name.endswith(TEMPORARY) and f".{team.job}." in name
    ]


def clear_meetings(target: Path) -> None:
    """Remove what jobs that were killed left behind."""
    hidden = _hidden(target)
    clear_stale(hidden)
    # A container may give the same number to every process that it starts.
    for left in target.parent.glob(f"{glob.escape(hidden.name)}.{os.getpid()}.*{TEMPORARY}"):
        with contextlib.suppress(OSError):
            remove(left)


def _hidden(target: Path) -> Path:
    """Hidden, so that a run's folder that holds the output does not seem to hold more."""
    return target.with_name(f".{target.name}")
