"""The window on disk: whole or not there, whatever kills the process."""

import errno
import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.programs import Program

from torch_lawa import DiskStore, LatestWeightAverager
from torch_lawa.checkpoints.storage import atomic
from torch_lawa.errors import ConfigError, FormatError, StoreError
from torch_lawa.mean.kernels_native import native_library
from torch_lawa.stores import disk as disk_module

WRITER = """
import sys, torch
from torch_lawa import DiskStore, LatestWeightAverager
averager = LatestWeightAverager(k=3, store=DiskStore(sys.argv[1]))
start = averager.num_collected
print("ready", flush=True)
for i in range(start, start + 100000):
    averager.collect({"w": torch.full((20000,), float(i)), "n": torch.tensor(i)}, step=i + 1)
    averager.wait()
    print(i, flush=True)
"""


def write(folder: Path, values: range, k: int = 3) -> LatestWeightAverager:
    averager = LatestWeightAverager(k=k, store=DiskStore(folder))
    for value in values:
        averager.collect({"w": torch.full((4,), float(value)), "n": torch.tensor(value)})
    averager.wait()
    return averager


def test_a_process_may_change_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    averager = write(Path("window"), range(2))
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    averager.collect({"w": torch.full((4,), 5.0), "n": torch.tensor(5)})
    assert averager.average(3)["w"].tolist() == [2.0] * 4
    assert not list(elsewhere.iterdir())


def test_a_url_is_no_folder() -> None:
    """It would be a local folder named `s3:`."""
    with pytest.raises(ConfigError, match=r"s3://bucket/window: .* local"):
        DiskStore("s3://bucket/window")


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(4))
def test_killed_at_any_moment_the_window_is_whole(tmp_path: Path, attempt: int) -> None:
    """SIGKILL in the middle of writing: what was confirmed is there, in order, and it goes on."""
    confirmed = -1
    for _ in range(3):
        with Program(WRITER, tmp_path) as process:
            assert process.stdout.readline().strip() == "ready"
            time.sleep(random.uniform(0.0, 0.08))
            process.send_signal(signal.SIGKILL)
            output = process.stdout.read().splitlines()
        confirmed = max([confirmed, *(int(line) for line in output if line)])
        averager = LatestWeightAverager(k=3, store=DiskStore(tmp_path))
        last = averager.num_collected - 1
        assert last >= confirmed
        if last >= 0:
            held = list(range(max(0, last - 2), last + 1))
            assert averager.snapshot_steps == [value + 1 for value in held]
            average = averager.average(k=len(held))
            assert average["w"].unique().tolist() == [sum(held) / len(held)]
            assert average["n"].item() == last
        leftovers = [p.name for p in tmp_path.iterdir() if "partial" in p.name]
        assert not leftovers
        assert len(list(tmp_path.glob("window-*"))) == len(averager)
        del averager


def test_a_later_process_goes_on(tmp_path: Path) -> None:
    del_me = write(tmp_path, range(5))
    del del_me
    averager = LatestWeightAverager(k=3, store=DiskStore(tmp_path))
    assert len(averager) == 3
    assert averager.num_collected == 5
    assert averager.average()["w"].tolist() == [3.0] * 4
    averager.collect({"w": torch.full((4,), 5.0), "n": torch.tensor(5)})
    assert averager.average()["w"].tolist() == [4.0] * 4
    assert averager.snapshot_steps == [4, 5, 6]


def test_another_k_when_reopened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_lawa.stores import disk_files

    del_me = write(tmp_path, range(5), k=4)
    del del_me
    averager = LatestWeightAverager(k=2, store=DiskStore(tmp_path))
    assert averager.average()["w"].tolist() == [3.5] * 4
    with monkeypatch.context() as patch:  # a failed write forgets none of the surplus
        patch.setattr(disk_files, "write_flat", lambda *_: (_ for _ in ()).throw(OSError("full")))
        averager.collect({"w": torch.full((4,), 5.0), "n": torch.tensor(5)})
        with pytest.raises(StoreError, match="full"):
            averager.wait()
    averager.collect({"w": torch.full((4,), 5.0), "n": torch.tensor(5)})
    averager.wait()
    assert averager.average()["w"].tolist() == [4.5] * 4
    assert len(list(tmp_path.glob("window-*"))) == 2


def test_the_folder_stays_bounded_and_readable_by_others(tmp_path: Path) -> None:
    for sliding, most in ((False, 3), (True, 4)):
        folder = tmp_path / str(sliding)
        averager = LatestWeightAverager(k=3, store=DiskStore(folder), _sliding=sliding)
        for value in range(8):
            averager.collect({"w": torch.full((4,), float(value)), "n": torch.tensor(value)})
            averager.wait()
            files = sorted(folder.glob("window-*.safetensors"))
            assert len(files) == min(value + 1, most)
            assert len(list(folder.glob("kept-*"))) == 1
            if averager.ready:
                averager.average()
        newest = load_file(files[-1])  # the safetensors library itself
        assert newest["w"].tolist() == [7.0] * 4
        del averager


def test_two_averagers_on_one_folder_are_refused(tmp_path: Path) -> None:
    averager = write(tmp_path, range(2))
    with pytest.raises(StoreError, match="another averager"):
        LatestWeightAverager(k=3, store=DiskStore(tmp_path))
    assert len(averager) == 2


def test_a_failed_write_is_raised_and_the_window_before_it_is_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch_lawa.stores import disk_files

    averager = write(tmp_path, range(3))

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(disk_files, "write_flat", full)
        averager.collect({"w": torch.full((4,), 9.0), "n": torch.tensor(9)})
        with pytest.raises(StoreError, match=r"No space left on device.*intact"):
            averager.wait()
    assert averager.average()["w"].tolist() == [1.0] * 4
    averager.collect({"w": torch.full((4,), 3.0), "n": torch.tensor(3)})
    assert averager.average()["w"].tolist() == [2.0] * 4


@pytest.mark.parametrize("damage", ["truncate", "remove", "manifest", "swap", "escape"])
def test_damage_is_found_on_opening(tmp_path: Path, damage: str) -> None:
    averager = write(tmp_path, range(3))
    del averager
    victim = sorted(tmp_path.glob("window-*"))[1]
    manifest = tmp_path / "manifest.json"
    if damage == "truncate":
        os.truncate(victim, victim.stat().st_size - 3)
        with pytest.raises(FormatError, match=rf"{victim.name}.*truncated"):
            LatestWeightAverager(k=3, store=DiskStore(tmp_path))
        return
    if damage == "remove":
        victim.unlink()
    elif damage == "manifest":
        manifest.write_text(manifest.read_text()[:-40])
    elif damage == "swap":
        victim.write_bytes(next(tmp_path.glob("kept-*")).read_bytes())
    else:
        text = json.loads(manifest.read_text())
        text["snapshots"][0]["file"] = "../outside.safetensors"
        manifest.write_text(json.dumps(text))
    with pytest.raises(StoreError, match=r"missing|damaged|other tensors"):
        LatestWeightAverager(k=3, store=DiskStore(tmp_path))
    assert manifest.exists()  # nothing was thrown away


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be used for snapshots"):
        LatestWeightAverager(store=DiskStore(tmp_path / "file"))


def test_foreign_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("precious")
    (tmp_path / "notes.partial").write_text("precious")
    write(tmp_path, range(5)).reset()
    assert (tmp_path / "model.safetensors").read_text() == "precious"
    assert (tmp_path / "notes.partial").read_text() == "precious"


def test_a_state_that_cannot_be_written_leaves_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch_lawa.stores import disk_files

    source = LatestWeightAverager(k=3)
    for value in range(10, 14):
        source.collect({"other": torch.full((9,), float(value))})
    averager = write(tmp_path, range(5))
    original, calls = disk_files.write_flat, []

    def full(*args: object, **kwargs: object) -> None:
        calls.append(args)
        if len(calls) > 3:
            raise OSError(28, "No space left on device")
        original(*args, **kwargs)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(disk_files, "write_flat", full)
        with pytest.raises(StoreError, match="No space left on device"):
            averager.load_state_dict(source.state_dict())
    assert averager.average()["w"].tolist() == [3.0] * 4
    assert averager.num_collected == 5
    assert len(list(tmp_path.glob("window-*"))) == 3
    averager.collect({"w": torch.full((4,), 5.0), "n": torch.tensor(5)})
    assert averager.average()["w"].tolist() == [4.0] * 4
    del averager
    gc.collect()  # the error above still refers to it
    again = LatestWeightAverager(k=3, store=DiskStore(tmp_path))
    assert again.average()["w"].tolist() == [4.0] * 4


def test_reloading_a_state_replaces_the_files_in_one_step(tmp_path: Path) -> None:
    source = LatestWeightAverager(k=3)
    for value in range(10, 14):
        source.collect({"w": torch.full((4,), float(value)), "n": torch.tensor(value)})
    averager = write(tmp_path, range(3))
    averager.load_state_dict(source.state_dict())
    assert averager.average()["w"].tolist() == [12.0] * 4
    assert len(list(tmp_path.glob("window-*"))) == 3
    del averager
    again = LatestWeightAverager(k=3, store=DiskStore(tmp_path))
    assert again.average()["w"].tolist() == [12.0] * 4
    assert again.num_collected == 4


FORKING = """
import os, sys, torch
from torch_lawa import DiskStore, LatestWeightAverager

def averager():
    return LatestWeightAverager(k=2, store=DiskStore(sys.argv[1]))

def collect(value):
    owner.collect({"w": torch.full((4,), value)})
    owner.wait()

owner = averager()
collect(1.0)
sleeping, awake = os.pipe()
if os.fork() == 0:  # as the worker of a loader: it has everything open, and works on
    os.close(awake)
    os.read(sleeping, 1)
    os._exit(0)
if (child := os.fork()) == 0:
    try:
        collect(5.0)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
collect(2.0)
del owner
print(averager().average()["w"].tolist())
"""


@pytest.mark.slow
def test_forked_processes_neither_write_nor_keep_the_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKING, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    refused, found = done.stdout.splitlines() or [done.stderr, ""]
    assert refused.startswith("StoreError")
    assert "forked" in refused
    assert found == "[1.5, 1.5, 1.5, 1.5]"


KILLED = """
import os, signal, sys, time, torch
from torch_lawa import DiskStore, LatestWeightAverager

owner = LatestWeightAverager(k=2, store=DiskStore(sys.argv[1]))
for value in 1.0, 2.0:
    owner.collect({"w": torch.full((4,), value)})
owner.wait()
worker = os.fork()
if worker == 0:  # as the worker of a loader, which looks for its parent every few seconds
    os.closerange(0, 3)
    time.sleep(30)
    os._exit(0)
print(worker, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_the_workers_of_a_killed_owner_do_not_keep_the_folder(tmp_path: Path) -> None:
    """A run that is started again at once continues with its window."""
    command = [sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    worker = int(done.stdout)
    try:
        again = LatestWeightAverager(k=2, store=DiskStore(tmp_path))
        assert again.average()["w"].tolist() == [1.5] * 4
        os.kill(worker, 0)  # it is still there
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_store_that_is_passed_on_while_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a notebook: another averager with the same store, right after a snapshot."""
    slow = disk_module.Staging.write

    def write_slowly(*arguments: Any) -> None:
        time.sleep(0.05)
        slow(*arguments)

    monkeypatch.setattr(disk_module.Staging, "write", write_slowly)
    store = DiskStore(tmp_path)
    averager = LatestWeightAverager(k=2, store=store)
    for value in (1.0, 2.0, 4.0):
        averager.collect({"w": torch.full((4,), value)})
    averager = LatestWeightAverager(k=2, store=store)
    assert averager.snapshot_steps == [2, 3]
    assert averager.average()["w"].tolist() == [3.0] * 4
    averager.collect({"w": torch.full((4,), 6.0)})
    assert averager.average()["w"].tolist() == [5.0] * 4


def test_a_store_is_that_of_one_averager(tmp_path: Path) -> None:
    """Two would push each other's snapshots out, and average what the other collected."""
    store, state = DiskStore(tmp_path), {"w": torch.ones(4)}
    first = LatestWeightAverager(k=1, store=store)
    first.collect(state)
    second = LatestWeightAverager(k=1, store=store)  # takes over
    second.collect({"w": torch.zeros(4)})
    with pytest.raises(ConfigError, match="store of its own"):
        first.collect(state)
    with pytest.raises(ConfigError, match="store of its own"):
        first.average()
    assert second.average()["w"].tolist() == [0.0] * 4


def test_a_failed_write_does_not_keep_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    averager = write(tmp_path, range(2))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch_lawa.stores.disk_files.write_flat", full)
    averager.collect({"w": torch.zeros(4), "n": torch.tensor(9)})
    with pytest.raises(StoreError, match="No space left"):
        averager.wait()
    gc.collect()
    gc.disable()
    try:
        del averager
        assert LatestWeightAverager(k=3, store=DiskStore(tmp_path)).snapshot_steps == [1, 2]
    finally:
        gc.enable()


def test_a_manifest_that_is_written_and_not_flushed_has_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    averager, sync_folder = write(tmp_path, range(3)), atomic.sync_folder

    def fail(folder: Path) -> None:
        sync_folder(folder)
        if '"serial": 4' in (tmp_path / "manifest.json").read_text():
            raise OSError(errno.EIO, "Input/output error", str(folder))

    with monkeypatch.context() as patched:
        patched.setattr(atomic, "sync_folder", fail)
        averager.collect({"w": torch.full((4,), 3.0), "n": torch.tensor(3)})
        with pytest.raises(StoreError, match="Input/output"):
            averager.wait()
    assert averager.average()["w"].tolist() == [1.0] * 4
    del averager
    gc.collect()
    again = LatestWeightAverager(k=3, store=DiskStore(tmp_path))
    assert again.average()["w"].tolist() == [2.0] * 4
    assert len(list(tmp_path.glob("window-*"))) == 3


def test_an_interrupted_wait_does_not_forget_the_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next snapshot overwrites the memory that the thread is writing from."""
    from torch_lawa.stores import disk_files

    averager = LatestWeightAverager(k=2, store=DiskStore(tmp_path))
    original, may_write = disk_files.write_flat, threading.Event()

    def slow(*arguments: object) -> None:
        assert may_write.wait(10)
        original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(disk_files, "write_flat", slow)
    averager.collect({"w": torch.full((4,), 2.0)})
    interrupt = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        averager.wait()
    threading.Timer(0.1, may_write.set).start()
    averager.collect({"w": torch.full((4,), 10.0)})
    assert averager.average()["w"].tolist() == [6.0] * 4


def test_a_kept_tensor_may_change_its_shape(tmp_path: Path) -> None:
    averager = LatestWeightAverager(k=2, store=DiskStore(tmp_path))
    for i in range(1, 5):
        averager.collect({"w": torch.full((4,), float(i)), "n": torch.arange(i)})
    averager.wait()
    del averager
    again = LatestWeightAverager(k=2, store=DiskStore(tmp_path))
    assert again.average()["w"].tolist() == [3.5] * 4
    assert again.average()["n"].tolist() == [0, 1, 2, 3]
    again.collect({"w": torch.full((4,), 5.0), "n": torch.arange(2)})
    assert again.average()["n"].tolist() == [0, 1]


def test_rows_of_a_manifest_may_have_kept_tensors_of_other_shapes(tmp_path: Path) -> None:
    """Ranks keep more than one row that can be the newest: see disk_ranks."""
    from torch_lawa.stores.base import NO_NOTES, FlatLayout, Snapshot
    from torch_lawa.stores.disk_manifest import MANIFEST, Manifest, ManifestRow, snapshot_files

    layouts = [FlatLayout.of({"n": torch.zeros(size)}, packed=True) for size in (2, 3)]
    notes = {**NO_NOTES, "num_collected": 1}
    rows = tuple(
        ManifestRow(Snapshot(i, i), 0, *snapshot_files(i), layout, notes)  # type: ignore[arg-type]
        for i, layout in enumerate(layouts)
    )
    manifest = Manifest(serial=1, rows=rows, kept=layouts[-1])
    (tmp_path / MANIFEST).write_text(manifest.text())
    assert [row.kept for row in Manifest.read(tmp_path).rows] == layouts


def test_files_with_similar_names_are_left_alone(tmp_path: Path) -> None:
    """Only files with exactly our names are removed, whatever else the folder holds."""
    theirs = [
        "window-best.safetensors",
        "window-6.safetensors",
        "window-000000012.safetensors",
        "window-00000001.safetensors.bak.partial",
        "kept-layers.safetensors",
        "manifest.json.backup.safetensors",
        "manifest.json.partial",
        "window-best.safetensors.0123456789abcdef.partial",
    ]
    leftovers = [
        "window-00000007.safetensors",
        "kept-00000007.safetensors",
        "window-00000008.safetensors.0123456789abcdef.partial",
        "manifest.json.0123456789abcdef.partial",
    ]
    for name in (*theirs, *leftovers):
        (tmp_path / name).write_text(name)
    (tmp_path / "window-00000009.safetensors").mkdir()
    averager = write(tmp_path, range(5))
    averager.reset()
    del averager
    found = {path.name for path in tmp_path.iterdir()}
    assert found == {*theirs, "window-00000009.safetensors", "lock"}
    for name in theirs:
        assert (tmp_path / name).read_text() == name


@pytest.mark.parametrize("name", ["__metadata__", "\ud800w"])
def test_names_that_cannot_be_read_back_are_not_collected(tmp_path: Path, name: str) -> None:
    averager = LatestWeightAverager(k=2, min_snapshots=1, store=DiskStore(tmp_path))
    for tensor in (torch.ones(2), torch.tensor(1)):  # averaged and kept
        with pytest.raises(FormatError, match="cannot be stored"):
            averager.collect({"w": torch.ones(2), name: tensor})
    averager.collect({"w": torch.ones(2)})
    averager.wait()
    del averager
    again = LatestWeightAverager(k=2, min_snapshots=1, store=DiskStore(tmp_path))
    assert list(again.average()) == ["w"]


TRUNCATED = """
import itertools, os, sys, warnings
from pathlib import Path
import torch
from torch_lawa import DiskStore, LatestWeightAverager, window_mean
from torch_lawa.errors import LawaError
warnings.simplefilter("error")
size, when = int(sys.argv[2]), sys.argv[3]
blocks, flushing = window_mean.mean_blocks, window_mean.warn_if_flushing

def attempt(folder, part, act):
    averager = LatestWeightAverager(k=3, store=DiskStore(folder), _sliding=act == "sliding")

    def collect(value):
        tensors = {"w": torch.full((100_000,), value), "n": torch.full((50_000,), int(value))}
        averager.collect(tensors)
        averager.wait()

    for value in (1.0, 2.0, 3.0):
        collect(value)
    averager.average()
    path = sorted(folder.glob(f"{part}-*"))[-1]
    whole = path.stat().st_size

    def truncating(work):
        def worked(*args):
            os.truncate(path, size % whole)
            return work(*args)
        return worked

    if when == "before":
        os.truncate(path, size % whole)
    else:  # when the files are mapped
        window_mean.mean_blocks = truncating(blocks)
        window_mean.warn_if_flushing = truncating(flushing)
    averager._window._mean._sums.clear()
    try:
        if act == "export":
            averager.save_pretrained(folder / "export")
        elif act == "state":
            averager.state_dict()
        else:
            averager.average()
        said = "nothing"
    except LawaError as error:
        said = str(error)
    assert "truncated" in said, (part, act, said)
    assert not (folder / "export").exists()
    window_mean.mean_blocks, window_mean.warn_if_flushing = blocks, flushing
    for value in (4.0, 5.0, 6.0):
        collect(value)
    found = averager.average()
    assert found["w"].unique().tolist() == [5.0], found
    assert found["n"].unique().tolist() == [6], found

acts = ("average", "sliding", "export", *(("state",) if when == "before" else ()))
for part, act in itertools.product(("window", "kept"), acts):
    attempt(Path(sys.argv[1], f"{part}-{act}"), part, act)
"""


needs_guard = pytest.mark.skipif(native_library() is None, reason="the kernels were not built")


@pytest.mark.parametrize("when", ["before", pytest.param("while", marks=needs_guard)])
@pytest.mark.parametrize("size", [4096, -10])
def test_a_truncated_file_is_an_error(tmp_path: Path, size: int, when: str) -> None:
    """And the run goes on: the file leaves the window like any other."""
    words = [tmp_path, str(size), when]
    done = subprocess.run(
        [sys.executable, "-c", TRUNCATED, *words], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
