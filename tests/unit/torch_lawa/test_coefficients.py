"""Coefficients: weights computed by hand, their names, and the registry of rules."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from torch_lawa import Annealing, Blend, Explicit, Exponential, Recent, Uniform
from torch_lawa.coefficients import (
    Coefficients,
    name_coefficients,
    parse_coefficients,
    register_coefficients,
    weights_at,
)
from torch_lawa.errors import ConfigError


def test_recent_weighs_the_steps_of_a_snapshot_by_a_power() -> None:
    weights = Recent(0.25).weights_at([4, 5, 8])  # the oldest stands for step 4 alone
    masses = [sum(s**4 - (s - 1) ** 4 for s in steps) for steps in ([4], [5], [6, 7, 8])]
    assert [w / weights.divisor for w in weights.numerators] == pytest.approx(
        [mass / sum(masses) for mass in masses]
    )
    assert Recent(1.0).weights_at([10, 20, 40]).numerators == (0.25, 0.25, 0.5)
    assert Recent(0.5).weights_at([10, 40]).numerators == (0.0625, 0.9375)  # none before step 1
    assert Recent(0.1).weights_at([0]).numerators == (1.0,)
    assert Recent(0.1).weights(3) == Recent(0.1).weights_at([1, 2, 3])
    assert weights_at(Blend(0.5, Uniform()), [None, None]) == Blend(0.5).weights(2)


def test_exponential_weighs_the_newest_with_alpha_and_sums_to_one() -> None:
    weights = Exponential(0.9).weights(4)
    assert weights.numerators == pytest.approx((0.001, 0.009, 0.09, 0.9))
    assert sum(weights.numerators) == pytest.approx(1.0, abs=1e-15)
    assert weights.divisor == 1.0
    assert Exponential(0.9).weights(1).numerators == (1.0,)
    assert not weights.uniform
    assert Uniform().weights(4).uniform


def test_torch_calls_one_minus_alpha_the_decay() -> None:
    """alpha = 0.9 is decay = 0.1 in `swa_utils`, checked against torch itself."""
    snapshots = [torch.randn(5, dtype=torch.float64) for _ in range(4)]
    update = torch.optim.swa_utils.get_ema_avg_fn(decay=0.1)
    ema = snapshots[0]
    for snapshot in snapshots[1:]:
        ema = update(ema, snapshot, torch.tensor(1))
    weights = Exponential(0.9).weights(4).numerators
    ours = sum(w * s for w, s in zip(weights, snapshots, strict=True))
    torch.testing.assert_close(ours, ema)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Exponential(0.0), r"alpha=0.0.*1 - decay"),
        (lambda: Exponential(1.5), "alpha=1.5"),
        (lambda: Exponential(float("nan")), "alpha=nan"),
        (lambda: Recent(0.0), r"share=0.0.*such as 0.1"),
        (lambda: Recent(1.5), "share=1.5"),
        (lambda: weights_at(Recent(0.1), [1, None]), "recent:0.1: needs the step"),
        (lambda: weights_at(Recent(0.3), [-10, 5]), r"step -10.*from 0 on"),
        (lambda: weights_at(Recent(0.3), [-10, 0]), r"step -10.*from 0 on"),
        (lambda: weights_at(Blend(0.5, Recent(0.1)), [2, 2]), "steps must increase"),
        (lambda: Explicit([]), "one weight per snapshot"),
        (lambda: Explicit([1, float("inf")]), "finite"),
        (lambda: Explicit([1, 0]), "the last weight"),
        (lambda: Explicit([1, 2]).weights(3), "2 weights.* 3 snapshots"),
        (lambda: Explicit([1, -1]).weights(2), "sum to 0"),
        (lambda: Blend(0.0), r"blend=0.0.*at most 1"),
        (lambda: Blend(1.2), r"blend=1.2.*at most 1"),
        (lambda: Blend(True), r"blend=True.*at most 1"),
        (lambda: Blend("0.5"), r"blend='0.5'.*at most 1"),
        (lambda: Blend(0.5, Blend(0.5)), "a blend already"),
    ],
)
def test_impossible_coefficients(make, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    "rule",
    [
        Uniform(),
        Exponential(0.25),
        Recent(0.05),
        Explicit([1, 2.5]),
        Annealing(),
        Blend(0.6),
        Blend(0.25, Explicit([1, 2.5])),
    ],
)
def test_a_name_parses_back_to_its_rule(rule: Coefficients) -> None:
    assert parse_coefficients(name_coefficients(rule)) == rule


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mean", r"'mean'.*exponential:ALPHA.*explicit:W"),
        ("uniform:2", "'2' is not a valid argument; use uniform"),
        ("exponential:high", r"'high' is not a valid argument; use exponential:ALPHA"),
        ("explicit", "explicit:W"),
        ("annealing:sqrt", "1-sqrt"),
        ("blend", "blend:B"),
        ("blend:0.5:mean", "'mean'"),
        ("blend:0.5,recent:0.1", r"use blend:B\[:RULE\]"),
    ],
)
def test_text_that_names_no_rule(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_coefficients(text)


# Everything that adds a rule; run in another interpreter, so that it is not registered here.
NEW_RULE = """
from dataclasses import dataclass
from torch_lawa.coefficients import Weights, register_coefficients

@register_coefficients("latest:COUNT", "the COUNT newest snapshots only")
@dataclass(frozen=True)
class Latest:
    count: int = 1

    @classmethod
    def parse(cls, argument):
        return cls(int(argument or 1))

    @property
    def argument(self):
        return str(self.count)

    def weights(self, n):
        used = min(self.count, n)
        return Weights((0.0,) * (n - used) + (1.0,) * used, float(used))
"""


def with_new_rule(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", NEW_RULE + code], capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_a_new_rule_works_everywhere_from_its_one_entry(tmp_path: Path) -> None:
    """In the averager, on the command line, in `--help`, in errors and in what a result says."""
    run = tmp_path / "run"
    run.mkdir()
    for step in range(1, 5):
        save_file({"w": torch.full((2,), float(step))}, run / f"step-{step}.safetensors")

    online = with_new_rule(
        "import torch\n"
        "from torch_lawa import LatestWeightAverager\n"
        "averager = LatestWeightAverager(k=4, coefficients=Latest(2))\n"
        "for value in (1.0, 2.0, 3.0, 4.0):\n"
        "    averager.collect({'w': torch.full((2,), value)})\n"
        "print(averager.average()['w'].tolist())\n"
    )
    assert online.stdout.strip() == "[3.5, 3.5]", online.stderr

    def lawa(*words: str) -> subprocess.CompletedProcess[str]:
        return with_new_rule(f"from torch_lawa.cli.main import main\nmain({list(words)!r})\n")

    out = tmp_path / "out.safetensors"
    done = lawa("average", str(run), "--last", "4", "--coefficients", "latest:2", "-o", str(out))
    assert done.returncode == 0, done.stderr
    assert load_file(out)["w"].tolist() == [3.5, 3.5]
    assert "latest:2" in lawa("inspect", str(out)).stdout
    assert "latest:COUNT (the COUNT newest" in " ".join(lawa("average", "--help").stdout.split())
    wrong = lawa("average", str(run), "--last", "2", "--coefficients", "lasting", "-o", "other")
    assert wrong.returncode != 0
    assert "latest:COUNT" in wrong.stderr


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ConfigError, match="'uniform' is registered"):
        register_coefficients("uniform")(Uniform)


@pytest.mark.parametrize("values", [[1e308, 1e308], [10**400]])
def test_weights_whose_sum_is_too_large(values: list[float]) -> None:
    with pytest.raises(ConfigError, match="too large"):
        Explicit(values).weights(len(values))
