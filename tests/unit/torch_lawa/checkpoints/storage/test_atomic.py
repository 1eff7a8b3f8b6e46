"""A result is whole or not there: names that change places, leftovers, room on the disk."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from torch_lawa.checkpoints.storage import atomic as files
from torch_lawa.checkpoints.storage.atomic import (
    TEMPORARY,
    publish,
    recover,
    recover_all,
    replacing,
    require_space,
    reserve,
    staging,
    sync_file,
    sync_folder,
)
from torch_lawa.errors import OutputError


def folder(path: Path, content: str, *names: str) -> Path:
    path.mkdir()
    for name in names or ("a",):
        (path / name).write_text(content)
    return path


@pytest.fixture(params=["renameat2", "two renames", "no links"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file system with everything; one without renameat2; one without links as well."""
    if request.param != "renameat2":
        monkeypatch.setattr(files, "_renameat2", lambda *_: False)
    if request.param == "no links":
        monkeypatch.setattr(os, "link", failing(errno.EPERM))
    return str(request.param)


def failing(code: int) -> Any:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def test_a_folder_takes_the_place_of_an_older_one(tmp_path: Path, system: str) -> None:
    old, new = folder(tmp_path / "out", "old"), folder(tmp_path / "next", "new")
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


def test_a_folder_replaces_a_file_and_a_file_a_file(tmp_path: Path, system: str) -> None:
    (tmp_path / "out").write_text("old")
    publish(folder(tmp_path / "new", "x"), tmp_path / "out")
    assert (tmp_path / "out" / "a").read_text() == "x"
    (tmp_path / "f").write_text("old")
    (tmp_path / "g").write_text("new")
    publish(tmp_path / "g", tmp_path / "f")
    assert (tmp_path / "f").read_text() == "new"


def test_nothing_is_replaced_unless_asked(
    tmp_path: Path, system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if it appears between a check and the rename."""
    out = folder(tmp_path / "out", "theirs")
    (tmp_path / "file").write_text("theirs")
    (tmp_path / "mine").write_text("mine")
    new = folder(tmp_path / "new", "mine")
    if system != "no links":  # there a file is checked and renamed in two steps
        monkeypatch.setattr(os.path, "lexists", lambda path: False)
        monkeypatch.setattr(Path, "exists", lambda path: False)
    for made in (new, tmp_path / "mine"):
        for path in (out, tmp_path / "file"):
            with pytest.raises(FileExistsError, match=path.name):
                publish(made, path, overwrite=False)
    monkeypatch.undo()
    assert (out / "a").read_text() == "theirs"
    assert (tmp_path / "file").read_text() == "theirs"
    for made, name in ((new, "x"), (tmp_path / "mine", "y")):
        publish(made, tmp_path / name, overwrite=False)
    assert sorted(os.listdir(tmp_path)) == ["file", "out", "x", "y"]


def test_only_outdated_files_of_a_folder_are_removed(tmp_path: Path, system: str) -> None:
    out = folder(tmp_path / "out", "old", "model", "config", "shard", "thesis")
    (out / "link").symlink_to("thesis")
    new = folder(tmp_path / "new", "new", "model", "config")
    publish(new, out, is_outdated=("model", "shard").__contains__)
    found = {path.name: path.read_text() for path in out.iterdir()}
    assert found == {"model": "new", "config": "new", "thesis": "old", "link": "old"}
    assert (out / "link").is_symlink()
    assert os.listdir(tmp_path) == ["out"]
    folder(out / "runs", "precious")
    new = folder(tmp_path / "new", "newer", "model")
    with pytest.raises(OutputError, match="contains the folder runs"):
        publish(new, out, is_outdated=("model", "shard").__contains__)
    assert (out / "model").read_text() == "new"
    assert (out / "runs" / "a").read_text() == "precious"


def test_files_that_appear_while_a_folder_is_replaced_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, new = folder(tmp_path / "out", "old", "model"), folder(tmp_path / "new", "new", "model")
    carry_over = files._carry_over

    def and_then(*args: Any) -> None:
        carry_over(*args)
        (out / "late").write_text("late")

    monkeypatch.setattr(files, "_carry_over", and_then)
    publish(new, out, is_outdated="model".__eq__)
    assert {path.name: path.read_text() for path in out.iterdir()} == {
        "model": "new",
        "late": "late",
    }


def test_a_folder_that_may_not_be_moved_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of another user: found out before anything has changed."""
    out, new = folder(tmp_path / "out", "old"), folder(tmp_path / "new", "new")
    real = files._renameat2

    def refuse(source: Path, target: Path, flag: int) -> bool:
        return real(source, target, flag) if flag == 1 else failing(errno.EACCES)()

    monkeypatch.setattr(files, "_renameat2", refuse)
    with pytest.raises(PermissionError):
        publish(new, out)
    assert (out / "a").read_text() == "old"


def test_older_files_that_cannot_be_removed_are_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = folder(tmp_path / "out", "old")

    def replace() -> None:
        with staging(out) as new:
            (new / "a").write_text("new")
            publish(new, out)

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", failing(errno.EACCES))
        with pytest.warns(UserWarning, match="cannot be removed"):
            replace()
    assert (out / "a").read_text() == "new"
    assert len(os.listdir(tmp_path)) == 2
    recover(out)
    assert os.listdir(tmp_path) == ["out"]


def test_if_the_second_rename_fails_the_older_folder_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, new = folder(tmp_path / "out", "old"), folder(tmp_path / "new", "new")
    monkeypatch.setattr(files, "_renameat2", lambda *_: False)
    rename = os.rename

    def fail(source: Path, target: Path) -> None:
        if source == new:
            failing(errno.EIO)()
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="Input/output"):
        publish(new, out)
    assert (out / "a").read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["new", "out"]


# Forks; each child is killed before a later change on disk than the last.
KILLED = """
import itertools, os, shutil, signal, sys
from pathlib import Path
from torch_lawa.checkpoints.storage import atomic

root, one_step = Path(sys.argv[1]), sys.argv[2] == "renameat2"
CHANGES = {"open", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "renameat2"}
os.fsync = lambda file: None
real = atomic._renameat2

def rename(*args):
    sys.audit("renameat2")
    return one_step and real(*args)

atomic._renameat2 = rename

def make(path, kind, content):
    if kind == "folder":
        path.mkdir()
        (path / "a").write_text(content)
    elif kind == "file":
        path.write_text(content)
    else:
        (root / "elsewhere").mkdir()
        (root / "elsewhere" / "a").write_text(content)
        path.symlink_to("elsewhere")

def content(path):
    return (path / "a" if path.is_dir() else path).read_text() if path.exists() else None

def work(new):
    if new == "replacing":
        with atomic.replacing(out) as file:
            file.write(b"new")
        return
    with atomic.staging(out) as folder:
        if new == "folder":
            (folder / "a").write_text("new")
            atomic.publish(folder, out)
        else:
            (folder / "out").write_text("new")
            atomic.publish(folder / "out", out)

def fork(new, kill_at):
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code, count = 1, itertools.count()
    def hook(event, args):
        writes = event != "open" or args[2] & (os.O_WRONLY | os.O_RDWR)
        if event in CHANGES and writes and next(count) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
    try:
        sys.addaudithook(hook)
        work(new)
        code = 0
    finally:
        os._exit(code)

num_killed = 0
NEW = ("file", "folder", "replacing")
for old, new in itertools.product((None, "file", "folder", "link"), NEW):
    if new == "replacing" and old == "folder":
        continue
    for kill_at in itertools.count():
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        out = root / "out"
        if old:
            make(out, old, "old")
        code, before = fork(new, kill_at), "old" if old else None
        case = (old, new, kill_at)
        if one_step:
            assert content(out) in (before, "new"), (case, content(out))
        atomic.recover(out)
        assert content(out) in (before, "new"), (case, content(out))
        left = set(os.listdir(root)) - {"elsewhere"}
        assert left == ({"out"} if content(out) else set()), (case, left)
        if code == 0:
            assert content(out) == "new", case
            break
        assert code == -signal.SIGKILL, (case, code)
        num_killed += 1
print(num_killed)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
@pytest.mark.parametrize("how", ["renameat2", "two renames"])
def test_killed_at_any_moment_the_old_or_the_new_is_there(tmp_path: Path, how: str) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path / "root"), how]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 50


def test_writers_with_the_same_pid_do_not_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As process 1 in two containers, or two threads."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    out, tree = tmp_path / "out", tmp_path / "tree"
    with replacing(out) as a, staging(tree) as first:
        a.write(b"a" * 10)
        (first / "a").write_text("first")
        with replacing(out) as b, staging(tree) as second:
            b.write(b"b")
            (second / "b").write_text("second")
            publish(second, tree)
        assert out.read_bytes() == b"b"
        assert os.listdir(tree) == ["b"]
        a.write(b"a" * 10)
        publish(first, tree)
    assert out.read_bytes() == b"a" * 20
    assert os.listdir(tree) == ["a"]
    assert sorted(os.listdir(tmp_path)) == ["out", "tree"]


def test_many_writers_of_one_target(tmp_path: Path, system: str) -> None:
    out, failed = tmp_path / "out", []

    def work(me: str) -> None:
        try:
            for _ in range(10):
                with staging(out) as new:
                    for name in "ab":
                        (new / name).write_text(me)
                    publish(new, out)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=[str(i)]) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert (out / "a").read_text() == (out / "b").read_text()
    assert os.listdir(tmp_path) == ["out"]


def test_leftovers_of_killed_writers_are_removed_and_of_living_ones_kept(tmp_path: Path) -> None:
    target = tmp_path / "o[u]t"
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from torch_lawa.checkpoints.storage.atomic import replacing, staging\n"
        "out = Path(sys.argv[1])\n"
        "with replacing(out) as file, staging(out) as folder:\n"
        "    (folder / 'x').touch()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(target)])
    assert done.returncode == -signal.SIGKILL
    assert len(os.listdir(tmp_path)) == 2
    others = [
        tmp_path / f"out.{1:016x}{TEMPORARY}",
        tmp_path / f"o[u]t.mine{TEMPORARY}",
        tmp_path / f"o[u]t.12345{TEMPORARY}",
    ]
    for path in others:
        path.write_text("x")
    with replacing(target) as file, staging(target) as living:
        recover(target)
        assert len(os.listdir(tmp_path)) == len(others) + 2
        assert living.is_dir()
        file.write(b"whole")
    assert sorted(tmp_path.iterdir()) == sorted([*others, target])
    recover_all(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([*others[1:], target])


def test_a_temporary_name_that_fails_at_once_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error in (OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()):

        def fail(*_: object, error: BaseException = error) -> bool:
            raise error

        monkeypatch.setattr(files, "try_lock", fail)
        for act in (staging, replacing):
            with pytest.raises(type(error)), act(tmp_path / "out"):
                pass
            assert os.listdir(tmp_path) == []


def test_an_interrupted_cleanup_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = files.remove

    def interrupted(path: Path) -> None:
        monkeypatch.setattr(files, "remove", remove)
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "remove", interrupted)
    with pytest.raises(KeyboardInterrupt), staging(tmp_path / "out"):
        pass
    assert os.listdir(tmp_path) == []


def test_a_result_that_cannot_be_flushed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the folder that contains it, which may be `.`."""
    monkeypatch.chdir(tmp_path)
    Path("new").write_text("new")
    monkeypatch.setattr(files, "sync_file", failing(errno.EIO))
    with pytest.raises(OSError, match="after it was written: 'out'"):
        publish(Path("new"), Path("out"))
    assert Path("out").read_text() == "new"


def test_without_locks_nothing_is_removed_and_the_older_result_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "try_lock", lambda *_: None)
    left = tmp_path / f"out.{1:016x}{TEMPORARY}"
    folder(left, "half", "new", "lock")
    folder(left / "old", "old")
    recover(tmp_path / "out")
    assert (tmp_path / "out" / "a").read_text() == "old"
    assert (left / "new").exists()


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(RuntimeError), replacing(path) as file:
        file.write(b"half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("code", [errno.EIO, errno.EFBIG, errno.ENOSPC])
def test_errors_name_the_file(tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", failing(code))
        for act in (sync_file, sync_folder):
            with pytest.raises(OSError, match=tmp_path.name) as caught:
                act(tmp_path)
            assert caught.value.errno == code
        with pytest.raises(OSError, match=str(path)), replacing(path):
            pass
    with path.open("wb") as file, monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", failing(code))
        with pytest.raises(OSError, match=str(path)):
            reserve(file.fileno(), 1, path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    with pytest.raises(OSError, match=str(path)) as caught, replacing(path) as file:
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, file.fileno())
        os.close(full)
        file.write(b"x" * 100_000)
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == []


def test_room_is_reserved_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    with path.open("wb") as file:
        reserve(file.fileno(), 1000, path)
        assert path.stat().st_size == 1000

        def fail(code: int) -> None:
            monkeypatch.setattr(os, "posix_fallocate", failing(code))

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
