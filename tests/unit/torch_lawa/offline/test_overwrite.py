"""What `--overwrite` replaces, what stays, what is refused, and how failures are reported."""

import errno
import os
import signal
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from torch_lawa import LatestWeightAverager
from torch_lawa.checkpoints.replacement import require_replaceable
from torch_lawa.checkpoints.storage.paths import LocalPath
from torch_lawa.errors import ConfigError, OutputError
from torch_lawa.offline.average import average_checkpoints
from torch_lawa.offline.options import AverageOptions
from torch_lawa.offline.plan import plan_average
from torch_lawa.offline.sweep import run_sweep, sweep_checkpoints
from torch_lawa.offline.sweep_plan import plan_sweep


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two checkpoints as folders."""
    for step in (1, 3):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        save_file({"w": torch.full((4,), float(step))}, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")
    return tmp_path / "run"


def value(folder: Path) -> float:
    return load_file(folder / "model.safetensors")["w"][0].item()


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_the_output_folder_of_a_trainer_is_kept(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "output_dir"
    for name in ("checkpoint-500/model.safetensors", "runs/events", "training_args.bin"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(b"precious")
    save_file({"w": torch.zeros(4)}, out / "model.safetensors")
    before = contents(out)
    with pytest.raises(OutputError, match="contains the folder checkpoint-500"):
        average_checkpoints(run, out, last=2, overwrite=True)
    assert contents(out) == before


def test_files_beside_the_checkpoint_stay(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json",
                 "trainer_state.json", "config.json", "notes.txt", "optimizer.pt"):  # fmt: skip
        (out / name).write_bytes(b"old")
    average_checkpoints(run, out, last=2, overwrite=True)
    assert value(out) == 2.0
    assert sorted(os.listdir(out)) == [
        "config.json", "model.safetensors", "notes.txt", "optimizer.pt",
    ]  # fmt: skip
    assert (out / "notes.txt").read_bytes() == b"old"
    assert (out / "config.json").read_text() == "{}"


def test_a_file_does_not_replace_a_folder_nor_a_folder_a_file(run: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis").write_text("years of work")
    with pytest.raises(OutputError, match="is a file"):
        average_checkpoints(run, tmp_path / "thesis", last=2, overwrite=True)
    folder = tmp_path / "a.safetensors"
    folder.mkdir()
    save_file({"w": torch.zeros(4)}, folder / "model.safetensors")
    with pytest.raises(OutputError, match="is a folder"):
        average_checkpoints(run, folder, last=2, overwrite=True)
    assert value(folder) == 0.0


@pytest.mark.parametrize("spelled", ["local://{}", "file://{}", "{}/../run"])
def test_an_input_by_another_name_is_not_replaced(run: Path, spelled: str) -> None:
    target = f"{spelled.format(run)}/checkpoint-3"
    with pytest.raises(OutputError, match="is, contains or is inside the input"):
        average_checkpoints(run, target, last=2, overwrite=True)
    assert value(run / "checkpoint-3") == 3.0


@pytest.mark.parametrize("spelled", ["{}", "{}/../run", "local://{}"])
def test_a_sweep_does_not_write_beside_its_checkpoints(run: Path, spelled: str) -> None:
    """Its averages have steps in their names: the run would have two checkpoints of each."""
    before = sorted(run.iterdir())
    with pytest.raises(OutputError, match=r"has the checkpoints of the run.*run-averaged"):
        sweep_checkpoints(run, [2], output=spelled.format(run))
    assert sorted(run.iterdir()) == before
    sweep_checkpoints(run, [2], output=run / "averages")
    sweep_checkpoints(run, [2], output=run.with_name("averages"))


CACHES = ["simplecache::file://{}", "filecache::local://{}", "blockcache::file://{}"]


@pytest.mark.parametrize("spelled", CACHES)
def test_an_input_behind_a_cache_is_not_replaced(
    run: Path, tmp_path: Path, spelled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where fsspec caches
    files = [run / f"checkpoint-{step}" / "model.safetensors" for step in (1, 3)]
    urls = [spelled.format(file) for file in files]
    with pytest.raises(ConfigError, match="chained"):
        average_checkpoints(run, urls[1], last=2, overwrite=True)
    with pytest.raises(ConfigError, match="chained"):
        sweep_checkpoints(run, [1], output=spelled.format(run))
    assert value(run / "checkpoint-3") == 3.0
    if "blockcache" in spelled:
        return  # fsspec leaves the files of such a cache open
    for inputs, target in ((urls, files[1]), (urls, urls[1]), (files, urls[0])):
        with pytest.raises((OutputError, ConfigError), match=r"inside the input|chained"):
            average_checkpoints(inputs, target, overwrite=True)
    assert value(run / "checkpoint-3") == 3.0
    average_checkpoints(urls, run / "averaged.safetensors")  # beside them is fine
    assert load_file(run / "averaged.safetensors")["w"][0].item() == 2.0


def test_an_archive_of_inputs_is_not_replaced(run: Path, tmp_path: Path) -> None:
    archive = tmp_path / "inputs.safetensors"
    with zipfile.ZipFile(archive, "w") as file:
        for step in (1, 3):
            file.write(run / f"checkpoint-{step}" / "model.safetensors", f"step_{step}.safetensors")
    before = archive.read_bytes()
    inputs = [f"zip://step_{step}.safetensors::file://{archive}" for step in (1, 3)]
    with pytest.raises(OutputError, match="inside the input"):
        average_checkpoints(inputs, archive, overwrite=True)
    assert archive.read_bytes() == before
    average_checkpoints(inputs, tmp_path / "out.safetensors")
    assert load_file(tmp_path / "out.safetensors")["w"][0].item() == 2.0


def test_an_input_behind_a_link_is_not_replaced(run: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(run)
    for target in ("link", "link/checkpoint-3", "link/checkpoint-3/model.safetensors"):
        with pytest.raises(OutputError, match="is, contains or is inside the input"):
            plan_average(run, tmp_path / target, last=2, overwrite=True)
    # Of two names of one file, one may be replaced: the other stays.
    os.link(run / "checkpoint-3/model.safetensors", tmp_path / "best.safetensors")
    average_checkpoints(run, tmp_path / "best.safetensors", last=2, overwrite=True)
    assert value(run / "checkpoint-3") == 3.0


def test_links_out_of_the_checkpoint_are_not_followed(run: Path, tmp_path: Path) -> None:
    newest, secret = run / "checkpoint-3", tmp_path / "id_rsa"
    secret.write_text("secret")
    (newest / "notes.txt").symlink_to(secret)
    (newest / "tokenizer.json").symlink_to("config.json")
    assert any("notes.txt" in n for n in plan_average(run, tmp_path / "out", last=2).notes)
    average_checkpoints(run, tmp_path / "out", last=2)
    assert sorted(os.listdir(tmp_path / "out")) == [
        "config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip


def test_the_links_of_the_hugging_face_cache_are_followed(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "f00"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save_file({"w": torch.ones(2)}, blobs / "1")
    (blobs / "2").write_text("{}")
    (snapshot / "model.safetensors").symlink_to("../../blobs/1")
    (snapshot / "config.json").symlink_to("../../blobs/2")
    average_checkpoints(snapshot, tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("call", ["fsync", "pwrite", "posix_fallocate"])
@pytest.mark.parametrize("code", [errno.EIO, errno.EFBIG, errno.ENOSPC])
@pytest.mark.parametrize("name", ["out", "out.safetensors"])
def test_a_failing_disk_is_named_and_nothing_is_changed(
    run: Path, tmp_path: Path, call: str, code: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match=str(tmp_path / name)):
        average_checkpoints(run, tmp_path / name, last=2)
    assert os.listdir(tmp_path) == ["run"]


def test_a_limit_on_the_size_of_files_is_named(run: Path, tmp_path: Path) -> None:
    code = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))\n"
        "from torch_lawa.cli.main import main\n"
        "main(['average', sys.argv[1], '--last', '2', '-o', sys.argv[2]])\n"
    )
    words = [sys.executable, "-c", code, str(run), str(tmp_path / "out.safetensors")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"Error: {tmp_path}/out.safetensors: cannot be written (File too large)" in done.stderr
    assert os.listdir(tmp_path) == ["run"]


def test_an_older_result_that_a_killed_writer_moved_aside_is_not_lost(
    run: Path, tmp_path: Path
) -> None:
    aside = tmp_path / f"out.{1:016x}.partial"
    (aside / "old").mkdir(parents=True)
    (aside / "lock").touch()
    save_file({"w": torch.full((4,), 7.0)}, aside / "old" / "model.safetensors")
    with pytest.raises(OutputError, match="--overwrite"):
        average_checkpoints(run, tmp_path / "out", last=2)
    assert value(tmp_path / "out") == 7.0
    assert sorted(os.listdir(tmp_path)) == ["out", "run"]


@pytest.mark.parametrize("name", ["out.pt", "out"])
def test_a_full_disk_is_named_by_the_writers_of_pytorch(
    run: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:

    def full(state: Any, file: Any, **how: Any) -> None:
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise RuntimeError("unexpected pos 704 vs 598") from error

    monkeypatch.setattr(torch, "save", full)
    options = AverageOptions(layout=None if name.endswith(".pt") else "distributed")
    with pytest.raises(OutputError, match=r"cannot be written \(No space"):
        average_checkpoints(run, tmp_path / name, last=2, options=options)
    assert os.listdir(tmp_path) == ["run"]


KILLED_SWEEP = """
import os, signal, sys
from pathlib import Path
from torch_lawa.offline import sweep
die = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
sweep.in_threads = die
out = None if sys.argv[2] == "-" else sys.argv[2]
sweep.run_sweep(
    sweep.plan_sweep(sys.argv[1], [1, 2]), output=out, scratch=Path(sys.argv[3]),
    evaluator=None if out else len,
)
"""


@pytest.mark.parametrize("keeps", [True, False])
def test_a_killed_sweep_leaves_nothing_for_good(run: Path, tmp_path: Path, keeps: bool) -> None:
    """Neither beside results that the next sweep does not make, nor in the scratch folder."""
    out, scratch = tmp_path / "out", tmp_path / "scratch"
    scratch.mkdir()
    words = [str(run), str(out) if keeps else "-", str(scratch)]
    done = subprocess.run([sys.executable, "-c", KILLED_SWEEP, *words])
    assert done.returncode == -signal.SIGKILL
    where = out if keeps else scratch
    assert os.listdir(where)
    run_sweep(
        plan_sweep(run, [2]),
        evaluator=None if keeps else lambda state: {"w": state["w"].sum()},
        output=out if keeps else None,
        scratch=scratch,
    )
    assert os.listdir(where) == (["step-3-k-2.safetensors"] if keeps else [])


@pytest.mark.parametrize("name", ["x" * 231, "x" * 220 + ".safetensors", "ö" * 120])
def test_a_long_name_is_refused_before_any_work(run: Path, tmp_path: Path, name: str) -> None:
    """Not by a warning of a temporary folder that was never made."""
    with pytest.raises(OutputError, match=r"at most 230 are possible"):
        plan_average(run, tmp_path / name, last=2)
    averager = LatestWeightAverager(k=1)
    averager.collect({"w": torch.ones(2)})
    with pytest.raises(OutputError, match="Choose a shorter name"):
        averager.save_pretrained(tmp_path / name)
    assert os.listdir(tmp_path) == ["run"]
    average_checkpoints(run, tmp_path / ("x" * 230), last=2)


def test_an_export_replaces_what_its_check_allows(tmp_path: Path) -> None:
    """The folder of an Orbax checkpoint, whose parts are known by more than their names."""
    folder = tmp_path / "orbax"
    (folder / "d").mkdir(parents=True)
    for name in ("_METADATA", "manifest.ocdbt", "d/0"):
        (folder / name).write_text("{}")
    (folder / "notes.txt").write_text("mine")
    averager = LatestWeightAverager(k=1)
    averager.collect({"w": torch.ones(2)})
    averager.save_pretrained(folder, overwrite=True)
    assert sorted(os.listdir(folder)) == ["model.safetensors", "notes.txt"]


@pytest.mark.parametrize("method", ["children", "is_folder"])
def test_an_output_that_another_writer_is_replacing_is_not_an_error(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Without renameat2 the other one's result is missing between two renames."""
    output = tmp_path / "out"
    average_checkpoints([run], output, last=2)
    original, aside, looks = getattr(LocalPath, method), tmp_path / "aside", []

    def look(location: LocalPath) -> Any:
        if location.path == output:
            looks.append(location)
            if len(looks) == 1:
                output.rename(aside)
            elif aside.exists():
                aside.rename(output)
        return original(location)

    monkeypatch.setattr(LocalPath, method, look)
    require_replaceable(LocalPath(output), is_file=False)
    assert looks
