"""The command `lawa`: its verbs, loaded when they are called, and what an exit code means.

0 is well, 1 failed, 2 a mistake on the command line, 130 stopped by Ctrl-C. Nothing heavy is
imported here: `lawa --help` must answer at once.
"""

import contextlib
import importlib
import sys

import click

from torch_lawa._version import __version__
from torch_lawa.errors import LawaError

__all__ = ["lawa", "main"]

# What `lawa --help` says of each verb; its module `torch_lawa.cli.<verb>` has the rest.
_VERBS = {
    "average": "Average checkpoints: files, folders, patterns, URLs or a run.",
    "sweep": "Average many windows of a run in one pass and evaluate them.",
    "inspect": "Show what a checkpoint holds, or how two differ.",
    "watch": "Follow a live run and write a new average when a checkpoint lands.",
    "train": "Train a recipe of the paper with averaging inside.",
    "report": "Show what averaging saved: tables, figures, one page.",
    "plan": "Work out what a window costs a run: memory, bytes, time.",
    "demo": "Train a small net on embedded data and show what averaging saved.",
}


class _Verbs(click.Group):
    """Imports the module of a verb only when that verb is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        command = importlib.import_module(f"torch_lawa.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_VERBS.items()))


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="lawa")
def lawa() -> None:
    """LAtest Weight Averaging: better weights while the model is still training."""


def main(args: list[str] | None = None) -> None:
    """Run the command and exit with its code."""
    sys.exit(_run(args))


def _run(args: list[str] | None) -> int:
    _allow_open_files()
    try:
        code = lawa.main(args, prog_name="lawa", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        click.echo("Stopped.", err=True)
        return 130
    except (LawaError, OSError) as error:
        message = " ".join(str(error).split())
        click.echo(f"Error: {message}", err=True)
        return 1
    return code if isinstance(code, int) else 0


def _allow_open_files() -> None:
    """As many as the system lets us: a run of sharded checkpoints has more than the usual 1024."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
