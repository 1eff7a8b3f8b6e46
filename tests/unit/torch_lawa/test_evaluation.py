"""Raw and averaged side by side: right values, honest seconds, a model left as it was."""

import contextlib
import copy
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torch_lawa import Explicit, LatestWeightAverager, recalibrate_batch_norm
from torch_lawa.averager_protocol import Averager
from torch_lawa.errors import ConfigError
from torch_lawa.evaluation import evaluate_side_by_side
from torch_lawa.metrics import MetricsWriter, read_metrics


def filled(model: nn.Linear, value: float) -> nn.Linear:
    with torch.no_grad():
        model.weight.fill_(value)
    return model


def weight(model: nn.Module) -> dict[str, float]:
    parameter = next(model.parameters())
    return {"weight": parameter.flatten()[0].item()}


@pytest.fixture
def model() -> nn.Linear:
    return nn.Linear(1, 1)


def collected(model: nn.Linear, values: list[float], **options: Any) -> LatestWeightAverager:
    averager = LatestWeightAverager(**options)
    for value in values:
        averager.collect(filled(model, value))
    return averager


def series(rows: list[dict[str, Any]]) -> list[tuple[str, int | None, float]]:
    return [(row["weights"], row["k"], row["weight"]) for row in rows]


def test_each_k_has_its_row_and_the_raw_weights_stay(model: nn.Linear) -> None:
    averager = collected(model, [1.0, 2.0, 6.0], k=3)
    rows = evaluate_side_by_side(model, averager, weight, ks=[1, 2, 3])
    assert series(rows) == [
        ("raw", None, 6.0),
        ("averaged", 1, 6.0),
        ("averaged", 2, 4.0),
        ("averaged", 3, 3.0),
    ]
    assert model.weight.item() == 6.0


def test_a_window_may_be_weighed_otherwise(model: nn.Linear) -> None:
    averager = collected(model, [1.0, 2.0, 6.0], k=3)
    rows = evaluate_side_by_side(model, averager, weight, ks=[3, (2, Explicit([1, 3]))])
    assert [(row["coefficients"], row["weight"]) for row in rows] == [
        (None, 6.0),
        ("uniform", 3.0),
        ("explicit:1,3", 5.0),
    ]
    assert averager.average(2, coefficients=Explicit([1, 3]))["weight"].item() == 5.0


class Ema:
    """An `Averager` that shares no code with the window."""

    def __init__(self, decay: float, kind: str = "ema") -> None:
        self.decay, self.kind = decay, kind
        self.mean: dict[str, torch.Tensor] = {}

    @property
    def ready(self) -> bool:
        return bool(self.mean)

    def collect(self, model: nn.Module, *, step: int | None = None) -> None:
        for name, value in model.state_dict().items():
            old = self.mean.get(name, value)
            self.mean[name] = self.decay * old + (1 - self.decay) * value

    def step(self, model: nn.Module, *, loss: float | None = None) -> bool:
        self.collect(model)
        return True

    @contextlib.contextmanager
    def swapped_into(self, model: nn.Module) -> Iterator[None]:
        raw = copy.deepcopy(model.state_dict())
        model.load_state_dict(self.mean)
        yield
        model.load_state_dict(raw)

    def average(self) -> dict[str, torch.Tensor]:
        return dict(self.mean)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.mean = dict(state["mean"])


def test_an_ema_stands_next_to_the_window(model: nn.Linear) -> None:
    averagers: list[Averager] = [LatestWeightAverager(k=2), Ema(decay=0.75)]
    assert series(evaluate_side_by_side(filled(model, 0.0), averagers, weight)) == [
        ("raw", None, 0.0)
    ]
    for value in (1.0, 2.0, 6.0):
        for averager in averagers:
            averager.step(filled(model, value))
    rows = evaluate_side_by_side(model, averagers, weight, ks=[1, 2])
    assert series(rows) == [
        ("raw", None, 6.0),
        ("averaged", 1, 6.0),
        ("averaged", 2, 4.0),
        ("ema", None, 2.4375),
    ]
    assert [row["coefficients"] for row in rows] == [None, "uniform", "uniform", None]
    assert rows[-1]["average_seconds"] > 0
    assert model.weight.item() == 6.0
    assert series(evaluate_side_by_side(model, averagers[1], weight)) == series([rows[0], rows[-1]])


def test_averagers_that_cannot_be_told_apart_are_refused(model: nn.Linear) -> None:
    with pytest.raises(ConfigError, match="kind='ema'"):
        evaluate_side_by_side(model, [Ema(0.9), Ema(0.99)], weight)
    with pytest.raises(ConfigError, match="kind='raw'"):
        evaluate_side_by_side(model, Ema(0.9, kind="raw"), weight)
    with pytest.raises(ConfigError, match=r"ks=\[2\]"):
        evaluate_side_by_side(model, Ema(0.9), weight, ks=[2])


def test_a_window_that_is_not_full_has_no_row_yet(model: nn.Linear) -> None:
    averager = collected(model, [1.0, 3.0], k=3)
    assert series(evaluate_side_by_side(model, averager, weight)) == [("raw", None, 3.0)]
    assert series(evaluate_side_by_side(model, averager, weight, ks=[2, 3])) == [
        ("raw", None, 3.0),
        ("averaged", 2, 2.0),
    ]


def test_an_averager_that_takes_what_is_there_has_its_row_at_once(model: nn.Linear) -> None:
    averager = LatestWeightAverager(k=3, min_snapshots=1)
    assert series(evaluate_side_by_side(filled(model, 5.0), averager, weight)) == [
        ("raw", None, 5.0)
    ]
    averager = collected(model, [1.0, 3.0], k=3, min_snapshots=1)
    assert series(evaluate_side_by_side(model, averager, weight))[1] == ("averaged", 3, 2.0)


def test_rows_are_labelled_and_written(model: nn.Linear, tmp_path: Path) -> None:
    averager = collected(model, [1.0, 3.0], k=2)
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as metrics:
        rows = evaluate_side_by_side(
            model, averager, weight, metrics=metrics, labels={"seed": 7, "epoch": 2}
        )
    assert read_metrics(path) == rows
    assert [(row["seed"], row["epoch"]) for row in rows] == [(7, 2), (7, 2)]


def test_evaluation_has_no_gradients_and_modes_return(model: nn.Linear) -> None:
    net = nn.Sequential(model, nn.Dropout(), nn.Dropout())
    net[2].eval()
    seen = []

    def watch(net: nn.Module) -> dict[str, float]:
        seen.append((net.training, torch.is_grad_enabled()))
        return weight(net)

    averager = LatestWeightAverager(k=1)
    averager.collect(net)
    evaluate_side_by_side(net, averager, watch)
    assert seen == [(False, False), (False, False)]
    assert [module.training for module in net.modules()] == [True, True, True, False]


def test_an_error_inside_leaves_the_model_as_it_was(model: nn.Linear) -> None:
    averager = collected(model, [1.0, 3.0], k=2)
    calls = []

    def fail(model: nn.Module) -> dict[str, float]:
        calls.append(weight(model)["weight"])
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return {}

    with pytest.raises(RuntimeError, match="out of memory"):
        evaluate_side_by_side(model, averager, fail)
    assert calls == [3.0, 2.0]
    assert model.weight.item() == 3.0
    assert model.training


def mean_seen(net: nn.Module) -> dict[str, float]:
    buffers = dict(net.named_buffers())
    return {"running_mean": buffers["1.running_mean"].item()}


def test_batch_norm_is_re_estimated_or_copied_and_the_own_returns(model: nn.Linear) -> None:
    net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1))
    averager = LatestWeightAverager(k=2)
    for value in (1.0, 3.0):
        with torch.no_grad():
            net[0].weight.fill_(value)
            net[1].running_mean.fill_(10.0 * value)
        averager.collect(net)
    loader = [torch.full((4, 1), 1.0), torch.full((4, 1), 100.0)]
    rows = evaluate_side_by_side(
        net,
        averager,
        mean_seen,
        batch_norm=["re-estimated", "copied"],
        loader=loader,
        batch_norm_batches=1,
    )
    # The averaged weight is 2, so the one batch of ones has mean 2 behind the first layer.
    # Of the raw weight, 3, it is 3: the control that had the same treatment.
    assert [(row["weights"], row["batch_norm"], row["running_mean"]) for row in rows] == [
        ("raw", None, 30.0),
        ("raw", "re-estimated", 3.0),
        ("averaged", "re-estimated", 2.0),
        ("averaged", "copied", 30.0),
    ]
    assert net[1].running_mean.item() == 30.0


def test_batch_norm_is_re_estimated_by_default_where_a_loader_is_given() -> None:
    net = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    averager = LatestWeightAverager(k=1)
    averager.collect(net)
    loader = [torch.randn(4, 1)]

    def policies(**options: Any) -> list[tuple[str, str | None]]:
        rows = evaluate_side_by_side(net, averager, mean_seen, **options)
        return [(row["weights"], row["batch_norm"]) for row in rows]

    usual, control, averaged = ("raw", None), ("raw", "re-estimated"), ("averaged", "re-estimated")
    assert policies(loader=loader) == [usual, control, averaged]
    assert policies(loader=loader, control=False) == [usual, averaged]
    assert policies() == [usual, ("averaged", "copied")]
    assert policies(loader=loader, batch_norm=["copied"]) == [usual, ("averaged", "copied")]


def test_a_model_without_batch_norm_has_one_row_for_each_k(model: nn.Linear) -> None:
    averager = collected(model, [1.0, 3.0], k=2)
    rows = evaluate_side_by_side(
        model, averager, weight, batch_norm=["re-estimated", "copied"], loader=[torch.ones(1, 1)]
    )
    assert [row["batch_norm"] for row in rows] == [None, None]


def test_seconds_stand_in_the_row_that_cost_them() -> None:
    net = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    averager = LatestWeightAverager(k=1)
    averager.collect(net)

    pauses = iter([0.4, 0.05, 0.05])

    def slow(net: nn.Module) -> dict[str, float]:
        time.sleep(next(pauses))
        return {}

    class Batches:
        def __iter__(self) -> Iterator[Any]:
            time.sleep(0.1)
            return iter([torch.randn(4, 1)])

    raw, control, averaged = evaluate_side_by_side(net, averager, slow, loader=Batches())
    assert set(raw) == {"weights", "k", "coefficients", "batch_norm", "evaluate_seconds"}
    assert raw["evaluate_seconds"] >= 0.4
    for row in (control, averaged):
        assert 0.05 <= row["evaluate_seconds"] < 0.4  # its own one, not the sum of all
    assert "average_seconds" not in control
    assert control["batch_norm_seconds"] >= 0.1
    assert averaged["batch_norm_seconds"] >= 0.1
    assert averaged["average_seconds"] > 0.0


def test_mistakes_are_named(model: nn.Linear) -> None:
    averager = collected(model, [1.0, 3.0], k=2)
    with pytest.raises(ConfigError, match=r"ks=\[3\].*holds 2"):
        evaluate_side_by_side(model, averager, weight, ks=[3])
    with pytest.raises(ConfigError, match="batch_norm='average'"):
        evaluate_side_by_side(model, averager, weight, batch_norm=["average"])  # type: ignore[list-item]
    net = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    with pytest.raises(ConfigError, match="loader="):
        evaluate_side_by_side(net, averager, weight, batch_norm=["re-estimated"])


def test_inside_autocast_every_row_has_its_own_weights_and_statistics() -> None:
    """Against each average swapped in and evaluated by itself, in an autocast block of its own."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    averager = LatestWeightAverager(k=3)
    for _ in range(3):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.normal_()
        averager.collect(net)
    loader = [torch.randn(16, 3) for _ in range(2)]
    x = torch.randn(5, 3)

    def evaluate(net: nn.Module) -> dict[str, float]:
        return {"loss": net(x).double().square().sum().item()}

    def alone(k: int) -> float:
        with averager.swapped_into(net, k), torch.autocast("cpu", torch.bfloat16):
            recalibrate_batch_norm(net, loader)
            with torch.no_grad():
                return evaluate(net.eval())["loss"]

    expected = {k: alone(k) for k in (1, 2, 3)}
    net.train()
    with torch.autocast("cpu", torch.bfloat16):
        rows = evaluate_side_by_side(net, averager, evaluate, ks=[2, 3, 1], loader=loader)
    assert {row["k"]: row["loss"] for row in rows[2:]} == expected
    assert rows[1]["loss"] == expected[1]  # the raw weights are those of k = 1
    assert len({*expected.values(), rows[0]["loss"]}) == 4


def test_a_loader_without_a_length_will_do(model: nn.Linear) -> None:
    class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            yield from (torch.full((2, 1), float(i)) + torch.arange(2.0)[:, None] for i in range(3))

    net = nn.Sequential(model, nn.BatchNorm1d(1))
    averager = LatestWeightAverager(k=1)
    averager.collect(net)
    loader = torch.utils.data.DataLoader(Stream(), batch_size=None)
    rows = evaluate_side_by_side(net, averager, weight, loader=loader)
    assert [row["batch_norm"] for row in rows] == [None, "re-estimated", "re-estimated"]


def test_an_evaluation_that_names_nothing_says_what_is_wanted(model: nn.Linear) -> None:
    averager = collected(model, [1.0], k=1)
    with pytest.raises(ConfigError, match="float"):
        evaluate_side_by_side(model, averager, lambda model: 0.5)  # type: ignore[arg-type, return-value]
