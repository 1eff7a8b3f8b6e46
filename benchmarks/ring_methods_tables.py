"""Tables of `ring_methods.py`: settings chosen on validation data, results on test data.

    python benchmarks/ring_methods_tables.py RUNS --budgets 6 12 24 48 --choose 10 11 12

For every method, the setting and the peak rate with the lowest geometric mean of validation losses
over the budgets are chosen from the seeds after `--choose`. The table has their means over the
other seeds, the ratio of each seed's geometric mean to that of the window (the run's own mean of
the k latest snapshots), and what the method cost: the seconds of its updates, and of learning or
choosing before evaluations, relative to the seconds of training.
"""

import argparse
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from torch_lawa.metrics import Row, read_metrics

Setting = tuple[str, str, float]  # of a method: its name, how it is set, and the peak rate


def setting_of(row: Row) -> Setting | None:
    """Which method a row is of; None for raw weights with running statistics."""
    rate, k, rule = row["peak_learning_rate"], row["k"], row["coefficients"] or ""
    if row["schedule"] != "constant" or row["land"]:
        schedule = "landing" if row["land"] else row["schedule"]
        return (f"{schedule}, raw", "", rate) if row["weights"] == "raw" else None
    if row["weights"] == "raw":
        return ("raw", "", rate) if row["batch_norm"] or "test_accuracy" not in row else None
    if row["weights"] == "averaged":
        name = rule.partition(":")[0]
        return ("window", f"k={k}", rate) if name == "uniform" else (f"{name} rule", rule, rate)
    return row["weights"], rule, rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--budgets", type=float, nargs="+", required=True, help="in epochs")
    parser.add_argument("--choose", type=int, nargs="+", required=True, metavar="SEED")
    parser.add_argument("--valid", default="valid_loss")
    parser.add_argument("--test", default="test_loss")
    arguments = parser.parse_args()
    found: Any = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    costs: Any = defaultdict(list)
    files = [file for run in arguments.runs for file in sorted(run.rglob("metrics.jsonl"))]
    for row in (row for file in files for row in read_metrics(file)):
        setting = setting_of(row)
        annealed = row["schedule"] != "constant" or row["land"]
        if setting is None or row["epoch"] not in arguments.budgets:
            continue
        if annealed and row["epoch"] != row["budget_epochs"]:
            continue
        chosen_on = row["seed"] in arguments.choose
        found[setting][chosen_on][row["epoch"]].append(row)
        if not chosen_on and row["weights"] != "raw" and row["epoch"] == max(arguments.budgets):
            costs[setting].append(row["collect_seconds"] / row["train_seconds"])

    def means(setting: Setting, metric: str, *, chosen_on: bool) -> list[float]:
        by_budget = found[setting][chosen_on]
        return [
            statistics.fmean(row[metric] for row in by_budget[budget])
            for budget in arguments.budgets
            if by_budget.get(budget)
        ]

    def by_seed(setting: Setting) -> dict[int, float]:
        """The geometric mean over the budgets, for each seed that did not choose."""
        losses: dict[int, list[float]] = defaultdict(list)
        for row in (row for rows in found[setting][False].values() for row in rows):
            losses[row["seed"]].append(row[arguments.test])
        return {seed: statistics.geometric_mean(own) for seed, own in losses.items()}

    best: dict[str, tuple[float, Setting]] = {}
    for setting in found:
        values = means(setting, arguments.valid, chosen_on=True)
        if len(values) == len(arguments.budgets):
            score = statistics.geometric_mean(values), setting
            best[setting[0]] = min(best.get(setting[0], score), score)
            print("validation", *setting, *(f"{value:.4f}" for value in (*values, score[0])))
    for name, (score, setting) in sorted(best.items(), key=lambda entry: entry[1][0]):
        values = means(setting, arguments.test, chosen_on=False)
        cells = " | ".join(f"{value:.4f}" for value in values)
        overall = f"{statistics.geometric_mean(values):.4f}" if values else ""
        window, own = by_seed(best["window"][1]), by_seed(setting)
        ratios = " ".join(f"{own[seed] / window[seed]:.2f}" for seed in sorted(own))
        cost = f"{1 + statistics.fmean(costs[setting]):.2f}" if costs[setting] else ""
        words = name, f"{setting[1]} {setting[2]:g}", f"{score:.4f}", cells, overall, ratios, cost
        print(f"| {' | '.join(words)} |")


if __name__ == "__main__":
    main()
