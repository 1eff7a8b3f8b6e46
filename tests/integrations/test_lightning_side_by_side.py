"""Trained and averaged weights in one validation: metrics of both, and nobody else notices."""

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from support.lightning import QUIET, Net, Watch, loader, loss, mean, same, trainer, weights

from torch_lawa.errors import ConfigError
from torch_lawa.integrations.lightning import LatestWeightAveraging

pytestmark = QUIET


def test_side_by_side(tmp_path):
    watch, model = Watch(), Net()
    averaging = LatestWeightAveraging(k=2, side_by_side=True)
    run = trainer(tmp_path, watch, averaging, max_epochs=3)
    run.fit(model, loader(), [loader(seed=1)])
    assert all(map(same, watch.validated, watch.epochs))
    averaged = [watch.epochs[0], mean(watch.epochs[:2]), mean(watch.epochs[1:])]
    for raw, state, metrics in zip(watch.epochs, averaged, watch.metrics, strict=True):
        assert metrics["val_loss"] == pytest.approx(loss(model, raw, loader(seed=1)))
        assert metrics["val_loss_averaged"] == pytest.approx(loss(model, state, loader(seed=1)))
        assert metrics["val_worst_averaged"] >= metrics["val_loss_averaged"]
    assert not model.gathered  # each evaluation had the module's hooks to itself
    assert watch.metrics[2]["val_worst_averaged"] != watch.metrics[2]["val_worst"]
    tested = run.test(model, loader(seed=2), verbose=False)[0]
    assert tested["test_loss"] == pytest.approx(loss(model, weights(model), loader(seed=2)))
    assert tested["test_loss_averaged"] == pytest.approx(loss(model, averaged[-1], loader(seed=2)))


def test_averaged_metrics_reach_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    watch, model, logger = Watch(), Net(), TensorBoardLogger(tmp_path, name="logs")
    averaging = LatestWeightAveraging(k=2, side_by_side=True)
    run = trainer(tmp_path, watch, averaging, max_epochs=3, logger=logger)
    run.fit(model, loader(), loader(seed=1))
    logger.finalize("success")
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    for name in ("val_loss", "val_loss_averaged"):
        logged = [event.value for event in events.Scalars(name)]
        assert logged == pytest.approx([float(metrics[name]) for metrics in watch.metrics])


class Many(Net):
    """Several loaders, metric objects, values in the progress bar or nowhere."""

    def __init__(self) -> None:
        super().__init__()
        from torchmetrics import MeanMetric

        self.metric = MeanMetric()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        value = self._loss(batch)
        self.log("val_loss", value, on_step=True, on_epoch=True, prog_bar=True)
        self.log("hidden", value, logger=False)
        self.metric.update(value)
        if self.logger is not None:
            self.logger.experiment.add_image("would fail", None)

    def on_validation_epoch_end(self) -> None:
        self.log("metric", self.metric)


def test_side_by_side_with_several_loaders_and_metric_objects(tmp_path):
    model, watch = Many(), Watch()
    averaging = LatestWeightAveraging(k=1, side_by_side=True)
    run = trainer(tmp_path, averaging, watch, max_epochs=2, num_sanity_val_steps=0)
    run.fit(model, loader(), [loader(seed=1), loader(seed=2, size=8)])
    # The mean of one is itself, so both evaluations must agree to the last bit.
    metrics = watch.metrics[-1]
    plain = {name for name in metrics if "averaged" not in name}
    assert plain == {
        *(f"{name}/dataloader_idx_{i}" for name in ("val_loss", "hidden") for i in (0, 1)),
        *(f"val_loss_epoch/dataloader_idx_{i}" for i in (0, 1)),
        "metric",
    }
    for name in plain:
        other = name.replace("/", "_averaged/") if "/" in name else f"{name}_averaged"
        assert metrics[name] == metrics[other]
    assert run.progress_bar_metrics.keys() >= {"val_loss_epoch_averaged/dataloader_idx_0"}
    assert "hidden_averaged/dataloader_idx_0" not in run.logged_metrics


def test_two_callbacks_together(tmp_path):
    watch, model = Watch(), Net()
    two = LatestWeightAveraging(k=2, side_by_side=True, name="of_2")
    three = LatestWeightAveraging(k=3, side_by_side=True, name="of_3")
    trainer(tmp_path, two, watch, three, max_epochs=3).fit(model, loader(), loader(seed=1))
    metrics = watch.metrics[-1]
    for name, state in (("of_2", mean(watch.epochs[1:])), ("of_3", mean(watch.epochs))):
        assert metrics[f"val_loss_{name}"] == pytest.approx(loss(model, state, loader(seed=1)))
    assert same(weights(model), watch.epochs[-1])
    run = trainer(tmp_path, LatestWeightAveraging(2), LatestWeightAveraging(3, name="other"))
    with pytest.raises(ConfigError, match=r"2 LatestWeightAveraging callbacks .*side_by_side=True"):
        run.fit(Net(), loader())


def test_each_loader_returns_its_own_metrics(tmp_path, capsys):
    """As Lightning's do, and the table it prints shows them in their columns."""

    class Partial(Many):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            super().validation_step(batch, batch_idx, dataloader_idx)
            if dataloader_idx == 1:
                self.log("second", self._loss(batch), add_dataloader_idx=False)

    model, averaging = Partial(), LatestWeightAveraging(k=2, side_by_side=True)
    run = trainer(tmp_path, averaging, max_epochs=2)
    run.fit(model, loader())
    loaders = [loader(seed=1), loader(seed=2, size=8)]
    found = run.validate(model, loaders)
    average = averaging.averager.average()
    table = capsys.readouterr().out
    for i, batches in enumerate(loaders):
        name = f"val_loss_epoch_averaged/dataloader_idx_{i}"
        state = {name: average[name] for name in average if name.startswith("net")}
        assert found[i][name] == pytest.approx(loss(model, state, batches))
        assert str(found[i][name])[:12] in table
        assert f"val_loss_epoch_averaged/dataloader_idx_{1 - i}" not in found[i]
        assert {"metric", "metric_averaged"} <= found[i].keys()
        assert ("second_averaged" in found[i]) == ("second" in found[i]) == (i == 1)


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_a_module_finds_its_logger_and_folders_in_both(tmp_path, kind):
    seen = []

    class Writing(Net):
        def on_validation_epoch_end(self):
            assert isinstance(self.logger, kind)
            logger = self.logger
            seen.append((self.trainer.log_dir, logger.log_dir, logger.save_dir, logger.version))
            super().on_validation_epoch_end()

    averaging, logger = LatestWeightAveraging(k=1, side_by_side=True), kind(tmp_path)
    run = trainer(tmp_path, averaging, max_epochs=1, num_sanity_val_steps=0, logger=logger)
    run.fit(Writing(), loader(), loader(seed=1))
    assert seen == [(logger.log_dir, logger.log_dir, str(tmp_path), logger.version)] * 2


def test_both_see_the_same_batches_and_training_is_as_ever(tmp_path):
    """Some of the validation data, drawn by a generator that the train loader uses as well."""
    found = []
    for extra in ([], [LatestWeightAveraging(k=1, side_by_side=True)]):
        generator, watch, model = torch.Generator().manual_seed(3), Watch(), Net()
        shuffle: dict[str, Any] = {"shuffle": True, "generator": generator}
        run = trainer(tmp_path, watch, *extra, max_epochs=3, limit_val_batches=1)
        run.fit(model, loader(**shuffle), loader(seed=1, **shuffle))
        found.append((weights(model), watch.metrics))
    assert same(found[0][0], found[1][0])
    for plain, both in zip(found[0][1], found[1][1], strict=True):
        assert plain["val_loss"] == both["val_loss"] == both["val_loss_averaged"]


def test_metrics_of_other_callbacks_have_no_averaged_version(tmp_path):
    class Logging(Callback):
        def on_validation_epoch_end(self, trainer, pl_module):
            pl_module.log("theirs", float(trainer.current_epoch))

    watch, averaging = Watch(), LatestWeightAveraging(k=2, side_by_side=True)
    run = trainer(tmp_path, averaging, Logging(), watch, max_epochs=3)
    run.fit(Net(), loader(), loader(seed=1))
    # Before the average is there, nobody knows who logged what; later no old value stays.
    assert [metrics["theirs"] for metrics in watch.metrics] == [0, 1, 2]
    assert [metrics.get("theirs_averaged") for metrics in watch.metrics] == [0, None, None]
    assert all("val_worst_averaged" in metrics for metrics in watch.metrics)
