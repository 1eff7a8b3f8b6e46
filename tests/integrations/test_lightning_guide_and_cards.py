"""docs/guides/lightning.md and the cards of rescue and SWAG: their code does what they say."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support.guides import blocks
from support.lightning import QUIET, Net, loader, same, trainer, weights
from torch import nn

from torch_lawa import LatestWeightAverager, recalibrate_batch_norm

pytestmark = QUIET


def test_lightning_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    start, when, both, forward, resume, export = blocks("lightning.md")
    names: dict[str, Any] = {"torch": torch, "MyModule": Net, "model": Net()}
    for code in (start, when, both, forward):
        exec(code, names)
    assert names["trainer"].max_epochs == 90

    batches = {"train_dataloaders": loader(), "val_dataloaders": loader(seed=1)}
    last = ModelCheckpoint(monitor="step", mode="max", save_last=True)  # the best is the newest
    names["trainer"] = trainer(tmp_path, names["averaging"], last, max_epochs=8)
    names["trainer"].fit(names["model"], **batches)
    assert {"val_loss", "val_loss_averaged"} <= names["trainer"].callback_metrics.keys()
    model = names["model"]
    model.train_dataloader, model.val_dataloader = loader, lambda: loader(seed=1)
    model.test_dataloader = lambda: loader(seed=2)
    monkeypatch.chdir(last.dirpath)
    names["trainer"] = trainer(tmp_path, names["averaging"], last, max_epochs=9)
    exec(resume, names)
    assert names["trainer"].current_epoch == 9
    exec(export, names)
    assert same(names["averaging"].averager.average(), weights(names["model"]))


def test_card_of_rescue() -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    batches = [torch.randn(8, 2) for _ in range(80)]
    batches[60] = batches[60] * torch.nan
    (code,) = blocks("../methods/rescue.md")
    names: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
        "loader": batches,
        "compute_loss": lambda model, batch: (model(batch) - 1).square().mean(),
    }
    exec(code, names)
    assert names["averager"].newest_step == 79  # one batch of 80 was skipped
    assert "NaN" in names["rescue"].message
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_card_of_swag() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    averager = LatestWeightAverager(k=4)
    for _ in range(4):
        averager.collect(model)
        model[0].weight.data += torch.randn(3, 2)
    before = model[0].weight.detach().clone()
    names: dict[str, Any] = {"averager": averager, "model": model, "images": torch.randn(5, 2)}
    names["train_loader"] = [torch.randn(8, 2) for _ in range(40)]
    names["recalibrate_batch_norm"] = recalibrate_batch_norm
    (code,) = blocks("../methods/swag.md")
    exec(code, names)
    torch.testing.assert_close(names["probabilities"].sum(1), torch.ones(5))
    assert torch.equal(model[0].weight, before)
