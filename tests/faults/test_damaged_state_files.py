"""Damaged files of our own: an error that names what is wrong, never a traceback or a lost file.

A trial damages one file that this project wrote and reads back: bytes of it, a value of its JSON,
or a value inside a file of `torch.save`.
"""

import gc
import itertools
import json
import os
import random
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.campaign import Campaign, CountTrials
from support.damage import damaged_bytes, damaged_value
from support.training import smoke_plan
from support.watching import Trainer, Watch
from torch import nn

from lawa_lab.cli.report import _earlier_figures
from lawa_lab.recipes.run_folder import RunFolder
from lawa_lab.report.rows import read_rows
from torch_lawa import DiskStore, LatestWeightAverager, WindowSearch, average_checkpoints
from torch_lawa.batch_norm_cache import BatchNormCache
from torch_lawa.errors import LawaError
from torch_lawa.integrations.window_files import (
    SavedWindows,
    load_window,
    save_window,
    window_beside,
)
from torch_lawa.metrics import MetricsWriter, read_metrics

pytestmark = pytest.mark.faults

SECONDS = 10.0  # for one trial; a sound one takes milliseconds


def filled(store: Any = "host") -> LatestWeightAverager:
    averager = LatestWeightAverager(k=2, store=store)
    for value in (1.0, 2.0, 4.0):
        averager.collect({"w": torch.full((3, 2), value), "n": torch.tensor(3)})
    averager.wait()
    return averager


def write_store(folder: Path) -> None:
    filled(DiskStore(folder / "window"))


def read_store(folder: Path) -> None:
    averager = LatestWeightAverager(k=2, store=DiskStore(folder / "window"))
    if averager.ready:
        averager.average()
    averager.collect({"w": torch.ones(3, 2), "n": torch.tensor(3)})
    averager.wait()


def write_watch(folder: Path) -> None:
    trainer = Trainer(folder / "run")
    trainer.write(1, 2, 3)
    with Watch(trainer.folder, folder / "out.safetensors", k=2) as watch:
        watch.settle()
    shutil.rmtree(folder / "run")


def read_watch(folder: Path) -> None:
    Trainer(folder / "run").write(2, 3, 4)
    with Watch(folder / "run", folder / "out.safetensors", k=2) as watch:
        watch.settle()


def write_run(folder: Path) -> None:
    run = RunFolder(folder)
    run.write_plan(smoke_plan("digits"), {"world_size": 1})
    with MetricsWriter(run.metrics) as metrics:
        for step, loss in ((2, 0.5), (4, 0.25)):
            row = {"recipe": "digits", "run": "a", "seed": 0, "step": step, "epoch": step / 2}
            metrics.write({**row, "weights": "raw", "k": None, "test_loss": loss})
            metrics.write({**row, "weights": "averaged", "k": 2, "test_loss": loss / 2})
    run.save({"step": 4, "model": {"w": torch.ones(2)}, "averager": filled().state_dict()})
    (folder / "report.json").write_text(json.dumps({"figures": ["figures/a.png"]}))


def read_run(folder: Path) -> None:
    run = RunFolder(folder)
    acts: list[Callable[[], Any]] = [
        lambda: run.require_same(smoke_plan("digits")),
        lambda: read_rows([folder]),
        lambda: _earlier_figures(folder),
        run.load,
        lambda: run.cut(3, epochs=4),
        lambda: MetricsWriter(run.metrics).close(),
        lambda: read_metrics(run.metrics),
    ]
    refused = None
    for act in acts:
        try:
            act()
        except LawaError as error:
            refused = error
    if refused is not None:
        raise refused


def _notes() -> dict[str, Any]:
    statistics = {"steps": [2, 3], "values": {"1.running_mean": torch.zeros(3)}}
    return {"batch_norm": statistics, "search": {"k": 2, "num_decided": 5}}


def write_beside(folder: Path) -> None:
    """As Lightning's callback does."""
    window = window_beside(str(folder / "last.ckpt"))
    window.write({"averager": filled()}, nn.Linear(2, 2), writes=True, notes=_notes(), token="t")
    window.publish()


def _take_notes(saved: SavedWindows) -> None:
    with saved.reading():
        BatchNormCache(1).load_state_dict(saved.notes["batch_norm"])
        WindowSearch().load_state_dict(saved.notes["search"])


def read_beside(folder: Path) -> None:
    for saved in window_beside(str(folder / "last.ckpt")).read():
        saved.load({"averager": LatestWeightAverager(k=2)}, nn.Linear(2, 2))
        _take_notes(saved)


def write_inside(folder: Path) -> None:
    """As the Transformers callback does."""
    save_window(filled(), nn.Linear(2, 2), folder / "window", writes=True, notes=_notes())


def read_inside(folder: Path) -> None:
    saved = load_window(LatestWeightAverager(k=2), nn.Linear(2, 2), folder / "window")
    if saved is not None:
        _take_notes(saved)


def write_average(folder: Path) -> None:
    """A Hugging Face folder with side files, and the notes that an average carries."""
    for step in (1, 2):
        path = folder / f"checkpoint-{step}"
        filled().save_pretrained(path)
        (path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": []}))
        (path / "config.json").write_text(json.dumps({"model_type": "toy"}))
        (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))


def read_average(folder: Path) -> None:
    shutil.rmtree(folder / "out", ignore_errors=True)
    inputs = [folder / "checkpoint-1", folder / "checkpoint-2"]
    average_checkpoints(inputs, folder / "out")


Case = tuple[Callable[[Path], None], Callable[[Path], None]]
CASES: dict[str, Case] = {
    "disk store": (write_store, read_store),
    "watch": (write_watch, read_watch),
    "run": (write_run, read_run),
    "window beside": (write_beside, read_beside),
    "window inside": (write_inside, read_inside),
    "side files": (write_average, read_average),
}


def damage(path: Path, chance: random.Random) -> None:
    """Damage the bytes, or a value of what they mean."""
    data = path.read_bytes()
    if chance.random() < 0.6:
        if path.suffix in (".pt", ".ckpt"):
            state = torch.load(path, weights_only=True)
            torch.save(damaged_value(state, chance), path)
            return
        if path.suffix == ".json":
            path.write_text(json.dumps(damaged_value(json.loads(data), chance)))
            return
        if path.suffix == ".jsonl":
            rows = [json.loads(line) for line in data.splitlines()]
            path.write_text("".join(f"{json.dumps(r)}\n" for r in damaged_value(rows, chance)))
            return
    path.write_bytes(b"[" * 100_000 if chance.random() < 0.05 else damaged_bytes(data, chance))


@pytest.mark.parametrize("name", CASES)
def test_damaged_state_files(
    name: str,
    campaign: Campaign,
    trials: CountTrials,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    write, read = CASES[name]
    sound, place = tmp_path / "sound", tmp_path / "place"
    sound.mkdir()
    write(sound)
    (tmp_path / "victim").mkdir()
    chance = random.Random(f"{name} {campaign.seed}")
    for number in campaign.until_time_is_up(itertools.count()):
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(sound, place)
        victim = chance.choice(sorted(path for path in place.rglob("*") if path.is_file()))
        damage(victim, chance)
        began = time.monotonic()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                read(place)
        except LawaError as error:
            del error
        except BaseException as error:
            error.add_note(f"trial {number}: {victim.relative_to(place)}")
            raise
        gc.collect()  # stores hold their folders
        assert time.monotonic() - began < SECONDS, f"trial {number}: {victim.name}"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["place", "sound", "victim"]
        trials("damaged state files", 1)
