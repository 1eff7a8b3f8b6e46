"""Runs of `lawa train` by name: one after the other, or several at a time in their own processes.

A benchmark that has named runs gives a function that plans the run of a name; this module trains
it, prints a line per evaluation, marks it as finished and skips it next time. `--launch N` starts
the script again for every run, N at a time under MPS. Runs of several scripts are listed in a file:

    # comment
    frontier.py cifar100 constant-0.1-seed-1 --landed 200
    CUDA_MPS_CLIENT_PRIORITY=1 @wikipedia/wiki.train.txt frontier.py decoder cosine-7e-4-1e-seed-1

    python benchmarks/launcher.py JOBS --launch 6 --data data --out runs/jobs

One job per line: variables of its environment, `@` with a file in the data folder that it waits
for, the script, the study, one run, options. Jobs start in this order, those whose file is there
first. Rows and logs are in OUT/SCRIPT-STUDY. Each run keeps what it has written if the launcher is
stopped. On a machine where a command may take 10 minutes, start it in a session of its own:

    LAWA_COMMIT=... PYTHONPATH=src setsid nohup python3 benchmarks/launcher.py JOBS --launch 6 \\
        --minutes 26 --data data --out /tmp/jobs > /tmp/log.txt 2>&1 < /dev/null &
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
from dataclasses import dataclass, field
from pathlib import Path

from lawa_lab.recipes.budgets import BudgetedRun
from lawa_lab.recipes.loop import TrainingCallback, train
from lawa_lab.recipes.run_folder import RunPlan
from lawa_lab.recipes.runtime import choose_worker
from torch_lawa.metrics import Row

HERE = Path(__file__).resolve().parent


class Lines(TrainingCallback):
    """One line per evaluation."""

    def __init__(self, name: str) -> None:
        self._name, self._branch = name, ""

    def on_branch(self, plan: RunPlan) -> None:
        self._branch = f" {plan.run_name}, {plan.config.epochs:g} epochs:"

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
    add_launch_options(parser, out=out)


def add_launch_options(parser: argparse.ArgumentParser, *, out: str) -> None:
    """How runs are started."""
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
        shared = [*words, *_shared_options(arguments, arguments.out), "--"]
        jobs = [
            Job(
                name,
                [sys.executable, sys.argv[0], *shared, name],
                arguments.out / f"{name}.txt",
            )
            for name in left
        ]
        lost = launch(jobs, arguments)
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


@dataclass(frozen=True)
class Job:
    """A process to start."""

    name: str
    command: list[str]
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    needs: Path | None = None  # it starts when this file is there


def launch(jobs: Sequence[Job], arguments: argparse.Namespace) -> list[str]:
    """Every job in a process of its own, some at a time; returns those that did not complete."""
    begin = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begin:6.0f} s] {text}", flush=True)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # and with it what it started
    mps = None if arguments.smoke else shutil.which("nvidia-cuda-mps-control")
    if mps:  # shares of the GPU are not set: they gave NaN
        say(f"MPS: {subprocess.run([mps, '-d']).returncode} (0: started; else it was running)")
    environment = {"OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "4", **os.environ}
    running, lost = dict[str, "subprocess.Popen[bytes]"](), list[str]()
    pending = list(jobs)
    try:
        while pending or running:
            for name in [name for name, process in running.items() if process.poll() is not None]:
                code = running.pop(name).returncode
                say(f"{name} ended with {code}")
                lost += [name] if code else []
            late = time.monotonic() - begin > 60 * arguments.minutes
            for job in list(pending) if not late else ():
                if len(running) == arguments.launch:
                    break
                if job.needs is not None and not job.needs.exists():
                    continue
                pending.remove(job)
                job.log.parent.mkdir(parents=True, exist_ok=True)
                with job.log.open("ab") as log:
                    running[job.name] = subprocess.Popen(
                        job.command, stdout=log, stderr=log, env=environment | job.environment
                    )
                say(f"{job.name} started")
                if arguments.warm and job is jobs[0]:
                    time.sleep(arguments.warm)
            if late and not running:
                break
            time.sleep(0.5)
    finally:
        for process in running.values():
            process.terminate()
    return lost + [job.name for job in pending]


def read_jobs(arguments: argparse.Namespace) -> list[Job]:
    """The jobs of a file, less those that are finished."""
    lines = [line.split("#")[0].split() for line in arguments.jobs.read_text().splitlines()]
    jobs = [_job(words, arguments) for words in lines if words]
    if len({job.name for job in jobs}) < len(jobs):
        raise SystemExit(f"{arguments.jobs}: a job is listed twice")
    return [job for job in jobs if not (job.log.with_suffix("") / "finished").exists()]


def _job(words: list[str], arguments: argparse.Namespace) -> Job:
    line, environment, needs = " ".join(words), dict[str, str](), None
    while words and ("=" in words[0] or words[0].startswith("@")):
        word = words.pop(0)
        if word.startswith("@"):
            needs = arguments.data / word[1:]
        else:
            environment |= [word.split("=", 1)]
    if len(words) < 3 or not (HERE / words[0]).is_file():
        raise SystemExit(f"{arguments.jobs}: {line}: write it as SCRIPT STUDY RUN [OPTION...]")
    script, study, run, *options = words
    out = arguments.out / f"{Path(script).stem}-{study}"
    command = [sys.executable, str(HERE / script), study, *_shared_options(arguments, out)]
    return Job(line, [*command, *options, "--", run], out / f"{run}.txt", environment, needs)


def _shared_options(arguments: argparse.Namespace, out: Path) -> list[str]:
    options = ["--data", str(arguments.data), "--out", str(out)]
    return options + ["--smoke"] * arguments.smoke


def main() -> None:
    """Run the jobs of a file."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("jobs", type=Path)
    add_launch_options(parser, out="runs/jobs")
    arguments = parser.parse_args()
    arguments.launch = arguments.launch or 1
    lost = launch(read_jobs(arguments), arguments)
    sys.exit(f"not complete: {', '.join(lost)}" if lost else 0)


if __name__ == "__main__":
    main()
