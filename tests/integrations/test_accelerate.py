"""The averager in Accelerate: saved and loaded with its checkpoints, on one process and on two."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from support.ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from torch_lawa import Every, LatestWeightAverager, OnPlateau
from torch_lawa.errors import ConfigError, StateError, SwapError
from torch_lawa.integrations.accelerate import register_averager
from torch_lawa.integrations.window_files import load_window, save_window

K = 3


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Accelerate keeps its state for the whole process."""
    yield
    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)


class Run:
    """A training loop as people write it: an epoch is 4 optimizer steps on one process."""

    def __init__(self, folder: Path, *, seed: int = 0, k: int = K, **options: Any) -> None:
        set_seed(seed)
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=2,
            project_config=ProjectConfiguration(
                str(folder), automatic_checkpoint_naming=True, total_limit=1
            ),
            **options,
        )
        model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.2), nn.ReLU(), nn.Linear(5, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        generator = torch.Generator().manual_seed(1)
        data = TensorDataset(
            torch.randn(32, 3, generator=generator), torch.randn(32, 1, generator=generator)
        )
        loader: Any = DataLoader(data, batch_size=4)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        self.averager = LatestWeightAverager(k=k)
        register_averager(self.accelerator, self.averager, self.model)
        self.weights: list[dict[str, Tensor]] = []

    def train(self, epochs: int, *, save: bool = True) -> None:
        for _ in range(epochs):
            self.model.train()
            for inputs, targets in self.loader:
                with self.accelerator.accumulate(self.model):
                    loss = nn.functional.mse_loss(self.model(inputs), targets)
                    self.accelerator.backward(loss)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                if self.accelerator.sync_gradients:
                    self.averager.step(self.model)
                    self.weights.append(whole(self.accelerator.unwrap_model(self.model)))
            if save:
                self.accelerator.save_state()

    def loss(self) -> float:
        """Of this process's part of the data, with the average."""
        self.model.eval()
        with self.averager.swapped_into(self.model), torch.no_grad():
            losses = [nn.functional.mse_loss(self.model(x), y) for x, y in self.loader]
        return float(torch.stack(losses).mean())


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()
        for name, tensor in model.state_dict().items()
    }


def gathered(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors.items()}


def mean(snapshots: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {
        name: (sum(s[name].double() for s in snapshots) / len(snapshots)).float()
        for name in snapshots[0]
    }


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


def resume_exactly(folder: Path, **options: Any) -> dict[str, Tensor]:
    """Three epochs in one go, and two runs that meet at a checkpoint; the average of both."""
    straight = Run(folder / "straight", **options)
    straight.train(3)
    GradientState._reset_state()
    first = Run(folder / "parts", **options)
    first.train(2)
    first.train(1, save=False)  # what comes after the last checkpoint is lost
    GradientState._reset_state()
    second = Run(folder / "parts", seed=99, **options)
    second.accelerator.load_state()
    assert second.averager.snapshot_steps == [
        s - len(straight.weights) // 3 for s in straight.averager.snapshot_steps
    ]
    # Automatic names are counted by the run, and are not part of what is loaded.
    second.accelerator.project_configuration.iteration = 2
    second.train(1)
    assert same(whole(second.model), whole(straight.model))
    average = gathered(second.averager.average())
    assert same(average, mean(straight.weights[-K:]))
    assert second.averager.snapshot_steps == straight.averager.snapshot_steps
    assert second.averager.num_collected == straight.averager.num_collected
    assert second.loss() == straight.loss()
    return average


def test_a_resumed_run_goes_on_exactly(tmp_path: Path) -> None:
    """Also where one checkpoint is kept and the window holds more; steps are optimizer steps."""
    resume_exactly(tmp_path)
    (folder,) = (tmp_path / "parts" / "checkpoints").iterdir()
    assert (folder / "averager.pt").is_file()


def copies(rank: int, folder: str) -> dict[str, Tensor]:
    average = resume_exactly(Path(folder))
    dist.barrier()  # gloo may abort a process whose peer is gone
    dist.destroy_process_group()
    return average


def shards(rank: int, folder: str) -> dict[str, Tensor]:
    """Accelerate does not use its plugin on CPUs, unless it is told to."""
    make = AcceleratorState.__init__

    def make_sharded(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        make(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = self.distributed_type

    AcceleratorState.__init__ = make_sharded
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", state_dict_type="SHARDED_STATE_DICT"
    )
    average = resume_exactly(Path(folder), fsdp_plugin=plugin)
    dist.barrier()
    dist.destroy_process_group()
    return average


def test_copies_on_two_processes(tmp_path: Path) -> None:
    first, second = on_ranks(2, copies, str(tmp_path), join=False)
    assert same(first, second)
    (folder,) = (tmp_path / "parts" / "checkpoints").iterdir()
    assert (folder / "averager.pt").is_file()


def test_shards_on_two_processes(tmp_path: Path) -> None:
    first, second = on_ranks(2, shards, str(tmp_path), join=False)
    assert same(first, second)
    (folder,) = (tmp_path / "parts" / "checkpoints").iterdir()
    assert len(list((folder / "averager").glob("*.distcp"))) == 2


def test_a_checkpoint_without_a_window_begins_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    run.train(1)
    (folder,) = (tmp_path / "checkpoints").iterdir()
    (folder / "averager.pt").unlink()
    with caplog.at_level(logging.WARNING):
        run.accelerator.load_state(str(folder))
    assert "holds no window named 'averager'" in caplog.text
    assert len(run.averager) == 0


def test_two_averagers_need_two_names(tmp_path: Path) -> None:
    run = Run(tmp_path)
    other = LatestWeightAverager(k=2)
    with pytest.raises(ConfigError, match="registered as 'averager' already"):
        register_averager(run.accelerator, other, run.model)
    for name in ("a/b", "", ".", ".."):
        with pytest.raises(ConfigError, match="must be the name of a file"):
            register_averager(run.accelerator, other, run.model, name=name)
    register_averager(run.accelerator, other, run.model, name="other")
    run.train(1, save=False)
    other.collect(run.model)
    run.accelerator.save_state()
    (folder,) = (tmp_path / "checkpoints").iterdir()
    other.reset()
    run.averager.reset()
    run.accelerator.load_state(str(folder))
    assert (len(run.averager), len(other)) == (K, 1)


def test_a_mean_is_not_saved_or_loaded_as_the_model(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(1)
    (folder,) = (tmp_path / "checkpoints").iterdir()
    with run.averager.swapped_into(run.model):
        with pytest.raises(SwapError, match=r"load_state .* leave the"):
            run.accelerator.load_state(str(folder))
        with pytest.raises(SwapError, match=r"save_state .* leave the"):
            run.accelerator.save_state()


def test_what_a_killed_save_left_goes_with_the_next(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(1, save=False)
    run.accelerator.project_configuration.automatic_checkpoint_naming = False
    (tmp_path / "last").mkdir()
    (tmp_path / "last" / "averager.pt.partial").write_bytes(b"half of it")
    run.accelerator.save_state(str(tmp_path / "last"))
    names = {path.name for path in (tmp_path / "last").iterdir()}
    assert {name for name in names if name.startswith("averager")} == {"averager.pt"}


def test_resumed_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """Shuffled data and dropout, under the conditions that the guide names."""

    def run(folder: Path, *, seed: int, stop: bool = False) -> tuple[dict[str, Tensor], Any]:
        """Three epochs of 8 batches, saved after batch 3 of epoch 1, and resumed if it is there."""
        set_seed(seed)
        accelerator = Accelerator(
            cpu=True,
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0),
        )
        model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.2), nn.Linear(5, 1))
        data = torch.randn(32, 3, generator=torch.Generator().manual_seed(1))
        model, optimizer, loader = accelerator.prepare(
            model,
            torch.optim.AdamW(model.parameters(), lr=0.05),
            DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator()),
        )
        averager = LatestWeightAverager(k=K, schedule=Every(2))
        register_averager(accelerator, averager, model)
        first, skip, weights = 0, 0, []
        if folder.exists():
            accelerator.load_state(str(folder))
            first, skip = 1, 3
        for epoch in range(first, 3):
            batches = accelerator.skip_first_batches(loader, skip) if skip else loader
            batches.set_epoch(epoch)
            for number, inputs in enumerate(batches, skip + 1):
                accelerator.backward(model(inputs).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                if averager.step(model):
                    weights.append(whole(model))
                if (epoch, number) == (1, 3) and not folder.exists():
                    accelerator.save_state(str(folder))
                    if stop:
                        return {}, averager
            skip = 0
        GradientState._reset_state()
        assert same(averager.average(), mean(weights[-K:]))
        return whole(model), averager

    expected, straight = run(tmp_path / "straight", seed=0)
    run(tmp_path / "parts", seed=0, stop=True)
    found, resumed = run(tmp_path / "parts", seed=99)
    assert same(found, expected)
    assert same(resumed.average(), straight.average())
    assert resumed.snapshot_steps == straight.snapshot_steps == [20, 22, 24]


def test_shards_in_another_window_say_why(tmp_path: Path) -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = fully_shard(nn.Linear(2, 2))
        averager = LatestWeightAverager(k=2)
        averager.collect(model)
        save_window(averager, model, tmp_path / "averager", writes=True)
        with pytest.raises(StateError, match=r"k=2.*not k=3"):
            load_window(LatestWeightAverager(k=3), model, tmp_path / "averager")
        with pytest.raises(StateError, match=r"schedule Every.*OnPlateau"):
            other = LatestWeightAverager(k=2, schedule=OnPlateau())
            load_window(other, model, tmp_path / "averager")
    finally:
        dist.destroy_process_group()
