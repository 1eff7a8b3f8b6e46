"""The frontier on CIFAR-100/ResNet-34: averages of constant-rate runs against annealed runs.

    python benchmarks/frontier.py RUN... --data data --out runs/frontier            # one by one
    python benchmarks/frontier.py [RUN...] --launch 5 --data data --out runs/frontier
    python benchmarks/frontier.py --launch 3 --smoke --out /tmp/smoke               # CPU, seconds

A RUN is `constant-RATE`, `cosine-EPOCHS` or `wsd-EPOCHS` (constant, then a linear decay over the
last 20 %, branched from the constant run of the same seed), optionally followed by `-seed-N`, and
after `val-` it trains on 45,000 images and is evaluated on the other 5,000. `constant-0.1` trains
200 epochs, `val-` runs 60, other constant runs 100. Training is that of
`lawa train cifar100-resnet34`. `--launch N` runs N processes at a time under MPS, in the order
given (by default ORDER); with `--minutes` it does not start a run that would end too late. On a
machine where a command may take 10 minutes, start it in a session of its own:

    LAWA_COMMIT=... PYTHONPATH=src setsid nohup python3 benchmarks/frontier.py --launch 5 \\
        --minutes 26 --data data --out /tmp/frontier > /tmp/frontier.txt 2>&1 < /dev/null &

Every run has a folder with `config.json`, `metrics.jsonl` (written after each evaluation) and, once
complete, `finished`; complete runs are skipped, others start again. States to branch from are in
OUT/states (170 MB each). `train_seconds` includes `collect_seconds`, the host time spent feeding
all averages together; both are shared seconds where several runs share a GPU.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lawa_lab.recipes.catalog.cifar100 import Cifar100Config
from lawa_lab.recipes.data.cifar import load_cifar100
from lawa_lab.recipes.data.images import Images, smoke_images
from lawa_lab.recipes.models.resnet import resnet34
from lawa_lab.recipes.run_folder import RunFolder, RunPlan
from lawa_lab.recipes.runtime import choose_worker, deterministic
from lawa_lab.recipes.task import Worker
from lawa_lab.recipes.tasks.images import ImageTask
from lawa_lab.recipes.trainer import Trainer
from torch_lawa import Every, LatestWeightAverager, Schedule, recalibrate_batch_norm
from torch_lawa.metrics import MetricsWriter, Row
from torch_lawa.swap import swapped

# The longest first, together; then annealed runs seed by seed, then what is less important.
ORDER = [
    *(f"constant-0.1-seed-{seed}" for seed in range(3)),
    *(f"cosine-{epochs}-seed-{seed}" for seed in range(3) for epochs in (100, 60, 30)),
    *(f"wsd-{epochs}-seed-0" for epochs in (30, 60, 100, 200)),
    "constant-0.2-seed-0", "constant-0.05-seed-0",
    "val-constant-0.1", "val-constant-0.05", "val-constant-0.2",
]  # fmt: skip

DECAY = 0.2  # the share of a stable-decay run in which the rate falls
BUDGETS = (30, 60, 100, 200)
# Rings by (k, horizon), and which of their windows are evaluated: every time, or at WHOLE epochs.
ALWAYS = {(16, 1 / 2): (16, 8, 4), (16, 1 / 3): (16,), (16, 1 / 4): (16,)}
SOMETIMES = {
    (16, 1 / 4): (8, 4), (8, 1 / 2): (8,), (32, 1 / 2): (32,), (32, 1 / 4): (32,),
    (16, 1 / 10): (16,),
}  # fmt: skip
DENSE = (1 / 10, 1 / 5, 1 / 4, 1 / 3, 1 / 2)  # shares of the epochs so far, one snapshot per epoch
WHOLE = (10, 20, 30, 60, 100, 150, 200)
SWA_FROM = (20, 100)
SMOKE = 10  # a smoke run has this many times fewer epochs


@dataclass(frozen=True)
class Run:
    """One training run, read from its name."""

    name: str
    kind: str  # constant, cosine, wsd
    rate: float
    budget: int  # epochs in all
    seed: int
    held_out: bool  # evaluated on 5,000 training images
    smoke: bool

    @classmethod
    def parse(cls, name: str, *, smoke: bool) -> "Run":
        """The run of that name; a smoke run is the same, only shorter."""
        found = re.fullmatch(r"(val-)?(constant|cosine|wsd)-(\d+(?:\.\d+)?)(?:-seed-(\d+))?", name)
        if found is None:
            raise SystemExit(f"{name}: not a run. Use a name such as {', '.join(ORDER[:4])}.")
        held_out, kind, number, seed = found.groups()
        rate, epochs = 0.1, number
        if kind == "constant":
            rate, epochs = float(number), 60 if held_out else 200 if float(number) == 0.1 else 100
        budget = _epochs(int(epochs), smoke)
        return cls(name, kind, rate, budget, int(seed or 0), bool(held_out), smoke)

    @property
    def series(self) -> str:
        """What the runs of all seeds have in common."""
        return self.name.partition("-seed-")[0]

    @property
    def branch(self) -> int:
        """The epoch after which its own training begins."""
        return _branch(self.budget) if self.kind == "wsd" else 0

    @property
    def states(self) -> list[int]:
        """The epochs after which it saves a state to branch from."""
        trunk = self.series == "constant-0.1"
        return [_branch(_epochs(budget, self.smoke)) for budget in BUDGETS] if trunk else []

    def state(self, out: Path, epoch: int) -> Path:
        """Where the constant run of the same seed saves it."""
        return out / "states" / f"constant-0.1-seed-{self.seed}-epoch-{epoch}.pt"

    def evaluated(self) -> set[int]:
        """After which epochs: often in anytime runs, near the end in annealed ones."""
        if self.smoke:
            return set(range(2, self.budget + 1))
        last = set(range(self.budget - 4, self.budget + 1))
        if self.kind != "constant":
            return last | set(range(10, self.budget, 10))
        return {*range(5, 101, 5), *range(110, 201, 10), self.budget}

    def config(self, num_batches: int) -> Cifar100Config:
        """The recipe; a linear schedule whose "warm-up" ends at the branch is that decay."""
        config = Cifar100Config(batch_norm_batches=40)
        if self.smoke:
            config = dataclasses.replace(config, **config.smoke_values)
        return dataclasses.replace(
            config,
            epochs=self.budget,
            learning_rate=self.rate,
            schedule="linear" if self.kind == "wsd" else self.kind,  # type: ignore[arg-type]
            warmup_steps=self.branch * num_batches,
            ks=(1,),
            coefficients=("uniform",),
            batch_norm=("re-estimated",),
        )


def _branch(budget: int) -> int:
    return round((1 - DECAY) * budget)


def _epochs(number: int, smoke: bool) -> int:
    return math.ceil(number / SMOKE) if smoke else number


def make_task(run: Run, data: Path, worker: Worker) -> ImageTask:
    """As the recipe makes it, or with 5,000 training images, the same for all seeds, held out."""
    images = smoke_images(10, 32, 160, 64, seed=0) if run.smoke else load_cifar100(data)
    if run.held_out:
        n = len(images.train_images)
        order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
        train, test = order[n // 10 :].sort().values, order[: n // 10].sort().values
        x, y = images.train_images, images.train_labels
        images = Images(x[train], y[train], x[test], y[test], images.num_classes)
    config = run.config(0)
    return ImageTask(
        images=images,
        build=functools.partial(resnet34, images.num_classes, stem="small", width=config.width),
        seed=run.seed,
        worker=worker,
        batch_size=config.batch_size,
        batch_norm_batches=config.batch_norm_batches,
        padding=config.padding,
        prefix="valid" if run.held_out else "test",
    )


@dataclass
class Horizon(Schedule):
    """A snapshot whenever the step has grown by a factor: k of them span the share `horizon`."""

    k: int
    horizon: float
    start: int  # steps left out
    last: int = field(default=0, init=False)

    def due(self, step: int, loss: float | None = None) -> bool:
        ratio = (1.0 - self.horizon) ** (-1.0 / self.k)
        if step <= self.start or step < ratio * self.last:
            return False
        self.last = step
        return True


class Ema:
    """Of the parameters, with torch's arithmetic (`get_ema_multi_avg_fn`) and no host sync.

    With a decay it is updated after each step; with a share f its time constant is f times the
    steps so far and it is updated after every fifth, by as much as five updates would.
    """

    def __init__(self, model: nn.Module, start: int, *, decay: float = 0.0, share: float = 0.0):
        self.decay, self.share = decay, share
        self.values: list[Tensor] = []
        self._parameters: list[Tensor] = list(model.parameters())
        self._start = start

    def follow(self, step: int) -> None:
        every = 5 if self.share else 1
        if step == self._start:
            self.values = [p.detach().clone() for p in self._parameters]
        elif step > self._start and step % every == 0:
            decay = max(0.0, 1.0 - 1.0 / (self.share * step)) if self.share else self.decay
            torch._foreach_lerp_(self.values, self._parameters, 1.0 - decay**every)


Candidate = tuple[dict[str, Any], Callable[[], AbstractContextManager[None]]]


class Averages:
    """All averages of one constant-rate run; they start after its first epoch."""

    def __init__(self, model: nn.Module, num_batches: int, epochs: int) -> None:
        self._model, start = model, num_batches
        options: dict[str, Any] = {"store": "device", "min_snapshots": 1, "_sliding": False}
        self._rings = {
            (k, h): LatestWeightAverager(k, schedule=Horizon(k, h, start), **options)
            for k, h in {**ALWAYS, **SOMETIMES}
        }
        k = max(1, epochs // 2)
        self._dense = LatestWeightAverager(k, schedule=Every(num_batches), **options)
        self._emas = [Ema(model, start, decay=decay) for decay in (0.999, 0.9999)]
        self._emas += [Ema(model, start, share=share) for share in (0.25, 0.1)]
        self._swas: dict[int, AveragedModel] = {}

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """After each step."""
        for averager in (*self._rings.values(), self._dense):
            averager.step(self._model)
        for ema in self._emas:
            ema.follow(step)

    def follow_epoch(self, epoch: int) -> None:
        """After each epoch."""
        for first in SWA_FROM:
            if epoch >= first:
                if first not in self._swas:
                    self._swas[first] = AveragedModel(self._model)
                self._swas[first].update_parameters(self._model)

    def candidates(self, epoch: int, *, whole: bool) -> Iterator[Candidate]:
        """What to evaluate: facts for the row, and a swap."""
        for windows in (ALWAYS, SOMETIMES) if whole else (ALWAYS,):
            for (k, h), ms in windows.items():
                for m in ms:
                    ring = {"ring_k": k, "ring_horizon": h, "horizon": 1 - (1 - h) ** (m / k)}
                    yield self._window(self._rings[k, h], m, {"method": "lawa", **ring})
        for share in DENSE if whole else ():
            m = max(1, round(share * epoch))
            yield self._window(self._dense, m, {"method": "dense", "horizon": share})
        for ema in self._emas if whole else self._emas[2:3]:
            name = "growing-ema" if ema.share else "ema"
            facts = {"method": name, "decay": ema.decay or None, "horizon": ema.share or None}
            yield facts, functools.partial(self._swapped, ema.values)
        for first, swa in self._swas.items() if whole else ():
            values = [p.detach() for p in swa.module.parameters()]
            yield {"method": "swa", "from_epoch": first}, functools.partial(self._swapped, values)

    def _window(self, averager: LatestWeightAverager, m: int, facts: dict[str, Any]) -> Candidate:
        m = min(m, averager.k)
        n = min(m, len(averager))
        facts |= {"k": m, "num_averaged": n, "oldest_step": averager.snapshot_steps[-n]}
        return {**facts, "coefficients": "uniform"}, lambda: averager.swapped_into(self._model, n)

    def _swapped(self, values: list[Tensor]) -> AbstractContextManager[None]:
        tensors = dict(self._model.named_parameters())
        targets: list[Tensor] = list(tensors.values())
        return swapped(self._model, tensors, lambda: torch._foreach_copy_(targets, values))


def measure(
    trainer: Trainer, swap: AbstractContextManager[None], batch_norm: str | None
) -> dict[str, float]:
    """Swap in, re-estimate BatchNorm, evaluate; as `evaluate_side_by_side` does it."""

    def now() -> float:
        if trainer.worker.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    times = [now()]
    with swap:
        times.append(now())
        if batch_norm is not None:
            recalibrate_batch_norm(trainer.model, trainer.task.calibration())
        times.append(now())
        trainer.model.eval()
        values = trainer.task.evaluate(trainer.forward)
        times.append(now())
    times.append(now())
    entering, estimating, evaluating, leaving = (b - a for a, b in itertools.pairwise(times))
    seconds = {"average_seconds": entering + leaving, "batch_norm_seconds": estimating}
    return {**values, **seconds, "evaluate_seconds": evaluating}


@torch.no_grad()
def evaluate(
    run: Run, trainer: Trainer, averages: Averages | None, labels: Row, writer: MetricsWriter
) -> Row:
    """Write the rows of one moment; returns that of the raw weights."""
    epoch = int(trainer.epoch)
    whole = epoch in WHOLE or epoch == run.budget
    raw = {"method": "raw", "k": None, "coefficients": None, "horizon": None}
    nothing: Candidate = raw, lambda: swapped(trainer.model, {}, lambda: None)
    candidates: list[tuple[str, str | None, Candidate]] = [("raw", None, nothing)]
    if averages is not None or epoch == run.budget:
        candidates.append(("raw", "re-estimated", nothing))
    if averages is not None:
        some = averages.candidates(epoch, whole=whole)
        candidates += [("averaged", "re-estimated", candidate) for candidate in some]
    rows = []
    with trainer.autocast():  # swaps clear its cache of casts
        for weights, batch_norm, (facts, swap) in candidates:
            row = {**labels, "weights": weights, **raw, **facts, "batch_norm": batch_norm}
            rows.append({**row, **measure(trainer, swap(), batch_norm)})
            writer.write(rows[-1])
    return rows[0]


def train(run: Run, data: Path, out: Path) -> None:
    """One run, from its beginning or its branch to its end."""
    folder, begin = RunFolder(out / run.name), time.perf_counter()
    worker = choose_worker("cpu" if run.smoke else None)
    with deterministic(1 if run.smoke else None), contextlib.ExitStack() as stack:
        task = make_task(run, data, worker)
        config = run.config(task.num_batches)
        plan = RunPlan(config=config, seed=run.seed, data=str(data), smoke=run.smoke)
        trainer = Trainer(plan, task, worker)
        schedule = "stable-decay" if run.kind == "wsd" else run.kind
        facts = {"run": run.series, "seed": run.seed, "schedule": schedule}
        facts |= {"budget_epochs": run.budget, "branch_epoch": run.branch, "held_out": run.held_out}
        folder.clear()
        folder.write_plan(plan, facts)
        if run.branch:
            path = run.state(out, run.branch)
            state = torch.load(path, map_location=worker.device, weights_only=True)
            trainer.model.load_state_dict(state["model"])
            trainer.optimizer.load_state_dict(state["optimizer"])
            trainer.progress = state["progress"]
        averages = None
        if run.kind == "constant":
            averages = Averages(trainer.model, task.num_batches, run.budget)
        writer = stack.enter_context(MetricsWriter(folder.metrics))
        evaluated, collect_seconds = run.evaluated(), 0.0
        before = trainer.progress
        for batch in trainer.batches():
            trainer.train_step(batch)
            if averages is not None:
                started = time.perf_counter()
                averages.follow(trainer.step)
                collect_seconds += time.perf_counter() - started
            epoch, rest = divmod(trainer.step, task.num_batches)
            if rest:
                continue
            if averages is not None:
                averages.follow_epoch(epoch)
            if epoch in run.states:
                save_state(run.state(out, epoch), trainer)
            if epoch not in evaluated:
                continue
            now = trainer.progress
            labels = {
                "recipe": config.recipe, **facts, "epoch": epoch, "step": trainer.step,
                "learning_rate": trainer.optimizer.param_groups[0]["lr"],
                "device": torch.cuda.get_device_name() if worker.device.type == "cuda" else "cpu",
                "num_devices": 1,
                "train_seconds": now["train_seconds"], "collect_seconds": collect_seconds,
                "train_loss": (now["losses"][0] - before["losses"][0])
                / (now["num_losses"] - before["num_losses"]),
            }  # fmt: skip
            before = now
            row = evaluate(run, trainer, averages, labels, writer)
            values = [f"{k} {v:.4f}" for k, v in row.items() if k.endswith(("_loss", "_accuracy"))]
            print(f"{run.name}: epoch {epoch} of {run.budget},", *values, flush=True)
    (folder.path / "finished").write_text(f"{time.perf_counter() - begin:.1f} s\n")


def save_state(path: Path, trainer: Trainer) -> None:
    """What a branch starts from; whole, or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    model, optimizer = trainer.model.state_dict(), trainer.optimizer.state_dict()
    state = {"progress": trainer.progress, "model": model, "optimizer": optimizer}
    torch.save(state, path.with_suffix(".partial"))
    path.with_suffix(".partial").rename(path)


def launch(runs: list[Run], arguments: argparse.Namespace) -> list[str]:
    """Every run in a process of its own, some at a time; returns those that did not complete."""
    out, begin = arguments.out, time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begin:6.0f} s] {text}", flush=True)

    out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # and with it what it started
    if not arguments.smoke:
        mps = shutil.which(
            "nvidia-cuda-mps-control"
        )  # shares of the GPU are not set: they gave NaN
        code = subprocess.run([mps, "-d"]).returncode if mps else "not installed"
        say(f"MPS: {code} (0: started; another number where it was running already)")
    defaults = {"OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "4"}
    pending, running, lost = list(runs), dict[str, "subprocess.Popen[bytes]"](), list[str]()
    try:
        while pending or running:
            for name in [name for name, process in running.items() if process.poll() is not None]:
                code = running.pop(name).returncode
                say(f"{name} ended with {code}")
                lost += [name] if code else []
            ready = [r for r in pending if not r.branch or r.state(out, r.branch).exists()]
            if not running and not ready:
                break  # branches without a trunk
            while ready and len(running) < arguments.launch:
                run = ready.pop(0)
                pending.remove(run)
                # Runs share the GPU evenly, so one takes as long as all that run beside it.
                needed = (run.budget - run.branch) * arguments.epoch_seconds * arguments.launch + 20
                if time.monotonic() - begin + needed > 60 * arguments.minutes:
                    say(f"{run.name} not started: it would take {needed:.0f} s")
                    lost.append(run.name)
                    continue
                words = [sys.executable, __file__, run.name, "--out", str(out)]
                words += ["--data", str(arguments.data)] + ["--smoke"] * arguments.smoke
                with (out / f"{run.name}.txt").open("ab") as log:
                    running[run.name] = subprocess.Popen(
                        words, stdout=log, stderr=log, env={**defaults, **os.environ}
                    )
                say(f"{run.name} started")
            time.sleep(1)
    finally:
        for process in running.values():
            process.terminate()
    return lost + [run.name for run in pending]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="*", metavar="RUN", help="default with --launch: ORDER")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, default=Path("runs/frontier"))
    parser.add_argument("--launch", type=int, metavar="N", help="N processes at a time")
    parser.add_argument("--minutes", type=float, default=math.inf, help="time that --launch has")
    parser.add_argument("--epoch-seconds", type=float, default=1.3, help="per epoch, for --minutes")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on made-up data, on CPU")
    arguments = parser.parse_args()
    if not arguments.runs and not arguments.launch:
        parser.error("name a RUN, or give --launch N")
    runs = [Run.parse(name, smoke=arguments.smoke) for name in arguments.runs or ORDER]
    left = [run for run in runs if not (arguments.out / run.name / "finished").exists()]
    if arguments.launch:
        lost = launch(left, arguments)
        sys.exit(f"not complete: {', '.join(lost)}" if lost else 0)
    for run in left:
        train(run, arguments.data, arguments.out)


if __name__ == "__main__":
    main()
