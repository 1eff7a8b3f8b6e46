"""The best peak rate of each schedule on the validation text, by the runs of seed 0.

    python benchmarks/frontier_best.py OUT                 # a table
    python benchmarks/frontier_best.py OUT --seeds 1,2     # the names of the runs to repeat

Annealed runs and landings are chosen at each budget, by their raw weights at the end; averages of a
constant-rate run and Schedule-Free by the mean over the budgets, since one run serves all of them.
"""

import argparse
import re
from collections import defaultdict
from pathlib import Path

from torch_lawa.metrics import Row, read_metrics

Table = dict[tuple[str, float], dict[float, float]]  # (what, rate): loss by budget


def read(out: Path, metric: str, seed: int = 0) -> Table:
    """The metric of every kind of run and average at every budget."""
    found: Table = defaultdict(dict)
    folders = [path.parent for path in sorted(out.glob("*/metrics.jsonl"))]
    rows = {folder.name: list(read_metrics(folder / "metrics.jsonl")) for folder in folders}
    budgets = {each[-1]["budget_epochs"] for each in rows.values() if each}
    for name, each in rows.items():
        if not each or each[0]["seed"] != seed or name.startswith("val-"):
            continue
        kind, rate = name.split("-")[0], _rate(name)
        first = each[0]
        annealed = first["schedule"] != "constant" or first["land"] > 0
        wanted = {first["budget_epochs"]} if annealed else budgets
        for row in each:
            budget = next((b for b in wanted if _at(row, b, each)), None)
            if budget is None or metric not in row:
                continue
            what = kind
            if first["land"]:
                what = f"landing {first['land']:g} {name.split('-landing-')[1].split('-', 1)[1]}"
                what = what.rpartition("-")[0]
            if row["weights"] != "raw" or row["batch_norm"]:
                marks = (row["weights"], row["k"], row["coefficients"] or None)
                what += " " + ":".join(str(mark) for mark in marks if mark)
            found[what, rate][budget] = row[metric]
    return found


def _at(row: Row, budget: float, rows: list[Row]) -> bool:
    per_epoch = rows[-1]["step"] / rows[-1]["epoch"]
    return row["step"] == max(1, round(budget * per_epoch))


def _rate(name: str) -> float:
    found = re.match(r"[a-z]+-([\d.]+(?:e-\d+)?)", name)
    assert found is not None, name
    return float(found[1])


def best_runs(table: Table, seeds: list[int]) -> list[str]:
    """The names of the runs that repeat the best of each kind."""
    names = []
    for kind in ("linear", "cosine"):
        rates = {rate: row for (what, rate), row in table.items() if what == kind}
        for budget in sorted({b for row in rates.values() for b in row}):
            rate = min((r for r in rates if budget in rates[r]), key=lambda r: rates[r][budget])
            names.append(f"{kind}-{rate:g}-{budget:g}e")
    trunks = set()
    for what in sorted({what for what, _ in table}):
        if what == "constant averaged:16:uniform" or re.fullmatch(r"landing \S+ \S+", what):
            trunks.add(_best(table, what))
    names += [f"constant-{rate:g}" for rate in sorted(trunks)]
    if any(what.startswith("free") for what, _ in table):
        names.append(f"free-{_best(table, 'free schedule-free'):g}")
    order = sorted(names, key=lambda name: not name.startswith("constant"))
    return [f"{name}-seed-{seed}" for name in order for seed in seeds]


def _best(table: Table, what: str) -> float:
    rates = {rate: row for (each, rate), row in table.items() if each == what}
    return min(rates, key=lambda rate: sum(rates[rate].values()) / len(rates[rate]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=lambda text: [int(s) for s in text.split(",")])
    parser.add_argument("--metric", default="valid_loss")
    parser.add_argument("--seed", type=int, default=0, help="of the table")
    arguments = parser.parse_args()
    table = read(arguments.out, arguments.metric, arguments.seed)
    if arguments.seeds:
        print(*best_runs(table, arguments.seeds))
        return
    for (what, rate), row in sorted(table.items()):
        print(f"{what:<40} {rate:<8g}", *(f"{b:g}: {v:.4f}" for b, v in sorted(row.items())))


if __name__ == "__main__":
    main()
