"""Checkpoints of Lightning with the window beside them: kept, removed, resumed, exported."""

import os
import shutil
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from safetensors.torch import load_file
from support.lightning import QUIET, Net, Watch, Weights, loader, loss, mean, same, trainer, weights
from support.ranks import on_ranks
from torch.multiprocessing import ProcessExitedException

from torch_lawa.errors import FormatError, NotReadyError, StateError
from torch_lawa.integrations.lightning import LatestWeightAveraging
from torch_lawa.offline.average import average_checkpoints

pytestmark = QUIET


class Resumable:
    """A train loader that can go on in the middle of an epoch, as Lightning wants it."""

    def __init__(self) -> None:
        self.batches, self.position, self.begin = list(loader()), 0, 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        self.position, self.begin = self.begin, 0
        for batch in self.batches[self.position :]:
            self.position += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin = state["position"] % len(self.batches)


class Crash(Callback):
    """Ends a run before its n-th optimizer step, as if the machine had."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise ConnectionError("the machine is gone")


def fit(
    folder: Path, *callbacks: Callback, model: Net | None = None, ckpt: Any = None, **options: Any
) -> Net:
    model = model or Net()
    run = trainer(folder, *callbacks, **{"max_epochs": 6, **options})
    run.fit(model, Resumable(), loader(seed=1), ckpt_path=ckpt)
    return model


def names(folder: Path) -> set[str]:
    """The files of a folder, and the windows in the hidden folder inside it."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def window_of(path: str | Path, suffix: str = "") -> Path:
    return Path(path).parent / ".lawa" / f"{Path(path).name}.window{suffix}"


PAIR = [("", ""), (".lawa/", ".window")]
BOTH = {f"{a}{name}.ckpt{b}" for name in ("last", "third") for a, b in PAIR}

SCHEDULES: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    # the callback, ModelCheckpoint, the trainer
    ({}, {"every_n_epochs": 1}, {}),
    ({"update_every_n_steps": 1}, {"every_n_epochs": 1}, {"val_check_interval": 0.34}),
    ({"side_by_side": True}, {"monitor": "val_loss_averaged"}, {}),
    ({"update_every_n_steps": 2}, {"every_n_train_steps": 3}, {}),
    ({"update_every_n_epochs": 2, "min_snapshots": 1}, {"every_n_train_steps": 6}, {}),
    ({}, {"every_n_epochs": 2}, {"check_val_every_n_epoch": 2}),
]


@pytest.mark.parametrize(("averaging", "saving", "options"), SCHEDULES)
@pytest.mark.parametrize("batch_norm", [False, True])
def test_a_crashed_run_goes_on_bit_for_bit(tmp_path, averaging, saving, options, batch_norm):
    whole, all_of_it = Watch(), LatestWeightAveraging(k=3, **averaging)
    model = fit(tmp_path, whole, all_of_it, model=Net(batch_norm=batch_norm), **options)
    folder = tmp_path / "checkpoints"
    with pytest.raises(ConnectionError):
        first = LatestWeightAveraging(k=3, **averaging)
        saver = ModelCheckpoint(folder, save_last=True, **saving)
        fit(tmp_path, Crash(14), first, saver, model=Net(batch_norm=batch_norm), **options)
    rest, resumed = Watch(), LatestWeightAveraging(k=3, **averaging)
    saver = ModelCheckpoint(folder, save_last=True, **saving)
    again = {"model": Net(batch_norm=batch_norm), "ckpt": folder / "last.ckpt", **options}
    other = fit(tmp_path, resumed, saver, rest, **again)
    assert same(weights(other), weights(model))
    assert 0 < len(rest.validated) < len(whole.validated)
    for ours, theirs in ((rest.validated, whole.validated), (rest.epochs, whole.epochs)):
        assert all(map(same, ours, theirs[-len(ours) :]))
    assert rest.metrics == whole.metrics[-len(rest.metrics) :]
    assert resumed.averager.snapshot_steps == all_of_it.averager.snapshot_steps
    assert resumed.averager.num_collected == all_of_it.averager.num_collected
    assert same(resumed.averager.average(), all_of_it.averager.average())


class Kill(Crash):
    """The same without a word."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def killed(rank: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    saver = ModelCheckpoint(folder / "checkpoints", save_last=True, every_n_train_steps=2)
    fit(folder, LatestWeightAveraging(k=3, update_every_n_steps=1), saver, Kill(14))


@pytest.mark.matrix
def test_a_killed_process_goes_on_bit_for_bit(tmp_path):
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        on_ranks(1, killed, tmp_path, join=False)
    whole, rest = (LatestWeightAveraging(k=3, update_every_n_steps=1) for _ in range(2))
    model = fit(tmp_path, whole)
    other = fit(tmp_path, rest, ckpt=tmp_path / "checkpoints" / "last.ckpt")
    assert same(weights(other), weights(model))
    assert same(rest.averager.average(), whole.averager.average())
    assert rest.averager.num_collected == whole.averager.num_collected


@pytest.mark.parametrize("monitor", ["val_loss", "val_loss_averaged"])
def test_the_best_checkpoint_by_the_averaged_metric(tmp_path, monitor):
    side_by_side = monitor != "val_loss"
    watch = Watch()
    averaging = LatestWeightAveraging(k=3, side_by_side=side_by_side)
    saving = ModelCheckpoint(tmp_path / "checkpoints", monitor=monitor, save_top_k=2)
    run = trainer(tmp_path, saving, watch, averaging, max_epochs=9)
    model = Net(lr=0.03)
    run.fit(model, loader(), loader(seed=1))
    served = [mean(watch.epochs[max(i - 2, 0) : i + 1]) for i in range(9)]
    served[1] = watch.epochs[1]  # three are waited for
    losses = [loss(model, state, loader(seed=1)) for state in served]
    order = sorted(range(9), key=losses.__getitem__)
    kept = {f"epoch={i}-step={3 * i + 3}.ckpt" for i in order[:2]}
    assert names(tmp_path / "checkpoints") == kept | {f".lawa/{name}.window" for name in kept}
    best = saving.best_model_path
    assert f"epoch={order[0]}-" in best
    assert order[0] != 8
    # Its weights are the trained ones, its window the one that was evaluated.
    state = torch.load(best, weights_only=True)
    assert same(state["state_dict"], watch.epochs[order[0]])
    assert not any(isinstance(value, torch.Tensor) for value in state["callbacks"].values())
    tested = run.test(model, loader(seed=2), ckpt_path="best", verbose=False)[0]
    name = "test_loss_averaged" if side_by_side else "test_loss"
    assert tested[name] == pytest.approx(loss(model, served[order[0]], loader(seed=2)))
    assert same(weights(model), watch.epochs[order[0]])
    # And so in another process, with a callback that has seen nothing.
    other = trainer(tmp_path, LatestWeightAveraging(k=3))
    again = other.test(Net(), loader(seed=2), ckpt_path=best, verbose=False)[0]["test_loss"]
    assert again == tested[name]


class SaveInside(Callback):
    """Saves in the middle of a validation, whoever's turn it is."""

    def __init__(self, path: Path, hook: str) -> None:
        self.path, self.hook = path, hook
        self.before: list[Weights] = []
        self.after: list[Weights] = []

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if self.hook == "batch" and trainer.current_epoch == 2:
            self._save(trainer, pl_module)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self.hook == "end" and trainer.current_epoch == 2:
            self._save(trainer, pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: Any) -> None:
        self._save(trainer, pl_module)

    def _save(self, trainer: Any, pl_module: Any) -> None:
        self.before.append(weights(pl_module))
        trainer.save_checkpoint(self.path)
        self.after.append(weights(pl_module))


@pytest.mark.parametrize("hook", ["batch", "end", "exception"])
@pytest.mark.parametrize("first", [True, False])
def test_checkpoints_hold_the_trained_weights_whenever_they_are_saved(tmp_path, hook, first):
    class Failing(Net):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            if hook == "exception" and self.current_epoch == 2:
                raise RuntimeError("broken")

    watch, averaging = Watch(), LatestWeightAveraging(k=2)
    saving = SaveInside(tmp_path / "inside.ckpt", hook)
    order = (saving, averaging) if first else (averaging, saving)
    run = trainer(tmp_path, watch, *order, max_epochs=3)
    model = Failing(batch_norm=True)
    if hook == "exception":
        with pytest.raises(RuntimeError, match="broken"):
            run.fit(model, loader(), loader(seed=1))
    else:
        run.fit(model, loader(), loader(seed=1))
    assert same(torch.load(tmp_path / "inside.ckpt")["state_dict"], watch.epochs[2])
    assert all(map(same, saving.after, saving.before))  # and the evaluation goes on as it was
    assert same(saving.before[-1], watch.epochs[2]) == (not first and hook != "batch")
    assert same(weights(model), watch.epochs[2])
    resumed = LatestWeightAveraging(k=2)
    other = trainer(tmp_path, resumed)
    other.validate(Net(batch_norm=True), loader(seed=1), ckpt_path=tmp_path / "inside.ckpt")
    assert resumed.averager.snapshot_steps == [6, 9]


def test_the_signal_of_a_cluster_saves_the_trained_weights_in_either_evaluation(tmp_path):
    """SLURM's handler saves at any moment, also while averaged weights are evaluated."""
    saved = []

    class Interrupted(Net):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            if self.current_epoch == 2:
                path = tmp_path / f"hpc_ckpt_{len(saved) + 1}.ckpt"
                self.trainer.save_checkpoint(path)
                saved.append((path, weights(self)))

    watch, averaging = Watch(), LatestWeightAveraging(k=2, side_by_side=True)
    run = trainer(tmp_path, watch, averaging, max_epochs=3)
    run.fit(Interrupted(), loader(), loader(seed=1))
    averaged = mean(watch.epochs[1:])
    assert [same(state, averaged) for _, state in saved] == [True] * 3 + [False] * 3
    for path, _ in saved:
        assert same(torch.load(path)["state_dict"], watch.epochs[2])
        resumed = LatestWeightAveraging(k=2)
        trainer(tmp_path, resumed).validate(Net(), loader(seed=1), ckpt_path=path, verbose=False)
        assert same(resumed.averager.average(), averaged)
    assert run._checkpoint_connector._hpc_resume_path == str(saved[-1][0])


class SaveEarly(Callback):
    """Saves after a batch; the averaging callback is told of it later."""

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("step", [7, 9])  # in the middle of an epoch, and at its end
@pytest.mark.parametrize("options", [{}, {"update_every_n_steps": 3}, {"update_every_n_steps": 7}])
def test_a_batch_that_it_was_not_told_of_is_made_up_for(tmp_path, step, options):
    path, k = tmp_path / "early.ckpt", {"k": 6, "min_snapshots": 1}
    whole, resumed = (LatestWeightAveraging(**k, **options) for _ in range(2))
    fit(tmp_path, SaveEarly(path, step), whole)
    fit(tmp_path, resumed, ckpt=path)
    assert resumed.averager.snapshot_steps == whole.averager.snapshot_steps
    assert same(resumed.averager.average(), whole.averager.average())
    # One that joins there has missed what was before.
    joined = LatestWeightAveraging(**k, **options, name="other")
    with pytest.warns(UserWarning, match="windows of the names .'averaged'. only"):
        fit(tmp_path, joined, ckpt=path)
    assert joined.averager.snapshot_steps == [s for s in whole.averager.snapshot_steps if s > step]


def test_windows_leave_with_their_checkpoints(tmp_path):
    folder = tmp_path / "checkpoints"
    saving = ModelCheckpoint(folder, save_last=True, every_n_train_steps=2, save_top_k=1)
    fit(tmp_path, LatestWeightAveraging(k=2), saving, max_epochs=4)
    kept = {"epoch=3-step=12.ckpt", "last.ckpt"}
    assert names(folder) == kept | {f".lawa/{name}.window" for name in kept}


def test_a_link_to_the_last_checkpoint_has_its_window(tmp_path):
    folder = tmp_path / "checkpoints"
    averaging = LatestWeightAveraging(k=2)
    fit(tmp_path, averaging, ModelCheckpoint(folder, save_last="link"), max_epochs=4)
    assert (folder / "last.ckpt").is_symlink()
    resumed = LatestWeightAveraging(k=2)
    fit(tmp_path, resumed, ckpt=folder / "last.ckpt", max_epochs=5)
    assert resumed.averager.snapshot_steps == [12, 15]


def run_twice(folder: Path) -> tuple[Path, Watch]:
    """Four epochs, with the checkpoint of the third overwritten by that of the fourth."""
    watch = Watch()
    fit(folder, watch, LatestWeightAveraging(k=2), save(folder / "third.ckpt"), max_epochs=3)
    path = folder / "last.ckpt"
    shutil.copy(folder / "third.ckpt", path)
    shutil.copy(window_of(folder / "third.ckpt"), window_of(path))
    return path, watch


def save(path: Path) -> Callback:
    class Save(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(path)

    return Save()


def test_killed_while_a_checkpoint_is_overwritten(tmp_path, monkeypatch):
    path, _ = run_twice(tmp_path)
    before = path.read_bytes()

    def killed(*_, **__):
        raise ConnectionError("the machine is gone")

    # The window of the fourth epoch is written, its checkpoint is not.
    pending = window_of(path, ".new")
    averaging = LatestWeightAveraging(k=2)
    run = trainer(tmp_path, averaging, max_epochs=4)
    run.fit(Net(), loader(), ckpt_path=path)
    monkeypatch.setattr(run.strategy.checkpoint_io, "save_checkpoint", killed)
    monkeypatch.setattr("torch_lawa.integrations.window_files.remove", lambda _: None)
    with pytest.raises(ConnectionError):
        run.save_checkpoint(path)
    assert pending.exists()
    assert path.read_bytes() == before
    monkeypatch.undo()
    third = LatestWeightAveraging(k=2)
    trainer(tmp_path, third).validate(Net(), loader(seed=1), ckpt_path=path, verbose=False)
    assert third.averager.snapshot_steps == [6, 9]
    # Both are written, and the window has not taken its place yet.
    monkeypatch.setattr("torch_lawa.integrations.window_files.publish", killed)
    with pytest.raises(ConnectionError):
        run.save_checkpoint(path)
    assert pending.exists()
    assert path.read_bytes() != before
    monkeypatch.undo()
    fourth = LatestWeightAveraging(k=2)
    trainer(tmp_path, fourth).validate(Net(), loader(seed=1), ckpt_path=path, verbose=False)
    assert fourth.averager.snapshot_steps == [9, 12]
    # The next save leaves nothing behind.
    run.save_checkpoint(path)
    assert names(tmp_path) == BOTH


def test_a_save_that_fails_leaves_the_last_one_and_no_litter(tmp_path, monkeypatch):
    path, _ = run_twice(tmp_path)
    before = path.read_bytes(), window_of(path).read_bytes()
    run = trainer(tmp_path, LatestWeightAveraging(k=2), max_epochs=4)
    run.fit(Net(), loader(), ckpt_path=path)

    def full(*_, **__):
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(run.strategy.checkpoint_io, "save_checkpoint", full)
        with pytest.raises(OSError, match="no space"):
            run.save_checkpoint(path)
    with monkeypatch.context() as patched:
        patched.setattr("torch_lawa.integrations.window_files.sync_file", full)
        with pytest.raises(OSError, match="no space"):
            run.save_checkpoint(path)
    assert (path.read_bytes(), window_of(path).read_bytes()) == before
    assert names(tmp_path) == BOTH


def test_a_window_that_is_missing_damaged_or_of_another_checkpoint(tmp_path):
    path, watch = run_twice(tmp_path)
    window = window_of(path)
    fit(tmp_path, LatestWeightAveraging(k=2), save(tmp_path / "other.ckpt"), max_epochs=2)
    shutil.copy(window_of(tmp_path / "other.ckpt"), window)
    with pytest.raises(
        StateError, match=r".lawa/last.ckpt.window is not the window of .*last.ckpt"
    ):
        fit(tmp_path, LatestWeightAveraging(k=2), ckpt=path)
    window.write_bytes(window.read_bytes()[:1000])
    with pytest.raises(StateError, match="cannot be read"):
        fit(tmp_path, LatestWeightAveraging(k=2), ckpt=path)
    window.unlink()
    averaging = LatestWeightAveraging(k=2)
    with pytest.warns(UserWarning, match=r".lawa/last.ckpt.window is missing: .* empty window"):
        fit(tmp_path, averaging, ckpt=path, max_epochs=4)
    assert averaging.averager.snapshot_steps == [12]
    # A checkpoint without averaging: its own weights, not the window of another run.
    fit(tmp_path, save(tmp_path / "plain.ckpt"), max_epochs=1)
    run = trainer(tmp_path, LatestWeightAveraging(k=2), max_epochs=3)
    model = Net()
    run.fit(model, loader())
    with pytest.warns(UserWarning, match="was saved without LatestWeightAveraging"):
        found = run.test(model, loader(), ckpt_path=tmp_path / "plain.ckpt", verbose=False)
    expected = loss(model, watch.epochs[0], loader())
    assert found[0]["test_loss"] == pytest.approx(expected)


def test_averaging_may_join_a_run(tmp_path):
    fit(tmp_path, save(tmp_path / "plain.ckpt"), max_epochs=3)
    by_steps = LatestWeightAveraging(k=1, update_every_n_steps=4, side_by_side=True, name="steps")
    by_epochs = LatestWeightAveraging(k=2, side_by_side=True)
    fit(tmp_path, by_steps, by_epochs, ckpt=tmp_path / "plain.ckpt", max_epochs=5)
    assert by_steps.averager.num_collected == 1
    assert by_steps.averager.snapshot_steps == [12]
    assert by_epochs.averager.snapshot_steps == [12, 15]


def test_another_k_takes_what_fits(tmp_path):
    path, watch = run_twice(tmp_path)
    averaging = LatestWeightAveraging(k=3, min_snapshots=1)
    trainer(tmp_path, averaging).validate(Net(), loader(), ckpt_path=path, verbose=False)
    assert averaging.averager.snapshot_steps == [6, 9]
    assert same(averaging.averager.average(k=1), watch.epochs[-1])


def test_two_windows_beside_one_checkpoint(tmp_path):
    def both() -> list[LatestWeightAveraging]:
        return [
            LatestWeightAveraging(k=k, side_by_side=True, name=f"of_{k}", update_every_n_epochs=k)
            for k in (1, 2)
        ]

    path = tmp_path / "both.ckpt"
    first, second = both(), both()
    fit(tmp_path, *first, save(path), max_epochs=4)
    trainer(tmp_path, *second).validate(Net(), loader(), ckpt_path=path, verbose=False)
    for a, b in zip(first, second, strict=True):
        assert a.averager.snapshot_steps == b.averager.snapshot_steps
        assert same(a.averager.average(), b.averager.average())


def test_weights_only_checkpoints_have_a_window_to_test_with(tmp_path):
    watch = Watch()
    saving = ModelCheckpoint(tmp_path / "checkpoints", save_weights_only=True)
    fit(tmp_path, watch, LatestWeightAveraging(k=2), saving, max_epochs=3)
    run = trainer(tmp_path, LatestWeightAveraging(k=2))
    found = run.test(Net(), loader(), ckpt_path=saving.best_model_path, verbose=False)
    expected = loss(Net(), mean(watch.epochs[1:]), loader())
    assert found[0]["test_loss"] == pytest.approx(expected)


def test_export(tmp_path):
    watch, averaging = Watch(), LatestWeightAveraging(k=2)
    run = trainer(tmp_path, watch, averaging, max_epochs=3)
    model = Net(lr=0.05)
    with pytest.raises(NotReadyError, match="0 of 2 snapshots"):
        averaging.save_averaged(run, tmp_path / "averaged.ckpt")
    run.fit(model, loader(), loader(seed=1))
    averaging.save_averaged(run, tmp_path / "averaged.ckpt")
    assert same(weights(model), watch.epochs[-1])
    assert names(tmp_path) == {"averaged.ckpt"}  # no window: there is nothing to resume
    loaded = Net.load_from_checkpoint(tmp_path / "averaged.ckpt")
    assert same(weights(loaded), mean(watch.epochs[1:]))
    assert loaded.lr == 0.05
    loaded.load_state_dict(averaging.averager.average())


@pytest.mark.parametrize("first", [True, False])
def test_export_in_the_middle_of_a_validation(tmp_path, first):
    """By a callback that is told of its end before or after ours is."""

    class Export(Callback):
        def on_validation_end(self, trainer, pl_module):
            if averaging.averager.ready and not trainer.sanity_checking:
                before = weights(pl_module)
                averaging.save_averaged(trainer, tmp_path / "averaged.ckpt")
                assert same(weights(pl_module), before)

    watch, averaging = Watch(), LatestWeightAveraging(k=2)
    order = (Export(), averaging) if first else (averaging, Export())
    model = fit(tmp_path, watch, *order, max_epochs=3)
    assert same(torch.load(tmp_path / "averaged.ckpt")["state_dict"], mean(watch.epochs[1:]))
    assert same(weights(model), watch.epochs[-1])


def test_offline_averaging_of_the_same_checkpoints_is_the_same(tmp_path):
    folder = tmp_path / "checkpoints"
    averaging = LatestWeightAveraging(k=3, update_every_n_steps=4)
    saving = ModelCheckpoint(folder, every_n_train_steps=4, save_top_k=-1)
    fit(tmp_path, averaging, saving, max_epochs=5)
    assert len(list(folder.glob(".lawa/*"))) == 3
    average_checkpoints(folder, tmp_path / "offline.safetensors", last=3)
    assert same(load_file(tmp_path / "offline.safetensors"), averaging.averager.average())


def test_a_window_is_no_checkpoint(tmp_path):
    saving = ModelCheckpoint(tmp_path, save_last=True)
    fit(tmp_path, LatestWeightAveraging(k=2), saving, max_epochs=3)
    window = window_of(tmp_path / "last.ckpt")
    assert window not in set(tmp_path.rglob("*.ckpt"))  # which finds hidden files, too
    with pytest.raises(FormatError, match=r"is the window of snapshots"):
        fit(tmp_path, LatestWeightAveraging(k=2), ckpt=window)
    with pytest.raises(FormatError, match=r"not a checkpoint by its name"):
        average_checkpoints([window, tmp_path / "last.ckpt"], tmp_path / "mean.pt")
    renamed = shutil.copy(window, tmp_path / "window.pt")  # its name in Trainer's checkpoints
    with pytest.raises(FormatError, match=r"is the window of snapshots"):
        average_checkpoints([renamed, tmp_path / "last.ckpt"], tmp_path / "mean.pt")


def test_code_that_watches_torch_save_sees_only_lightnings_writes(tmp_path, monkeypatch):
    written, save = [], torch.save
    monkeypatch.setattr(torch, "save", lambda *a, **k: (written.append(a), save(*a, **k)))
    saving = ModelCheckpoint(tmp_path, save_top_k=-1)
    fit(tmp_path, LatestWeightAveraging(k=2), saving, max_epochs=3)
    assert len(written) == 3


def test_other_places_and_other_writers(tmp_path):
    """An fsspec file system, and Lightning's asynchronous CheckpointIO."""
    folder = "memory://run/checkpoints"
    saving = ModelCheckpoint(folder, save_last=True, save_top_k=1)
    first = LatestWeightAveraging(k=2)
    fit(tmp_path, first, saving, max_epochs=3)
    resumed = LatestWeightAveraging(k=2)
    fit(tmp_path, resumed, ckpt=f"{folder}/last.ckpt", max_epochs=4)
    assert resumed.averager.snapshot_steps == [9, 12]
    assert [f.removeprefix("/run/checkpoints/") for f in saving._fs.find("/run/checkpoints")] == [
        ".lawa/epoch=2-step=9.ckpt.window",
        ".lawa/last.ckpt.window",
        "epoch=2-step=9.ckpt",
        "last.ckpt",
    ]
    saving = ModelCheckpoint(tmp_path / "async", save_last=True, save_top_k=1)
    fit(tmp_path, LatestWeightAveraging(k=2), saving, max_epochs=3, plugins=[AsyncCheckpointIO()])
    resumed = LatestWeightAveraging(k=2)
    fit(tmp_path, resumed, ckpt=tmp_path / "async" / "last.ckpt", max_epochs=4)
    assert resumed.averager.snapshot_steps == [9, 12]
