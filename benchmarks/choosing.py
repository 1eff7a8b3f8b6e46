"""Windows of every length on noisy quadratics, exactly: the tables of docs/guides/fixed_windows.md.

    python benchmarks/choosing.py            print the tables
    python benchmarks/choosing.py --write    write them into the page

A thousand directions with curvatures h_i = i^-1.5, all starting at 1, are trained by SGD with a
rate of 0.5 (constant, or a cosine to zero) and gradient noise of variance 0.05 h_i for 10,000
steps: x' = (1 - rate h) x + rate noise. Steep directions soon reach their minimum and fluctuate
around it; flat ones still approach theirs at the end. Everything is linear and Gaussian, so the
expected loss of any mean of iterates is computed exactly, without samples.
"""

import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "fixed_windows.md"
STEPS, RATE, NOISE = 10_000, 0.5, 0.05
MOMENTS = (0.05, 0.1, 0.25, 0.5, 0.75, 1.0)
DURATIONS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)


class Quadratic:
    """First and second moments of every iterate of one run."""

    def __init__(self, schedule: str, curvatures: np.ndarray, *, steps: int = STEPS) -> None:
        shape = {"constant": lambda t: 1.0 + 0 * t, "cosine": lambda t: (1 + np.cos(np.pi * t)) / 2}
        self.rates = RATE * shape[schedule](np.arange(steps) / steps)
        self.h = curvatures
        kept = 1 - self.rates[:, None] * self.h  # what a step leaves of a deviation
        self.means = np.cumprod(np.vstack([np.ones_like(self.h), kept]), axis=0)
        self.variances = np.zeros_like(self.means)
        for t, rate in enumerate(self.rates):
            self.variances[t + 1] = kept[t] ** 2 * self.variances[t] + rate**2 * NOISE * self.h
        self.kept = kept

    def loss(self, mean: np.ndarray, variance: np.ndarray) -> float:
        """The expected loss, half the sum of h x^2."""
        return float(np.sum(self.h * (mean**2 + variance)) / 2)

    def raw(self, step: int) -> float:
        return self.loss(self.means[step], self.variances[step])

    def window(self, step: int, k: int, nu: int) -> float:
        """The mean of k iterates, nu apart, the newest at `step`."""
        steps = [step - nu * age for age in reversed(range(k))]
        mean = np.mean([self.means[s] for s in steps], axis=0)
        # The sum of the snapshots so far: its variance, and its covariance with the newest one.
        variance, shared = 0.0 * self.h, 0.0 * self.h
        for before, now in zip([None, *steps], steps, strict=False):
            if before is not None:
                shared = shared * np.prod(self.kept[before:now], axis=0)
            variance = variance + 2 * shared + self.variances[now]
            shared = shared + self.variances[now]
        return self.loss(mean, variance / k**2)

    def ema(self, step: int, decay: float) -> float:
        """An exponential moving average with one update a step, begun at the first iterate."""
        mean, variance, shared = np.ones_like(self.h), 0.0 * self.h, 0.0 * self.h
        for t in range(step):
            shared = shared * self.kept[t]
            new = self.variances[t + 1]
            variance = decay**2 * variance + 2 * decay * (1 - decay) * shared
            variance += (1 - decay) ** 2 * new
            mean = decay * mean + (1 - decay) * self.means[t + 1]
            shared = decay * shared + (1 - decay) * new
        return self.loss(mean, variance)


@cache
def quadratic(schedule: str) -> Quadratic:
    return Quadratic(schedule, np.arange(1, 1001) ** -1.5)


def same_age(k: int, nu: int) -> float:
    """The decay of an EMA whose weights are as old on average as those of the window."""
    age = (k - 1) * nu / 2
    return age / (age + 1)


def percent(share: float) -> str:
    return f"{100 * share:g} %"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [list(head), ["---"] * len(head), *map(list, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def durations(schedule: str) -> str:
    """Ten snapshots over durations of all lengths, by the moment in the run."""
    run = quadratic(schedule)
    rows = []
    for duration in DURATIONS:
        cells = []
        for moment in MOMENTS:
            step, nu = round(moment * STEPS), round(duration * STEPS / 10)
            ratio = run.window(step, 10, nu) / run.raw(step) if 9 * nu <= step else None
            cells.append("" if ratio is None else f"{ratio:.2f}")
        rows.append([percent(duration), *cells])
    return table(["k·ν, of the run", *(f"at {percent(moment)}" for moment in MOMENTS)], rows)


def sizes() -> str:
    """Durations with more and fewer snapshots, half way through a run at a constant rate."""
    run, step = quadratic("constant"), STEPS // 2
    rows = [
        [percent(duration)]
        + [
            f"{run.window(step, k, round(duration * STEPS / k)) / run.raw(step):.2f}"
            for k in (2, 3, 6, 10, 20, 50)
        ]
        for duration in (0.01, 0.02, 0.05)
    ]
    return table(["k·ν, of the run", *(f"k = {k}" for k in (2, 3, 6, 10, 20, 50))], rows)


def averages() -> str:
    """Windows beside the EMA of the same mean age, half way at a constant rate."""
    run, step = quadratic("constant"), STEPS // 2
    rows = []
    for duration in (0.005, 0.01, 0.02, 0.05, 0.1):
        length = round(duration * STEPS)
        decay = same_age(50, length // 50)
        losses = [run.window(step, k, length // k) for k in (10, 50)] + [run.ema(step, decay)]
        ratios = [f"{loss / run.raw(step):.2f}" for loss in losses]
        rows.append([percent(duration), *ratios, f"{decay:.4f}"])
    return table(["k·ν, of the run", "k = 10", "k = 50", "EMA", "its decay"], rows)


def ends() -> str:
    """Final losses of both schedules, raw and averaged, in thousandths of the initial loss."""
    nu = round(0.05 * STEPS / 10)
    rows = []
    for schedule in ("constant", "cosine"):
        run = quadratic(schedule)
        losses = run.raw(STEPS // 2), run.raw(STEPS), run.window(STEPS, 10, nu)
        rows.append([schedule, *(f"{1000 * loss / run.raw(0):.1f}" for loss in losses)])
    return table(["rate", "raw, half way", "raw, at the end", "averaged, at the end"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "constant": lambda: durations("constant"),
    "cosine": lambda: durations("cosine"),
    "sizes": sizes,
    "averages": averages,
    "ends": ends,
}


def filled(text: str) -> str:
    """The page, with the table between each pair of marks replaced."""
    for name, make in TABLES.items():
        head, _, rest = text.partition(f"<!-- {name} -->\n")
        _, end, tail = rest.partition(f"<!-- end {name} -->")
        assert end, f"the page has no marks for the table {name!r}"
        text = f"{head}<!-- {name} -->\n{make()}\n{end}{tail}"
    return text


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(filled(PAGE.read_text()))
    else:
        print("\n\n".join(f"{name}\n{make()}" for name, make in TABLES.items()))
