"""A result is whole or not there: names that change places, leftovers, room on the disk."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torch_lawa.checkpoints.storage import atomic as files
from torch_lawa.checkpoints.storage.atomic import (
    TEMPORARY,
    clear_stale,
    publish,
    replacing,
    require_space,
    reserve,
    temporary_name,
)
from torch_lawa.errors import OutputError


def folder(path: Path, content: str) -> Path:
    path.mkdir()
    (path / "a").write_text(content)
    return path


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_folder_takes_the_place_of_an_older_one(
    tmp_path: Path, can_exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_exchange:
        monkeypatch.setattr(files, "_exchange", lambda a, b: False)
    old, new = folder(tmp_path / "out", "old"), folder(tmp_path / "out.1.partial", "new")
    publish(new, old)
    assert (tmp_path / "out" / "a").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_folder_is_there_at_every_moment(tmp_path: Path) -> None:
    out = folder(tmp_path / "out", "0")
    code = (
        "import sys, pathlib\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "print('ready', flush=True)\n"
        "seen = set()\n"
        "while '200' not in seen: seen.add((path / 'a').read_text())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as reader:
        assert reader.stdout is not None
        reader.stdout.readline()
        for i in range(1, 201):
            publish(folder(tmp_path / "next", str(i)), out)
        _, errors = reader.communicate(timeout=60)
        # The path is looked up, then the file in it: both belong to one folder or the other. A
        # reader that held the old folder may find it emptied, never the name gone.
        assert reader.returncode == 0 or b"out/a" in errors


def test_a_folder_replaces_a_file_and_a_file_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("old")
    publish(folder(tmp_path / "new", "x"), tmp_path / "out")
    assert (tmp_path / "out" / "a").read_text() == "x"
    (tmp_path / "f").write_text("old")
    (tmp_path / "g").write_text("new")
    publish(tmp_path / "g", tmp_path / "f")
    assert (tmp_path / "f").read_text() == "new"


def test_leftovers_of_the_dead_are_cleared_and_of_the_living_kept(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        dead.wait()
    target = tmp_path / "o[u]t"
    stale = [
        tmp_path / f"o[u]t.{dead.pid}{TEMPORARY}",
        tmp_path / f"o[u]t.{dead.pid}.old{TEMPORARY}",
    ]
    living = [
        temporary_name(target),
        tmp_path / f"out.{dead.pid}{TEMPORARY}",
        tmp_path / f"o[u]t.mine{TEMPORARY}",
    ]
    folder(stale[0], "x")
    for path in (*stale[1:], *living):
        path.write_text("x")
    clear_stale(target)
    assert sorted(tmp_path.iterdir()) == sorted(living)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(RuntimeError), replacing(path) as file:
        file.write(b"half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_room_is_reserved_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    with path.open("wb") as file:
        reserve(file.fileno(), 1000, path)
        assert path.stat().st_size == 1000

        def fail(code: int) -> None:
            def refuse(*_: object) -> None:
                raise OSError(code, os.strerror(code))

            monkeypatch.setattr(os, "posix_fallocate", refuse)

        fail(errno.ENOSPC)
        with pytest.raises(OutputError, match="no space for 5,000 bytes"):
            reserve(file.fileno(), 5000, path)
        fail(errno.EOPNOTSUPP)  # some file systems cannot: the size is set all the same
        reserve(file.fileno(), 5000, path)
        assert path.stat().st_size == 5000
        fail(errno.EIO)
        with pytest.raises(OSError, match="Input/output"):
            reserve(file.fileno(), 5000, path)
    with pytest.raises(OutputError, match="are needed"):
        require_space(tmp_path, 10**18)
