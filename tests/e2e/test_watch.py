"""`lawa watch` beside a trainer that is slow and forgetful, killed again and again."""

import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

K, NUM_STEPS, SHAPE = 3, 16, (200, 50)
WATCH = [sys.executable, "-m", "torch_lawa", "watch"]
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="sends signals")

# It writes straight under the final name, in pieces, and keeps two checkpoints. How fast it may go
# on depends on the watch, so that a busy machine changes nothing but the time this takes.
TRAINER = f"""
import json, sys, time
from pathlib import Path
import numpy as np
from safetensors.numpy import save

run, manifest = Path(sys.argv[1]), Path(sys.argv[2])
run.mkdir()

def taken(step):
    try:
        return max(row["number"] for row in json.loads(manifest.read_text())["snapshots"]) >= step
    except (OSError, ValueError):
        return False

for step in range(1, {NUM_STEPS} + 1):
    values = np.random.default_rng(step).normal(size={SHAPE}).astype(np.float32)
    data = save({{"w": values}})
    with open(run / f"step-{{step}}.safetensors", "wb") as file:
        for begin in range(0, len(data), 8000):
            file.write(data[begin:begin + 8000])
            file.flush()
            time.sleep(0.04)
    old = run / f"step-{{step - 2}}.safetensors"
    deadline = time.monotonic() + 60
    while old.exists() and time.monotonic() < deadline:
        if taken(step - 2):
            old.unlink()
        time.sleep(0.01)
"""


def values(step: int) -> np.ndarray:
    return np.random.default_rng(step).normal(size=SHAPE).astype(np.float32)


def read_average(path: Path) -> tuple[list[int], np.ndarray]:
    """The steps that an average says it is of, and what it holds, by the library of the format."""
    with safe_open(path, "numpy") as file:
        made = json.loads(file.metadata()["torch_lawa"])
        return [row["step"] for row in made["inputs"]], file.get_tensor("w")


@contextmanager
def reading(path: Path) -> Iterator[tuple[set[int], list[str]]]:
    """All the time, from another thread: the newest steps that were seen, and what was wrong."""
    seen: set[int] = set()
    wrong: list[str] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            try:
                steps, found = read_average(path)
            except FileNotFoundError:
                if seen:
                    wrong.append("it was gone")
                time.sleep(0.001)
                continue
            except Exception as error:
                wrong.append(f"not readable: {error!r}")
                continue
            mean = sum(values(s).astype(np.float64) for s in steps) / K
            if found.tobytes() != mean.astype(np.float32).tobytes():
                wrong.append(f"not the mean of {steps}")
            if steps != list(range(steps[-1] - K + 1, steps[-1] + 1)):
                wrong.append(f"the wrong window: {steps}")
            seen.add(steps[-1])
            time.sleep(0.002)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield seen, wrong
    finally:
        done.set()
        thread.join()


def wait_for(condition: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it takes too long"
        assert process.poll() is None, "it ended by itself"
        time.sleep(0.02)


def test_killed_again_and_again(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "averaged.safetensors"
    manifest = tmp_path / "averaged.safetensors.window" / "window.json"
    arguments = [str(run), "--k", str(K), "-o", str(out), "--poll", "0.05", "--settle", "0.1"]
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, str(run), str(manifest)])
    with reading(out) as (seen, wrong):
        for _ in range(4):
            watch = subprocess.Popen([*WATCH, *arguments], stdout=subprocess.PIPE, text=True)
            assert watch.stdout is not None
            watch.stdout.readline()  # it is at work
            time.sleep(random.uniform(0.0, 0.6))
            watch.kill()
            watch.communicate()
        watch = subprocess.Popen([*WATCH, *arguments], stdout=subprocess.PIPE, text=True)
        assert watch.stdout is not None
        watch.stdout.readline()
        wait_for(lambda: trainer.poll() is not None and NUM_STEPS in seen, watch)
        watch.send_signal(signal.SIGTERM)
        said, _ = watch.communicate(timeout=30)
    assert trainer.wait() == 0
    assert watch.returncode == 0
    assert said.splitlines()[-1] == "Stopped."
    assert not wrong, wrong[:3]
    assert len(seen) >= 3
    assert read_average(out)[0] == [14, 15, 16]
    assert {p.name for p in tmp_path.iterdir()} == {"run", out.name, manifest.parent.name}


def save_steps(run: Path, *steps: int) -> None:
    run.mkdir(exist_ok=True)
    for step in steps:
        save_file({"w": values(step)}, run / f"step-{step}.safetensors")


def test_lines_a_second_watcher_and_ctrl_c(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out-{step}.safetensors"
    arguments = [str(run), "--k", "2", "-o", str(out), "--poll", "0.05", "--settle", "0.05"]
    watch = subprocess.Popen([*WATCH, *arguments], stdout=subprocess.PIPE, text=True)
    assert watch.stdout is not None
    assert watch.stdout.readline().startswith(f"waiting for checkpoints: {run}: does not exist yet")
    second = subprocess.run([*WATCH, *arguments], capture_output=True, text=True)
    assert second.returncode == 1
    assert "another `lawa watch`" in second.stderr
    save_steps(run, 100, 200)
    lines = [watch.stdout.readline() for _ in range(3)]
    assert lines[:2] == ["step 100: added (1 of 2)\n", "step 200: added (2 of 2)\n"]
    path = tmp_path / "out-200.safetensors"
    assert lines[2].startswith(
        f"step 200: averaged 2 checkpoints, steps 100 to 200 -> {path} (40 kB in "
    )
    watch.send_signal(signal.SIGINT)
    assert watch.communicate(timeout=30)[0] == "Stopped.\n"
    assert watch.returncode == 0
    assert read_average(path)[0] == [100, 200]


def test_once_for_programs(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "averaged.safetensors"
    save_steps(run, 1, 2, 3)
    arguments = [str(run), "--k", "2", "-o", str(out), "--settle", "0", "--once", "--json"]
    done = subprocess.run([*WATCH, *arguments], capture_output=True, text=True, check=True)
    (line,) = done.stdout.splitlines()
    made = json.loads(line)
    assert made["step"] == 3
    assert [row["step"] for row in made["inputs"]] == [2, 3]
    assert made["output"] == str(out)
    assert done.stderr == "step 2: added (1 of 2)\nstep 3: added (2 of 2)\n"


def test_nobody_reads_any_more(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out-{step}.safetensors"
    save_steps(run, 1, 2)
    arguments = [str(run), "--k", "1", "-o", str(out), "--poll", "0.05", "--settle", "0.05"]
    with subprocess.Popen([*WATCH, *arguments], stdout=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        assert watch.stdout.readline() == "step 2: added (1 of 1)\n"
        watch.stdout.close()
        save_steps(run, 3)
        try:
            assert watch.wait(10) == 1
        finally:
            watch.kill()
    assert read_average(tmp_path / "out-2.safetensors")[0] == [2]
