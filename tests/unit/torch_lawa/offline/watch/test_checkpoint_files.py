"""Every format of checkpoint, watched while it is written, and gone once it was taken."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save, save_file
from support.watching import Trainer, Watch, assert_file, mean_of, remove_folder


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path / "run")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out" / "averaged.safetensors"


def write_shards(trainer: Trainer, step: int, *, late: str = "") -> Path:
    """A folder of Transformers with two shards, one of them not there yet."""
    folder = trainer.folder / f"checkpoint-{step}"
    folder.mkdir()
    values, names = trainer.draw(step), {}
    for i, name in enumerate(values, start=1):
        names[name] = f"model-{i:05d}-of-00002.safetensors"
        if names[name] != late:
            save_file({name: values[name]}, folder / names[name])
    index = {"metadata": {}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({"step": step}))
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    trainer.date(*folder.iterdir())
    return folder


def test_a_folder_counts_when_its_last_shard_is_there(trainer: Trainer, tmp_path: Path) -> None:
    out, late = tmp_path / "averaged", "model-00002-of-00002.safetensors"
    with Watch(trainer.folder, out, k=2) as watch:
        first = write_shards(trainer, 5)
        watch.settle()
        remove_folder(first)
        second = write_shards(trainer, 10, late=late)
        assert [text.split(":")[0] for text in watch.settle()] == ["step 10"]  # skipped, once
        assert watch.look(5) == []
        save_file({"b.weight": trainer.values[10]["b.weight"]}, second / late)
        assert watch.settle() == ["step 10: added (2 of 2)"]
        remove_folder(second)
    mean = trainer.mean(5, 10)
    for i, name in enumerate(mean, start=1):
        assert_file(out / f"model-{i:05d}-of-00002.safetensors", {name: mean[name]})
    assert json.loads((out / "config.json").read_text()) == {"step": 10}
    assert not (out / "trainer_state.json").exists()


@pytest.mark.parametrize(
    "name", ["tmp-checkpoint-{}", "checkpoint-{}.tmp", ".checkpoint-{}", "checkpoint-{}.partial"]
)
def test_temporary_names_are_left_alone(trainer: Trainer, out: Path, name: str) -> None:
    with Watch(trainer.folder, out, k=1) as watch:
        write_shards(trainer, 5)
        watch.settle()
        folder = write_shards(trainer, 10)
        new = folder.rename(folder.with_name(name.format(10)))
        assert watch.settle() == []
        new.rename(folder)
        assert watch.settle() == ["step 10: added (1 of 1)"]


def test_pytorch_files(trainer: Trainer, tmp_path: Path) -> None:
    out = tmp_path / "averaged.pt"
    with Watch(trainer.folder, out, k=2, key="model") as watch:
        for step in (1, 2, 3):
            state = {name: torch.from_numpy(w) for name, w in trainer.draw(step).items()}
            torch.save({"model": state, "step": step}, trainer.folder / f"ckpt_{step}.pt")
            watch.settle()
            (trainer.folder / f"ckpt_{step}.pt").unlink()
    found = torch.load(out, weights_only=True)["model"]
    for name, value in trainer.mean(2, 3).items():
        assert torch.equal(found[name], torch.from_numpy(value))


@pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:TypedStorage is deprecated")
def test_distributed_folders_count_when_their_metadata_is_there(
    trainer: Trainer, tmp_path: Path
) -> None:
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint import save as save_distributed

    out = tmp_path / "averaged.safetensors"
    with Watch(trainer.folder, out, k=1) as watch:
        state = {name: torch.from_numpy(w) for name, w in trainer.draw(10).items()}
        folder = trainer.folder / "step-10"
        save_distributed(state, storage_writer=FileSystemWriter(folder))
        hidden = (folder / ".metadata").rename(tmp_path / "metadata")
        watch.settle()
        assert watch.steps == []
        hidden.rename(folder / ".metadata")
        watch.settle()
        remove_folder(folder)
    assert_file(out, trainer.mean(10))


def test_a_run_that_is_not_local_is_copied(out: Path) -> None:
    import fsspec

    remote, values = fsspec.filesystem("memory"), {}
    with Watch("memory://watched/run", out, k=2) as watch:
        for step in (1, 2):
            values[step] = {"w": np.full(3, step, np.float32)}
            remote.pipe_file(f"/watched/run/step-{step}.safetensors", save(values[step]))
            assert "copied" in watch.settle()[-1]
            remote.rm(f"/watched/run/step-{step}.safetensors")
    assert_file(out, mean_of([values[1], values[2]]))
