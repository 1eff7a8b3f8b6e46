"""`lawa report` on the record of the demo's recipe and on small runs."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.report import cifar_rows, only_figures

from torch_lawa.cli import main
from torch_lawa.metrics import Row

RECORD = Path(__file__).parents[2] / "results" / "2026-11-15-digits"
FILES = ["rate-0.2-seeds-0-to-2", "rate-0.2-seeds-3-to-5", "rate-0.2-seeds-100-to-102"]

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "report.md"

Lawa = Callable[..., tuple[int, str, str]]


@pytest.fixture
def lawa(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Lawa:
    """Run the command in this process; returns exit code, stdout and stderr."""

    def go(*words: object, columns: int = 80) -> tuple[int, str, str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        code = main._run([str(word) for word in ("report", *words)])
        return code, *capsys.readouterr()

    return go


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    """Two runs of 15 epochs: averaging sgd saves two epochs of its own and one of adam's."""

    def rows(run: str, raw: list[float], averaged: list[float | None]) -> list[Row]:
        made: list[Row] = []
        for k, values in ((None, raw), (2, averaged)):
            for epoch, loss in enumerate(values, start=1):
                facts = {"recipe": "toy", "run": run, "seed": 0, "epoch": epoch, "k": k}
                facts |= {"step": 10 * epoch, "train_seconds": 3600.0 * epoch, "num_devices": 2}
                facts |= {"weights": "averaged" if k else "raw", "test_loss": loss}
                made += [facts] if loss is not None else []
        return made

    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.mkdir()
    both = rows("sgd", [9, 8, 7, *[6] * 12], [None, 6, 6, *[6] * 11, 5])
    both += rows("adam", [9, 7, 6, *[6] * 12], [None, 7, 7, *[7] * 11, 6.5])
    path.write_text("".join(json.dumps(row) + "\n" for row in both))
    return path


def table(said: str, caption: str) -> list[list[str]]:
    """The cells of the first table after a caption; a cell ends where two spaces follow."""
    lines = said[said.index(caption) :].splitlines()
    rule = next(location for location, line in enumerate(lines) if line.startswith("──"))
    end = next(
        location for location, line in enumerate(lines) if location > rule and not line.strip()
    )
    return [re.split(r"\s{2,}", line.strip()) for line in lines[rule + 1 : end]]


def readme_cells(number: int) -> list[str]:
    """The row of the README's first table for a file: loss and accuracy, alike and usual."""
    lines = (RECORD / "README.md").read_text().splitlines()
    rows = [line for line in lines if re.match(r"\| \d+, \d+, \d+", line)]
    return [cell.strip() for cell in rows[number].strip("|").split("|")[1:]]


@pytest.mark.parametrize("number", range(3))
def test_the_record_of_the_digits_has_the_numbers_of_its_readme(number: int, lawa: Lawa) -> None:
    file = RECORD / f"{FILES[number]}.jsonl"
    code, said, complained = lawa(file, columns=120)
    assert (code, complained) == (0, "")
    texts = said.split("run: test accuracy")
    metrics = json.loads(lawa(file, "--json")[1])["recipes"][0]["metrics"]
    cells = readme_cells(number)
    for text, metric, alike, usual in zip(texts, metrics, cells[:2], cells[2:], strict=True):
        row = table(text, "both BatchNorm re-estimated (3 seeds)")[0]
        assert row[0].startswith("largest ")
        saved, percent, *spread = re.findall(r"[−\d.]+(?: to [−\d.]+)?", alike)
        assert (float(row[3].split(" ± ")[0]), row[4]) == (float(saved), f"{percent}%")
        assert not spread or row[5] == spread[0].replace("−", "-")
        # Raw weights with running statistics are not in the terminal.
        [other] = [main for main in metric["main"] if main["against"] == "usual"]
        amount = other["headline"]["epochs"]
        saved, percent, *_ = re.findall(r"[−\d.]+(?: to [−\d.]+)?", usual)
        assert (round(amount["saved"]["mean"], 1), round(amount["percent"])) == (
            float(saved),
            float(percent),
        )


def test_the_record_s_losses_by_seed_and_behind_are_those_of_its_readme(lawa: Lawa) -> None:
    readme = (RECORD / "README.md").read_text().replace("−", "-")
    by_seed = re.search(r"final loss, by seed: (.*?)\. To its final accuracy: (.*?)\.", readme)
    behind = re.search(r"in (\d+), (\d+) and (\d+) of 135 epochs\.", readme)
    copied = re.search(r"\(usual\) in (\d+), (\d+) and (\d+) of 135", readme)
    assert by_seed is not None
    assert behind is not None
    assert copied is not None
    for number, name in enumerate(FILES):
        _, said, _ = lawa(RECORD / f"{name}.jsonl", "--json")
        loss, accuracy = json.loads(said)["recipes"][0]["metrics"]
        for metric, group in ((loss, by_seed[1]), (accuracy, by_seed[2])):
            saved = [seed["saved"] for seed in metric["main"][0]["final"]["by_seed"]]
            told = ", ".join("never" if number is None else str(number) for number in saved)
            assert told == group.split("; ")[number]
        rows = {row["series"]["batch_norm"]: row for row in loss["windows"]}
        assert rows["re-estimated"]["num_behind"] == int(behind[number + 1])
        assert rows["copied"]["num_behind"] == int(copied[number + 1])
        assert {row["num_compared"] for row in rows.values()} == {135}


@pytest.mark.parametrize("columns", [50, 80, 120])
def test_no_line_is_wider_than_the_terminal_and_piped_text_is_plain(
    columns: int, lawa: Lawa, metrics: Path
) -> None:
    for file in (RECORD / f"{FILES[0]}.jsonl", metrics):
        _, said, _ = lawa(file, columns=columns)
        assert max(len(line) for line in said.splitlines()) <= columns
        assert "\x1b" not in said
        assert "…" not in said


def test_the_paper_s_settings_fit_a_usual_terminal_without_a_broken_word(
    lawa: Lawa, tmp_path: Path
) -> None:
    text = "".join(json.dumps(row) + "\n" for row in cifar_rows(epochs=30))
    (tmp_path / "metrics.jsonl").write_text(text.replace('"test_', '"valid_'))
    _, said, _ = lawa(tmp_path)
    rows = table(said, "At the end")
    assert [row[:2] for row in rows[:3]] == [
        ["raw", "running"],
        ["raw", "re-estimated"],
        ["k = 3", "re-estimated"],
    ]
    words = {word for row in rows for cell in row for word in cell.split() if len(word) > 8}
    assert words == {"re-estimated", "exponential:0.9"}


def test_the_largest_saving_is_at_a_value_of_the_average(tmp_path: Path, lawa: Lawa) -> None:
    """It jumped over the final value of the raw weights, so that alone has a saving."""
    rows = [
        {"epoch": e, "k": k, "weights": "averaged" if k else "raw", "a_loss": loss}
        for k, losses in ((None, (9, 8, 7, 6)), (2, (9, 8, 5, 5)))
        for e, loss in enumerate(losses, start=1)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, said, _ = lawa(tmp_path)
    assert table(said, "against raw") == [["final, best 6.0000", "4", "3", "1", "25%"]]
    assert "Largest: at any value of the average" in said


def test_two_losses_are_both_shown_at_the_end(lawa: Lawa, metrics: Path) -> None:
    """There is room for two; the second is the test loss of a language model."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines() if '"sgd"' in line]
    both = [{**row, "b_loss": 10 + row["test_loss"]} for row in rows]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in both))
    assert table(lawa(metrics)[1], "At the end")[0] == ["raw", "6.0000", "-", "16.0000", "-"]


@pytest.mark.parametrize("name", FILES)
def test_one_run_is_about_a_screen(name: str, lawa: Lawa) -> None:
    """It was twice as long. Other baselines, best values and definitions are on the page."""
    _, said, _ = lawa(RECORD / f"{name}.jsonl")
    assert len(said.splitlines()) <= 55
    assert said.count("epochs to reach") == 2  # one table for each metric
    assert said.count("\nraw  ") == 2  # running and re-estimated statistics


def test_equal_savings_are_one_row(lawa: Lawa, metrics: Path) -> None:
    _, said, _ = lawa(metrics)
    rows = table(said, "sgd, k = 2 against raw (1 seed)")
    assert [row[0] for row in rows] == ["largest 6.0000", "final, best 6.0000"]


def test_savings_are_in_epochs_time_and_gpu_hours_against_every_baseline(
    lawa: Lawa, metrics: Path
) -> None:
    code, said, _ = lawa(metrics.parent)
    assert code == 0
    own = table(said, "sgd, k = 2 against raw (1 seed)")
    assert own[0] == ["largest 6.0000", "4", "2", "2", "50%", "2:00:00", "4.00"]
    other = table(said, "Averages against the raw weights of other runs")
    assert other[0] == ["sgd, k = 2", "adam, raw", "1", "6.0000", "1", "1"]
    assert other[1] == ["adam, k = 2", "sgd, raw", "1", "7.0000", "never", "never"]
    assert "adam, k = 2: behind its raw weights in 13 of 14" in said
    assert "adam, k = 2 against raw (1 seed)" in said
    assert "At its end the average was better than the baseline ever was." in said
    assert said.index("2 epochs saved (50%).") < said.index("epochs to reach")


def test_of_many_methods_the_main_average_alone_is_compared_with_other_runs(
    lawa: Lawa, metrics: Path
) -> None:
    """Five runs with six methods each had a table of 120 rows."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows += [{**row, "weights": "ema", "k": None} for row in rows if row["k"]]
    rows += [{**row, "batch_norm": "re-estimated"} for row in rows if not row["k"]]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = lawa(metrics)[1]
    other = table(said, "Averages against the raw weights of other runs")
    assert [row[:2] for row in other] == [["sgd, k = 2", "adam, raw"], ["adam, k = 2", "sgd, raw"]]
    (metric,) = json.loads(lawa(metrics, "--json")[1])["recipes"][0]["metrics"]
    assert len(metric["main"]) > 4  # they are all there and on the page


def test_one_empty_line_is_between_two_parts(lawa: Lawa, metrics: Path) -> None:
    _, said, _ = lawa(metrics)
    assert "\n\n\n" not in said
    for begin in ("sgd, k = 2 against", "adam, k = 2 against", "Averages against", "- sgd, k = 2"):
        assert f"\n\n{begin}" in said


def test_a_baseline_that_never_reached_the_value_gives_a_lower_bound(
    lawa: Lawa, metrics: Path
) -> None:
    better = metrics.read_text().replace('"averaged", "test_loss": 6', '"averaged", "test_loss": 5')
    metrics.write_text(better)
    _, said, _ = lawa(metrics, columns=200)
    assert "At epoch 2 the average was better than the baseline ever was" in said
    assert "not matched in 15 epochs, so more than 13 saved" in said


def test_one_metric_and_one_window_can_be_asked_for(lawa: Lawa) -> None:
    file = RECORD / f"{FILES[0]}.jsonl"
    _, said, _ = lawa(file, "--metric", "test_accuracy", "--k", 6)
    assert "test accuracy" in said
    assert "test loss" not in said
    code, _, complained = lawa(file, "--k", 7)
    assert code == 2
    assert "there are [6]" in complained
    code, _, complained = lawa(file, "--metric", "speed")
    assert code == 2
    assert "there are test_loss, test_accuracy" in complained


def test_a_report_is_a_page_figures_and_json(lawa: Lawa, metrics: Path, tmp_path: Path) -> None:
    output = tmp_path / "report"
    code, said, complained = lawa(metrics, "-o", output, "--title", "Two runs & a page")
    assert (code, complained) == (0, f"The page is {output / 'report.html'}.\n")
    assert "sgd, k = 2 against raw" in said
    assert "<title>Two runs &amp; a page</title>" in (output / "report.html").read_text()
    written = json.loads((output / "report.json").read_bytes())
    assert written["recipes"][0]["recipe"] == "toy"
    figures = sorted(p.relative_to(output).as_posix() for p in (output / "figures").rglob("*.*"))
    assert figures == sorted(written["figures"])
    assert {Path(name).suffix for name in figures} == {".png", ".svg"}


@only_figures("saving")
def test_nothing_is_overwritten_unless_asked_and_then_no_old_figure_stays(
    lawa: Lawa, metrics: Path, tmp_path: Path
) -> None:
    output = tmp_path / "report"
    lawa(metrics, "-o", output)
    mine = output / "figures" / "mine.png"
    mine.write_bytes(b"mine")
    before = (output / "report.html").read_bytes()
    code, said, complained = lawa(metrics, "-o", output)
    assert (code, said) == (1, "")
    assert "already holds report.html, report.json, figures. Pass --overwrite" in complained
    assert (output / "report.html").read_bytes() == before
    drawn = set(json.loads((output / "report.json").read_bytes())["figures"])
    only = "".join(line + "\n" for line in metrics.read_text().splitlines() if '"sgd"' in line)
    metrics.write_text(only)
    assert lawa(metrics, "-o", output, "--overwrite")[0] == 0
    left = {p.relative_to(output).as_posix() for p in (output / "figures").iterdir()}
    assert {"figures/saving.png", "figures/mine.png"} <= left < drawn | {"figures/mine.png"}
    assert mine.read_bytes() == b"mine"
    assert not any("adam" in name for name in left)


@pytest.mark.parametrize("by", ["SIGKILL", "SIGINT"])
@only_figures("saving")
def test_no_figure_of_an_interrupted_report_stays(
    lawa: Lawa, metrics: Path, tmp_path: Path, by: str
) -> None:
    """It stops after the figure of adam; the next report has no such run."""
    output = tmp_path / "report"
    program = f"""
import os, signal, sys
from lawa_lab.report.figures import files
{ONE_FIGURE}
real = files.save

def save(drawing, folder):
    real(drawing, folder)
    if "adam" in drawing.name:
        os.kill(os.getpid(), signal.{by})

files.save = save
main(sys.argv[1:])
"""
    command = [sys.executable, "-c", program, "report", str(metrics), "-o", str(output)]
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0
    assert not (output / "report.html").exists()
    (output / "figures" / f"saving-adam.png.{'0' * 16}.partial").touch()
    only = "".join(line + "\n" for line in metrics.read_text().splitlines() if '"sgd"' in line)
    metrics.write_text(only)
    assert lawa(metrics, "-o", output, "--overwrite")[0] == 0
    assert {p.name for p in (output / "figures").iterdir()} == {"saving.png", "saving.svg"}


ONE_FIGURE = (
    "from torch_lawa.cli.main import main; from lawa_lab.report.figures import FIGURES; "
    "[FIGURES.pop(name) for name in [*FIGURES] if name != 'saving']"
)


def run_without(module: str, *words: object) -> subprocess.CompletedProcess[str]:
    program = f"import sys; sys.modules[{module!r}] = None; {ONE_FIGURE}; main(sys.argv[1:])"
    command = [sys.executable, "-c", program, "report", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_without_matplotlib_the_tables_come_all_the_same(metrics: Path, tmp_path: Path) -> None:
    assert run_without("matplotlib", metrics).returncode == 0
    found = run_without("matplotlib", metrics, "-o", tmp_path / "report")
    assert found.returncode == 1
    assert "sgd, k = 2 against raw" in found.stdout
    assert "pip install 'torch-lawa[lab]'" in found.stderr
    assert json.loads((tmp_path / "report" / "report.json").read_bytes())["figures"] == []


def test_without_jinja2_the_tables_and_figures_come_all_the_same(
    metrics: Path, tmp_path: Path
) -> None:
    found = run_without("jinja2", metrics, "-o", tmp_path / "report")
    assert found.returncode == 1
    assert "sgd, k = 2 against raw" in found.stdout
    assert "pip install 'torch-lawa[lab]'" in found.stderr
    assert (tmp_path / "report" / "figures" / "saving.png").exists()


def test_event_files_are_written_beside_the_tables(
    lawa: Lawa, metrics: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "events"
    code, said, complained = lawa(metrics, "--tensorboard", folder)
    assert code == 0
    assert "sgd, k = 2 against raw" in said
    assert complained == f"4 series in {folder}: tensorboard --logdir {folder}\n"
    assert len(list(folder.rglob("events.out.tfevents.*"))) == 4
    code, said, complained = lawa(metrics, "--tensorboard", folder)
    assert code == 1
    assert "already holds event files. Pass --overwrite" in complained


@only_figures("saving")
def test_json_is_alone_on_stdout(lawa: Lawa, metrics: Path, tmp_path: Path) -> None:
    code, said, _ = lawa(metrics, "--json", "-o", tmp_path / "report")
    told: dict[str, Any] = json.loads(said)
    assert code == 0
    assert (
        told["recipes"][0]["metrics"][0]["main"][0]["headline"]["gpu_hours"]["saved"]["mean"] == 4
    )


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["nowhere.jsonl"], 2, "'nowhere.jsonl' does not exist"),
        ([], 2, "Missing argument 'METRICS...'"),
        ([RECORD / "README.md"], 1, "README.md, line 1: not a row of metrics"),
        ([RECORD / "raw.jsonl"], 1, "raw.jsonl: no row has `weights`"),
        ([RECORD.parent / "2026-11-15-offline"], 1, "raw-six.jsonl"),
        ([RECORD / f"rate-{r}-seeds-0-to-2.jsonl" for r in (0.1, 0.2)], 1, "step 28 of seed 0"),
    ],
)
def test_mistakes_are_named(words: list[object], code: int, message: str, lawa: Lawa) -> None:
    found, said, complained = lawa(*words)
    assert (found, said) == (code, "")
    assert message in complained


def test_the_ends_of_runs_of_different_lengths_are_those_of_named_pairs(
    lawa: Lawa, metrics: Path
) -> None:
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    some = [row for row in rows if row["run"] == "sgd" or row["epoch"] <= 4]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in some))
    said = " ".join(lawa(metrics)[1].split())
    assert "ended at epoch 4, the average at 15. (sgd, k = 2 against adam, raw)" in said
    assert "ended at epoch 15, the average at 4. (adam, k = 2 against sgd, raw)" in said


def test_a_run_without_rows_yet_is_left_out_with_a_note(lawa: Lawa, metrics: Path) -> None:
    empty = metrics.parents[1] / "later" / "metrics.jsonl"
    empty.parent.mkdir()
    empty.touch()
    code, said, noted = lawa(metrics.parents[1])
    assert (code, said) == lawa(metrics)[:2]
    assert noted == f"Note: {empty} is empty, so it is left out.\n"
    assert lawa(metrics.parent, empty.parent) == (code, said, noted)  # as of `runs/*`
    for path in (empty.parent, empty):
        code, _, told = lawa(path)
        assert code == 1
        assert f"{empty}: is empty" in told


def test_a_run_without_averages_is_said_to_be_one(lawa: Lawa, metrics: Path) -> None:
    raw = [line for line in metrics.read_text().splitlines() if '"raw"' in line]
    metrics.write_text("\n".join(raw) + "\n")
    code, _, complained = lawa(metrics)
    assert code == 1
    assert "only rows of raw weights" in complained


def test_the_tables_need_no_torch(metrics: Path) -> None:
    assert run_without("torch", metrics).returncode == 0
    assert run_without("torch", "--help").returncode == 0


def test_a_bound_that_only_some_seeds_have_says_so(tmp_path: Path, lawa: Lawa) -> None:
    rows = [
        {"epoch": epoch, "seed": seed, "k": k, "weights": "averaged" if k else "raw", "a_loss": v}
        for seed, averaged in ((0, 1.0), (1, 9.5))
        for k, values in ((None, (9.0, 8.0, 7.0)), (2, (averaged,) * 3))
        for epoch, v in enumerate(values, start=1)
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, said, _ = lawa(path)
    assert code == 0
    assert "> 2 in 1/2" in said


def test_a_plain_run_comes_before_one_that_wraps_it(tmp_path: Path, lawa: Lawa) -> None:
    for folder, run in (("a", "lookahead(sgd)"), ("b", "sgd")):
        rows = [
            {"run": run, "epoch": e, "k": k, "weights": "averaged" if k else "raw", "a_loss": 9 - e}
            for e in (1, 2)
            for k in (None, 2)
        ]
        (tmp_path / folder).mkdir()
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / folder / "metrics.jsonl").write_text(text)
    _, said, _ = lawa(tmp_path)
    assert said.index("\nsgd, k = 2") < said.index("\nlookahead(sgd), k = 2")


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_the_page_is_written_although_nobody_reads_the_tables(
    words: tuple[str, ...], metrics: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", f"{ONE_FIGURE}; main()", "report", metrics]
    command += ["-o", tmp_path / "out"]
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run([*command, *words], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (tmp_path / "out/report.html").stat().st_size > 10_000
    assert "The page is" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "Exception ignored" not in ended.stderr


@pytest.mark.parametrize("record", ["2026-11-15-digits", "2026-11-15-digits-loop"])
def test_a_record_of_named_files_is_read_as_one_run_per_file(record: str, lawa: Lawa) -> None:
    code, said, complained = lawa(RECORD.parent / record, "--json", "--metric", "test_loss")
    assert (code, complained) == (0, "")
    runs = {row["run"] for row in json.loads(said)["recipes"][0]["metrics"][0]["runs"]}
    assert runs == {path.stem for path in (RECORD.parent / record).glob("rate-*.jsonl")}
    alone = RECORD.parent / record / f"{FILES[0]}.jsonl"
    _, told, _ = lawa(alone, "--json", "--metric", "test_loss")
    one = json.loads(told)["recipes"][0]["metrics"][0]["main"][0]
    rows = json.loads(said)["recipes"][0]["metrics"][0]["main"]
    (same,) = [r for r in rows if r["averaged_run"] == FILES[0] and r["against"] == "alike"]
    assert same["headline"] == one["headline"]


@only_figures("saving", "methods")
def test_other_methods_stand_beside_the_window(tmp_path: Path, lawa: Lawa, metrics: Path) -> None:
    sgd = [line for line in metrics.read_text().splitlines() if '"sgd"' in line]
    ema = [
        {**row, "weights": "ema", "k": None, "test_loss": 8.5 if row["epoch"] < 3 else 6.0}
        for row in map(json.loads, sgd)
        if row["weights"] == "raw"
    ]
    metrics.write_text("\n".join([*sgd, *map(json.dumps, ema)]) + "\n")
    code, said, _ = lawa(metrics, "-o", tmp_path / "report")
    assert code == 0
    assert table(said, "At the end") == [
        ["raw", "6.0000", "-"],
        ["k = 2", "5.0000", "2"],  # saved
        ["ema", "6.0000", "1"],
    ]
    page = (tmp_path / "report" / "report.html").read_text()
    assert "Other methods of averaging" in page
    assert (tmp_path / "report" / "figures" / "methods.png").exists()


@only_figures("saving")
def test_a_new_figure_is_one_entry_of_the_table(tmp_path: Path, lawa: Lawa, metrics: Path) -> None:
    from lawa_lab.report.figures import FIGURES, register_figure
    from lawa_lab.report.figures.axes import Panel
    from lawa_lab.report.figures.scene import Scene
    from lawa_lab.report.runs import Run

    try:

        @register_figure(
            "final", "A new figure", "Its caption.", sentence=lambda scene, run: f"Of {run.name}."
        )
        def _(scene: Scene, run: Run) -> list[Panel]:
            metric = scene.shown[0].metric
            return [scene.panel(metric, scene.lines(run, run.series, metric), run)]

        assert lawa(metrics, "-o", tmp_path / "report")[0] == 0
        _, shown, _ = lawa("--help")
    finally:
        del FIGURES["final"]
    page = (tmp_path / "report" / "report.html").read_text()
    for part in ("<h3>A new figure</h3>", "Its caption.", "<p>Of sgd.</p>"):
        assert part in page
    figures = json.loads((tmp_path / "report" / "report.json").read_bytes())["figures"]
    assert {"figures/final.png", "figures/final-adam.svg"} <= set(figures)
    assert re.search(r"final +A new figure", shown)


def test_the_guide_s_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "runs" / "cifar"
    folder.mkdir(parents=True)
    rows = [row for name in ("sgd", "lookahead(sgd)") for row in cifar_rows(epochs=60, run=name)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    _, comparing = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(comparing, names)
    assert names["compared"].headline.epochs.saved.mean > 0
