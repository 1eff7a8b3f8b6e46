"""A command that torchrun started on several ranks: rank 0 plans and prints, all ranks work."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import click

from torch_lawa.cli.progress import run_with_progress
from torch_lawa.errors import ConfigError
from torch_lawa.offline.threads import Meter, Stopped
from torch_lawa.ranks.world import find_world
from torch_lawa.signals import interrupt_once

if TYPE_CHECKING:
    from torch_lawa.offline.average import Result

__all__ = ["averaging", "require_one_process"]


@contextlib.contextmanager
def averaging(
    output: str, meter: Meter, *, threads: int | None, dry_run: bool = False
) -> Iterator[Callable[..., "Result"]]:
    """A function like `run_average` that runs in this process, or on all ranks of the job.

    Ranks other than 0 do their share of it here and exit. PyTorch is imported only if there are
    other ranks, and not for a dry run, which is the work of rank 0.
    """
    from torch_lawa.checkpoints.storage.paths import LocalPath, parse_location
    from torch_lawa.offline.average import run_average

    world = find_world()
    if world is None or (dry_run and world.rank == 0):
        yield run_average
        return
    if dry_run:
        raise click.exceptions.Exit(0)
    if not isinstance(parse_location(output), LocalPath):
        require_one_process(f"{output}: writing to a URL")
    interrupt_once()
    from torch_lawa.offline.multi_process import average_as_other_rank, average_as_rank_0
    from torch_lawa.ranks.connection import connected

    with connected(world, meter) as ranks:
        if world.rank == 0:
            try:
                with ranks.failing(), _stopping():
                    yield partial(average_as_rank_0, ranks=ranks, local_size=world.local_size)
            except Stopped:
                raise click.Abort from None
            return
        run_with_progress(
            lambda: average_as_other_rank(
                ranks, local_size=world.local_size, threads=threads, meter=meter
            ),
            meter,
            "",
            shown=False,
        )
    raise click.exceptions.Exit(0)


@contextlib.contextmanager
def _stopping() -> Iterator[None]:
    """Turn Ctrl-C into an `Exception`, which is reported to the other ranks."""
    try:
        yield
    except KeyboardInterrupt:
        raise Stopped from None


def require_one_process(what: str) -> None:
    """Raise if a command for one process was started on several ranks; rank 0 prints the error."""
    world = find_world()
    if world is None:
        return
    if world.rank != 0:
        raise click.exceptions.Exit(1)
    raise ConfigError(
        f"{what} is the work of one process, but the environment has WORLD_SIZE={world.size}. "
        "Start it without torchrun, or unset WORLD_SIZE."
    )
