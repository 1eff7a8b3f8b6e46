"""Digits with Accelerate: average after each epoch, save and resume with its checkpoints.

pip install 'torch-lawa[lab,accelerate]' && python examples/accelerate_digits.py
torchrun --nproc-per-node 2 examples/accelerate_digits.py
"""

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from torch_lawa import LatestWeightAverager
from torch_lawa.integrations.accelerate import register_averager

EPOCHS, BATCH = 16, 32


def loss_of(accelerator: Accelerator, model: nn.Module, loader: Any) -> float:
    """The mean loss over the test images of all processes."""
    model.eval()
    losses = []
    with torch.no_grad():
        for images, labels in loader:
            loss = cross_entropy(model(images), labels, reduction="none")
            losses.append(accelerator.gather_for_metrics(loss))
    return float(torch.cat(losses).mean())


def main(folder: str = "runs/digits", *, stop_after: int = EPOCHS) -> tuple[float, float]:
    """Train, or resume from `folder`; returns the test loss of the raw and averaged weights."""
    naming = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=naming)
    set_seed(0)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data / 16).float(), torch.tensor(digits.target))
    train, test = (torch.utils.data.Subset(data, range(*r)) for r in ((0, 1200), (1200, 1797)))
    model: Any = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.2), nn.ReLU(), nn.Linear(64, 10))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, DataLoader(train, BATCH, shuffle=True), DataLoader(test, 128)
    )

    averager = LatestWeightAverager(k=6)
    register_averager(accelerator, averager, model)

    first = 0
    if any(Path(folder).glob("checkpoints/*")):
        accelerator.load_state()
        first = naming.iteration = averager.num_collected

    raw = mean = float("nan")
    for epoch in range(first, stop_after):
        model.train()
        train_loader.set_epoch(epoch)
        for images, labels in train_loader:
            optimizer.zero_grad()
            accelerator.backward(cross_entropy(model(images), labels))
            optimizer.step()
        averager.collect(model)
        raw = loss_of(accelerator, model, test_loader)
        if averager.ready:
            with averager.swapped_into(model):
                mean = loss_of(accelerator, model, test_loader)
        accelerator.print(
            f"epoch {epoch + 1:2d}   raw {raw:.3f}   mean of the last {averager.k} {mean:.3f}"
        )
        accelerator.save_state()
    with averager.swapped_into(model):
        accelerator.save_model(model, f"{folder}/averaged")
    accelerator.end_training()
    return raw, mean


if __name__ == "__main__":
    main(*sys.argv[1:])
