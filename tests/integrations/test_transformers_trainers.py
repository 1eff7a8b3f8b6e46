"""The mixin before trainers that are not Transformers' own: other arguments, losses, optimizers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.transformers import (
    OTHER,
    TRAIN,
    VALID,
    Recorder,
    arguments,
    averaging,
    history,
    loss_of,
    same,
    tiny_model,
    trainer,
    weights_of,
)
from torch import Tensor, nn
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer

from torch_lawa.integrations.transformers import LatestWeightAveragingMixin


class Seq2Seq(LatestWeightAveragingMixin, Seq2SeqTrainer):  # type: ignore[misc]
    pass


def test_the_mixin_before_another_trainer(tmp_path: Path) -> None:
    recorder, model = Recorder(), tiny_model()
    args = arguments(tmp_path)
    given = Seq2SeqTrainingArguments(**{
        name: getattr(args, name)
        for name in ("output_dir", "use_cpu", "report_to", "disable_tqdm", "max_steps",
                     "save_steps", "eval_strategy", "eval_steps", "learning_rate",
                     "per_device_train_batch_size", "per_device_eval_batch_size",
                     "dataloader_pin_memory")
    })  # fmt: skip
    ran = Seq2Seq(
        model=model,
        args=given,
        train_dataset=TRAIN,
        eval_dataset=VALID,
        callbacks=[averaging(k=3), recorder],
    )
    ran.train()
    found = ran.evaluate(max_length=8)["eval_averaged_loss"]
    assert found == pytest.approx(loss_of(model, recorder.mean(8, 10, 12), VALID))


class Accumulating(Trainer):  # type: ignore[misc]
    """Puts what it saw during an evaluation into the log and forgets it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[float] = []

    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        if not model.training:
            self.seen.append(float(next(model.parameters()).double().sum()))
        return super().compute_loss(model, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if self.seen:
            logs["eval_seen"] = sum(self.seen) / len(self.seen)
            self.seen.clear()
        super().log(logs, *args, **kwargs)


class AccumulatingAverages(LatestWeightAveragingMixin, Accumulating):  # type: ignore[misc]
    pass


def test_a_trainer_that_gathers_metrics_of_its_own(tmp_path: Path) -> None:
    recorder = Recorder()
    ran = trainer(tmp_path, averaging(k=3), recorder, kind=AccumulatingAverages)
    ran.train()
    name = next(iter(recorder.weights[12]))
    rows = [row for row in ran.state.log_history if "eval_seen" in row and row["step"] == 12]
    averaged, raw = rows
    assert raw["eval_seen"] == pytest.approx(float(recorder.weights[12][name].double().sum()))
    expected = float(recorder.mean(8, 10, 12)[name].double().sum())
    assert averaged["eval_seen"] == pytest.approx(expected)
    assert ran.evaluate()["eval_seen"] == pytest.approx(raw["eval_seen"])


class LikeTRL(Trainer):  # type: ignore[misc]
    """Keeps metrics by their mode, and `log` puts `eval_` before them; as TRL's trainers do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._metrics: dict[str, dict[str, list[float]]] = {"train": {}, "eval": {}}

    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        found = self._metrics["train" if model.training else "eval"]
        weight = next(model.parameters()).detach()
        found.setdefault("seen", []).append(float(weight.double().sum()))
        return super().compute_loss(model, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        mode = "train" if self.model.training else "eval"
        prefix = "eval_" if mode == "eval" else ""
        for name, values in self._metrics[mode].items():
            logs[prefix + name] = sum(values) / len(values)
        super().log(logs, *args, **kwargs)
        self._metrics[mode].clear()


class AveragingLikeTRL(LatestWeightAveragingMixin, LikeTRL):  # type: ignore[misc]
    pass


def test_metrics_of_trl_are_named_after_the_average(tmp_path: Path) -> None:
    recorder = Recorder()
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_averaged_seen"}
    ran = trainer(tmp_path, averaging(k=3), recorder, kind=AveragingLikeTRL, **best)
    ran.train()
    name = next(iter(recorder.weights[12]))
    expected = float(recorder.mean(8, 10, 12)[name].double().sum())
    assert history(ran, "eval_averaged_seen")[12] == pytest.approx(expected)
    raw = float(recorder.weights[12][name].double().sum())
    assert history(ran, "eval_seen")[12] == pytest.approx(raw)
    rows = [row for row in ran.state.log_history if row["step"] == 12]
    assert sum("eval_seen" in row for row in rows) == 1
    assert ran.state.best_metric == pytest.approx(max(history(ran, "eval_averaged_seen").values()))


class Answering(Trainer):  # type: ignore[misc]
    """With an argument before the prefix, as the trainers for questions and answers have."""

    def evaluate(
        self,
        eval_dataset: Any = None,
        eval_examples: Any = None,
        ignore_keys: Any = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        assert eval_examples in (None, "examples")
        assert ignore_keys is None
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)  # type: ignore[no-any-return]

    def predict(
        self, predict_dataset: Any, predict_examples: Any, metric_key_prefix: str = "test"
    ) -> Any:
        assert predict_examples == "examples"
        return super().predict(predict_dataset, None, metric_key_prefix)


class AnsweringAverages(LatestWeightAveragingMixin, Answering):  # type: ignore[misc]
    pass


def test_a_trainer_with_arguments_of_its_own(tmp_path: Path) -> None:
    recorder, model = Recorder(), tiny_model()
    ran = trainer(tmp_path, averaging(k=3), recorder, model=model, kind=AnsweringAverages)
    ran.train()
    average, own = recorder.mean(8, 10, 12), recorder.weights[12]
    assert list(history(ran, "eval_averaged_loss")) == [6, 8, 10, 12]
    expected = loss_of(model, average, OTHER)
    for metrics in (
        ran.evaluate(OTHER, "examples", metric_key_prefix="test"),
        ran.evaluate(OTHER, "examples", None, "test"),
    ):
        assert metrics["test_averaged_loss"] == pytest.approx(expected, abs=1e-6)
        assert metrics["test_loss"] == pytest.approx(loss_of(model, own, OTHER), abs=1e-6)
    found = ran.predict(OTHER, "examples").metrics["test_loss"]
    assert found == pytest.approx(expected, abs=1e-6)


class Predicting(Trainer):  # type: ignore[misc]
    """Evaluates by predicting, and takes whatever it is given."""

    def evaluate(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        metrics = super().evaluate(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        found = self.predict(OTHER, metric_key_prefix=f"{metric_key_prefix}_other")
        return {**metrics, **found.metrics}


class PredictingAverages(LatestWeightAveragingMixin, Predicting):  # type: ignore[misc]
    pass


@pytest.mark.parametrize("mode", ["both", "averaged"])
def test_a_prediction_within_an_evaluation_is_of_the_same_weights(
    mode: Any, tmp_path: Path
) -> None:
    recorder, model = Recorder(), tiny_model()
    callback = averaging(k=3, metrics=mode)
    ran = trainer(tmp_path, callback, recorder, model=model, kind=PredictingAverages)
    ran.train()
    average = loss_of(model, recorder.mean(8, 10, 12), OTHER)
    own = loss_of(model, recorder.weights[12], OTHER)
    metrics = ran.evaluate()
    if mode == "both":
        assert metrics["eval_averaged_other_loss"] == pytest.approx(average, abs=1e-6)
        assert metrics["eval_other_loss"] == pytest.approx(own, abs=1e-6)
    else:
        assert metrics["eval_other_loss"] == pytest.approx(average, abs=1e-6)


class Shifting(torch.optim.SGD):
    """Holds other weights for evaluation than for training, as schedule-free optimizers do."""

    training = True

    def eval(self) -> None:
        self._shift(0.5 if self.training else 0.0)
        self.training = False

    def train(self) -> None:
        self._shift(0.0 if self.training else -0.5)
        self.training = True

    @torch.no_grad()
    def _shift(self, by: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(by)


def train_shifting(place: Path, *callbacks: Any, predicts: bool = False) -> dict[str, Tensor]:
    model = tiny_model()
    optimizer = Shifting(model.parameters(), lr=0.1)
    ran = trainer(place, *callbacks, model=model)
    ran.optimizer = optimizer
    ran.train()
    if predicts:
        optimizer.train()
        ran.predict(VALID)
    optimizer.train()
    return weights_of(model)


def test_an_optimizer_that_changes_the_weights_for_evaluation(tmp_path: Path) -> None:
    plain = train_shifting(tmp_path / "a")
    averaged = averaging(k=2, metrics="averaged")
    assert same(train_shifting(tmp_path / "b", averaged), plain)
    again = train_shifting(tmp_path / "c", averaging(k=2), predicts=True)
    for name, tensor in plain.items():  # there and back once more, which rounds
        assert torch.allclose(again[name], tensor, atol=1e-6), name


class Normalised(nn.Module):
    """Takes nothing that it does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 2)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.second(self.norm(self.first(inputs)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Weighted(LatestWeightAveragingMixin, Trainer):  # type: ignore[misc]
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        weight = inputs.pop("weight").mean()
        return weight * super().compute_loss(model, inputs)


def test_batch_norm_where_batches_hold_more_than_the_model_takes(tmp_path: Path) -> None:
    rows = [
        {
            "inputs": torch.randn(6, generator=torch.Generator().manual_seed(i)),
            "labels": torch.tensor(i % 2),
            "weight": torch.tensor(2.0),
        }
        for i in range(32)
    ]
    callback, recorder = averaging(k=2, batch_norm_batches=1), Recorder()
    ran = trainer(
        tmp_path,
        callback,
        recorder,
        model=Normalised(),
        kind=Weighted,
        train_dataset=rows,
        eval_dataset=None,
        eval_strategy="no",
        remove_unused_columns=False,
        per_device_train_batch_size=32,
    )
    ran.train()
    average = recorder.mean(10, 12)
    inputs = torch.stack([row["inputs"] for row in rows])
    expected = inputs @ average["first.weight"].T + average["first.bias"]
    with ran._average(callback):
        assert torch.allclose(ran.model.norm.running_mean, expected.mean(0), atol=1e-5)
