"""One battery for all wrappers: typed text, bad settings, a plain reference, resuming, memory."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from support.toy_task import (
    toy_batch,
    toy_gradient,
    toy_run,
    toy_trainer,
    train_until,
    whole_weights,
)
from support.training import rows_of, run, smoke_plan
from torch import Tensor

from lawa_lab.recipes.config import OptimizerName
from lawa_lab.recipes.loop import make_task
from lawa_lab.recipes.task import Worker
from lawa_lab.recipes.trainer import Trainer
from lawa_lab.vector import Vector
from lawa_lab.wrappers.registry import WRAPPERS, name_wrapped, parse_wrappers
from torch_lawa.errors import ConfigError, StateError

pytestmark = pytest.mark.slow

STEPS, NU = 24, 4  # of the toy

# As they are typed, with values that make a difference within the toy's steps.
TYPED = {
    "sam": "sam:0.2",
    "ema-nesterov": "ema-nesterov:0.6:0.7:5",
    "primal-averaging": "primal-averaging:0.8:0.3",
    "outer-nesterov": "outer-nesterov:5:0.7:0.5:0.6",
    "pswa": "pswa:5:7",
    "jump": "jump:8:3:1",
    "lookahead": "lookahead:5:0.8",
    "rescue": "rescue:1.5:3:1:0",
}
BAD = {
    "sam": ["sam:0", "sam:-1", "sam:1:2", "sam:much", "sam:nan"],
    "ema-nesterov": ["ema-nesterov:0.3:1", "ema-nesterov:0", "ema-nesterov:0.3:0.9:2.5"],
    "primal-averaging": ["primal-averaging:0", "primal-averaging:1", "primal-averaging:0.9:0"],
    "outer-nesterov": ["outer-nesterov:0", "outer-nesterov:5:0.7:1", "outer-nesterov:5:0.7:0.5:2",
                       "outer-nesterov:5:0.7:0.5:0.01"],
    "pswa": ["pswa", "pswa:0", "pswa:2.5", "pswa:5:-1", "pswa:inf"],
    "jump": ["jump", "jump:10:6", "jump:10:5:2", "jump:0"],
    "lookahead": ["lookahead:0", "lookahead:5:0", "lookahead:5:2", "lookahead:5.5"],
    "rescue": ["rescue:1", "rescue:2:1", "rescue:2:50:0", "rescue:2:50:1:0.5"],
}  # fmt: skip


def test_every_wrapper_is_here() -> None:
    assert set(TYPED) == set(BAD) == set(REFERENCES) == set(WRAPPERS)


@pytest.mark.parametrize("name", WRAPPERS)
def test_it_is_built_from_its_text_and_names_the_run(name: str) -> None:
    [wrapper] = parse_wrappers([TYPED[name]], "sgd")
    assert parse_wrappers([str(wrapper)], "sgd") == [wrapper]
    assert name_wrapped([TYPED[name]], "sgd") == f"{wrapper}(sgd)"
    assert smoke_plan("digits", wrap=(TYPED[name],)).run_name == f"{wrapper}(sgd)"
    assert type(wrapper).typed.startswith(name)


@pytest.mark.parametrize("text", [text for texts in BAD.values() for text in texts])
def test_bad_settings_say_how_to_write_it(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        smoke_plan("digits", wrap=(text,))
    assert WRAPPERS[text.partition(":")[0]].typed in str(caught.value)


@pytest.mark.parametrize(
    ("texts", "optimizer", "said"),
    [
        (["nothing"], "sgd", "choose from"),
        (["sam", "sam:0.1"], "sgd", "once"),
        (["lookahead", "pswa:5"], "sgd", "lookahead and pswa"),
        (["lookahead"], "schedule-free-sgd", "sgd, adam or adamw"),
        (["rescue"], "schedule-free-adamw", "rescue moves the weights"),
    ],
)
def test_what_cannot_be_combined_is_refused(texts: list[str], optimizer: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_wrappers(texts, optimizer)


# Plain references: lists of float64 tensors, SGD with momentum 0.9 written out.

Weights = list[Tensor]


class Sgd:
    """PyTorch's rule: v = 0.9 v + g, w -= rate v; the first v is g."""

    def __init__(self) -> None:
        self.v: Weights | None = None

    def step(self, w: Weights, g: Weights) -> Weights:
        self.v = g if self.v is None else [0.9 * a + b for a, b in zip(self.v, g, strict=True)]
        return [a - 0.1 * b for a, b in zip(w, self.v, strict=True)]


def mix(*terms: tuple[float, Weights]) -> Weights:
    return [sum(c * t for c, t in zip([c for c, _ in terms], ts, strict=True))  # type: ignore[misc]
            for ts in zip(*(t for _, t in terms), strict=True)]  # fmt: skip


def plain_sam(w: Weights) -> Weights:
    sgd = Sgd()
    for step in range(STEPS):
        g = toy_gradient(w, step)
        norm = math.sqrt(sum(float(x.square().sum()) for x in g))
        w = sgd.step(w, toy_gradient(mix((1, w), (0.2 / norm, g)), step))
    return w


def plain_ema_nesterov(w: Weights) -> Weights:
    sgd, m = Sgd(), mix((0, w))
    for step in range(STEPS):
        look = mix((1, w), (0.6 if step >= 5 else 0.0, m))
        new = sgd.step(look, toy_gradient(look, step))
        m, w = mix((0.7, m), (0.3, new), (-0.3, w)), new
    return w


def plain_primal_averaging(w: Weights) -> Weights:
    sgd, x = Sgd(), w
    for step in range(1, STEPS + 1):
        w = sgd.step(w, toy_gradient(w, step - 1))
        share = min(1.0, 1.0 / (0.3 * step))
        before, x = x, mix((1 - share, x), (share, w))
        w = mix((1, w), (0.8, x), (-0.8, before))
    return w


def plain_outer_nesterov(w: Weights) -> Weights:
    sgd, old, v, recent = Sgd(), w, mix((0, w)), list[Weights]()
    for step in range(STEPS):
        w = sgd.step(w, toy_gradient(w, step))
        recent = [*recent, w][-3:]  # 0.6 of 5
        if (step + 1) % 5 == 0:
            d = mix((1, old), *((-1 / 3, each) for each in recent))
            v = mix((0.5, v), (1, d))
            w = old = mix((1, old), (-0.7, d), (-0.7 * 0.5, v))
    return w


def plain_pswa(w: Weights) -> Weights:
    sgd, period = Sgd(), list[Weights]()
    for step in range(1, STEPS + 1):
        w = sgd.step(w, toy_gradient(w, step - 1))
        period = [*period, w] if step > 7 else []
        if len(period) == 5:
            w, period = mix(*((0.2, each) for each in period)), []
    return w


def plain_lookahead(w: Weights) -> Weights:
    sgd, slow = Sgd(), w
    for step in range(1, STEPS + 1):
        w = sgd.step(w, toy_gradient(w, step - 1))
        if step % 5 == 0:
            w = slow = mix((0.2, slow), (0.8, w))
    return w


def toy_loss(w: Weights, step: int) -> float:
    inputs, targets = toy_batch(step)
    outputs = (inputs @ w[0].T + w[1]).tanh() @ w[2].T + w[3]
    return float((outputs - targets).square().mean())


def plain_jump(w: Weights) -> Weights:
    """From step 8 on, when there are two snapshots; back after 3 steps if those were worse."""
    sgd, window, losses, before = Sgd(), list[Weights](), list[float](), None
    for step in range(1, STEPS + 1):
        losses.append(toy_loss(w, step - 1))
        w = sgd.step(w, toy_gradient(w, step - 1))
        if before is not None and step % 8 == 3:
            if sum(losses[-3:]) > sum(losses[-6:-3]):
                w, sgd = before, Sgd()
            before = None
        if step % 8 == 0 and len(window) == 2:
            before, w, sgd = w, mix(*((0.5, each) for each in window)), Sgd()
        if step % NU == 0:
            window = [*window, w][-2:]
    return w


POISONED = 10  # a step after two snapshots


def plain_rescue(w: Weights) -> Weights:
    """The momentum is kept. No loss of the toy is above 1.5 times the median of three."""
    sgd, window = Sgd(), list[Weights]()
    for step in range(1, STEPS + 1):
        if step - 1 == POISONED:
            w = mix(*((0.5, each) for each in window))
        else:
            w = sgd.step(w, toy_gradient(w, step - 1))
        if step % NU == 0:
            window = [*window, w][-2:]
    return w


REFERENCES: dict[str, Callable[[Weights], Weights]] = {
    "sam": plain_sam,
    "ema-nesterov": plain_ema_nesterov,
    "primal-averaging": plain_primal_averaging,
    "outer-nesterov": plain_outer_nesterov,
    "pswa": plain_pswa,
    "jump": plain_jump,
    "lookahead": plain_lookahead,
    "rescue": plain_rescue,
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_it_does_what_a_plain_reference_does(name: str) -> None:
    poisoned = (POISONED,) if name == "rescue" else ()
    text = "rescue:9:3:1:0" if name == "rescue" else TYPED[name]
    start, end, _ = toy_run(wrap=(text,), poisoned=poisoned)
    expected = REFERENCES[name](start)
    torch.testing.assert_close(end, expected, rtol=1e-10, atol=1e-12)
    plain = toy_run()[1]
    assert not torch.allclose(end[0], plain[0], rtol=1e-4)  # it made a difference


def test_a_jump_that_makes_things_worse_is_undone() -> None:
    """Away from the start the window is far behind, so that going back to it costs loss."""
    settings: dict[str, Any] = {"learning_rate": 0.02, "momentum": 0.0, "nu": 4}
    *_, trainer = toy_run(wrap=("jump:8:3",), **settings)
    jumps = trainer._wrapped.facts
    assert jumps["jumps"] == 2
    assert jumps["returns"] >= 1
    undone = toy_run(wrap=("jump:8:3",), **settings)[1]
    kept = toy_run(wrap=("jump:8:0",), **settings)[1]
    assert not torch.equal(undone[0], kept[0])


def test_primal_averaging_of_sgd_is_schedule_free() -> None:
    """Against the package, from the tenth step on: before it, ours does not go beyond w."""
    schedulefree = pytest.importorskip("schedulefree")
    done, beta, rate = 10, 0.9, 0.02
    trainer = toy_trainer(wrap=(f"primal-averaging:{beta}:0.1",), learning_rate=rate, momentum=0.0)
    [ours] = trainer._wrapped.built.values()
    ours.num_steps = done  # type: ignore[attr-defined]
    theirs = [w.clone().requires_grad_() for w in whole_weights(trainer)]
    optimizer = schedulefree.SGDScheduleFree(theirs, lr=rate / (1 - beta), momentum=beta)
    optimizer.train()
    [group] = optimizer.param_groups
    group |= {"k": done, "weight_sum": done * group["lr"] ** 2, "lr_max": group["lr"]}
    for step in range(STEPS):
        grads = toy_gradient([w.detach() for w in theirs], step)
        for tensor, grad in zip(theirs, grads, strict=True):
            tensor.grad = grad
        optimizer.step()
    train_until(trainer)
    torch.testing.assert_close(whole_weights(trainer), [w.detach() for w in theirs])
    optimizer.eval()  # now its weights are the average
    average = ours.average.tensors.values()  # type: ignore[attr-defined]
    torch.testing.assert_close(list(average), [w.detach() for w in theirs])


def test_sam_keeps_the_running_statistics_of_its_first_pass() -> None:
    found = []
    for wrap in ((), ("sam:0.2",)):
        plan = smoke_plan("digits", wrap=wrap)
        trainer = Trainer(plan, make_task(plan, Worker()), Worker())
        trainer.train_step(next(trainer.batches()))
        found.append(dict(trainer.model.named_buffers()))
    assert found[0]
    assert all(torch.equal(found[1][name], buffer) for name, buffer in found[0].items())


def test_ema_nesterov_looks_less_far_ahead_as_the_rate_falls() -> None:
    trainer = toy_trainer(wrap=("ema-nesterov:0.6:0.7:0",))
    train_until(trainer, 5)
    [built] = trainer._wrapped.built.values()
    way = [each.clone() for each in built.average_step.tensors.values()]  # type: ignore[attr-defined]
    expected, seen = mix((1, whole_weights(trainer)), (0.5 * 0.6, way)), list[Tensor]()

    def gradient() -> Tensor:
        trainer.optimizer.zero_grad()
        seen.extend(whole_weights(trainer))
        return torch.zeros(())

    trainer._wrapped.step(gradient, rate_share=0.5)
    torch.testing.assert_close(seen, expected)


@pytest.mark.parametrize("name", WRAPPERS)
def test_it_saves_every_copy_of_the_weights_that_it_keeps(name: str) -> None:
    *_, trainer = toy_run(wrap=(TYPED[name],))
    [built] = trainer._wrapped.built.values()
    kept = [attribute for attribute, each in vars(built).items() if isinstance(each, Vector)]
    assert sorted(kept) == sorted(built.vectors)


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("optimizer", get_args(OptimizerName))
def test_it_works_with_every_optimizer(name: str, optimizer: str) -> None:
    if optimizer.startswith("schedule-free") and WRAPPERS[name].moves_weights:
        return  # refused, as tested above
    start, end, _ = toy_run(wrap=(TYPED[name],), optimizer=optimizer, learning_rate=0.01)
    plain = toy_run(optimizer=optimizer, learning_rate=0.01)[1]
    assert all(bool(each.isfinite().all()) for each in end)
    moved = [float((a - b).norm()) for a, b in zip(start, end, strict=True)]
    assert min(moved) > 0
    assert name in ("rescue", "jump") or not torch.equal(end[0], plain[0])


@pytest.mark.parametrize("name", WRAPPERS)
def test_it_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    """On the digits, with BatchNorm; stopped while a jump is on trial, and amid periods."""
    text = {"jump": "jump:12:6", "rescue": "rescue:1.01:2"}.get(name, TYPED[name])
    wrap = (text, "sam") if name == "lookahead" else (text,)
    plan = smoke_plan("digits", batch_size=96, wrap=wrap, horizon=0.5)
    assert run(plan, tmp_path / "whole").finished
    for stop in (15, 26):
        assert not run(plan, tmp_path / "parts", stop_at=stop).finished
    assert run(plan, tmp_path / "parts").finished
    assert rows_of(tmp_path / "parts") == rows_of(tmp_path / "whole")
    averaged = [(tmp_path / x / "averaged.safetensors").read_bytes() for x in ("parts", "whole")]
    assert averaged[0] == averaged[1]
    facts = {"jump": "jumps", "rescue": "rescues"}
    if name in facts:
        assert rows_of(tmp_path / "whole")[-1][facts[name]] > 0


@pytest.mark.parametrize("name", WRAPPERS)
def test_branches_return_to_its_state(name: str) -> None:
    """After a branch the run continues as if there had been none."""
    *_, expected, _ = toy_run(wrap=(TYPED[name],))
    trainer = toy_trainer(wrap=(TYPED[name],))
    plan = trainer.plan
    train_until(trainer, 10)
    with trainer.branched(replace(plan, config=replace(plan.config, land=0.5))):
        train_until(trainer, 20)
    assert trainer.step == 10
    train_until(trainer)
    assert all(map(torch.equal, whole_weights(trainer), expected))


@pytest.mark.parametrize("name", WRAPPERS)
def test_it_has_a_card_whose_examples_are_right(name: str) -> None:
    cards = Path(__file__).parents[4] / "docs" / "methods"
    assert f"]({name}.md)" in (cards / "README.md").read_text()
    examples = re.findall(r"--wrap ([a-z][\w.:,-]*[\w])", (cards / f"{name}.md").read_text())
    assert any(text.partition(":")[0] == name for text in examples)
    for text in examples:
        parse_wrappers(text.split(","), "sgd")


def test_another_state_is_refused() -> None:
    *_, lookahead = toy_run(wrap=("lookahead",))
    *_, nesterov = toy_run(wrap=("ema-nesterov",))
    states = [trainer._wrapped.built for trainer in (lookahead, nesterov)]
    with pytest.raises(StateError, match="average_step"):
        states[1]["wrapper ema-nesterov"].load_state_dict(
            states[0]["wrapper lookahead"].state_dict()
        )


def test_a_rescue_makes_the_other_wrappers_start_anew() -> None:
    """Else Lookahead's slow weights of before the spike would pull the weights back to it."""
    wrap = ("rescue:9:3:1:0", "lookahead:6:0.5")
    *_, trainer = toy_run(wrap=wrap, poisoned=(POISONED,), epochs=(POISONED + 1) / 6)
    slow = trainer._wrapped.built["wrapper lookahead"].anchor  # type: ignore[attr-defined]
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(slow.tensors[name], parameter)
    # The loss of the skipped batch is not part of the training loss.
    assert math.isfinite(float(trainer._loss))


def test_a_rescue_before_a_jump_does_not_undo_the_jump() -> None:
    """The sum of fewer losses was compared with that of `patience` losses after the jump."""
    wrap = ("rescue:9:3:1:0", "jump:8:3")
    trainer = toy_trainer(wrap=wrap, poisoned=(6,))  # one of the three steps before the jump
    trainer._wrapped.mean_loss = lambda: 1.0  # type: ignore[method-assign]
    train_until(trainer, 14)
    assert trainer._wrapped.facts == {"rescues": 1, "jumps": 1, "returns": 0}


@pytest.mark.parametrize("bad", [10, 11, 14])  # periods end then, or in the step after
@pytest.mark.parametrize("innermost", [True, False])
@pytest.mark.parametrize("name", sorted({*WRAPPERS} - {"rescue"}))
def test_a_rescue_leaves_nothing_of_weights_that_are_no_numbers(
    name: str, innermost: bool, bad: int
) -> None:
    wrap = ("rescue:9:3:1:0", TYPED[name])
    trainer = toy_trainer(wrap=wrap if innermost else wrap[::-1])
    for parameter in trainer.model.parameters():
        parameter.register_hook(lambda g: g * math.inf if trainer.step == bad - 1 else g)
    train_until(trainer, bad)
    assert not any(bool(each.isfinite().all()) for each in whole_weights(trainer))
    mean = trainer.averager.average()
    train_until(trainer, bad + 1)
    for parameter_name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, mean[parameter_name])
    train_until(trainer)
    assert trainer._wrapped.facts["rescues"] == 1
    assert all(bool(each.isfinite().all()) for each in whole_weights(trainer))


def test_a_rescue_sees_each_loss_once_however_many_gradients_there_are() -> None:
    found = []
    for wrap in (("sam:0.2", "rescue:9:4"), ("rescue:9:4", "sam:0.2")):
        _, end, trainer = toy_run(wrap=wrap)
        found.append((trainer._wrapped.built["wrapper rescue"].state_dict(), end[0].tolist()))
    assert found[0] == found[1]


def test_a_rescue_has_the_settings_that_were_typed() -> None:
    built = toy_trainer(wrap=("rescue:1.5:3:2:0",))._wrapped.built["wrapper rescue"]
    assert "factor=1.5, history=3, patience=2" in repr(built._rescue)  # type: ignore[attr-defined]
