"""`lawa demo`: the frontier on the digits, with three seeds, then the report on it."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from torch_lawa.errors import ConfigError, LawaError

if TYPE_CHECKING:
    from lawa_lab.recipes.budgets import BudgetedRun
    from lawa_lab.report.runs import Run
    from lawa_lab.report.summary import Report

__all__ = ["command"]

_NUM_SEEDS = 3
_CONFIG, _FIGURE = "demo.json", "frontier"
_RUNS = "seed-*"
_SHARES = (1 / 8, 1 / 4, 1 / 2, 1)  # of the longest budget
# Noisy images, not shifted. Rates and horizon were chosen on a validation split: see
# results/2026-11-16-digits-frontier.
_SETTINGS: dict[str, Any] = {"max_shift": 0, "horizon": 0.25}
_CONSTANT: dict[str, Any] = {"schedule": "constant", "learning_rate": 0.4}
_ANNEALED: dict[str, Any] = {"schedule": "cosine", "learning_rate": 0.1}


@click.command("demo")
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs/demo"),
    show_default=True,
    help="Folder for the figure, and for the metrics and averaged model of each run.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0, max=2**32 - 1),
    default=0,
    show_default=True,
    help="First of the three seeds.",
)
@click.option(
    "--k",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    help="Number of snapshots to average; they span the last quarter of the run so far.",
)
@click.option(
    "--epochs",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    help="Epochs of the longest runs; annealed runs are also trained for 1/8, 1/4 and 1/2 of that.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
@click.option("--overwrite", is_flag=True, help="Replace an earlier demo in the same folder.")
def command(output: Path, seed: int, k: int, epochs: int, as_json: bool, overwrite: bool) -> int:
    """Train a small network and show what averaging saves.

    Trains a small convolutional network with BatchNorm on scikit-learn's handwritten digits, with
    three seeds, in under a minute on two cores. Nothing is downloaded. One run at a constant
    learning rate, with its average evaluated along the way, is compared with runs of four lengths
    whose learning rate decays to zero.
    """
    begin = time.perf_counter()
    _check(output, overwrite)
    budgets = sorted({max(1, round(share * epochs)) for share in _SHARES})
    folders = _train(k, budgets, list(range(seed, seed + _NUM_SEEDS)), output, as_json=as_json)
    if folders is None:
        click.echo(f"Stopped. The metrics so far are in {output}.", err=True)
        return 130
    _show(folders, output, begin, as_json=as_json)
    return 0


def _train(
    k: int, budgets: list[int], seeds: list[int], output: Path, *, as_json: bool
) -> list[Path] | None:
    """Train every seed in a folder of its own; None if training was interrupted."""
    from lawa_lab.cli.demo_progress import show_progress
    from lawa_lab.recipes.loop import train
    from lawa_lab.recipes.task import Worker

    _clear(output)
    output.mkdir(parents=True, exist_ok=True)
    command = f"lawa demo --seed {seeds[0]} --k {k} --epochs {budgets[-1]}"
    (output / _CONFIG).write_text(json.dumps({"command": command, "seeds": seeds}) + "\n")
    with show_progress(seeds, budgets, as_json=as_json) as view:
        for seed in seeds:
            for run in _planned(k, budgets, seed, output):
                if not train(run.plan, run.folder, Worker(), callback=view).finished:
                    return None
            view.on_seed_done(seed)
    return [output / f"seed-{seed}" for seed in seeds]


def _planned(k: int, budgets: list[int], seed: int, output: Path) -> list["BudgetedRun"]:
    """The constant-rate run of a seed, then its annealed runs, which are evaluated at their end."""
    from lawa_lab.recipes.budgets import plan_budgets
    from lawa_lab.recipes.catalog.digits import DigitsConfig
    from lawa_lab.recipes.run_folder import RunPlan

    runs: list[BudgetedRun] = []
    often = max(1, budgets[-1] // 16)  # an evaluation takes longer than an epoch
    for settings in (
        {**_CONSTANT, "evaluate_every": often},
        {**_ANNEALED, "evaluate_every": budgets[-1]},
    ):
        try:
            config = DigitsConfig(ks=(k,), batch_norm=("re-estimated",), **_SETTINGS, **settings)
        except ConfigError as error:
            raise click.UsageError(str(error)) from None
        plan, path = RunPlan(config=config, seed=seed), output / f"seed-{seed}"
        runs += plan_budgets(plan, budgets, path, if_used="resume")
    return runs


def _show(folders: list[Path], output: Path, begin: float, *, as_json: bool) -> None:
    """Draw the figure and print what was found."""
    from lawa_lab.report import frontier_words, words
    from lawa_lab.report.runs import load_runs
    from lawa_lab.report.summary import summarise

    runs = load_runs(folders)
    report = summarise(runs)
    recipe = report.recipes[0]
    note = _draw(runs, report, output)
    frontiers = [(m.metric, m.frontier) for m in recipe.metrics if m.frontier is not None]
    findings = [frontier_words.headline(recipe.recipe, *each) for each in frontiers]
    lost = [f"{words.plain(m.name)}: {frontier_words.leads(m, each)}" for m, each in frontiers]
    lost += [f"{words.plain(m.metric.name)}, {text}" for m in recipe.metrics for text in m.losses]
    names = (_CONFIG, f"{_FIGURE}.png", *(folder.name for folder in folders))
    files = [name for name in names if (output / name).exists()]
    seconds = time.perf_counter() - begin
    if as_json:
        told: dict[str, Any] = {
            "output": str(output),
            "files": files,
            "note": note,
            "seconds": seconds,
        }
        told |= {"findings": findings, "losses": lost, "report": report.as_dict()}
        click.echo(json.dumps(told))
        return

    from rich.console import Console

    from lawa_lab.cli.report_tables import equal_budget_table, equal_quality_table, say

    console = Console(highlight=False)
    for metric, frontier in frontiers[:1]:
        console.print(f"\n{words.plain(metric.name)} at equal budget", style="bold")
        console.print(equal_budget_table(metric, frontier))
        console.print("\nBudget at equal quality", style="bold")
        console.print(equal_quality_table(metric, frontier))
        console.print()
    for _, frontier in frontiers[:1]:
        lengths = [point.budget for point in frontier.annealed]
        console.print(
            f"One run instead of {len(lengths)}: a constant-rate run of {max(lengths):g} epochs "
            f"has an average for every length; the annealed runs took {sum(lengths):g} epochs in "
            "total.\n",
            style="bold",
        )
    for text in findings:
        console.print(f"{text}\n", markup=False)
    console.print("Where averaging helps and where it does not:")
    for text in lost:
        say(console, text, bullet="- ")
    console.print(f"\nThe demo took {seconds:.0f} s and wrote to {output}:", soft_wrap=True)
    console.print(f"  {', '.join(files)}")
    console.print(f"All tables and figures: lawa report {output} -o report", soft_wrap=True)
    if note:
        console.print(f"No figure: {note}", soft_wrap=True, markup=False)


def _draw(runs: "Sequence[Run]", report: "Report", output: Path) -> str | None:
    """Save the report's main figure; returns why it could not be drawn."""
    from lawa_lab.report.figures import drawings, save
    from lawa_lab.report.figures.scene import Scene

    try:
        drawing = drawings(Scene(report.recipes[0], runs))[0]
        save(dataclasses.replace(drawing, name=_FIGURE), output, formats=("png",))
    except LawaError as error:  # for example without matplotlib
        return str(error)
    return None


def _check(output: Path, overwrite: bool) -> None:
    """Refuse a folder that holds something else, or an earlier demo that may not be replaced."""
    files = (output / _CONFIG, output / f"{_FIGURE}.png")
    run = (output / "config.json", output / "metrics.jsonl")  # its rows would join those of a run
    there = [p.name for p in (*files, *run, *output.glob(_RUNS)) if p.exists()]
    if _is_demo(output / _CONFIG):
        if not overwrite:
            raise LawaError(
                f"{output} already holds a demo. Pass --overwrite to replace it, or choose another "
                "folder with -o."
            )
    elif there:
        raise LawaError(
            f"{output} holds {', '.join(sorted(there))}, which `lawa demo` did not write and does "
            "not replace. Choose another folder with -o."
        )


def _is_demo(config: Path) -> bool:
    try:
        found = json.loads(config.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.keys() == {"command", "seeds"}


def _clear(output: Path) -> None:
    """Remove an earlier demo, but no other files."""
    from lawa_lab.recipes.run_folder import RunFolder

    for path in [*output.glob(f"{_RUNS}/*/"), *output.glob(f"{_RUNS}/")]:
        RunFolder(path).clear()
        with contextlib.suppress(OSError):  # it holds other files
            path.rmdir()
    (output / f"{_FIGURE}.png").unlink(missing_ok=True)
    (output / _CONFIG).unlink(missing_ok=True)
