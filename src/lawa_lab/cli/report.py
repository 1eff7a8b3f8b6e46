"""`lawa report`: what averaging saved, from metrics files alone."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from torch_lawa.errors import LawaError, OutputError

if TYPE_CHECKING:
    from lawa_lab.report.runs import Run
    from lawa_lab.report.summary import Report

__all__ = ["command"]

_EXAMPLES = """
\b
Examples:
  lawa report runs/cifar                    the tables of all runs below a folder
  lawa report a/metrics.jsonl b/metrics.jsonl --metric test_accuracy
  lawa report runs/cifar -o report          a page and figures as well
  lawa report runs/cifar --tensorboard events
"""

_PAGE, _JSON, _FIGURES = "report.html", "report.json", "figures"


@click.command("report", epilog=_EXAMPLES)
@click.argument(
    "metrics",
    nargs=-1,
    required=True,
    metavar="METRICS...",
    type=click.Path(exists=True, path_type=Path),
)
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Write report.html, report.json and figures here.",
)
@click.option("--k", type=click.IntRange(min=1), help="The window of the main table.")
@click.option("--metric", metavar="NAME", help="Only this value, such as test_accuracy.")
@click.option("--title", metavar="TEXT", help="Title of the page.")
@click.option(
    "--tensorboard",
    "events",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Write all series as TensorBoard event files here.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report for programs.")
@click.option("--overwrite", is_flag=True, help="Replace an earlier report in the same folder.")
def command(
    metrics: tuple[Path, ...],
    output: Path | None,
    k: int | None,
    metric: str | None,
    title: str | None,
    events: Path | None,
    as_json: bool,
    overwrite: bool,
) -> None:
    """Show what averaging saved: tables, figures, one page.

    METRICS are metrics.jsonl files, or folders with such files in or below them. Seeds of one run
    are put together; runs of one recipe are held against each other.
    """
    from lawa_lab.report.reading import files_of
    from lawa_lab.report.runs import load_runs
    from lawa_lab.report.summarising import summarise

    if output is not None and not overwrite:
        _refuse_earlier(output)
    runs = load_runs(metrics)
    report = summarise(runs, metric=metric, k=k)
    # What was asked for is printed whatever happens to the files, which may need an extra; and
    # they are written although nobody reads any more, as behind `| head`.
    unheard: BaseException | None = None
    try:
        _print(report, as_json=as_json)
    except (BrokenPipeError, SystemExit) as error:  # the latter is how rich puts it
        unheard = error
    if events is not None:
        from lawa_lab.report.tensorboard import save_events

        places = save_events(runs, events, overwrite=overwrite)
        click.echo(f"{len(places)} series in {events}: tensorboard --logdir {events}", err=True)
    if output is not None:
        _write(runs, report, output, title or _title(report), files_of(metrics))
        click.echo(f"The page is {output / _PAGE}.", err=True)
    if unheard is not None:
        raise unheard


def _print(report: "Report", *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(report.as_dict()))
        return
    from rich.console import Console

    from lawa_lab.cli.report_tables import show_report

    show_report(report, Console(highlight=False))


def _write(
    runs: "Sequence[Run]", report: "Report", output: Path, title: str, files: "Sequence[Path]"
) -> None:
    from lawa_lab.report.figures import save_figures
    from lawa_lab.report.page import save_page
    from torch_lawa.checkpoints.storage.atomic import replacing

    output.mkdir(parents=True, exist_ok=True)
    earlier = _earlier_figures(output)
    figures: list[Path] = []
    try:
        figures = save_figures(runs, report, output / _FIGURES)
        save_page(runs, report, output / _PAGE, title=title, files=files)
    except LawaError as error:  # such as a missing matplotlib
        raise LawaError(f"{error}. The tables and {output / _JSON} are complete.") from None
    finally:
        names = [path.relative_to(output).as_posix() for path in figures]
        with replacing(output / _JSON) as file:
            file.write(json.dumps({**report.as_dict(), "figures": names}).encode())
        for name in earlier - set(names):
            (output / name).unlink(missing_ok=True)


def _title(report: "Report") -> str:
    return f"What averaging saved: {', '.join(recipe.recipe for recipe in report.recipes)}"


def _earlier_figures(output: Path) -> set[str]:
    """What an earlier report drew: figures of other runs must not stay among the new ones."""
    try:
        names = json.loads((output / _JSON).read_bytes())["figures"]
    except (OSError, ValueError, KeyError, TypeError):
        return set()
    parts = {str(name): Path(str(name)).parts for name in names}
    return {name for name, path in parts.items() if path[:1] == (_FIGURES,) and ".." not in path}


def _refuse_earlier(output: Path) -> None:
    there = [name for name in (_PAGE, _JSON, _FIGURES) if (output / name).exists()]
    if there:
        raise OutputError(
            f"{output} already holds {', '.join(there)}: pass --overwrite to replace the report, "
            "or choose another folder with -o."
        )
