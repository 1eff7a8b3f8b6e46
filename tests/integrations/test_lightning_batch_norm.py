"""BatchNorm statistics of the average in a Lightning run: from its train loader, unnoticed."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from support.lightning import (
    QUIET,
    Net,
    Watch,
    Weights,
    by_hand,
    data,
    loader,
    loss,
    mean,
    same,
    trainer,
    weights,
)

from torch_lawa.errors import BatchNormError
from torch_lawa.integrations.lightning import LatestWeightAveraging

pytestmark = QUIET


def close(a: Weights, b: Weights) -> bool:
    """Equal weights, and statistics but for rounding."""
    for name in a:
        if "running" in name:
            torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=1e-6)
        elif "num_batches" not in name and not torch.equal(a[name], b[name]):
            return False
    return True


@pytest.mark.parametrize("side_by_side", [False, True])
def test_statistics_are_those_of_the_train_loader(tmp_path, side_by_side):
    evaluated = []

    class Seeing(Net):
        def on_validation_epoch_start(self):
            evaluated.append(weights(self))

    watch, model = Watch(), Seeing(batch_norm=True)
    averaging = LatestWeightAveraging(2, side_by_side=side_by_side, batch_norm_batches=2)
    run = trainer(tmp_path, watch, averaging, max_epochs=3, num_sanity_val_steps=0)
    run.fit(model, loader(size=20), loader(seed=1))
    averaged = [by_hand(mean(watch.epochs[i - 1 : i + 1]), list(loader())[:2]) for i in (1, 2)]
    found = evaluated[1::2] if side_by_side else evaluated[1:]
    assert all(map(close, found, averaged))
    assert not same(found[-1], mean(watch.epochs[1:]))  # other than the newest snapshot's
    assert same(weights(model), watch.epochs[-1])
    assert model.net[1].momentum == 0.1
    assert model.training


@pytest.mark.parametrize("options", [{}, {"side_by_side": True}, {"choose_window": True}])
def test_layers_that_training_keeps_in_evaluation_mode_keep_their_statistics(tmp_path, options):
    class Finetuned(Net):
        def __init__(self):
            super().__init__(batch_norm=True)
            self.net[1].running_var.fill_(4.0)

        def on_train_epoch_start(self):
            self.net[1].eval()

    watch, model = Watch(), Finetuned()
    averaging = LatestWeightAveraging(2, batch_norm_batches=2, **options)
    run = trainer(tmp_path, watch, averaging, max_epochs=3)
    run.fit(model, loader(size=20), loader(seed=1))
    name = "val_loss_averaged" if options else "val_loss"
    windows = [mean(watch.epochs[1:])]
    windows += [watch.epochs[-1]] if "choose_window" in options else []
    best = min(loss(model, window, loader(seed=1)) for window in windows)
    assert run.callback_metrics[name].item() == pytest.approx(best, abs=1e-6)
    assert torch.equal(model.net[1].running_var, torch.full((5,), 4.0))


def test_none_are_estimated_where_none_are_wanted(tmp_path):
    watch, model = Watch(), Net(batch_norm=True)
    averaging = LatestWeightAveraging(k=2, batch_norm_batches=0)
    trainer(tmp_path, watch, averaging, max_epochs=3).fit(model, loader(), loader(seed=1))
    assert all(map(same, watch.validated[1:], map(mean, (watch.epochs[:2], watch.epochs[1:]))))


def test_they_are_saved_with_the_window(tmp_path):
    """Whoever tests a checkpoint elsewhere has no training data."""
    watch, model = Watch(), Net(batch_norm=True)
    saving = ModelCheckpoint(tmp_path / "checkpoints")
    averaging = LatestWeightAveraging(k=2)
    run = trainer(tmp_path, watch, averaging, saving, max_epochs=3)
    run.fit(model, loader(), loader(seed=1))
    averaged = watch.validated[-1]
    other = trainer(tmp_path, LatestWeightAveraging(k=2))
    options = {"ckpt_path": saving.best_model_path, "verbose": False}
    found = other.test(Net(batch_norm=True), loader(seed=2), **options)[0]["test_loss"]
    assert found == pytest.approx(loss(model, averaged, loader(seed=2)))
    averaging.save_averaged(run, tmp_path / "averaged.ckpt")
    assert same(weights(Net.load_from_checkpoint(tmp_path / "averaged.ckpt")), averaged)


def test_without_training_data_a_warning_says_what_was_used(tmp_path):
    """Saved right after a snapshot, before its first evaluation."""
    saving = ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=9)
    watch, model = Watch(), Net(batch_norm=True)
    run = trainer(tmp_path, watch, LatestWeightAveraging(k=2), saving, max_epochs=3)
    run.fit(model, loader())
    other, averaging = Net(batch_norm=True), LatestWeightAveraging(k=2)
    run = trainer(tmp_path, averaging)
    with pytest.warns(UserWarning, match="no BatchNorm statistics of their own"):
        found = run.test(other, loader(), ckpt_path=saving.best_model_path, verbose=False)
    assert found[0]["test_loss"] == pytest.approx(loss(model, mean(watch.epochs[1:]), loader()))


def test_after_a_fit_without_validation_they_are_there(tmp_path):
    watch, model = Watch(), Net(batch_norm=True)
    averaging = LatestWeightAveraging(k=2)
    run = trainer(tmp_path, watch, averaging, max_epochs=3)
    run.fit(model, loader())
    assert averaging._average.batch_norm.holds(averaging.averager)
    averaged = by_hand(mean(watch.epochs[1:]), loader())
    found = run.test(model, loader(seed=2), verbose=False)[0]["test_loss"]
    assert found == pytest.approx(loss(model, averaged, loader(seed=2)), rel=1e-4)


class Random(torch.utils.data.Dataset):
    """Every look at an example draws from all the generators that there are."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = random.random() + np.random.rand() + torch.rand(1)
        return torch.full((4,), float(i)).sin() + 0.1 * noise.float(), torch.tensor([i / 24])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_training_does_not_notice(tmp_path, num_workers):
    """A loader with a generator of its own, workers that stay, and validation amid an epoch."""

    def run(*callbacks: Any, ckpt: Any = None, epochs: int = 3) -> tuple[Weights, Any]:
        model = Net(batch_norm=True)
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        train = torch.utils.data.DataLoader(
            Random(),
            batch_size=8,
            shuffle=True,
            generator=torch.Generator().manual_seed(6),
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
        )
        trained = trainer(tmp_path, *callbacks, max_epochs=epochs, val_check_interval=1)
        trained.fit(model, train, loader(seed=1), ckpt_path=ckpt)
        return weights(model), (torch.rand(1), random.random(), np.random.rand())

    plain, averaging = run(), LatestWeightAveraging(k=1, update_every_n_steps=1)
    found = run(averaging)
    assert averaging.averager.num_collected == 9
    assert same(found[0], plain[0])
    assert found[1] == plain[1]


def test_several_train_loaders_and_a_forward_of_ones_own(tmp_path):
    class Two(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch["a"], batch_idx)

    class Mine(LatestWeightAveraging):
        def batch_norm_forward(self, pl_module, batch):
            return pl_module(batch["a"][0])

    watch, model = Watch(), Two(batch_norm=True)
    run = trainer(tmp_path, watch, Mine(k=1), max_epochs=1)
    both = CombinedLoader({"a": loader(), "b": loader(seed=3, size=8)}, "max_size_cycle")
    run.fit(model, both, loader(seed=1))
    assert close(watch.validated[0], by_hand(watch.epochs[0], loader()))


def test_a_forward_that_does_not_take_the_batch_is_told_at_the_first_one(tmp_path):
    class Odd(Net):
        def forward(self, x, mask):
            return self.net(x * mask)

        def _loss(self, batch):
            return self(batch[0], 1.0).mean()

    for model, why in ((Odd(batch_norm=True), "mask"),):
        run = trainer(tmp_path, LatestWeightAveraging(k=5), max_epochs=9)
        with pytest.raises(BatchNormError, match=f"{why}.*Override `batch_norm_forward"):
            run.fit(model, loader(), loader(seed=1))
        assert run.global_step == 1
        assert model.training
    run = trainer(tmp_path, LatestWeightAveraging(k=1, batch_norm_batches=0), max_epochs=1)
    run.fit(Odd(batch_norm=True), loader(), loader(seed=1))
    run = trainer(tmp_path, LatestWeightAveraging(k=1), max_epochs=1)
    run.fit(Odd(), loader(), loader(seed=1))  # no BatchNorm: nothing to estimate


def test_the_same_window_has_the_same_statistics_whatever_was_drawn_before(tmp_path):
    """So a resumed run, which has other random numbers, evaluates the same."""
    averaging = LatestWeightAveraging(k=1, batch_norm_batches=1)
    model, found = Net(batch_norm=True), []
    run = trainer(tmp_path, averaging, max_epochs=1)
    run.fit(model, torch.utils.data.DataLoader(Random(), batch_size=8, shuffle=True))
    for seed in (1, 2):
        for draw in (torch.manual_seed, np.random.seed, random.seed):
            draw(seed)
        averaging._average.batch_norm.clear()
        averaging._average.swap_in(run)
        found.append(weights(model))
        averaging._average.restore()
    assert same(*found)


def test_a_new_run_of_the_same_callback_has_its_own(tmp_path):
    """Its window has the same steps as that of the run before."""
    averaging, watch, model = LatestWeightAveraging(k=2), Watch(), Net(batch_norm=True, lr=0.01)
    run = trainer(tmp_path, averaging, max_epochs=2)
    run.fit(Net(batch_norm=True), loader(), loader(seed=1))
    with pytest.warns(UserWarning, match="a new window begins"):
        trainer(tmp_path, averaging, watch, max_epochs=2).fit(model, loader(), loader(seed=1))
    assert close(watch.validated[-1], by_hand(mean(watch.epochs), loader()))


def test_batches_go_through_the_hooks_of_the_data_module(tmp_path):
    class Data(LightningDataModule):
        def train_dataloader(self):
            return loader()

        def val_dataloader(self):
            return loader(seed=1)

        def on_before_batch_transfer(self, batch, dataloader_idx):
            return [2 * batch[0], batch[1]]

    watch, averaging = Watch(), LatestWeightAveraging(k=2)
    trainer(tmp_path, averaging, watch, max_epochs=3).fit(Net(batch_norm=True), datamodule=Data())
    seen = [(2 * x, y) for x, y in loader()]
    assert close(watch.validated[-1], by_hand(mean(watch.epochs[1:]), seen))


class Counting(torch.utils.data.Sampler[int]):
    """Another order each time it is used."""

    used = 0

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        self.used += 1
        yield from torch.randperm(24, generator=torch.Generator().manual_seed(self.used)).tolist()


@pytest.mark.parametrize("kind", ["sampler", "batches", "for several processes"])
def test_samplers_that_count_are_not_disturbed(tmp_path, kind):
    final = []
    for extra in ([], [LatestWeightAveraging(k=2, update_every_n_steps=1)]):
        sampler, model = Counting(), Net(batch_norm=True)
        options: dict[str, Any] = {"sampler": sampler, "batch_size": 8}
        if kind == "batches":
            options = {"batch_sampler": torch.utils.data.BatchSampler(sampler, 8, False)}
        if kind == "for several processes":
            options["sampler"] = DistributedSamplerWrapper(
                sampler, num_replicas=1, rank=0, shuffle=False
            )
        train = torch.utils.data.DataLoader(data(), **options)
        run = trainer(tmp_path, *extra, max_epochs=4, val_check_interval=1)
        run.fit(model, train, loader(seed=1))
        final.append(weights(model))
        assert sampler.used == 4
    assert same(*final)
