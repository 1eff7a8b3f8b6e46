"""Methods that read a window which somebody else fills: which snapshots they see, and when."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.following import EVERY, FITS, STEPS, Following, K, data_for

from lawa_lab.methods import ring
from lawa_lab.methods.accelerated import extrapolation_weights
from lawa_lab.methods.registry import parse_method
from torch_lawa import LatestWeightAverager
from torch_lawa.errors import NotReadyError

TEXTS = ("twa:0.5:7", "greedy-soup", "phase", "rna:0.1", "rna-per-tensor:0.1", "swag:3:0.8")


@pytest.mark.parametrize("text", TEXTS)
def test_after_a_fit_its_weights_are_those_of_as_many_newest_snapshots(text: str) -> None:
    """There were three at the fit, so that the window of four serves as one of three."""
    windows = [LatestWeightAverager(k, min_snapshots=1) for k in (3, K)]
    runs = [Following(parse_method(text), ring=window).go(FITS[0] + EVERY) for window in windows]
    assert [len(window) for window in windows] == [3, K]
    np.testing.assert_array_equal(*(run.served() for run in runs))


@pytest.mark.parametrize("text", TEXTS)
def test_snapshots_beyond_the_horizon_do_not_count(text: str) -> None:
    windows = [LatestWeightAverager(3), LatestWeightAverager(K, horizon=0.25)]
    runs = [Following(parse_method(text), ring=window).go(STEPS) for window in windows]
    assert (len(windows[1]), windows[1].num_averaged) == (K, 3)
    np.testing.assert_array_equal(*(run.served() for run in runs))


@pytest.mark.parametrize("text", TEXTS)
def test_nothing_is_served_before_the_window_is_ready(text: str) -> None:
    run = Following(parse_method(text), ring=LatestWeightAverager(K)).go(FITS[0])
    assert len(run.ring) == 3
    assert not run.averager.step(run.model)  # it takes no snapshots itself
    assert not run.averager.ready
    assert run.go(FITS[1]).averager.ready


@pytest.mark.parametrize(("text", "least"), [("twa:0.5:7", 2), ("swag:3:0.8", 2), ("rna:0.1", 3)])
def test_a_method_waits_for_as_many_snapshots_as_it_needs(text: str, least: int) -> None:
    run = Following(parse_method(text)).go((least - 1) * EVERY)
    run.averager.fit(data_for(run.model))  # type: ignore[attr-defined]
    with pytest.raises(NotReadyError, match=f"at least {least}"):
        run.served()
    run.go(least * EVERY).averager.fit(data_for(run.model))  # type: ignore[attr-defined]
    assert run.averager.ready


def test_of_equal_losses_the_phase_is_uniform() -> None:
    run = Following(parse_method("phase")).go(STEPS)
    run.averager.fit(replace(data_for(run.model), validate=lambda: 1.0))  # type: ignore[attr-defined]
    assert run.averager.weights == (1.0,) * K  # type: ignore[attr-defined]


def test_gram_matrices_are_products_of_whole_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64: the deviations are small beside the weights."""
    monkeypatch.setattr(ring, "_CHUNK", 5)
    snapshots = {name: 1e4 + torch.randn(4, *shape) for name, shape in (("w", (3, 4)), ("b", ()))}
    window = LatestWeightAverager(3)
    for i in range(4):
        window.collect({name: each[i] for name, each in snapshots.items()})
    found = dict(ring.gram_matrices(window, 3))
    assert found.keys() == snapshots.keys()
    for name, each in snapshots.items():
        rows = each[1:].reshape(3, -1).double().numpy()
        rows = rows - rows.mean(0)
        np.testing.assert_allclose(found[name], rows @ rows.T, rtol=1e-9)


def test_what_does_not_move_stays() -> None:
    assert extrapolation_weights(torch.zeros(4, 4, dtype=torch.float64), 0.1) == [0, 0, 0, 1]
