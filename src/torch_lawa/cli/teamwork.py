"""A command that torchrun started several times: rank 0 leads and speaks, the others help."""

import contextlib
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from torch_lawa.cli.working import while_shown
from torch_lawa.errors import ConfigError
from torch_lawa.offline.engine import Meter
from torch_lawa.offline.team import find_team

if TYPE_CHECKING:
    from torch_lawa.offline.leading import Leader

__all__ = ["as_team", "refuse_team"]


@contextlib.contextmanager
def as_team(
    output: str, meter: Meter, *, threads: int | None, alone: bool
) -> Iterator["Leader | None"]:
    """Lead the other processes in the block, if there are any; they help, and end here.

    `alone` leaves the others out: rank 0 has nothing for them to do.
    """
    from torch_lawa.checkpoints.storage.paths import LocalPath, parse_location

    team = find_team()
    if team is None or (team.leads and alone):
        yield None
        return
    if alone:
        raise click.exceptions.Exit(0)
    location = parse_location(output)
    if not isinstance(location, LocalPath):
        refuse_team(f"{output}: writing to a URL")
        return
    # How torchrun ends the rest of a job; what was written aside is to be removed then, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if team.leads:
        from torch_lawa.offline.leading import leading

        with leading(team, location.path, meter) as leader:
            yield leader
        return
    from torch_lawa.offline.following import follow

    def help_leader() -> None:
        follow(team, location.path, threads=threads, meter=meter)

    while_shown(help_leader, meter, "", shown=False)
    raise click.exceptions.Exit(0)


def refuse_team(what: str) -> None:
    """Refuse to do in every process what one should do; rank 0 says so for all."""
    team = find_team()
    if team is None:
        return
    if not team.leads:
        raise click.exceptions.Exit(1)
    raise ConfigError(
        f"{what} is the work of one process, and the environment says that there are {team.size} "
        "(WORLD_SIZE). Start it without torchrun, or unset WORLD_SIZE."
    )
