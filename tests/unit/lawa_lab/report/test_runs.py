"""Metrics files grouped into runs and series, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from lawa_lab.report.curves import Metric
from lawa_lab.report.rows import find_files
from lawa_lab.report.runs import Run, Series, load_runs, metrics_of
from torch_lawa.errors import FormatError
from torch_lawa.metrics import Row

LOSS = Metric("test_loss", "lower")
UNIFORM = Series("averaged", 2, "uniform")


def row(epoch: float, loss: float | None, **facts: Any) -> Row:
    facts = {"weights": "averaged" if "k" in facts else "raw", **facts}
    return {"seed": 0, "epoch": epoch, "step": 10 * epoch, "test_loss": loss, **facts}


def write(path: Path, rows: list[Row]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def values(run: Run, series: Series, seed: Any = 0) -> tuple[float | None, ...]:
    return run.curves(series, LOSS)[seed].values


def test_runs_of_several_files_are_grouped_by_recipe_and_run_and_seeds_combined(
    tmp_path: Path,
) -> None:
    facts = [("cifar", "sgd", 0), ("cifar", "sgd", 1), ("cifar", "adam", 0), ("digits", "sgd", 0)]
    for number, (recipe, run, seed) in enumerate(facts):
        named = row(1, 0.1 * number, recipe=recipe, run=run, seed=seed)
        write(tmp_path / f"{number}/metrics.jsonl", [named])
    runs = load_runs([tmp_path])
    assert [(r.recipe, r.name, r.seeds) for r in runs] == [
        ("cifar", "sgd", (0, 1)),
        ("cifar", "adam", (0,)),
        ("digits", "sgd", (0,)),
    ]


def test_the_order_of_files_does_not_matter_and_one_named_twice_counts_once(tmp_path: Path) -> None:
    files = [
        write(tmp_path / f"{seed}.jsonl", [row(1, seed, seed=seed), row(2, 5, seed=seed)])
        for seed in (10, 2)
    ]
    there, back = load_runs(files)[0], load_runs([*files[::-1], files[0]])[0]
    assert there.seeds == back.seeds == (2, 10)
    assert there.curves(Series(), LOSS) == back.curves(Series(), LOSS)
    assert len(back.rows) == 4
    assert list(find_files([*files, tmp_path / "." / "2.jsonl"])) == files


def test_old_rows_have_no_coefficients_and_no_names(tmp_path: Path) -> None:
    [run] = load_runs([write(tmp_path / "m.jsonl", [row(1, 3), row(1, 2, k=2)])])
    assert run.series == (Series(), UNIFORM)
    assert Series.of(row(1, 2, k=2, coefficients="exponential:0.9")).coefficients != "uniform"


def test_the_coefficients_of_a_sweep_say_nothing_of_its_raw_rows() -> None:
    assert Series.of(row(1, 3, coefficients="uniform")) == Series()


def test_the_first_average_of_a_run_is_the_first_of_a_full_moment_not_the_shortest() -> None:
    rows = [row(1, 9), row(2, 8), row(2, 8, k=2), row(3, 7), row(3, 7, k=3), row(3, 7, k=2)]
    assert Run("", "", tuple(rows)).series == (Series(), Series("averaged", 3, "uniform"), UNIFORM)


def test_a_resumed_run_counts_as_it_went_on(tmp_path: Path) -> None:
    rows = [row(1, 9), row(2, 8), row(3, 7), row(2, 6), row(3, 5)]
    [run] = load_runs([write(tmp_path / "m.jsonl", rows)])
    assert values(run, Series()) == (9, 6, 5)


def test_two_files_that_differ_about_a_moment_are_refused(tmp_path: Path) -> None:
    one = write(tmp_path / "a.jsonl", [row(1, 9), row(2, 8)])
    other = write(tmp_path / "b.jsonl", [row(2, 7)])
    with pytest.raises(FormatError, match=r"a\.jsonl and .*b\.jsonl disagree .* step 20 of seed 0"):
        load_runs([one, other])
    same = write(tmp_path / "c.jsonl", [row(2, 8), row(3, 7)])
    assert values(load_runs([one, same])[0], Series()) == (9, 8, 7)


def test_two_files_whose_epochs_differ_in_length_are_refused(tmp_path: Path) -> None:
    """No evaluation of one has a step of the other: their rows would form one curve."""
    one = write(tmp_path / "a.jsonl", [row(epoch, 9) for epoch in (1, 2, 3)])
    longer = [{**row(epoch, 7), "step": 13 * epoch} for epoch in (1, 2, 3)]
    other = write(tmp_path / "b.jsonl", longer)
    for files in ([one, other], [other, one]):
        with pytest.raises(FormatError, match="disagree about the steps per epoch of seed 0"):
            load_runs(files)
    for facts in ({"seed": 1}, {"run": "adam"}, {"budget_epochs": 4}):  # these tell them apart
        write(other, [{**each, **facts} for each in longer])
        assert load_runs([one, other])
    # A run that was resumed into a second file, whose epochs are rounded down.
    write(other, [{**row(3, 7), "step": 35}, {**row(4, 6), "step": 40}])
    assert values(load_runs([one, other])[0], Series()) == (9, 9, 9, 7, 6)


def test_shares_of_a_sweep_are_series_although_their_k_varies() -> None:
    rows = [
        {"weights": "averaged", "k": k, "horizon": share, "coefficients": rule}
        for k, share, rule in ((2, 0.1, "uniform"), (3, 0.1, "uniform"), (3, 0.5, "blend:0.6"))
    ]
    assert [Series.of(row).coefficients for row in rows] == [
        "horizon 0.1",
        "horizon 0.1",
        "horizon 0.5, blend:0.6",
    ]
    assert {Series.of(row).k for row in rows} == {None}


def test_rows_of_a_sweep_stand_beside_those_of_its_run(tmp_path: Path) -> None:
    """A sweep repeats what the run found, without its clock, and adds windows of its own."""
    online = [row(2, 8, train_seconds=5.0), row(2, 7, k=2, train_seconds=5.0)]
    swept = [row(2, 8), row(2, 7, k=2), row(2, 6, k=3)]
    swept = [{**row, "coefficients": "uniform"} for row in swept]  # of raw rows too
    a, b = write(tmp_path / "a.jsonl", online), write(tmp_path / "b.jsonl", swept)
    for files in ([a, b], [b, a]):
        [run] = load_runs(files)
        assert run.axes(Series()) == run.axes(UNIFORM) == ("epoch", "step", "seconds")
        assert run.axes(Series("averaged", 3, "uniform")) == ("epoch", "step")


@pytest.mark.parametrize(
    ("facts", "axes"),
    [
        ({"train_seconds": 1.0}, ["epoch", "step", "seconds"]),
        ({"train_seconds": 1.0, "device": "cpu", "num_devices": 1}, ["epoch", "step", "seconds"]),
        (
            {"train_seconds": 1.0, "device": "NVIDIA H200"},
            ["epoch", "step", "seconds", "gpu_hours"],
        ),
        ({"train_seconds": 1.0, "num_devices": 4}, ["epoch", "step", "seconds", "gpu_hours"]),
        ({"device": "NVIDIA H200"}, ["epoch", "step"]),
        ({"train_seconds": 1.0, "step": None}, ["epoch", "seconds"]),
    ],
)
def test_what_a_run_can_be_counted_by(facts: dict[str, Any], axes: list[str]) -> None:
    run = Run("", "", (row(1, 9, **facts), row(2, 8, **facts)))
    assert list(run.axes(Series())) == axes


def test_a_clock_that_runs_backwards_and_a_changing_number_of_gpus_are_not_relied_on() -> None:
    back = (row(1, 9, train_seconds=5.0), row(2, 8, train_seconds=1.0))
    assert Run("", "", back).axes(Series()) == ("epoch", "step")
    grown = tuple(row(n, 9, train_seconds=float(n), num_devices=n) for n in (1, 2))
    assert Run("", "", grown).axes(Series()) == ("epoch", "step", "seconds")


def test_gpu_hours_are_seconds_times_gpus() -> None:
    rows = (row(1, 9, train_seconds=1800.0, num_devices=4, evaluate_seconds=900.0),)
    assert Run("", "", rows).curves(Series(), LOSS, "gpu_hours")[0].at == (3.0,)


def test_numbers_that_are_not_finite_are_missing(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    file.write_text('{"weights": "raw", "epoch": 1, "test_loss": NaN}\n'
                    '{"weights": "raw", "epoch": 2, "test_loss": 0.5}\n')  # fmt: skip
    [run] = load_runs([file])
    assert values(run, Series(), None) == (None, 0.5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"kind": "provenance"}\n', "no row has `weights`"),
        ("", "is empty"),
        ("weights: raw\n", "line 1: not a row of metrics"),
        ('{"weights": 3, "epoch": 1}\n', "line 1: `weights` is 3"),
        ('{"weights": "raw"}\n', "line 1: .*neither `epoch` nor `step`"),
        ('{"weights": "raw", "epoch": "one"}\n', "`epoch` is a str, not a number"),
        ('{"weights": "raw", "epoch": -1}\n', "`epoch` is -1, which is negative"),
        (
            '{"weights": "raw", "epoch": 1, "test_accuracy": 97.5}\n',
            "`test_accuracy` is 97.5.*divide percentages by 100",
        ),
        ('{"weights": "raw", "epoch": 1, "test_loss": "low"}\n', "`test_loss` is 'low', not a num"),
        ('{"weights": "raw", "epoch": 1, "train_seconds": []}\n', "`train_seconds` is .., not a "),
        ('{"weights": "raw", "epoch": 1, "seed": [0]}\n', "`seed` is .0., not a name"),
    ],
)
def test_what_is_not_metrics_is_refused_with_the_line(
    tmp_path: Path, content: str, message: str
) -> None:
    file = tmp_path / "m.jsonl"
    file.write_text(content)
    with pytest.raises(FormatError, match=message):
        load_runs([file])


def test_a_folder_without_metrics_files_stands_for_its_other_files_of_rows(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"no metrics\.jsonl"):
        load_runs([tmp_path])
    write(tmp_path / "raw.jsonl", [{"kind": "provenance"}])
    with pytest.raises(FormatError, match=r"raw\.jsonl holds none"):
        load_runs([tmp_path])
    write(tmp_path / "rate-0.1.jsonl", [row(1, 9, run="sgd"), row(2, 8, run="sgd")])
    [alone] = load_runs([tmp_path])
    assert (alone.name, values(alone, Series())) == ("sgd", (9, 8))
    # The same seed with another value: only the name of the file tells the two apart.
    write(tmp_path / "rate-0.2.jsonl", [row(1, 5, run="sgd")])
    runs = load_runs([tmp_path])
    assert [(run.name, values(run, Series())) for run in runs] == [
        ("rate-0.1", (9, 8)),
        ("rate-0.2", (5,)),
    ]
    # A file of several runs keeps them apart.
    write(tmp_path / "rate-0.3.jsonl", [row(1, 7, run="sgd"), row(1, 6, run="adam")])
    write(tmp_path / "rate-0.4.jsonl", [row(1, 3, run="sgd"), row(2, 2, run=None)])
    assert [(run.name, values(run, Series())) for run in load_runs([tmp_path])][2:] == [
        ("rate-0.3 sgd", (7,)),
        ("rate-0.3 adam", (6,)),
        ("rate-0.4", (3, 2)),
    ]
    write(tmp_path / "below/metrics.jsonl", [row(1, 4, run="adam")])
    assert [run.name for run in load_runs([tmp_path])] == ["adam"]


def test_other_methods_are_series_of_their_own(tmp_path: Path) -> None:
    rows = [row(1, 9), row(1, 8, k=2), row(1, 7, weights="ema")]
    rows.append(row(1, 6, weights="ema", coefficients="decay:0.9"))
    [run] = load_runs([write(tmp_path / "m.jsonl", rows)])
    ema, decay = Series("ema"), Series("ema", coefficients="decay:0.9")
    assert run.series == (Series(), UNIFORM, ema, decay)
    assert [series.averaged for series in run.series] == [False, True, True, True]
    assert [series.label for series in run.series] == ["raw", "k = 2", "ema", "ema, decay:0.9"]
    assert values(run, ema) == (7,)


def test_the_last_word_of_a_name_says_which_direction_is_better() -> None:
    names = ["val_accuracy", "loss", "train_loss", "valid_perplexity", "evaluate_seconds", "lossy"]
    found = [(metric.name, metric.better) for metric in metrics_of([dict.fromkeys(names, 1.0)])]
    assert found == [("loss", "lower"), ("valid_perplexity", "lower"), ("val_accuracy", "higher")]
