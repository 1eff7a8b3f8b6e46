"""`lawa demo`: train the embedded default with three seeds and show what averaging saved.

The loop is that of `lawa train digits`, a folder for each seed. This file owns the folder around
them; what the person sees is in `demo_progress` and `demo_summary`.
"""

import contextlib
import dataclasses
import json
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from torch_lawa._version import __version__
from torch_lawa.errors import ConfigError, LawaError

if TYPE_CHECKING:
    from lawa_lab.recipes.catalog.digits import DigitsConfig

__all__ = ["command"]

_NUM_SEEDS = 3
_CONFIG, _FIGURE = "demo.json", "savings.png"
_RUNS = "seed-*"


@click.command("demo")
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs/demo"),
    show_default=True,
    help="Folder for the figure and, seed by seed, metrics and averaged model.",
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
    help="How many of the latest epochs are averaged.",
)
@click.option(
    "--epochs", type=click.IntRange(min=1), default=50, show_default=True, help="Epochs per seed."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for programs.")
@click.option("--overwrite", is_flag=True, help="Replace an earlier demo in the same folder.")
def command(output: Path, seed: int, k: int, epochs: int, as_json: bool, overwrite: bool) -> int:
    """Train a small net on embedded data and show what averaging saved.

    A convolutional net with BatchNorm learns scikit-learn's handwritten digits with three seeds,
    in about a minute on two cores; nothing is downloaded. After every epoch the raw weights and
    the average of the k latest epochs are evaluated on images that were held out.
    """
    begin = time.perf_counter()
    _check(output, overwrite)
    # Only now, so that --help and mistakes are answered at once.
    from lawa_lab.recipes.catalog.digits import DigitsConfig

    try:
        config = DigitsConfig(ks=(k,), epochs=epochs)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    if epochs < k:
        raise click.UsageError(
            f"{epochs} epochs with k = {k}: the window would never be full. Train for at least k "
            "epochs, or lower k."
        )
    seeds = list(range(seed, seed + _NUM_SEEDS))
    if not _demo(config, seeds, output, begin, as_json=as_json):
        click.echo(f"Stopped. The metrics so far are in {output}.", err=True)
        return 130
    return 0


def _demo(
    config: "DigitsConfig", seeds: list[int], output: Path, begin: float, *, as_json: bool
) -> bool:
    """Train every seed and show what was found; False where it was stopped."""
    from lawa_lab.cli.demo_progress import show_progress
    from lawa_lab.cli.demo_summary import Summary
    from lawa_lab.recipes.loop import train
    from lawa_lab.recipes.run_folder import RunFolder, RunPlan
    from lawa_lab.recipes.task import Worker
    from lawa_lab.report.figures import save_demo_figure
    from torch_lawa.metrics import read_metrics

    _clear(output)
    output.mkdir(parents=True, exist_ok=True)
    _write_json(output / _CONFIG, _describe(config, seeds))
    folders = [RunFolder(output / f"seed-{seed}") for seed in seeds]
    with show_progress(seeds, config.epochs, k=config.ks[0], as_json=as_json) as view:
        for seed, folder in zip(seeds, folders, strict=True):
            plan = RunPlan(config=config, seed=seed)
            folder.write_plan(plan, {})
            if not train(plan, folder, Worker(), callback=view).finished:
                return False
            view.on_seed_done()
    rows = [row for folder in folders for row in read_metrics(folder.metrics)]
    try:
        save_demo_figure(rows, output / _FIGURE)
        note = None
    except LawaError as error:
        note = str(error)
    files = [_CONFIG, _FIGURE, *(folder.path.name for folder in folders)]
    summary = Summary(
        rows,
        output,
        [name for name in files if (output / name).exists()],
        k=config.ks[0],
        seconds=time.perf_counter() - begin,
        note=note,
    )
    if as_json:
        click.echo(json.dumps(summary.as_dict()))
    else:
        summary.show()
    return True


def _check(output: Path, overwrite: bool) -> None:
    """Refuse a folder that holds a run, unless it is a demo's and may be replaced."""
    if (output / _CONFIG).exists():
        if not overwrite:
            raise LawaError(
                f"{output} already holds a demo: pass --overwrite to replace it, or choose another "
                "folder with -o."
            )
    elif there := [path.name for path in (output / _FIGURE, *output.glob(_RUNS)) if path.exists()]:
        raise LawaError(
            f"{output} holds {', '.join(sorted(there))} of something else, which the demo does not "
            "replace: choose another folder with -o."
        )


def _clear(output: Path) -> None:
    """Remove an earlier demo; `_check` has seen that it is one."""
    from lawa_lab.recipes.run_folder import RunFolder

    for path in output.glob(_RUNS):
        RunFolder(path).clear()
        with contextlib.suppress(OSError):  # something of somebody else's is in it
            path.rmdir()
    (output / _FIGURE).unlink(missing_ok=True)
    (output / _CONFIG).unlink(missing_ok=True)


def _describe(config: "DigitsConfig", seeds: list[int]) -> dict[str, Any]:
    import torch

    return {
        "run": "lawa demo",
        "recipe": "digits",
        "command": f"lawa demo --seed {seeds[0]} --k {config.ks[0]} --epochs {config.epochs}",
        "seeds": seeds,
        "hyperparameters": dataclasses.asdict(config),
        "versions": {
            "torch_lawa": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    from torch_lawa.checkpoints.storage.atomic import replacing

    with replacing(path) as file:
        file.write((json.dumps(value, indent=2) + "\n").encode())
