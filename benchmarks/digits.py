"""The demo's recipe with other seeds and learning rates: is its default a fair one?

    python benchmarks/digits.py --out results/NAME      # about ten minutes on one core

Writes a metrics file for each setting and prints the raw weights' final loss, by which the
learning rate was chosen, and the longest saving of averaging, by which it was not.
"""

import argparse
import tempfile
from pathlib import Path

from record import Log

from lawa_lab.recipes.catalog.digits import DigitsConfig
from lawa_lab.recipes.loop import train
from lawa_lab.recipes.run_folder import RunFolder, RunPlan
from lawa_lab.recipes.task import Worker
from lawa_lab.report.runs import Run
from lawa_lab.report.summary import summarise
from torch_lawa.metrics import MetricsWriter, read_metrics

RATES = (0.02, 0.05, 0.1, 0.2, 0.4)
TRIPLES = ((0, 1, 2), (3, 4, 5), (100, 101, 102))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench-digits"))
    folder = parser.parse_args().out
    log = Log(folder)
    default = DigitsConfig().learning_rate
    settings = [(default, triple) for triple in TRIPLES]
    settings += [(rate, TRIPLES[0]) for rate in RATES if rate != default]
    for rate, seeds in settings:
        config = DigitsConfig(learning_rate=rate)
        path = folder / f"rate-{rate:g}-seeds-{seeds[0]}-to-{seeds[-1]}.jsonl"
        path.unlink(missing_ok=True)
        with MetricsWriter(path) as metrics, tempfile.TemporaryDirectory() as scratch:
            for seed in seeds:
                run = RunFolder(Path(scratch) / str(seed))
                train(RunPlan(config=config, seed=seed), run, Worker())
                for row in read_metrics(run.metrics):
                    metrics.write(row)
        rows = read_metrics(path)
        final = [
            row["test_loss"]
            for row in rows
            if row["epoch"] == config.epochs
            and (row["weights"], row["batch_norm"]) == ("raw", None)
        ]
        found = {"rate": rate, "seeds": seeds, "raw_final_loss": sum(final) / len(final)}
        for report in summarise([Run("digits", "sgd", tuple(rows))]).recipes[0].metrics:
            for row in report.main:
                best = row.headline.epochs.saved if row.headline and row.headline.epochs else None
                name = f"{report.metric.name}_{{}}_{row.against}"
                found[name.format("saved")] = best.mean if best else None
                found[name.format("spread")] = (best.low, best.high) if best else None
        log.add(kind="setting", **found)
        print(found, flush=True)


if __name__ == "__main__":
    main()
