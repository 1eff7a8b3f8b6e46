"""Lending the mean to a model: always returned, nothing rebound, nothing nested."""

import contextlib
import copy
import gc
import threading
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models import assert_same_state, shake, small_net
from torch import nn
from torch.nn.utils import parametrize

from torch_lawa import LatestWeightAverager, recalibrate_batch_norm, swap
from torch_lawa.errors import LayoutError, NotReadyError, SwapError


def trained(k: int = 2) -> tuple[nn.Module, LatestWeightAverager]:
    model = small_net()
    averager = LatestWeightAverager(k=k)
    for _ in range(k):
        shake(model)
        averager.collect(model)
    shake(model)
    return model, averager


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in model.state_dict().items()}


def test_the_model_holds_the_mean_inside_and_its_own_weights_after() -> None:
    model, averager = trained()
    before, tensors = state(model), dict(model.state_dict(keep_vars=True).items())
    with averager.swapped_into(model):
        assert_same_state(state(model), averager.average())
    assert_same_state(state(model), before)
    after = model.state_dict(keep_vars=True)
    assert all(after[name] is tensors[name] for name in tensors)  # the very same tensors


@given(error=st.sampled_from([ValueError, KeyboardInterrupt, SystemExit, GeneratorExit]))
def test_any_exception_restores(error: type[BaseException]) -> None:
    model, averager = trained()
    before = state(model)
    with pytest.raises(error), averager.swapped_into(model):
        with torch.no_grad():
            model[4].weight.zero_()
        raise error
    assert_same_state(state(model), before)
    with averager.swapped_into(model):  # and it can be swapped again
        pass


def test_failing_while_writing_restores(monkeypatch: pytest.MonkeyPatch) -> None:
    model, averager = trained()
    before = state(model)
    original = averager._window.mean_into

    def broken(*arguments, **options):  # type: ignore[no-untyped-def]
        original(*arguments, **options)
        raise MemoryError

    monkeypatch.setattr(averager._window, "mean_into", broken)
    with pytest.raises(MemoryError), averager.swapped_into(model):
        pass
    assert_same_state(state(model), before)


def test_buffers_changed_inside_return() -> None:
    model, averager = trained()
    model[1].register_buffer("hidden", torch.zeros(2), persistent=False)
    before = state(model)
    with averager.swapped_into(model):
        recalibrate_batch_norm(model, [torch.randn(4, 1, 8, 8) for _ in range(3)])
        model[1].hidden.fill_(5)
        assert not torch.equal(model[1].running_mean, before["1.running_mean"])
    assert_same_state(state(model), before)
    assert model[1].hidden.tolist() == [0.0, 0.0]


def test_buffers_that_repeat_their_memory() -> None:
    """An expanded buffer cannot be written to value by value."""
    model = nn.Linear(3, 2)
    model.register_buffer("same", torch.ones(2, 1).expand(2, 5))
    averager = LatestWeightAverager(k=1)
    averager.collect(model)
    with torch.no_grad():
        model.weight.add_(1)
        model.same[:, :1].fill_(7)
    before = state(model)
    with averager.swapped_into(model):
        assert model.same.unique().tolist() == [1.0]
    assert_same_state(state(model), before)


@pytest.mark.parametrize("buffers", ["newest", "average"])
@pytest.mark.parametrize("view", [torch.Tensor.conj, lambda x: x.conj().imag], ids=["conj", "neg"])
def test_tensors_whose_memory_has_the_conjugate(
    view: Callable[[torch.Tensor], torch.Tensor], buffers: Literal["newest", "average"]
) -> None:
    model = nn.Linear(3, 2)
    model.register_parameter("weighted", nn.Parameter(view(torch.randn(4, dtype=torch.cfloat))))
    model.register_buffer("filter", view(torch.randn(4, dtype=torch.cfloat)))
    averager = LatestWeightAverager(k=1, buffers=buffers)
    averager.collect(model)
    collected = state(model)
    shake(model)
    model.filter.mul_(2)
    before = state(model)
    assert_same_state(averager.average(), collected)
    with averager.swapped_into(model):
        assert_same_state(state(model), collected)
    assert_same_state(state(model), before)


@pytest.mark.filterwarnings("ignore:.*(Sparse|nested)")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ],
    ids=["sparse", "csr", "nested"],
)
def test_buffers_without_plain_values(make: Callable[[], torch.Tensor]) -> None:
    """Such as the adjacency of a graph. They must not be persistent."""
    model, averager = trained()
    model.register_buffer("graph", graph := make(), persistent=False)
    model.register_buffer("dense", torch.ones(3, 3), persistent=False)
    before = state(model)
    with averager.swapped_into(model):
        assert_same_state(state(model), averager.average())
        model.graph = make()
        model.dense = make()
    assert_same_state(state(model), before)
    assert model.graph is graph


class Recomputing(nn.Linear):
    """Replaces a buffer in each forward pass, as rotary embeddings do."""

    def __init__(self, *, persistent: bool) -> None:
        super().__init__(2, 2)
        self.register_buffer("cache", torch.zeros(3), persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache = self.cache + 1
        return super().forward(x)


@pytest.mark.parametrize("persistent", [True, False])
def test_buffers_that_were_replaced_in_inference_mode(persistent: bool) -> None:
    model = nn.Sequential(Recomputing(persistent=persistent), nn.Linear(2, 2))
    averager = LatestWeightAverager(k=1)
    for _ in range(3):
        averager.collect(model)
        collected = state(model)
        shake(model)
        before, value = state(model), model[0].cache.clone()
        with averager.swapped_into(model):
            assert_same_state(state(model), collected)
            with torch.inference_mode():
                model(torch.ones(1, 2))
        assert_same_state(state(model), before)
        assert torch.equal(model[0].cache, value)
        assert model[0].cache.is_inference()


def test_a_copy_made_in_inference_mode_holds_the_mean() -> None:
    model, averager = trained()
    with torch.inference_mode():
        served = copy.deepcopy(model)
    before = state(served)
    with averager.swapped_into(served):
        assert_same_state(state(served), averager.average())
    assert_same_state(state(served), before)


def test_nesting_is_refused_and_harmless() -> None:
    model, averager = trained()
    before = state(model)
    with averager.swapped_into(model):
        inside = state(model)
        with pytest.raises(SwapError, match="swapped_into"), averager.swapped_into(model):
            pass
        compiled = torch.compile(model, backend="eager")
        with pytest.raises(SwapError), averager.swapped_into(compiled):  # type: ignore[arg-type]
            pass
        assert_same_state(state(model), inside)
    with averager.swapped_into(compiled), pytest.raises(SwapError):  # type: ignore[arg-type]
        averager.collect(model)
    with averager.swapped_into(model):
        other = small_net()
        with averager.swapped_into(other):  # another model is another matter
            assert_same_state(state(other), inside)
    assert_same_state(state(model), before)


def test_a_swap_is_used_once() -> None:
    """It was made for the window as it was then."""
    model, averager = trained()
    before, swap = state(model), averager.swapped_into(model)
    with swap:
        pass
    with pytest.raises(SwapError, match="used before"), swap:
        pass
    assert_same_state(state(model), before)
    averager.collect(model)


def test_collecting_averaged_weights_is_refused() -> None:
    model, averager = trained()
    with averager.swapped_into(model):
        with pytest.raises(SwapError, match="collect was called"):
            averager.collect(model)
        with pytest.raises(SwapError, match="step was called"):
            averager.step(model)
    assert averager.num_collected == 2


def test_a_part_of_a_swapped_model_counts_as_swapped() -> None:
    model, averager = trained()
    other = LatestWeightAverager(k=1)
    around = nn.ModuleDict({"net": model})
    twin = nn.Linear(4 * 36, 3)
    twin.weight = model[4].weight  # tied
    with averager.swapped_into(model):
        for part in (model[4], around, twin, model.state_dict()):
            with pytest.raises(SwapError, match="collect was called"):
                other.collect(part)
    head = LatestWeightAverager(k=1)
    head.collect(model[4])
    with head.swapped_into(model[4]), pytest.raises(SwapError), averager.swapped_into(model):
        pass
    other.collect(model[0])
    with head.swapped_into(model[4]), other.swapped_into(model[0]):  # parts that share nothing
        pass


def test_two_threads_do_not_lend_at_once() -> None:
    """The second would take the mean for the model's own weights, and leave it there."""
    model, averager = trained()
    before = state(model)
    met = threading.Barrier(2, timeout=20)
    refused = []

    def evaluate() -> None:
        met.wait()
        try:
            with averager.swapped_into(model):
                pass
        except SwapError as error:
            refused.append(error)

    for _ in range(30):
        threads = [threading.Thread(target=evaluate) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert_same_state(state(model), before)


@pytest.mark.parametrize("moment", ["reshard", "_wait_for_copies", "_copy", "_clear_caches"])
def test_an_interrupt_while_weights_return_does_not_stop_them(
    monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    model, averager = trained()
    before = state(model)
    original = getattr(swap, moment)

    def interrupted(*args: object, **options: object) -> None:
        monkeypatch.setattr(swap, moment, original)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), averager.swapped_into(model):
        monkeypatch.setattr(swap, moment, interrupted)
    assert_same_state(state(model), before)
    with averager.swapped_into(model):
        pass


def test_a_swap_that_is_dropped_returns_the_weights_at_once() -> None:
    """As when Ctrl-C arrives before the first instruction of `__exit__`; no garbage collection."""
    model, averager = trained()
    before = state(model)
    gc.disable()
    try:
        dropped = averager.swapped_into(model)
        dropped.__enter__()
        assert swap._swapped
        del dropped
        assert not swap._swapped
    finally:
        gc.enable()
    assert_same_state(state(model), before)


def test_buffers_that_were_replaced_inside_return() -> None:
    """`model.half()` converts parameters in place, and puts new buffers where the old ones were."""
    model, averager = trained()
    before = state(model)
    with averager.swapped_into(model):
        model.half().float()
    assert_same_state(state(model), before)


def load_other_weights(model: nn.Module) -> None:
    other = {name: t + 1 for name, t in model.state_dict().items()}
    model.load_state_dict(other, assign=True)


def convert_with_new_parameters(model: nn.Module) -> None:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


@pytest.mark.parametrize("replace", [load_other_weights, convert_with_new_parameters])
def test_parameters_that_were_replaced_inside_return(
    replace: Callable[[nn.Module], None],
) -> None:
    model, averager = trained()
    before, own = state(model), dict(model.named_parameters())
    with averager.swapped_into(model):
        replace(model)
    for name, parameter in model.named_parameters():
        assert parameter is own[name]  # the optimizer has this one
        assert torch.equal(parameter, before[name])


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_scripted_model_is_restored() -> None:
    model, averager = trained()
    scripted = torch.jit.script(model)
    before = state(scripted)
    with averager.swapped_into(scripted):
        assert_same_state(state(scripted), averager.average())
    assert_same_state(state(scripted), before)


def test_refused_before_anything_was_collected() -> None:
    with pytest.raises(NotReadyError, match="0 of 2 snapshots"):
        LatestWeightAverager(k=2).swapped_into(nn.Linear(1, 1))


def test_another_models_tensors_are_named() -> None:
    _, averager = trained()
    with pytest.raises(LayoutError, match=r"'0.weight' .* no such tensor"):
        averager.swapped_into(nn.Linear(1, 1))
    wider = small_net()
    wider[4] = nn.Linear(4 * 36, 5)
    with pytest.raises(
        LayoutError, match=r"'4.weight' .* shape \(3, 144\) .* has shape \(5, 144\)"
    ):
        averager.swapped_into(wider)
    whole = small_net()
    whole[4].weight = nn.Parameter(torch.zeros(3, 144, dtype=torch.int8), requires_grad=False)
    with pytest.raises(LayoutError, match=r"torch.float32.* torch.int8"):
        averager.swapped_into(whole)


@pytest.mark.parametrize("way", ["swapped_into", "sampled_into"])
def test_only_a_model_can_hold_the_mean(way: str) -> None:
    model, averager = trained()
    options = {"seed": 0} if way == "sampled_into" else {}
    with pytest.raises(LayoutError, match=r"got OrderedDict.*averager.average\(\)"):
        getattr(averager, way)(model.state_dict(), **options)


def test_a_smaller_window_can_be_swapped_in() -> None:
    model, averager = trained(k=3)
    with averager.swapped_into(model, k=2):
        assert_same_state(state(model), averager.average(k=2))


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW])
def test_training_goes_on_as_if_nothing_had_happened(
    optimizer_class: type[torch.optim.Optimizer],
) -> None:
    def run(swap: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(5)
        model = small_net()
        options = {"momentum": 0.9} if optimizer_class is torch.optim.SGD else {}
        optimizer = optimizer_class(model.parameters(), lr=0.01, **options)  # type: ignore[call-arg]
        averager = LatestWeightAverager(k=2)
        data = torch.Generator().manual_seed(1)
        for _ in range(6):
            loss = model(torch.randn(8, 1, 8, 8, generator=data)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            averager.collect(model)
            if swap and averager.ready:
                with averager.swapped_into(model), torch.inference_mode():
                    model.eval()
                    model(torch.zeros(2, 1, 8, 8))
                    model.train()
        return state(model)

    assert_same_state(run(swap=True), run(swap=False))


def test_compiled_graphs_stay_valid() -> None:
    """No recompilation, and the compiled model sees the swapped weights."""
    model, averager = trained()
    model.eval()
    x = torch.randn(2, 1, 8, 8)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        raw = compiled(x)
        with torch._dynamo.config.patch(error_on_recompile=True):
            with averager.swapped_into(model):
                swapped = compiled(x)
                assert torch.equal(swapped, model(x))
            assert torch.equal(compiled(x), raw)
    assert not torch.equal(swapped, raw)


@pytest.mark.parametrize("grad", [True, False])
def test_autocast_does_not_go_on_with_the_weights_before(grad: bool) -> None:
    """It keeps bfloat16 copies of the weights until its block ends, and does not notice a swap."""
    model, averager = trained()
    model.eval()
    x = torch.randn(2, 1, 8, 8)

    def output() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(grad):
            return model(x).detach()

    raw = output()
    with averager.swapped_into(model):
        swapped = output()
    assert not torch.equal(swapped, raw)
    with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(grad):
        assert torch.equal(model(x), raw)
        with averager.swapped_into(model):
            assert torch.equal(model(x), swapped)
        assert torch.equal(model(x), raw)


def test_parametrizations_do_not_go_on_with_the_weights_before() -> None:
    model = nn.Linear(1, 1, bias=False)
    parametrize.register_parametrization(model, "weight", nn.ReLU())
    averager = LatestWeightAverager(k=1)
    outputs, x = [], torch.ones(1, 1)
    with torch.no_grad(), parametrize.cached():
        model.parametrizations.weight.original.fill_(2.0)
        averager.collect(model)
        model.parametrizations.weight.original.fill_(5.0)
        outputs.append(model(x).item())
        with averager.swapped_into(model):
            outputs.append(model(x).item())
        outputs.append(model(x).item())
    assert outputs == [5.0, 2.0, 5.0]


def test_the_gpu_is_done_with_page_locked_weights_before_they_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Offloaded parameters: copies that a forward pass ordered must not find the next values."""
    model, averager = trained()
    raw, mean = state(model), averager.average()
    found: list[dict[str, torch.Tensor]] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: found.append(state(model)))
    with averager.swapped_into(model):
        pass
    assert len(found) == 2
    assert_same_state(found[0], raw)
    assert_same_state(found[1], mean)


def test_a_model_without_values_takes_none() -> None:
    _, averager = trained()
    with torch.device("meta"):
        empty = small_net()
    with pytest.raises(LayoutError, match=r"on the meta device .* materialise"):
        with averager.swapped_into(empty):
            pass


def test_the_models_own_values_wait_in_idle_memory_where_they_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, averager = trained()
    before, mean = state(model), averager.average()
    room = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    room["4.weight"] = torch.zeros(before["4.weight"].shape, dtype=torch.bfloat16)
    del room["4.bias"]
    monkeypatch.setattr(averager._window, "idle_memory", lambda: contextlib.nullcontext(room))
    with averager.swapped_into(model):
        assert_same_state(state(model), mean)
        taken = {name for name, tensor in room.items() if torch.equal(tensor, before[name])}
        assert set(before) - taken == {"4.weight", "4.bias"}
        assert not room["4.weight"].any()
    assert_same_state(state(model), before)


def test_a_window_that_was_reset_before_the_block_is_no_mean() -> None:
    model, averager = trained()
    before, swap = state(model), averager.swapped_into(model)
    averager.reset()
    with pytest.raises(NotReadyError, match="0 of 2 snapshots"), swap:
        pass
    assert_same_state(state(model), before)
