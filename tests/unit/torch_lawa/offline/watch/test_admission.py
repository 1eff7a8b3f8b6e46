"""Runs that go back, checkpoints that arrive late, and dates that mean nothing."""

from pathlib import Path

import pytest
from support.watching import Trainer, Watch, assert_file


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path / "run")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out" / "averaged.safetensors"


def test_a_run_that_goes_back(trainer: Trainer, tmp_path: Path) -> None:
    out = tmp_path / "averages" / "{step}.safetensors"

    def path(step: int) -> Path:
        return Path(str(out).replace("{step}", str(step)))

    with Watch(trainer.folder, out) as watch:
        trainer.write(*range(100, 1000, 100))
        watch.settle()
        first = trainer.mean(700, 800, 900)
        trainer.write(800)  # it crashed, and went on from 700
        said = watch.settle()
        assert said[0].startswith("step 800: written after step 900: the run went back")
        assert said[1] == "step 800: added (2 of 3, rewritten)"
        assert said[2] == "step 600: added (3 of 3)"  # the trunk of the new branch
        assert_file(path(800), trainer.mean(600, 700, 800))
        assert_file(path(900), first)  # still there, and still in the run
        assert watch.look(5) == []
    with Watch(trainer.folder, out) as watch:
        assert watch.steps == [600, 700, 800]
        trainer.write(850)
        watch.settle()
        assert watch.steps == [700, 800, 850]  # not 900, which is of the abandoned branch
        trainer.write(900)
        watch.settle()
    assert_file(path(900), trainer.mean(800, 850, 900))


def test_a_run_that_goes_back_before_the_window(trainer: Trainer, out: Path) -> None:
    with Watch(trainer.folder, out, k=2) as watch:
        trainer.write(*range(100, 1000, 100))
        watch.settle()
        trainer.write(300)
        watch.settle()
        assert watch.steps == [200, 300]
    assert_file(out, trainer.mean(200, 300))


def test_what_arrives_late_finds_its_place(trainer: Trainer, out: Path) -> None:
    """As with rsync, which keeps dates and goes by the alphabet."""
    trainer.write(800, 900, 1000)
    late = trainer.path(900).rename(trainer.folder / ".late")
    with Watch(trainer.folder, out) as watch:
        watch.settle()
        assert watch.steps == [800, 1000]
        late.rename(trainer.path(900))
        watch.settle()
    assert_file(out, trainer.mean(800, 900, 1000))


def test_files_may_be_added_to_checkpoints(trainer: Trainer, tmp_path: Path) -> None:
    """An evaluation may write its results into the folder of a checkpoint."""
    for step in range(1, 5):
        (trainer.folder / f"checkpoint-{step}").mkdir()
        trainer.write(step)
        trainer.path(step).rename(trainer.folder / f"checkpoint-{step}/model.safetensors")
    for step in (4, 3, 2, 1):
        trainer.date(trainer.folder / f"checkpoint-{step}/model.safetensors")
    with Watch(trainer.folder, tmp_path / "averaged", k=2) as watch:
        watch.settle()
        for step in range(3, 5):
            (trainer.folder / f"checkpoint-{step}/results.json").write_text("{}")
        assert watch.settle() == []
        assert watch.steps == [3, 4]
    assert watch.made == [[3, 4]]
    assert_file(tmp_path / "averaged", trainer.mean(3, 4))


def test_what_was_never_seen_of_an_abandoned_branch(trainer: Trainer, out: Path) -> None:
    """The trainer went on, crashed and went back while no watcher was there."""
    with Watch(trainer.folder, out) as watch:
        trainer.write(700, 800, 900)
        watch.settle()
    trainer.write(1000, 1100, 800, 900)
    with Watch(trainer.folder, out) as watch:
        said = watch.settle()
        assert "written after step 900, step 1000, step 1100: the run went back" in said[0]
        assert watch.steps == [700, 800, 900]
        assert_file(out, trainer.mean(700, 800, 900))
        trainer.write(1000)
        watch.settle()
    assert_file(out, trainer.mean(800, 900, 1000))


def test_the_newest_written_again_in_place_before_one_that_was_never_seen(
    trainer: Trainer, out: Path
) -> None:
    with Watch(trainer.folder, out) as watch:
        trainer.write(700, 800, 900)
        watch.settle()
    trainer.write(1000)
    trainer.write_in_place(900)
    with Watch(trainer.folder, out) as watch:
        watch.settle()
        assert watch.steps == [700, 800, 900]
    assert_file(out, trainer.mean(700, 800, 900))


def test_a_snapshot_that_was_lost_while_the_run_went_back(trainer: Trainer, out: Path) -> None:
    with Watch(trainer.folder, out) as watch:
        trainer.write(*range(100, 1000, 100))
        watch.settle()
        (watch.window.folder / "step-900/step-900.safetensors").unlink()
        trainer.write(300)
        watch.settle()
        assert watch.steps == [100, 200, 300]  # without 900, which is still in the run


def write_copied(trainer: Trainer, *steps: int) -> None:
    """As from a copy of a run, which dates files in any order."""
    trainer.write(*steps)
    for step in reversed(steps):
        trainer.date(trainer.path(step))


def test_dates_mean_nothing_among_what_is_found_together(trainer: Trainer, out: Path) -> None:
    write_copied(trainer, *range(100, 600, 100))
    with Watch(trainer.folder, out, k=3) as watch:
        watch.settle()
        assert watch.steps == [300, 400, 500]
        trainer.write(600)  # 300 leaves, which is dated after 400 and 500
        watch.settle()
        assert watch.steps == [400, 500, 600]
        write_copied(trainer, *range(700, 1300, 100))
        watch.settle()
        assert watch.steps == [1000, 1100, 1200]
        assert watch.look(3) == []
    assert_file(out, trainer.mean(1000, 1100, 1200))
