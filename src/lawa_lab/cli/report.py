"""`lawa report`: what averaging saved, from metrics files alone."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from torch_lawa.errors import LawaError, OutputError
from torch_lawa.validation import DAMAGE

if TYPE_CHECKING:
    from lawa_lab.report.runs import Run
    from lawa_lab.report.summary import Report

__all__ = ["command"]

_EXAMPLES = """
\b
Examples:
  lawa report runs/cifar                    tables of all runs below a folder
  lawa report a/metrics.jsonl b/metrics.jsonl --metric test_accuracy
  lawa report runs/cosine runs/constant     annealed runs against constant-rate runs
  lawa report runs/cifar -o report          also write a page and figures
  lawa report runs/cifar --tensorboard events
"""

_PAGE, _JSON, _FIGURES = "report.html", "report.json", "figures"


class _Command(click.Command):
    """Lists the figures of the registry below the examples."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        from lawa_lab.report.figures import FIGURES

        with formatter.section("Figures (those that the rows have data for)"):
            formatter.write_dl([(kind.name, kind.heading) for kind in FIGURES.values()])


@click.command("report", cls=_Command, epilog=_EXAMPLES)
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
    help="Write report.html, report.json and figures to FOLDER.",
)
@click.option("--k", type=click.IntRange(min=1), help="Window length k of the main table.")
@click.option("--metric", metavar="NAME", help="Report only this metric, such as test_accuracy.")
@click.option("--title", metavar="TEXT", help="Title of the page.")
@click.option(
    "--tensorboard",
    "events",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Write all series to FOLDER as TensorBoard event files.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
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
    """Show what averaging saved, as tables, figures and one page.

    METRICS are metrics files or folders. For a folder, all metrics.jsonl files in and below it are
    read; if there are none, its other .jsonl files with rows of weights, each as one run. Seeds of
    a run are combined, and runs of a recipe are compared. Annealed runs of several lengths and
    averages of constant-rate runs are shown as a frontier.
    """
    from lawa_lab.report.rows import find_empty, find_files
    from lawa_lab.report.runs import load_runs
    from lawa_lab.report.summary import summarise

    if output is not None and not overwrite:
        _refuse_earlier(output)
    runs = load_runs(metrics)
    for file in find_empty(metrics):
        click.echo(f"Note: {file} is empty, so it is left out.", err=True)
    report = summarise(runs, metric=metric, k=k)
    # The tables are printed even if writing files fails, for example without matplotlib; and the
    # files are written even if nobody reads the tables any more, as in `| head`.
    unheard: BaseException | None = None
    try:
        _print(report, as_json=as_json)
    except (BrokenPipeError, SystemExit) as error:  # the latter is rich's reaction to a closed pipe
        unheard = error
    if events is not None:
        from lawa_lab.report.tensorboard import save_events

        folders = save_events(runs, events, overwrite=overwrite)
        click.echo(f"{len(folders)} series in {events}: tensorboard --logdir {events}", err=True)
    if output is not None:
        _write(runs, report, output, title or "What averaging saved", list(find_files(metrics)))
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
    known = _earlier_figures(output)
    names: list[str] = []

    def list_figures(figures: list[str]) -> None:
        with replacing(output / _JSON) as file:
            file.write(json.dumps({**report.as_dict(), "figures": figures}).encode())

    def announce(paths: list[Path]) -> None:
        """List the figures before they are written, so that none is left if this is killed."""
        known.update(path.relative_to(output).as_posix() for path in paths)
        list_figures(sorted(known))

    try:
        figures = save_figures(runs, report, output / _FIGURES, announce)
        names = [path.relative_to(output).as_posix() for path in figures]
        save_page(runs, report, output / _PAGE, title=title, files=files)
    except LawaError as error:  # for example without matplotlib
        raise LawaError(f"{error}. The tables and {output / _JSON} are complete.") from None
    finally:
        list_figures(names)
        for name in known - set(names):
            (output / name).unlink(missing_ok=True)


def _earlier_figures(output: Path) -> set[str]:
    """The figures of an earlier report, which must not be left among the new ones.

    Of one that was killed, also those that it was going to write.
    """
    try:
        names = set(json.loads((output / _JSON).read_bytes())["figures"])
        parts = {name: Path(name).parts for name in names}
        inside = {n for n, path in parts.items() if path[:1] == (_FIGURES,) and ".." not in path}
        return {name for name in inside if (output / name).is_file()}
    except (OSError, *DAMAGE):
        return set()


def _refuse_earlier(output: Path) -> None:
    there = [name for name in (_PAGE, _JSON, _FIGURES) if (output / name).exists()]
    if there:
        raise OutputError(
            f"{output} already holds {', '.join(there)}. Pass --overwrite to replace the report, "
            "or choose another folder with -o."
        )
