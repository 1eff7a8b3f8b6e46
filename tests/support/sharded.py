"""Models for tests of shards: new values that do not depend on how they are sharded."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


class Net(nn.Module):
    """Uneven sizes, a tied weight, an empty part on some rank, BatchNorm, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.wide = nn.Linear(6, 8)
        self.narrow = nn.Linear(8, 6)
        self.small = nn.Linear(6, 1)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(6, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.narrow(torch.relu(self.wide(self.norm(self.embed(x)))))
        return self.head(hidden + self.small(hidden) + self.frozen(hidden).mean(1, keepdim=True))


def refill(model: nn.Module, step: int) -> None:
    """New values of what is trained, those of this step; buffers are filled with its number."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in model.parameters():
            value = torch.randn(parameter.shape, generator=generator)
            if not parameter.requires_grad:
                continue
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            parameter.copy_(value)
        for buffer in model.buffers():
            buffer.fill_(step)
