"""Random operations on every store, some interrupted, against a list of dicts and a plain mean."""

import contextlib
import copy
import gc
import io
import itertools
import os
import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from support.campaign import Campaign, CountTrials
from support.interrupts import Interrupt, is_free
from support.models import brute_force, same_bits
from torch import Tensor, nn

from torch_lawa import DiskStore, Every, LatestWeightAverager
from torch_lawa import swap as swaps

pytestmark = pytest.mark.faults

STORES = ["host", "device", "disk"]


class Net(nn.Module):
    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator
        self.w = nn.Parameter(torch.zeros(67))
        self.h = nn.Parameter(torch.zeros(3, 2, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.randn(2, generator=generator), requires_grad=False)
        self.register_buffer("seen", torch.zeros(1))

    def train_a_little(self, draw: random.Random) -> None:
        with torch.no_grad():
            for tensor in self.parameters():
                if tensor.requires_grad:
                    tensor.copy_(torch.randn(tensor.shape, generator=self.generator))
            if draw.random() < 0.3:
                self.seen = torch.randn(draw.randrange(4), generator=self.generator)
            else:
                self.seen.copy_(torch.randn(self.seen.shape, generator=self.generator))


@dataclass
class Model:
    """The plain model of an averager: a list."""

    k: int
    snapshots: list[tuple[int, dict[str, Tensor]]] = field(default_factory=list)
    num_steps: int = 0
    num_collected: int = 0

    def step(self, model: Net, every: int) -> None:
        self.num_steps += 1
        if self.num_steps % every == 0:
            self.collect(model, self.num_steps)

    def collect(self, model: Net, step: int | None = None) -> None:
        self.num_collected += 1
        step = step or self.num_steps or self.num_collected
        if self.snapshots:
            step = max(step, self.snapshots[-1][0] + 1)
        taken = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        self.snapshots = [*self.snapshots, (step, taken)][-self.k :]

    def matches(self, averager: LatestWeightAverager) -> bool:
        """Steps, counts and values."""
        facts = averager.snapshot_steps, averager._num_steps, averager.num_collected
        if facts != ([step for step, _ in self.snapshots], self.num_steps, self.num_collected):
            return False
        try:
            for n in range(1, len(self.snapshots) + 1):
                self.check(averager, n)
        except AssertionError:
            return False
        return True

    def check(self, averager: LatestWeightAverager, n: int) -> None:
        used = [state for _, state in self.snapshots[-n:]]
        for name, got in averager.average(k=n).items():
            expected = used[-1][name]
            if name in ("w", "h", "frozen"):
                mean = torch.from_numpy(brute_force([state[name] for state in used]))
                # No double rounding: each sum of a few bfloat16 numbers is exact in float32.
                expected = mean.to(expected.dtype)
            assert same_bits(got, expected), name


class Run:
    """One averager, its model, and the operations on both."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.draw, self.folder, self.serial = random.Random(seed), folder, itertools.count()
        self.net = Net(torch.Generator().manual_seed(seed))
        self.k, self.every = self.draw.randint(1, 4), self.draw.randint(1, 2)
        self.sliding = self.draw.choice([True, False])
        self.averager = self.make(self.draw.choice(STORES))
        self.model = Model(self.k)
        self.path: Path | None

    def make(self, kind: str) -> LatestWeightAverager:
        self.path = self.folder / str(next(self.serial)) if kind == "disk" else None
        store: Any = kind if self.path is None else DiskStore(self.path)
        return LatestWeightAverager(
            k=self.k, store=store, schedule=Every(self.every), _sliding=self.sliding
        )

    def step(self) -> None:
        self.net.train_a_little(self.draw)
        self._interrupted(
            lambda: self.averager.step(self.net), lambda: self.model.step(self.net, self.every)
        )

    def collect(self) -> None:
        self.net.train_a_little(self.draw)
        self._interrupted(
            lambda: self.averager.collect(self.net), lambda: self.model.collect(self.net)
        )

    def read(self) -> None:
        if self.model.snapshots:
            n = self.draw.choice([len(self.model.snapshots), 1])
            self._interrupted(lambda: self.averager.average(k=n), lambda: None)
            self.model.check(self.averager, n)

    def swap(self) -> None:
        if not self.model.snapshots:
            return
        own = {name: tensor.clone() for name, tensor in self.net.state_dict().items()}

        def use() -> None:
            with self.averager.swapped_into(self.net, k=1):
                newest = self.model.snapshots[-1][1]
                assert same_bits(self.net.w.detach(), newest["w"])
                self.net.seen.zero_()

        self._interrupted(use, lambda: None)
        for name, tensor in self.net.state_dict().items():
            assert same_bits(tensor, own[name]), name

    def unfreeze(self) -> None:
        self.net.frozen.requires_grad_(True)

    def reset(self) -> None:
        def plainly() -> None:
            self.model.snapshots = []

        self._interrupted(self.averager.reset, plainly)

    def load(self) -> None:
        """What was saved now and loaded into another store, or one step later."""
        file, saved = io.BytesIO(), copy.deepcopy(self.model)
        torch.save(self.averager.state_dict(), file)
        if self.draw.random() < 0.5:
            self.averager = self.make(self.draw.choice(STORES))
            self.model = Model(self.k)
            self.collect()
        else:
            self.step()
        state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)

        def plainly() -> None:
            self.model = saved

        self._interrupted(lambda: self.averager.load_state_dict(state), plainly)

    def reopen(self) -> None:
        """As a later process would."""
        if self.path is None or not self.model.snapshots:
            return
        self.averager.wait()
        # Steps since the last snapshot are not on disk.
        steps = self.averager._window.store.held.notes["num_steps"]
        del self.averager
        gc.collect()
        self.averager = LatestWeightAverager(
            k=self.k,
            store=DiskStore(self.path),
            schedule=Every(self.every),
            _sliding=self.sliding,
        )
        self.model.num_steps = steps

    def wait(self) -> None:
        self._interrupted(self.averager.wait, lambda: None)

    def _interrupted(self, act: Any, plainly: Any) -> None:
        """Do it, or interrupt it somewhere: then it has happened or not."""
        before = copy.deepcopy(self.model)
        places = 10 ** self.draw.uniform(0, 4)
        interrupt = Interrupt(int(self.draw.random() * places))
        finished = False
        if self.draw.random() < 0.5:
            act()
            finished = True
        else:
            with contextlib.suppress(KeyboardInterrupt), interrupt:
                act()
                finished = True
        assert not swaps._swapped, interrupt.where
        assert is_free(self.averager._lock), interrupt.where
        plainly()
        if not finished and not self.model.matches(self.averager):
            self.model = before
            assert self.model.matches(self.averager), interrupt.where


ACTS = ["step"] * 6 + ["collect", "collect", "read", "read", "swap", "unfreeze", "reset"]
ACTS += ["load", "reopen", "wait"]


def test_random_operations_give_what_a_list_gives(
    campaign: Campaign, trials: CountTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    for seed in campaign.until_time_is_up(itertools.count(campaign.seed)):
        done: list[str] = []
        with tempfile.TemporaryDirectory() as folder:
            run = Run(seed, Path(folder))
            try:
                for _ in range(40):
                    done.append(run.draw.choice(ACTS))
                    getattr(run, done[-1])()
                if run.model.snapshots:
                    run.model.check(run.averager, len(run.model.snapshots))
            except BaseException as error:
                error.add_note(f"seed {seed}: {', '.join(done)}")
                raise
        trials("random operations", len(done))
