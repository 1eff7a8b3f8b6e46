"""The CIFAR-100 recipe finds its data, or makes it up."""

from pathlib import Path

import pytest
import torch

from lawa_lab.recipes.catalog.cifar100 import Cifar100Config
from lawa_lab.recipes.data import cifar
from lawa_lab.recipes.task import Task, Worker
from torch_lawa.errors import DataError


def test_smoke() -> None:
    config = Cifar100Config().smoke()
    assert isinstance(config, Cifar100Config)
    task: Task = config.make_task(None, seed=0, worker=Worker(), smoke=True)
    assert task.num_batches == 5
    model = task.build_model()
    assert model.conv1.weight.shape == (4, 3, 3, 3)
    batch = next(iter(task.batches(0)))
    assert batch[0].shape == (32, 3, 32, 32)
    torch.autograd.backward(task.loss(model, batch))
    values = task.evaluate(model.eval())
    assert list(values) == ["test_loss", "test_accuracy", "test_top5_accuracy"]
    assert len(task.calibration()) == 2


def test_data_is_looked_for_in_the_folder_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cifar, "_NUM_IMAGES", {"train": 4, "test": 1})
    config = Cifar100Config(batch_size=4, width=2)
    with pytest.raises(DataError, match="data: contains no CIFAR-100"):
        config.make_task(None, seed=0, worker=Worker(), smoke=False)
    folder = tmp_path / "data" / "cifar-100-binary"
    folder.mkdir(parents=True)
    for name, num in (("train", 4), ("test", 1)):
        (folder / f"{name}.bin").write_bytes(bytes(3074 * num))
    for data in (None, tmp_path / "data"):
        task = config.make_task(data, seed=0, worker=Worker(), smoke=False)
        assert task.num_batches == 1
        assert task.build_model().fc.weight.shape == (100, 16)
    with pytest.raises(DataError, match="other: contains no CIFAR-100"):
        config.make_task(tmp_path / "other", seed=0, worker=Worker(), smoke=False)
