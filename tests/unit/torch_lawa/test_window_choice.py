"""Choosing a window: never worse than the raw weights, stable, and the model left as it was."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torch_lawa import LatestWeightAverager, WindowChooser, WindowSearch, recalibrate_batch_norm
from torch_lawa.errors import ConfigError, StateError, SwapError
from torch_lawa.window_choice import search_for


def collected(values: list[float], k: int = 4) -> tuple[nn.Linear, LatestWeightAverager]:
    model, averager = nn.Linear(1, 1, bias=False), LatestWeightAverager(k=k)
    for value in values:
        model.weight.data.fill_(value)
        averager.collect(model)
    return model, averager


def distance_to(target: float) -> Callable[[nn.Module], float]:
    def evaluate(model: nn.Module) -> float:
        assert not model.training
        assert not torch.is_grad_enabled()
        return abs(next(model.parameters()).item() - target)

    return evaluate


def served(chooser: WindowChooser, model: nn.Module) -> float:
    with chooser.swapped_into(model):
        return next(model.parameters()).item()


@pytest.mark.parametrize(("target", "k"), [(5.0, 4), (7.0, 2), (8.0, 0), (-9.0, 4)])
def test_the_best_is_chosen_and_served(target: float, k: int) -> None:
    model, averager = collected([2.0, 4.0, 6.0, 8.0])
    model.train()
    chooser = WindowChooser(averager, distance_to(target))
    assert (chooser.k, served(chooser, model)) == (0, 8.0)  # nothing was chosen yet
    choice = chooser.choose(model)
    means = {0: 8.0, 1: 8.0, 2: 7.0, 4: 5.0}
    assert choice.values == {n: abs(mean - target) for n, mean in means.items()}
    assert (choice.k, choice.value) == (k, min(choice.values.values()))
    assert choice.seconds > 0
    assert (chooser.k, served(chooser, model)) == (k, means[k])
    assert (model.weight.item(), model.training) == (8.0, True)


def test_the_newest_snapshot_is_not_the_live_weights() -> None:
    model, averager = collected([2.0, 4.0])
    model.weight.data.fill_(100.0)
    choice = WindowChooser(averager, distance_to(4.0)).choose(model)
    assert choice.values == {0: 96.0, 1: 0.0, 2: 1.0}


def test_raw_weights_that_are_the_newest_snapshot_are_measured_once() -> None:
    model, averager = collected([2.0, 4.0, 6.0, 8.0])
    seen: list[float] = []

    def evaluate(model: nn.Module) -> float:
        seen.append(next(model.parameters()).item())
        return seen[-1]

    chooser = WindowChooser(averager, evaluate)
    assert chooser.choose(model).values == {0: 8.0, 1: 8.0, 2: 7.0, 4: 5.0}
    assert seen == [8.0, 7.0, 5.0]
    model.weight.data.fill_(9.0)  # training went on
    assert chooser.choose(model).values == {0: 9.0, 1: 8.0, 2: 7.0, 4: 5.0}
    assert seen[3:] == [9.0, 8.0, 7.0, 5.0]


def test_windows_that_are_not_there_yet_are_not_measured() -> None:
    model, averager = collected([], k=16)
    chooser = WindowChooser(averager, distance_to(0.0))
    measured = []
    for _ in range(17):
        measured.append(sorted(chooser.choose(model).values))
        averager.collect(model)
    assert measured[0] == [0]
    assert measured[1] == measured[3] == [0, 1]
    assert measured[4] == [0, 1, 4]
    assert measured[8] == [0, 1, 4, 8]
    assert measured[16] == [0, 1, 4, 8, 16]


@pytest.mark.parametrize(
    ("k", "windows"), [(1, [1]), (2, [1, 2]), (6, [1, 3, 6]), (8, [1, 2, 4, 8])]
)
def test_windows_of_a_small_ring(k: int, windows: list[int]) -> None:
    _, averager = collected([1.0] * k, k)
    assert WindowSearch().candidates(averager) == windows


def test_early_in_a_run_no_window_reaches_beyond_the_horizon() -> None:
    averager = LatestWeightAverager(k=16, horizon=1 / 4)
    for _ in range(20):
        averager.step({"w": torch.zeros(1)})
    assert (len(averager), averager.num_averaged) == (16, 5)
    assert WindowSearch().candidates(averager) == [1, 4, 5]
    assert WindowSearch([8, 16]).candidates(averager) == [8, 16]  # as asked for


def test_a_hardly_better_window_changes_nothing() -> None:
    search = WindowSearch(margin=0.1)
    assert search.decide({0: 2.0, 2: 1.0, 4: 1.5}) == 2
    assert search.decide({0: 2.0, 2: 1.05, 4: 1.0}) == 2
    assert search.decide({0: 2.0, 2: 1.2, 4: 1.0}) == 4
    assert search.decide({0: 2.0, 2: 1.0, 4: 1.05}) == 4


def test_never_worse_than_the_raw_weights() -> None:
    search = WindowSearch(margin=0.9)
    assert search.decide({0: 2.0, 2: 1.0}) == 2
    assert search.decide({0: 1.0, 2: 1.001}) == 0
    assert search.decide({0: 1.0, 2: 1.0}) == 0
    assert search.decide({0: 1.0, 2: 0.999}) == 2


def test_higher_is_better() -> None:
    search = WindowSearch(mode="max", margin=0.1)
    assert search.decide({0: 0.5, 2: 0.7, 4: 0.6}) == 2
    assert search.decide({0: 0.5, 2: 0.69, 4: 0.7}) == 2
    assert search.decide({0: 0.7, 2: 0.69, 4: 0.6}) == 0
    assert search.decide({0: 0.7, 2: math.inf, 4: 0.8}) == 4


def test_what_is_not_finite_never_wins() -> None:
    search = WindowSearch()
    assert search.decide({0: 1.0, 2: math.nan, 4: -math.inf}) == 0
    assert search.decide({0: math.nan, 2: 1.5, 4: 1.0}) == 4  # the run diverged, an average did not
    assert search.decide({0: math.nan, 2: 0.9, 4: math.nan}) == 2
    assert search.decide({0: math.nan, 2: math.nan, 4: math.inf}) == 0


def test_neighbours_between_full_looks() -> None:
    _, averager = collected([1.0] * 16, 16)
    search = WindowSearch(full_every=3)
    assert search.candidates(averager) == [1, 4, 8, 16]
    search.decide({0: 2.0, 1: 2.0, 4: 2.0, 8: 2.0, 16: 1.0})
    assert search.candidates(averager) == [8, 16]
    search.decide({0: 2.0, 8: 0.5, 16: 1.0})
    assert search.candidates(averager) == [4, 8, 16]
    search.decide({0: 2.0, 4: 3.0, 8: 0.5, 16: 1.0})
    assert search.candidates(averager) == [1, 4, 8, 16]
    search.decide({0: 0.0, 8: 0.5})
    assert search.candidates(averager) == [1, 4, 8, 16]  # raw weights have no neighbours


def test_a_value_of_the_raw_weights_saves_an_evaluation() -> None:
    model, averager = collected([1.0, 3.0], 2)
    calls = []
    chooser = WindowChooser(averager, lambda model: calls.append(1) or 5.0)  # type: ignore[func-returns-value]
    choice = chooser.choose(model, raw=4.0)
    assert (choice.k, choice.values, len(calls)) == (0, {0: 4.0, 1: 4.0, 2: 5.0}, 1)


def test_a_failed_evaluation_changes_nothing() -> None:
    model, averager = collected([2.0, 4.0, 6.0, 8.0])
    fails = False

    def evaluate(model: nn.Module) -> float:
        value = next(model.parameters()).item()
        if fails and value == 5.0:
            raise RuntimeError("no memory")
        return abs(value - (100.0 if fails else 5.0))

    chooser = WindowChooser(averager, evaluate)
    assert chooser.choose(model).k == 4
    fails = True
    with pytest.raises(RuntimeError, match="no memory"):
        chooser.choose(model)
    assert (model.weight.item(), chooser.k) == (8.0, 4)
    with pytest.raises(RuntimeError, match="inside"), chooser.swapped_into(model):
        raise RuntimeError("inside")
    assert model.weight.item() == 8.0


def test_a_swapped_model_is_refused() -> None:
    model, averager = collected([1.0, 3.0], 2)
    chooser = WindowChooser(averager, distance_to(2.0))
    with averager.swapped_into(model), pytest.raises(SwapError, match="choose was called"):
        chooser.choose(model)


def test_a_ring_that_was_reset_serves_the_raw_weights() -> None:
    model, averager = collected([1.0, 3.0], 2)
    chooser = WindowChooser(averager, distance_to(2.0))
    assert chooser.choose(model).k == 2
    averager.reset()
    assert (chooser.k, served(chooser, model)) == (0, 3.0)


def test_state_round_trip() -> None:
    model, averager = collected([2.0, 4.0, 6.0, 8.0])
    chooser = WindowChooser(averager, distance_to(5.0))
    chooser.choose(model)
    again = WindowChooser(averager, distance_to(5.0))
    again.load_state_dict(chooser.state_dict())
    assert served(again, model) == 5.0
    assert again.state_dict() == chooser.state_dict() == {"k": 4, "num_decided": 1}


@pytest.mark.parametrize("state", [{}, {"k": 1}, {"k": -1, "num_decided": 0}, {"k": "x"}, 7])
def test_a_damaged_state_is_refused(state: Any) -> None:
    search = WindowSearch()
    search.decide({0: 1.0, 2: 0.5})
    with pytest.raises(StateError, match="state_dict"):
        search.load_state_dict(state)
    assert search.state_dict() == {"k": 2, "num_decided": 1}


def test_one_search_serves_two_choosers() -> None:
    model, averager = collected([1.0, 3.0], 2)
    search = WindowSearch([2])
    choosers = [WindowChooser(averager, distance_to(t), search) for t in (2.0, 3.0)]
    assert [chooser.choose(model).k for chooser in choosers] == [2, 0]
    assert search.state_dict()["num_decided"] == 0


@pytest.mark.parametrize(
    "options",
    [
        {"ks": []},
        {"ks": [0, 2]},
        {"ks": [1.5]},
        {"ks": 4},
        {"mode": "lowest"},
        {"margin": 1.0},
        {"margin": -0.1},
        {"margin": math.nan},
        {"margin": "1 %"},
        {"full_every": 0},
    ],
)
def test_mistakes_are_found_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))}="):
        WindowSearch(**options)


@pytest.mark.parametrize(
    ("place", "value", "match"),
    [(0, None, "averager=None"), (1, 3, "evaluate=3"), (2, [2, 4], r"search=\[2, 4\]")],
)
def test_arguments_of_a_chooser(place: int, value: Any, match: str) -> None:
    model, averager = collected([2.0, 4.0])
    given: list[Any] = [averager, distance_to(4.0), None]
    with pytest.raises(ConfigError, match="raw is a str"):
        WindowChooser(*given).choose(model, raw="low")  # type: ignore[arg-type]
    given[place] = value
    with pytest.raises(ConfigError, match=match):
        WindowChooser(*given)


def test_a_callback_does_not_choose_the_worst_accuracy() -> None:
    """The name of the metric says whether high values are good, unless the user does."""
    given = WindowSearch([1, 4])
    for mode, monitors in {
        "max": ("val_acc", "eval_f1", "val_accuracy/dataloader_idx_0"),
        "min": ("val_loss", "eval_norm"),
    }.items():
        for monitor in monitors:
            for option in (True, given):
                search = search_for(option, monitor)
                assert search is not None
                assert search.decide({0: 0.5, 1: 0.6, 4: 0.4}) == (1 if mode == "max" else 4)
            for own in ("min", "max"):
                search = search_for(WindowSearch(mode=own), monitor)
                assert search is not None
                assert search.mode == own
            assert search_for(False, monitor) is None
    assert given.mode is None  # the callback has a copy


def test_a_window_larger_than_the_ring_is_refused() -> None:
    with pytest.raises(ConfigError, match="keeps 4 snapshots"):
        WindowChooser(LatestWeightAverager(k=4), distance_to(0.0), WindowSearch([2, 8]))


def test_evaluate_must_return_a_number() -> None:
    model, averager = collected([1.0], 1)
    with pytest.raises(ConfigError, match="returned a dict"):
        WindowChooser(averager, lambda model: {"loss": 1.0}).choose(model)  # type: ignore[arg-type,return-value]


def batch_norm_run() -> tuple[nn.Sequential, LatestWeightAverager, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    averager = LatestWeightAverager(k=2)
    for _ in range(2):
        model[0].weight.data.normal_()
        averager.collect(model)
    return model, averager, [torch.randn(8, 2) for _ in range(3)]


def test_batch_norm_is_estimated_once_for_each_window() -> None:
    model, averager, batches = batch_norm_run()
    expected = {}
    for k in (1, 2):
        with averager.swapped_into(model, k):
            recalibrate_batch_norm(model, batches, 2)
            expected[k] = model[1].running_mean.sum().item()  # type: ignore[operator, union-attr]
    before = model[1].running_mean.clone()  # type: ignore[operator, union-attr]
    reads = []

    class Loader:
        def __iter__(self) -> Any:
            reads.append(1)
            return iter(batches)

    def statistics(model: nn.Module) -> float:
        return float(model[1].running_mean.sum())  # type: ignore[index, union-attr, operator]

    search = WindowSearch(mode="max" if expected[2] > max(expected[1], 0.0) else "min")
    chooser = WindowChooser(averager, statistics, search, loader=Loader(), batch_norm_batches=2)
    choice = chooser.choose(model)
    assert choice.values == {0: 0.0, **expected}
    assert len(reads) == 2
    with chooser.swapped_into(model):
        assert statistics(model) == choice.value  # what is served is what was measured
    assert len(reads) == 2
    assert torch.equal(model[1].running_mean, before)  # type: ignore[arg-type]


def test_a_layer_that_was_unfrozen_is_estimated_again() -> None:
    """What was frozen at an earlier choice need not be frozen now, and evaluation hides it."""
    model, averager, batches = batch_norm_run()
    seen: list[bool] = []

    def evaluate(model: nn.Module) -> float:
        seen.append(bool(model[1].running_mean.any()))  # type: ignore[index, union-attr, operator]
        return 0.0

    chooser = WindowChooser(averager, evaluate, loader=batches)
    model[1].eval()
    chooser.choose(model)
    averager.collect(model)
    assert not any(seen)
    model.train()  # and on, until an evaluation
    model.eval()
    chooser.choose(model)
    assert seen[-1]


def test_stale_batch_norm_statistics_are_warned_of_once() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    averager = LatestWeightAverager(k=2)
    chooser = WindowChooser(averager, lambda model: 0.0)
    chooser.choose(model)  # of raw weights only, whose statistics are their own
    averager.collect(model)
    with pytest.warns(UserWarning, match=r"2 BatchNorm layers.*loader=") as warned:
        chooser.choose(model)
    assert warned[0].filename == __file__
    chooser.choose(model)
    frozen = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, track_running_stats=False))
    other = LatestWeightAverager(k=2)
    other.collect(frozen)
    WindowChooser(other, lambda model: 0.0).choose(frozen)


def test_the_best_window_of_a_noisy_quadratic() -> None:
    """Chosen at each evaluation within 2 % of the gain of the best window in hindsight."""
    torch.manual_seed(0)
    curvature = torch.logspace(-3, 0, 50)
    model, averager = nn.Linear(50, 1, bias=False), LatestWeightAverager(k=16)
    model.weight.data.fill_(1.0)

    def loss(weight: torch.Tensor) -> float:
        return float((curvature * weight.flatten().double() ** 2).sum())

    def evaluate(model: nn.Module) -> float:
        return loss(next(model.parameters()).detach())

    chooser, chosen, history = WindowChooser(averager, evaluate), [], []
    for step in range(1, 1201):
        weight = model.weight.data
        weight -= 0.5 * (curvature * weight + 0.3 * curvature.sqrt() * torch.randn(1, 50))
        if step % 10 == 0:
            averager.collect(model, step=step)
            history.append(weight.double().clone())
        if step % 60 == 0:
            choice = chooser.choose(model)
            fits = [k for k in (1, 4, 8, 16) if k <= len(history)]
            by_hand = [loss(torch.stack(history[-k:]).mean(0).float()) for k in fits]
            best = min(loss(weight), *by_hand)
            with chooser.swapped_into(model):
                regret = evaluate(model) - best
            assert regret <= 0.02 * (loss(weight) - best)
            chosen.append(choice.k)
    assert chosen[0] < 16  # early on a long window is far behind
    assert chosen[-1] == 16  # in the end only noise remains, and the longest one is best


def test_batches_may_be_a_tensor() -> None:
    """Rows of it are batches, as in any loop; it has no truth value of its own."""
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    averager = LatestWeightAverager(k=2, min_snapshots=1)
    averager.collect(model)
    chooser = WindowChooser(averager, lambda model: 1.0, loader=torch.randn(3, 8, 2))
    assert chooser.choose(model).k in (0, 1)


def test_a_model_in_the_place_of_the_averager_is_named_in_short() -> None:
    big = nn.Sequential(*(nn.Linear(2, 2) for _ in range(20)))
    with pytest.raises(ConfigError, match="averager=a Sequential: give") as caught:
        WindowChooser(big, lambda model: 1.0)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 120
