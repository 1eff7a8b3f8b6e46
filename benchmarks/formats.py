"""`lawa average` on every format that it reads, beside what the users of the format have today.

Four checkpoints of about 1 GB of float32 weights, one format at a time, the same weights in all of
them but DeepSpeed's, which DeepSpeed trains. Each way is a process of its own in the environment of
the format; both take turns, round by round. Time and memory are measured as in offline.py. Values
are compared with the exact mean of the weights in the checkpoints.

    make .venv-bench/.bench .venv-deepspeed/.deepspeed .venv-jax/.jax
    .venv-bench/bin/python benchmarks/formats.py            # 25 GB of disk
    .venv-bench/bin/python benchmarks/formats.py --quick    # a smoke test of the script itself

Megatron's folders are not written by Megatron: they are PyTorch's own, with the two files beside
them that Megatron adds, and without an optimizer. Everything else is written by the real library.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from offline import OURS, measure, show, version
from offline_data import TINY, check, generate, paths, size
from record import Log

LARGE = {"n_layer": 16, "n_embd": 1024, "vocab_size": 50257, "n_positions": 1024, "n_head": 16}
NUM_CHECKPOINTS = 4
PEER = "peer"
ROOT = Path(__file__).parents[1]
SCRIPT = Path(__file__).with_name("format_peers.py")
PACKAGES = ("torch-lawa", "torch", "numpy", "safetensors", "deepspeed", "orbax-checkpoint", "jax")


@dataclass(frozen=True)
class Kind:
    """A format: the name of a checkpoint and of a result, its environment, and the other way."""

    checkpoint: str
    output: str
    peer: str  # in words
    environment: str = ""  # of the repository; the one that runs this script unless given

    @property
    def python(self) -> str:
        return str(ROOT / self.environment / "bin/python") if self.environment else sys.executable


_CONVERT = "zero_to_fp32.py of each checkpoint, then a torch script that accumulates"
KINDS = {
    "safetensors": Kind("step-{}.safetensors", "mean.safetensors", "load_file, accumulate"),
    "torch": Kind("step-{}.pt", "mean.pt", "torch.load (mmap), accumulate, torch.save"),
    "distributed": Kind("step-{}", "mean", "dcp.load of each, accumulate, dcp.save"),
    "megatron": Kind("iter_000000{}", "iter_0000004", "dcp.load of each, accumulate, dcp.save"),
    "zero2": Kind("global_step{}", "mean.pt", _CONVERT, ".venv-deepspeed"),
    "zero3": Kind("global_step{}", "mean.pt", _CONVERT, ".venv-deepspeed"),
    "orbax": Kind("{}", "9", "Orbax restore, NumPy mean, Orbax save", ".venv-jax"),
}


def peers(kind: str, act: str, *words: object) -> list[str]:
    """A command of format_peers.py."""
    return [KINDS[kind].python, str(SCRIPT), act, kind, *map(str, words)]


def prepare_checkpoints(kind: str, folder: Path, sources: list[Path]) -> list[Path]:
    """Have the checkpoints written; returns the safetensors files with the same weights."""
    command = peers(kind, "write", folder, *sources)
    if KINDS[kind].environment == ".venv-deepspeed":
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
        command[1:1] = torchrun
    _run(command)
    if KINDS[kind].environment != ".venv-deepspeed":
        return sources
    found = []
    for checkpoint in checkpoints(kind, folder):
        found.append(folder.parent / "exact" / f"{checkpoint.name}.safetensors")
        found[-1].parent.mkdir(exist_ok=True)
        _run(peers(kind, "export", checkpoint, found[-1]))
    return found


def checkpoints(kind: str, folder: Path) -> list[Path]:
    return [folder / KINDS[kind].checkpoint.format(i + 1) for i in range(NUM_CHECKPOINTS)]


def files_of(checkpoint: Path) -> list[Path]:
    """The files of a checkpoint that are not empty."""
    found = [checkpoint] if checkpoint.is_file() else sorted(checkpoint.rglob("*"))
    return [path for path in found if path.is_file() and path.stat().st_size]


def command_of(
    kind: str, given: list[Path], variant: str, output: Path, files: list[Path]
) -> list[str]:
    if variant == PEER:
        return peers(kind, "average", output, *given)
    words = [KINDS[kind].python, "-m", "torch_lawa", "average", *map(str, given)]
    return [*words, "-o", str(output), "--json"]


def verify(kind: str, exact: list[Path], variant: str, output: Path) -> dict[str, Any]:
    """How many values of a result are not the exact mean."""
    values = output.with_name("values.safetensors")
    _run(peers(kind, "export", output, values))
    return check(values, exact)


def run(options: argparse.Namespace, data: Path) -> None:
    """Every format that was asked for; writes the raw log and prints a table each."""
    config = TINY if options.quick else LARGE
    kinds = options.only or list(KINDS)
    missing = [k for k in kinds if not Path(KINDS[k].python).exists()]
    if missing:
        raise SystemExit(f"{', '.join(missing)}: make the environments first (see --help)")
    if (need := 25 * size(config, "fp32")) > shutil.disk_usage(data).free:
        raise SystemExit(f"{data} has no room for {need / 1e9:.0f} GB: give another with --data")
    generate(data, config, {"fp32": NUM_CHECKPOINTS})
    sources = paths(data, config, "fp32", NUM_CHECKPOINTS)
    log = Log(options.out)
    log.add(kind="versions", **{name: version(name) for name in PACKAGES})
    log.add(kind="data", **config, bytes=size(config, "fp32"))
    for kind in kinds:
        folder = data / "run"
        exact = prepare_checkpoints(kind, folder, sources)
        given = checkpoints(kind, folder)
        files = [path for checkpoint in given for path in files_of(checkpoint)]
        _run(peers(kind, "versions"), log=log)
        os.sync()
        found = measure(
            log,
            kind,
            [OURS, PEER],
            partial(command_of, kind, given),
            files,
            scratch=data / "output",
            rounds=options.rounds,
            cold=False,
            name=KINDS[kind].output,
            verify=partial(verify, kind, exact),
        )
        num_bytes = sum(path.stat().st_size for path in files) / len(given)
        title = f"{kind}: {len(given)} checkpoints of {num_bytes / 1e9:.3f} GB on disk"
        show(found, f"{title}; peer: {KINDS[kind].peer}; median (least) of {options.rounds}")
        log.add(kind="summary", part=kind, title=title, peer=KINDS[kind].peer, rows=found)
        for name in ("run", "exact", "output"):
            shutil.rmtree(data / name, ignore_errors=True)


def _run(command: list[str], log: Log | None = None) -> None:
    # DeepSpeed compiles an operator at its first start, with the ninja of its environment.
    tools = Path(command[0]).parent
    environment = {
        **os.environ,
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "TORCH_EXTENSIONS_DIR": str(tools.parent / "torch_extensions"),
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    if log is not None:
        log.add(kind="environment", versions=done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/bench-formats"))
    parser.add_argument("--data", type=Path, help="an empty folder with room for the checkpoints")
    parser.add_argument("--rounds", type=int, help="5, or 1 with --quick")
    parser.add_argument("--quick", action="store_true", help="5 M parameters, one round")
    parser.add_argument("--only", nargs="+", default=[], choices=list(KINDS), metavar="FORMAT")
    options = parser.parse_args()
    options.rounds = options.rounds or (1 if options.quick else 5)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or the checkpoints would stay behind
    os.environ |= {"DS_ACCELERATOR": "cpu", "JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore"}
    if options.data is not None:
        options.data.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lawa-bench-", dir=options.data) as folder:
        run(options, Path(folder))


if __name__ == "__main__":
    main()
