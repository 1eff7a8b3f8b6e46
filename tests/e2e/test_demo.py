"""`lawa demo`, short: what it writes and what it says agree."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support.programs import LAWA, Program

from lawa_lab.recipes.catalog.digits import DigitsConfig
from lawa_lab.recipes.tasks.digits import build_model, evaluate, load_data
from lawa_lab.report.runs import load_runs
from lawa_lab.report.summary import MetricReport, summarise
from lawa_lab.report.words import finding
from torch_lawa.metrics import Row, read_metrics

EPOCHS, K = 3, 2
METRICS = "metrics.jsonl"
FILES = ["demo.json", "savings.png", "seed-4", "seed-5", "seed-6"]


Said = tuple[str, str]  # on stdout and stderr
Run = tuple[Path, Said]


def demo(output: Path, *arguments: str) -> Said:
    short = ["demo", "--epochs", str(EPOCHS), "--k", str(K), "--seed", "4", "-o", str(output)]
    with Program(LAWA, *short, *arguments) as process:
        said, errors = process.communicate()
    assert process.returncode == 0, errors
    return said, errors


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    output = tmp_path_factory.mktemp("demo") / "runs" / "demo"
    return output, demo(output)


def rows_of(output: Path) -> list[Row]:
    return [
        row for path in sorted(output.glob("seed-[456]")) for row in read_metrics(path / METRICS)
    ]


def loss_of(output: Path) -> MetricReport:
    report = summarise(load_runs([output])).recipes[0].metrics[0]
    assert report.metric.name == "test_loss"
    return report


def without_times(rows: list[Row]) -> list[Row]:
    return [{k: v for k, v in row.items() if not k.endswith("_seconds")} for row in rows]


def test_the_folder_holds_the_run_and_nothing_else(run: Run) -> None:
    output, (_, errors) = run
    assert sorted(path.name for path in output.iterdir()) == FILES
    assert (output / "savings.png").read_bytes().startswith(b"\x89PNG")
    assert errors == ""


def test_the_folder_says_what_was_run(run: Run) -> None:
    demo = json.loads((run[0] / "demo.json").read_text())
    assert demo == {"command": "lawa demo --seed 4 --k 2 --epochs 3", "seeds": [4, 5, 6]}
    config = json.loads((run[0] / "seed-5" / "config.json").read_text())
    assert (config["recipe"], config["seed"]) == ("digits", 5)
    assert config["hyperparameters"]["ks"] == [K]
    assert config["hyperparameters"]["epochs"] == EPOCHS


def test_every_epoch_has_raw_rows_and_from_k_on_averaged_ones(run: Run) -> None:
    rows = rows_of(run[0])
    found = [(r["seed"], r["epoch"], r["weights"], r["k"], r["batch_norm"]) for r in rows]
    expected: list[tuple[Any, ...]] = []
    for seed in (4, 5, 6):
        for epoch in range(1, EPOCHS + 1):
            expected.append((seed, epoch, "raw", None, None))
            expected.append((seed, epoch, "raw", None, "re-estimated"))
            if epoch >= K:
                expected.append((seed, epoch, "averaged", K, "re-estimated"))
                expected.append((seed, epoch, "averaged", K, "copied"))
    assert found == expected
    assert all(0.0 < row["test_loss"] < 10.0 for row in rows)
    assert rows[-1]["test_accuracy"] > 0.8  # it learns: chance is 0.1
    assert rows[-1]["step"] == EPOCHS * 28


def test_the_saved_average_is_the_one_that_was_measured(run: Run) -> None:
    config = DigitsConfig(epochs=EPOCHS, ks=(K,))
    model = build_model(config)
    model.load_state_dict(load_file(run[0] / "seed-4" / "averaged.safetensors"))
    rows = rows_of(run[0])
    (recorded,) = (
        row
        for row in rows
        if (row["seed"], row["epoch"]) == (4, EPOCHS)
        and (row["weights"], row["batch_norm"]) == ("averaged", "re-estimated")
    )
    # To the last bit: tests have one thread, as the recipe does.
    measured = evaluate(model.eval(), load_data(config))
    assert measured == {name: recorded[name] for name in ("test_loss", "test_accuracy")}


def test_what_a_person_reads_agrees_with_the_metrics(run: Run) -> None:
    output, (said, _) = run
    text = " ".join(said.split())
    loss = loss_of(output)
    for line in ("seed 4: ", "seed 5: ", "seed 6: ", f"average of the {K} latest epochs"):
        assert line in text
    assert finding("digits", loss.metric, loss.main[0]) in text
    assert f"in {loss.main[0].num_behind} of {3 * (EPOCHS - K + 1)} evaluations" in text
    assert f"lawa report {output}" in text
    assert str(output) in said
    assert "\x1b" not in said  # nothing live, no colours: this is no terminal


def test_overwrite_gives_the_same_values_and_leaves_other_files_alone(
    run: Run, tmp_path: Path
) -> None:
    """With --json, which is alone on stdout."""
    other = tmp_path / "again"
    for name in ("seed-4", "seed-9"):
        (other / name).mkdir(parents=True)
        (other / name / METRICS).write_text("old\n")
    (other / "demo.json").write_text("{}")
    (other / "seed-9" / "notes.txt").write_text("mine")
    found = json.loads(demo(other, "--json", "--overwrite")[0])
    again, rows = rows_of(other), rows_of(run[0])
    assert without_times(again) == without_times(rows)
    averaged = Path("seed-6") / "averaged.safetensors"
    assert (other / averaged).read_bytes() == (run[0] / averaged).read_bytes()
    assert sorted(found["files"]) == FILES
    loss = found["report"]["recipes"][0]["metrics"][0]
    assert loss["runs"][0]["seeds"] == [4, 5, 6]
    assert loss["main"][0]["final"]["target"] == loss_of(run[0]).main[0].final.target
    assert len(found["findings"]) == 2
    assert sorted(path.name for path in other.iterdir()) == [*FILES, "seed-9"]
    assert [path.name for path in (other / "seed-9").iterdir()] == ["notes.txt"]


def test_the_test_images_do_not_depend_on_anything_but_their_share() -> None:
    first, second = load_data(DigitsConfig()), load_data(DigitsConfig(epochs=9, width=3))
    assert first.test_labels.tolist() == second.test_labels.tolist()
    counts = first.test_labels.bincount()
    assert (len(first.train_images), len(first.test_images)) == (898, 899)
    assert counts.min() >= 87  # 174 to 183 images of each digit, half of them held out
    assert counts.max() <= 92


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_ctrl_c_keeps_the_metrics_so_far(tmp_path: Path) -> None:
    output = tmp_path / "run"
    metrics = output / "seed-0" / METRICS
    with Program(LAWA, "demo", "--epochs", "500", "-o", output) as process:
        deadline = time.monotonic() + 120
        while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert process.returncode == 130
    assert errors == f"Stopped. The metrics so far are in {output}.\n"
    assert read_metrics(metrics)[0]["epoch"] == 1
