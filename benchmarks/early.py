"""Averaging from the very beginning: does any rule beat the raw weights in the first 5 % of a run?

    python benchmarks/early.py --out results/NAME                    # the digits: a few minutes
    python benchmarks/early.py --data TEXT --out results/NAME        # and a small decoder

Runs are trained for the first 5 % of their length only, and evaluated every few steps. The rate is
constant; the decoder warms up in the first 1 %. BatchNorm statistics are re-estimated for raw and
averaged weights alike. A table shows, for every rule, the mean over evaluations and seeds of the
logarithm of its loss relative to that of the raw weights, as a percentage.
"""

import argparse
import itertools
import json
import math
import statistics
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from record import Log

from lawa_lab.recipes.catalog.decoder import DecoderConfig
from lawa_lab.recipes.catalog.digits import DigitsConfig
from lawa_lab.recipes.config import TrainConfig
from lawa_lab.recipes.loop import train
from lawa_lab.recipes.run_folder import RunFolder, RunPlan
from lawa_lab.recipes.task import Worker
from torch_lawa.metrics import Row, read_metrics

SEEDS = (0, 1, 2)
SHARED: dict[str, Any] = {
    "schedule": "constant", "horizon": 0.25, "ks": (16, 8, 4),
    "coefficients": ("uniform", "recency:1", "recency:2", "trend:0", "trend:0.5"),
    "methods": (
        "horizon:0.5:16", "horizon:0.75:16", "dense:0.25:8", "dense:0.5:8", "growing-ema:0.05",
        "growing-ema:0.1", "growing-ema:0.25", "growing-ema:0.5", "ema:0.5", "ema:0.8", "ema:0.9",
        "corrected-ema:0.9", "corrected-ema:0.98", "bema:0.5:0.2", "bema:0.5:1", "phase",
        "two-tailed", "rna:0.1",
    ),
}  # fmt: skip
DIGITS: dict[str, Any] = {
    **SHARED, "validation_fraction": 0.3, "evaluate_test": True, "epochs": 0.05 * 48,
    "batch_norm": ("re-estimated",), "nu": 3,
}  # fmt: skip
DECODER: dict[str, Any] = {
    **SHARED, "width": 64, "depth": 2, "sequence_length": 64, "vocabulary": 512,
    "warmup_steps": 20, "evaluation_tokens": 2**12, "nu": 10,
}  # fmt: skip
DECODER_STEPS = 2000
TASKS = (
    ("noisy digits", 0.1), ("noisy digits", 0.4), ("shifted digits", 0.2), ("decoder", 1e-3),
    ("decoder", 6e-3),
)  # fmt: skip


def config_of(task: str, rate: float) -> TrainConfig:
    """The first 5 % of a run."""
    if task == "decoder":
        return DecoderConfig(**DECODER, learning_rate=rate)
    shift = {"noisy digits": 0, "shifted digits": 1}[task]
    return DigitsConfig(**DIGITS, learning_rate=rate, max_shift=shift)


def rows_of(task: str, rate: float, seed: int, data: Path | None) -> list[Row]:
    """All rows of one run."""
    config = config_of(task, rate)
    worker = Worker()
    if task == "decoder":  # its epochs depend on the text
        num_batches = config.make_task(data, seed=seed, worker=worker, smoke=False).num_batches
        config = DecoderConfig(
            **DECODER, learning_rate=rate, epochs=0.05 * DECODER_STEPS / num_batches
        )
    plan = RunPlan(config=config, seed=seed, data=None if data is None else str(data))
    with tempfile.TemporaryDirectory() as scratch:
        train(plan, RunFolder(Path(scratch) / "run"), worker)
        rows = read_metrics(Path(scratch) / "run" / "metrics.jsonl")
    return [{"task": task, **row} for row in rows]


def name_of(row: Row) -> str:
    """The rule."""
    if row["weights"] == "raw":
        return "raw" if row["batch_norm"] or row["task"] == "decoder" else "raw, running"
    rule = f"{row['k']} {row['coefficients']}" if row["weights"] == "averaged" else ""
    return f"{row['weights']} {rule or row['coefficients'] or ''}".strip()


def print_tables(rows: Iterable[Row]) -> None:
    """For every task and rate, the rules from the best to the worst."""
    runs: dict[tuple[str, float, int], dict[tuple[str, int], float]] = {}
    for row in rows:
        run = row["task"], row["peak_learning_rate"], row["seed"]
        loss = row.get("test_loss", row["valid_loss"])
        runs.setdefault(run, {})[name_of(row), row["step"]] = loss
    tables: dict[tuple[str, float], dict[str, list[float]]] = {}
    for run, losses in runs.items():
        for (name, step), loss in losses.items():
            ratio = math.log(loss / losses["raw", step])
            tables.setdefault(run[:2], {}).setdefault(name, []).append(ratio)
    for task, table in tables.items():
        print(*task)
        for name, ratios in sorted(table.items(), key=lambda entry: statistics.fmean(entry[1])):
            better = sum(ratio < 0 for ratio in ratios)
            mean = 100 * (math.exp(statistics.fmean(ratios)) - 1)
            print(f"  {name:28} {mean:+7.1f} %   better {better} of {len(ratios)} times")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench-early"))
    parser.add_argument("--data", type=Path, help="a folder of text, for the decoder")
    parser.add_argument("--tasks", nargs="+", choices=sorted({task for task, _ in TASKS}))
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--read", type=Path, nargs="+", help="only tables, of these raw.jsonl")
    arguments = parser.parse_args()
    if arguments.read:
        rows = (json.loads(line) for file in arguments.read for line in file.open())
        print_tables(row for row in rows if "task" in row)
        return
    wanted = arguments.tasks or [task for task, _ in TASKS if task != "decoder" or arguments.data]
    tasks = [(task, rate) for task, rate in TASKS if task in wanted]
    jobs = [
        (*task, seed, arguments.data) for task, seed in itertools.product(tasks, arguments.seeds)
    ]
    log, found = Log(arguments.out), list[Row]()
    with ProcessPoolExecutor(arguments.processes) as pool:
        for rows in pool.map(rows_of, *zip(*jobs, strict=True)):
            for row in rows:
                found.append({name: row[name] for name in row if not name.endswith("seconds")})
                log.add(**found[-1])
    print_tables(found)


if __name__ == "__main__":
    main()
