"""Metrics of made-up training runs, for reports: noisy descent into a bowl, averaged for real.

Weights are a few dozen numbers that shrink towards zero with noise in proportion to the learning
rate, so averages behave as they do in training: ahead in the middle, behind at the very start
where old weights are far off, level at the end.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lawa_lab.report.figures import FIGURES
from lawa_lab.report.runs import Run
from torch_lawa.metrics import Row

MAIN_K = 10
WINDOWS = (MAIN_K, 3, 6, 16)  # the main one first, as a run would write them


@contextlib.contextmanager
def only_figures(*names: str) -> Iterator[None]:
    """Draw these alone: a test that is about something else need not wait for all of them."""
    kept = dict(FIGURES)
    for name in kept.keys() - set(names):
        del FIGURES[name]
    try:
        yield
    finally:
        FIGURES.clear()
        FIGURES.update(kept)


def cifar_rows(
    *, epochs: int = 200, seeds: Sequence[int] = (0, 1, 2), every: int = 5, run: str = "sgd"
) -> list[Row]:
    """CIFAR-like rows: top-1, top-5 and losses; all but the main average every few epochs."""
    rows: list[Row] = []
    for seed in seeds:
        weights = _descent(epochs, seed, noise=1.1 if run.startswith("lookahead") else 1.2)
        luck = np.random.default_rng(1000 + seed)
        for epoch in range(1, epochs + 1):
            rate = 0.05 * (1.0 + math.cos(math.pi * epoch / epochs))
            labels = {
                "recipe": "cifar100-resnet34",
                "run": run,
                "seed": seed,
                "epoch": epoch,
                "step": 196 * epoch,
                "learning_rate": rate,
                "num_devices": 1,
                "device": "NVIDIA H200",
                "train_seconds": 3.0 * epoch,
                "collect_seconds": 0.01 * epoch,
            }
            often = epoch % every == 0 or epoch == epochs
            # The mean over the epoch's batches: in every row, whatever weights it is about.
            labels["train_loss"] = 1.1 * _values(weights[epoch - 1], 1.0)["test_loss"] - 0.75
            for facts, mean, penalty in _evaluated(weights[:epoch], often):
                hurt = 1.0 + penalty * (rate / 0.1) * abs(float(luck.normal(1.0, 0.5)))
                rows.append({**labels, **facts, **_values(mean, hurt), "evaluate_seconds": 0.4})
                if facts["weights"] == "averaged":
                    rows[-1]["average_seconds"] = 0.05
                if facts["batch_norm"] == "re-estimated":
                    rows[-1]["batch_norm_seconds"] = 0.6
    return rows


def language_rows(
    *, evaluations: int = 60, seeds: Sequence[int] = (0,), run: str = "adam", constant: bool = False
) -> list[Row]:
    """Rows of a language model: one loss, no BatchNorm, snapshots between epochs."""
    rows: list[Row] = []
    for seed in seeds:
        weights = _descent(evaluations, seed, noise=0.5, constant=constant)
        for number in range(1, evaluations + 1):
            labels = {"recipe": "wikitext103-roberta", "run": run, "seed": seed}
            labels |= {"epoch": number / 8, "step": 500 * number, "train_seconds": 56.0 * number}
            for k in (None, 6, 3):
                if k is None or number >= k:
                    mean = weights[number - (k or 1) : number].mean(axis=0)
                    row = {**labels, "weights": "averaged" if k else "raw", "k": k}
                    row |= {"coefficients": "uniform" if k else None, "batch_norm": None}
                    loss = 1.8 + 2.0 * float((mean**2).mean()) ** 0.6
                    rows.append({**row, "valid_loss": loss, "evaluate_seconds": 2.0})
    return rows


def frontier_rows(
    *,
    budgets: Sequence[int] = (8, 16, 32),
    seeds: Sequence[int] = (0, 1),
    peaks: Sequence[float] = (0.1,),
) -> list[Row]:
    """One constant-rate run, cosine runs of several lengths, and landings branched off it.

    Values are simple functions, so that every number of a report can be worked out: the loss of the
    average is 1 + 1 / epoch, that of cosine runs 1 + 1.6 / epochs, that of landings 1 + 0.9 /
    epochs, and raw weights at a constant rate stay 0.5 above their average. A seed adds 1% of its
    number, and another peak than the first adds 0.02.
    """
    rows: list[Row] = []

    def add(seed: int, peak: float, epoch: int, excess: float, weights: str, **facts: Any) -> None:
        loss = 1.0 + excess * (1.0 + 0.01 * seed) + (0.0 if peak == peaks[0] else 0.02)
        averaged = weights == "averaged"
        rows.append(
            {
                "recipe": "toy", "seed": seed, "epoch": epoch, "step": 10 * epoch,
                "peak_learning_rate": peak, "train_seconds": 2.0 * epoch,
                "collect_seconds": 0.1 * epoch, "weights": weights, "k": 4 if averaged else None,
                "coefficients": "uniform" if averaged else None, "batch_norm": None,
                "test_loss": loss, "test_accuracy": round(1.0 - loss / 4.0, 6),
                "evaluate_seconds": 0.0,
                "num_devices": 1, **facts,
            }
        )  # fmt: skip

    constant = {"run": "sgd, constant rate", "schedule": "constant", "land": 0.0}
    landing = {"run": "sgd, constant rate, landing 0.25", "schedule": "constant", "land": 0.25}
    for seed in seeds:
        for peak in peaks:
            for epoch in range(1, max(budgets) + 1):
                own = {**constant, "budget_epochs": max(budgets)}
                add(seed, peak, epoch, 0.5 + 1.0 / epoch, "raw", **own)
                add(seed, peak, epoch, 1.0 / epoch, "averaged", **own)
            for budget in budgets:
                own = {"run": "sgd", "schedule": "cosine", "land": 0.0, "budget_epochs": budget}
                for epoch in range(1, budget + 1):
                    late = 2.0 * (budget - epoch) / budget
                    add(seed, peak, epoch, late + 1.6 / budget, "raw", **own)
                    add(seed, peak, epoch, late + 1.7 / budget, "averaged", **own)
                own = {**landing, "budget_epochs": budget}
                for epoch in range(round(0.75 * budget) + 1, budget + 1):
                    late = 2.0 * (budget - epoch) / budget
                    add(seed, peak, epoch, late + 0.9 / budget, "raw", **own)
    return rows


def run_of(rows: Sequence[Row]) -> Run:
    """Rows of one recipe and optimizer as a run."""
    first = rows[0]
    return Run(first["recipe"], first["run"], tuple(rows))


def cifar_runs(**facts: Any) -> list[Run]:
    """SGD and Lookahead."""
    return [run_of(cifar_rows(run=name, **facts)) for name in ("sgd", "lookahead(sgd)")]


def language_runs(**facts: Any) -> list[Run]:
    """A rate that decays, and one that stays."""
    return [
        run_of(language_rows(**facts)),
        run_of(language_rows(run="adam, constant rate", constant=True, **facts)),
    ]


def _descent(epochs: int, seed: int, *, noise: float, constant: bool = False) -> np.ndarray:
    random = np.random.default_rng(seed)
    stiffness = np.geomspace(0.06, 0.9, 48)
    at = np.full(48, 3.0)
    path = []
    for epoch in range(1, epochs + 1):
        rate = 1.0 if constant else 0.5 * (1.0 + np.cos(np.pi * epoch / epochs))
        at = at * (1.0 - stiffness * (0.1 + 0.9 * rate))
        at = at + noise * (0.08 + 0.92 * rate) * np.sqrt(stiffness) * random.normal(size=48)
        path.append(at)
    return np.stack(path)


def _evaluated(weights: np.ndarray, often: bool) -> Iterator[tuple[Row, np.ndarray, float]]:
    """What is evaluated at this epoch: its facts, the weights, and what its BatchNorm costs it."""
    newest = weights[-1]
    raw = {"weights": "raw", "k": None, "coefficients": None}
    yield {**raw, "batch_norm": None}, newest, 0.25
    if often:
        yield {**raw, "batch_norm": "re-estimated"}, newest, 0.0
    for k in WINDOWS:
        if len(weights) < k or not (often or k == MAIN_K):
            continue
        for kind in ("uniform", "exponential:0.9") if k == MAIN_K and often else ("uniform",):
            alpha = 1.0 if kind == "uniform" else 0.9
            shares = alpha ** np.arange(k)[::-1]
            mean = (weights[-k:] * (shares / shares.sum())[:, None]).sum(axis=0)
            facts = {"weights": "averaged", "k": k, "coefficients": kind}
            yield {**facts, "batch_norm": "re-estimated"}, mean, 0.0
            if often and kind == "uniform":
                yield {**facts, "batch_norm": "copied"}, mean, 0.35 if len(weights) > 20 else 3.0


def _values(weights: np.ndarray, hurt: float) -> dict[str, float]:
    loss = (0.85 + 0.9 * float((weights**2).mean()) ** 0.7) * hurt
    accuracy = 0.79 - 0.33 * math.log(loss / 0.85)
    return {
        "test_loss": loss,
        "test_accuracy": max(round(accuracy, 4), 0.01),
        "test_top5_accuracy": max(round(1.0 - 0.35 * (1.0 - accuracy) ** 1.3, 4), 0.05),
    }
