"""Options that several verbs share: one definition and one help text for each."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click

from torch_lawa.checkpoints.formats.registry import output_layouts
from torch_lawa.coefficients import coefficients_help
from torch_lawa.offline.options import MAX_THREADS
from torch_lawa.units import parse_bytes

__all__ = [
    "ParsedNumber",
    "average_options",
    "dry_run_option",
    "json_option",
    "key_option",
    "parse_numbers",
    "selection_options",
    "threads_option",
]


class ParsedNumber(click.ParamType):  # type: ignore[type-arg]
    """A number that a function reads from text, such as the bytes of 5GB."""

    def __init__(self, name: str, parse: Callable[[str], int | float]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: Any, ctx: Any) -> int | float:
        """The number; what cannot be read is a usage error."""
        try:
            return self._parse(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)


Command = Callable[..., None]
Decorator = Callable[[Command], Command]
_Number = TypeVar("_Number", int, float)

key_option = click.option(
    "--key",
    metavar="KEY",
    help="Key of the weights in a checkpoint, e.g. ema; for Megatron also: masters.",
)
threads_option = click.option(
    "--threads",
    type=click.IntRange(min=1, max=MAX_THREADS),
    metavar="N",
    show_default="one per core, at most 8; 16 for URLs",
    help="Number of threads.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
dry_run_option = click.option("--dry-run", is_flag=True, help="Print the plan and exit.")

# The fields of `AverageOptions`, in the order of `--help`.
_AVERAGE: dict[str, Decorator] = {
    "coefficients": click.option(
        "--coefficients",
        default="uniform",
        show_default=True,
        metavar="RULE",
        help=f"Weights of the checkpoints: {coefficients_help()}.",
    ),
    "blend": click.option(
        "--blend",
        type=float,
        metavar="B",
        help="Output B * mean + (1 - B) * newest checkpoint, e.g. 0.6.",
    ),
    "dtype": click.option(
        "--dtype", metavar="DTYPE", help="Write floating-point tensors as DTYPE, e.g. bfloat16."
    ),
    "include": click.option(
        "--include",
        multiple=True,
        metavar="PATTERN",
        help="Write only tensors whose name matches PATTERN (repeatable).",
    ),
    "exclude": click.option(
        "--exclude",
        multiple=True,
        metavar="PATTERN",
        help="Leave out tensors whose name matches PATTERN (repeatable).",
    ),
    "strip_prefix": click.option(
        "--strip-prefix", default="", metavar="PREFIX", help="Remove PREFIX from tensor names."
    ),
    "buffers": click.option(
        "--buffers",
        type=click.Choice(["newest", "average"]),
        default="newest",
        show_default=True,
        help="Copy BatchNorm statistics from the newest checkpoint, or average them.",
    ),
    "layout": click.option(
        "--layout",
        type=click.Choice(output_layouts()),
        show_default="that of the newest checkpoint",
        help="Layout of the output.",
    ),
    "max_shard_size": click.option(
        "--max-shard-size",
        type=ParsedNumber("size", parse_bytes),
        metavar="SIZE",
        help="Split the output into shards of at most SIZE, e.g. 5GB.",
    ),
    "key": key_option,
}


def average_options(*, without: tuple[str, ...] = ()) -> Callable[[Command], Command]:
    """Add the options of `AverageOptions`; the command gets them as one object, `options`."""
    names = [name for name in _AVERAGE if name not in without]

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def wrapped(**values: Any) -> None:
            from torch_lawa.offline.options import AverageOptions

            given = {name: values.pop(name) for name in names}
            command(options=AverageOptions(**given), **values)

        decorated: Command = wrapped
        for name in reversed(names):
            decorated = _AVERAGE[name](decorated)
        return decorated

    return decorate


def selection_options(command: Command) -> Command:
    """Add `--from`, `--to` and `--every`, which select checkpoints of a run."""
    for option in (
        click.option(
            "--every",
            type=int,
            metavar="N",
            help="Use only checkpoints whose step is divisible by N.",
        ),
        click.option("--to", "stop", type=int, metavar="STEP", help="Skip checkpoints after STEP."),
        click.option(
            "--from", "start", type=int, metavar="STEP", help="Skip checkpoints before STEP."
        ),
    ):
        command = option(command)
    return command


def parse_numbers(text: str, parse: Callable[[str], _Number], option: str) -> list[_Number]:
    """The numbers of an option like `--k 2,4,6`, each read by `parse`: `int` or `parse_number`."""
    try:
        return [parse(part) for part in text.split(",")]
    except ValueError:
        what = "whole numbers such as 1,2,3" if parse is int else "numbers such as 0.1,1/4"
        raise click.BadParameter(f"{text!r} is not a list of {what}", param_hint=option) from None
