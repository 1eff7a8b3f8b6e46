"""Several processes that make one result: who is among them, as the environment says."""

import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

from torch_lawa.errors import ConfigError

__all__ = ["PATIENCE", "Team", "find_team"]

PATIENCE = "LAWA_TEAM_TIMEOUT"  # seconds without a sign of life after which a process is given up
_PATIENCE = 60.0
# What torchrun sets alike in all processes of a job; two jobs hardly ever agree in all of it. Not
# TORCHELASTIC_RESTART_COUNT: each machine counts the failures of its own.
_JOB = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "WORLD_SIZE")


@dataclass(frozen=True)
class Team:
    """A process among those of its job; rank 0 leads."""

    rank: int
    size: int
    size_here: int = 1  # processes on this machine, which share its cores
    job: str = ""
    patience: float = _PATIENCE

    @property
    def leads(self) -> bool:
        """Whether this is the process that plans, speaks and publishes."""
        return self.rank == 0


def find_team(environ: Mapping[str, str] = os.environ) -> Team | None:
    """The processes that torchrun started with this one; None where it is alone.

    >>> find_team({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}).size_here
    2
    >>> find_team({}) is None
    True
    """
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    try:
        rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        size_here = int(environ.get("LOCAL_WORLD_SIZE", "1"))
        patience = float(environ.get(PATIENCE, _PATIENCE))
    except ValueError as error:
        raise ConfigError(
            f"RANK, WORLD_SIZE, LOCAL_WORLD_SIZE and {PATIENCE} of the environment: {error}."
        ) from None
    if size == 1:
        return None
    if not (0 <= rank < size and size_here >= 1 and 0 < patience < math.inf):
        raise ConfigError(
            f"the environment has RANK={rank}, WORLD_SIZE={size}, LOCAL_WORLD_SIZE={size_here} and "
            f"{PATIENCE}={patience:g}, which cannot be. Start with torchrun, or unset RANK."
        )
    words = "\n".join(environ.get(name, "") for name in _JOB)
    job = hashlib.sha256(words.encode()).hexdigest()[:12]
    return Team(rank, size, min(size_here, size), job, patience)
