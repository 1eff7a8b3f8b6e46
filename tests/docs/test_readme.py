"""The first two blocks of README.md run, and do what the text around them says."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

README = Path(__file__).parents[2] / "README.md"


def test_the_two_loops() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = [torch.randn(8, 2) for _ in range(40)]
    evaluated: list[Tensor] = []

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
        model.train()
        optimizer.zero_grad()
        model(batch).square().sum().backward()
        optimizer.step()

    def train_one_epoch(model: nn.Module, optimizer: Any, loader: list[Tensor]) -> None:
        for batch in loader[:3]:
            train_step(model, optimizer, batch)

    names: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "train_loader": loader,
        "val_loader": loader,
        "train_step": train_step,
        "train_one_epoch": train_one_epoch,
        "epochs": 8,
        "evaluate": lambda model, _: evaluated.append(model[0].weight.detach().clone()),
    }
    by_epochs, growing = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[:2]
    exec(by_epochs, names)
    assert len(evaluated) == 3  # from the sixth epoch on
    assert torch.equal(evaluated[-1], names["averager"].average()["0.weight"])
    assert not torch.equal(evaluated[-1], model[0].weight)
    exec(growing, names)
    averager = names["averager"]
    assert averager.ready
    assert averager.newest_step == 40
