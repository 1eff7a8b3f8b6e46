"""`lawa demo`: train the embedded default with three seeds and show what averaging saved.

This file owns the run folder; what the person sees is in `demo_progress` and
`demo_summary`.
"""

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
    from torch_lawa.recipes.digits import DigitsConfig

__all__ = ["command"]

_NUM_SEEDS = 3
_CONFIG, _METRICS, _MODEL, _FIGURE = (
    "config.json",
    "metrics.jsonl",
    "averaged.safetensors",
    "savings.png",
)
_FILES = (_METRICS, _MODEL, _FIGURE, _CONFIG)  # the config goes last: it says whose they are


@click.command("demo")
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs/demo"),
    show_default=True,
    help="Folder for metrics, config, averaged model and figure.",
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
    from torch_lawa.recipes.digits import DigitsConfig

    try:
        config = DigitsConfig(k=k, epochs=epochs)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    try:
        _demo(config, list(range(seed, seed + _NUM_SEEDS)), output, begin, as_json=as_json)
    except KeyboardInterrupt:
        kept = output / _METRICS
        where = f" The metrics so far are in {kept}." if kept.exists() else ""
        click.echo(f"Stopped.{where}", err=True)
        return 130
    return 0


def _demo(
    config: "DigitsConfig", seeds: list[int], output: Path, begin: float, *, as_json: bool
) -> None:
    from torch_lawa.checkpoints.tensors import save_tensors
    from torch_lawa.cli.demo_progress import show_progress
    from torch_lawa.cli.demo_summary import Summary
    from torch_lawa.core.records import MetricsWriter, read_metrics
    from torch_lawa.recipes import digits
    from torch_lawa.reporting.figures import save_demo_figure

    data = digits.load_data(config)
    for name in _FILES:  # of an earlier demo: `_check` has seen to that
        (output / name).unlink(missing_ok=True)
    output.mkdir(parents=True, exist_ok=True)
    _write_json(output / _CONFIG, _describe(config, seeds))
    metrics_path = output / _METRICS
    with (
        MetricsWriter(metrics_path) as metrics,
        show_progress(seeds, config.epochs, k=config.k, as_json=as_json) as view,
    ):
        for seed in seeds:
            averaged = digits.train(
                config, data, seed=seed, metrics=metrics, on_epoch=view.on_epoch
            )
            view.on_seed_done()
            if seed == seeds[0]:
                notes = {"recipe": "digits", "seed": str(seed), "k": str(config.k)}
                save_tensors(output / _MODEL, averaged, metadata=notes)
    rows = read_metrics(metrics_path)
    try:
        save_demo_figure(rows, output / _FIGURE)
        note = None
    except LawaError as error:
        note = str(error)
    files = [name for name in (_METRICS, _CONFIG, _MODEL, _FIGURE) if (output / name).exists()]
    summary = Summary(
        rows, output, files, k=config.k, seconds=time.perf_counter() - begin, note=note
    )
    if as_json:
        click.echo(json.dumps(summary.as_dict()))
    else:
        summary.show()


def _check(output: Path, overwrite: bool) -> None:
    """Refuse a folder that holds a run, unless it is a demo's and may be replaced."""
    there = [name for name in _FILES if (output / name).exists()]
    if not there:
        return
    if not _is_demo(output / _CONFIG):
        raise LawaError(
            f"{output} holds {', '.join(there)} of another run, which the demo does not replace: "
            "choose another folder with -o."
        )
    if not overwrite:
        raise LawaError(
            f"{output} already holds a demo: pass --overwrite to replace it, or choose another "
            "folder with -o."
        )


def _is_demo(path: Path) -> bool:
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("run") == "lawa demo"


def _describe(config: "DigitsConfig", seeds: list[int]) -> dict[str, Any]:
    import torch

    return {
        "run": "lawa demo",
        "recipe": "digits",
        "command": f"lawa demo --seed {seeds[0]} --k {config.k} --epochs {config.epochs}",
        "seeds": seeds,
        "hyperparameters": dataclasses.asdict(config),
        "versions": {
            "torch_lawa": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    from torch_lawa.checkpoints.files import replacing

    with replacing(path) as file:
        file.write((json.dumps(value, indent=2) + "\n").encode())
