"""What a run evaluates: raw weights, windows and other methods, and the window chosen from them."""

import math
from collections.abc import Mapping, Sequence

from torch import nn

from lawa_lab.methods.ring import RingAverage
from lawa_lab.recipes.config import TrainConfig
from lawa_lab.recipes.quantization import quantized, rounded_name
from lawa_lab.recipes.task import Task
from torch_lawa.averager import LatestWeightAverager
from torch_lawa.averager_protocol import Averager
from torch_lawa.batch_norm import layers_with_statistics
from torch_lawa.coefficients import Coefficients, name_coefficients, parse_coefficients
from torch_lawa.evaluation import evaluate_side_by_side
from torch_lawa.metrics import Row
from torch_lawa.window_choice import WindowSearch

__all__ = ["Evaluation", "averages_of", "main_average"]


class Evaluation:
    """Evaluates the weights of one run at one moment, and returns a row for each of them.

    Args:
        config: Says which averages there are.
        task: Evaluates a model.
        model: The model that is trained.
        forward: What computes with the model's weights: the model itself, or compiled.
        averager: The window.
        methods: Other averaging methods, by their names in the configuration.
    """

    def __init__(
        self,
        config: TrainConfig,
        task: Task,
        model: nn.Module,
        forward: nn.Module,
        averager: LatestWeightAverager,
        methods: Mapping[str, Averager],
    ) -> None:
        self._config, self._task, self._model, self._forward = config, task, model, forward
        self._averager, self._methods = averager, methods
        self.search = WindowSearch(config.ks) if config.choose_window else None

    def rows(
        self,
        labels: Row,
        *,
        every_average: bool,
        at_end: bool,
        method_seconds: Mapping[str, float],
    ) -> list[Row]:
        """The rows, each with the `labels`.

        Args:
            labels: What every row says of the run and the moment.
            every_average: Evaluate every average, not only the first.
            at_end: The run ends here, so weights of few bits are also evaluated.
            method_seconds: The time that each method has taken for its own updates.
        """
        first = None if every_average else 1
        rows = evaluate_side_by_side(
            self._model,
            [self._averager, *self._methods.values()],
            lambda _: self._measure(quantize=at_end),
            labels=labels,
            ks=averages_of(self._config)[:first],
            batch_norm=self._config.batch_norm[:first],  # type: ignore[arg-type]
            loader=self._task.calibration(),
        )
        if self.search is not None and every_average:
            rows.append(self._chosen(rows, self.search))
        for row in rows:
            if row["weights"] in self._methods:
                self._describe_method(row, method_seconds)
        return rows

    def _measure(self, *, quantize: bool) -> dict[str, float]:
        values = dict(self._task.evaluate(self._forward))
        for bits in self._config.quantize if quantize else ():
            with quantized(self._model, bits):
                rounded = self._task.evaluate(self._forward)
            for name, value in rounded.items():
                values[rounded_name(name, bits)] = value
        return values

    def _chosen(self, rows: list[Row], search: WindowSearch) -> Row:
        """The row with the best `valid_loss`, charged with measuring all of them.

        The candidates are the raw weights, with the better of their BatchNorm statistics, and the
        windows, with the first kind of statistics.
        """
        rule = name_coefficients(averages_of(self._config)[0][1])
        # The average is served with these statistics, so it is chosen with them.
        policy = self._config.batch_norm[0] if layers_with_statistics(self._model) else None
        windows = {
            row["k"]: row
            for row in rows
            if row["weights"] == self._averager.kind
            and (row["coefficients"], row["batch_norm"]) == (rule, policy)
        }
        raw = [row for row in rows if row["weights"] == "raw"]
        measured = {0: min(raw, key=_valid_loss), **windows}
        k = search.decide({k: row["valid_loss"] for k, row in measured.items()})
        names = ("average_seconds", "batch_norm_seconds", "evaluate_seconds")
        paid = [*raw[1:], *windows.values()]  # the first evaluation is charged to every series
        facts = {
            "weights": "chosen",
            "k": None,
            "coefficients": None,
            "batch_norm": policy,  # also of raw weights: reports show one series
            "chosen_k": k,
            "average_seconds": sum(row.get(name, 0.0) for row in paid for name in names),
            "batch_norm_seconds": 0.0,
        }
        return {**measured[k], **facts}

    def _describe_method(self, row: Row, seconds: Mapping[str, float]) -> None:
        """Name the method and charge it its own updates instead of the window's."""
        reads = isinstance(self._methods[row["weights"]], RingAverage)
        shared = row["collect_seconds"] if reads else 0.0
        row["collect_seconds"] = seconds.get(row["weights"], 0.0) + shared
        row["weights"], _, row["coefficients"] = row["weights"].partition(":")


def averages_of(config: TrainConfig) -> list[tuple[int, Coefficients]]:
    """Every k with the first coefficients, then the first k with the other coefficients."""
    rules = [parse_coefficients(text) for text in config.coefficients]
    return [(k, rules[0]) for k in config.ks] + [(config.ks[0], rule) for rule in rules[1:]]


def main_average(rows: Sequence[Row], config: TrainConfig) -> Row | None:
    """The row of the first k, coefficients and BatchNorm treatment; None if it has none yet."""
    k, rule = averages_of(config)[0]
    return next(
        (
            row
            for row in rows
            if row["weights"] == LatestWeightAverager.kind
            and (row["k"], row["coefficients"]) == (k, name_coefficients(rule))
            and row["batch_norm"] in (config.batch_norm[0], None)
        ),
        None,
    )


def _valid_loss(row: Row) -> float:
    loss = float(row["valid_loss"])
    return loss if math.isfinite(loss) else math.inf
