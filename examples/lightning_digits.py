"""Averaged weights in Lightning, on scikit-learn's handwritten digits: seconds on a CPU.

    pip install 'torch-lawa[lightning]' scikit-learn
    python examples/lightning_digits.py

Averaging takes two lines: the callback, and the metric that selects the best checkpoint.
"""

import sys
import tempfile
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from torch_lawa.integrations.lightning import LatestWeightAveraging


class Digits(pl.LightningModule):
    """A small convolutional net with BatchNorm, trained at a constant, high learning rate."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Images to logits."""
        return self.net(x)

    def _evaluate(self, batch: list[Tensor], name: str) -> Tensor:
        logits = self(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        accuracy = (logits.argmax(1) == batch[1]).float().mean()
        if name != "train":
            self.log_dict({f"{name}_loss": loss, f"{name}_accuracy": accuracy})
        return loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The loss of a batch."""
        return self._evaluate(batch, "train")

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Logs val_loss; with averaged weights it becomes val_loss_averaged."""
        self._evaluate(batch, "val")

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Logs test_loss."""
        self._evaluate(batch, "test")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD."""
        return torch.optim.SGD(self.parameters(), self.hparams["lr"], momentum=0.9)


def main(folder: Path, max_epochs: int = 10) -> dict[str, float]:
    """Train, test the best checkpoint, export its average."""
    pl.seed_everything(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    examples = TensorDataset(images, torch.tensor(digits.target))
    parts = random_split(examples, (0.6, 0.2, 0.2), torch.Generator().manual_seed(0))
    train = DataLoader(parts[0], batch_size=16, shuffle=True)
    val, test = (DataLoader(part, batch_size=256) for part in parts[1:])

    averaging = LatestWeightAveraging(k=4, side_by_side=True)
    best = ModelCheckpoint(folder, monitor="val_loss_averaged")
    trainer = pl.Trainer(
        max_epochs=max_epochs,
        callbacks=[averaging, best],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=sys.stderr.isatty(),
        enable_model_summary=False,
    )
    trainer.fit(Digits(), train, val)
    [results] = trainer.test(dataloaders=test, ckpt_path="best")  # with that checkpoint's window
    averaging.save_averaged(trainer, folder / "averaged.ckpt")
    exported = Digits.load_from_checkpoint(folder / "averaged.ckpt")
    print(f"{folder / 'averaged.ckpt'}: an ordinary checkpoint of {type(exported).__name__}")
    return dict(results)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
