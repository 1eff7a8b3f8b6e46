"""Which `TrainingArguments` fit the callback's options."""

from typing import Any, Literal, TypeAlias

from transformers import TrainingArguments

from torch_lawa.errors import ConfigError

__all__ = [
    "REGULAR_SAVES",
    "CollectStrategy",
    "Metrics",
    "check_arguments",
    "selects_average",
    "text_of",
]

CollectStrategy: TypeAlias = Literal["save", "steps", "epoch"]
Metrics: TypeAlias = Literal["both", "averaged"]

REGULAR_SAVES = ("steps", "epoch")  # values of `save_strategy`


def check_arguments(
    args: TrainingArguments,
    strategy: CollectStrategy,
    metrics: Metrics,
    *,
    searches: bool,
    asked_for_saves: bool,
) -> str | None:
    """Raise if a run cannot do what its options ask for; returns what to warn of.

    `searches` says that windows are to be compared, `asked_for_saves` that the user chose to
    collect at each save.
    """
    problem, saves, metric = None, text_of(args.save_strategy), str(args.metric_for_best_model)
    if strategy == "save" and saves not in REGULAR_SAVES:
        why = "nothing is saved" if saves == "no" else "saves depend on a metric"
        problem = (
            f"collect_strategy='save' with save_strategy={saves!r}: {why}. Set "
            "collect_strategy='steps' (and collect_every) or 'epoch'."
        )
        if asked_for_saves or selects_average(metric):
            raise ConfigError(problem)
    if searches and text_of(args.eval_strategy) == "no":
        raise ConfigError(
            "choose_window with eval_strategy='no': windows are compared when the Trainer "
            "evaluates during training. Set eval_strategy='steps' or 'epoch', or leave "
            "choose_window out."
        )
    if metrics == "averaged" and selects_average(metric):
        raise ConfigError(
            f"metric_for_best_model={metric!r} with metrics='averaged', which reports the "
            "average under the Trainer's own names: set "
            f"metric_for_best_model={metric.replace('averaged_', '', 1)!r}, or metrics='both'."
        )
    follows = text_of(args.lr_scheduler_type)
    if follows in ("reduce_lr_on_plateau", "greedy") and selects_average(metric) and not searches:
        raise ConfigError(
            f"lr_scheduler_type={follows!r} needs metric_for_best_model={metric!r} at every "
            "evaluation, and there is none before the first average: set "
            "LatestWeightAveragingCallback(metrics='averaged') and "
            "metric_for_best_model='eval_loss'."
        )
    return problem


def selects_average(metric: str) -> bool:
    """Whether this names a metric of the average, as `metrics="both"` reports it."""
    return metric.removeprefix("eval_").startswith("averaged_")


def text_of(option: Any) -> str:
    """The text of an argument that may be an enum."""
    return str(getattr(option, "value", option))
