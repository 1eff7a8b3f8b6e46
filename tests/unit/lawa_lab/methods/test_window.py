"""Windows as methods: which steps they average, by brute force."""

import torch
from torch import nn

from lawa_lab.methods.registry import parse_method
from torch_lawa.schedule import Horizon

STEPS = 60


def weights() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, generator=generator) for _ in range(STEPS)]


def followed(text: str) -> torch.Tensor:
    model = nn.Linear(3, 2, bias=False)
    averager = parse_method(text).build(model)
    for weight in weights():
        with torch.no_grad():
            model.weight.copy_(weight)
        averager.step(model)
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
