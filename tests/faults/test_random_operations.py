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

from torch_lawa import (
    Blend,
    DiskStore,
    Every,
    Exponential,
    Horizon,
    LatestWeightAverager,
    Recent,
    Uniform,
    WindowChooser,
    WindowSearch,
)
from torch_lawa import swap as swaps
from torch_lawa.coefficients import Weights, weights_at

pytestmark = [
    pytest.mark.faults,
    pytest.mark.filterwarnings("ignore:collect takes a snapshot at every call"),
]

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
    stored: torch.dtype | None = None
    last_due: int = 0
    snapshots: list[tuple[int, dict[str, Tensor]]] = field(default_factory=list)
    num_steps: int = 0
    num_collected: int = 0

    def step(self, model: Net, schedule: Every | Horizon) -> None:
        self.num_steps += 1
        if self._due(schedule):
            self.last_due = self.num_steps
            self.collect(model, self.num_steps)

    def _due(self, schedule: Every | Horizon) -> bool:
        if isinstance(schedule, Every):
            return self.num_steps % schedule.n == 0
        powers = ((1 - schedule.share) ** (-m / schedule.k) for m in range(1, 99))
        passed = [p for p in powers if self.last_due + 1e-6 < p <= self.num_steps + 1e-6]
        return bool(passed) or not self.last_due

    def collect(self, model: Net, step: int | None = None) -> None:
        self.num_collected += 1
        step = step or self.num_steps or self.num_collected
        if self.snapshots:
            step = max(step, self.snapshots[-1][0] + 1)
        taken = {name: self._rounded(name, t) for name, t in model.state_dict().items()}
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

    def weighted(self, weights: Weights, live: Tensor | None = None) -> Tensor:
        """The weighted mean of `w`; with one more weight also of the live value."""
        values = [state["w"] for _, state in self.snapshots]
        values = [*values, *([] if live is None else [live])][-len(weights.numerators) :]
        terms = [v.double() * w for v, w in zip(values, weights.numerators, strict=True) if w]
        return (sum(terms[1:], terms[0]) / weights.divisor).float()

    def within(self, share: float) -> int:
        """How many snapshots are in the last `share` of the steps before the newest."""
        newest = self.snapshots[-1][0]
        first = newest - int(share * newest)
        return max(1, sum(step > first for step, _ in self.snapshots))

    def _rounded(self, name: str, tensor: Tensor) -> Tensor:
        """As it is stored; tensors that are not averaged are stored as they are."""
        if self.stored is None or name not in ("w", "h"):
            return tensor.clone()
        return tensor.clone().to(self.stored).to(tensor.dtype)


class Run:
    """One averager, its model, and the operations on both."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.draw, self.folder, self.serial = random.Random(seed), folder, itertools.count()
        self.net = Net(torch.Generator().manual_seed(seed))
        self.k, least = self.draw.randint(1, 4), self.draw.randint(1, 2)
        self.schedule = self.draw.choice([Every(least), Horizon(0.5, k=self.k)])
        self.sliding = self.draw.choice([True, False])
        self.stored = self.draw.choice([None, None, torch.bfloat16])
        self.begin()

    def begin(self) -> None:
        """An empty window in a new store."""
        kind = self.draw.choice(STORES)
        self.path = self.folder / str(next(self.serial)) if kind == "disk" else None
        self.averager = self.make(kind if self.path is None else DiskStore(self.path))
        self.model = Model(self.k, self.stored)

    def make(self, store: Any) -> LatestWeightAverager:
        return LatestWeightAverager(
            k=self.k,
            store=store,
            schedule=self.schedule,
            storage_dtype=self.stored,
            _sliding=self.sliding,
        )

    def step(self) -> None:
        self.net.train_a_little(self.draw)
        self._interrupted(
            lambda: self.averager.step(self.net), lambda: self.model.step(self.net, self.schedule)
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
            if isinstance(self.schedule, Horizon):
                assert self.averager.num_averaged == self.model.within(self.schedule.share)

    def read_weighted(self) -> None:
        """A blend, or weights that fall with the age of a snapshot."""
        if self.model.snapshots:
            n = self.draw.randint(1, len(self.model.snapshots))
            rules = [Exponential(0.3), Recent(0.3), Blend(0.25), Blend(0.5, Exponential(0.6))]
            rule = self.draw.choice(rules)
            got = self.averager.average(k=n, coefficients=rule)["w"]
            weights = weights_at(rule, self.averager.snapshot_steps[-n:])
            assert same_bits(got, self.model.weighted(weights))

    def swap(self) -> None:
        if not self.model.snapshots:
            return
        own = {name: tensor.clone() for name, tensor in self.net.state_dict().items()}

        n = self.draw.randint(1, len(self.model.snapshots))
        rule = self.draw.choice([Uniform(), Blend(0.25)])
        weights, live = rule.weights(n), None
        if isinstance(rule, Blend):
            weights = rule.live_weights(self.averager.snapshot_steps[-n:])
            live = own["w"]

        def use() -> None:
            with self.averager.swapped_into(self.net, k=n, coefficients=rule):
                assert same_bits(self.net.w.detach(), self.model.weighted(weights, live))
                self.net.seen.zero_()

        self._interrupted(use, lambda: None)
        for name, tensor in self.net.state_dict().items():
            assert same_bits(tensor, own[name]), name

    def choose(self) -> None:
        """Measure every window and serve the best."""
        own = {name: tensor.clone() for name, tensor in self.net.state_dict().items()}
        windows = range(1, len(self.model.snapshots) + 1)
        expected = {0: own["w"].double().sum().item()}
        for n in windows:
            expected[n] = self.model.weighted(Uniform().weights(n)).double().sum().item()
        search = WindowSearch(ks=range(1, self.k + 1), margin=0.0)
        chooser = WindowChooser(self.averager, lambda net: net.w.double().sum().item(), search)
        self._interrupted(lambda: chooser.choose(self.net), lambda: None)
        assert chooser.choose(self.net).values == expected
        assert chooser.k == min(expected, key=lambda n: (expected[n], n))
        for name, tensor in self.net.state_dict().items():
            assert same_bits(tensor, own[name]), name

    def unfreeze(self) -> None:
        if self.stored is None:  # else its one copy, which is exact, would be rounded now
            self.net.frozen.requires_grad_(True)

    def reset(self) -> None:
        def plainly() -> None:
            self.model.snapshots = []

        self._interrupted(self.averager.reset, plainly)

    def load(self) -> None:
        """What was saved now and loaded into another store with another k, or one step later."""
        file, saved = io.BytesIO(), copy.deepcopy(self.model)
        torch.save(self.averager.state_dict(), file)
        if self.draw.random() < 0.5:
            self.k = saved.k = self.draw.randint(1, 5)
            saved.snapshots = saved.snapshots[-self.k :]
            if isinstance(self.schedule, Horizon):
                self.schedule = Horizon(self.schedule.share, k=self.k)
            self.begin()
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
        notes = self.averager._window.store.held.notes
        del self.averager
        gc.collect()
        self.averager = self.make(DiskStore(self.path))
        self.model.num_steps = notes["num_steps"]
        self.model.last_due = notes["schedule"].get("last", 0)

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
ACTS += ["load", "reopen", "wait", "read_weighted", "choose"]


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
