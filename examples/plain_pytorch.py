"""A plain training loop: average every epoch, evaluate, save, resume.

pip install torch-lawa && python examples/plain_pytorch.py
"""

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from torch_lawa import LatestWeightAverager, recalibrate_batch_norm

EPOCHS, BATCH, ARMS = 30, 64, 4


def spirals(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points on the arms of a spiral, labelled with their arm; one label in ten is random."""
    generator = torch.Generator().manual_seed(seed)
    arm = torch.randint(ARMS, (count,), generator=generator)
    radius = torch.rand(count, generator=generator)
    angle = 4 * radius + 2 * torch.pi * arm / ARMS
    points = radius[:, None] * torch.stack([angle.cos(), angle.sin()], 1)
    points += 0.03 * torch.randn(count, 2, generator=generator)
    wrong = torch.rand(count, generator=generator) < 0.1
    return points, torch.where(wrong, torch.randint(ARMS, (count,), generator=generator), arm)


def loss_of(model: nn.Module, points: Tensor, arms: Tensor) -> float:
    """The mean loss in evaluation mode."""
    model.eval()
    with torch.no_grad():
        return cross_entropy(model(points), arms).item()


def main(folder: Path, *, stop_after: int = EPOCHS) -> tuple[float, float]:
    """Train, or resume from `folder`; returns the test loss of the raw and averaged weights."""
    torch.manual_seed(0)
    train, test = spirals(2048, seed=1), spirals(2048, seed=2)
    model = nn.Sequential(
        nn.Linear(2, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(),
        nn.Linear(64, ARMS),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    averager = LatestWeightAverager(k=6)

    last, first = folder / "last.pt", 0
    if last.exists():
        state = torch.load(last, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        averager.load_state_dict(state["averager"])
        first = state["epoch"]

    raw = mean = float("nan")
    for epoch in range(first, stop_after):
        model.train()
        order = torch.randperm(len(train[0]), generator=torch.Generator().manual_seed(epoch))
        batches = [(train[0][i], train[1][i]) for i in order.split(BATCH)]
        for points, arms in batches:
            optimizer.zero_grad()
            cross_entropy(model(points), arms).backward()
            optimizer.step()

        averager.collect(model)
        raw = loss_of(model, *test)
        if averager.ready:
            with averager.swapped_into(model):
                recalibrate_batch_norm(model, batches)
                mean = loss_of(model, *test)
        print(f"epoch {epoch + 1:2d}   raw {raw:.3f}   mean of the last {averager.k} {mean:.3f}")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        state |= {"averager": averager.state_dict(), "epoch": epoch + 1}
        torch.save(state, folder / "next.pt")
        (folder / "next.pt").replace(last)  # atomic: a kill leaves a complete file
    return raw, mean


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
