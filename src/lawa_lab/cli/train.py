"""`lawa train RECIPE`: the paper's experiments and their small versions.

Every registered recipe is a command, and every field of its configuration is an option.
"""

import contextlib
import dataclasses
import json
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lawa_lab.recipes.config import TrainConfig
from lawa_lab.recipes.registry import RECIPES
from torch_lawa.cli.options import ParsedNumber
from torch_lawa.errors import ConfigError
from torch_lawa.units import parse_number

if TYPE_CHECKING:
    from lawa_lab.recipes.budgets import BudgetedRun
    from lawa_lab.recipes.loop import Outcome, Target
    from lawa_lab.recipes.run_folder import IfUsed, RunPlan
    from lawa_lab.recipes.task import Worker

__all__ = ["command"]


class _Recipes(click.Group):
    """One command per registered recipe."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(RECIPES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return _recipe(RECIPES[cmd_name]) if cmd_name in RECIPES else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, completes = args[0], ctx.resilient_parsing  # a shell that completes wants no error
        if not completes and not name.startswith("-") and name not in RECIPES:
            ctx.fail(f"no recipe {name!r}; choose from {', '.join(self.list_commands(ctx))}.")
        return super().resolve_command(ctx, args)


@click.command("train", cls=_Recipes)
def command() -> None:
    """Train a recipe and evaluate its raw and averaged weights.

    Results of raw and averaged weights are written to RUN/metrics.jsonl; `lawa report RUN` shows
    what averaging saved. Ctrl-C saves a checkpoint; --resume continues from it. For several GPUs:
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
    about = config.about
    if config.from_paper:
        about += "\n\nDefaults are the paper's values, or our own where the paper gives none."
    run = [option for option in _RUN if config.reads_data or option.name != "data"]
    return click.Command(
        config.recipe,
        callback=callback,
        params=[*run, *hyper],
        help=about,
        short_help=config.about,
    )


def _number(text: str) -> int | float:
    """A whole number stays one, so that 200 is not shown as 200.0."""
    return int(text) if text.strip().isdecimal() else parse_number(text)


class _List(click.ParamType):  # type: ignore[type-arg]
    """Comma-separated values.

    No text of a list begins with a number, so a number belongs to the text before it, as in
    `uniform,explicit:1,2,3`.
    """

    def __init__(self, item: Callable[[str], Any]) -> None:
        self.name, self._item = "list", item

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[Any, ...]:
        if not isinstance(value, str):
            return tuple(value)
        try:
            parts = [part.strip() for part in value.split(",")] if value.strip() else []
            return tuple(map(self._item, _joined(parts) if self._item is str else parts))
        except ValueError:
            self.fail(f"{value!r} is not a list like 3,6,10", param, ctx)

    def __repr__(self) -> str:
        return "LIST"


def _joined(parts: list[str]) -> list[str]:
    """Texts, each with the numbers that follow it."""
    texts: list[str] = []
    for part in parts:
        try:
            float(part)
        except ValueError:
            texts.append(part)
        else:
            texts[-1:] = [",".join([*texts[-1:], part])]
    return texts


_RUN: list[click.Parameter] = [
    click.Option(
        ["-o", "--output"],
        type=click.Path(file_okay=False, path_type=Path),
        help="Folder of the run.  [default: runs/RECIPE-OPTIMIZER-seed-N]",
    ),
    click.Option(
        ["--data"],
        type=click.Path(path_type=Path),
        help="Folder of the data set; if it is missing, the error says what to download.  "
        "[default: data]",
    ),
    click.Option(
        ["--seed"],
        type=click.IntRange(min=0, max=2**32 - 1),
        default=0,
        show_default=True,
        help="Seed for initialisation, data order and dropout.",
    ),
    click.Option(
        ["--smoke"],
        is_flag=True,
        help="Train a tiny version on synthetic data, in seconds on a CPU.",
    ),
    click.Option(["--resume"], is_flag=True, help="Continue from the run's checkpoint, if any."),
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
        help="Minutes between checkpoints.",
    ),
    click.Option(["--device"], help="cpu, cuda or cuda:N.  [default: cuda if available]"),
    click.Option(
        ["--compile/--no-compile"],
        default=None,
        help="Use torch.compile.  [default: on a GPU, except with fsdp]",
    ),
    click.Option(
        ["--parallel"],
        type=click.Choice(["ddp", "fsdp"]),
        default="ddp",
        show_default=True,
        help="Under torchrun: replicate the model (DDP) or shard it (FSDP2).",
    ),
    click.Option(
        ["--budgets"],
        type=_List(_number),
        help="Train one run per number of epochs, such as 30,60,100, with the same seed and data "
        "order, each in a folder inside RUN. A constant-rate run is trained once for all of them, "
        "and landings branch off it.",
    ),
    click.Option(
        ["--until"],
        metavar="METRIC=VALUE",
        help="Stop when the average reaches this value, such as test_accuracy=0.784.",
    ),
    click.Option(["--dry-run"], is_flag=True, help="Print the settings and exit."),
    click.Option(["--json", "as_json"], is_flag=True, help="Print results as JSON Lines."),
]


def _option(item: "dataclasses.Field[Any]", config: type[TrainConfig]) -> click.Option:
    default = item.default
    kind = typing.get_type_hints(config)[item.name]
    flag = f"--{item.name.replace('_', '-')}"
    help = str(config.settings()[item.name]["help"])
    if kind is bool:
        return click.Option([f"{flag}/--no-{flag[2:]}"], default=default, help=help)
    return click.Option([flag], type=_type(kind), default=default, show_default=True, help=help)


def _type(kind: Any) -> "click.ParamType[Any]":
    if kind == int | float:
        return ParsedNumber("number", _number)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kind = next(part for part in typing.get_args(kind) if part is not types.NoneType)
    if typing.get_origin(kind) is typing.Literal:
        return click.Choice(typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        return _List(parse_number if item is float else item)
    plain: dict[Any, click.ParamType[Any]] = {
        int: click.INT,
        float: ParsedNumber("float", parse_number),
        str: click.STRING,
    }
    return plain[kind]


def _train(recipe: type[TrainConfig], options: Mapping[str, Any], given: Mapping[str, Any]) -> int:
    names = {item.name for item in dataclasses.fields(recipe)}
    try:
        config = recipe(**{name: value for name, value in options.items() if name in names})
        if options["smoke"]:
            asked = {name: value for name, value in given.items() if name in names}
            config = dataclasses.replace(config.smoke(), **asked)
    except ConfigError as error:
        raise click.UsageError(_with_options(str(error), names)) from None
    if options["resume"] and options["overwrite"]:
        raise click.UsageError("--resume and --overwrite: pass only one.")
    if options["budgets"] is not None and "epochs" in given:
        raise click.UsageError(
            "--budgets and --epochs: pass only one. --budgets gives the numbers of epochs."
        )
    _check_evaluations(config, options["budgets"])
    data = options.get("data")
    if options["dry_run"]:
        shown = {"recipe": config.recipe, "seed": options["seed"], "data": data and str(data)}
        click.echo(json.dumps({**shown, **dataclasses.asdict(config)}, indent=2))
        return 0

    # Imported late, so that --help and usage errors do not wait for torch.
    from lawa_lab.recipes.run_folder import RunPlan

    plan = RunPlan(
        config=config,
        seed=options["seed"],
        data=None if data is None else str(data),
        smoke=options["smoke"],
    )
    name = "-".join(re.findall(r"[\w.]+", plan.run_name))  # lookahead(sgd): lookahead-sgd
    path = options["output"] or Path("runs") / f"{config.recipe}-{name}-seed-{plan.seed}"
    try:
        return _run(plan, path, options)
    except ConfigError as error:  # of what is known when the data is loaded
        raise ConfigError(_with_options(str(error), options)) from None


def _check_evaluations(config: TrainConfig, budgets: Sequence[int | float] | None) -> None:
    """Refuse evaluations that no run would have; a short one of several budgets may miss some."""
    if budgets and config.evaluate_at and config.schedule == "constant":
        raise click.UsageError(
            "--budgets and --evaluate-at: a constant-rate run is evaluated at its budgets. Pass "
            "only --budgets."
        )
    longest = max(budgets or [config.epochs])
    beyond = [f"{epochs:g}" for epochs in config.evaluate_at if epochs > longest]
    if beyond:
        raise click.UsageError(
            f"--evaluate-at {','.join(beyond)}: the run ends after {longest:g} epochs."
        )


def _with_options(message: str, names: Collection[str]) -> str:
    """A message about settings, with the options that a user has typed: --land 0.2 for land=0.2."""

    def option(match: re.Match[str]) -> str:
        name = match[1].replace("_", "-")
        return f"--{name} " if match[1] in names else match[0]

    return re.sub(r"(?<!\S)(\w+)=", option, message)  # not in a path


def _run(plan: "RunPlan", path: Path, options: Mapping[str, Any]) -> int:
    from lawa_lab.recipes.budgets import BudgetedRun, plan_budgets
    from lawa_lab.recipes.loop import Target
    from lawa_lab.recipes.run_folder import RunFolder
    from lawa_lab.recipes.runtime import choose_worker

    if_used: IfUsed = (
        "resume" if options["resume"] else "overwrite" if options["overwrite"] else "refuse"
    )
    try:
        until = Target.parse(options["until"]) if options["until"] else None
        if options["budgets"] is not None:
            runs = plan_budgets(plan, options["budgets"], path, if_used=if_used)
        else:
            runs = [BudgetedRun(plan, RunFolder(path, if_used=if_used))]
        if until is not None and any(run.branches for run in runs):
            raise ConfigError(
                "--until with --land and --budgets: a run that stops early does not reach its "
                "landings. Leave out --until, or one of the other two."
            )
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    worker = choose_worker(options["device"])
    with contextlib.ExitStack() as stack:
        if worker.rank == 0:  # before the data is loaded, which may take a while
            for run in runs:
                for part in run.parts:
                    stack.enter_context(part.folder.reserved(part.plan))
        for number, run in enumerate(runs, start=1):
            later = [other.plan for other in runs[number:]]
            code = _train_one(run, later, until, worker, options)
            if code:
                return code
    if worker.rank == 0 and not options["as_json"]:
        click.echo(f"Finished. What averaging saved: lawa report {path}")
    return 0


def _train_one(
    run: "BudgetedRun",
    later: "Sequence[RunPlan]",
    until: "Target | None",
    worker: "Worker",
    options: Mapping[str, Any],
) -> int:
    from lawa_lab.cli.train_progress import show_run
    from lawa_lab.recipes.loop import train

    with show_run(run.plan, run.folder.path, worker, as_json=options["as_json"]) as callback:
        outcome = train(
            run.plan,
            run.folder,
            worker,
            compile=options["compile"],
            parallel=options["parallel"],
            save_trajectory=options["save_trajectory"],
            save_minutes=options["save_minutes"],
            until=until,
            branches=run.branches,
            later=later,
            callback=callback,
        )
    if worker.rank != 0:
        return 0
    if not outcome.finished:
        click.echo(
            f"Stopped after step {outcome.step} of {outcome.num_steps}. Continue from the "
            f"checkpoint in {run.folder.path} with the same command and --resume.",
            err=True,
        )
        return 130
    if until is not None and not options["as_json"]:
        click.echo(_say_target(until, outcome))
    return 0


def _say_target(until: "Target", outcome: "Outcome") -> str:
    target = f"{until.metric} {until.value:g}"
    if outcome.reached is None:
        return f"The average did not reach {target} in {outcome.num_steps} steps."
    row, already = outcome.reached, "" if outcome.num_trained else " had already"
    saved = 1 - row["step"] / outcome.num_steps
    left = f"{saved:.0%} of the planned training was not needed" if saved else "nothing was saved"
    text = (
        f"The average{already} reached {target} (it has {row[until.metric]:.4f}) after "
        f"{row['step']} of {outcome.num_steps} steps, epoch {row['epoch']:g}: {left}."
    )
    return text if outcome.num_trained else f"{text} Nothing was trained."
