"""What the tests of recipes share."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of the real data sets, which are not part of the project."""
    folder = os.environ.get("LAWA_DATA")
    if not folder:
        pytest.skip("LAWA_DATA does not name a folder with the data sets")
    return Path(folder)
