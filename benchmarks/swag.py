"""SWAG samples of the window on the digits: ensembles of 1 to 30 against the mean.

    python benchmarks/swag.py --out results/NAME      # a few minutes on two cores

The runs are those of `ring_methods.py`: a constant rate, a ring of 16 snapshots over the last
quarter, 30 % of the training images held out. BatchNorm statistics are re-estimated for the raw
weights, the mean and every sample alike. The scale is chosen on validation images; losses and
calibration errors are printed for both sets.
"""

import argparse
import dataclasses
import statistics
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from record import Log
from ring_methods import STUDIES
from torch import Tensor

from lawa_lab.methods.ensemble import ensemble_scores
from lawa_lab.methods.ring import RingWeights
from lawa_lab.recipes.catalog.digits import DigitsConfig
from lawa_lab.recipes.loop import make_task
from lawa_lab.recipes.run_folder import RunPlan
from lawa_lab.recipes.runtime import deterministic
from lawa_lab.recipes.task import Worker
from lawa_lab.recipes.tasks.digits import load_data
from lawa_lab.recipes.trainer import Trainer
from torch_lawa import recalibrate_batch_norm
from torch_lawa.evaluation import evaluating
from torch_lawa.swap import swapped

EPOCHS = (12, 48)
RATE = 0.4
SCALES = (0.1, 0.25, 0.5, 1.0)
SAMPLES = 30
SIZES = (1, 2, 5, 10, 20, 30)  # of ensembles, in the rows
SEEDS = (0, 1, 2)
Rows = list[dict[str, Any]]


def scores_of(trainer: Trainer, sets: dict[str, tuple[Tensor, Tensor]]) -> Rows:
    """Rows of raw weights, mean, snapshots and samples, now."""
    model, ring, rows = trainer.model, trainer.averager, Rows()
    images = torch.cat([each for each, _ in sets.values()])
    labels = {name: label for name, (_, label) in sets.items()}
    sizes = [len(label) for label in labels.values()]

    def predict() -> Tensor:
        recalibrate_batch_norm(model, trainer.task.calibration())
        with evaluating(model):
            return model(images).softmax(1)

    def measure(kind: str, members: Iterable[AbstractContextManager[None]], **facts: Any) -> None:
        predictions: list[Tensor] = []
        for member in members:
            with member:
                predictions.append(predict())
        for at, (name, label) in enumerate(labels.items()):
            parts = iter(each.split(sizes)[at] for each in predictions)
            found = ensemble_scores(
                [nullcontext() for _ in predictions], partial(next, parts), label
            )
            for size, scores in enumerate(found, 1):
                if size in SIZES or size == len(found):
                    rows.append(
                        {"kind": kind, "images": name, "size": size, **facts}
                        | dataclasses.asdict(scores)
                    )

    measure("raw", [swapped(model, {}, lambda: None)])
    measure("mean", [ring.swapped_into(model)])
    n = ring.num_averaged
    alone = (RingWeights(tuple(float(i == j) for j in range(n))) for i in range(n))
    measure("snapshots", (ring.swapped_into(model, n, coefficients=each) for each in alone))
    for scale in SCALES:
        samples = (ring.sampled_into(model, seed=i, scale=scale) for i in range(SAMPLES))
        measure("samples", samples, scale=scale)
    return [{"epoch": trainer.epoch, "seed": trainer.plan.seed, **row} for row in rows]


def run(seed: int) -> Rows:
    """Train one seed; scores at the given epochs."""
    settings = {**STUDIES["digits"].shared, "learning_rate": RATE, "schedule": "constant"}
    config = DigitsConfig(**settings, epochs=max(EPOCHS))
    plan, rows = RunPlan(config=config, seed=seed), Rows()
    data = load_data(config)
    assert data.official is not None
    sets = {"valid": (data.test_images, data.test_labels), "test": data.official}
    with deterministic(plan.num_threads):
        trainer = Trainer(plan, make_task(plan, Worker()), Worker())
        for batch in trainer.batches():
            trainer.train_step(batch)
            if trainer.averager.schedule.due(trainer.step):
                trainer.collect()
            if trainer.epoch in EPOCHS:
                rows += scores_of(trainer, sets)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench-swag"))
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    log, groups = Log(arguments.out), dict[tuple[Any, ...], Rows]()
    with ProcessPoolExecutor(arguments.processes) as pool:
        for row in (row for rows in pool.map(run, arguments.seeds) for row in rows):
            log.add(**row)
            key = row["images"], row["epoch"], row["kind"], row.get("scale", ""), row["size"]
            groups.setdefault(key, []).append(row)
    for key, rows in groups.items():
        names = ("loss", "accuracy", "calibration_error")
        means = [statistics.fmean(row[name] for row in rows) for name in names]
        print(" ".join(f"{word!s:9}" for word in key), *(f"{mean:.4f}" for mean in means))


if __name__ == "__main__":
    main()
