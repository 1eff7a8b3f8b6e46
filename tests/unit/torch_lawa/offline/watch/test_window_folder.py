"""The window of a watch on disk: runs that go back, files that change, watchers that come back."""

import errno
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save
from support.damage import damaged_documents
from support.watching import Trainer, Watch, assert_file, folders_of

from torch_lawa.errors import ConfigError, OutputError, StoreError
from torch_lawa.offline.options import AverageOptions
from torch_lawa.offline.watch import checkpoint_files, window_folder, window_manifest
from torch_lawa.offline.watch.watcher import Watcher, watch_run


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path / "run")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out" / "averaged.safetensors"


def test_a_rewrite_in_place_is_noticed_and_dropped(trainer: Trainer, out: Path) -> None:
    with Watch(trainer.folder, out) as watch:
        trainer.write(100, 200, 300)
        watch.settle()
        before = out.read_bytes()
        trainer.write_in_place(300)
        said = watch.look()
        assert len(said) == 1
        assert "step 300" in said[0]
        assert "changed after it was taken" in said[0]
        assert watch.steps == [100, 200]
        assert out.read_bytes() == before
        assert watch.settle() == ["step 300: added (3 of 3)"]
    assert_file(out, trainer.mean(100, 200, 300))


def test_a_rewrite_during_the_average_is_not_published(
    trainer: Trainer, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch_lawa.offline.watch import watcher as module

    average = module.run_average
    with Watch(trainer.folder, out, k=2) as watch:
        trainer.write(100, 200)
        watch.settle()
        old = out.read_bytes()
        trainer.write(300)

        def rewriting(*args: Any, **how: Any) -> Any:
            done = average(*args, **how)
            trainer.write_in_place(300)
            return done

        monkeypatch.setattr(module, "run_average", rewriting)
        watch.settle()
        assert out.read_bytes() == old
        monkeypatch.undo()
        watch.look(2)
        watch.settle()
    assert_file(out, trainer.mean(200, 300))


def test_a_file_cut_off_during_the_average_does_not_end_the_watch(
    trainer: Trainer, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch_lawa.offline import average as module

    work = module.average_spans
    with Watch(trainer.folder, out, k=2) as watch:
        trainer.write(100, 200)
        watch.settle()
        old = out.read_bytes()
        trainer.write(300)

        def cutting(*args: Any, **how: Any) -> Any:
            os.truncate(trainer.path(300), 0)  # as `torch.save` to the same name begins
            return work(*args, **how)

        monkeypatch.setattr(module, "average_spans", cutting)
        assert watch.settle() == ["step 300: added (2 of 2)"]
        monkeypatch.undo()
        assert out.read_bytes() == old
        assert "changed after it was taken" in watch.look()[0]
        trainer.write_in_place(300)
        watch.settle()
    assert_file(out, trainer.mean(200, 300))


def test_links_where_there_can_be_and_copies_elsewhere(
    trainer: Trainer, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.write(100, 200)
    with Watch(trainer.folder, out, k=2) as watch:
        watch.settle()
        kept = watch.window.folder / "step-100" / "step-100.safetensors"
        assert os.path.samefile(kept, trainer.path(100))

        def elsewhere(*_: Any) -> None:
            raise OSError(errno.EXDEV, "Invalid cross-device link")

        monkeypatch.setattr(checkpoint_files.os, "link", elsewhere)
        trainer.write(300)
        assert watch.settle() == ["step 300: added (2 of 2, copied, not linked)"]
        kept = watch.window.folder / "step-300" / "step-300.safetensors"
        assert not os.path.samefile(kept, trainer.path(300))
        assert kept.read_bytes() == trainer.path(300).read_bytes()
        trainer.delete(200, 300)
    assert_file(out, trainer.mean(200, 300))


def test_stopped_while_copying(
    trainer: Trainer, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.write(100)
    with Watch(trainer.folder, out, k=1) as watch:

        def elsewhere(*_: Any) -> None:
            watch.stop.set()
            raise OSError(errno.EXDEV, "Invalid cross-device link")

        monkeypatch.setattr(checkpoint_files.os, "link", elsewhere)
        assert watch.settle() == []
        assert folders_of(watch.window.folder) == {"lock", "window.json"}
    assert not out.exists()


def test_a_second_watcher_is_refused(trainer: Trainer, out: Path) -> None:
    with Watch(trainer.folder, out), pytest.raises(StoreError, match="another `lawa watch`"):
        Watch(trainer.folder, out)
    Watch(trainer.folder, out).close()


def test_the_window_of_another_run_is_refused(trainer: Trainer, out: Path, tmp_path: Path) -> None:
    trainer.write(1)
    with Watch(trainer.folder, out, k=1) as watch:
        watch.settle()
    other = Trainer(tmp_path / "other")
    with pytest.raises(StoreError, match="the window of"):
        Watch(other.folder, out, k=1)
    with Watch(f"{trainer.folder}/step-*", out, k=1) as again:  # the same run, by a pattern
        assert again.steps == [1]
    (out.parent / "mine.window").mkdir()
    (out.parent / "mine.window/thesis.tex").touch()
    with pytest.raises(StoreError, match="not a window"):
        Watch(trainer.folder, out.parent / "mine")
    (watch.window.folder / "window.json").write_text("{}")
    with pytest.raises(StoreError, match="damaged"):
        Watch(trainer.folder, out, k=1)


def test_an_average_is_made_again_only_if_it_is_gone(trainer: Trainer, out: Path) -> None:
    trainer.write(100, 200, 300)
    with Watch(trainer.folder, out) as watch:
        watch.settle()
        out.unlink()
        watch.settle()  # somebody took it away
        assert not out.exists()
    with Watch(trainer.folder, out) as watch:
        watch.settle()
        assert_file(out, trainer.mean(100, 200, 300))
    with Watch(trainer.folder, out) as watch:
        watch.settle()
        assert watch.made == []


def test_an_average_that_is_there_is_not_made_again(trainer: Trainer, tmp_path: Path) -> None:
    trainer.write(100, 200)
    there = tmp_path / "averages" / "200.safetensors"
    there.parent.mkdir()
    there.write_bytes(b"made before")
    with Watch(trainer.folder, there.with_name("{step}.safetensors"), k=2) as watch:
        said = watch.settle()
        assert said[2:] == [f"step 200: {there} already exists and is not written again"]
        trainer.write(300)
        watch.settle()
    assert there.read_bytes() == b"made before"
    assert_file(there.with_name("300.safetensors"), trainer.mean(200, 300))


def test_what_a_killed_process_left_beside_the_output_is_removed(
    trainer: Trainer, out: Path
) -> None:
    out.parent.mkdir()
    left = out.with_name(f"{out.name}.{1:016x}.partial")
    left.touch()
    trainer.write(100)
    with Watch(trainer.folder, out, k=1) as watch:
        watch.settle()
    assert not left.exists()


def test_a_replacement_that_fails_leaves_the_snapshot_before(
    trainer: Trainer, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.write(100)
    first = trainer.mean(100)
    with Watch(trainer.folder, out, k=1) as watch:
        watch.settle()

        def fail(*_: Any) -> None:
            raise OSError(errno.EIO, "Input/output error")

        trainer.write(100)
        with monkeypatch.context() as patched:
            patched.setattr(window_folder, "keep_files", fail)
            assert "Input/output error" in watch.look(6)[0]
            assert_file(watch.window.folder / "step-100/step-100.safetensors", first)
        assert watch.look() == ["step 100: added (1 of 1, rewritten)"]
    assert_file(out, trainer.mean(100))


def test_another_k(trainer: Trainer, out: Path) -> None:
    trainer.write(*range(100, 700, 100))
    for k in (2, 4, 3):
        with Watch(trainer.folder, out, k=k) as watch:
            watch.settle()
        assert_file(out, trainer.mean(*range(600 - (k - 1) * 100, 700, 100)))
        assert len(list(watch.window.folder.glob("step-*"))) == k


ACTS = st.one_of(
    st.tuples(st.just("write"), st.integers(1, 5)),
    st.tuples(st.just("back"), st.integers(0, 6)),
    st.tuples(st.just("in location"), st.integers(0, 3)),
    st.tuples(st.just("keep"), st.integers(1, 4)),
    st.tuples(st.just("restart"), st.just(0)),
)


@pytest.mark.parametrize("name", ["averaged.safetensors", "averages/{step}.safetensors"])
@settings(max_examples=25)
@given(acts=st.lists(ACTS, min_size=3, max_size=10))
def test_whatever_the_trainer_does(
    tmp_path_factory: pytest.TempPathFactory, name: str, acts: list[tuple[str, int]]
) -> None:
    """The window is always the k latest of the branch that the run is on, as far as they exist."""
    k, root = 3, tmp_path_factory.mktemp("run")
    trainer, branch, window, on_disk = Trainer(root / "run"), [], [], set()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda file: None)  # twice as fast
        watch = Watch(trainer.folder, root / name, k=k)
        for act, n in [("write", 1), *acts]:
            written = []
            if act == "write":
                written = [max([0, *branch]) + 100 * (i + 1) for i in range(n)]
                trainer.write(*written)
            elif act in ("back", "in location"):
                written = [max(100, max(branch) - 100 * n)]
                in_place = act == "in location" and trainer.path(written[0]).exists()
                (trainer.write_in_place if in_place else trainer.write)(*written)
            elif act == "keep":
                gone = sorted(on_disk)[:-n]
                trainer.delete(*gone)
                on_disk -= set(gone)
            else:
                watch.close()
                watch = Watch(trainer.folder, root / name, k=k)
            on_disk |= set(written)
            if written:
                branch = [s for s in branch if s < written[0]] + written
                window = [s for s in branch if s in on_disk or s in window][-k:]
            watch.look(5)
            assert watch.steps == window
            if len(window) == k:
                out = str(root / name).replace("{step}", str(window[-1]))
                assert_file(Path(out), trainer.mean(*window))
        watch.close()
    assert folders_of(watch.window.folder) - {"made"} == {
        "lock", "window.json", *(s.folder for s in watch.window.state.snapshots),
    }  # fmt: skip
    shutil.rmtree(root)


def test_a_trainer_that_replaces_a_file_while_it_is_linked(
    trainer: Trainer, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link
    with Watch(trainer.folder, out, k=1) as watch:
        trainer.write(100)

        def slow(source: Any, target: Any) -> None:
            link(source, target)
            monkeypatch.undo()
            trainer.path(100).write_bytes(save(trainer.draw(100)))
            trainer.date(trainer.path(100))

        monkeypatch.setattr(checkpoint_files.os, "link", slow)
        assert watch.settle() == []
        watch.settle()
    assert_file(out, trainer.mean(100))


@pytest.mark.parametrize("name", ["{root}/victim", "../victim", "", ".", "step-1/../../victim"])
def test_a_manifest_cannot_name_a_folder_elsewhere(
    trainer: Trainer, tmp_path: Path, name: str
) -> None:
    out, victim = tmp_path / "out", tmp_path / "victim"
    victim.mkdir()
    (victim / "thesis.tex").touch()
    trainer.write(1)
    with Watch(trainer.folder, out, k=1) as watch:
        watch.settle()
    path = watch.window.folder / "window.json"
    rows = json.loads(path.read_text())
    rows["snapshots"][0]["folder"] = name.format(root=tmp_path)
    path.write_text(json.dumps(rows))
    trainer.write(2)
    with pytest.raises(StoreError, match=r"damaged .*folder is"):
        Watch(trainer.folder, out, k=1)
    assert (victim / "thesis.tex").exists()
    assert (watch.window.folder / "step-1").is_dir()


def test_every_damaged_manifest_is_refused_or_harmless(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)
    victim = tmp_path / "victim"
    victim.mkdir()
    for step in (1, 2, 3, 4):
        trainer.write(step)
    with Watch(trainer.folder, tmp_path / "out", k=2) as watch:
        watch.settle()
    folder, run = watch.window.folder, str(trainer.folder)
    path = folder / "window.json"
    whole, num_refused = path.read_text(), 0
    for text in damaged_documents(whole):
        path.write_text(text)
        try:
            with window_folder.WindowFolder(folder, run=run, k=2) as window:
                for snapshot in window.state.snapshots:
                    assert re.fullmatch(window_manifest.KEPT_FOLDER, snapshot.folder)
        except StoreError:
            num_refused += 1
    assert num_refused > 200
    assert victim.is_dir()
    assert {"lock", "window.json"} <= folders_of(folder)


def test_a_watch_that_is_refused_leaves_no_folder(trainer: Trainer, out: Path) -> None:
    out.parent.mkdir()
    out.write_text("precious")
    trainer.write(1)
    with pytest.raises(OutputError, match="already exists"):
        Watch(trainer.folder, out, k=1)
    assert os.listdir(out.parent) == [out.name]
    Watch(trainer.folder, out.with_name("other"), k=1).close()
    assert os.listdir(out.parent) == [out.name]


def test_a_folder_that_only_looks_like_a_window_is_kept(trainer: Trainer, tmp_path: Path) -> None:
    folder = tmp_path / "out.window"
    (folder / "step-5").mkdir(parents=True)
    (folder / "lock").touch()
    with pytest.raises(StoreError, match="not a window"):
        Watch(trainer.folder, tmp_path / "out", k=1)
    assert folders_of(folder) == {"step-5", "lock"}


def test_names_that_no_file_can_have_are_damage(trainer: Trainer, out: Path) -> None:
    trainer.write(1, 2)
    with Watch(trainer.folder, out, k=2) as watch:
        watch.settle()
    path = out.with_name(f"{out.name}.window") / "window.json"
    whole = json.loads(path.read_text())
    whole["snapshots"][0]["kept"] = {"\ud800": "x"}
    path.write_text(json.dumps(whole))
    with pytest.raises(StoreError, match=r"window\.json.*no file can be named"):
        Watch(trainer.folder, out, k=2).__enter__()


def test_options_that_are_refused_leave_no_window(trainer: Trainer, tmp_path: Path) -> None:
    trainer.write(1, 2)
    out, megatron = tmp_path / "out", AverageOptions(layout="megatron")
    before = sorted(os.listdir(tmp_path))
    for _ in range(2):
        with pytest.raises(ConfigError, match="another format"):
            watch_run(trainer.folder, out, k=2, settle=0, once=True, options=megatron)
        assert sorted(os.listdir(tmp_path)) == before
    with pytest.raises(ConfigError, match="another format"):
        with Watcher(trainer.folder, out, k=2, settle=0, options=megatron) as watcher:
            watcher._admission.poll()
            while watcher._admission.take_next():
                pass
            next(trainer.folder.glob("*1.safetensors")).unlink()
            watcher.poll()
    assert "step-1" in folders_of(tmp_path / "out.window")  # the only one that is left


def test_a_long_name_is_refused_before_any_work(trainer: Trainer, tmp_path: Path) -> None:
    trainer.write(1, 2)
    before = sorted(os.listdir(tmp_path))
    for name in ("x" * 240, "x" * 228 + "{step}", "ö" * 120):
        with pytest.raises(OutputError, match="Choose a shorter name"):
            watch_run(trainer.folder, tmp_path / name, k=2, settle=0, once=True)
    assert sorted(os.listdir(tmp_path)) == before
