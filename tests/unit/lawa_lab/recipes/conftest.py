"""What the tests of recipes share."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data_set() -> Callable[[str], Path]:
    """The folder of a real data set; these are not part of the project."""

    def find(name: str) -> Path:
        parent = os.environ.get("LAWA_DATA")
        if not parent:
            pytest.skip("LAWA_DATA does not name a folder with the data sets")
        folder = Path(parent, name)
        if not folder.exists():
            pytest.skip(f"{folder} is not there")
        return folder

    return find
