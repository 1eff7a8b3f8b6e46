"""Averaging in the Transformers Trainer: what is collected, evaluated and saved."""

import logging
import re
import sys
import types
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.transformers import (
    MODEL,
    OTHER,
    TRAIN,
    VALID,
    WINDOW,
    Fails,
    Recorder,
    averaging,
    history,
    loss_of,
    mean,
    same,
    saved,
    tiny_model,
    trainer,
    weights_of,
)
from transformers import (
    AutoModelForCausalLM,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
)

from torch_lawa import DiskStore, Exponential, average_checkpoints
from torch_lawa.errors import ConfigError, OutputError
from torch_lawa.integrations.transformers import (
    LatestWeightAveragingCallback,
    LatestWeightAveragingTrainer,
)


def test_the_average_of_the_latest_saves_lies_beside_each(tmp_path: Path) -> None:
    trainer(tmp_path, averaging(k=3)).train()
    for step in (2, 4):
        assert not (tmp_path / f"checkpoint-{step}" / MODEL).exists()
    for step in (6, 8, 10, 12):
        latest = [saved(tmp_path / f"checkpoint-{s}") for s in (step - 4, step - 2, step)]
        found = saved(tmp_path / f"checkpoint-{step}" / MODEL)
        assert found.keys() == latest[0].keys()
        assert same(found, mean(latest))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-12" / MODEL)
    assert same(saved(tmp_path / "checkpoint-12" / MODEL), weights_of(loaded))


def test_offline_the_same_folders_give_the_same_bits(tmp_path: Path) -> None:
    trainer(tmp_path / "run", averaging(k=3)).train()
    average_checkpoints(tmp_path / "run", tmp_path / "offline", last=3)
    assert same(saved(tmp_path / "offline"), saved(tmp_path / "run" / "checkpoint-12" / MODEL))


def test_metrics_side_by_side(tmp_path: Path) -> None:
    recorder, model = Recorder(), tiny_model()
    ran = trainer(tmp_path, averaging(k=3), recorder, model=model)
    ran.train()
    raw, averaged = history(ran, "eval_loss"), history(ran, "eval_averaged_loss")
    assert list(raw) == [2, 4, 6, 8, 10, 12]
    assert list(averaged) == [6, 8, 10, 12]
    for step in averaged:
        steps = (step - 4, step - 2, step)
        assert raw[step] == pytest.approx(loss_of(model, recorder.weights[step], VALID), abs=1e-6)
        expected = loss_of(model, recorder.mean(*steps), VALID)
        assert averaged[step] == pytest.approx(expected, abs=1e-6)
        assert abs(averaged[step] - raw[step]) > 1e-4  # they could have been mixed up


def test_training_is_as_it_would_have_been(tmp_path: Path) -> None:
    plain = trainer(tmp_path / "a")  # making a trainer sets the seed
    plain.train()
    averaged = trainer(tmp_path / "b", averaging(k=2))
    averaged.train()
    assert same(weights_of(averaged.model), weights_of(plain.model))
    for name in ("loss", "eval_loss"):
        assert history(averaged, name) == history(plain, name)


def test_one_pass_of_the_average_instead_of_the_weights(tmp_path: Path) -> None:
    recorder, model = Recorder(), tiny_model()
    ran = trainer(tmp_path, averaging(k=3, metrics="averaged"), recorder, model=model)
    ran.train()
    found = history(ran, "eval_loss")
    assert not history(ran, "eval_averaged_loss")
    for step in (2, 4):  # there is no average yet
        assert found[step] == pytest.approx(loss_of(model, recorder.weights[step], VALID), abs=1e-6)
    for step in (6, 8, 10, 12):
        expected = loss_of(model, recorder.mean(step - 4, step - 2, step), VALID)
        assert found[step] == pytest.approx(expected, abs=1e-6)
    assert same(weights_of(ran.model), recorder.weights[12])


def test_steps_are_optimizer_steps(tmp_path: Path) -> None:
    callback, recorder = averaging(collect_strategy="steps", collect_every=3, start=2), Recorder()
    ran = trainer(
        tmp_path,
        callback,
        recorder,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=2,
    )
    ran.train()
    assert ran.state.global_step == 12
    assert callback.averager.snapshot_steps == [6, 9, 12]
    assert callback.averager.num_collected == 4
    assert same(callback.averager.average(), recorder.mean(6, 9, 12))


def test_excluded_tensors_stay_as_they_were_in_the_newest_snapshot(tmp_path: Path) -> None:
    options: dict[str, Any] = {"collect_strategy": "steps", "collect_every": 4}
    kept = next(name for name, _ in trainer(tmp_path, averaging()).model.named_parameters())
    callback, recorder = averaging(exclude=kept, **options), Recorder()
    trainer(tmp_path, callback, recorder).train()
    average, steps = callback.averager.average(), callback.averager.snapshot_steps
    expected = {**recorder.mean(*steps), kept: recorder.weights[steps[-1]][kept]}
    assert same(average, expected)
    assert not same(average, recorder.mean(*steps))


def test_whole_epochs_also_where_the_run_ends_within_one(tmp_path: Path) -> None:
    callback = averaging(k=2, collect_strategy="epoch")
    ran = trainer(tmp_path, callback, max_steps=20, save_strategy="epoch", eval_strategy="epoch")
    ran.train()
    assert ran.state.epoch == 2.5
    assert callback.averager.snapshot_steps == [8, 16]
    assert history(ran, "eval_averaged_loss").keys() == {16, 20}


def test_every_second_epoch_and_a_fraction_left_out(tmp_path: Path) -> None:
    callback = averaging(k=2, collect_strategy="epoch", collect_every=2, start=0.25)
    trainer(tmp_path, callback, max_steps=-1, num_train_epochs=8, save_strategy="no").train()
    assert callback.averager.snapshot_steps == [48, 64]
    assert callback.averager.num_collected == 3  # epochs 4, 6 and 8


def test_several_evaluation_sets(tmp_path: Path) -> None:
    recorder, model = Recorder(), tiny_model()
    sets = {"valid": VALID, "other": OTHER}
    ran = trainer(
        tmp_path,
        averaging(k=3),
        recorder,
        model=model,
        eval_dataset=sets,
        load_best_model_at_end=True,
        metric_for_best_model="eval_averaged_other_loss",
    )
    ran.train()
    for name, data in sets.items():
        found = history(ran, f"eval_averaged_{name}_loss")
        assert list(found) == [6, 8, 10, 12]
        for step, loss in found.items():
            expected = loss_of(model, recorder.mean(step - 4, step - 2, step), data)
            assert loss == pytest.approx(expected, abs=1e-6)
        assert list(history(ran, f"eval_{name}_loss")) == [2, 4, 6, 8, 10, 12]
    assert ran.state.best_metric == min(history(ran, "eval_averaged_other_loss").values())


def test_evaluate_predict_and_save_after_training(tmp_path: Path) -> None:
    recorder, model = Recorder(), tiny_model()
    ran = trainer(tmp_path, averaging(k=3), recorder, model=model)
    ran.train()
    average = recorder.mean(8, 10, 12)
    metrics = ran.evaluate()
    assert metrics["eval_loss"] == pytest.approx(loss_of(model, recorder.weights[12], VALID))
    assert metrics["eval_averaged_loss"] == pytest.approx(loss_of(model, average, VALID))
    expected = loss_of(model, average, OTHER)
    assert ran.predict(OTHER).metrics["test_loss"] == pytest.approx(expected)
    raw = Trainer.predict(ran, OTHER).metrics["test_loss"]
    assert raw == pytest.approx(loss_of(model, recorder.weights[12], OTHER))
    ran.save_model(str(tmp_path / "final"))
    assert same(saved(tmp_path / "final"), recorder.weights[12])
    assert same(saved(tmp_path / "final" / MODEL), average)


class GetsWorse(TrainerCallback):  # type: ignore[misc]
    """The weights grow tenfold after 8 steps."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 8:
            with torch.no_grad():
                for parameter in kwargs["model"].parameters():
                    parameter.mul_(10)


@pytest.mark.parametrize("mode", ["both", "averaged"])
def test_the_best_average_is_what_is_loaded_at_the_end(mode: Any, tmp_path: Path) -> None:
    recorder, model = Recorder(), tiny_model()
    metric = "eval_averaged_loss" if mode == "both" else "eval_loss"
    ran = trainer(
        tmp_path,
        averaging(k=3, metrics=mode),
        recorder,
        GetsWorse(),
        model=model,
        learning_rate=0.3,  # the first weights are not the best
        load_best_model_at_end=True,
        metric_for_best_model=metric,
        save_total_limit=2,
    )
    ran.train()
    losses = {step: loss for step, loss in history(ran, metric).items() if step >= 6}
    best = min(losses, key=losses.__getitem__)
    assert best != 12
    assert ran.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
    average = recorder.mean(best - 4, best - 2, best)
    assert same(weights_of(ran.model), average)
    # What was chosen is what is evaluated, predicts and is saved from now on.
    metrics = ran.evaluate()
    assert metrics["eval_loss"] == pytest.approx(losses[best], abs=1e-6)
    assert "eval_averaged_loss" not in metrics
    assert ran.predict(VALID).metrics["test_loss"] == pytest.approx(losses[best], abs=1e-6)
    ran.save_model(str(tmp_path / "final"))
    assert same(saved(tmp_path / "final"), average)
    assert not (tmp_path / "final" / MODEL).exists()


def test_where_there_was_no_average_yet_the_best_is_the_raw_model(tmp_path: Path) -> None:
    recorder = Recorder()
    ran = trainer(
        tmp_path,
        averaging(k=3, metrics="averaged"),
        recorder,
        load_best_model_at_end=True,
        train_dataset=TRAIN[:8],  # learnt by heart
    )
    ran.train()
    assert ran.state.best_global_step == 2
    assert same(weights_of(ran.model), recorder.weights[2])


def test_the_best_by_the_raw_metric_is_the_raw_model(tmp_path: Path) -> None:
    recorder = Recorder()
    ran = trainer(
        tmp_path,
        averaging(k=3),
        recorder,
        train_dataset=TRAIN[:8],  # learnt by heart
        load_best_model_at_end=True,
        metric_for_best_model="loss",
    )
    ran.train()
    losses = history(ran, "eval_loss")
    best = min(losses, key=losses.__getitem__)
    assert best != 12
    assert same(weights_of(ran.model), recorder.weights[best])
    assert ran.predict(VALID).metrics["test_loss"] == pytest.approx(losses[best], abs=1e-6)


@pytest.mark.parametrize("mode", ["both", "averaged"])
def test_early_stopping_on_the_average(
    mode: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)  # to be seen here
    metric = "eval_averaged_loss" if mode == "both" else "eval_loss"
    ran = trainer(
        tmp_path,
        averaging(k=2, metrics=mode),
        EarlyStoppingCallback(early_stopping_patience=2),
        learning_rate=0.3,
        max_steps=60,
        load_best_model_at_end=True,
        metric_for_best_model=metric,
    )
    ran.train()
    losses = list(history(ran, metric).values())
    rounds = [i for i, loss in enumerate(losses) if loss < min(losses[:i], default=float("inf"))]
    assert ran.state.global_step < 60
    assert len(losses) == rounds[-1] + 3  # the best, and two that were not better
    assert "early stopping is disabled" not in caplog.text


def test_a_learning_rate_that_follows_the_average(tmp_path: Path) -> None:
    ran = trainer(
        tmp_path,
        averaging(k=2, metrics="averaged"),
        learning_rate=0.1,
        train_dataset=TRAIN[:8],  # learnt by heart: the loss rises
        lr_scheduler_type="reduce_lr_on_plateau",
        lr_scheduler_kwargs={"patience": 1},
        metric_for_best_model="eval_loss",
    )
    ran.train()
    assert history(ran, "learning_rate")[12] < 0.1


def test_saves_that_depend_on_the_average(tmp_path: Path) -> None:
    ran = trainer(
        tmp_path,
        averaging(k=2, collect_strategy="steps", collect_every=2),
        learning_rate=0.3,
        save_strategy="best",
        metric_for_best_model="eval_averaged_loss",
        greater_is_better=False,
    )
    ran.train()
    losses = history(ran, "eval_averaged_loss")
    expected = {s for s in losses if losses[s] == min(v for t, v in losses.items() if t <= s)}
    assert {int(folder.name[11:]) for folder in tmp_path.glob("checkpoint-*")} == expected


class Saver(TrainerCallback):  # type: ignore[misc]
    """Saves and predicts from within an evaluation, as people's own callbacks do."""

    def __init__(self) -> None:
        self.losses: dict[str, float] = {}

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kind = "averaged" if "eval_averaged_loss" in kwargs["metrics"] else "raw"
        self.trainer.save_model(f"{args.output_dir}/mine-{kind}-{state.global_step}")
        if state.global_step == 6:
            self.losses[kind] = self.trainer.predict(VALID).metrics["test_loss"]


def test_other_callbacks_beside_it(tmp_path: Path) -> None:
    saver, recorder = Saver(), Recorder()
    ran = trainer(tmp_path, saver, recorder, EarlyStoppingCallback(50))
    ran.args.metric_for_best_model = "eval_averaged_loss"
    ran.args.greater_is_better = False
    ran.add_callback(averaging(k=2))  # later is early enough
    saver.trainer = ran
    ran.train()
    assert same(saved(tmp_path / "mine-raw-6"), recorder.weights[6])
    assert same(saved(tmp_path / "mine-raw-6" / MODEL), recorder.mean(4, 6))
    assert same(saved(tmp_path / "mine-averaged-6"), recorder.mean(4, 6))
    assert not (tmp_path / "mine-averaged-6" / MODEL).exists()
    assert saver.losses["raw"] == history(ran, "eval_loss")[6]
    assert saver.losses["averaged"] == history(ran, "eval_averaged_loss")[6]


def test_a_table_in_a_notebook_has_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a row for a step; a second evaluation there must not wipe out the first."""
    shown = types.ModuleType("IPython.display")
    monkeypatch.setattr(shown, "HTML", str, raising=False)
    monkeypatch.setattr(shown, "display", lambda *args, **kwargs: mock.Mock(), raising=False)
    notebook = types.ModuleType("IPython")
    monkeypatch.setattr(notebook, "display", shown, raising=False)
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    monkeypatch.setitem(sys.modules, "IPython.display", shown)
    from transformers.utils.notebook import NotebookProgressCallback

    table: list[list[Any]] = []

    class Notebook(NotebookProgressCallback):  # type: ignore[misc]
        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            table.extend(self.training_tracker.inner_table)

    ran = trainer(tmp_path, averaging(k=3), Notebook(), logging_steps=12)
    ran.train()
    columns, last = table[0], table[-1]
    row = dict(zip(columns, last, strict=True))
    assert row["Validation Loss"] == history(ran, "eval_loss")[12]
    assert row["Averaged Loss"] == history(ran, "eval_averaged_loss")[12]


@pytest.mark.parametrize("metric", ["eval_loss", "eval_averaged_loss"])
def test_an_exception_in_a_hook_leaves_the_weights_alone(metric: str, tmp_path: Path) -> None:
    recorder = Recorder()
    failing = Fails("on_evaluate", 8, metric=metric)
    ran = trainer(tmp_path, averaging(k=3), recorder, failing)
    with pytest.raises(RuntimeError, match="a hook failed"):
        ran.train()
    assert same(weights_of(ran.model), recorder.weights[8])
    ran.remove_callback(failing)
    metrics = ran.evaluate()  # and the trainer still works
    assert metrics["eval_averaged_loss"] != metrics["eval_loss"]


def test_training_again_begins_a_new_window(tmp_path: Path) -> None:
    callback, recorder = averaging(k=3), Recorder()
    ran = trainer(tmp_path, callback, recorder)
    ran.train()
    ran.train()
    assert callback.averager.snapshot_steps == [8, 10, 12]
    assert same(callback.averager.average(), recorder.mean(8, 10, 12))
    assert len(history(ran, "eval_averaged_loss")) == 4


def test_nothing_of_an_earlier_run_is_left_beside_a_model(tmp_path: Path) -> None:
    first = trainer(tmp_path, averaging(k=1))
    first.train()
    first.save_model()
    assert (tmp_path / "checkpoint-4" / MODEL).exists()
    second = trainer(tmp_path, averaging(k=3), load_best_model_at_end=True)
    second.save_model()  # nothing was trained yet: nothing takes its place
    assert (tmp_path / MODEL).exists()
    second.train()
    assert not (tmp_path / "checkpoint-4" / MODEL).exists()
    second.save_model()
    assert not (tmp_path / MODEL).exists()


@pytest.mark.parametrize("weighted", [{"coefficients": Exponential(0.75)}, {"blend": 0.5}])
def test_stores_and_coefficients(weighted: dict[str, Any], tmp_path: Path) -> None:
    recorder = Recorder()
    callback = averaging(k=2, store=DiskStore(tmp_path / "window"), **weighted)
    trainer(tmp_path / "run", callback, recorder).train()
    old, new = recorder.weights[10], recorder.weights[12]
    expected = {n: (0.25 * old[n].double() + 0.75 * new[n].double()).float() for n in new}
    assert same(saved(tmp_path / "run" / "checkpoint-12" / MODEL), expected)
    assert len(list((tmp_path / "window").rglob("*.safetensors"))) >= 2


def test_a_store_of_another_run_is_refused(tmp_path: Path) -> None:
    first = averaging(k=2, store=DiskStore(tmp_path / "window"))
    trainer(tmp_path / "run", first).train()
    first.averager.wait()
    del first
    kept = {path: path.read_bytes() for path in (tmp_path / "window").rglob("*.safetensors")}
    again = trainer(tmp_path / "again", averaging(k=2, store=DiskStore(tmp_path / "window")))
    for _ in range(2):  # trying once more is no way to lose them
        with pytest.raises(ConfigError, match="earlier run already"):
            again.train()
    assert kept
    assert all(path.read_bytes() == content for path, content in kept.items())


class Unfreeze(TrainerCallback):  # type: ignore[misc]
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 7:
            kwargs["model"].requires_grad_(True)


def test_a_layer_that_is_frozen_at_first(tmp_path: Path) -> None:
    model = tiny_model()
    model.model.embed_tokens.weight.requires_grad_(False)
    recorder = Recorder()
    trainer(tmp_path, averaging(k=2), recorder, Unfreeze(), model=model).train()
    for step in (6, 12):
        found = saved(tmp_path / f"checkpoint-{step}" / MODEL)
        assert found.keys() == saved(tmp_path / f"checkpoint-{step}").keys()
        assert same(found, recorder.mean(step - 2, step))


def test_averaged_metrics_reach_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "logs"))
    ran = trainer(tmp_path / "run", averaging(k=3), report_to="tensorboard")
    ran.train()
    events = EventAccumulator(str(tmp_path / "logs"))
    events.Reload()
    for name in ("loss", "averaged_loss"):
        found = {event.step: event.value for event in events.Scalars(f"eval/{name}")}
        assert found == pytest.approx(history(ran, f"eval_{name}"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k=0: give an int"),
        ({"store": "cloud"}, "store='cloud': choose one of 'host', 'device'"),
        ({"collect_strategy": "minutes"}, "collect_strategy='minutes'"),
        ({"collect_strategy": "steps", "collect_every": 0}, "collect_every=0"),
        ({"collect_every": 5}, "Set save_steps"),
        ({"start": 1.5}, r"in \[0, 1\)"),
        ({"start": -1}, "must not be negative"),
        ({"start": "early"}, "start='early'"),
        ({"metrics": "raw"}, "metrics='raw'"),
        ({"batch_norm_batches": -1}, "batch_norm_batches=-1"),
        ({"batch_norm_batches": 2.5}, "batch_norm_batches=2.5"),
        ({"storage_dtype": torch.int8}, "storage_dtype=torch.int8"),
    ],
)
def test_mistakes_are_found_when_the_callback_is_made(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LatestWeightAveragingCallback(**options)


@pytest.mark.parametrize(
    ("callback", "run", "message"),
    [
        (
            {"collect_strategy": "steps", "collect_every": 5},
            {"metric_for_best_model": "eval_averaged_loss"},
            "gives 2 snapshots.* k=3",
        ),
        ({"collect_strategy": "save"}, {"save_strategy": "no"}, "'no': nothing is saved"),
        (
            {"collect_strategy": "save"},
            {"save_strategy": "best", "metric_for_best_model": "loss"},
            "save_strategy='best'",
        ),
        (
            {},
            {
                "lr_scheduler_type": "reduce_lr_on_plateau",
                "metric_for_best_model": "eval_averaged_loss",
            },
            r"set LatestWeightAveragingCallback\(metrics='averaged'\)",
        ),
        (
            {"metrics": "averaged"},
            {"metric_for_best_model": "eval_averaged_loss"},
            "set metric_for_best_model='eval_loss', or metrics='both'",
        ),
    ],
)
def test_mistakes_are_found_when_the_trainer_is_made(
    callback: dict[str, Any], run: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path, averaging(k=3, **callback), **run)


@pytest.mark.parametrize(
    ("callback", "run", "message"),
    [
        ({"collect_strategy": "steps", "start": 12}, {}, "gives 0 snapshots.* start=12"),
        ({}, {"save_steps": 6}, r"gives 2 snapshots.*save_steps"),
        ({}, {"save_strategy": "no"}, "save_strategy='no': nothing is saved"),
        (
            {"min_snapshots": 1},
            {"save_strategy": "best", "metric_for_best_model": "loss"},
            "save_strategy='best': saves depend",
        ),
        ({"collect_strategy": "epoch"}, {"max_steps": 6}, "run of 0 complete epochs gives 0"),
        ({"collect_strategy": "epoch"}, {}, "run of 1 complete epoch gives 1 snapshot,"),
        ({"start": 0.9}, {"max_steps": -1, "num_train_epochs": 2}, "gives 1 snapshot,"),
        ({}, {"save_strategy": "epoch", "eval_strategy": "no"}, "gives 2 snapshots,"),
        ({}, {"save_steps": 0.5}, "gives 2 snapshots,"),
    ],
)
def test_a_run_too_short_for_an_average_is_trained_all_the_same(
    callback: dict[str, Any], run: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ran = trainer(tmp_path, averaging(k=3, **callback), **run)
        ran.train()
    ours = [str(w.message) for w in said if "without averaging" in str(w.message)]
    assert len(ours) == 1
    assert re.search(message, ours[0])
    assert ran.state.global_step == ran.state.max_steps
    assert not any("eval_averaged_loss" in row for row in ran.state.log_history)


def test_a_metric_that_will_not_come_is_found_at_the_first_evaluation(tmp_path: Path) -> None:
    ran = trainer(tmp_path, averaging(k=3), metric_for_best_model="eval_averaged_acuracy")
    with pytest.raises(ConfigError, match=r"gives no eval_acuracy.* It gives eval_loss, eval_runt"):
        ran.train()
    assert ran.state.global_step == 2


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(TRAIN * 4)


def test_epochs_of_data_without_a_length(tmp_path: Path) -> None:
    ran = trainer(tmp_path, averaging(collect_strategy="epoch"), train_dataset=Stream())
    with pytest.raises(ConfigError, match="has no length"):
        ran.train()
    callback = averaging(collect_strategy="steps")
    trainer(tmp_path, callback, train_dataset=Stream()).train()
    assert callback.averager.snapshot_steps == [10, 11, 12]


def test_a_trainer_without_the_mixin_and_two_callbacks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="use LatestWeightAveragingTrainer instead of Trainer"):
        trainer(tmp_path, averaging(), kind=Trainer)
    late = trainer(tmp_path, kind=Trainer)
    late.add_callback(averaging())
    with pytest.raises(ConfigError, match="use LatestWeightAveragingTrainer instead of Trainer"):
        late.train()
    with pytest.raises(ConfigError, match="2 LatestWeightAveragingCallbacks"):
        trainer(tmp_path, averaging(), averaging(k=2))


def test_without_the_callback_nothing_changes(tmp_path: Path) -> None:
    plain = trainer(tmp_path / "a", kind=Trainer)
    plain.train()
    mixed = trainer(tmp_path / "b")
    mixed.train()
    assert same(weights_of(mixed.model), weights_of(plain.model))
    assert not (tmp_path / "b" / "checkpoint-12" / "averaged").exists()
    assert mixed.evaluate().keys() == plain.evaluate().keys()
    assert isinstance(mixed, LatestWeightAveragingTrainer)


def test_only_the_model_is_saved_where_that_is_asked_for(tmp_path: Path) -> None:
    trainer(tmp_path, averaging(k=2), save_only_model=True).train()
    assert (tmp_path / "checkpoint-12" / MODEL / "model.safetensors").exists()
    assert not (tmp_path / "checkpoint-12" / WINDOW).exists()


def test_a_folder_that_the_average_cannot_have_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "averaged").write_text("mine")
    steps = Recorder()
    made = trainer(tmp_path, averaging(k=3), steps)
    with pytest.raises(OutputError, match="is not a folder"):
        made.train()
    assert made.state.global_step == 0
    (tmp_path / "averaged").unlink()
    (tmp_path / MODEL / "runs").mkdir(parents=True)
    monkeypatch.setattr(LatestWeightAveragingTrainer, "_exports", lambda _: True)
    with pytest.raises(OutputError, match="contains the folder runs"):
        trainer(tmp_path, averaging(k=3)).train()
