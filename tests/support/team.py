"""Several processes of `lawa average`, as torchrun would start them but without its start-up time.

A hook is Python that a rank runs first: it kills or stops that rank at a moment of choice.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

# They begin together, however long a busy machine takes to start each: patience is short in tests.
_MAIN = """
import os, sys, tempfile, time
from torch_lawa.cli import average
from torch_lawa.cli.main import main
from torch_lawa.offline import following, leading
tempfile.mkstemp(dir=sys.argv[1])
while len(os.listdir(sys.argv[1])) < int(sys.argv[2]):
    time.sleep(0.01)
main(sys.argv[3:])
"""
_STARTED: "list[subprocess.Popen[str]]" = []

# At this moment of its work a rank sends itself a signal.
AT = """
import os, signal, time
from torch_lawa.offline import {module} as module
owner = module{owner}
real = owner.{name}
def hooked(*args, **kwargs):
    os.kill(os.getpid(), signal.{signal})
    time.sleep(0.5)  # of several threads this one may be the last to notice
    return real(*args, **kwargs)
owner.{name} = hooked
"""


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int
    said: str
    complained: str


def environment(**changes: str) -> dict[str, str]:
    """Without what a torchrun around the tests might have set; dates are always the same."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return {**kept, "SOURCE_DATE_EPOCH": "1700000000", **changes}


def start(
    words: list[object],
    size: int,
    *,
    folder: Path,
    patience: float = 60.0,
    hooks: Mapping[int, str] | None = None,
    ranks: list[int] | None = None,
) -> "list[subprocess.Popen[str]]":
    """Start ranks 0 to `size` - 1, or only those given."""
    ranks = list(range(size)) if ranks is None else ranks
    argv = [tempfile.mkdtemp(), str(len(ranks)), *map(str, words)]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", (hooks or {}).get(rank, "") + _MAIN, *argv],
            cwd=folder,
            env=environment(
                RANK=str(rank),
                WORLD_SIZE=str(size),
                LOCAL_WORLD_SIZE=str(size),
                LAWA_TEAM_TIMEOUT=str(patience),
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ranks
    ]
    _STARTED.extend(started)
    return started


def end_all() -> None:
    """After a test that failed there may be some left, even standing still."""
    while _STARTED:
        process = _STARTED.pop()
        if process.poll() is None:
            process.kill()
            process.communicate()


def finish(processes: "list[subprocess.Popen[str]]") -> list[Ended]:
    """How all of them ended."""
    ended = []
    for process in processes:
        said, complained = process.communicate(timeout=60)
        ended.append(Ended(process.returncode, said, complained))
    return ended


def alone(words: list[object], folder: Path) -> Ended:
    """The same with one process."""
    done = subprocess.run(
        [sys.executable, "-m", "torch_lawa", *map(str, words)],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def contents(path: Path) -> dict[str, bytes]:
    """Every byte of a file or folder."""
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return {str(p.relative_to(path)): p.read_bytes() for p in files}


def make_run(folder: Path, steps: int = 3) -> Path:
    """Checkpoints of every kind of tensor: one that is most of the model, many that are small."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(1)
    for step in range(100, 100 * steps + 100, 100):
        state = {
            "embed": torch.randn(700, 511, generator=generator),
            "half": torch.randn(99_999, generator=generator).half(),
            "brain": torch.randn(150_001, generator=generator).bfloat16(),
            "double": torch.randn(20_011, generator=generator, dtype=torch.float64),
            "complex": torch.randn(10_003, generator=generator, dtype=torch.complex64),
            "eight": torch.randn(70_001, generator=generator).to(torch.float8_e4m3fn),
            "ids": torch.randint(0, 1000, (30_001,), generator=generator),
            "mask": torch.rand(90_001, generator=generator) > 0.5,
            "nothing": torch.empty(0),
            "scalar": torch.tensor(float(step)),
            "bn.running_mean": torch.randn(17, generator=generator),
            "bn.num_batches_tracked": torch.tensor(step),
        }
        save_file(state, folder / f"step_{step}.safetensors", metadata={"head": "embed"})
    return folder
