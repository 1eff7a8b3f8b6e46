"""Windows as methods: which steps they average, by brute force, also after resuming."""

import copy

import pytest
import torch
from torch import nn

from lawa_lab.methods.registry import parse_method
from torch_lawa.errors import ConfigError
from torch_lawa.schedule import Horizon

STEPS = 60


def weights() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, generator=generator) for _ in range(STEPS)]


def followed(text: str, *, resume_after: int = -1) -> torch.Tensor:
    model = nn.Linear(3, 2, bias=False)
    averager = parse_method(text).build(model)
    for step, weight in enumerate(weights(), 1):
        with torch.no_grad():
            model.weight.copy_(weight)
        averager.step(model)
        if step == resume_after:
            state = copy.deepcopy(averager.state_dict())
            averager = parse_method(text).build(nn.Linear(3, 2, bias=False))
            averager.load_state_dict(state)
    with averager.swapped_into(model):
        return model.weight.detach().clone()


def collected(share: float, k: int) -> list[int]:
    schedule = Horizon(share, k=k)
    steps = [step for step in range(1, STEPS + 1) if schedule.due(step)]
    return steps[-k - 1 :]  # and the one before the window


def test_a_dense_window_averages_every_step_up_to_now() -> None:
    first = collected(0.5, 4)[0]
    wanted = torch.stack(weights()[first:]).mean(0)
    torch.testing.assert_close(followed("dense:0.5:4"), wanted, rtol=1e-5, atol=1e-6)


def test_a_plain_window_averages_its_snapshots_and_a_blend_the_live_weights() -> None:
    values = weights()
    mean = torch.stack([values[step - 1] for step in collected(0.5, 4)[1:]]).mean(0)
    torch.testing.assert_close(followed("horizon:0.5:4"), mean)
    blend = 0.4 * values[-1] + 0.6 * mean
    torch.testing.assert_close(followed("horizon:0.5:4:0.6"), blend)


@pytest.mark.parametrize("text", ["dense:0.5:4", "horizon:0.5:4", "growing-ema:0.1", "swa:20"])
@pytest.mark.parametrize("step", [1, 30, 45])
def test_resumed_bit_for_bit(text: str, step: int) -> None:
    assert torch.equal(followed(text, resume_after=step), followed(text))


@pytest.mark.parametrize(
    "text",
    ["dense:0.5", "dense:2:4", "horizon:0.5:1.5", "horizon:0.5:4:2", "growing-ema:0", "swa:-1"],
)
def test_mistakes_are_told(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_method(text)
