"""`lawa train RECIPE`: the paper's experiments and their small versions.

Every recipe is a command whose options are the fields of its configuration, so that what can be
set and what can be seen in `--help` are the same.
"""

import dataclasses
import json
import os
import re
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lawa_lab.recipes.configs import RECIPES, TrainConfig
from torch_lawa.errors import ConfigError, LawaError

if TYPE_CHECKING:
    from lawa_lab.recipes.run_folder import RunFolder, RunPlan

__all__ = ["command"]


@click.group("train")
def command() -> None:
    """Train a recipe of the paper with averaging inside.

    Raw and averaged weights are evaluated side by side into RUN/metrics.jsonl; `lawa report RUN`
    shows what averaging saved. Ctrl-C saves a checkpoint; --resume goes on from it. Several GPUs:
    torchrun --nproc-per-node N -m torch_lawa train RECIPE ...
    """


def _recipe(config: type[TrainConfig]) -> click.Command:
    @click.pass_context
    def callback(ctx: click.Context, /, **options: Any) -> int:
        given = {
            name: value
            for name, value in options.items()
            if ctx.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
        }
        return _train(config, options, given)

    hyper = [_option(item, config) for item in dataclasses.fields(config)]
    about = f"{config.about}\n\nOptions with the paper's values, or ours where it is silent."
    return click.Command(
        config.recipe,
        callback=callback,
        params=[*_RUN, *hyper],
        help=about,
        short_help=config.about,
    )


_RUN: list[click.Parameter] = [
    click.Option(
        ["-o", "--output"],
        type=click.Path(file_okay=False, path_type=Path),
        help="Folder of the run.  [default: runs/RECIPE-OPTIMIZER-seed-N]",
    ),
    click.Option(
        ["--data"],
        type=click.Path(path_type=Path),
        help="Folder with the data set; an error tells what belongs there.  [default: data]",
    ),
    click.Option(
        ["--seed"],
        type=click.IntRange(min=0, max=2**32 - 1),
        default=0,
        show_default=True,
        help="Of weights, batches and dropout.",
    ),
    click.Option(
        ["--smoke"], is_flag=True, help="Seconds on a CPU with made-up data: does it run?"
    ),
    click.Option(["--resume"], is_flag=True, help="Go on from RUN's checkpoint, if there is one."),
    click.Option(["--overwrite"], is_flag=True, help="Replace a run in the same folder."),
    click.Option(
        ["--save-trajectory"],
        is_flag=True,
        help="Keep every snapshot in RUN/trajectory, for `lawa sweep`.",
    ),
    click.Option(
        ["--save-minutes"],
        type=click.FloatRange(min=0, min_open=True),
        default=10.0,
        show_default=True,
        help="Save a checkpoint to resume from so often.",
    ),
    click.Option(["--device"], help="cpu, cuda or cuda:N.  [default: a GPU where there is one]"),
    click.Option(
        ["--compile/--no-compile"],
        default=None,
        help="Use torch.compile.  [default: on a GPU, not with fsdp]",
    ),
    click.Option(
        ["--parallel"],
        type=click.Choice(["ddp", "fsdp"]),
        default="ddp",
        show_default=True,
        help="Under torchrun: a copy of the model in each process, or shards of it (FSDP2).",
    ),
    click.Option(["--dry-run"], is_flag=True, help="Print what would be run."),
    click.Option(["--json", "as_json"], is_flag=True, help="Print rows as JSON, for programs."),
]


def _option(item: "dataclasses.Field[Any]", config: type[TrainConfig]) -> click.Option:
    default = item.default
    kind = typing.get_type_hints(config)[item.name]
    flag = f"--{item.name.replace('_', '-')}"
    help = str(item.metadata.get("help") or "")
    if kind is bool:
        return click.Option([f"{flag}/--no-{flag[2:]}"], default=default, help=help)
    return click.Option([flag], type=_type(kind), default=default, show_default=True, help=help)


def _type(kind: Any) -> "click.ParamType[Any]":
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kind = next(part for part in typing.get_args(kind) if part is not types.NoneType)
    if typing.get_origin(kind) is typing.Literal:
        return click.Choice(typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return _List(typing.get_args(kind)[0])
    plain: dict[Any, click.ParamType[Any]] = {
        int: click.INT,
        float: click.FLOAT,
        str: click.STRING,
    }
    return plain[kind]


class _List(click.ParamType):  # type: ignore[type-arg]
    """Values with commas between them."""

    def __init__(self, item: Callable[[str], Any]) -> None:
        self.name, self._item = "list", item

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[Any, ...]:
        if not isinstance(value, str):
            return tuple(value)
        try:
            return tuple(self._item(part.strip()) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list like 3,6,10", param, ctx)

    def __repr__(self) -> str:
        return "LIST"


def _train(recipe: type[TrainConfig], options: Mapping[str, Any], given: Mapping[str, Any]) -> int:
    names = {item.name for item in dataclasses.fields(recipe)}
    try:
        config = recipe(**{name: value for name, value in options.items() if name in names})
        if options["smoke"]:
            asked = {name: value for name, value in given.items() if name in names}
            config = dataclasses.replace(config.smoke(), **asked)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    data = options["data"]
    if options["dry_run"]:
        shown = {"recipe": config.recipe, "seed": options["seed"], "data": data and str(data)}
        click.echo(json.dumps({**shown, **dataclasses.asdict(config)}, indent=2))
        return 0

    # Only now, so that --help and mistakes are answered at once.
    from lawa_lab.recipes.run_folder import RunFolder, RunPlan

    plan = RunPlan(
        config=config,
        seed=options["seed"],
        data=None if data is None else str(data),
        smoke=options["smoke"],
    )
    name = "-".join(re.findall(r"[\w.]+", config.run_name))  # lookahead(sgd): lookahead-sgd
    folder = RunFolder(
        options["output"] or Path("runs") / f"{config.recipe}-{name}-seed-{plan.seed}"
    )
    return _run(plan, folder, options)


def _run(plan: "RunPlan", folder: "RunFolder", options: Mapping[str, Any]) -> int:
    from lawa_lab.cli.train_progress import show_run
    from lawa_lab.recipes.loop import train
    from lawa_lab.recipes.machine import choose_place

    place = choose_place(options["device"])
    main = place.rank == 0
    if main:
        _refuse(plan, folder, options)
        folder.path.mkdir(parents=True, exist_ok=True)
    with show_run(plan, folder.path, place, as_json=options["as_json"]) as watcher:
        outcome = train(
            plan,
            folder,
            place,
            compile=options["compile"],
            parallel=options["parallel"],
            save_trajectory=options["save_trajectory"],
            save_minutes=options["save_minutes"],
            watcher=watcher,
            prepare=lambda: _prepare(plan, folder, options),
        )
    if not main:
        return 0
    if not outcome.finished:
        click.echo(
            f"Stopped after step {outcome.step} of {outcome.num_steps}; the same command with "
            f"--resume goes on from its checkpoint in {folder.path}.",
            err=True,
        )
        return 130
    if not options["as_json"]:
        click.echo(f"Finished. What averaging saved: lawa report {folder.path}")
    return 0


def _refuse(plan: "RunPlan", folder: "RunFolder", options: Mapping[str, Any]) -> None:
    """See that the folder is free, or this run's own, or may be replaced."""
    if not folder.used:
        return
    if options["resume"]:
        folder.require_same(plan)
    elif not options["overwrite"]:
        raise LawaError(
            f"{folder.path} already holds a run: pass --resume to go on with it, --overwrite "
            "to replace it, or choose another folder with -o."
        )
    elif not folder.config.exists():
        raise LawaError(
            f"{folder.path} holds metrics of something else, which is not replaced: choose "
            "another folder with -o."
        )


def _prepare(plan: "RunPlan", folder: "RunFolder", options: Mapping[str, Any]) -> None:
    """Make the folder the run's own; only now, so that a mistake neither costs nor leaves a run."""
    _refuse(plan, folder, options)  # again: another may have begun while the data was loaded
    if folder.used:
        if options["resume"]:
            return
        folder.clear()
    words = {"world_size": int(os.environ.get("WORLD_SIZE", "1"))}
    folder.write_plan(plan, words)


for _config in RECIPES.values():
    command.add_command(_recipe(_config))
