"""choose_window in the Transformers Trainer: what is chosen is reported, saved, loaded, resumed."""

from pathlib import Path
from typing import Any

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
from transformers import EarlyStoppingCallback

from torch_lawa import WindowSearch
from torch_lawa.errors import ConfigError
from torch_lawa.integrations.transformers import LatestWeightAveragingTrainer

STEPS = range(2, 13, 2)


def expected_window(recorder: Recorder, step: int, k: int) -> dict[str, torch.Tensor]:
    steps = range(step - 2 * (max(k, 1) - 1), step + 1, 2)
    return mean([recorder.weights[s] for s in steps])


@pytest.mark.parametrize("falls", [False, True], ids=["noisy", "falling"])
def test_the_best_window_is_reported_and_saved(falls: bool, tmp_path: Path) -> None:
    """While a loss falls steadily the trained weights are best, and no average is saved."""
    recorder, model, callback = Recorder(), tiny_model(), averaging(k=4, choose_window=True)
    run: dict[str, Any] = {"train_dataset": VALID} if falls else {"learning_rate": 0.3}
    ran = trainer(tmp_path, callback, recorder, model=model, **run)
    ran.train()
    chosen = history(ran, "eval_averaged_k")
    for at, step in enumerate(STEPS, 1):
        values = {0: history(ran, "eval_loss")[step]}
        for k in (k for k in (1, 2, 4) if k <= at):
            values[k] = history(ran, f"eval_averaged_k{k}_loss")[step]
            expected = loss_of(model, expected_window(recorder, step, k), VALID)
            assert values[k] == pytest.approx(expected, abs=1e-6)
        best = min(values.values())
        reported = history(ran, "eval_averaged_loss")[step]
        assert reported == values[chosen[step]] <= best + 0.02 * (values[0] - best)
        folder = tmp_path / f"checkpoint-{step}" / MODEL
        assert folder.exists() is (chosen[step] > 0)
        if chosen[step]:
            assert same(saved(folder), expected_window(recorder, step, chosen[step]))
    assert history(ran, "eval_averaged_k4_loss").keys() == {8, 10, 12}
    assert all(seconds > 0 for seconds in history(ran, "eval_averaged_seconds").values())
    assert callback.choice is not None
    assert (callback.choice.k, callback.choice.values) == (chosen[12], values)
    assert (max(chosen.values()) == 0) is falls
    # After training the choice is used, and not made again.
    before, metrics = callback.choice, ran.evaluate(OTHER)
    served = expected_window(recorder, 12, chosen[12])
    assert metrics["eval_averaged_loss"] == pytest.approx(loss_of(model, served, OTHER), abs=1e-6)
    assert callback.choice is before
    assert same(weights_of(model), recorder.weights[12])


def test_the_trained_weights_are_evaluated_once(tmp_path: Path) -> None:
    passes: list[str] = []

    class Counting(LatestWeightAveragingTrainer):
        def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
            passes.append(kwargs["metric_key_prefix"])
            return super().evaluation_loop(*args, **kwargs)

    callback = averaging(k=2, choose_window=True)
    ran = trainer(tmp_path, callback, kind=Counting, max_steps=4)
    ran.train()
    assert passes == ["eval", "eval_averaged_k2", "eval"]
    assert history(ran, "eval_averaged_k1_loss") == history(ran, "eval_loss")
    # A snapshot that is older than the trained weights is not the same.
    passes.clear()
    older = averaging(k=2, choose_window=True, collect_strategy="steps", collect_every=3)
    trainer(tmp_path / "older", older, kind=Counting, max_steps=8, eval_steps=4).train()
    both = ["eval_averaged_k1", "eval_averaged_k2", "eval"]
    assert passes == ["eval_averaged_k1", "eval", *both]


def test_training_is_as_it_would_have_been(tmp_path: Path) -> None:
    finals = []
    for name, callbacks in (("plain", []), ("chosen", [averaging(k=4, choose_window=True)])):
        ran = trainer(tmp_path / name, *callbacks)
        ran.train()
        finals.append(weights_of(ran.model))
    assert same(*finals)


def test_a_crashed_run_chooses_the_same(tmp_path: Path) -> None:
    search = WindowSearch(margin=0.9, full_every=4)  # so that the choice depends on the past
    run: dict[str, Any] = {"learning_rate": 0.3}
    whole = trainer(tmp_path / "whole", averaging(k=4, choose_window=search), **run)
    whole.train()
    first = averaging(k=4, choose_window=search)
    failing = trainer(tmp_path / "parts", first, Fails("on_step_begin", 9), **run)
    with pytest.raises(RuntimeError, match="a hook failed"):
        failing.train()
    second = averaging(k=4, choose_window=search)
    resumed = trainer(tmp_path / "parts", second, model=tiny_model(seed=99), **run)
    resumed.train(resume_from_checkpoint=True)
    names = ["loss", "averaged_loss", "averaged_k", "averaged_k1_loss", "averaged_k4_loss"]
    for name in (f"eval_{name}" for name in names):
        assert history(resumed, name) == history(whole, name)
    assert max(history(whole, "eval_averaged_k").values()) > 0
    states = [
        torch.load(tmp_path / part / "checkpoint-12" / WINDOW, weights_only=True)["notes"]["choice"]
        for part in ("whole", "parts")
    ]
    assert states[0] == states[1] == {"k": second.choice.k, "num_decided": 6}  # type: ignore[union-attr]


def test_the_best_choice_is_loaded_at_the_end(tmp_path: Path) -> None:
    recorder = Recorder()
    ran = trainer(
        tmp_path,
        averaging(k=4, choose_window=True),
        recorder,
        EarlyStoppingCallback(early_stopping_patience=20),
        learning_rate=0.3,
        load_best_model_at_end=True,
        metric_for_best_model="eval_averaged_loss",
        greater_is_better=False,
    )
    ran.train()
    losses, chosen = history(ran, "eval_averaged_loss"), history(ran, "eval_averaged_k")
    best = min(losses, key=losses.__getitem__)
    assert ran.state.best_global_step == best
    assert same(weights_of(ran.model), expected_window(recorder, best, chosen[best]))


def test_early_stopping_counts_each_evaluation_once(tmp_path: Path) -> None:
    stopping = EarlyStoppingCallback(early_stopping_patience=3)
    ran = trainer(
        tmp_path,
        averaging(k=2, choose_window=True),
        stopping,
        train_dataset=TRAIN[:8],  # learnt by heart: it gets worse
        metric_for_best_model="eval_averaged_loss",
        greater_is_better=False,
        load_best_model_at_end=True,
        max_steps=40,
    )
    ran.train()
    losses = history(ran, "eval_averaged_loss")
    best = min(losses, key=losses.__getitem__)
    assert ran.state.global_step == best + 6


def test_several_evaluation_sets(tmp_path: Path) -> None:
    callback = averaging(k=2, choose_window=True, monitor="eval_b_loss")
    ran = trainer(tmp_path, callback, eval_dataset={"a": VALID, "b": OTHER}, learning_rate=0.3)
    ran.train()
    assert callback.choice is not None
    chosen = history(ran, "eval_averaged_k")
    name = "eval_averaged_k{}_b_loss"
    for step, k in chosen.items():
        source = name.format(k) if k else "eval_b_loss"
        assert history(ran, "eval_averaged_b_loss")[step] == history(ran, source)[step]
    assert callback.choice.values[2] == history(ran, name.format(2))[12]
    metrics = ran.evaluate()
    assert {"eval_a_loss", "eval_averaged_a_loss", "eval_averaged_b_loss"} <= metrics.keys()


def test_an_exception_restores_the_weights(tmp_path: Path) -> None:
    recorder, model, callback = Recorder(), tiny_model(), averaging(k=2, choose_window=True)
    fails = Fails("on_evaluate", 6, metric="eval_averaged_k2_loss")
    with pytest.raises(RuntimeError, match="a hook failed"):
        trainer(tmp_path, callback, recorder, fails, model=model).train()
    assert same(weights_of(model), recorder.weights[6])
    assert callback.choice is not None
    assert callback.k == callback.choice.k


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"choose_window": 3}, "choose_window=3"),
        ({"choose_window": WindowSearch([8])}, "keeps 4 snapshots"),
        ({"choose_window": True, "metrics": "averaged"}, "metrics='both'"),
        ({"choose_window": WindowSearch(), "monitor": "accuracy"}, "monitor='eval_accuracy'"),
    ],
)
def test_mistakes_are_found_when_the_callback_is_made(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        averaging(k=4, **options)


@pytest.mark.filterwarnings("error:.*an average needs")
def test_a_run_without_evaluations_is_refused(tmp_path: Path) -> None:
    """Else the average would neither be saved nor used, without a word."""
    with pytest.raises(ConfigError, match="eval_strategy='no'"):
        trainer(tmp_path, averaging(k=2, choose_window=True), eval_strategy="no")


def test_a_run_that_is_short_for_k_compares_what_it_has(tmp_path: Path) -> None:
    callback = averaging(k=8, choose_window=True)
    best = {"metric_for_best_model": "eval_averaged_loss", "load_best_model_at_end": True}
    ran = trainer(tmp_path, callback, max_steps=6, learning_rate=0.3, **best)
    ran.train()
    assert callback.choice is not None
    assert set(callback.choice.values) == {0, 1, 2}
    assert history(ran, "eval_averaged_k").keys() == {2, 4, 6}


def test_a_metric_that_does_not_exist_is_found_at_the_first_evaluation(tmp_path: Path) -> None:
    ran = trainer(tmp_path, averaging(k=2, choose_window=True, monitor="eval_norm"))
    with pytest.raises(ConfigError, match="eval_norm"):
        ran.train()
    assert ran.state.global_step == 2


def test_the_trained_weights_on_a_set_that_does_not_decide(tmp_path: Path) -> None:
    callback = averaging(k=2, choose_window=True, monitor="eval_a_loss")
    ran = trainer(
        tmp_path,
        callback,
        train_dataset=VALID,
        eval_dataset={"a": VALID, "b": OTHER},
        metric_for_best_model="eval_averaged_b_loss",  # must be there, whatever was chosen
        greater_is_better=False,
        load_best_model_at_end=True,
    )
    ran.train()
    assert callback.choice is not None
    assert callback.choice.k == 0
    assert ran.state.best_metric == min(history(ran, "eval_b_loss").values())
