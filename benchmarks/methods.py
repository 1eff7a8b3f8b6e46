"""Methods that change training, at the same number of gradients, against averaging and annealing.

    python benchmarks/methods.py digits --out results/NAME       # minutes on two cores
    python benchmarks/methods.py cifar100 all --launch 4 --data data --out runs/methods
    python benchmarks/methods.py decoder constant-1e-3+jump:500:20 --data data --out runs/methods

On the digits every method has a few settings and peak rates, at a constant rate (whose average
counts) and with a cosine decay (whose raw weights count). Settings are chosen on validation images
with seeds of their own, then trained on all training images and evaluated on the test images. A
step of SAM has two gradients, so that its runs have half as many steps.

The other studies are those of `frontier.py`, whose names of runs they have; `all` stands for the
published settings of every method, which are not tuned, with three seeds. The rows are those of
`lawa train`, and `lawa report` compares the runs.
"""

import argparse
import dataclasses
import json
import re
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from frontier import STUDIES, plan_run
from launcher import add_options, run_all
from record import Log

from lawa_lab.recipes.budgets import BudgetedRun
from lawa_lab.recipes.catalog.digits import DigitsConfig
from lawa_lab.recipes.loop import train
from lawa_lab.recipes.run_folder import RunFolder, RunPlan
from lawa_lab.recipes.task import Worker
from lawa_lab.wrappers.registry import parse_wrappers
from torch_lawa.metrics import Row, read_metrics

# Digits: E stands for the steps of an epoch, of which a run has 16.
EPOCHS = 16
SETTINGS: dict[str, tuple[str, ...]] = {
    "plain": ("",),
    "sam": ("sam:0.05", "sam:0.1"),
    "ema-nesterov": ("ema-nesterov:0.3:0.99:2E", "ema-nesterov:0.6:0.9:2E"),
    "primal-averaging": ("primal-averaging:0.5:0.1", "primal-averaging:0.9:0.1"),
    "outer-nesterov": ("outer-nesterov:30:0.7:0.5",),
    "outer-nesterov on means": ("outer-nesterov:30:1:0.5:1",),
    "pswa": ("pswa:1E:4E", "pswa:4E:4E"),
    "jump": ("jump:2E:10:0", "jump:4E:10:0", "jump:4E:10:1"),
    "lookahead": ("lookahead:5:0.8",),
}
RATES = {"constant": (0.2, 0.4), "cosine": (0.1, 0.2)}
VALIDATION_SEEDS, TEST_SEEDS = (10, 11), (0, 1, 2)
K, HORIZON = 16, 0.25

# Elsewhere: what the sources of the methods use, at a tenth of the paper's cost at most.
PUBLISHED = {
    "cifar100": [
        *("constant-0.1-100e", "cosine-0.1-100e", "constant-0.1-50e+sam:0.05"),
        *("cosine-0.1-50e+sam:0.05", "constant-0.1-100e+ema-nesterov:0.3:0.99:300"),
        "constant-0.1-100e+primal-averaging:0.9:0.1",
        *("constant-0.1-100e+outer-nesterov:30:0.7:0.5", "constant-0.1-100e+pswa:3900:7800"),
        *("constant-0.1-100e+jump:1950:50", "constant-0.1-100e+lookahead:5:0.8"),
    ],
    "decoder": [
        *("constant-7e-4", "linear-7e-4-1e", "constant-7e-4-0.5e+sam:0.05"),
        *("constant-7e-4+ema-nesterov:0.3:0.99:300", "constant-7e-4+outer-nesterov:30:0.7:0.5"),
        "constant-7e-4+primal-averaging:0.9:0.1",
        *("constant-7e-4+pswa:500:1000", "constant-7e-4+jump:500:50"),
        *("constant-7e-4+lookahead:5:0.8",),
    ],
}


@dataclasses.dataclass(frozen=True)
class Trial:
    """One run on the digits."""

    method: str
    setting: str
    schedule: str
    rate: float
    seed: int
    test: bool  # else on validation images

    def config(self) -> DigitsConfig:
        # 898 training images in batches of 32; 30 % of them are held out for validation.
        steps = 28 if self.test else 19
        text = re.sub(r"(\d+)E", lambda found: str(int(found[1]) * steps), self.setting)
        wrappers = (text,) if text else ()
        cost = max((w.gradients for w in parse_wrappers(wrappers, "sgd")), default=1)
        return DigitsConfig(
            epochs=EPOCHS // cost,
            validation_fraction=0.0 if self.test else 0.3,
            learning_rate=self.rate,
            schedule=self.schedule,  # type: ignore[arg-type]
            max_shift=0,  # as in the demo
            batch_norm=("re-estimated",),
            evaluate_every=EPOCHS,
            ks=(K,),
            horizon=HORIZON,
            wrap=wrappers,
        )


def rows_of(trial: Trial) -> list[Row]:
    """The rows at the end of a run: raw and averaged weights, BatchNorm re-estimated."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = RunFolder(Path(scratch))
        train(RunPlan(config=trial.config(), seed=trial.seed), folder, Worker())
        last = read_metrics(folder.metrics)
    return [row for row in last if row["batch_norm"] == "re-estimated"]


def counted(trial: Trial, rows: list[Row]) -> Row:
    """The row that a choice is made by: the average of a constant rate, else the raw weights."""
    kind = "averaged" if trial.schedule == "constant" else "raw"
    return next(row for row in rows if row["weights"] == kind)


def trials(test: bool, chosen: dict[tuple[str, str], tuple[str, float]]) -> Iterator[Trial]:
    """All settings on validation images, or the chosen ones on the test images."""
    for seed in TEST_SEEDS if test else VALIDATION_SEEDS:
        for schedule, rates in RATES.items():
            for method, settings in SETTINGS.items():
                if test:
                    setting, rate = chosen[method, schedule]
                    yield Trial(method, setting, schedule, rate, seed, test)
                    for other in rates:  # is a gain that of a method, or that of its rate?
                        if method == "plain" and other != rate:
                            yield Trial(f"plain at {other:g}", "", schedule, other, seed, test)
                    continue
                for setting in settings:
                    for rate in rates:
                        yield Trial(method, setting, schedule, rate, seed, test)


def measure(
    log: Log, work: list[Trial], processes: int, known: dict[Trial, list[Row]]
) -> dict[Trial, list[Row]]:
    """Train all of them that are not known yet; every row is logged."""
    found = {trial: known[trial] for trial in work if trial in known}
    left = [trial for trial in work if trial not in known]
    with ProcessPoolExecutor(processes) as pool:
        found |= _logged(log, zip(left, pool.map(rows_of, left), strict=True))
    return {trial: found[trial] for trial in work}


def _logged(log: Log, found: Iterable[tuple[Trial, list[Row]]]) -> dict[Trial, list[Row]]:
    kept = {}
    for trial, rows in found:
        kept[trial] = rows
        for row in rows:
            left_out = ("recipe", "kind")
            facts = {k: v for k, v in row.items() if v is not None and k not in left_out}
            log.add(kind="row", **{**facts, **dataclasses.asdict(trial)})
        print(".", end="", file=sys.stderr, flush=True)
    return kept


def read_known(path: Path) -> dict[Trial, list[Row]]:
    """The runs of an earlier call that was stopped."""
    found: dict[Trial, list[Row]] = {}
    names = [field.name for field in dataclasses.fields(Trial)]
    for line in path.read_text().splitlines() if path.exists() else ():
        row = json.loads(line)
        if row["kind"] == "row":
            found.setdefault(Trial(**{name: row[name] for name in names}), []).append(row)
    return found


def choose(found: dict[Trial, list[Row]]) -> dict[tuple[str, str], tuple[str, float]]:
    """The setting and rate with the lowest mean validation loss, by method and schedule."""
    losses: dict[tuple[str, str], dict[tuple[str, float], list[float]]] = {}
    for trial, rows in found.items():
        options = losses.setdefault((trial.method, trial.schedule), {})
        loss = counted(trial, rows)["valid_loss"]
        options.setdefault((trial.setting, trial.rate), []).append(loss)
    chosen = {}
    for (method, schedule), options in losses.items():
        means = {option: statistics.fmean(values) for option, values in options.items()}
        best = min(means, key=means.__getitem__)
        chosen[method, schedule] = best
        for (setting, rate), mean in sorted(means.items(), key=lambda item: item[1]):
            mark = "*" if (setting, rate) == best else " "
            print(f"{mark} {schedule:8} {setting or method:32} {rate:<4g} {mean:.4f}")
    return chosen


def report(found: dict[Trial, list[Row]]) -> None:
    """Means over the seeds, and the difference to plain training in each seed."""
    by_name: dict[tuple[str, str], dict[int, list[Row]]] = {}
    for trial, rows in found.items():
        by_name.setdefault((trial.schedule, trial.method), {})[trial.seed] = rows
    titles = dict.fromkeys((t.schedule, t.method, t.setting, t.rate) for t in found)
    for schedule, method, setting, rate in titles:
        cells = []
        for kind in ("raw", "averaged"):
            values = {s: _loss(rows, kind) for s, rows in by_name[schedule, method].items()}
            plain = {s: _loss(rows, kind) for s, rows in by_name[schedule, "plain"].items()}
            right = statistics.fmean(
                _loss(rows, kind, "test_accuracy") for rows in by_name[schedule, method].values()
            )
            ratios = " ".join(f"{values[s] / plain[s]:.2f}" for s in values)
            mean = statistics.fmean(values.values())
            cells.append(f"{kind} {mean:.4f} ({ratios} of plain) {right:.2%}")
        facts = by_name[schedule, method][TEST_SEEDS[0]][0]
        seen = {name: facts[name] for name in ("jumps", "returns") if name in facts}
        print(f"{schedule:8} {setting or method:32} {rate:<4g} {'; '.join(cells)}", seen or "")


def _loss(rows: list[Row], kind: str, metric: str = "test_loss") -> float:
    return next(float(row[metric]) for row in rows if row["weights"] == kind)


def digits(arguments: argparse.Namespace) -> None:
    known = read_known(arguments.out / "raw.jsonl") if arguments.resume else {}
    log = Log(arguments.out)
    _logged(log, known.items())
    found = measure(log, list(trials(False, {})), arguments.processes, known)
    print("Validation images, mean loss; * is chosen")
    chosen = choose(found)
    print("Test images")
    report(measure(log, list(trials(True, chosen)), arguments.processes, known))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    studies = parser.add_subparsers(dest="study", required=True)
    small = studies.add_parser("digits")
    small.add_argument("--out", type=Path, default=Path("runs/methods-digits"))
    small.add_argument("--processes", type=int, default=2)
    small.add_argument("--resume", action="store_true", help="keep the runs in OUT/raw.jsonl")
    for name in PUBLISHED:
        add_options(studies.add_parser(name), out="runs/methods")
    arguments = parser.parse_args()
    if arguments.study == "digits":
        digits(arguments)
        return
    study = STUDIES[arguments.study]
    if arguments.runs == ["all"]:
        names = PUBLISHED[arguments.study]
        arguments.runs = [f"{name}-seed-{seed}" for seed in range(3) for name in names]

    def plan(name: str) -> BudgetedRun:
        return plan_run(study, name, arguments.data, arguments.out, smoke=arguments.smoke)

    run_all(arguments, plan, [arguments.study])


if __name__ == "__main__":
    main()
