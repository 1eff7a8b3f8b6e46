"""A watcher killed before any one of its changes on disk goes on as if nothing had happened."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

# A process without PyTorch that forks: each child is killed a little later than the last.
SCRIPT = """
import itertools, os, shutil, signal, sys
from pathlib import Path
from support.watching import Trainer, Watch, Weights, assert_file, folders_of

CHANGES = {"open", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.chmod",
           "shutil.rmtree", "ctypes.dlsym"}
root, name, goes_back = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "back"
first, apart = int(sys.argv[4]), int(sys.argv[5])
os.fsync = lambda file: None
STEPS = (300, 400) if goes_back else (400, 500)  # written while no watcher is there


def fork(work, kill_at=None):
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code, count = 1, itertools.count()

    def hook(event, args):
        if event in CHANGES and (event != "open" or args[2] & (os.O_WRONLY | os.O_RDWR)):
            if next(count) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    try:
        if kill_at is not None:
            sys.addaudithook(hook)
        work()
        code = 0
    finally:
        os._exit(code)


def write(trainer, step):
    trainer.write(step)
    if not name.endswith(".safetensors"):  # as folders, so that the output is one
        folder = trainer.folder / f"checkpoint-{step}"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text("{}")
        os.replace(trainer.path(step), folder / "model.safetensors")


def watch():
    with Watch(trainer.folder, out) as watch:
        watch.look(4)


def states():
    for expected in (old, new):
        try:
            assert_file(out, expected)
            yield expected
        except (AssertionError, OSError):
            pass


for kill_at in itertools.count(first, apart):
    shutil.rmtree(root, ignore_errors=True)
    trainer, out = Trainer(root / "run"), root / name
    for step in (100, 200, 300):
        write(trainer, step)
    assert fork(watch) == 0
    old = trainer.mean(100, 200, 300)
    for step in STEPS:
        write(trainer, step)
    new = trainer.mean(*((200, 300, 400) if goes_back else (300, 400, 500)))
    code = fork(watch, kill_at)
    assert len(list(states())) == 1, (kill_at, "neither the old average nor the new")
    if code == 0:
        break
    assert code == -signal.SIGKILL, (kill_at, code)
    assert fork(watch) == 0, kill_at
    assert_file(out, new)
    kept = {f"step-{s}" for s in ((200, 300, 400) if goes_back else (300, 400, 500))}
    there = folders_of(Path(f"{out}.window")) - {"lock", "window.json", "made"}
    assert {n.removesuffix(".2") for n in there} == kept, (kill_at, there)
    assert len(there) == 3 and folders_of(root) == {"run", name, f"{name}.window"}, kill_at
assert_file(out, new)
print(kill_at)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
@pytest.mark.parametrize("apart", [3, pytest.param(1, marks=pytest.mark.matrix)])
@pytest.mark.parametrize(("name", "way"), [("averaged", "on"), ("averaged.safetensors", "back")])
def test_killed_before_changes_on_disk(tmp_path: Path, name: str, way: str, apart: int) -> None:
    """Before every change, or before every third, from another one on each time."""
    path = [str(Path(__file__).parents[2]), *sys.path]
    first = random.randrange(apart)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path / "root", name, way, str(first), str(apart)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(path), "PATH": ""},
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20  # so many moments
