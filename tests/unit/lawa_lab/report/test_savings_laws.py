"""Savings against plain loops that compute the same, on random curves."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lawa_lab.report.curves import Metric
from lawa_lab.report.runs import Run, Series
from lawa_lab.report.savings import Comparison, compare
from lawa_lab.report.summary import summarise
from torch_lawa.metrics import Row

LOSS, ACCURACY = Metric("loss", "lower"), Metric("accuracy", "higher")
RAW, MEAN = Series(), Series("averaged", 2, "uniform")
Points = dict[int, float | None]

values = st.one_of(st.none(), st.integers(0, 8).map(float))
points = st.dictionaries(st.integers(1, 12), values, min_size=1, max_size=12)
seeds = st.dictionaries(st.integers(0, 3), st.tuples(points, points), min_size=1, max_size=4)
metrics = st.sampled_from([LOSS, ACCURACY])


def rows_of(curves: dict[int, tuple[Points, Points]], metric: Metric) -> list[Row]:
    rows = []
    for seed, (raw, averaged) in curves.items():
        for weights, k, points in (("raw", None, raw), ("averaged", 2, averaged)):
            for epoch, value in points.items():
                row = {"seed": seed, "epoch": epoch, "step": 7 * epoch, "weights": weights, "k": k}
                rows.append({**row, metric.name: value, "train_seconds": 10.0 * epoch})
    return rows


def compared(rows: list[Row], metric: Metric, axis: Any = "epoch") -> Comparison:
    run = Run("toy", "sgd", tuple(rows))
    return compare((run, RAW), (run, MEAN), metric, axis=axis)


def naive_shared(own: Points, other: Points) -> Points:
    """Between the first and last evaluation of the other, only evaluations of both."""
    if not [e for e in own if e in other]:
        return own
    kept = {}
    for epoch in own:
        if epoch in other or epoch < min(other) or epoch > max(other):
            kept[epoch] = own[epoch]
    return kept


def naive_reach(points: Points, metric: Metric, target: float) -> int | None:
    for epoch in sorted(points):
        value = points[epoch]
        if value is None:
            continue
        if metric.better == "lower" and value <= target:
            return epoch
        if metric.better == "higher" and value >= target:
            return epoch
    return None


def naive_savings(
    curves: dict[int, tuple[Points, Points]], metric: Metric, target: float
) -> dict[int, int | None]:
    """By seed, what was saved at a target; None where one of the two never reached it."""
    savings: dict[int, int | None] = {}
    for seed, (raw, averaged) in curves.items():
        begin = naive_reach(naive_shared(averaged, raw), metric, target)
        end = naive_reach(naive_shared(raw, averaged), metric, target)
        savings[seed] = None if begin is None or end is None else end - begin
    return savings


@given(seeds, metrics, st.integers(-1, 9))
def test_the_saving_at_a_target_is_what_two_loops_find(
    curves: dict[int, tuple[Points, Points]], metric: Metric, target: int
) -> None:
    saving = compared(rows_of(curves, metric), metric).saving_at(target)
    expected = naive_savings(curves, metric, target)
    assert {seed.seed: seed.saved for seed in saving.by_seed} == expected
    both = [saved for saved in expected.values() if saved is not None]
    assert saving.num_both == len(both)
    if both:
        assert saving.epochs is not None
        found = saving.epochs.saved
        assert (found.mean, found.low, found.high) == (sum(both) / len(both), min(both), max(both))
    else:
        assert saving.epochs is None


@given(seeds, metrics)
def test_the_headline_is_the_longest_of_all_that_every_seed_has(
    curves: dict[int, tuple[Points, Points]], metric: Metric
) -> None:
    longest, at = 0.0, None
    reached = {v for raw, mean in curves.values() for v in naive_shared(mean, raw).values()}
    for target in sorted(v for v in reached if v is not None):
        saved = list(naive_savings(curves, metric, target).values())
        if None in saved:
            continue
        mean = sum(s for s in saved if s is not None) / len(saved)
        harder = at is None or metric.beats(target, at)
        if mean > longest or (mean == longest > 0 and harder):
            longest, at = mean, target
    headline = compared(rows_of(curves, metric), metric).headline
    assert (headline.epochs.saved.mean if headline and headline.epochs else 0.0) == longest
    assert (headline.target if headline else None) == at


@given(seeds, metrics, st.floats(-1.0, 9.0))
def test_nothing_lies_between_the_targets_of_the_whole_curve(
    curves: dict[int, tuple[Points, Points]], metric: Metric, target: float
) -> None:
    comparison = compared(rows_of(curves, metric), metric)
    curve = comparison.curve
    harder = [place for place, at in enumerate(curve.target) if metric.reaches(at, target)]
    saving = comparison.saving_at(target)
    found = [(seed.baseline_at, seed.averaged_at) for seed in saving.by_seed]
    if harder:  # from easy to hard: the first is the next
        at_next = comparison.saving_at(curve.target[harder[0]])
        assert found == [(seed.baseline_at, seed.averaged_at) for seed in at_next.by_seed]
        saved = saving.epochs.saved.mean if saving.epochs else None
        assert saved == curve.saved[harder[0]]
        assert saving.num_both == curve.num_both[harder[0]]
    else:
        assert found == [(None, None)] * len(found)


@given(seeds, metrics, st.randoms(use_true_random=False))
def test_the_order_of_rows_and_seeds_does_not_matter(
    curves: dict[int, tuple[Points, Points]], metric: Metric, luck: random.Random
) -> None:
    rows = rows_of(curves, metric)
    shuffled = luck.sample(rows, len(rows))
    one, other = compared(rows, metric), compared(shuffled, metric)
    assert one == other
    assert one.curve == other.curve
    renamed = dict(zip(curves, luck.sample(list(curves), len(curves)), strict=True))
    moved = compared([{**row, "seed": renamed[row["seed"]]} for row in rows], metric)
    assert moved.curve == one.curve


@settings(max_examples=50)
@given(seeds, metrics, st.randoms(use_true_random=False))
def test_a_whole_report_does_not_depend_on_the_order_of_rows(
    curves: dict[int, tuple[Points, Points]], metric: Metric, luck: random.Random
) -> None:
    rows = rows_of(curves, metric)
    one, other = (
        summarise([Run("toy", "sgd", tuple(some))], k=2)
        for some in (rows, luck.sample(rows, len(rows)))
    )
    assert one == other


@given(seeds, metrics, st.data())
def test_what_a_resumed_run_wrote_again_takes_the_place_of_what_was_there(
    curves: dict[int, tuple[Points, Points]], metric: Metric, data: st.DataObject
) -> None:
    rows = rows_of(curves, metric)
    again = data.draw(st.lists(st.sampled_from(rows), unique_by=id))
    stale = [{**row, metric.name: data.draw(values)} for row in again]
    assert compared(stale + rows, metric) == compared(rows, metric)


@settings(max_examples=50)
@given(seeds, metrics, st.integers(0, 8))
def test_all_axes_tell_of_the_same_two_moments(
    curves: dict[int, tuple[Points, Points]], metric: Metric, target: int
) -> None:
    rows = rows_of(curves, metric)
    epochs, steps = (compared(rows, metric, axis).saving_at(target) for axis in ("epoch", "step"))
    for by_epoch, by_step in zip(epochs.by_seed, steps.by_seed, strict=True):
        for name in ("baseline_at", "averaged_at"):
            epoch = getattr(by_epoch, name)
            assert getattr(by_step, name) == (None if epoch is None else 7 * epoch)
    for unit, amount in ((1, epochs.epochs), (7, epochs.steps), (10, epochs.seconds)):
        both = [seed for seed in epochs.by_seed if seed.saved is not None]
        assert (amount is None) == (not both)
        for name in ("baseline_at", "averaged_at", "saved"):
            if amount is not None:
                mean = unit * sum(getattr(seed, name) for seed in both) / len(both)
                assert getattr(amount, name).mean == pytest.approx(mean)
