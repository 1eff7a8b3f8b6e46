"""The `lawa` command: find the verbs, load the one that is called, map errors to exit codes.

Exit codes: 0 success; 1 failure, such as a file that is missing, damaged or in the way; 2 a bad
option, argument or setting (`ConfigError`); 130 interrupted. Nothing heavy is imported here, so
that `lawa --help` is fast. Other packages add verbs through the entry-point group `lawa.verbs`;
each entry is a table like `_VERBS`. The lab adds train, report and demo this way, so that the
library does not import the lab.
"""

import contextlib
import importlib
import io
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache

import click

from torch_lawa._version import __version__
from torch_lawa.cli.output import echo, shortened, tolerate_any_text
from torch_lawa.errors import ConfigError, LawaError
from torch_lawa.signals import noted_interrupts

__all__ = ["lawa", "main"]

# Verb: (module that defines `command`, one line for `lawa --help`).
Verbs = Mapping[str, tuple[str, str]]
_VERBS: Verbs = {
    "average": (
        "torch_lawa.cli.average",
        "Average checkpoints: files, folders, patterns, URLs or a run.",
    ),
    "sweep": ("torch_lawa.cli.sweep", "Average and evaluate many windows of a run in one pass."),
    "watch": ("torch_lawa.cli.watch", "Follow a live run; average again at each new checkpoint."),
    "inspect": ("torch_lawa.cli.inspect", "Show what a checkpoint contains, or compare two."),
    "plan": ("torch_lawa.cli.plan", "Estimate what averaging costs: memory, bandwidth, time."),
}


@cache
def _verbs() -> dict[str, tuple[str, str]]:
    """Our own verbs and those of installed packages.

    Looking for the latter takes longer than all the rest of this module, so they are looked for
    only where a verb is not ours.
    """
    from importlib.metadata import entry_points

    verbs = dict(_VERBS)
    for entry in entry_points(group="lawa.verbs"):
        verbs |= entry.load()
    return verbs


class _Lawa(click.Group):
    """A group that imports the module of a verb when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_verbs())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        verbs = _VERBS if cmd_name in _VERBS else _verbs()
        if cmd_name not in verbs:
            return None
        module, _ = verbs[cmd_name]
        command = importlib.import_module(module).command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(verb, summary) for verb, (_, summary) in _verbs().items()])


@click.group(cls=_Lawa, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="lawa")
def lawa() -> None:
    """LAtest Weight Averaging: better weights while the model is still training."""


def main(args: list[str] | None = None, *, verbs: Verbs | None = None) -> None:
    """Run the command, with `verbs` that are not installed as entry points, and exit."""
    sys.exit(_run(args, verbs))


def _run(args: list[str] | None, verbs: Verbs | None = None) -> int:
    try:
        with noted_interrupts() as interrupts:
            return _run_verb(args, verbs or {}, interrupts)
    except KeyboardInterrupt:  # before the verb began, or after its end
        return _stopped()


def _run_verb(args: list[str] | None, verbs: Verbs, interrupts: Sequence[int]) -> int:
    try:
        tolerate_any_text()
        _allow_open_files()
        if verbs:
            _verbs().update(verbs)
        code = lawa.main(args, prog_name="lawa", standalone_mode=False)
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(shown)
        echo(shortened(shown.getvalue().rstrip("\n")), err=True)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return _stopped()
    except ImportError:
        if not interrupts:
            raise
        return _stopped()  # NumPy reports an interrupt of its import in this way
    except MemoryError as error:
        echo(shortened(f"Error: not enough memory ({error})."), err=True)
        return 1
    except (LawaError, OSError) as error:
        echo(shortened(f"Error: {' '.join(_message(error).split())}"), err=True)
        return 2 if isinstance(error, ConfigError) else 1
    return code if isinstance(code, int) else 0


def _message(error: Exception) -> str:
    """What went wrong; of an error of the system the file first, under its final name."""
    if isinstance(error, LawaError) or not isinstance(error, OSError):
        return str(error)
    if error.filename is None or not error.strerror:
        return str(error)
    from torch_lawa.checkpoints.storage.atomic import final_name

    return f"{final_name(os.fsdecode(error.filename))}: {error.strerror}."


def _stopped() -> int:
    click.echo("Stopped.", err=True)
    return 130


def _allow_open_files() -> None:
    """Raise the limit of open files: sharded checkpoints may need more than the usual 1024."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
