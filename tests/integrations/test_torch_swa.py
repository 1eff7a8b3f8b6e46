"""Against means added up by hand in float64, and against what torch.optim.swa_utils does itself."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.models import same_bits
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from torch_lawa import LatestWeightAverager
from torch_lawa.errors import ConfigError, LayoutError, NotReadyError
from torch_lawa.integrations.torch_swa import from_averaged_model, to_averaged_model


class Net(nn.Module):
    """BatchNorm, a tied weight, a frozen layer and an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.first, self.tied = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(4, 2).requires_grad_(False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.tied(self.first(self.body(x))))


def advance(model: nn.Module) -> dict[str, Tensor]:
    """Train in name only: other values in every tensor; returns a copy of them all."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_()
        model.body[1].running_mean.normal_()
        model.body[1].running_var.uniform_(0.5, 2.0)
        model.steps += 1
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def mean(history: list[dict[str, Tensor]], name: str) -> Tensor:
    return (sum(state[name].double() for state in history) / len(history)).float()


def collected(
    model: nn.Module, num: int, **options: object
) -> tuple[LatestWeightAverager, list[dict[str, Tensor]]]:
    averager = LatestWeightAverager(**options)
    history = []
    for _ in range(num):
        history.append(advance(model))
        averager.collect(model)
    return averager, history


@pytest.mark.parametrize("frozen", ["keep", "omit"])
def test_mean_becomes_an_averaged_model(frozen: str) -> None:
    model = Net()
    averager, history = collected(model, 5, k=3, frozen=frozen)
    model.frozen.weight.data.fill_(0.5)  # an omitted tensor comes from the model, a kept one not
    before = copy.deepcopy(model.state_dict())

    averaged = to_averaged_model(averager, model)

    assert isinstance(averaged, AveragedModel)
    assert averaged.n_averaged.item() == 3
    inside = averaged.module.state_dict()
    assert list(inside) == list(before)
    for name, tensor in inside.items():
        if name == "frozen.weight" and frozen == "omit":
            expected = before[name]
        elif name in dict(model.named_parameters(remove_duplicate=False)):
            expected = mean(history[-3:], name)
        else:
            expected = history[-1][name]
        assert same_bits(tensor, expected), name
    assert averaged.module.tied.weight is averaged.module.first.weight
    assert averaged.module.frozen.weight.requires_grad is False
    for name, tensor in model.state_dict().items():
        assert same_bits(tensor, before[name]), name


def test_averaged_model_shares_nothing() -> None:
    model = Net()
    averager, _ = collected(model, 2, k=2)
    averaged = to_averaged_model(averager, model)
    expected = averager.average()
    with torch.no_grad():
        for tensor in averaged.module.state_dict().values():
            tensor.zero_()
    assert model.body[0].weight.abs().min() > 0
    assert same_bits(averager.average()["body.0.weight"], expected["body.0.weight"])


def test_smaller_window() -> None:
    model = Net()
    averager, history = collected(model, 4, k=4)
    averaged = to_averaged_model(averager, model, k=2)
    assert averaged.n_averaged.item() == 2
    assert same_bits(averaged.module.body[0].weight, mean(history[-2:], "body.0.weight"))


def test_update_bn_and_forward() -> None:
    model = Net()
    averager, history = collected(model, 3, k=3)
    averaged = to_averaged_model(averager, model)
    batches = [torch.randn(16, 3) for _ in range(4)]

    update_bn(batches, averaged)

    weight, bias = mean(history, "body.0.weight").double(), mean(history, "body.0.bias").double()
    outputs = [batch.double() @ weight.T + bias for batch in batches]
    running_mean = torch.stack([out.mean(0) for out in outputs]).mean(0)
    running_var = torch.stack([out.var(0) for out in outputs]).mean(0)
    norm = averaged.module.body[1]
    torch.testing.assert_close(norm.running_mean, running_mean.float())
    torch.testing.assert_close(norm.running_var, running_var.float())

    averaged.eval()
    hidden = (outputs[0] - running_mean) / torch.sqrt(running_var + norm.eps)
    hidden = hidden * mean(history, "body.1.weight") + mean(history, "body.1.bias")
    for name in ("body.2", "first", "tied", "frozen"):
        hidden = hidden @ mean(history, f"{name}.weight").double().T
        if f"{name}.bias" in history[0]:
            hidden = hidden + mean(history, f"{name}.bias")
    torch.testing.assert_close(averaged(batches[0]), hidden.float(), rtol=1e-4, atol=1e-5)


def test_swa_goes_on_from_the_mean() -> None:
    model = Net()
    averager, history = collected(model, 4, k=3)
    averaged = to_averaged_model(averager, model)
    for _ in range(2):
        history.append(advance(model))
        averaged.update_parameters(model)
    assert averaged.n_averaged.item() == 5
    torch.testing.assert_close(averaged.module.body[0].weight, mean(history[1:], "body.0.weight"))


def test_ema_goes_on_from_the_mean() -> None:
    model = Net()
    averager, history = collected(model, 3, k=3)
    averaged = to_averaged_model(averager, model)
    averaged.multi_avg_fn = get_ema_multi_avg_fn(0.9)
    state = advance(model)
    averaged.update_parameters(model)
    expected = 0.9 * mean(history, "first.weight") + 0.1 * state["first.weight"]
    torch.testing.assert_close(averaged.module.first.weight, expected)


def test_wrappers_leave_no_trace() -> None:
    model = Net()
    wrapped = nn.DataParallel(compiled(model))
    averager, history = collected(model, 2, k=2)
    averaged = to_averaged_model(averager, wrapped)
    assert set(averaged.state_dict()) == {"n_averaged", *(f"module.{name}" for name in history[0])}


def test_not_ready_and_another_model() -> None:
    model = Net()
    averager, _ = collected(model, 2, k=3)
    with pytest.raises(NotReadyError, match="2 of 3 snapshots"):
        to_averaged_model(averager, model)
    averager.collect(model)
    with pytest.raises(LayoutError, match="no such tensor"):
        to_averaged_model(averager, nn.Linear(3, 4))


def test_sharded_model_is_refused() -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = fully_shard(nn.Linear(2, 2))
        averager = LatestWeightAverager(k=1)
        averager.collect(model)
        with pytest.raises(LayoutError, match="swapped_into"):
            to_averaged_model(averager, model)
    finally:
        torch.distributed.destroy_process_group()


def swa_of(model: nn.Module, averaged: AveragedModel) -> list[dict[str, Tensor]]:
    history = []
    for _ in range(3):
        history.append(advance(model))
        averaged.update_parameters(model)
    return history


def bare(model: nn.Module) -> nn.Module:
    return model


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def compiled_parallel(model: nn.Module) -> nn.Module:
    return compiled(nn.DataParallel(model))


@pytest.mark.parametrize("wrap", [bare, compiled, nn.DataParallel, compiled_parallel])
@pytest.mark.parametrize("saved", [False, True])
def test_plain_names_from_an_averaged_model(tmp_path: Path, wrap: Callable, saved: bool) -> None:
    model = Net()
    averaged = AveragedModel(wrap(model))
    history = swa_of(model, averaged)
    source: AveragedModel | dict[str, Tensor] = averaged
    if saved:
        torch.save(averaged.state_dict(), tmp_path / "swa.pt")
        source = torch.load(tmp_path / "swa.pt", weights_only=True)

    state = from_averaged_model(source)

    fresh = Net()
    fresh.load_state_dict(state)
    for name, tensor in fresh.state_dict().items():
        held = [t for n, t in averaged.state_dict().items() if n.endswith(f".{name}")]
        assert len(held) == 1
        assert same_bits(tensor, held[0]), name
    torch.testing.assert_close(fresh.body[0].weight.data, mean(history, "body.0.weight"))
    assert fresh.steps.item() == 3


def test_compiled_layer_inside() -> None:
    model = nn.Sequential(compiled(nn.Linear(2, 2)), nn.Linear(2, 1))
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).state_dict()
    assert list(from_averaged_model(AveragedModel(model))) == list(plain)
    assert list(from_averaged_model(AveragedModel(model).state_dict())) == list(plain)


def test_there_and_back() -> None:
    model = Net()
    averager, _ = collected(model, 3, k=3)
    back = from_averaged_model(to_averaged_model(averager, model).state_dict())
    average = averager.average()
    assert set(back) == set(average)
    assert all(same_bits(back[name], tensor) for name, tensor in average.items())


def test_window_begins_with_a_mean() -> None:
    """One mean is one snapshot: it counts as much as each of those that follow."""
    model = Net()
    averaged = AveragedModel(model)
    swa_of(model, averaged)
    mean_so_far = averaged.module.first.weight.detach().clone()

    model.load_state_dict(from_averaged_model(averaged.state_dict()))
    averager = LatestWeightAverager(k=3)
    averager.collect(model)
    later = []
    for _ in range(2):
        later.append(advance(model)["first.weight"].double())
        averager.collect(model)

    expected = (mean_so_far.double() + later[0] + later[1]) / 3
    assert same_bits(averager.average()["first.weight"], expected.float())


@pytest.mark.parametrize("state", [{}, {"n_averaged": torch.tensor(3)}])
def test_nothing_inside(state: dict[str, Tensor]) -> None:
    with pytest.raises(LayoutError, match="holds no weights"):
        from_averaged_model(state)


def test_state_of_a_bare_model_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"'steps'.*use it as it is"):
        from_averaged_model(Net().state_dict())


def test_a_plain_model_is_no_average() -> None:
    with pytest.raises(ConfigError, match="Linear is no AveragedModel"):
        from_averaged_model(nn.Linear(1, 1))  # type: ignore[arg-type]
