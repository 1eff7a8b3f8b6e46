"""choose_window in Lightning: the chosen window is validated, tested, saved and resumed."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support.lightning import QUIET, Net, Watch, by_hand, loader, loss, mean, same, trainer, weights

from torch_lawa import WindowSearch
from torch_lawa.errors import ConfigError
from torch_lawa.integrations.lightning import LatestWeightAveraging

pytestmark = QUIET


def choosing(k=4, **options):
    return LatestWeightAveraging(k=k, choose_window=True, **options)


@pytest.mark.parametrize("lr", [0.5, 1e-4])
def test_the_best_window_is_reported_tested_and_saved(tmp_path, lr):
    watch, model, averaging = Watch(), Net(lr=lr), choosing()
    run = trainer(tmp_path, watch, averaging, max_epochs=5)
    run.fit(model, loader(), loader(seed=1))
    assert all(map(same, watch.validated, watch.epochs))  # other callbacks see the trained weights
    for epoch, metrics in enumerate(watch.metrics, 1):
        windows = {0: watch.epochs[epoch - 1]}
        windows |= {k: mean(watch.epochs[epoch - k : epoch]) for k in (1, 2, 4) if k <= epoch}
        values = {k: loss(model, state, loader(seed=1)) for k, state in windows.items()}
        best = min(values.values())
        assert metrics["val_loss"] == pytest.approx(values[0])
        assert metrics["val_loss_averaged"] == pytest.approx(best, rel=0.02)
        assert metrics["val_loss_averaged"] <= metrics["val_loss"]
        assert metrics["val_loss_averaged"] == pytest.approx(values[int(metrics["averaged_k"])])
        assert metrics["averaged_seconds"] > 0
    choice = averaging.choice
    assert choice is not None
    assert (choice.k, dict(choice.values)) == (int(metrics["averaged_k"]), pytest.approx(values))
    assert (choice.k == 0) is (lr == 1e-4)  # a loss that still falls everywhere needs no average
    tested = run.test(model, loader(seed=2), verbose=False)[0]
    expected = loss(model, windows[choice.k], loader(seed=2))
    assert tested["test_loss_averaged"] == pytest.approx(expected)
    assert averaging.choice is choice  # not chosen again, by test data
    averaging.save_averaged(run, tmp_path / "averaged.ckpt")
    assert same(weights(Net.load_from_checkpoint(tmp_path / "averaged.ckpt")), windows[choice.k])
    assert not list(tmp_path.glob(".lawa/averaged.ckpt*"))
    assert same(weights(model), watch.epochs[-1])


@pytest.mark.parametrize(("batch_norm", "passes"), [(False, 1 + 2 + 2), (True, 2 + 3 + 3)])
def test_the_trained_weights_are_validated_once(tmp_path, batch_norm, passes):
    """With BatchNorm the newest snapshot has other statistics than the trained weights."""
    started = []

    class Counting(Net):
        def on_validation_epoch_start(self):
            started.append(self.trainer.current_epoch)

    averaging = choosing(k=2, batch_norm_batches=3)
    run = trainer(tmp_path, averaging, max_epochs=3, num_sanity_val_steps=0)
    run.fit(Counting(batch_norm=batch_norm), loader(), loader(seed=1))
    assert len(started) == passes
    assert (averaging.choice.values[1] == averaging.choice.values[0]) is not batch_norm


def test_batch_norm_is_that_of_the_chosen_window(tmp_path):
    watch, model = Watch(), Net(batch_norm=True, lr=0.5)
    averaging = LatestWeightAveraging(k=4, choose_window=WindowSearch([2, 4]), batch_norm_batches=3)
    run = trainer(tmp_path, watch, averaging, max_epochs=5)
    run.fit(model, loader(), loader(seed=1))
    choice = averaging.choice
    for k in (2, 4):
        state = by_hand(mean(watch.epochs[-k:]), loader())
        assert choice.values[k] == pytest.approx(loss(model, state, loader(seed=1)), rel=1e-4)
    assert choice.k == 2
    served = by_hand(mean(watch.epochs[-2:]), loader())
    tested = run.test(model, loader(seed=2), verbose=False)[0]
    expected = loss(model, served, loader(seed=2))
    assert tested["test_loss_averaged"] == pytest.approx(expected, rel=1e-4)


def test_a_resumed_run_chooses_the_same(tmp_path):
    search = WindowSearch(margin=0.9, full_every=3)  # so that the choice depends on the past
    whole = LatestWeightAveraging(k=4, choose_window=search)
    watch, checkpoint = Watch(), ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}")
    trainer(tmp_path, watch, whole, checkpoint, max_epochs=7).fit(
        Net(lr=0.5), loader(), loader(seed=1)
    )
    again, resumed = LatestWeightAveraging(k=4, choose_window=search), Watch()
    path = tmp_path / "epoch=3.ckpt"
    run = trainer(tmp_path, resumed, again, max_epochs=7)
    run.fit(Net(lr=0.5), loader(), loader(seed=1), ckpt_path=path, weights_only=False)
    names = ("val_loss", "val_loss_averaged", "averaged_k")
    kept = [[metrics[name] for name in names] for metrics in watch.metrics[4:]]
    assert [[metrics[name] for name in names] for metrics in resumed.metrics] == kept
    assert again.choice.values == whole.choice.values
    # A checkpoint alone knows which window was chosen when it was saved.
    other = LatestWeightAveraging(k=4, choose_window=search)
    assert watch.metrics[3]["averaged_k"] == 2
    state = mean(watch.epochs[2:4])
    tested = trainer(tmp_path, other).test(
        Net(), loader(seed=2), ckpt_path=path, verbose=False, weights_only=False
    )
    assert tested[0]["test_loss_averaged"] == pytest.approx(loss(Net(), state, loader(seed=2)))


def test_a_failed_validation_restores_the_weights(tmp_path):
    class Fails(Net):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            if self.trainer.callback_metrics.get("averaged_k") is not None:
                raise RuntimeError("no memory")

    model, watch, averaging = Fails(), Watch(), choosing(2)
    with pytest.raises(RuntimeError, match="no memory"):
        trainer(tmp_path, watch, averaging, max_epochs=4).fit(model, loader(), loader(seed=1))
    assert same(weights(model), watch.epochs[-1])
    assert averaging.choice is not None


def test_mistakes_are_found_before_training(tmp_path):
    with pytest.raises(ConfigError, match="choose_window='yes'"):
        LatestWeightAveraging(k=4, choose_window="yes")
    with pytest.raises(ConfigError, match="keeps 4 snapshots"):
        LatestWeightAveraging(k=4, choose_window=WindowSearch([8]))
    with pytest.raises(ConfigError, match="no validation"):
        trainer(tmp_path, choosing(), max_epochs=4).fit(Net(), loader())
    with pytest.raises(ConfigError, match=r"monitor='norm'.*val_loss"):
        trainer(tmp_path, choosing(monitor="norm"), max_epochs=4).fit(
            Net(), loader(), loader(seed=1)
        )


def test_a_run_without_a_validation_after_the_first_snapshot_warns(tmp_path):
    """Else tests would use the trained weights without a word."""
    averaging, model = choosing(k=2), Net()
    run = trainer(tmp_path, averaging, max_epochs=3, check_val_every_n_epoch=5)
    with pytest.warns(UserWarning, match="none is chosen"):
        run.fit(model, loader(), loader(seed=1))
    assert (len(averaging.averager), averaging.choice) == (2, None)


@pytest.mark.filterwarnings("error:.*an average needs")
def test_a_run_that_is_short_for_k_compares_what_it_has(tmp_path):
    averaging = choosing(k=8)
    trainer(tmp_path, averaging, max_epochs=3).fit(Net(lr=0.5), loader(), loader(seed=1))
    assert set(averaging.choice.values) == {0, 1, 2}
    too_long = LatestWeightAveraging(k=8, choose_window=WindowSearch([4, 8]))
    with pytest.raises(UserWarning, match="3 snapshots, but an average needs 4"):
        trainer(tmp_path, too_long, max_epochs=3).fit(Net(), loader(), loader(seed=1))


def test_training_is_not_changed(tmp_path):
    finals = []
    for callbacks in ([], [choosing()]):
        torch.manual_seed(0)
        model = Net()
        run = trainer(tmp_path, *callbacks, max_epochs=5)
        run.fit(model, loader(shuffle=True), loader(seed=1, shuffle=True))
        finals.append(weights(model))
    assert same(*finals)
