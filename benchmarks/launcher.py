"""Runs of `lawa train` by name: one after the other, or several at a time in their own processes.

A benchmark that has named runs gives a function that plans the run of a name; this module trains
it, prints a line per evaluation, marks it as finished and skips it next time. `--launch N` starts
the script again for every run, N at a time under MPS. On a machine where a command may take 10
minutes, start that in a session of its own:

    LAWA_COMMIT=... PYTHONPATH=src setsid nohup python3 benchmarks/frontier.py decoder RUN... \\
        --launch 8 --minutes 26 --data data --out /tmp/frontier > /tmp/log.txt 2>&1 < /dev/null &
"""

import argparse
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lawa_lab.recipes.budgets import BudgetedRun
from lawa_lab.recipes.loop import TrainingCallback, train
from lawa_lab.recipes.run_folder import RunPlan
from lawa_lab.recipes.runtime import choose_worker
from torch_lawa.metrics import Row


class Lines(TrainingCallback):
    """One line per evaluation."""

    def __init__(self, name: str) -> None:
        self._name, self._branch = name, ""

    def on_branch(self, plan: RunPlan) -> None:
        self._branch = f" {plan.config.run_name}, {plan.config.epochs:g} epochs:"

    def on_trunk(self) -> None:
        self._branch = ""

    def on_rows(self, rows: list[Row]) -> None:
        values = [
            f"{row['weights']}:{row['k'] or row['coefficients'] or ''} {value:.4f}"
            for row in rows
            for name, value in row.items()
            if name in ("valid_loss", "test_accuracy", "valid_accuracy")
        ]
        step, seconds = rows[0]["step"], rows[0]["train_seconds"]
        print(f"{self._name}:{self._branch} {step} ({seconds:.0f} s)", *values, flush=True)


def add_options(parser: argparse.ArgumentParser, *, out: str) -> None:
    """The names of the runs, and how they are started."""
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--launch", type=int, metavar="N", help="N processes at a time")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start none after these")
    parser.add_argument("--warm", type=float, default=0, help="seconds the first compiles alone")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on made-up data, on CPU")


def run_all(
    arguments: argparse.Namespace, plan: Callable[[str], BudgetedRun], words: Sequence[str]
) -> None:
    """Train the named runs that are not finished; `words` are the script's other arguments."""
    left = [name for name in arguments.runs if not (arguments.out / name / "finished").exists()]
    runs = [plan(name) for name in left]  # all of them first: a wrong name fails at once
    if arguments.launch:
        lost = launch(left, arguments, words)
        sys.exit(f"not complete: {', '.join(lost)}" if lost else 0)
    for run in runs:
        run_one(run)


def run_one(run: BudgetedRun) -> None:
    """Train a run and its branches; mark it as finished."""
    begin = time.perf_counter()
    for part in run.parts:
        part.folder.clear()
    name = run.folder.path.name
    worker = choose_worker("cpu" if run.plan.smoke else None)
    train(
        run.plan, run.folder, worker, save_minutes=1e6, branches=run.branches, callback=Lines(name)
    )
    for part in run.parts:  # large, and not needed: what is left are rows, which a record can hold
        part.folder.checkpoint.unlink(missing_ok=True)
        part.folder.averaged.unlink(missing_ok=True)
    (run.folder.path / "finished").write_text(f"{time.perf_counter() - begin:.1f} s\n")


def launch(names: list[str], arguments: argparse.Namespace, words: Sequence[str]) -> list[str]:
    """Every run in a process of its own, some at a time; returns those that did not complete."""
    out, begin = arguments.out, time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begin:6.0f} s] {text}", flush=True)

    out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # and with it what it started
    mps = None if arguments.smoke else shutil.which("nvidia-cuda-mps-control")
    if mps:  # shares of the GPU are not set: they gave NaN
        say(f"MPS: {subprocess.run([mps, '-d']).returncode} (0: started; else it was running)")
    script = [sys.executable, sys.argv[0], *words, "--out", str(out)]
    script += ["--data", str(arguments.data)] + ["--smoke"] * arguments.smoke
    environment = {"OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "4", **os.environ}
    running, lost = dict[str, "subprocess.Popen[bytes]"](), list[str]()
    pending = list(names)
    try:
        while pending or running:
            for name in [name for name, process in running.items() if process.poll() is not None]:
                code = running.pop(name).returncode
                say(f"{name} ended with {code}")
                lost += [name] if code else []
            late = time.monotonic() - begin > 60 * arguments.minutes
            while pending and not late and len(running) < arguments.launch:
                name = pending.pop(0)
                with (out / f"{name}.txt").open("ab") as log:
                    running[name] = subprocess.Popen(
                        [*script, "--", name], stdout=log, stderr=log, env=environment
                    )
                say(f"{name} started")
                if arguments.warm and len(running) == 1 and name == names[0]:
                    time.sleep(arguments.warm)
            if late and not running:
                break
            time.sleep(0.5)
    finally:
        for process in running.values():
            process.terminate()
    return lost + pending
