"""Inputs that are truncated while they are read: an error that names the file, never SIGBUS."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from torch_lawa.checkpoints.storage import byte_sources
from torch_lawa.checkpoints.storage.byte_sources import GuardedSource, ReadSource, find_damaged
from torch_lawa.checkpoints.storage.paths import LocalPath
from torch_lawa.errors import FormatError
from torch_lawa.mean.kernels_native import native_library
from torch_lawa.offline import average, sweep
from torch_lawa.offline.average import average_checkpoints
from torch_lawa.offline.inspect import comparison
from torch_lawa.offline.inspect.comparison import compare_checkpoints
from torch_lawa.offline.options import AverageOptions
from torch_lawa.offline.sweep import sweep_checkpoints

needs_guard = pytest.mark.skipif(native_library() is None, reason="the kernels were not built")
ROUTES = [pytest.param("guarded", marks=needs_guard), "read", "read without preadv"]


@pytest.fixture(params=ROUTES)
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "guarded":
        monkeypatch.setattr(byte_sources, "native_library", lambda: None)
    if request.param == "read without preadv":
        monkeypatch.delattr(os, "preadv")
    return str(request.param)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    for step in 1, 2:
        tensors = {
            "count": np.full(50_000, step, np.int64),
            "running_mean": np.full(50_000, step, np.float32),
            "w": np.full(300_000, step, np.float32),
        }
        save_file(tensors, folder / f"step-{step}.safetensors")
    return folder


def truncating(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, path: Path) -> None:
    """Have `path` truncated when it is open, before `module.name` is called."""
    work = getattr(module, name)

    def worked(*args: Any, **how: Any) -> Any:
        os.truncate(path, 5000)
        return work(*args, **how)

    monkeypatch.setattr(module, name, worked)


ACTS: dict[str, tuple[Any, str, Callable[[Path, Path], object]]] = {
    "average": (average, "average_spans", lambda run, out: average_checkpoints(run, out, last=2)),
    "average as bfloat16": (
        average,
        "average_spans",
        lambda run, out: average_checkpoints(
            run, out, last=2, options=AverageOptions(dtype="bf16")
        ),
    ),
    "hash": (
        average,
        "in_threads",
        lambda run, out: average_checkpoints(run, out, last=2, digests=True, threads=1),
    ),
    "sweep": (
        sweep,
        "in_threads",
        lambda run, out: sweep_checkpoints(run, [1, 2], output=out),
    ),
    "compare": (
        comparison,
        "_run",
        lambda run, _: compare_checkpoints(run / "step-1.safetensors", run / "step-2.safetensors"),
    ),
}


@pytest.mark.parametrize("act", ACTS)
def test_a_truncated_input_is_an_error(
    act: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    module, name, start = ACTS[act]
    truncating(monkeypatch, module, name, run / "step-2.safetensors")
    out = tmp_path / ("out" if act == "sweep" else "out.safetensors")
    with pytest.raises(FormatError, match=r"step-2.safetensors: was truncated"):
        start(run, out)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.parent != run]


@pytest.mark.parametrize("size", [17_000_000, 39_999_990])
def test_a_side_file_that_is_truncated_while_it_is_copied(
    size: int, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    """Also within its last page, of which a mapping only shows zeros."""
    folders = []
    for step in 1, 2:
        folders.append(tmp_path / f"checkpoint-{step}")
        folders[-1].mkdir()
        (run / f"step-{step}.safetensors").rename(folders[-1] / "model.safetensors")
    victim = folders[-1] / "vocab.txt"
    victim.write_bytes(b"x" * 40_000_000)
    for kind in (GuardedSource, ReadSource):
        view = kind.view

        def viewed(self: Any, begin: int, end: int, view: Any = view) -> Any:
            if end - begin >= 5_000_000:
                os.truncate(victim, size)
            return view(self, begin, end)

        monkeypatch.setattr(kind, "view", viewed)
    with pytest.raises(FormatError, match=r"vocab.txt: was (truncated|written to) while"):
        average_checkpoints(folders, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_view_of_a_truncated_file(tmp_path: Path, route: str) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(bytes(range(1, 201)) * 100)
    source = LocalPath(tmp_path).child("bytes").open()
    assert isinstance(source, GuardedSource if route == "guarded" else ReadSource)
    assert source.size == 20_000
    assert source.view(195, 205).tolist() == [196, 197, 198, 199, 200, 1, 2, 3, 4, 5]
    assert find_damaged([path]) == []
    os.truncate(path, 100)
    if route != "guarded":
        with pytest.raises(FormatError, match="truncated while it was read"):
            source.view(50, 150)
    else:
        assert not source.view(10_000, 20_000).any()
        assert find_damaged([path]) == [path]
        assert find_damaged([tmp_path / "other"]) == []
    source.close()
    assert find_damaged([path]) == []


@needs_guard
def test_views_outlive_their_source_and_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(bytes(10_000) + b"end")
    source = LocalPath(path).open()
    view = source.view(9_999, 10_003)
    source.close()
    del source
    assert view.tobytes() == b"\0end"
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


_ELSEWHERE = """
import mmap, os, sys
from torch_lawa.checkpoints.storage.paths import LocalPath
path = sys.argv[1]
ours = LocalPath(path).open()
with open(path, "rb") as file:
    theirs = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
os.truncate(path, 10)
print(ours.view(9_000, 9_001)[0], flush=True)
print(theirs[9_000])
"""


@needs_guard
@pytest.mark.parametrize("options", [[], ["-X", "faulthandler"]])
def test_other_mappings_are_not_guarded(tmp_path: Path, options: list[str]) -> None:
    """The handler that was there before is called, or the process ends as it always did."""
    path = tmp_path / "bytes"
    path.write_bytes(b"x" * 10_000)
    done = subprocess.run(
        [sys.executable, *options, "-c", _ELSEWHERE, path],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == -signal.SIGBUS
    assert done.stdout.split() == ["0"]
    assert ("Bus error" in done.stderr) == bool(options)


def test_errors_while_reading_name_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(bytes(100))
    source = ReadSource(path)

    def failing(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    def out_of_memory(*_: Any, **__: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(OSError, match="bytes"):
        patch.setattr(source, "_read_into", failing)
        source.view(0, 9)
    monkeypatch.setattr(byte_sources.np, "empty", out_of_memory)
    with pytest.raises(OSError, match=r"Cannot allocate memory.*bytes"):
        source.view(0, 9)
