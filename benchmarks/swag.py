"""SWAG samples of the window: ensembles of 1 to 30 against the mean, on the digits or CIFAR-100.

    python benchmarks/swag.py --out results/NAME      # the digits: a few minutes on two cores
    python benchmarks/swag.py cifar100 --data data --seeds 0 --out runs/swag    # a GPU
    python benchmarks/swag.py cifar100 --smoke --out /tmp/smoke                 # CPU, seconds

The runs are those of `ring_methods.py`: a constant rate, a ring of 16 snapshots over the last
quarter, training images held out (30 % of the digits, 5,000 of CIFAR-100). BatchNorm statistics are
re-estimated for the raw weights, the mean and every sample alike. The scale is chosen on validation
images; losses and calibration errors are printed for both sets. On CIFAR-100, seeds are trained one
after the other, and each row is written as soon as it is measured.
"""

import argparse
import dataclasses
import statistics
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
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
from lawa_lab.recipes.registry import RECIPES
from lawa_lab.recipes.run_folder import RunPlan
from lawa_lab.recipes.runtime import choose_worker, deterministic
from lawa_lab.recipes.task import Worker
from lawa_lab.recipes.tasks.digits import load_data
from lawa_lab.recipes.tasks.images import ImageTask
from lawa_lab.recipes.trainer import Trainer
from torch_lawa import recalibrate_batch_norm
from torch_lawa.evaluation import evaluating
from torch_lawa.swap import swapped

SCALES = (0.1, 0.25, 0.5, 1.0)
SEEDS = (0, 1, 2)
Row = dict[str, Any]
Sets = dict[str, tuple[Tensor, Tensor]]  # images and labels, by name


@dataclass(frozen=True)
class Ensembles:
    """Which runs are trained, when they are measured, and with how many samples."""

    study: str  # of `ring_methods.py`
    rate: float
    epochs: tuple[int, ...]
    samples: int
    sizes: tuple[int, ...]  # of ensembles, in the rows
    smoke: bool = False

    def plan(self, seed: int, data: Path | None) -> RunPlan:
        """The run of a seed."""
        study = STUDIES[self.study]
        recipe = RECIPES.find(study.recipe)
        settings = {**(recipe.smoke_values if self.smoke else {}), **study.shared}
        settings |= study.smoke if self.smoke else {}
        settings |= {"learning_rate": self.rate, "schedule": "constant", "epochs": max(self.epochs)}
        folder = None if data is None else str(data)
        return RunPlan(config=recipe(**settings), seed=seed, data=folder, smoke=self.smoke)


DIGITS = Ensembles("digits", 0.4, (12, 48), samples=30, sizes=(1, 2, 5, 10, 20, 30))
CIFAR100 = Ensembles("cifar100", 0.1, (30, 60, 100), samples=30, sizes=(1, 3, 10, 30))
CHOSEN = {"digits": DIGITS, "cifar100": CIFAR100}
BRIEF = {
    "digits": dataclasses.replace(DIGITS, epochs=(1, 2), samples=3),
    "cifar100": dataclasses.replace(CIFAR100, epochs=(2, 4), samples=3, smoke=True),
}  # of --smoke


def held_out_sets(trainer: Trainer) -> Sets:
    """The images that nothing is trained on, normalised, on the device."""
    if isinstance(trainer.task, ImageTask):
        pairs = {name: list(batches) for name, batches in trainer.task.evaluated_sets().items()}
        return {
            name: (torch.cat([x for x, _ in found]), torch.cat([y for _, y in found]))
            for name, found in pairs.items()
        }
    assert isinstance(trainer.config, DigitsConfig)
    data = load_data(trainer.config)
    assert data.official is not None
    return {"valid": (data.test_images, data.test_labels), "test": data.official}


def scores_of(trainer: Trainer, sets: Sets, ensembles: Ensembles) -> Iterator[Row]:
    """Rows of raw weights, mean, snapshots and samples, now."""
    model, ring = trainer.model, trainer.averager
    images = torch.cat([each for each, _ in sets.values()])
    labels = {name: label for name, (_, label) in sets.items()}
    sizes = [len(label) for label in labels.values()]

    def predict() -> Tensor:
        with trainer.autocast():
            recalibrate_batch_norm(model, trainer.task.calibration())
            with evaluating(model):
                parts = [trainer.forward(part).float().softmax(1) for part in images.split(1000)]
        return torch.cat(parts)

    def measure(
        kind: str, members: Iterable[AbstractContextManager[None]], **facts: Any
    ) -> Iterator[Row]:
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
                if size in ensembles.sizes or size == len(found):
                    yield {
                        "epoch": trainer.epoch, "seed": trainer.plan.seed, "kind": kind,
                        "images": name, "size": size, **facts, **dataclasses.asdict(scores),
                    }  # fmt: skip

    yield from measure("raw", [swapped(model, {}, lambda: None)])
    yield from measure("mean", [ring.swapped_into(model)])
    n = ring.num_averaged
    alone = (RingWeights(tuple(float(i == j) for j in range(n))) for i in range(n))
    yield from measure(
        "snapshots", (ring.swapped_into(model, n, coefficients=each) for each in alone)
    )
    for scale in SCALES:
        samples = (ring.sampled_into(model, seed=i, scale=scale) for i in range(ensembles.samples))
        yield from measure("samples", samples, scale=scale)


def run(seed: int, ensembles: Ensembles, data: Path | None, worker: Worker) -> Iterator[Row]:
    """Train one seed; scores at the given epochs."""
    plan = ensembles.plan(seed, data)
    with deterministic(plan.num_threads):
        trainer = Trainer(plan, make_task(plan, worker), worker)
        sets = held_out_sets(trainer)
        for batch in trainer.batches():
            trainer.train_step(batch)
            if trainer.averager.schedule.due(trainer.step):
                trainer.collect()
            if trainer.epoch in ensembles.epochs:
                yield from scores_of(trainer, sets, ensembles)


def run_on_cpu(seed: int, ensembles: Ensembles) -> list[Row]:
    """All rows of a seed, for a process of a pool."""
    return list(run(seed, ensembles, None, Worker()))


def all_rows(arguments: argparse.Namespace) -> Iterator[Row]:
    """The rows of all seeds: the digits in several processes, otherwise one after the other."""
    ensembles = (BRIEF if arguments.smoke else CHOSEN)[arguments.study]
    if arguments.epochs is not None:
        ensembles = dataclasses.replace(ensembles, epochs=tuple(arguments.epochs))
    if arguments.study == "digits":
        with ProcessPoolExecutor(arguments.processes) as pool:
            for rows in pool.map(partial(run_on_cpu, ensembles=ensembles), arguments.seeds):
                yield from rows
        return
    for seed in arguments.seeds:
        worker = choose_worker("cpu" if arguments.smoke else None)
        yield from run(seed, ensembles, arguments.data, worker)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("study", nargs="?", choices=sorted(CHOSEN), default="digits")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-swag"))
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of CIFAR-100")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument(
        "--epochs", type=int, nargs="+", help="measure after these; the largest ends the run"
    )
    parser.add_argument("--processes", type=int, default=2, help="for the digits")
    parser.add_argument("--smoke", action="store_true", help="a few steps on CPU")
    arguments = parser.parse_args()
    log, groups = Log(arguments.out), dict[tuple[Any, ...], list[Row]]()
    for row in all_rows(arguments):
        log.add(**row)
        key = row["images"], row["epoch"], row["kind"], row.get("scale", ""), row["size"]
        groups.setdefault(key, []).append(row)
    for key, rows in groups.items():
        names = ("loss", "accuracy", "calibration_error")
        means = [statistics.fmean(row[name] for row in rows) for name in names]
        print(" ".join(f"{word!s:9}" for word in key), *(f"{mean:.4f}" for mean in means))


if __name__ == "__main__":
    main()
