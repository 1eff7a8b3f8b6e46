"""`lawa average`, stopped at any moment, leaves the old result, the new one, or nothing.

Kills and signals at every file-system call are in `tests/faults/test_file_system.py`. Here a whole
process is stopped, from its start on, with a result that takes a while to write.
"""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

NUM_VALUES = 4_000_000


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    for step in range(4):
        save_file(
            {"w": torch.full((NUM_VALUES,), float(step))}, folder / f"step_{step}.safetensors"
        )
    return folder


def start(run: Path, out: Path, last: int) -> "subprocess.Popen[bytes]":
    words = ["average", str(run), "--last", str(last), "-o", str(out), "--overwrite"]
    return subprocess.Popen(
        [sys.executable, "-m", "torch_lawa", *words, "--threads", "1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def value(out: Path) -> float | None:
    """What the result says, every value of it; None where there is none."""
    if not out.exists():
        return None
    values = load_file(out / "model.safetensors")["w"]
    assert values.shape == (NUM_VALUES,)
    assert values.min() == values.max()
    return values[0].item()


def test_stopped_at_any_moment(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    began = time.perf_counter()
    with start(run, out, 4) as whole:
        assert whole.wait(60) == 0
    seconds = time.perf_counter() - began
    assert value(out) == 1.5
    seen = set()
    for i in range(10):
        before = value(out)
        last = 2 if before == 1.5 else 4
        with start(run, out, last) as process:
            time.sleep(seconds * (i + 1) / 10)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        after = value(out)
        assert after in (before, {2: 2.5, 4: 1.5}[last])
        seen.add((process.returncode, after == before))
        assert process.returncode in (0, 130, -signal.SIGINT), errors
        # Stopped with the chance to tidy, unless it came before the first line of ours ran.
        if process.returncode == 130:
            assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert any(same for _, same in seen)  # some were stopped before they were done
    with start(run, out, 3) as process:
        assert process.wait(60) == 0
    assert value(out) == 2.0
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_terminal_that_closes(tmp_path: Path) -> None:
    """With a bar on it; both the kernel and a shell send their SIGHUP."""
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    values = {f"w{i}": torch.ones(NUM_VALUES) for i in range(12)}
    save_file(values, run / "step_1.safetensors")
    for step in range(2, 10):
        os.link(run / "step_1.safetensors", run / f"step_{step}.safetensors")
    leader, terminal = pty.openpty()
    words = ["average", str(run), "--last", "9", "-o", str(out), "--threads", "1", "--digests"]
    process = subprocess.Popen(
        [sys.executable, "-m", "torch_lawa", *words],
        stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
    )  # fmt: skip
    os.close(terminal)
    assert os.read(leader, 1)  # the bar is there
    while process.poll() is None and not any(".partial" in p.name for p in tmp_path.iterdir()):
        time.sleep(0.01)
    os.close(leader)
    for _ in range(2):
        process.send_signal(signal.SIGHUP)
        time.sleep(0.02)
    process.wait(60)
    assert {p.name for p in tmp_path.iterdir()} <= {"run", "out"}
