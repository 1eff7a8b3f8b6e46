"""The averager as a training loop uses it: rules for every tensor, readiness, errors, names."""

import copy
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from support.models import assert_same_state, shake, small_net
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.testing._internal.two_tensor import TwoTensor

from torch_lawa import DiskStore, Every, Explicit, Exponential, LatestWeightAverager, OnPlateau
from torch_lawa.errors import ConfigError, LayoutError, NonFiniteWarning, NotReadyError


def mean_of(states: list[dict[str, torch.Tensor]], name: str) -> torch.Tensor:
    return (sum(s[name].double() for s in states) / len(states)).to(states[0][name].dtype)  # type: ignore[union-attr]


def test_the_papers_pseudocode_gives_the_same_weights() -> None:
    """Algorithm 1, to the letter: a list, append, mean of all, delete the first."""
    torch.manual_seed(3)
    model, k = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), 3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    averager = LatestWeightAverager(k=k)
    ckpts: list[list[torch.Tensor]] = []
    lawa_model = copy.deepcopy(model)
    for epoch in range(8):
        for _ in range(5):
            loss = (model(torch.randn(16, 4)) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ckpts.append([p.detach().clone() for p in model.parameters()])
        averager.collect(model)
        assert averager.ready == (epoch + 1 >= k)
        if epoch + 1 >= k:
            for p, values in zip(lawa_model.parameters(), zip(*ckpts, strict=True), strict=True):
                p.data.copy_(torch.stack(values).double().mean(0))
            del ckpts[0]
            assert_same_state(averager.average(), dict(lawa_model.state_dict()))


def test_two_averagers_do_not_share_the_counters_of_one_schedule() -> None:
    plateau, model = OnPlateau(), nn.Linear(1, 1)
    first, second = (LatestWeightAverager(k=2, schedule=plateau) for _ in range(2))
    losses = (3.0, 2.0, 2.5)
    collected = [tuple(a.step(model, loss=loss) for a in (first, second)) for loss in losses]
    assert collected == [(False, False), (False, False), (True, True)]
    assert plateau == OnPlateau()


def test_average_loads_into_the_model() -> None:
    model = small_net()
    averager = LatestWeightAverager(k=2)
    states = []
    for _ in range(3):
        states.append(shake(model))
        averager.collect(model)
    model.load_state_dict(averager.average())
    assert torch.equal(model[4].weight, mean_of(states[-2:], "4.weight"))
    assert torch.equal(model[1].running_mean, states[-1]["1.running_mean"])
    assert torch.equal(model[1].num_batches_tracked, states[-1]["1.num_batches_tracked"])


@pytest.mark.parametrize("buffers", ["newest", "average"])
def test_a_state_dict_has_the_same_average_as_its_model(
    buffers: Literal["newest", "average"],
) -> None:
    """Also of BatchNorm's statistics, which are known by their names there."""
    model = small_net()
    by_model, by_state = (LatestWeightAverager(k=2, buffers=buffers) for _ in range(2))
    for value in (1.0, 2.0):
        shake(model)
        model[1].running_mean.fill_(value)
        by_model.collect(model)
        by_state.collect(model.state_dict())
    assert_same_state(by_state.average(), by_model.average())
    assert by_state.average()["1.running_mean"][0] == (2.0 if buffers == "newest" else 1.5)


def test_buffers_are_averaged_on_request() -> None:
    model = small_net()
    averager = LatestWeightAverager(k=2, buffers="average")
    states = []
    for _ in range(2):
        states.append(shake(model))
        averager.collect(model)
    average = averager.average()
    assert torch.equal(average["1.running_var"], mean_of(states, "1.running_var"))
    assert average["1.num_batches_tracked"].dtype == torch.int64


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


def test_tied_weights_are_averaged_once_and_stay_tied() -> None:
    model = Tied()
    averager = LatestWeightAverager(k=2)
    states = []
    for _ in range(2):
        states.append(shake(model))
        averager.collect(model)
    average = averager.average()
    assert set(average) == {"embedding.weight", "head.weight"}
    assert average["head.weight"] is average["embedding.weight"]
    assert "15 values" in repr(averager)
    model.load_state_dict(average)
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.head.weight, mean_of(states, "head.weight"))
    with averager.swapped_into(model):
        assert model.head.weight is model.embedding.weight


def test_wrapper_subclasses_are_not_tied_because_they_have_no_address() -> None:
    def model(*values: float) -> nn.Module:
        made = nn.Module()
        for name, value in zip("ab", values, strict=True):
            wrapped = TwoTensor(torch.full((2,), value), torch.full((2,), value))
            made.register_parameter(name, nn.Parameter(wrapped))
        return made

    averager, other = LatestWeightAverager(k=2), LatestWeightAverager(k=1)
    averager.collect(model(1.0, 2.0))
    averager.collect(live := model(3.0, 6.0))
    other.collect(second := model(7.0, 8.0))
    assert {n: t.tolist() for n, t in averager.average().items()} == {"a": [2, 2], "b": [4, 4]}
    with averager.swapped_into(live), other.swapped_into(second):  # another model: no nesting
        assert [p.a.tolist() for p in live.parameters()] == [[2, 2], [4, 4]]
    assert [p.b.tolist() for p in live.parameters()] == [[3, 3], [6, 6]]


def test_a_model_that_was_collected_can_be_converted() -> None:
    """PyTorch refuses to swap tensors that have weak references."""
    model, averager = nn.Module(), LatestWeightAverager()
    model.register_parameter("w", nn.Parameter(TwoTensor(torch.ones(2), torch.ones(2))))
    averager.collect(model)
    assert model.double().w.dtype == torch.float64


def test_another_model_in_the_memory_of_one_that_is_gone() -> None:
    averager = LatestWeightAverager(k=1)
    for i in range(50):
        averager.reset()
        averager.collect(nn.ModuleDict({f"layer{i}": nn.Linear(2, 2)}))
        assert list(averager.average()) == [f"layer{i}.weight", f"layer{i}.bias"]


@pytest.mark.parametrize("frozen", ["keep", "omit"])
def test_memory_is_averaged_if_it_is_trained_under_any_name(
    frozen: Literal["keep", "omit"],
) -> None:
    model, values = nn.ModuleDict({"first": nn.Module(), "second": nn.Module()}), torch.zeros(2, 3)
    model["first"].register_buffer("view", values[0])
    model["first"].register_parameter("frozen", nn.Parameter(values[1], requires_grad=False))
    model["second"].register_parameter("a", nn.Parameter(values[0]))
    model["second"].register_parameter("b", nn.Parameter(values[1]))
    averager = LatestWeightAverager(k=2, frozen=frozen)
    for value in (1.0, 3.0):
        values.fill_(value)
        averager.collect(model)
    average = averager.average()
    assert len(average) == 4
    assert all(tensor.tolist() == [2, 2, 2] for tensor in average.values())


@pytest.mark.parametrize("zeros", [torch.zeros(5, 3), torch.zeros(5, 1).expand(5, 3)])
def test_a_tied_average_fills_an_untied_model(zeros: torch.Tensor) -> None:
    model, untied = Tied(), Tied()
    untied.head.weight = nn.Parameter(zeros)
    with torch.no_grad():
        model.embedding.weight.fill_(2.0)
    averager = LatestWeightAverager(k=1)
    averager.collect(model)
    with averager.swapped_into(untied):
        assert torch.equal(untied.head.weight, model.head.weight)
        assert torch.equal(untied.embedding.weight, model.head.weight)
    assert not untied.head.weight.any()


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.middle = nn.Linear(3, 3)
        self.lora_a = nn.Linear(3, 2, bias=False)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def collected_by_name(
    model: nn.Module, **options: Any
) -> tuple[LatestWeightAverager, list[dict[str, torch.Tensor]]]:
    averager, states = LatestWeightAverager(k=2, **options), []
    for _ in range(3):
        states.append(shake(model))
        averager.collect(model)
    return averager, states


@pytest.mark.parametrize("store", ["host", "device", "disk"])
def test_excluded_tensors_stay_raw_and_are_stored_once(store: Any, tmp_path: Path) -> None:
    model = Language()
    if store == "disk":
        store = DiskStore(tmp_path)
    averager, states = collected_by_name(model, exclude=["embed*", "*.bias"], store=store)
    average, newest = averager.average(), states[-1]
    for name in ("embed.weight", "head.weight", "middle.bias"):
        assert torch.equal(average[name], newest[name])
    assert average["head.weight"] is average["embed.weight"]
    for name in ("middle.weight", "lora_a.weight"):
        assert torch.equal(average[name], mean_of(states[-2:], name))
    assert "15 values each" in repr(averager)  # the excluded are not stored k times
    live = shake(model)
    with averager.swapped_into(model):  # the whole average, as average() gives it
        assert_same_state(dict(model.state_dict()), average)
    assert_same_state(dict(model.state_dict()), live)


def test_only_included_tensors_are_averaged_and_a_string_is_one_pattern() -> None:
    model = Language()
    averager, states = collected_by_name(model, include="*lora_*")
    average = averager.average()
    assert torch.equal(average["lora_a.weight"], mean_of(states[-2:], "lora_a.weight"))
    assert torch.equal(average["middle.weight"], states[-1]["middle.weight"])
    both, states = collected_by_name(model, include=["middle.*"], exclude=["*.bias"])
    assert torch.equal(both.average()["middle.weight"], mean_of(states[-2:], "middle.weight"))
    assert torch.equal(both.average()["middle.bias"], states[-1]["middle.bias"])


def test_a_tied_tensor_is_selected_by_any_of_its_names() -> None:
    model = Language()
    excluded, states = collected_by_name(model, exclude="head.weight")
    assert torch.equal(excluded.average()["embed.weight"], states[-1]["embed.weight"])
    included, states = collected_by_name(model, include="head.weight")
    assert torch.equal(included.average()["embed.weight"], mean_of(states[-2:], "embed.weight"))


def test_excluded_buffers_and_frozen_parameters_keep_their_rule() -> None:
    model = small_net()
    averager, states = collected_by_name(model, buffers="average", exclude="*running_mean")
    assert torch.equal(averager.average()["1.running_mean"], states[-1]["1.running_mean"])
    assert torch.equal(averager.average()["1.running_var"], mean_of(states[-2:], "1.running_var"))
    model[4].requires_grad_(False)
    omitting, _ = collected_by_name(model, frozen="omit", exclude="4.*")
    assert not any(name.startswith("4.") for name in omitting.average())
    model[4].requires_grad_(True)  # trained from now on, and still excluded
    keeping, _ = collected_by_name(model, exclude="4.*")
    model[4].requires_grad_(False)
    keeping.collect(model)
    model[4].requires_grad_(True)
    newest = shake(model)
    keeping.collect(model)
    assert torch.equal(keeping.average()["4.weight"], newest["4.weight"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exclude": "*embedding*"}, r"exclude='\*embedding\*'.*'embed.weight'"),
        ({"include": ["middle.*", "lora.A"]}, r"include='lora.A'.*'lora_a.weight'"),
        ({"exclude": "*"}, "nothing to average.*exclude"),
        ({"include": [3]}, "include="),
        ({"exclude": ""}, "exclude="),
    ],
)
def test_patterns_that_select_nothing_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, LayoutError), match=message):
        LatestWeightAverager(k=2, **options).collect(Language())


def test_a_copy_excludes_the_same_tensors() -> None:
    model = Language()
    averager, _ = collected_by_name(model, exclude="embed*")
    again = copy.deepcopy(averager)
    newest = shake(model)
    again.collect(model)
    assert torch.equal(again.average()["embed.weight"], newest["embed.weight"])


def test_frozen_parameters_are_kept_once_or_omitted() -> None:
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 1))
    model[0].requires_grad_(False)
    averager = LatestWeightAverager(k=4)
    adapter = LatestWeightAverager(k=4, frozen="omit")
    for _ in range(4):
        with torch.no_grad():
            model[1].weight.normal_()
        averager.collect(model)
        adapter.collect(model)
    assert "11 values" in repr(averager)
    assert torch.equal(averager.average()["0.weight"], model[0].weight)
    model.load_state_dict(averager.average())
    assert set(adapter.average()) == {"1.weight", "1.bias"}
    with adapter.swapped_into(model):
        assert torch.equal(model[1].weight, adapter.average()["1.weight"])


@pytest.mark.parametrize("store", ["host", "device"])
@pytest.mark.parametrize("sliding", [True, False])
def test_a_parameter_unfrozen_later_joins_with_the_value_it_had(store: str, sliding: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    averager = LatestWeightAverager(k=3, store=store, _sliding=sliding)  # type: ignore[arg-type]
    states = []
    for i in range(5):
        if i == 3:
            model[0].requires_grad_(True)
        with torch.no_grad():
            model[1].weight.normal_()
            if i >= 3:
                model[0].weight.normal_()
        averager.collect(model)
        states.append({n: t.clone() for n, t in model.state_dict().items()})
        if averager.ready:
            average = averager.average()
            for name in states[0]:
                assert torch.equal(average[name], mean_of(states[-3:], name)), (i, name)
    model[0].requires_grad_(False)  # frozen again: it goes on being averaged
    averager.collect(model)
    assert torch.equal(
        averager.average()["0.weight"],
        mean_of([*states[-2:], dict(model.state_dict())], "0.weight"),
    )


def test_an_omitted_parameter_cannot_join() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    averager = LatestWeightAverager(k=3, frozen="omit")
    averager.collect(model)
    model[0].requires_grad_(True)
    with pytest.raises(LayoutError, match=r"'0.weight' is new.*reset"):
        averager.collect(model)


class Wrapped(nn.Module):
    """A model with a submodule honestly called `module`, and a compiled part."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.inner = torch.compile(nn.Linear(2, 2), backend="eager")


def test_wrapper_prefixes_never_leak_and_real_names_stay() -> None:
    expected = {"module.weight", "module.bias", "inner.weight", "inner.bias"}
    model = Wrapped()
    for wrapped in (
        model,
        nn.DataParallel(model),
        torch.compile(model, backend="eager"),
        torch.compile(nn.DataParallel(model), backend="eager"),
    ):
        averager = LatestWeightAverager(k=1)
        averager.collect(wrapped)  # type: ignore[arg-type]
        assert set(averager.average()) == expected
        with averager.swapped_into(model):  # names are the same for every wrapper
            pass


def test_distributed_data_parallel(tmp_path: Path) -> None:
    """The real wrapper, on one gloo rank."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        model = small_net()
        wrapped = nn.parallel.DistributedDataParallel(model)
        averager = LatestWeightAverager(k=2)
        states = []
        for _ in range(2):
            states.append(shake(model))
            averager.collect(wrapped)
        assert set(averager.average()) == set(model.state_dict())
        with averager.swapped_into(wrapped):
            assert torch.equal(model[4].weight, mean_of(states, "4.weight"))
        assert torch.equal(model[4].weight, states[-1]["4.weight"])
    finally:
        torch.distributed.destroy_process_group()


def test_prefixes_of_state_dicts() -> None:
    averager = LatestWeightAverager(k=1)
    averager.collect({"module._orig_mod.a": torch.ones(1), "module.b": torch.ones(1)})
    assert set(averager.average()) == {"a", "b"}
    averager = LatestWeightAverager(k=1)
    averager.collect({"module.a": torch.ones(1), "b": torch.ones(1)})
    assert set(averager.average()) == {"module.a", "b"}


_ONES_AS_QINT8 = torch.ones(2), 0.1, 0, torch.qint8


@pytest.mark.filterwarnings("ignore:.*(nested|quantize)")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.update(w=torch.ones(3)), r"'w' has shape \(3,\).*\(2,\)"),
        (lambda s: s.update(w=torch.ones(2).double()), r"'w' is torch.float64.*torch.float32"),
        (lambda s: s.pop("w"), r"'w'.*no longer has it"),
        (lambda s: s.update(x=torch.ones(2)), r"'x' is new"),
        (lambda s: s.update(w=[1.0, 2.0]), r"'w' is of type list, not a tensor"),
        (lambda s: s.update(w=torch.ones(2, device="meta")), r"'w' is on the meta device"),
        (lambda s: s.update(w=torch.eye(2).to_sparse()), r"'w' has layout torch.sparse"),
        (lambda s: s.update(w=torch.quantize_per_tensor(*_ONES_AS_QINT8)), r"'w' is quantized"),
        (lambda s: s.update(w=torch.nested.nested_tensor([[1.0]])), r"'w' is nested"),
    ],
)
def test_a_model_that_changed_is_an_error_that_names_the_tensor(change, message) -> None:  # type: ignore[no-untyped-def]
    averager = LatestWeightAverager(k=2)
    state = {"w": torch.ones(2), "b": torch.ones(1)}
    averager.collect(dict(state))
    change(state)
    for _ in range(2):  # a bad model stays bad the second time
        with pytest.raises(LayoutError, match=message):
            averager.collect(state)
    averager.collect({"w": torch.zeros(2), "b": torch.ones(1)})  # and nothing was spoiled
    assert averager.average()["w"].tolist() == [0.5, 0.5]
    assert averager.num_collected == 2


def test_a_lazy_layer_is_an_error() -> None:
    model = nn.LazyLinear(3)
    with pytest.raises(LayoutError, match="'weight' is not initialised yet"):
        LatestWeightAverager().collect(model)


@pytest.mark.parametrize("frozen", ["keep", "omit"])
def test_a_loaded_window_is_saved_with_a_model_that_is_frozen(
    tmp_path: Path, frozen: Literal["keep", "omit"]
) -> None:
    """As a model that was loaded for inference is, such as one of `PeftModel.from_pretrained`."""
    model = nn.Linear(2, 2)
    averager = LatestWeightAverager(k=2, frozen=frozen)
    for value in (1.0, 4.0):
        nn.init.constant_(model.weight, value)
        averager.collect(model)
    loaded = LatestWeightAverager(k=2, frozen=frozen)
    loaded.load_state_dict(averager.state_dict())
    loaded.save_pretrained(tmp_path / "averaged", model.requires_grad_(False))
    found = load_file(tmp_path / "averaged/model.safetensors")
    assert found.keys() == {"weight", "bias"}
    assert found["weight"].eq(2.5).all()


def test_nothing_to_average_is_an_error() -> None:
    with pytest.raises(LayoutError, match="nothing to average"):
        LatestWeightAverager().collect(nn.ReLU())
    with pytest.raises(LayoutError, match="nothing to average"):
        LatestWeightAverager().collect(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(LayoutError, match="got list"):
        LatestWeightAverager().collect([torch.ones(1)])  # type: ignore[arg-type]


def test_replaced_and_moved_tensors_are_noticed() -> None:
    """The quick path must not copy from tensors the model no longer has."""
    model = nn.Linear(2, 1, bias=False)
    averager = LatestWeightAverager(k=1)
    averager.collect(model)
    model.weight = nn.Parameter(torch.full((1, 2), 7.0))
    averager.collect(model)
    assert averager.average()["weight"].tolist() == [[7.0, 7.0]]
    model.weight.data = torch.full((1, 2), 9.0)
    averager.collect(model)
    assert averager.average()["weight"].tolist() == [[9.0, 9.0]]
    other = nn.Linear(2, 1, bias=False)
    averager.collect(other)
    assert torch.equal(averager.average()["weight"], other.weight)


def test_a_module_that_changed_is_refused_every_time() -> None:
    """Also by the quick path, which recognises a model it has seen."""
    model = nn.Linear(2, 3)
    averager = LatestWeightAverager(k=2)
    averager.collect(model)
    model.weight.data = model.weight.data.view(2, 3)  # the same memory in another shape
    for _ in range(2):
        with pytest.raises(LayoutError, match=r"'weight' has shape \(2, 3\).*\(3, 2\)"):
            averager.collect(model)
    model.weight.data = model.weight.data.view(3, 2)
    averager.collect(model)
    assert averager.num_collected == 2


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda m: prune.l1_unstructured(m[0], "weight", amount=0.5), "0.weight_orig"),
        (lambda m: parametrizations.weight_norm(m[0]), "0.parametrizations.weight.original0"),
        (lambda m: parametrizations.orthogonal(m[0]), "0.parametrizations.weight.original"),
    ],
)
def test_a_module_that_is_reparametrised_after_a_snapshot(
    change: Callable[[nn.Sequential], object], name: str
) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    averager = LatestWeightAverager(k=2)
    averager.collect(model)
    change(model)
    with pytest.raises(LayoutError, match=rf"'0.weight'.*{re.escape(name)}.*before the first"):
        averager.collect(model)
    averager.reset()
    averager.collect(model)
    assert len(averager) == 1


def test_another_module_on_the_same_memory_is_another_module() -> None:
    first, second = nn.Module(), nn.Module()
    first.a = nn.Parameter(torch.ones(3))
    second.b = nn.Parameter(first.a.data)
    averager = LatestWeightAverager(k=2)
    averager.collect(first)
    with pytest.raises(LayoutError, match=r"'a'.*no longer has it"):
        averager.collect(second)


def test_the_averager_does_not_keep_the_model_alive() -> None:
    import gc
    import weakref

    model = nn.Linear(2, 1)
    averager = LatestWeightAverager(k=2)
    averager.collect(model)
    watched = weakref.ref(model.weight)
    del model
    gc.collect()
    assert watched() is None
    assert len(averager) == 1


def test_memory_format_is_kept_and_harmless() -> None:
    model = small_net()
    averager = LatestWeightAverager(k=2)
    states = [shake(model)]
    averager.collect(model)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    states.append(shake(model))
    averager.collect(model)
    average = averager.average()
    assert torch.equal(average["0.weight"], mean_of(states, "0.weight"))
    assert average["0.weight"].stride() == model[0].weight.stride()


def test_a_schedule_that_was_not_due_yet_is_named() -> None:
    averager = LatestWeightAverager(k=2, schedule=Every(20))
    for _ in range(3):
        averager.step({"w": torch.zeros(1)})
    with pytest.raises(NotReadyError, match=r"none was due in 3 steps, by Every\(n=20"):
        averager.average()
    averager.collect({"w": torch.zeros(1)})
    averager.reset()
    with pytest.raises(NotReadyError, match=r"call averager.collect"):
        averager.average()


def test_a_storage_dtype_that_is_too_narrow_is_named() -> None:
    averager = LatestWeightAverager(k=1, storage_dtype=torch.float16)
    averager.collect({"w": torch.full((1,), 1e5)})
    with pytest.warns(NonFiniteWarning, match="65,504"):
        averager.average()


def test_waiting_and_not_waiting_for_a_full_window() -> None:
    patient, eager = LatestWeightAverager(k=3), LatestWeightAverager(k=3, min_snapshots=1)
    for averager, needed in ((patient, 3), (eager, 1)):
        assert not averager.ready
        with pytest.raises(NotReadyError, match=rf"0 of {needed} snapshots.*collect"):
            averager.average()
        averager.collect({"w": torch.tensor([1.0])})
        averager.collect({"w": torch.tensor([2.0])})
    assert not patient.ready
    with pytest.raises(NotReadyError, match="2 of 3 snapshots"):
        patient.average()
    assert patient.average(k=2)["w"].item() == 1.5
    with pytest.raises(NotReadyError, match=r"k=3, .*holds 2 of 3"):
        patient.average(k=3)
    with pytest.raises(ConfigError, match=r"k=.* from 1 to 3"):
        patient.average(k=4)
    assert eager.ready
    assert eager.average()["w"].item() == 1.5


def test_coefficients_reach_the_mean() -> None:
    states = [{"w": torch.tensor([float(v)])} for v in (1, 10, 100)]
    exponential = LatestWeightAverager(k=3, coefficients=Exponential(0.5))
    explicit = LatestWeightAverager(k=3, coefficients=Explicit([1, 2, 7]))
    for state in states:
        exponential.collect(state)
        explicit.collect(state)
    assert exponential.average()["w"].item() == 0.25 * 1 + 0.25 * 10 + 0.5 * 100
    assert explicit.average()["w"].item() == pytest.approx(72.1)
    assert explicit.average(k=2)["w"].item() == pytest.approx((20 + 700) / 9)


def test_labels_and_repr() -> None:
    averager = LatestWeightAverager(k=2)
    assert repr(averager).startswith("LatestWeightAverager(k=2, 0 of 2 snapshots, host memory")
    assert bool(averager)
    assert len(averager) == 0
    averager.collect({"w": torch.ones(1000)})
    averager.collect({"w": torch.ones(1000)}, step=500)
    averager.collect({"w": torch.ones(1000)})
    assert averager.snapshot_steps == [500, 501]
    with pytest.raises(ConfigError, match=r"step=501 is not after .*reset"):
        averager.collect({"w": torch.ones(1000)}, step=501)
    assert "2 of 2 snapshots (steps 500 to 501), 1,000 values each, 0.0 MB in host" in repr(
        averager
    )


@pytest.mark.parametrize("sliding", [True, False])
def test_inference_mode_leaves_nothing_behind(sliding: bool) -> None:
    """Collecting and reading inside it, going on outside."""
    model = small_net()
    averager = LatestWeightAverager(k=2, _sliding=sliding)
    states = []
    for inside in (True, True, False, True, False, False):
        states.append(shake(model))
        with torch.inference_mode(inside):
            averager.collect(model)
            if averager.ready:
                average = averager.average()
                assert not average["4.weight"].is_inference()
                assert torch.equal(average["4.weight"], mean_of(states[-2:], "4.weight"))
                with averager.swapped_into(model):
                    model.eval()(torch.zeros(1, 1, 8, 8))
    loaded = LatestWeightAverager(k=2, _sliding=sliding)
    with torch.inference_mode():
        loaded.load_state_dict(averager.state_dict())
    loaded.collect(model)
    model.train()(torch.randn(4, 1, 8, 8)).sum().backward()


def test_reset_begins_a_new_window() -> None:
    averager = LatestWeightAverager(k=2)
    averager.collect({"w": torch.ones(1)})
    averager.reset()
    assert len(averager) == 0
    averager.collect({"other": torch.ones(3)})
    assert averager.num_collected == 2
    assert set(averager.average(k=1)) == {"other"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k=0"),
        ({"k": 2.5}, "k=2.5"),
        ({"k": True}, "k=True"),
        ({"min_snapshots": 0}, "min_snapshots=0"),
        ({"store": "gpu"}, "store='gpu': choose one of 'host', 'device'"),
        ({"store": "disk"}, "Or give a DiskStore"),
        ({"coefficients": 3}, r"coefficients=3: give .* Uniform\(\)"),
        ({"schedule": 3}, r"schedule=3: give .* Every\(n\)"),
        ({"schedule": OnPlateau}, r"OnPlateau'>: give"),
        ({"buffers": "copy"}, "buffers='copy'"),
        ({"frozen": False}, "frozen=False"),
        ({"include": 3}, "include=3: give name patterns"),
        ({"_sliding": 1}, "_sliding=1"),
        ({"storage_dtype": torch.int8}, "storage_dtype=torch.int8"),
        ({"k": 4, "coefficients": Explicit([1, 2])}, "Explicit has 2 weights"),
        ({"k": 6, "schedule": Every(100, total=500)}, "5 snapshots .* needs 6"),
    ],
)
def test_bad_configuration_fails_at_construction(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LatestWeightAverager(**options)  # type: ignore[arg-type]


def test_schedules_decide() -> None:
    averager = LatestWeightAverager(k=2, schedule=Every(3, start=2))
    fired = [averager.step({"w": torch.ones(1)}) for _ in range(9)]
    assert [i + 1 for i, f in enumerate(fired) if f] == [5, 8]
    assert averager.snapshot_steps == [5, 8]
    plateau = LatestWeightAverager(k=2, schedule=OnPlateau())
    losses = [3.0, 2.0, 2.1, 1.0, float("nan"), 1.0]
    assert [plateau.step({"w": torch.ones(1)}, loss=loss) for loss in losses] == [
        False, False, True, False, False, True,
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="needs the validation loss"):
        plateau.step({"w": torch.ones(1)})


def test_no_schedule_collects_at_every_step() -> None:
    averager = LatestWeightAverager(k=2)
    assert all(averager.step({"w": torch.ones(1)}) for _ in range(3))
    assert averager.snapshot_steps == [2, 3]


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, "float32"])
def test_a_mean_is_of_floating_point_numbers(dtype: torch.dtype) -> None:
    """Whole numbers would be cut off; complex ones left half the memory as it was found."""
    averager = LatestWeightAverager(k=1)
    averager.collect({"w": torch.full((4,), 1.5)})
    with pytest.raises(ConfigError, match=r"dtype=.*floating-point"):
        averager.average(dtype=dtype)
    with pytest.raises(ConfigError, match="coefficients='uniform'"):
        averager.average(coefficients="uniform")  # type: ignore[arg-type]


def test_a_model_converted_into_memory_it_had_before_is_noticed() -> None:
    model = nn.Linear(64, 64, bias=False)
    averager = LatestWeightAverager(k=2)
    averager.collect(model)
    memory = model.weight.data
    model.bfloat16()
    same = memory.view(torch.bfloat16)[:, :64]  # as the allocator may give it again
    model.weight.data = same.copy_(model.weight.data)
    assert model.weight.data_ptr() == memory.data_ptr()
    with pytest.raises(LayoutError, match=r"is torch.bfloat16.*torch.float32"):
        averager.collect(model)


@pytest.mark.parametrize("store", ["host", "device"])
def test_a_buffer_from_the_newest_snapshot_may_change_its_shape(store: str) -> None:
    """Nothing in it is averaged; a model with another shape by now keeps its own value."""
    model = nn.Linear(2, 1)
    model.register_buffer("seen", torch.zeros(0, dtype=torch.int64))
    averager = LatestWeightAverager(k=2, store=store)  # type: ignore[arg-type]
    for i in range(4):
        model.seen = torch.arange(i)
        with torch.no_grad():
            model.weight.fill_(i)
        averager.collect(model)
    assert averager.average()["seen"].tolist() == [0, 1, 2]
    with averager.swapped_into(model):
        assert model.weight.tolist() == [[2.5, 2.5]]
        assert model.seen.tolist() == [0, 1, 2]
    model.seen = torch.arange(9)
    with averager.swapped_into(model):
        assert model.weight.tolist() == [[2.5, 2.5]]
        assert model.seen.tolist() == list(range(9))
    again = LatestWeightAverager(k=2)
    again.load_state_dict(averager.state_dict())
    again.collect(model)
    assert again.average()["seen"].tolist() == list(range(9))


def test_a_frozen_tensor_of_another_shape_is_refused_when_it_is_trained() -> None:
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    averager = LatestWeightAverager(k=2)
    averager.collect(model)
    model.bias = nn.Parameter(torch.zeros(1, 1))
    with pytest.raises(LayoutError, match=r"'bias' has shape \(1, 1\)"):
        averager.collect(model)
    model.bias.requires_grad_(False)
    averager.collect(model)
    with pytest.raises(LayoutError, match="'bias' was collected with shape"):
        averager.swapped_into(nn.Linear(2, 1))


@pytest.mark.parametrize("store", ["host", "device", "disk"])
def test_several_threads_may_collect_and_read(store: str, tmp_path: Path) -> None:
    averager = LatestWeightAverager(
        k=3, store=DiskStore(tmp_path) if store == "disk" else store, min_snapshots=1
    )
    errors: list[BaseException] = []

    def work(value: float) -> None:
        try:
            for _ in range(8):
                averager.collect({"w": torch.full((1000,), value)})
                assert averager.average()["w"].unique().numel() == 1
                assert len(averager) <= 3
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(float(i),)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors
    assert averager.num_collected == 32
    assert averager.snapshot_steps == [30, 31, 32]


def test_a_step_whose_snapshot_fails_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    averager = LatestWeightAverager(k=2, schedule=OnPlateau(patience=1), min_snapshots=1)
    averager.step({"w": torch.zeros(2)}, loss=1.0)
    before = averager.state_dict()
    with monkeypatch.context() as patch:
        patch.setattr(averager._window, "put", lambda *_: 1 / 0)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                averager.step({"w": torch.zeros(2)}, loss=2.0)
    assert averager.state_dict()["counters"] == before["counters"]


def test_collecting_by_hand_with_a_horizon_is_warned_of() -> None:
    model = nn.Linear(1, 1)
    with pytest.warns(UserWarning, match=r"averager\.step\(model\)"):
        LatestWeightAverager(k=2, horizon=1 / 4).collect(model)
    averager = LatestWeightAverager(k=2, horizon=1 / 4)
    averager.collect(model, step=1)  # labelled: a framework has decided when
    averager = LatestWeightAverager(k=2, horizon=1 / 4)
    averager.step(model)
    averager.collect(model)
