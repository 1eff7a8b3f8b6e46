"""Which ranks there are, according to the environment."""

import pytest

from torch_lawa.errors import ConfigError
from torch_lawa.ranks.world import find_world


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "'x'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LAWA_RANK_TIMEOUT": "0"}, "LAWA_RANK_TIMEOUT=0"),
    ],
)
def test_an_inconsistent_environment(environ: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        find_world(environ)


def test_a_world_of_one_is_none() -> None:
    assert find_world({"RANK": "0", "WORLD_SIZE": "1"}) is None
    assert find_world({"WORLD_SIZE": "4"}) is None
