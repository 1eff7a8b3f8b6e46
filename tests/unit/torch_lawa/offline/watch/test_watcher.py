"""Which checkpoints of a live run are averaged, and when. Values are compared with NumPy's."""

import errno
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save, save_file
from support.watching import Trainer, Watch, Weights, assert_file, mean_of

from torch_lawa.errors import ConfigError, FormatError, OutputError
from torch_lawa.offline.threads import Meter
from torch_lawa.offline.watch import watcher as watching
from torch_lawa.offline.watch.watcher import watch_run


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path / "run")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out" / "averaged.safetensors"


def test_a_new_average_for_each_checkpoint_though_the_trainer_keeps_one(
    trainer: Trainer, out: Path
) -> None:
    with Watch(trainer.folder, out) as watch:
        for step in range(100, 700, 100):
            trainer.write(step)
            if step > 100:
                trainer.delete(step - 100)
            said = watch.settle()
            taken = min(step // 100, 3)
            assert said == [f"step {step}: added ({taken} of 3)"]
            assert out.exists() == (step >= 300)
            if step >= 300:
                assert_file(out, trainer.mean(step - 200, step - 100, step))
    assert watch.made == [[s - 200, s - 100, s] for s in range(300, 700, 100)]
    assert sorted(p.name for p in watch.window.folder.glob("step-*")) == [
        "step-400", "step-500", "step-600",
    ]  # fmt: skip


def test_nothing_is_taken_before_it_has_settled(trainer: Trainer, out: Path) -> None:
    whole = save(trainer.draw(100))
    with Watch(trainer.folder, out, k=1) as watch:
        with trainer.path(100).open("wb") as file:
            for byte in range(0, len(whole), 40):
                file.write(whole[byte : byte + 40])
                file.flush()
                assert watch.look() == []
        assert watch.look() == []  # whole now, but unchanged for less than 20 seconds
        assert watch.look() == ["step 100: added (1 of 1)"]
        assert_file(out, trainer.mean(100))


def test_a_file_of_its_final_size_is_not_taken_while_it_is_filled(
    trainer: Trainer, out: Path
) -> None:
    with Watch(trainer.folder, out, k=1) as watch:
        for _ in range(5):  # it opens without an error each time
            trainer.path(100).write_bytes(save(trainer.draw(100)))
            trainer.date(trainer.path(100))
            assert watch.look() == []
        watch.settle()
        assert_file(out, trainer.mean(100))


def test_none_overtakes_one_that_is_still_being_written(trainer: Trainer, out: Path) -> None:
    with Watch(trainer.folder, out, k=2) as watch:
        trainer.write(100, 200, 300)
        for _ in range(4):
            trainer.date(trainer.path(200))
            watch.look()
        assert watch.steps == [100]
        trainer.date(trainer.path(200), minutes=-10)
        watch.settle()
        assert watch.made == [[200, 300]]


def test_a_corrupt_file_is_reported_once_and_left_out(trainer: Trainer, out: Path) -> None:
    with Watch(trainer.folder, out, k=2) as watch:
        trainer.write(100)
        trainer.path(200).write_bytes(save(trainer.draw(200))[:-3])
        trainer.write(300)
        said = watch.settle()
        assert len(said) == 3
        assert "step 200: skipped" in said[0]
        assert "truncated" in said[0]
        assert_file(out, trainer.mean(100, 300))
        assert watch.look(5) == []
        trainer.path(200).write_bytes(save(trainer.values[200]))  # mended, but dated before 300
        trainer.date(trainer.path(200), minutes=-2)
        watch.settle()
        assert_file(out, trainer.mean(200, 300))


def test_the_newest_whole_window_where_the_last_one_is_broken(trainer: Trainer, out: Path) -> None:
    trainer.write(100, 200, 300)
    trainer.path(400).write_bytes(b"cut off")
    with Watch(trainer.folder, out, k=3) as watch:
        watch.settle()
        assert watch.made == [[100, 200, 300]]
        trainer.write(*range(500, 1100, 100))
        trainer.path(1100).write_bytes(b"cut off")
        watch.settle()
    assert watch.made[1:] == [[800, 900, 1000]]


@pytest.mark.parametrize("each", [False, True])
def test_several_landed_at_once(trainer: Trainer, tmp_path: Path, each: bool) -> None:
    out = tmp_path / ("averages/{step}.safetensors" if each else "averaged.safetensors")
    trainer.write(*range(100, 700, 100))
    with Watch(trainer.folder, out) as watch:
        watch.settle()
        assert watch.made == [[400, 500, 600]]  # not what was there long before
        trainer.write(*range(700, 1300, 100))
        watch.settle()
    ends = range(700, 1300, 100) if each else [1200]
    assert watch.made[1:] == [[s - 200, s - 100, s] for s in ends]
    for end in ends:
        path = Path(str(out).replace("{step}", str(end)))
        assert_file(path, trainer.mean(end - 200, end - 100, end))


def test_waiting_is_said_once(tmp_path: Path, out: Path) -> None:
    with Watch(tmp_path / "later", out, k=1) as watch:
        assert [text[:8] for text in watch.look(5)] == ["waiting "]
        trainer = Trainer(tmp_path / "later")
        watch.look()
        trainer.write(1)
        assert watch.settle()[-1:] == ["step 1: added (1 of 1)"]


def test_a_run_whose_name_has_a_number(tmp_path: Path, out: Path) -> None:
    trainer = Trainer(tmp_path / "gpt_ep10")
    with Watch(trainer.folder, out, k=2) as watch:
        trainer.write(100)
        watch.settle()
        trainer.write(200)
        trainer.delete(100)
        watch.settle()
    assert_file(out, trainer.mean(100, 200))


def test_a_full_disk_costs_no_checkpoint(
    trainer: Trainer, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Watch(trainer.folder, out, k=2) as watch:
        trainer.write(100, 200)
        with monkeypatch.context() as patched:
            patched.setattr(watching, "run_average", full)
            said = watch.settle()
            assert [text for text in said if "No space left" in text] == said[2:]
            assert watch.look(5) == []
            trainer.write(300)
            trainer.delete(100, 200)
            assert len(watch.settle()) == 2
        watch.look()
    assert_file(out, trainer.mean(200, 300))


def test_checkpoints_that_do_not_fit_are_reported_until_they_do(
    trainer: Trainer, out: Path
) -> None:
    def write(step: int, **arrays: Any) -> Weights:
        save_file(arrays, trainer.path(step))
        return arrays

    with Watch(trainer.folder, out, k=2) as watch:
        write(1, w=np.ones(3, np.float32))
        two = write(2, w=np.full(4, 2, np.float32))
        said = watch.settle()
        assert len(said) == 3
        assert "no average" in said[2]
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(watching, "plan_found", None)  # it is not even tried
            assert watch.look(3) == []
        three = write(3, w=np.full(4, 5, np.float32))
        watch.settle()
    assert_file(out, mean_of([two, three]))


def test_stopped_between_two_pieces(trainer: Trainer, out: Path) -> None:
    with Watch(trainer.folder, out, k=2) as watch:
        trainer.write(100, 200)
        watch.settle()
        trainer.write(300)
        add = Meter.add

        def stopping(meter: Meter, num_bytes: int) -> None:
            watch.stop.set()
            add(meter, num_bytes)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Meter, "add", stopping)
            watch.settle()
        assert_file(out, trainer.mean(100, 200))
        assert watch.steps == [200, 300]
    with Watch(trainer.folder, out, k=2) as again:
        again.look()
    assert_file(out, trainer.mean(200, 300))


def test_once(trainer: Trainer, out: Path) -> None:
    with pytest.raises(FormatError, match="does not exist yet"):
        watch_run(trainer.folder / "missing", out, once=True)
    trainer.write(100, 200)
    watch_run(trainer.folder, out, k=3, once=True, settle=0.01)
    assert not out.exists()
    trainer.write(300, 400)
    said: list[str] = []
    watch_run(trainer.folder, out, k=3, once=True, settle=0.01, on_message=said.append)
    assert_file(out, trainer.mean(200, 300, 400))
    stamp = out.stat().st_mtime_ns
    watch_run(trainer.folder, out, k=3, once=True, settle=60)  # nothing to wait for
    assert out.stat().st_mtime_ns == stamp
    (trainer.folder / "names").mkdir()
    save_file({"w": np.ones(1)}, trainer.folder / "names/best.safetensors")
    with pytest.raises(FormatError, match="step or epoch"):
        watch_run(trainer.folder / "names", out.with_name("other"), once=True, settle=0)


def test_until_stopped(trainer: Trainer, out: Path) -> None:
    trainer.write(100)
    stop = threading.Event()
    watch_run(
        trainer.folder, out, k=1, poll=0.01, stop=stop, on_average=lambda averaged: stop.set()
    )
    assert_file(out, trainer.mean(100))


def test_once_says_that_there_are_too_few(trainer: Trainer, out: Path) -> None:
    trainer.write(100, 200)
    said: list[str] = []
    watch_run(trainer.folder, out, k=3, once=True, settle=0, on_message=said.append)
    assert said[-1] == "no average yet: 2 of 3 checkpoints"
    assert not out.exists()


def test_once_says_that_nothing_is_new(trainer: Trainer, out: Path) -> None:
    said: list[str] = []

    def once() -> str:
        watch_run(trainer.folder, out, k=2, once=True, settle=0, on_message=said.append)
        return said[-1]

    trainer.write(100, 200)
    assert once() == "step 200: added (2 of 2)"
    assert once() == f"no new checkpoints: {out} is up to date"
    trainer.write(300)
    assert once() == "step 300: added (2 of 2)"


def test_mistakes_are_refused_at_the_start(trainer: Trainer, out: Path) -> None:
    trainer.write(1)
    for problem, output, how in [
        ("inside the run", trainer.folder / "averaged", {}),
        ("inside the run", trainer.folder / "averages/{step}", {}),
        ("must be a path", "s3://bucket/averaged", {}),
        ("{epoch} would not be replaced", out.with_name("{epoch}.safetensors"), {}),
        ("{step:x} would not", out.with_name("{step}-{step:x}"), {}),
        ("k=0", out, {"k": 0}),
        ("weights", out, {"k": 3, "coefficients": "explicit:1,2"}),
        ("dtype", out, {"dtype": "float7"}),
    ]:
        with pytest.raises((ConfigError, OutputError), match=problem):
            Watch(trainer.folder, output, **how)  # type: ignore[arg-type]
    out.parent.mkdir()
    out.write_bytes(b"somebody's")
    with pytest.raises(OutputError, match="already exists"):
        Watch(trainer.folder, out)
    assert out.read_bytes() == b"somebody's"
    assert os.listdir(trainer.folder) == ["step-1.safetensors"]
