"""The callback in runs of Lightning itself: what is evaluated, and that training is left alone."""

import copy
import pickle
import runpy
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    ModelPruning,
)
from lightning.pytorch.strategies import SingleDeviceStrategy
from support.lightning import QUIET, Net, Watch, loader, loss, mean, same, trainer, weights

from torch_lawa import DiskStore, Every
from torch_lawa.errors import ConfigError
from torch_lawa.integrations.lightning import LatestWeightAveraging

pytestmark = QUIET


def test_validation_uses_the_mean_and_training_goes_on_with_its_own_weights(tmp_path):
    watch, averaging, model = Watch(), LatestWeightAveraging(k=2), Net()
    trainer(tmp_path, watch, averaging, max_epochs=4).fit(model, loader(), loader(seed=1))
    expected = [watch.epochs[0], *(mean(watch.epochs[i - 1 : i + 1]) for i in (1, 2, 3))]
    assert all(map(same, watch.validated, expected))
    assert all(map(same, watch.after, watch.epochs))
    assert same(weights(model), watch.epochs[-1])
    for state, metrics in zip(expected, watch.metrics, strict=True):
        assert metrics["val_loss"] == pytest.approx(loss(model, state, loader(seed=1)))
        assert set(metrics) == {"val_loss", "val_worst"}


def test_a_run_is_the_same_with_and_without_it(tmp_path):
    final = []
    for extra in ([], [LatestWeightAveraging(k=2)], [LatestWeightAveraging(2, side_by_side=True)]):
        model = Net(batch_norm=True)
        torch.manual_seed(3)
        run = trainer(tmp_path, *extra, max_epochs=4, val_check_interval=0.5)
        run.fit(model, loader(shuffle=True), loader(seed=1, shuffle=True))
        final.append((weights(model), torch.rand(1)))
    for state, draw in final[1:]:
        assert same(state, final[0][0])
        assert draw == final[0][1]


def test_averaging_that_never_starts_changes_nothing(tmp_path):
    plain, model, watch = Net(), Net(), Watch()
    trainer(tmp_path, max_epochs=3).fit(plain, loader(), loader(seed=1))
    averaging = LatestWeightAveraging(k=4)
    run = trainer(tmp_path, watch, averaging, max_epochs=3)
    with pytest.warns(UserWarning, match="gives 3 snapshots, but an average needs 4"):
        run.fit(model, loader(), loader(seed=1))
    assert same(weights(model), weights(plain))
    assert all(map(same, watch.validated, watch.epochs))
    found = run.test(model, loader(seed=2), verbose=False)[0]["test_loss"]
    assert found == pytest.approx(loss(model, weights(plain), loader(seed=2)))


def test_sanity_checking_and_two_fits_in_a_row(tmp_path):
    """The window is full when the second fit begins with a sanity check."""
    model, averaging = Net(), LatestWeightAveraging(k=2)
    seen = []

    class Sanity(Callback):
        def on_sanity_check_end(self, trainer, pl_module):
            seen.append(weights(pl_module))

        def on_validation_batch_start(self, trainer, pl_module, *_):
            if trainer.sanity_checking:
                seen.append(weights(pl_module))

    run = trainer(tmp_path, averaging, Sanity(), max_epochs=2)
    run.fit(model, loader(), loader(seed=1))
    raw = weights(model)
    seen.clear()
    run.fit_loop.max_epochs = 3
    run.fit(model, loader(), loader(seed=1))
    assert len(seen) > 1
    assert all(same(state, raw) for state in seen)
    assert averaging.averager.snapshot_steps == [6, 9]


def test_a_new_run_begins_a_new_window(tmp_path):
    averaging = LatestWeightAveraging(k=2)
    trainer(tmp_path, averaging, max_epochs=3).fit(Net(), loader())
    model, watch = Net(lr=0.01), Watch()
    with pytest.warns(UserWarning, match="up to step 9 of another one: a new window begins"):
        trainer(tmp_path, averaging, watch, max_epochs=2).fit(model, loader())
    assert averaging.averager.snapshot_steps == [3, 6]
    assert same(averaging.averager.average(), mean(watch.epochs))


def test_a_window_is_not_mixed_with_that_of_another_model(tmp_path):
    averaging, other, watch = LatestWeightAveraging(k=2), Net(), Watch()
    run = trainer(tmp_path, averaging, watch, max_epochs=2)
    run.fit(Net(), loader())
    run.fit_loop.max_epochs = 4
    with pytest.warns(UserWarning, match="a new window begins"):
        run.fit(other, loader())
    assert averaging.averager.snapshot_steps == [9, 12]
    assert same(averaging.averager.average(), mean(watch.epochs[2:]))


@pytest.mark.parametrize("side_by_side", [False, True])
def test_another_model_is_evaluated_with_its_own_weights(tmp_path, side_by_side):
    """As when somebody loads the best checkpoint and gives it to the same trainer."""
    averaging, model = LatestWeightAveraging(k=2, side_by_side=side_by_side), Net()
    run = trainer(tmp_path, averaging, max_epochs=3)
    run.fit(model, loader(), loader(seed=1))
    run.save_checkpoint(tmp_path / "a.ckpt")
    other = Net()
    with pytest.warns(UserWarning, match=r"window is of another model .* ckpt_path"):
        found = run.test(other, loader(seed=2), verbose=False)[0]
    expected = loss(other, weights(other), loader(seed=2))
    assert found == {"test_loss": pytest.approx(expected)}
    name = "test_loss_averaged" if side_by_side else "test_loss"
    expected = loss(model, averaging.averager.average(), loader(seed=2))
    for options in ({"model": model}, {"model": other, "ckpt_path": tmp_path / "a.ckpt"}):
        found = run.test(dataloaders=loader(seed=2), verbose=False, **options)[0]
        assert found[name] == pytest.approx(expected)


def test_copies(tmp_path):
    """As tuners and launchers make them before a run, and people after it."""
    original = LatestWeightAveraging(k=2)
    for averaging in (copy.deepcopy(original), pickle.loads(pickle.dumps(original))):
        watch, model = Watch(), Net(batch_norm=True)
        run = trainer(tmp_path, averaging, watch, max_epochs=3)
        run.fit(model, loader(), loader(seed=1))
        average = averaging.averager.average()
        assert same(average, mean(watch.epochs[1:]))
        others = copy.deepcopy(averaging), pickle.loads(pickle.dumps(averaging))
        averaging.averager.reset()
        for other in others:
            assert same(other.averager.average(), average)
    assert len(original.averager) == 0


@pytest.mark.parametrize("act", ["test", "predict", "validate"])
def test_after_fit_every_evaluation_uses_the_average(tmp_path, act):
    watch, model = Watch(), Net()
    run = trainer(tmp_path, watch, LatestWeightAveraging(k=2), max_epochs=3)
    run.fit(model, loader(), loader(seed=1))
    averaged = mean(watch.epochs[-2:])
    if act == "predict":
        found = torch.cat(run.predict(model, loader(seed=2)))
        other = Net()
        other.load_state_dict(averaged)
        assert torch.equal(found, torch.cat([other(x) for x, _ in loader(seed=2)]))
    else:
        found = getattr(run, act)(model, loader(seed=2), verbose=False)[0]
        expected = pytest.approx(loss(model, averaged, loader(seed=2)))
        assert found[{"test": "test_loss", "validate": "val_loss"}[act]] == expected
    assert same(weights(model), watch.epochs[-1])


def test_steps_of_the_optimizer_are_counted(tmp_path):
    watch = Watch()
    averaging = LatestWeightAveraging(2, update_every_n_steps=2, update_starting_at_step=3)
    run = trainer(tmp_path, watch, averaging, max_epochs=3, accumulate_grad_batches=2)
    run.fit(Net(), loader(size=48))  # six batches and three steps an epoch
    assert run.global_step == 9
    assert averaging.averager.snapshot_steps == [6, 8]
    assert averaging.averager.num_collected == 3  # after 4, 6 and 8 steps
    assert same(averaging.averager.average(), mean([watch.steps[6], watch.steps[8]]))


def test_several_optimizers_step_over_the_multiples(tmp_path):
    class Manual(Net):
        automatic_optimization = False

        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(self._loss(batch))
                optimizer.step()

        def configure_optimizers(self):
            return [torch.optim.SGD(layer.parameters(), 0.1) for layer in self.net[::3]]

    averaging = LatestWeightAveraging(k=4, update_every_n_steps=5)
    run = trainer(tmp_path, averaging, max_epochs=4)
    run.fit(Manual(), loader())
    assert run.global_step == 24
    assert averaging.averager.snapshot_steps == [6, 10, 16, 20]  # when 5, 10, 15 and 20 were passed


def test_should_update_may_be_overridden(tmp_path):
    class Mine(LatestWeightAveraging):
        def should_update(self, step_idx=None, epoch_idx=None):
            asked.append((step_idx, epoch_idx))
            return step_idx == 4 or epoch_idx == 2

    asked: list[tuple[Any, Any]] = []
    averaging = Mine(k=2)
    trainer(tmp_path, averaging, max_epochs=3).fit(Net(), loader())
    assert [step for step, _ in asked if step is not None] == list(range(9))
    assert [epoch for _, epoch in asked if epoch is not None] == [0, 1, 2]
    assert averaging.averager.snapshot_steps == [5, 9]


@pytest.mark.parametrize("side_by_side", [False, True])
@pytest.mark.parametrize("failing", ["validation_step", "on_validation_epoch_end", "interrupt"])
def test_an_exception_in_validation_leaves_the_trained_weights(tmp_path, failing, side_by_side):
    class Failing(Net):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            if self.current_epoch == 2 and failing != "on_validation_epoch_end":
                held.append(weights(self))
                raise KeyboardInterrupt if failing == "interrupt" else RuntimeError("broken")

        def on_validation_epoch_end(self):
            super().on_validation_epoch_end()
            if self.current_epoch == 2:
                held.append(weights(self))
                raise RuntimeError("broken")

    held: list[Any] = []
    watch, model = Watch(), Failing()
    averaging = LatestWeightAveraging(k=2, side_by_side=side_by_side)
    run = trainer(tmp_path, averaging, watch, max_epochs=4)
    with pytest.raises((RuntimeError, SystemExit)):
        run.fit(model, loader(), loader(seed=1))
    assert same(held[0], mean(watch.epochs[-2:]))
    assert same(weights(model), watch.epochs[-1])
    assert run.callbacks[:2] == [averaging, watch]
    with averaging.averager.swapped_into(model):  # nothing is swapped any more
        pass


@pytest.mark.parametrize("act", ["test", "predict"])
def test_an_exception_in_a_hook_of_another_callback(tmp_path, act):
    class Failing(Callback):
        def on_test_batch_end(self, *_):
            raise RuntimeError("broken")

        on_predict_batch_end = on_test_batch_end

    model = Net()
    run = trainer(tmp_path, Failing(), LatestWeightAveraging(k=2), max_epochs=3)
    run.fit(model, loader())
    raw = weights(model)
    with pytest.raises(RuntimeError, match="broken"):
        getattr(run, act)(model, loader())
    assert same(weights(model), raw)


def test_early_stopping_by_the_averaged_metric(tmp_path):
    for side_by_side, monitor in ((False, "val_loss"), (True, "val_loss_averaged")):
        watch, model = Watch(), Net(lr=0.02)
        stopping = EarlyStopping(monitor, patience=2)
        averaging = LatestWeightAveraging(k=3, side_by_side=side_by_side)
        run = trainer(tmp_path, stopping, watch, averaging, max_epochs=60)
        run.fit(model, loader(), loader(seed=1))
        served = [
            mean(watch.epochs[i - 2 : i + 1]) if i >= 2 else watch.epochs[i]
            for i in range(len(watch.epochs))
        ]
        losses = [loss(model, state, loader(seed=1)) for state in served]
        best = losses.index(min(losses))
        assert 2 < best < 50
        assert len(losses) - 1 == best + 2 == stopping.stopped_epoch
        raw = [loss(model, state, loader(seed=1)) for state in watch.epochs]
        assert raw.index(min(raw)) != best  # another epoch than the raw weights would choose
        assert same(weights(model), watch.epochs[-1])


def test_max_steps_in_the_middle_of_an_epoch(tmp_path):
    watch, model, averaging = Watch(), Net(), LatestWeightAveraging(k=2)
    by_steps = LatestWeightAveraging(k=3, update_every_n_steps=2, side_by_side=True, name="steps")
    averaging.side_by_side = True
    run = trainer(tmp_path, watch, averaging, by_steps, max_steps=8)
    run.fit(model, loader(), loader(seed=1))  # three steps an epoch
    assert averaging.averager.snapshot_steps == [3, 6]  # what was left of the third epoch is none
    assert by_steps.averager.snapshot_steps == [4, 6, 8]
    assert same(weights(model), watch.steps[8])
    assert same(by_steps.averager.average(), mean([watch.steps[i] for i in (4, 6, 8)]))


def test_fast_dev_run(tmp_path):
    watch, model = Watch(), Net(batch_norm=True)
    averaging = LatestWeightAveraging(k=6, update_starting_at_epoch=100)
    run = trainer(tmp_path, watch, averaging, fast_dev_run=True)
    run.fit(model, loader(), loader(seed=1))
    assert same(watch.validated[0], watch.epochs[0])
    assert len(averaging.averager) == 0
    run = trainer(tmp_path, LatestWeightAveraging(k=1), fast_dev_run=True)
    run.fit(Net(batch_norm=True), loader(), loader(seed=1))
    assert not list(tmp_path.glob("**/.lawa"))


def test_with_lightnings_own_averaging(tmp_path):
    """Each keeps its own; Lightning's copies its average into the model at the end."""
    plain, model, watch = Net(), Net(), Watch()
    trainer(tmp_path, EMAWeightAveraging(), max_epochs=3).fit(plain, loader(), loader(seed=1))
    averaging = LatestWeightAveraging(k=2)
    callbacks = (averaging, EMAWeightAveraging(), watch)
    trainer(tmp_path, *callbacks, max_epochs=3).fit(model, loader(), loader(seed=1))
    assert same(averaging.averager.average(), mean(watch.epochs[-2:]))
    assert same(weights(model), weights(plain))


def test_the_window_may_live_on_disk(tmp_path):
    watch = Watch()
    averaging = LatestWeightAveraging(k=2, store=DiskStore(tmp_path / "window"))
    trainer(tmp_path, averaging, watch, max_epochs=3).fit(Net(), loader())
    assert len(list((tmp_path / "window").glob("window-*.safetensors"))) == 2
    assert same(averaging.averager.average(), mean(watch.epochs[-2:]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k=0: give an int"),
        ({"store": "cloud"}, "store='cloud': choose one of 'host', 'device'"),
        ({"update_every_n_steps": 0}, "update_every_n_steps=0: give an int of at least 1"),
        ({"update_every_n_epochs": 1, "update_every_n_steps": 1}, "pass only one"),
        ({"update_starting_at_epoch": -1}, "give an int of at least 0"),
        ({"schedule": Every(2), "update_every_n_steps": 2}, "pass only one"),
        ({"schedule": "often"}, "Every"),
        ({"schedule": Every(2), "interval": "week"}, "interval='week'"),
        ({"name": ""}, "suffix of metric names"),
        ({"batch_norm_batches": -1}, "or 0 to keep the statistics"),
        ({"min_snapshots": 0}, "min_snapshots=0"),
    ],
)
def test_bad_configuration_is_refused_at_once(options, message):
    with pytest.raises(ConfigError, match=message):
        LatestWeightAveraging(**options)


@pytest.mark.parametrize(
    ("options", "run", "message"),
    [
        ({"update_starting_at_epoch": 3}, {"max_epochs": 3}, "of 3 complete epochs gives 0"),
        ({"update_every_n_epochs": 3}, {"max_steps": 8}, "of 2 complete epochs gives 0"),
        (
            {"update_every_n_steps": 2, "update_starting_at_step": 9},
            {"max_epochs": 3},
            r"run of 9 steps gives 0 snapshots.*start earlier",
        ),
    ],
)
def test_a_run_too_short_for_an_average_trains_as_without_one(tmp_path, options, run, message):
    found = []
    for callbacks in ([LatestWeightAveraging(1, **options)], []):
        seed_everything(1)
        model = Net()
        expected = pytest.warns(UserWarning, match=message) if callbacks else nullcontext()
        with expected:
            trainer(tmp_path, *callbacks, **run).fit(model, loader())
        found.append(weights(model))
    assert same(*found)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"update_every_n_steps": 2, "update_starting_at_epoch": 2}, [8, 10, 12]),
        ({"update_every_n_epochs": 1, "update_starting_at_step": 7}, [9, 12]),
    ],
)
def test_a_start_in_the_other_unit(tmp_path, options, steps):
    averaging = LatestWeightAveraging(4, min_snapshots=1, **options)
    trainer(tmp_path, averaging, max_epochs=4).fit(Net(), loader())
    assert averaging.averager.snapshot_steps == steps


def test_pruning_is_refused_at_the_start(tmp_path):
    pruning = ModelPruning("l1_unstructured", amount=0.5)
    with pytest.raises(ConfigError, match="ModelPruning"):
        trainer(tmp_path, LatestWeightAveraging(2), pruning, max_epochs=3).fit(Net(), loader())


def test_strategies_that_hide_the_weights_are_refused(tmp_path):
    class DeepSpeedStrategy(SingleDeviceStrategy):
        """By its name, since the real one cannot be made without the package."""

    run = trainer(tmp_path, LatestWeightAveraging(), strategy=DeepSpeedStrategy("cpu"))
    with pytest.raises(ConfigError, match="DeepSpeedStrategy keeps the weights where"):
        run.fit(Net(), loader())


def test_packages_do_not_mix(tmp_path):
    import pytorch_lightning

    assert pytorch_lightning.Trainer is not pl.Trainer
    run = pytorch_lightning.Trainer(
        accelerator="cpu", logger=False, callbacks=[LatestWeightAveraging()], max_epochs=1
    )

    class Other(pytorch_lightning.LightningModule):
        training_step = configure_optimizers = lambda *_: None

    with pytest.raises(ConfigError, match="Trainer is of pytorch_lightning"):
        run.fit(Other(), loader())


ALONE = """
import sys
sys.modules["lightning"] = None  # as if it were not installed
import pytorch_lightning as pl, torch
from torch_lawa.integrations.lightning import LatestWeightAveraging

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 1)
    def training_step(self, batch, _):
        return self.net(batch).pow(2).mean()
    def validation_step(self, batch, _):
        self.log("val_loss", self.net(batch).pow(2).mean())
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

averaging = LatestWeightAveraging(k=2, side_by_side=True)
trainer = pl.Trainer(max_epochs=3, accelerator="cpu", logger=False, callbacks=[averaging])
data = torch.utils.data.DataLoader(torch.randn(8, 2))
trainer.fit(Net(), data, data)
trainer.validate(Net(), data, ckpt_path="best")
print(sorted(trainer.callback_metrics), averaging.averager.snapshot_steps)
"""


@pytest.mark.matrix
def test_where_only_pytorch_lightning_is_installed(tmp_path):
    run = [sys.executable, "-W", "ignore", "-c", ALONE]
    found = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.endswith("['val_loss', 'val_loss_averaged'] [16, 24]\n")


def test_the_example_runs(tmp_path):
    path = Path(__file__).parents[2] / "examples" / "lightning_digits.py"
    results = runpy.run_path(str(path))["main"](tmp_path)
    assert results["test_accuracy_averaged"] > 0.95
    assert results["test_loss_averaged"] != results["test_loss"]
    assert {path.suffix or path.name for path in tmp_path.iterdir()} == {".ckpt", ".lawa"}
