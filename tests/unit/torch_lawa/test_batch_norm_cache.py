"""BatchNorm statistics for an average: estimated once per window, saved with it."""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torch_lawa import LatestWeightAverager
from torch_lawa.batch_norm_cache import BatchNormCache
from torch_lawa.errors import ConfigError


class Run:
    """A model, its averager, and how often the training data was read."""

    def __init__(self, num_batches: int = 2) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        self.averager = LatestWeightAverager(k=1)
        self.cache = BatchNormCache(num_batches)
        self.num_reads = 0

    def collect(self, step: int) -> None:
        with torch.no_grad():
            self.model[0].weight.add_(1.0)  # type: ignore[union-attr, operator]
        self.averager.collect(self.model, step=step)

    def statistics(self) -> Tensor:
        """Those that an evaluation of the average would use."""

        @contextlib.contextmanager
        def batches() -> Iterator[list[Tensor]]:
            self.num_reads += 1
            yield [torch.ones(4, 2), torch.zeros(4, 2), torch.full((4, 2), 9.0)]

        def forward(model: nn.Module, batch: Any) -> Any:
            return model(batch)

        with self.averager.swapped_into(self.model):
            self.cache.put_into(self.model, self.averager, batches, forward)
            found = self.model[1].running_mean.clone()  # type: ignore[union-attr, operator]
        assert isinstance(found, Tensor)
        return found


def test_layers_that_are_frozen_at_a_snapshot_keep_their_statistics() -> None:
    run = Run()
    layer = run.model[1]
    layer.track_running_stats = False  # as by Lightning's `BaseFinetuning.freeze`
    run.cache.watch(run.model)
    layer.track_running_stats = True
    layer.eval()
    run.cache.watch(run.model)
    run.collect(1)
    run.model.eval()
    assert not run.statistics().any()
    run.model.train()
    run.cache.watch(run.model)
    run.collect(2)
    run.model.eval()
    assert run.statistics().any()


def test_once_per_window() -> None:
    run = Run()
    run.collect(1)
    first = run.statistics()
    assert torch.equal(run.statistics(), first)
    assert run.num_reads == 1
    run.collect(2)
    assert not torch.equal(run.statistics(), first)
    assert run.num_reads == 2
    run.cache.clear()
    run.statistics()
    assert run.num_reads == 3


def test_saved_with_the_window() -> None:
    run, other = Run(), Run()
    run.collect(1)
    assert run.cache.state_dict(run.averager) == {}
    found = run.statistics()
    state = run.cache.state_dict(run.averager)
    other.collect(1)
    other.cache.load_state_dict(state)
    assert torch.equal(other.statistics(), found)
    assert other.num_reads == 0
    run.collect(2)  # they are of an older window now
    assert run.cache.state_dict(run.averager) == {}


@pytest.mark.parametrize("reset", [False, True])
def test_other_weights_with_the_same_steps(reset: bool) -> None:
    """The run went back to a saved state, or began a new window, and took other steps."""
    run = Run()
    state = run.averager.state_dict()
    run.collect(1)
    first = run.statistics()
    run.averager.reset() if reset else run.averager.load_state_dict(state)
    run.collect(1)
    assert not torch.equal(run.statistics(), first)
    copied = copy.deepcopy(run)  # a copy of the cache still fits the copied window
    assert torch.equal(copied.statistics(), run.statistics())
    assert (run.num_reads, copied.num_reads) == (2, 2)


def test_zero_batches_keep_the_newest_snapshot_s() -> None:
    run = Run(num_batches=0)
    run.collect(1)
    assert torch.equal(run.statistics(), torch.zeros(3))
    assert run.num_reads == 0
    with pytest.raises(ConfigError, match="batch_norm_batches=True"):
        BatchNormCache(True)


def test_a_blend_is_estimated_anew_as_its_live_weights_change() -> None:
    run = Run()
    run.averager = LatestWeightAverager(k=1, blend=0.5)
    run.collect(1)
    first = run.statistics()
    with torch.no_grad():
        run.model[0].weight.add_(1.0)  # type: ignore[union-attr, operator]
    assert not torch.equal(run.statistics(), first)
    assert run.num_reads == 2
    assert run.cache.state_dict(run.averager) == {}


def test_samples_since_the_newest_snapshot_change_the_average() -> None:
    run = Run()
    run.averager = LatestWeightAverager(k=1, samples=2)
    found = []
    for step in (1, 2, 3, 4):
        run.collect(step)
        if run.averager.ready:
            found.append(run.statistics())
    assert run.num_reads == len(found) == 3
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])
    assert torch.equal(run.statistics(), found[2])
    assert run.num_reads == 3
    assert run.cache.state_dict(run.averager)["steps"] == [4]
    run.collect(5)
    run.statistics()
    assert run.cache.state_dict(run.averager)["steps"] == [4, 5]


def test_nested_windows_have_statistics_of_their_own() -> None:
    run = Run()
    run.averager = LatestWeightAverager(k=2)
    run.collect(1)
    run.collect(2)
    loader = contextlib.nullcontext([torch.ones(4, 2)])
    found = {}
    for k in (1, 2, 1):
        with run.averager.swapped_into(run.model, k):
            run.cache.put_into(run.model, run.averager, lambda: loader, k=k)
            value = run.model[1].running_mean.clone()  # type: ignore[union-attr, operator]
        assert torch.equal(found.setdefault(k, value), value)  # type: ignore[arg-type]
    assert not torch.equal(found[1], found[2])  # type: ignore[arg-type]
    assert run.cache.holds(run.averager, 1)
    assert run.cache.state_dict(run.averager)["steps"] == [1, 2]
    assert run.cache.state_dict(run.averager, 1)["steps"] == [2]
    run.collect(3)
    assert not run.cache.holds(run.averager, 1)
