"""A running average: PyTorch's EMA and SWA, resumed exactly, swapped in and restored."""

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from lawa_lab.methods.catalog.ema import Ema
from lawa_lab.methods.registry import METHODS, parse_method
from lawa_lab.methods.running_average import RunningAverage
from lawa_lab.registry import typed_entries
from torch_lawa.errors import ConfigError, NotReadyError, StateError


def net() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3), nn.Linear(3, 4))
    model[3].weight = model[0].weight  # tied
    return model


def move(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_it_equals_torch(kind: str) -> None:
    model = net()
    if kind == "ema":
        ours = Ema(0.9).build(model)
        theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    else:
        ours = RunningAverage(model, lambda step: 1 / step, kind=kind)
        theirs = AveragedModel(model, multi_avg_fn=get_swa_multi_avg_fn())
    for seed in range(7):
        move(model, seed)
        ours.step(model)
        theirs.update_parameters(model)
    for name, expected in theirs.module.named_parameters():
        torch.testing.assert_close(ours.average()[name], expected.detach(), rtol=1e-6, atol=1e-6)


def test_a_resumed_average_is_equal_bit_for_bit() -> None:
    model, other = net(), net()
    other.load_state_dict(model.state_dict())
    whole, first = Ema(0.9).build(model), Ema(0.9).build(other)
    for seed in range(6):
        if seed == 3:
            state = first.state_dict()
            first = Ema(0.9).build(net())
            first.load_state_dict(state)
        for each, averager in ((model, whole), (other, first)):
            move(each, seed)
            averager.step(each)
    for name, tensor in whole.average().items():
        assert torch.equal(tensor, first.average()[name])
    with pytest.raises(StateError, match=r"ema:0\.9"):
        Ema(0.9).build(nn.Linear(2, 2)).load_state_dict(whole.state_dict())


def test_weights_and_buffers_are_restored_after_an_exception() -> None:
    model = net()
    averager = Ema(0.5).build(model)
    with pytest.raises(NotReadyError, match="step"), averager.swapped_into(model):
        pass
    for seed in range(2):
        move(model, seed)
        averager.step(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="inside"), averager.swapped_into(model):
        assert torch.equal(model[0].weight, averager.average()["0.weight"])
        assert not torch.equal(model[0].weight, before["0.weight"])
        model(torch.randn(8, 3))  # changes the BatchNorm statistics
        raise RuntimeError("inside")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_methods_are_typed_with_their_parameters() -> None:
    method = parse_method("ema:0.9990")
    assert (method, str(method), method.parameters) == (Ema(0.999), "ema:0.999", "0.999")
    assert "ema:DECAY" in typed_entries(METHODS)
    assert str(parse_method("ema:0.999999")) == "ema:0.999999"
    for text, said in (("ema", "ema:DECAY"), ("ema:x", "ema:DECAY"), ("ema:1", "between 0 and 1")):
        with pytest.raises(ConfigError, match=said):
            parse_method(text)
    with pytest.raises(ConfigError, match=", ".join(METHODS)):
        parse_method("mean")
