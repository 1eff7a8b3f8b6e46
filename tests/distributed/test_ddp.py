"""DDP in a training loop of one's own: evaluating the average does not change training."""

import torch
from support.ranks import on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torch_lawa import LatestWeightAverager


class Centred(nn.Module):
    """Each rank follows its own batches in a buffer, which the next forward pass uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2)
        self.register_buffer("centre", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x) - self.centre
        if self.training:
            self.centre.lerp_(hidden.detach().mean(0), 0.1)
        return hidden


def trained(rank: int, evaluates: bool) -> dict[str, Tensor]:
    model = DistributedDataParallel(Centred())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    averager = LatestWeightAverager(k=2, min_snapshots=1)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(4, 3, generator=generator)).square().sum().backward()
        optimizer.step()
        averager.collect(model)
        if evaluates:
            model.eval()
            with averager.swapped_into(model), torch.no_grad():
                model(torch.ones(1, 3))
            model.train()
    return model.module.state_dict()


def test_buffers_are_still_synchronised_after_an_evaluation() -> None:
    for alone, beside in zip(on_ranks(2, trained, False), on_ranks(2, trained, True), strict=True):
        for name, tensor in alone.items():
            assert torch.equal(beside[name], tensor), name
