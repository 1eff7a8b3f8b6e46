"""Event files, read back with TensorBoard's own reader."""

import sys
from pathlib import Path
from typing import Any

import pytest

from lawa_lab.report.runs import Run
from lawa_lab.report.tensorboard import save_events
from torch_lawa.errors import FormatError, LawaError, OutputError
from torch_lawa.metrics import Row

Scalars = dict[str, list[tuple[int, float, float]]]


def row(epoch: float, loss: float | None, k: int | None = None, **facts: Any) -> Row:
    row: Row = {"seed": 0, "epoch": epoch, "step": int(100 * epoch), "test_loss": loss, "k": k}
    row |= {"weights": "averaged" if k else "raw", "train_seconds": 60.0 * epoch}
    return {**row, "evaluate_seconds": 1.0, "collect_seconds": 0.5 * epoch, **facts}


def read(folder: Path) -> Scalars:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(e.step, e.value, e.wall_time) for e in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_each_series_is_a_folder_with_its_values_at_their_steps_and_times(tmp_path: Path) -> None:
    rows = [
        row(1, 4.0, learning_rate=0.5, train_loss=5.0),
        row(2, None, learning_rate=0.25, train_loss=4.5),
        row(2, 3.0, 2, train_loss=4.5, test_accuracy=0.75),
        row(3, 2.0, learning_rate=0.125),
        row(3, 1.0, 2, test_accuracy=0.875),
    ]
    folders = save_events([Run("cifar100-resnet34", "lookahead(sgd)", tuple(rows))], tmp_path)
    home = tmp_path / "cifar100-resnet34" / "lookahead(sgd)" / "seed-0"
    assert folders == [home / "raw", home / "k=2"]
    assert read(home / "raw") == {
        "test_loss": [(100, 4.0, 61.0), (300, 2.0, 183.0)],
        "learning_rate": [(100, 0.5, 61.0), (200, 0.25, 122.0), (300, 0.125, 183.0)],
        "train_loss": [(100, 5.0, 61.0), (200, 4.5, 122.0)],
    }
    # Training, collecting, raw evaluations until then, its own: what the meter charges.
    times = [120.0 + 1.0 + 2.0 + 1.0, 180.0 + 1.5 + 3.0 + 2.0]
    assert read(home / "k=2") == {
        "test_loss": [(200, 3.0, times[0]), (300, 1.0, times[1])],
        "test_accuracy": [(200, 0.75, times[0]), (300, 0.875, times[1])],
    }


def test_seeds_and_treatments_do_not_fall_together(tmp_path: Path) -> None:
    rows = [row(1, 4.0, seed=seed) for seed in (0, 1)]
    rows += [row(1, 3.0, 2, batch_norm=how) for how in ("re-estimated", "copied")]
    rows += [row(1, 2.0, 2, coefficients="exponential:0.9")]
    folders = save_events([Run("a/b", "adam, constant rate", tuple(rows))], tmp_path)
    names = [str(folder.relative_to(tmp_path)) for folder in folders]
    home = "a-b/adam,constant-rate"
    assert names == [
        f"{home}/seed-0/raw",
        f"{home}/seed-0/k=2,BatchNorm-re-estimated",
        f"{home}/seed-0/k=2,BatchNorm-copied",
        f"{home}/seed-0/k=2,exponential-0.9",
        f"{home}/seed-1/raw",
    ]
    assert [read(folder)["test_loss"][0][1] for folder in folders] == [4.0, 3.0, 3.0, 2.0, 4.0]


def test_runs_whose_names_only_a_file_system_confuses_stay_apart(tmp_path: Path) -> None:
    runs = [Run("r", name, (row(1, loss),)) for name, loss in (("a:b", 1.0), ("a b", 2.0))]
    folders = save_events(runs, tmp_path)
    assert [read(folder)["test_loss"][0][1] for folder in folders] == [1.0, 2.0]


def test_without_a_clock_values_and_steps_are_there_all_the_same(tmp_path: Path) -> None:
    rows = tuple({k: v for k, v in row(e, 5.0 - e).items() if k != "train_seconds"} for e in (1, 2))
    [folder] = save_events([Run("r", "a", rows)], tmp_path)
    assert [(s, v) for s, v, _ in read(folder)["test_loss"]] == [(100, 4.0), (200, 3.0)]


def test_epochs_are_steps_where_none_are_counted_but_only_whole_ones(tmp_path: Path) -> None:
    [folder] = save_events([Run("r", "a", (row(3, 1.0, step=None),))], tmp_path / "a")
    assert read(folder)["test_loss"][0][0] == 3
    with pytest.raises(FormatError, match=r"epoch 1\.5 has no `step`"):
        save_events([Run("r", "a", (row(1.5, 1.0, step=None),))], tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_earlier_events_are_refused_or_replaced_and_never_mixed(tmp_path: Path) -> None:
    [folder] = save_events([Run("r", "a", (row(1, 1.0),))], tmp_path)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="already holds event files"):
        save_events([Run("r", "a", (row(1, 2.0),))], tmp_path)
    assert read(folder)["test_loss"][0][1] == 1.0
    save_events([Run("r", "a", (row(1, 2.0),))], tmp_path, overwrite=True)
    assert [value for _, value, _ in read(folder)["test_loss"]] == [2.0]
    assert (folder / "notes.txt").read_text() == "mine"


def test_a_missing_package_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(LawaError, match=r"pip install 'torch-lawa\[tensorboard\]'"):
        save_events([Run("r", "a", (row(1, 1.0),))], tmp_path)
