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
from support.training import smoke_plan

from lawa_lab.recipes.catalog.digits import DigitsConfig
from lawa_lab.recipes.run_folder import RunFolder
from lawa_lab.recipes.tasks.digits import build_model, evaluate, load_data
from lawa_lab.report import frontier_words
from lawa_lab.report.frontier import Frontier
from lawa_lab.report.runs import load_runs
from lawa_lab.report.summary import MetricReport, summarise
from torch_lawa.metrics import Row, read_metrics

EPOCHS, K = 4, 2
BUDGETS = (1, 2, 4)  # an eighth of 4 epochs is rounded up to one
METRICS = "metrics.jsonl"
FILES = ["demo.json", "frontier.png", "seed-4", "seed-5", "seed-6"]


Said = tuple[str, str]  # on stdout and stderr
Run = tuple[Path, Said]


def demo(output: Path, *arguments: str, epochs: int = EPOCHS) -> Said:
    short = ["demo", "--epochs", str(epochs), "--k", str(K), "--seed", "4", "-o", str(output)]
    with Program(LAWA, *short, *arguments) as process:
        said, errors = process.communicate()
    assert process.returncode == 0, errors
    return said, errors


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    output = tmp_path_factory.mktemp("demo") / "runs" / "demo"
    return output, demo(output)


@pytest.fixture(scope="module")
def again(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A shorter demo with the same seeds, over an earlier one and files of somebody else."""
    output = tmp_path_factory.mktemp("again")
    (output / "demo.json").write_text('{"command": "lawa demo", "seeds": [4, 9]}')
    for name in ("seed-4/constant", "seed-9/constant", "seed-9/epochs-6"):
        RunFolder(output / name).write_plan(smoke_plan("digits"), {})
        (output / name / METRICS).write_text("old\n")
    (output / "seed-9" / "notes.txt").write_text("mine")
    (output / "seed-9" / "mine").mkdir()
    (output / "seed-9" / "mine" / METRICS).write_text("of another program\n")
    return output, demo(output, "--overwrite", "--json", epochs=1)


def rows_of(output: Path, run: str = "constant") -> list[Row]:
    paths = sorted(output.glob(f"seed-*/{run}/{METRICS}"))
    return [row for path in paths for row in read_metrics(path)]


def loss_of(output: Path) -> tuple[MetricReport, Frontier]:
    folders = [
        output / f"seed-{seed}" for seed in json.loads((output / "demo.json").read_bytes())["seeds"]
    ]
    report = summarise(load_runs(folders)).recipes[0].metrics[0]
    assert report.metric.name == "test_loss"
    assert report.frontier is not None
    return report, report.frontier


def test_the_folder_holds_the_runs_and_nothing_else(run: Run) -> None:
    output, (_, errors) = run
    assert sorted(path.name for path in output.iterdir()) == FILES
    runs = ["constant", *(f"epochs-{budget}" for budget in BUDGETS)]
    assert sorted(path.name for path in (output / "seed-5").iterdir()) == runs
    assert (output / "frontier.png").read_bytes().startswith(b"\x89PNG")
    assert errors == ""


def test_the_folder_says_what_was_run(run: Run) -> None:
    demo = json.loads((run[0] / "demo.json").read_text())
    assert demo == {"command": "lawa demo --seed 4 --k 2 --epochs 4", "seeds": [4, 5, 6]}
    for name, schedule, epochs in (("constant", "constant", EPOCHS), ("epochs-2", "cosine", 2)):
        config = json.loads((run[0] / "seed-5" / name / "config.json").read_text())
        assert (config["recipe"], config["seed"]) == ("digits", 5)
        hyper = config["hyperparameters"]
        assert (hyper["schedule"], hyper["epochs"], hyper["ks"]) == (schedule, epochs, [K])


def test_the_average_is_evaluated_at_every_epoch_and_annealed_runs_at_their_end(run: Run) -> None:
    rows = rows_of(run[0])
    found = [(r["seed"], r["epoch"], r["weights"], r["k"], r["batch_norm"]) for r in rows]
    expected: list[tuple[Any, ...]] = []
    for seed in (4, 5, 6):
        for epoch in range(1, EPOCHS + 1):
            expected.append((seed, epoch, "raw", None, None))
            expected.append((seed, epoch, "raw", None, "re-estimated"))
            expected.append((seed, epoch, "averaged", K, "re-estimated"))
    assert found == expected
    assert all(0.0 < row["test_loss"] < 10.0 for row in rows)
    assert rows[-1]["test_accuracy"] > 0.8  # it learns: chance is 0.1
    assert rows[-1]["step"] == EPOCHS * 28
    for budget in BUDGETS:
        assert {row["epoch"] for row in rows_of(run[0], f"epochs-{budget}")} == {budget}


def test_the_saved_average_is_the_one_that_was_measured(run: Run) -> None:
    config = DigitsConfig(epochs=EPOCHS, ks=(K,))
    model = build_model(config)
    model.load_state_dict(load_file(run[0] / "seed-4" / "constant" / "averaged.safetensors"))
    (recorded,) = (
        row
        for row in rows_of(run[0])
        if (row["seed"], row["epoch"], row["weights"]) == (4, EPOCHS, "averaged")
    )
    # To the last bit: tests have one thread, as the recipe does.
    measured = evaluate(model.eval(), load_data(config))
    assert measured == {name: recorded[name] for name in ("test_loss", "test_accuracy")}


def test_what_a_person_reads_agrees_with_the_metrics(run: Run) -> None:
    output, (said, _) = run
    text = " ".join(said.split())
    loss, frontier = loss_of(output)
    for line in ("seed 4: ", "seed 5: ", "seed 6: ", "annealed runs (cosine to zero)"):
        assert line in text
    assert frontier_words.headline("digits", loss.metric, frontier) in text
    assert frontier_words.leads(loss.metric, frontier) in text
    assert f"lawa report {output}" in text
    assert str(output) in said
    assert "\x1b" not in said  # nothing live, no colours: this is no terminal


def test_the_same_seed_gives_the_same_values(run: Run, again: Run) -> None:
    def first_epoch(output: Path) -> list[Row]:
        rows = [row for row in rows_of(output) if row["epoch"] == 1]
        return [
            {k: v for k, v in row.items() if not k.endswith(("_seconds", "_epochs"))}
            for row in rows
        ]

    assert first_epoch(again[0]) == first_epoch(run[0]) != []


def test_json_is_alone_on_stdout(again: Run) -> None:
    output, (said, _) = again
    found = json.loads(said)
    assert sorted(found["files"]) == FILES
    loss = found["report"]["recipes"][0]["metrics"][0]
    assert loss["runs"][0]["seeds"] == [4, 5, 6]
    _, frontier = loss_of(output)
    assert frontier.headline is not None
    assert loss["frontier"]["headline"]["saving"]["target"] == frontier.headline.saving.target
    assert len(found["findings"]) == 2


def test_overwrite_replaces_the_runs_and_leaves_other_files_alone(again: Run) -> None:
    output, _ = again
    assert sorted(p.name for p in output.iterdir()) == [*FILES, "seed-9"]
    assert sorted(p.name for p in (output / "seed-9").iterdir()) == ["mine", "notes.txt"]
    assert (output / "seed-9" / "mine" / METRICS).exists()
    assert len(read_metrics(output / "seed-4" / "constant" / METRICS)) == 3


def test_the_test_images_do_not_depend_on_anything_but_their_share() -> None:
    first, second = load_data(DigitsConfig()), load_data(DigitsConfig(epochs=9, width=3))
    assert first.test_labels.tolist() == second.test_labels.tolist()
    counts = first.test_labels.bincount()
    assert (len(first.train_images), len(first.test_images)) == (898, 899)
    assert counts.min() >= 87  # 174 to 183 images of each digit, half of them held out
    assert counts.max() <= 92


def test_validation_images_are_training_images() -> None:
    usual, split = load_data(DigitsConfig()), load_data(DigitsConfig(validation_fraction=0.3))
    assert (len(split.train_images), len(split.test_images)) == (628, 270)

    def labels_and_peaks(*parts: Any) -> list[tuple[int, int]]:
        """Normalisation moves and scales all pixels alike: compare where the brightest one is."""
        return sorted(
            (int(label), int(image.argmax()))
            for images, labels in parts
            for image, label in zip(images, labels, strict=True)
        )

    assert labels_and_peaks(
        (split.train_images, split.train_labels), (split.test_images, split.test_labels)
    ) == labels_and_peaks((usual.train_images, usual.train_labels))


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_ctrl_c_keeps_the_metrics_so_far(tmp_path: Path) -> None:
    output = tmp_path / "run"
    metrics = output / "seed-0" / "constant" / METRICS
    with Program(LAWA, "demo", "--epochs", "31", "-o", output) as process:
        deadline = time.monotonic() + 120
        while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert process.returncode == 130
    assert errors == f"Stopped. The metrics so far are in {output}.\n"
    assert read_metrics(metrics)[0]["epoch"] == 1
