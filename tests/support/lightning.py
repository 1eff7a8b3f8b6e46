"""A small run of Lightning for tests: a model, its data, and what saw the weights."""

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

# Of Lightning itself: old names of PyTorch, and advice that means larger runs.
QUIET = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        ":lightning.fabric.utilities.warnings.PossibleUserWarning",
        ".*isinstance.treespec, LeafSpec.*",
        "Be aware that when using `ckpt_path`, callbacks used to create",
        ".*Checkpoint directory .* exists and is not empty",
    )
]

Weights = dict[str, Tensor]


class Net(pl.LightningModule):
    """Linear, or with BatchNorm; logs in the step, at the end, and a metric object."""

    def __init__(self, *, batch_norm: bool = False, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(1)
        middle: nn.Module = nn.BatchNorm1d(5) if batch_norm else nn.Identity()
        self.net = nn.Sequential(nn.Linear(4, 5), middle, nn.Tanh(), nn.Linear(5, 1))
        self.lr = lr
        self.gathered: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self._loss(batch)
        self.gathered.append(loss)
        self.log("val_loss", loss, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.log("val_worst", torch.stack(self.gathered).max(), sync_dist=True)
        self.gathered.clear()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self._loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), self.lr)


def data(size: int = 24, seed: int = 0) -> TensorDataset:
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 4, generator=made)
    return TensorDataset(x, x.sin().sum(1, keepdim=True))


def loader(size: int = 24, seed: int = 0, batch_size: int = 8, **options: Any) -> DataLoader:
    return DataLoader(data(size, seed), batch_size=batch_size, **options)


def trainer(folder: Path, *callbacks: Callback, **options: Any) -> pl.Trainer:
    """Quiet, on the CPU; checkpoints only where a callback asks for them."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(c, pl.callbacks.Checkpoint) for c in callbacks),
        "default_root_dir": folder,
        "callbacks": list(callbacks),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pl.Trainer(**{**defaults, **options})


def weights(model: nn.Module) -> Weights:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def mean(snapshots: list[Weights]) -> Weights:
    """float64, one rounding; what is no float from the newest."""
    newest = snapshots[-1]
    return {
        name: (sum(s[name].double() for s in snapshots) / len(snapshots)).to(value.dtype)
        if name.endswith(("weight", "bias"))
        else value
        for name, value in newest.items()
    }


def loss(model: Net, state: Weights, batches: DataLoader) -> float:
    """By hand, in a model of its own."""
    other = Net(batch_norm=isinstance(model.net[1], nn.BatchNorm1d))
    other.load_state_dict(state)
    other.eval()
    with torch.no_grad():
        parts = [(len(x), nn.functional.mse_loss(other(x), y).item()) for x, y in batches]
    return sum(n * part for n, part in parts) / sum(n for n, _ in parts)


def by_hand(state: Weights, batches: Iterable[Any]) -> Weights:
    """The weights with statistics of these batches: the mean over batches of each one's own."""
    model = Net(batch_norm=True)
    model.load_state_dict(state)
    with torch.no_grad():
        parts = [model.net[0](x).double() for x, _ in batches]
    sizes = torch.tensor([float(len(part)) for part in parts], dtype=torch.float64)
    shares = (sizes / sizes.sum())[:, None]
    means = torch.stack([part.mean(0) for part in parts])
    variances = torch.stack([part.var(0) for part in parts])
    return {
        **state,
        "net.1.running_mean": (means * shares).sum(0).float(),
        "net.1.running_var": (variances * shares).sum(0).float(),
    }


class Watch(Callback):
    """Writes down the weights: after each step and epoch, and in each validation."""

    def __init__(self) -> None:
        self.steps: dict[int, Weights] = {}
        self.epochs: list[Weights] = []
        self.validated: list[Weights] = []
        self.after: list[Weights] = []
        self.metrics: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.steps[trainer.global_step] = weights(pl_module)
        if trainer.is_last_batch:
            self.epochs.append(weights(pl_module))

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if not trainer.sanity_checking and _[1] == 0:
            self.validated.append(weights(pl_module))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.metrics.append({k: v.item() for k, v in trainer.callback_metrics.items()})

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.after.append(weights(pl_module))
