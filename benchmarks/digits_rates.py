"""Peak rates and windows for the demo, chosen on validation images: cosine, landing and averages.

    python benchmarks/digits_rates.py --out results/NAME      # a few minutes on two cores

Trains the digits' recipe without 30 % of its training images, which are evaluated instead; the test
images are not used. Every schedule gets the same peak rates. A cosine run is trained at each
budget, a landing (a decay over the last 20 %) branches off the constant-rate run at each budget,
and averages of the constant-rate run are evaluated when it passes the budgets.
"""

import argparse
import dataclasses
import statistics
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from record import Log

from lawa_lab.recipes.budgets import plan_budgets
from lawa_lab.recipes.catalog.digits import DigitsConfig
from lawa_lab.recipes.loop import train
from lawa_lab.recipes.run_folder import RunPlan
from lawa_lab.recipes.task import Worker
from torch_lawa.metrics import Row, read_metrics

BUDGETS = (6, 12, 24, 48)
RATES = (0.1, 0.2, 0.4, 0.8)
SEEDS = (10, 11, 12)  # not those of the demo
HORIZONS = (0.25, 0.33, 0.5)
K = 16
IMAGES: dict[str, dict[str, Any]] = {
    "noisy": {"max_shift": 0},  # the demo's
    "augmented": {},  # the recipe's: noise and random shifts
    "plain": {"max_shift": 0, "noise": 0.0},
}
BASE = DigitsConfig(
    validation_fraction=0.3, batch_norm=("re-estimated",), evaluate_every=6, ks=(K,), horizon=0.25
)
RIVALS = ("growing-ema:0.25",)


def configs(rate: float, images: str, weight_decay: float) -> Iterator[DigitsConfig]:
    """The two plans of one peak rate: cosine runs, and a constant-rate run with its landings."""
    base = dataclasses.replace(BASE, weight_decay=weight_decay, **IMAGES[images])
    yield dataclasses.replace(base, learning_rate=rate, evaluate_every=max(BUDGETS))
    methods = (*(f"horizon:{share}:{K}" for share in HORIZONS if share != BASE.horizon), *RIVALS)
    yield dataclasses.replace(
        base, learning_rate=rate, schedule="constant", land=0.2, methods=methods
    )


def rows_of(rate: float, seed: int, images: str, weight_decay: float) -> list[Row]:
    """All rows at the budgets, and of annealed runs at their ends."""
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        for config in configs(rate, images, weight_decay):
            plan = RunPlan(config=config, seed=seed)
            path = Path(scratch) / config.schedule
            for run in plan_budgets(plan, BUDGETS, path, if_used="refuse"):
                train(run.plan, run.folder, Worker(), branches=run.branches)
        for file in sorted(Path(scratch).rglob("metrics.jsonl")):
            found += [row for row in read_metrics(file) if _kept(row)]
    return found


def _kept(row: Row) -> bool:
    trunk = row["schedule"] == "constant" and not row["land"]
    return row["epoch"] in BUDGETS if trunk else row["epoch"] == row["budget_epochs"]


def name_of(row: Row) -> str:
    """Schedule and average; raw weights with running statistics are those of a usual run."""
    schedule = "landing 0.2" if row["land"] else row["schedule"]
    if row["weights"] == "raw":
        return f"{schedule}, raw{', re-estimated' if row['batch_norm'] else ''}"
    if row["weights"] == "averaged":
        return f"{schedule}, horizon:{BASE.horizon}:{K}"
    return f"{schedule}, {row['weights']}:{row['coefficients']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench-digits-rates"))
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--images", choices=IMAGES, default="noisy")
    parser.add_argument("--weight-decay", type=float, default=BASE.weight_decay)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    log = Log(arguments.out)
    losses: dict[tuple[str, float], dict[float, list[float]]] = {}
    common = (arguments.images, arguments.weight_decay)
    jobs = [(rate, seed, *common) for seed in arguments.seeds for rate in arguments.rates]
    with ProcessPoolExecutor(arguments.processes) as pool:
        found_rows = pool.map(rows_of, *zip(*jobs, strict=True))
        for (rate, *_), rows in zip(jobs, found_rows, strict=True):
            for row in rows:
                kept = {name: row[name] for name in row if not name.endswith("seconds")}
                log.add(kind="row", **kept)
                by_budget = losses.setdefault((name_of(row), rate), {})
                by_budget.setdefault(row["epoch"], []).append(row["valid_loss"])
    for (name, rate), found in sorted(losses.items()):
        means = {f"{budget:g}": statistics.fmean(found[budget]) for budget in sorted(found)}
        overall = statistics.geometric_mean(means.values())  # every budget counts alike
        log.add(kind="mean", name=name, rate=rate, valid_loss=means, overall=overall)
        cells = " ".join(f"{value:.4f}" for value in means.values())
        print(f"{name:32} {rate:<5g} {cells}  {overall:.4f}", flush=True)


if __name__ == "__main__":
    main()
