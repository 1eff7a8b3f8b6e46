"""`lawa demo`: `lawa train digits` with three seeds, then the report on them."""

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
    from lawa_lab.recipes.catalog.digits import DigitsConfig
    from lawa_lab.report.runs import Run
    from lawa_lab.report.summary import Report

__all__ = ["command"]

_NUM_SEEDS = 3
_CONFIG, _FIGURE = "demo.json", "savings"
_RUNS = "seed-*"


@click.command("demo")
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs/demo"),
    show_default=True,
    help="Folder for the figure and, per seed, the metrics and the averaged model.",
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
    default=6,
    show_default=True,
    help="Number of latest epochs to average.",
)
@click.option(
    "--epochs", type=click.IntRange(min=1), default=50, show_default=True, help="Epochs per seed."
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
@click.option("--overwrite", is_flag=True, help="Replace an earlier demo in the same folder.")
def command(output: Path, seed: int, k: int, epochs: int, as_json: bool, overwrite: bool) -> int:
    """Train a small network and show what averaging saves.

    A convolutional network with BatchNorm learns scikit-learn's handwritten digits with three
    seeds, in under a minute on two cores; nothing is downloaded. After every epoch, the raw weights
    and the average of the k latest epochs are evaluated on held-out images.
    """
    begin = time.perf_counter()
    _check(output, overwrite)
    # Imported late, so that --help and usage errors are fast.
    from lawa_lab.recipes.catalog.digits import DigitsConfig

    try:
        config = DigitsConfig(ks=(k,), epochs=epochs)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    if epochs < k:
        raise click.UsageError(
            f"--epochs {epochs} with --k {k}: the window would never be full. Train for at least k "
            "epochs, or use a smaller k."
        )
    folders = _train(config, list(range(seed, seed + _NUM_SEEDS)), output, as_json=as_json)
    if folders is None:
        click.echo(f"Stopped. The metrics so far are in {output}.", err=True)
        return 130
    _show(folders, output, begin, as_json=as_json)
    return 0


def _train(
    config: "DigitsConfig", seeds: list[int], output: Path, *, as_json: bool
) -> list[Path] | None:
    """Train every seed in a folder of its own; None if training was interrupted."""
    from lawa_lab.cli.demo_progress import show_progress
    from lawa_lab.recipes.loop import train
    from lawa_lab.recipes.run_folder import RunFolder, RunPlan
    from lawa_lab.recipes.task import Worker

    _clear(output)
    output.mkdir(parents=True, exist_ok=True)
    command = f"lawa demo --seed {seeds[0]} --k {config.ks[0]} --epochs {config.epochs}"
    (output / _CONFIG).write_text(json.dumps({"command": command, "seeds": seeds}) + "\n")
    folders = [RunFolder(output / f"seed-{seed}") for seed in seeds]
    with show_progress(seeds, config.epochs, k=config.ks[0], as_json=as_json) as view:
        for seed, folder in zip(seeds, folders, strict=True):
            plan = RunPlan(config=config, seed=seed)
            if not train(plan, folder, Worker(), callback=view).finished:
                return None
            view.on_seed_done()
    return [folder.path for folder in folders]


def _show(folders: list[Path], output: Path, begin: float, *, as_json: bool) -> None:
    """Draw the figure and print what was found."""
    from lawa_lab.report import words
    from lawa_lab.report.runs import load_runs
    from lawa_lab.report.summary import summarise

    runs = load_runs(folders)
    report = summarise(runs)
    recipe = report.recipes[0]
    note = _draw(runs, report, output)
    rows = [(metric, metric.own()[0]) for metric in recipe.metrics]
    findings = [words.finding(recipe.recipe, metric.metric, row) for metric, row in rows]
    lost = [f"{words.plain(m.metric.name)}: {text}" for m, _ in rows for text in m.losses]
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

    from lawa_lab.cli.report_tables import main_table, say

    console = Console(highlight=False)
    for metric, row in rows:
        console.print(f"\n{words.plain(metric.metric.name)}, {row.label}", style="bold")
        console.print(main_table(metric.metric, row))
    for (_, row), text in zip(rows, findings, strict=True):
        console.print(text, style="bold")
        console.print(f"{words.caveat(row)}\n", markup=False)
    console.print("Where averaging did not help:")
    for text in lost:
        say(console, text, bullet="- ")
    console.print(f"\nThe whole demo took {seconds:.0f} s, written to {output}:", soft_wrap=True)
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
    there = [p.name for p in (output / f"{_FIGURE}.png", *output.glob(_RUNS)) if p.exists()]
    if (output / _CONFIG).exists():
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


def _clear(output: Path) -> None:
    """Remove an earlier demo, but no other files."""
    from lawa_lab.recipes.run_folder import RunFolder

    for path in output.glob(_RUNS):
        RunFolder(path).clear()
        with contextlib.suppress(OSError):  # it holds other files
            path.rmdir()
    (output / f"{_FIGURE}.png").unlink(missing_ok=True)
    (output / _CONFIG).unlink(missing_ok=True)
