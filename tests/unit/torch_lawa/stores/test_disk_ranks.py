"""Several ranks on one folder, played through in one process: what all have, and nothing else."""

import os
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from torch_lawa import DiskStore, LatestWeightAverager
from torch_lawa.errors import StoreError
from torch_lawa.stores import disk
from torch_lawa.stores.disk_manifest import Manifest, Mark
from torch_lawa.stores.disk_ranks import RankContents, Ranks, agree

Values = dict[str, Tensor]


def marks(*indices: int, run: int = 1) -> tuple[Mark, ...]:
    return tuple(Mark(run, index, index + 1) for index in indices)


def contents(*indices: int, began: int = 1, age: int = 100, run: int = 1) -> RankContents:
    held = marks(*indices, run=run)
    return RankContents(run, began, age, held, frozenset(held[-3:]))


def test_the_newest_end_that_all_have_and_the_snapshots_before_it() -> None:
    agreed = agree([contents(3, 4, 5, 6, 7), contents(1, 2, 3, 4, 5)], Path("window"))
    assert agreed.snapshots == frozenset(marks(3, 4, 5))
    assert agreed.run == 2
    with_a_hole = agree([contents(3, 4, 5, 6, 7), contents(2, 3, 5, 6)], Path("window"))
    assert with_a_hole.snapshots == frozenset(marks(3, 5, 6))


def test_snapshots_that_were_taken_again_are_others() -> None:
    again = RankContents(2, 1, 9, (*marks(3, 4), *marks(5, run=2)), frozenset(marks(4)))
    agreed = agree([contents(3, 4, 5), again], Path("window"))
    assert agreed.snapshots == frozenset(marks(3, 4))
    assert agreed.run == 3


def test_ranks_too_far_apart_are_refused() -> None:
    with pytest.raises(StoreError, match=r"rank 0: steps 4 to 9, rank 1: steps 3 to 6"):
        agree([contents(3, 4, 5, 6, 7, 8), contents(2, 3, 4, 5)], Path("window"))
    with pytest.raises(StoreError, match=r"rank 0: steps 4 to 6, rank 1: none"):
        agree([contents(3, 4, 5), contents(began=0, age=0, run=0)], Path("window"))


def test_all_begin_anew_where_one_had() -> None:
    for newer in (contents(began=2, age=0, run=2), contents(7, 8, began=2, age=2, run=2)):
        assert not agree([contents(3, 4, 5), newer], Path("window")).snapshots
    assert not agree([contents(0, 1, age=2), contents(began=0, age=0)], Path("window")).snapshots


def test_a_rank_in_trouble_stops_all() -> None:
    with pytest.raises(StoreError, match=r"rank 1 .*it is damaged"):
        agree([contents(3, 4, 5), "it is damaged"], Path("window"))


class Cluster:
    """Two ranks of a run; killed and started again, they see only their files."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root, self.patch = root, patch
        self.timeline: list[tuple[int, Values]] = []  # what an uninterrupted run would hold
        self.num_values = 0
        self.k = 3
        self.start()

    def start(self) -> None:
        self.averagers: list[LatestWeightAverager] = []
        # What each would send, before anyone goes on: that is what a collective gives.
        sent = [self.contents(rank) for rank in range(2)]
        self.patch.setattr(Ranks, "exchange", lambda ranks, mine: sent)
        for rank in range(2):
            self.patch.setattr(disk, "rank_and_size", lambda rank=rank: (rank, 2))
            averager = LatestWeightAverager(
                k=self.k, store=DiskStore(self.root), min_snapshots=1, _sliding=rank == 1
            )
            self.averagers.append(averager)

    def contents(self, rank: int) -> RankContents:
        return RankContents.of(Manifest.read(Ranks(rank, 2).folder(self.root)))

    def collect(self, ranks: tuple[int, ...]) -> None:
        step = self.timeline[-1][0] + 1 if self.timeline else 1
        self.num_values += 1
        generator = torch.Generator().manual_seed(self.num_values)
        values = {"w": torch.randn(7, generator=generator), "n": torch.tensor(self.num_values)}
        for rank in ranks:
            self.averagers[rank].collect(self.part(values, rank), step=step)
            self.averagers[rank].wait()
        self.timeline.append((step, values))

    def part(self, values: Values, rank: int) -> Values:
        return {"w": values["w"].tensor_split(2)[rank], "n": values["n"]}

    def check(self) -> None:
        """Both hold the end of the timeline, and its mean, bit for bit."""
        expected = self.timeline[-self.k :]
        reference = LatestWeightAverager(k=self.k, min_snapshots=1)
        for step, values in expected:
            reference.collect(values, step=step)
        for rank, averager in enumerate(self.averagers):
            assert averager.snapshot_steps == [step for step, _ in expected]
            if expected:
                for name, tensor in self.part(reference.average(), rank).items():
                    assert torch.equal(averager.average()[name], tensor), (rank, name)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Cluster]:
    def fresh() -> Cluster:
        monkeypatch.setattr(os, "fsync", lambda file: None)  # nobody pulls the plug here
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        return Cluster(tmp_path, monkeypatch)

    return fresh


moves = st.one_of(
    st.tuples(st.just("collect"), st.integers(1, 4), st.just(0)),
    st.tuples(st.just("kill"), st.integers(0, 2), st.integers(0, 1)),
    st.tuples(st.just("reset"), st.integers(0, 2), st.integers(0, 1)),
    st.tuples(st.just("load"), st.integers(0, 2), st.integers(0, 1)),
)


@pytest.mark.slow
@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(plan=st.lists(moves, max_size=8))
def test_killed_again_and_again(
    plan: list[tuple[str, int, int]], cluster: Callable[[], Cluster]
) -> None:
    """Kill both when one is up to two snapshots ahead; or in the middle of a reset or a load."""
    run = cluster()
    saved: tuple[list[dict[str, object]], list[tuple[int, Values]]] | None = None
    for act, number, ahead in plan:
        if act == "collect":
            for _ in range(number):
                run.collect((0, 1))
        elif act == "kill":
            for _ in range(number):
                run.collect((ahead,))
            if number:
                del run.timeline[-number:]
            run.start()
        elif act == "reset" or saved is None:
            run.averagers[ahead].reset()
            run.timeline.clear()
            if number == 0:
                run.averagers[1 - ahead].reset()
            else:
                for _ in range(number - 1):
                    run.collect((ahead,))
                run.timeline.clear()
                run.start()
        else:
            states, timeline = saved
            run.averagers[ahead].load_state_dict(states[ahead])
            run.timeline = list(timeline)
            if number == 0:
                run.averagers[1 - ahead].load_state_dict(states[1 - ahead])
            else:
                for _ in range(number - 1):
                    run.collect((ahead,))
                run.timeline.clear()
                run.start()
        run.check()
        if run.timeline and saved is None:
            saved = ([deepcopy(a.state_dict()) for a in run.averagers], list(run.timeline))
    run.collect((0, 1))
    run.check()


def test_the_folder_stays_bounded(cluster: Callable[[], Cluster], tmp_path: Path) -> None:
    run = cluster()
    for number in range(1, 9):
        run.collect((0, 1))
        run.check()
        for rank in range(2):
            folder = tmp_path / f"rank-{rank:05d}-of-00002"
            assert len(list(folder.glob("window-*"))) == min(number, 3 + 2)
            assert len(list(folder.glob("kept-*"))) == min(number, 3)


def test_another_k_when_taken_over(cluster: Callable[[], Cluster], tmp_path: Path) -> None:
    run = cluster()
    for _ in range(8):
        run.collect((0, 1))
    run.collect((1,))
    run.timeline.pop()
    run.k = 2
    run.start()
    run.check()
    run.collect((0, 1))
    run.check()
    assert len(list(tmp_path.glob("rank-*/window-*"))) == 2 * 4


def test_a_loaded_window_can_only_end_with_its_newest(cluster: Callable[[], Cluster]) -> None:
    """A state has the kept tensors of no other snapshot."""
    run = cluster()
    for _ in range(5):
        run.collect((0, 1))
    run.averagers[0].load_state_dict(deepcopy(run.averagers[0].state_dict()))
    found = run.contents(0)
    assert [mark.step for mark in found.held] == [3, 4, 5]
    assert [mark.step for mark in found.ends] == [5]
    assert {mark.run for mark in found.held} == {run.contents(1).run + 1}


@pytest.mark.parametrize("behind", [0, 1])
def test_a_parameter_that_is_unfrozen_keeps_the_window(
    behind: int, cluster: Callable[[], Cluster]
) -> None:
    """The files are written anew in another layout, by one rank first; snapshots stay the same."""
    run = cluster()
    model = torch.nn.Linear(2, 2)
    model.register_buffer("n", torch.tensor(0))
    model.bias.requires_grad_(False)

    def collect(ranks: tuple[int, ...]) -> None:
        model.n += 1
        for rank in ranks:
            run.averagers[rank].collect(model)
            run.averagers[rank].wait()

    for _ in range(4):
        collect((0, 1))
    run.start()
    if behind:
        collect((0,))
    model.bias.requires_grad_(True)
    collect((0,))
    run.start()
    for averager in run.averagers:
        assert averager.snapshot_steps == ([3, 4] if behind else [2, 3, 4])
        average = averager.average()
        assert torch.equal(average["bias"], model.bias)
        assert average["n"].item() == 4
        averager.collect(model)
        assert averager.snapshot_steps == [3, 4, 5]


def test_windows_of_other_numbers_of_ranks_are_refused(tmp_path: Path) -> None:
    averager = LatestWeightAverager(k=2, store=DiskStore(tmp_path / "one"))
    averager.collect({"w": torch.ones(3)})
    averager.wait()
    with pytest.raises(StoreError, match=r"one process.* 2 processes"):
        Ranks(0, 2).refuse_other_windows(tmp_path / "one")
    (tmp_path / "four").mkdir()
    Ranks(3, 4).folder(tmp_path / "four").mkdir()
    Ranks(0, 1).refuse_other_windows(tmp_path / "four")  # nothing was collected there
    shutil.copytree(tmp_path / "one", tmp_path / "four" / "rank-00002-of-00004")
    Ranks(0, 4).refuse_other_windows(tmp_path / "four")
    with pytest.raises(StoreError, match=r"4 processes.* one process"):
        LatestWeightAverager(k=2, store=DiskStore(tmp_path / "four"))


def test_an_averager_in_one_process_of_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "rank_and_size", lambda: (1, 4))
    averager = LatestWeightAverager(k=2, store=DiskStore(tmp_path, per_process=True))
    averager.collect({"w": torch.ones(3)})
    averager.wait()
    assert (tmp_path / "manifest.json").exists()
