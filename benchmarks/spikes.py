"""A run that is made to spike: going back to the mean of snapshots against the last checkpoint.

    python benchmarks/spikes.py --out results/NAME      # minutes on two cores

The digits at a constant rate, 12 epochs of 28 batches. After 7 epochs, either the learning rate is
100 times too high for ten steps, or one batch is NaN. All ways to go on see the same batches and
have the same detector; batches from before a step back are not repeated.

- `nothing`: train on.
- `checkpoint N`: back to weights and momentum of the last checkpoint, saved every N epochs.
- `rescue`: back to the mean of the good snapshots of the averager's window (16 over the last
  quarter of the run), the momentum reset or kept.
- `no spike`: the same run without one.
"""

import argparse
import copy
import dataclasses
import math
import statistics
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from record import Log

from lawa_lab.recipes.catalog.digits import DigitsConfig
from lawa_lab.recipes.runtime import deterministic
from lawa_lab.recipes.task import Worker
from lawa_lab.recipes.tasks.digits import DigitsTask, load_data
from torch_lawa import LatestWeightAverager, SpikeRescue, recalibrate_batch_norm

EPOCHS, PER_EPOCH, RATE = 12, 28, 0.2
SPIKE = 7 * PER_EPOCH  # checkpoints are 1 and 3 epochs old
WAYS = ("no spike", "nothing", "checkpoint 2", "checkpoint 4", "rescue, reset", "rescue, keep")
SPIKES = ("none", "rate", "batch")
SEEDS = (0, 1, 2)


@dataclasses.dataclass(frozen=True)
class Trial:
    """One run: what goes wrong, and how it goes on."""

    spike: str
    way: str
    seed: int


def run(trial: Trial) -> dict[str, Any]:
    """Train; returns when the loss was back at its level and the losses at the end."""
    config = DigitsConfig(max_shift=0, batch_norm_batches=28)
    with deterministic(1):
        task = DigitsTask(config, load_data(config), seed=trial.seed, worker=Worker())
        torch.manual_seed(trial.seed)
        model = task.build_model()
        optimizer = torch.optim.SGD(
            model.parameters(), lr=RATE, momentum=config.momentum, weight_decay=config.weight_decay
        )
        return _train(trial, task, model, optimizer)


def _train(trial: Trial, task: DigitsTask, model: Any, optimizer: Any) -> dict[str, Any]:
    averager = LatestWeightAverager(k=16, horizon=0.25)
    keep = "keep" if trial.way.endswith("keep") else "reset"
    rescue = SpikeRescue(averager, optimizer_state=keep)  # type: ignore[arg-type]
    every = int(trial.way.split()[1]) * PER_EPOCH if trial.way.startswith("checkpoint") else 0
    saved: Any = None
    before, back, num_back = list[float](), None, 0
    step = 0
    for epoch in range(EPOCHS):
        for images, labels in task.batches(epoch):
            wrong = SPIKE <= step < SPIKE + 10
            if wrong and trial.spike == "batch" and step == SPIKE:
                images = images * math.nan
            rate = RATE * 100 if wrong and trial.spike == "rate" else RATE
            optimizer.param_groups[0]["lr"] = rate
            if every and step % every == 0:
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            model.train()
            optimizer.zero_grad()
            loss = task.loss(model, (images, labels))
            loss.backward()  # type: ignore[no-untyped-call]
            step += 1
            if trial.way.startswith("rescue"):
                num_back += rescue(model, optimizer, loss)
            elif every and rescue.check(loss):
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
                optimizer.zero_grad()
                num_back += 1
            optimizer.step()
            averager.step(model)
            near = SPIKE - PER_EPOCH <= step < SPIKE or step >= SPIKE + 10
            if near and step % 7 == 0 and back is None:
                found = _evaluate(task, model)
                if step < SPIKE:
                    before.append(found)
                elif found <= statistics.fmean(before):
                    back = step - SPIKE
    with averager.swapped_into(model):
        averaged = _evaluate(task, model)
    return {
        **dataclasses.asdict(trial),
        "raw": _evaluate(task, model),
        "averaged": averaged,
        "steps_until_back": back,
        "times_back": num_back,
    }


def _evaluate(task: DigitsTask, model: Any) -> float:
    """The test loss with BatchNorm re-estimated; the model's own statistics stay."""
    buffers = copy.deepcopy([*model.buffers()])
    with torch.no_grad():
        if not all(bool(p.isfinite().all()) for p in model.parameters()):
            return math.nan
        recalibrate_batch_norm(model, task.calibration())
        model.eval()
        loss = task.evaluate(model)["test_loss"]
        for buffer, value in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(value)
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench-spikes"))
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    log = Log(arguments.out)
    work = [
        Trial(spike, way, seed)
        for spike in SPIKES
        for way in WAYS
        for seed in SEEDS
        if (spike == "none") == (way == "no spike")
    ]
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with ProcessPoolExecutor(arguments.processes) as pool:
        for trial, row in zip(work, pool.map(run, work), strict=True):
            log.add(kind="row", **{k: None if v != v else v for k, v in row.items()})  # no NaN
            found.setdefault((trial.spike, trial.way), []).append(row)
    for (spike, way), rows in found.items():
        back = [row["steps_until_back"] for row in rows]
        times = [row["times_back"] for row in rows]
        means = [statistics.fmean(row[name] for row in rows) for name in ("raw", "averaged")]
        print(
            f"{spike:6} {way:14} back after {back} steps; went back {times} times; final test "
            f"loss raw {means[0]:.4f}, averaged {means[1]:.4f}"
        )


if __name__ == "__main__":
    main()
