"""`manifest.json` is checked field by field when it is read back."""

import errno
import json
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.damage import damaged_documents

from torch_lawa import DiskStore, LatestWeightAverager
from torch_lawa.checkpoints.storage import state_files
from torch_lawa.errors import StoreError
from torch_lawa.stores.disk_manifest import MANIFEST, Manifest


def test_every_damaged_manifest_is_refused_or_harmless(tmp_path: Path) -> None:
    averager = LatestWeightAverager(k=2, store=DiskStore(tmp_path))
    for step in range(3):
        averager.collect({"w": torch.full((2, 3), float(step)), "n": torch.tensor(step)})
    averager.wait()
    path = tmp_path / MANIFEST
    whole, num_refused, there = path.read_text(), 0, set(tmp_path.iterdir())
    assert Manifest.read(tmp_path).text() == whole
    for text in damaged_documents(whole):
        path.write_text(text)
        try:
            manifest = Manifest.read(tmp_path)
            for row in manifest.rows:
                assert all(Path(name).name == name for name in row.files)
        except StoreError:
            num_refused += 1
    assert num_refused > 400
    assert set(tmp_path.iterdir()) == there


@pytest.mark.parametrize(("serial", "sound"), [(1, False), (2, False), (3, True), (9, True)])
def test_the_next_file_replaces_none_of_the_window(
    tmp_path: Path, serial: int, sound: bool
) -> None:
    averager = LatestWeightAverager(k=3, store=DiskStore(tmp_path))
    for value in (1.0, 2.0, 3.0):
        averager.collect({"w": torch.full((3,), value)})
    averager.wait()
    del averager
    path = tmp_path / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), "serial": serial}))
    if not sound:
        with pytest.raises(StoreError, match="serial"):
            LatestWeightAverager(k=3, store=DiskStore(tmp_path))
        return
    averager = LatestWeightAverager(k=3, store=DiskStore(tmp_path))
    averager.collect({"w": torch.full((3,), 10.0)})
    assert averager.average()["w"].tolist() == [5.0] * 3


def test_a_manifest_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: int) -> None:
        raise OSError(errno.EIO, "Input/output error")  # as `read` raises it

    (tmp_path / MANIFEST).write_text("{}")
    monkeypatch.setattr(state_files, "os", SimpleNamespace(fstat=fail))
    with pytest.raises(OSError, match=r"manifest\.json"):
        Manifest.read(tmp_path)


def test_a_manifest_of_any_size_takes_little_memory(tmp_path: Path) -> None:
    with (tmp_path / MANIFEST).open("wb") as file:
        file.truncate(3 << 29)
    tracemalloc.start()
    try:
        with pytest.raises(StoreError, match=f"it has {3 << 29} bytes"):
            Manifest.read(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
