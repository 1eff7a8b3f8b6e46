"""The processes that torchrun started together, according to the environment. Without PyTorch."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

from torch_lawa.errors import ConfigError

__all__ = ["TIMEOUT", "World", "find_world"]

TIMEOUT = "LAWA_RANK_TIMEOUT"  # seconds without a heartbeat after which a rank is given up
_TIMEOUT = 60.0


@dataclass(frozen=True)
class World:
    """One process among those of its job."""

    rank: int
    size: int
    local_size: int = 1  # processes on this machine, which share its cores
    timeout: float = _TIMEOUT


def find_world(environ: Mapping[str, str] = os.environ) -> World | None:
    """The processes that torchrun started with this one; None if there are no others.

    >>> find_world({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}).local_size
    2
    >>> find_world({}) is None
    True
    """
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    try:
        rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        local_size = int(environ.get("LOCAL_WORLD_SIZE", "1"))
        timeout = float(environ.get(TIMEOUT, _TIMEOUT))
    except ValueError as error:
        raise ConfigError(
            f"RANK, WORLD_SIZE, LOCAL_WORLD_SIZE and {TIMEOUT} of the environment: {error}."
        ) from None
    if size == 1:
        return None
    if not (0 <= rank < size and local_size >= 1 and 0 < timeout < math.inf):
        raise ConfigError(
            f"the environment has RANK={rank}, WORLD_SIZE={size}, LOCAL_WORLD_SIZE={local_size} "
            f"and {TIMEOUT}={timeout:g}, which is inconsistent. Start with torchrun, or unset RANK."
        )
    return World(rank, size, min(local_size, size), timeout)
