"""`lawa` in one process or on several ranks, as torchrun would start them but at once.

Ranks are forked from a server that has imported PyTorch. A hook is Python code that a rank runs
first: it kills or stops the rank at a chosen moment.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from support.ranks import FORKING, free_port

_STARTED: "list[Rank]" = []

# At this moment of its work a rank sends itself a signal.
_AT = """
import importlib, os, signal, time
owner = importlib.import_module({module!r})
*path, name = {path!r}.split(".")
for part in path:
    owner = getattr(owner, part)
real = getattr(owner, name)
def hooked(*args, **kwargs):
    os.kill(os.getpid(), signal.{signal})
    time.sleep(0.5)  # of several threads this one may be the last to notice
    return real(*args, **kwargs)
setattr(owner, name, hooked)
"""


def at(target: str, signal_name: str) -> str:
    """The hook that sends a signal when the function `module:path` is called."""
    module, _, path = target.partition(":")
    return _AT.format(module=module, path=path, signal=signal_name)


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Rank:
    """A process that was started."""

    process: ForkServerProcess
    output: Path
    store: object  # lives as long as the ranks

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)


def start(
    words: list[object],
    size: int,
    *,
    folder: Path,
    timeout: float = 60.0,
    hooks: Mapping[int, str] | None = None,
    ranks: list[int] | None = None,
    rank_0_hosts: bool = False,
) -> list[Rank]:
    """Start ranks 0 to `size` - 1, or only those given; torchrun, or rank 0, hosts the store."""
    store = None
    if not rank_0_hosts:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environ = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port() if store is None else store.port),
        "TORCHELASTIC_USE_AGENT_STORE": str(store is not None),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "LAWA_RANK_TIMEOUT": str(timeout),
        "SOURCE_DATE_EPOCH": "1700000000",
    }
    started = []
    for rank in range(size) if ranks is None else ranks:
        output = Path(tempfile.mkdtemp())
        hook = (hooks or {}).get(rank, "")
        process = FORKING.Process(
            target=_run,
            args=(environ | {"RANK": str(rank)}, str(folder), str(output), hook, words),
        )
        process.start()
        started.append(Rank(process, output, store))
    _STARTED.extend(started)
    return started


def _run(environ: dict[str, str], folder: str, output: str, hook: str, words: list[object]) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{output}/{name}", os.O_WRONLY | os.O_CREAT), number)
    os.chdir(folder)
    os.environ.update(environ)
    exec(hook, {})
    from torch_lawa.cli.main import main

    main([*map(str, words)])


def end_all() -> None:
    """After a test that failed some may be left, even stopped."""
    while _STARTED:
        process = _STARTED.pop().process
        if process.is_alive():
            process.kill()
        process.join()


def finish(started: list[Rank]) -> list[Ended]:
    """How all of them ended."""
    ended = []
    for rank in started:
        rank.process.join(60)
        assert rank.process.exitcode is not None, "still running"
        texts = [(rank.output / name).read_text() for name in ("stdout", "stderr")]
        ended.append(Ended(rank.process.exitcode, *texts))
    return ended


def environment(**changes: str) -> dict[str, str]:
    """Without what a torchrun around the tests might have set; dates are always the same."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return {**kept, "SOURCE_DATE_EPOCH": "1700000000", **changes}


def one_process(words: list[object], folder: Path) -> Ended:
    """The same without torchrun."""
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
