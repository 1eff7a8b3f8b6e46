"""The paper's experiments on one GPU, several runs at a time.

    python benchmarks/paper.py 'cifar100-*' --data data --out runs/paper     # matching runs
    python benchmarks/paper.py --list

Each run is `lawa train` in its own folder, with its output beside it; an existing run is resumed.
Two to five ResNet runs share a large GPU at little cost, because one alone leaves it idle between
kernels. Ctrl-C stops all runs, and each saves a checkpoint. `--keep FOLDER` copies what belongs in
a record: configurations and metrics.
"""

import argparse
import fnmatch
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

CIFAR = ["cifar100-resnet34", "--variants-every", "10"]
TINY = [
    "imagenet-resnet50", "--image-size", "64", "--batch-norm-batches", "10",
    "--coefficients", "uniform,exponential:0.9", "--batch-norm", "re-estimated,copied",
    "--variants-every", "5",
]  # fmt: skip
# A substitute: a fifth of WikiText-103's text in short sequences and small batches, without
# dropout, for minutes instead of days. With 32 tokens the model left its first plateau before step
# 800, with 64 between 1,600 and 2,000; a run with 128 (and dropout, a lower rate, smaller batches)
# did not within 7,854 steps. The paper's peak rate of 5e-4 is for 43 times as many tokens per step.
ROBERTA = [
    "wikitext103-roberta", "--sequence-length", "64", "--batch-size", "384",
    "--micro-batch-size", "384", "--epochs", "10", "--learning-rate", "3e-4", "--dropout", "0",
    "--warmup-steps", "1000", "--clip-norm", "1", "--nu", "100", "--evaluate-every", "4",
    "--coefficients", "uniform,exponential:0.9", "--variants-every", "5",
]  # fmt: skip

RUNS: dict[str, list[str]] = {
    **{f"cifar100-sgd-{s}": [*CIFAR, "--seed", str(s)] for s in range(3)},
    **{
        f"cifar100-lookahead-{s}": [*CIFAR, "--wrap", "lookahead", "--evaluate-every", "2",
                                    "--variants-every", "5", "--seed", str(s)]
        for s in range(3)
    },
    **{f"tiny-imagenet-sgd-{s}": [*TINY, "--seed", str(s)] for s in range(3)},
    "roberta-decaying-0": [*ROBERTA, "--seed", "0"],
    "roberta-constant-0": [*ROBERTA, "--schedule", "constant", "--seed", "0"],
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="names or patterns of runs")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, default=Path("runs/paper"))
    parser.add_argument("--keep", type=Path, help="copy configurations and metrics to this folder")
    parser.add_argument("--trajectory", help="name of the run that keeps its snapshots")
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    chosen = [n for n in RUNS if any(fnmatch.fnmatch(n, p) for p in arguments.names)]
    if arguments.list or not chosen:
        for name, words in RUNS.items():
            print(f"{name:26} lawa train {' '.join(words)}")
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    started = {
        name: start(name, arguments.data, arguments.out, keep=name == arguments.trajectory)
        for name in chosen
    }
    try:
        wait(started, arguments.out)
    finally:
        for process in started.values():
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        for process in started.values():
            process.wait()
        if arguments.keep is not None:
            for name in started:
                keep(arguments.out / name, arguments.keep / name)
    failed = [name for name, process in started.items() if process.returncode]
    sys.exit(f"not finished: {', '.join(failed)}" if failed else 0)


def start(name: str, data: Path, out: Path, *, keep: bool) -> "subprocess.Popen[bytes]":
    words = [*RUNS[name], "--data", str(data_of(data, name)), "-o", str(out / name), "--resume"]
    words += ["--save-trajectory"] if keep else []
    with (out / f"{name}.txt").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "lawa_lab", "train", *words],
            stdout=log,
            stderr=log,
            env={"OMP_NUM_THREADS": "2", "PYTHONUNBUFFERED": "1", **os.environ},
            start_new_session=True,  # so that main() forwards Ctrl-C once
        )


def data_of(data: Path, name: str) -> Path:
    return data / "tiny-imagenet-50" if name.startswith("tiny-imagenet") else data


def wait(started: "dict[str, subprocess.Popen[bytes]]", out: Path) -> None:
    """Wait until all runs have ended; prints their progress once a minute."""
    said = 0.0
    while any(process.poll() is None for process in started.values()):
        time.sleep(2)
        if time.monotonic() - said > 60:
            said = time.monotonic()
            for name in started:
                lines = (out / f"{name}.txt").read_text().strip().splitlines()
                print(f"{name:26} {lines[-1] if lines else ''}", flush=True)


def keep(run: Path, record: Path) -> None:
    record.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "metrics.jsonl"):
        if (run / name).exists():
            shutil.copy(run / name, record / name)


if __name__ == "__main__":
    main()
