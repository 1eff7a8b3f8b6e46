"""What a report says about the frontier, in sentences."""

from collections.abc import Iterator, Sequence

from lawa_lab.report.curves import Axis, Metric
from lawa_lab.report.forecast import Forecast
from lawa_lab.report.frontier import EqualQuality, Frontier, Lead
from lawa_lab.report.savings import Amount
from lawa_lab.report.words import (
    plain,
    say_axis,
    say_count,
    say_difference,
    say_number,
    say_over_seeds,
    say_range,
    say_saved,
    say_seeds,
    say_value,
)

__all__ = ["DEFINITIONS", "forecast", "headline", "leads", "less_training", "notes", "reached"]

DEFINITIONS = (
    "The frontier compares results, not curves inside one run. The result of an annealed run is "
    "its raw weights at the last step, and what it spent is its whole length, because the schedule "
    "was chosen for that length. A constant-rate run has a result at every evaluation: its "
    "average.",
    "The budget at equal quality is where the average is first as good as the final value of the "
    "annealed run of the same seed, in percent of that run's length. “Not reached” means that the "
    "average never had that value. Time includes every cost of averaging. A decay that branches "
    "off a constant-rate run is also charged for that run's evaluations before the branch, as if "
    "it had been trained alone.",
    "If there are several peak rates, each schedule and length and each average is shown with the "
    "peak that is best for it in this metric.",
)


def headline(recipe: str, metric: Metric, frontier: Frontier) -> str:
    """The saving at the annealed runs' own final quality: the best schedule, then the others."""
    found = frontier.headline
    if found is None:
        return (
            f"{recipe}: no constant-rate run with an average shares a seed with the annealed runs, "
            "so nothing is compared with them."
        )
    longest: dict[str, EqualQuality] = {}
    for row in frontier.equal_quality:
        if row.main and row.kind == "annealed" and row.annealed != found.annealed:
            longest[row.annealed] = max(
                longest.get(row.annealed, row), row, key=lambda each: each.budget
            )
    begin = f"{recipe}: the average of one constant-rate run"
    sentences = [f"{begin} {_at_quality(metric, found, frontier.axis)}"]
    sentences += [f"It {_at_quality(metric, row, frontier.axis)}" for row in longest.values()]
    return " ".join(sentences)


def _at_quality(metric: Metric, row: EqualQuality, axis: Axis) -> str:
    value = say_value(metric, row.saving.target)
    target = (
        f"the final {plain(metric.name)} of {row.annealed} runs of "
        f"{say_count(row.budget, axis)} ({value})"
    )
    seeds = say_seeds(row.saving.num_seeds)
    within = f"within its {say_count(row.trained, axis)}"
    amount = row.saving.on(axis)
    if amount is None:
        return f"does not reach {target} {within} ({seeds})."
    place = amount.averaged_at
    after = f"{say_over_seeds(place)} {say_axis(axis, place.mean)}"
    if row.saving.num_both < row.saving.num_seeds:
        others = f"other{'s'[: row.saving.num_seeds - row.saving.num_both != 1]}"
        return (
            f"reaches {target} after {after} in {row.saving.num_both} of {seeds}, and does not "
            f"reach it {within} in the {others}."
        )
    spread = f" ({say_range(place)} by seed)" if place.sd else ""
    return f"reaches {target} after {after}{spread}: {less_training(amount)}{_cheaper(row, axis)}."


def less_training(amount: Amount) -> str:
    """Such as "38% less training", "2% more training" or "the same amount of training"."""
    percent = round(amount.percent or 0.0)
    if not percent:
        return "the same amount of training"
    return f"{abs(percent)}% {'less' if percent > 0 else 'more'} training"


def _cheaper(row: EqualQuality, axis: Axis) -> str:
    """That a shorter annealed run is as good, so that less is saved against the right length."""
    if row.cheapest >= row.budget:
        return ""
    return f" (but annealed runs of {say_count(row.cheapest, axis)} are as good)"


def leads(metric: Metric, frontier: Frontier) -> str:
    """Where the average is ahead of and behind the best annealed run of the same length."""
    groups = {
        "ahead of": [lead for lead in frontier.leads if lead.lead > 0],
        "behind": [lead for lead in frontier.leads if lead.lead < 0],
        "level with": [lead for lead in frontier.leads if lead.lead == 0],
    }
    parts: list[str] = []
    for where, found in groups.items():
        if found:
            rival = "it" if parts else "the best annealed run"
            parts.append(f"{where} {rival} at {_places(metric, found, frontier.axis)}")
    return f"At equal budget, the average is {', and '.join(parts)}." if parts else ""


def _places(metric: Metric, found: Sequence[Lead], axis: Axis) -> str:
    """Such as "6 (by 0.012, 3 of 3 seeds) and 12 epochs (by 0.004, 2 of 3 seeds)"."""
    texts = []
    for lead in found:
        count = lead.num_ahead if lead.lead > 0 else lead.num_behind
        seeds = f", {count} of {lead.num_seeds} seeds" if lead.num_seeds > 1 else ""
        by = f" (by {say_difference(metric, abs(lead.lead))}{seeds})" if lead.lead else ""
        last = lead is found[-1]
        texts.append(f"{say_count(lead.budget, axis) if last else say_number(lead.budget)}{by}")
    *first, final = texts
    return f"{', '.join(first)} and {final}" if first else final


def reached(row: EqualQuality, axis: Axis) -> str:
    """Where the average has the quality of an annealed run: the mean, then seeds that differ.

    A mean is given only if all seeds reached it.
    """
    places = [seed.averaged_at for seed in row.saving.by_seed]
    if all(place is None for place in places):
        return "not reached"
    amount = row.saving.on(axis)
    if None in places or amount is None:
        return ", ".join("not reached" if p is None else say_saved(p) for p in places)
    seeds = f" ({', '.join(map(say_number, places))})" if len(set(places)) > 1 else ""
    return f"{say_over_seeds(amount.averaged_at)}{seeds}"


def forecast(metric: Metric, found: Forecast) -> str:
    """How well the average predicts the result of a decay."""
    side = "above" if found.mean_error > 0 else "below"
    rank = found.rank_correlation
    window = found.average.removeprefix("average, ")
    average = found.average if window == found.average else f"{window} average"
    return (
        f"Forecast ({found.annealed}): where a decay starts, the {average} is "
        f"{say_difference(metric, abs(found.mean_error))} {side} the {plain(metric.name)} at the "
        f"end of the decay (mean of {len(found.branches)} branches; mean "
        f"absolute error {say_difference(metric, found.mean_absolute_error)}, rank correlation "
        f"{'unknown' if rank is None else f'{rank:.2f}'})."
    )


def notes(metric: Metric, frontier: Frontier) -> list[str]:
    """What limits the comparison."""
    said = []
    if frontier.several_peaks:
        said.append(
            "There are several peak rates. Each schedule and length and each average is shown with "
            f"the peak that is best in {plain(metric.name)}, so all of them are slightly "
            "optimistic."
        )
    if frontier.repeated:
        said.append(
            "Some runs have the same schedule, length and peak rate, such as a run given twice or "
            "in two lengths. Only the best of them is shown."
        )
    said += _notes_on_equal_quality(frontier)
    if frontier.unfinished:
        said.append(f"Left out, because not finished: {'; '.join(frontier.unfinished)}.")
    early = [
        f"{point.label}, {say_count(point.budget, frontier.axis)}: at "
        f"{say_number(point.reached_at.mean)}"
        for point in frontier.annealed
        if point.best_peak and point.reached_at and point.reached_at.mean < 0.85 * point.budget
    ]
    if early:
        said.append(
            f"Some annealed runs reached their final value before the end ({'; '.join(early)})."
        )
    return said


def _notes_on_equal_quality(frontier: Frontier) -> Iterator[str]:
    """Why a final value there may differ from that at equal budget, or have been reached before."""
    compared = [row for row in frontier.equal_quality if row.main]
    num_seeds = {point.run: point.raw.num_seeds for point in frontier.annealed}
    if any(row.saving.num_seeds < num_seeds[row.run] for row in compared):
        yield (
            "Budget at equal quality is about the seeds that the annealed run and the average "
            "share, so its final values may differ from those at equal budget."
        )
    begin = next((curve.at[0] for curve in frontier.curves if curve.main), 0.0)
    if any(seed.averaged_at == begin for row in compared for seed in row.saving.by_seed):
        yield (
            f"The first evaluation of the average is at {say_count(begin, frontier.axis)}. If it "
            "reaches a value there, it may have done so earlier."
        )
