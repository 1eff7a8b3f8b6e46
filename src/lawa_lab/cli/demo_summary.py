"""What the demo found: a table and a sentence for a person, an object for a program."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from lawa_lab.cli.demo_progress import AVERAGED_STYLE, RAW_STYLE
from lawa_lab.report.savings import Axis, Baseline, Comparison, Metric, Saving, compare
from torch_lawa.metrics import Row

__all__ = ["Summary"]

_LOSS, _ACCURACY = Metric("test_loss", "lower"), Metric("test_accuracy", "higher")


@dataclass(frozen=True)
class Summary:
    """The savings of one run folder."""

    rows: list[Row]
    output: Path
    files: list[str]
    k: int
    seconds: float
    note: str | None = None

    def show(self) -> None:
        """Print the table, the sentence, where averaging did not help, and the files."""
        console = Console(highlight=False)
        console.print(self._table())
        console.print(self.sentence(), style="bold")
        for text in (self.attribution(), self.caveat(), self.costs()):
            console.print(f"\n{text}")
        console.print()
        console.print(f"Run folder: {self.output}", soft_wrap=True)
        console.print(f"  {', '.join(self.files)}")
        if self.note:
            console.print(f"No figure: {self.note}", soft_wrap=True, markup=False)

    def sentence(self) -> str:
        """What averaging saved, in one sentence."""
        loss, accuracy = self._comparisons()
        return (
            f"Over {len(loss.averaged)} seeds, the average of the {self.k} latest epochs "
            f"{_sentence(loss)}; it {_sentence(accuracy)}."
        )

    def attribution(self) -> str:
        """What of the gain over raw weights as they are usually evaluated is BatchNorm's."""
        usual = [_saved(comparison) for comparison in self._comparisons(baseline="usual")]
        control = [_saved(_control(self.rows, metric)) for metric in (_LOSS, _ACCURACY)]
        return (
            "Both with BatchNorm statistics re-estimated. Against raw weights evaluated the usual "
            f"way the average saves {usual[0]} (loss) and {usual[1]} (accuracy); re-estimating "
            f"alone, without averaging, {control[0]} and {control[1]}."
        )

    def caveat(self) -> str:
        """Where averaging did not help, or cannot."""
        loss, accuracy = self._comparisons()
        copied = compare(self.rows, _LOSS, batch_norm="copied", baseline="usual")
        return (
            "Where it does not help: at the end, where the learning rate calms the raw weights too "
            f"(the average came to their final loss earlier in {_gains(loss.at_final)}, to their "
            f"final accuracy in {_gains(accuracy.at_final)}). Epoch for epoch it was behind in "
            f"loss in {_behind(loss)}; with BatchNorm statistics copied, in {_behind(copied)}."
        )

    def costs(self) -> str:
        """The saving in seconds, with all that averaging cost charged to it."""
        whole = f"The whole demo took {self.seconds:.0f} s."
        saving = self._headline_seconds(self._comparisons()[0], self._comparisons("seconds")[0])
        if saving is None:
            return whole
        averaged, raw = f"{saving.averaged_at:.1f} s", f"{saving.baseline_at:.1f} s"
        gained = (saving.saved or 0.0) > 0.0
        verdict = f"{averaged} instead of {raw}" if gained else f"{averaged}, not less than {raw}"
        return f"With every cost of averaging charged to it: {verdict} to that loss. {whole}"

    def as_dict(self) -> dict[str, Any]:
        """The same for programs."""
        usual = self._comparisons(baseline="usual")
        triples = list(zip(self._comparisons(), self._comparisons("seconds"), usual, strict=True))
        return {
            "output": str(self.output),
            "files": self.files,
            "note": self.note,
            "seconds": self.seconds,
            "k": self.k,
            "seeds": list(triples[0][0].averaged),
            "savings": {
                epochs.metric.name: {
                    "headline": _facts(epochs.headline),
                    "headline_seconds": _facts(self._headline_seconds(epochs, seconds)),
                    "headline_against_usual": _facts(usual.headline),
                    "headline_of_batch_norm_alone": _facts(
                        _control(self.rows, epochs.metric).headline
                    ),
                    "at_final": _facts(epochs.at_final),
                    "at_best": _facts(epochs.at_best),
                    "never_matched": {str(s): at for s, at in epochs.never_matched.items()},
                    "behind": {str(s): at for s, at in epochs.behind.items()},
                }
                for epochs, seconds, usual in triples
            },
            "sentence": self.sentence(),
            "attribution": self.attribution(),
            "caveat": self.caveat(),
        }

    def _comparisons(
        self, axis: Axis = "epoch", baseline: Baseline = "alike"
    ) -> tuple[Comparison, Comparison]:
        return (
            compare(self.rows, _LOSS, axis=axis, baseline=baseline),
            compare(self.rows, _ACCURACY, axis=axis, baseline=baseline),
        )

    @staticmethod
    def _headline_seconds(epochs: Comparison, seconds: Comparison) -> Saving | None:
        """The seconds to the target of the headline in epochs."""
        if epochs.headline is None or epochs.headline.target is None:
            return None
        return seconds.saving_at(epochs.headline.target)

    def _table(self) -> Table:
        table = Table(
            box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, header_style="bold"
        )
        table.add_column("epochs to reach")
        table.add_column("raw", justify="right", style=RAW_STYLE)
        table.add_column("averaged", justify="right", style=AVERAGED_STYLE)
        table.add_column("saved", justify="right")
        table.add_column("by seed", justify="right")
        for comparison in self._comparisons():
            for label, saving in (
                ("test", comparison.headline),
                ("raw final", comparison.at_final),
                ("raw best", comparison.at_best),
            ):
                if saving is not None:
                    table.add_row(f"{label} {_target(comparison, saving)}", *_cells(saving))
        return table


def _control(rows: list[Row], metric: Metric) -> Comparison:
    """Raw weights with BatchNorm re-estimated, in the place of an average, against usual ones."""
    usual, treated = (
        [row for row in rows if row["weights"] == "raw" and row["batch_norm"] == policy]
        for policy in (None, "re-estimated")
    )
    return compare([*usual, *({**row, "weights": "averaged"} for row in treated)], metric)


def _saved(comparison: Comparison) -> str:
    saving = comparison.headline
    if saving is None:
        return "nothing"
    return f"{_epochs(saving.saved)} epochs"


def _sentence(comparison: Comparison) -> str:
    name = "loss" if comparison.metric is _LOSS else "accuracy"
    saving = comparison.headline
    if saving is None:
        unmatched = len(comparison.never_matched)
        if unmatched == len(comparison.averaged):
            return f"reached a test {name} that the raw weights never matched in any seed"
        return f"was not ahead of the raw weights in test {name}, so it saved nothing"
    low, high = saving.spread or (0.0, 0.0)
    return (
        f"reached test {_target(comparison, saving)} at epoch {_epochs(saving.averaged_at)}, the "
        f"raw weights at epoch {_epochs(saving.baseline_at)}: {_epochs(saving.saved)} epochs or "
        f"{saving.percent:.0f}% saved ({low:.0f} to {high:.0f} by seed)"
    )


def _epochs(number: float | None) -> str:
    """A mean over seeds: whole where that tells enough."""
    assert number is not None
    return f"{number:.0f}" if number == round(number) or number >= 5 else f"{number:.1f}"


def _target(comparison: Comparison, saving: Saving) -> str:
    target = saving.target or 0.0
    if comparison.metric is _LOSS:
        return f"loss {target:.4f}"
    return f"accuracy {100 * target:.2f}%"


def _cells(saving: Saving) -> list[str]:
    """Means where every seed got there; each seed's own saving in any case."""
    by_seed = ", ".join("never" if r.saved is None else f"{r.saved:.0f}" for r in saving.reaches)
    if len(saving.both) < len(saving.reaches):
        return ["-", "-", "-", by_seed]
    saved = f"{saving.saved:.1f} ({saving.percent:.0f}%)"
    return [f"{saving.baseline_at:.1f}", f"{saving.averaged_at:.1f}", saved, by_seed]


def _gains(saving: Saving) -> str:
    gains = sum(reach.saved is not None and reach.saved > 0 for reach in saving.reaches)
    return f"{gains} of {len(saving.reaches)} seeds"


def _behind(comparison: Comparison) -> str:
    num_behind = sum(len(places) for places in comparison.behind.values())
    return f"{num_behind} of {sum(len(c.at) for c in comparison.averaged.values())} epochs"


def _facts(saving: Saving | None) -> dict[str, Any] | None:
    if saving is None:
        return None
    return {
        "target": saving.target,
        "raw_at": saving.baseline_at,
        "averaged_at": saving.averaged_at,
        "saved": saving.saved,
        "spread": saving.spread,
        "percent": saving.percent,
        "by_seed": [
            {
                "seed": reach.seed,
                "target": reach.target,
                "raw_at": reach.baseline_at,
                "averaged_at": reach.averaged_at,
            }
            for reach in saving.reaches
        ],
    }
