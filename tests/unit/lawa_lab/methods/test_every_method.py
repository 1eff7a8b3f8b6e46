"""One battery for every registered method: typed, mistaken, referenced, resumed, restored."""

import copy
import itertools
import math
import statistics
from collections.abc import Callable

import numpy as np
import pytest
import torch
from support import following
from support.following import (
    EVERY,
    FITS,
    STEPS,
    Following,
    K,
    flat,
    goal,
    move,
    net,
    position,
    target,
    validation_loss,
)

from lawa_lab.methods.registry import METHODS, Method, RingMethod, parse_method
from torch_lawa.errors import ConfigError, LawaError
from torch_lawa.schedule import Horizon
from torch_lawa.swag import _key, normal_numbers

SIZE = flat(net()).numel()
TENSORS = [p.numel() for p in net().parameters()]
RUN = [position(step, SIZE).astype(np.float64) for step in range(1, STEPS + 1)]
RING = [RUN[step - 1] for step in range(1, STEPS + 1) if step % EVERY == 0]
WINDOW = RING[-K:]
Reference = Callable[[Method], np.ndarray]


def mean(points: list[np.ndarray]) -> np.ndarray:
    return np.mean(points, axis=0)


def ema(method: Method) -> np.ndarray:
    found = RUN[0]
    for weights in RUN[1:]:
        found = method.decay * found + (1 - method.decay) * weights
    return found


def corrected_ema(method: Method) -> np.ndarray:
    """From zero, divided by the sum of all weights given."""
    total, weight = np.zeros(SIZE), 0.0
    for weights in RUN:
        total = method.decay * total + (1 - method.decay) * weights
        weight = method.decay * weight + (1 - method.decay)
    return total / weight


def bema(method: Method) -> np.ndarray:
    """Block and Zhang, algorithm 1: the EMA begins at the first weights, before any step."""
    found = start = flat(net()).detach().numpy().astype(np.float64)
    for t, weights in enumerate(RUN, 1):
        share = (10 + t) ** -method.kappa
        found = (1 - share) * found + share * weights
    return found + (10 + STEPS) ** -method.eta * (RUN[-1] - start)


def growing_ema(method: Method) -> np.ndarray:
    found = RUN[0]
    for t, weights in enumerate(RUN[1:], 2):
        share = min(1.0, 1 / (method.share * t))
        found = found + share * (weights - found)
    return found


def spaced(method: Method) -> list[int]:
    """The last steps at which a window with a horizon collects, and the one before."""
    schedule = Horizon(method.share, k=int(method.k))
    return [step for step in range(1, STEPS + 1) if schedule.due(step)][-int(method.k) - 1 :]


def horizon(method: Method) -> np.ndarray:
    window = mean([RUN[step - 1] for step in spaced(method)[1:]])
    return method.blend * window + (1 - method.blend) * RUN[-1]


def two_tailed(method: Method) -> np.ndarray:
    """The long mean begins at `long`, the short one at `short` (counted from 0)."""
    long = short = 0
    for now in FITS:
        if validation_loss(mean(RUN[short:now])) <= validation_loss(mean(RUN[long:now])):
            long, short = short, now
    assert 0 < long < STEPS  # otherwise nothing was tested
    return mean(RUN[long:])


def twa(method: Method) -> np.ndarray:
    """An orthonormal basis by Gram-Schmidt, and descent in the space of all weights."""
    centre, basis = mean(WINDOW), []
    for point in WINDOW:
        direction = point - centre
        for unit in basis:
            direction = direction - (unit @ direction) * unit
        if np.linalg.norm(direction) > 1e-6:
            basis.append(direction / np.linalg.norm(direction))
    rows, weights = np.stack(basis), centre
    for i in range(int(method.batches)):
        rate = method.rate * (1 - i / method.batches)
        weights = weights - rate * rows.T @ (rows @ (weights - target(i, SIZE)))
    return weights


def greedy_soup(method: Method) -> np.ndarray:
    order = sorted(WINDOW, key=validation_loss)
    soup = [order[0]]
    for point in order[1:]:
        if validation_loss(mean([*soup, point])) < validation_loss(mean(soup)):
            soup.append(point)
    assert 1 < len(soup) < K  # otherwise nothing was tested
    return mean(soup)


def phase(method: Method) -> np.ndarray:
    linear = sum(i * point for i, point in enumerate(WINDOW, 1)) / sum(range(1, K + 1))
    return min(mean(WINDOW), linear, key=validation_loss)


def extrapolated(points: list[np.ndarray], penalty: float) -> np.ndarray:
    """Scieur et al., algorithm 2: the residuals, a regularised system, normalised coefficients."""
    residuals = np.stack([b - a for a, b in itertools.pairwise(points)], axis=1)
    gram = residuals.T @ residuals
    gram = gram / np.linalg.norm(gram, 2)
    solved = np.linalg.inv(gram + penalty * np.eye(len(gram))) @ np.ones(len(gram))
    return np.stack(points[1:], axis=1) @ (solved / solved.sum())


def rna_per_tensor(method: Method) -> np.ndarray:
    cuts = np.cumsum(TENSORS)[:-1]
    parts = zip(*(np.split(point, cuts) for point in WINDOW), strict=True)
    return np.concatenate([extrapolated(list(part), method.penalty) for part in parts])


def swag(method: Method) -> np.ndarray:
    """The formula; the numbers themselves are checked in tests/laws/test_swag_law.py."""
    seed, centre = int(method.seed), mean(WINDOW)
    names = [name for name, _ in net().named_parameters()]
    z1 = [
        normal_numbers(_key(seed, n), torch.arange(s)) for n, s in zip(names, TENSORS, strict=True)
    ]
    z2 = normal_numbers(_key(seed), torch.arange(K)).numpy()
    spread = np.sqrt(mean([np.square(point - centre) for point in WINDOW]))
    along = sum(z * (p - centre) for z, p in zip(z2, WINDOW, strict=True)) / math.sqrt(K - 1)
    return centre + math.sqrt(method.scale) * (spread * torch.cat(z1).numpy() + along)


# How it is typed, an independent reference, and mistakes.
EVERY_METHOD: dict[str, tuple[str, Reference, list[str]]] = {
    "ema": ("ema:0.9", ema, ["ema", "ema:1"]),
    "swa": ("swa:20", lambda method: mean(RUN[20:]), ["swa:-1", "swa:0.5"]),
    "growing-ema": ("growing-ema:0.25", growing_ema, ["growing-ema:0", "growing-ema:2"]),
    "horizon": ("horizon:0.5:4:0.6", horizon, ["horizon:0.5:1.5", "horizon:0.5:4:2"]),
    "dense": (
        "dense:0.5:4",
        lambda method: mean(RUN[spaced(method)[0] :]),
        ["dense:0.5", "dense:2:4"],
    ),
    "corrected-ema": ("corrected-ema:0.9", corrected_ema, ["corrected-ema:1", "corrected-ema"]),
    "bema": ("bema:0.5:0.3", bema, ["bema:0:1", "bema:0.5:0"]),
    "two-tailed": ("two-tailed", two_tailed, ["two-tailed:1"]),
    "twa": ("twa:0.5:7", twa, ["twa:0:7", "twa:1:0.5", "twa:1"]),
    "greedy-soup": ("greedy-soup", greedy_soup, ["greedy-soup:1"]),
    "phase": ("phase", phase, ["phase:1"]),
    "rna": ("rna:0.1", lambda method: extrapolated(WINDOW, method.penalty), ["rna:0", "rna"]),
    "rna-per-tensor": ("rna-per-tensor:0.1", rna_per_tensor, ["rna-per-tensor:-1"]),
    "swag": ("swag:3:0.8", swag, ["swag:-1", "swag:0.5", "swag:0:-1"]),
}
TEXTS = [text for text, _, _ in EVERY_METHOD.values()]


def test_the_battery_is_complete() -> None:
    assert set(EVERY_METHOD) == set(METHODS)


@pytest.mark.parametrize("text", TEXTS)
def test_it_is_built_from_what_is_typed(text: str) -> None:
    method = parse_method(text)
    assert str(method) == text
    assert parse_method(str(method)) == method
    assert text.count(":") <= method.typed.count(":")
    assert Following(method).averager.kind == text
    if isinstance(method, RingMethod):
        with pytest.raises(ConfigError, match="window"):
            method.build(net())


@pytest.mark.parametrize("name", EVERY_METHOD)
def test_mistakes_are_told_with_the_way_to_write_it(name: str) -> None:
    for text in [*EVERY_METHOD[name][2], f"{name}:x", f"{EVERY_METHOD[name][0]}:1:1"]:
        with pytest.raises(ConfigError) as caught:
            parse_method(text)
        assert name in str(caught.value)
    assert METHODS[name].typed in str(caught.value)


@pytest.mark.parametrize("name", EVERY_METHOD)
def test_it_has_the_values_of_an_independent_reference(name: str) -> None:
    text, reference, _ = EVERY_METHOD[name]
    method = parse_method(text)
    found = Following(method).go().served()
    np.testing.assert_allclose(found, reference(method), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("step", [1, 15, 22, 31])
def test_it_resumes_bit_for_bit(text: str, step: int) -> None:
    whole, first = Following(parse_method(text)).go(), Following(parse_method(text)).go(step)
    second = Following(parse_method(text))
    second.load_state_dict(copy.deepcopy(first.state_dict()), step)
    np.testing.assert_array_equal(second.go().served(), whole.served())


@pytest.mark.parametrize("text", TEXTS)
def test_a_loaded_one_serves_what_was_saved(text: str) -> None:
    first, other = Following(parse_method(text)).go(STEPS - 1), net()
    move(other, STEPS + 1)  # what was built from other weights is replaced, too
    second = Following(parse_method(text), other)
    second.load_state_dict(copy.deepcopy(first.state_dict()), STEPS - 1)
    second.model = first.model
    np.testing.assert_array_equal(second.served(), first.served())


@pytest.mark.parametrize("text", TEXTS)
def test_weights_and_buffers_are_restored_after_an_exception(text: str) -> None:
    run = Following(parse_method(text))
    with pytest.raises(LawaError), run.averager.swapped_into(run.model):
        pass  # nothing was averaged yet
    model = run.go().model
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="inside"), run.averager.swapped_into(model):
        assert not torch.equal(model[0].weight, before["0.weight"])
        model(torch.randn(8, 3))  # changes the BatchNorm statistics
        raise RuntimeError("inside")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("text", TEXTS)
def test_what_average_returns_is_what_is_swapped_in(text: str) -> None:
    run = Following(parse_method(text)).go()
    served = run.served()
    if text.startswith(("bema", "horizon")):  # they need the live weights
        return
    found = run.averager.average()
    parts = [found[name].reshape(-1) for name, _ in run.model.named_parameters()]
    np.testing.assert_array_equal(torch.cat(parts).numpy(), served)


@pytest.mark.parametrize("text", TEXTS)
def test_it_says_whether_it_needs_validation_data(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []

    def counted(weights: np.ndarray) -> float:
        calls.append(weights)
        return validation_loss(weights)

    monkeypatch.setattr(following, "validation_loss", counted)
    averager = Following(parse_method(text)).go().averager
    assert getattr(averager, "validates", False) == bool(calls)


def test_the_made_up_run_is_worth_following() -> None:
    """The goal is within reach of the window, and no method is a copy of another."""
    assert validation_loss(mean(WINDOW)) < validation_loss(RUN[-1])
    assert validation_loss(goal(SIZE)) == 0
    served = [Following(parse_method(text)).go().served() for text in TEXTS]
    distances = [float(np.abs(a - b).max()) for i, a in enumerate(served) for b in served[i + 1 :]]
    assert min(distances) > 1e-3
    assert statistics.median(distances) > 0.1
