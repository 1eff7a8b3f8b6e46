"""What every test shares."""

import pytest
import torch
from hypothesis import HealthCheck, settings

# Every run draws new examples, but none may fail for being slow on a busy machine.
settings.register_profile(
    "default", deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
settings.load_profile("default")


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
