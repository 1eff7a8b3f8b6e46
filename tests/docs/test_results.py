"""Tables of docs/results.md have the values of the raw rows."""

import json
import re
from pathlib import Path
from statistics import mean, stdev

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
FRONTIER, FREE = "2026-11-18-cifar100-frontier", "2026-11-18-more-seeds/free-10-seed-{seed}"
TRUNK = f"{FRONTIER}/constant-0.1-seed-{{seed}}"
FIRST = "2026-11-16-cifar100-frontier/constant-0.1-100e-seed-{seed}"
PRIMAL = "constant-0.1-100e-warm-1000+primal-averaging-0.8-0.1-seed-{seed}"
WINDOW = {"weights": "averaged", "k": 16, "coefficients": "uniform"}
DECAYS = {30: f"{TRUNK}-landing-0.2-linear-30e", 60: f"{FIRST}-landing-0.2-linear-60e"}
ROWS = {  # how a row of the table begins: the run, by budget if it is annealed, and the weights
    "cosine to zero": (f"{FRONTIER}/cosine-0.1-{{epoch}}e-seed-{{seed}}", {"weights": "raw"}),
    "constant, then": (
        {**DECAYS, 100: f"{FIRST}-landing-0.2-linear-100e"},
        {"weights": "raw"},
    ),
    "constant rate, raw": (TRUNK, {"weights": "raw"}),
    "… **window of 16": (TRUNK, WINDOW),
    "… window of 16 plain": (TRUNK, {"weights": "horizon", "coefficients": "0.25:16:1"}),
    "… every step": (TRUNK, {"weights": "dense"}),
    "… EMA 0.999": (TRUNK, {"weights": "ema", "coefficients": "0.999"}),
    "… EMA with a time": (TRUNK, {"weights": "growing-ema"}),
    "… SWA": (TRUNK, {"weights": "swa"}),
    "… the window, trained": (f"2026-11-18-cifar100-training-methods/{PRIMAL}", WINDOW),
    "Schedule-Free SGD": (FREE, {"weights": "schedule-free"}),
    "… the window over its": (FREE, WINDOW),
}


def accuracy(run: str, epoch: int, weights: dict[str, object]) -> float:
    """In percent, with BatchNorm re-estimated."""
    wanted = {"epoch": epoch, "batch_norm": "re-estimated", **weights}
    lines = (RESULTS / run / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if wanted.items() <= row.items()]
    (value,) = {row["test_accuracy"] for row in rows}
    return 100 * value


@pytest.mark.parametrize("name", ROWS)
def test_row_of_the_frontier(name: str) -> None:
    text = (ROOT / "docs/results.md").read_text().partition("\n### CIFAR-100")[2]
    section = text.partition("\n### ")[0]
    (line,) = [line for line in section.splitlines() if line.startswith(f"| {name}")]
    cells = [cell.strip(" *") for cell in line.split("|")[2:6]]
    runs, weights = ROWS[name]
    for epoch, cell in zip((30, 60, 100, 160), cells, strict=True):
        if cell:
            run = runs[epoch] if isinstance(runs, dict) else runs
            found = [accuracy(run.format(seed=s, epoch=epoch), epoch, weights) for s in range(3)]
            assert re.fullmatch(r"[\d.]+ ± [\d.]+", cell)
            assert cell == f"{mean(found):.2f} ± {stdev(found):.2f}", epoch


METHODS = {  # how a row begins: the method in the rows, and the plain training of its rate
    "[EMA-Nesterov]": ("ema-nesterov", "plain at 0.2"),
    "[outer Nesterov]": ("outer-nesterov", "plain"),
    "[SAM]": ("sam", "plain"),
    "[jump]": ("jump", "plain"),
    "[periodic SWA]": ("pswa", "plain"),
    "[Lookahead]": ("lookahead", "plain"),
}


@pytest.mark.parametrize("name", METHODS)
def test_row_of_a_training_method_on_the_digits(name: str) -> None:
    """The smallest and the largest of three seeds, relative to the window of plain training."""
    rows = (RESULTS / "2026-11-18-digits-training-methods/raw.jsonl").read_text().splitlines()
    wanted = {"test": True, "schedule": "constant", "weights": "averaged"}
    losses = {
        (row["method"], row["seed"]): row["test_loss"]
        for row in map(json.loads, rows)
        if wanted.items() <= row.items()
    }
    method, plain = METHODS[name]
    found = [losses[method, seed] / losses[plain, seed] for seed in range(3)]
    text = (ROOT / "docs/results.md").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {name}")]
    assert line.split("|")[2].strip() == f"{min(found):.2f} to {max(found):.2f}"
