"""A blend of the mean and the live weights: exact, and the same online and offline."""

from fractions import Fraction
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import round_fraction, same_bits, true_mean
from torch import Tensor, nn

from torch_lawa import (
    Blend,
    DiskStore,
    Explicit,
    Exponential,
    LatestWeightAverager,
    Recent,
    Uniform,
)
from torch_lawa.coefficients import Coefficients
from torch_lawa.offline.average import average_checkpoints
from torch_lawa.offline.options import AverageOptions
from torch_lawa.offline.sweep import sweep_checkpoints
from torch_lawa.offline.watch.watcher import watch_run

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


class Net(nn.Module):
    """Tensors of any layout, a tied one, a buffer, a frozen and an empty one."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(5, 3, dtype=dtype)
        self.turned = nn.Parameter(torch.zeros(3, 5, dtype=dtype).t())
        self.tied = nn.Linear(5, 3, bias=False, dtype=dtype)
        self.tied.weight = self.first.weight
        self.nothing = nn.Parameter(torch.zeros(0, 3, dtype=dtype))
        self.frozen = nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=False)
        self.norm = nn.BatchNorm1d(3, dtype=dtype)


def shake(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def averager_of(kind: str, folder: Path, **options: object) -> LatestWeightAverager:
    store = DiskStore(folder / "window") if kind == "disk" else kind
    return LatestWeightAverager(store=store, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", ["host", "device", "disk"])
@pytest.mark.parametrize("k", [1, 3, 16])
def test_the_live_weights_are_a_member_exactly(
    tmp_path: Path, kind: str, dtype: torch.dtype, k: int
) -> None:
    model, averager = Net(dtype), averager_of(kind, tmp_path, k=k, blend=0.6)
    history = []
    for step in range(k + 2):
        shake(model, step)
        averager.collect(model)
        history.append(values(model))
        if averager.ready:
            averager.average(coefficients=Uniform())  # sums that slide must not be used
    newest, window = history[-1], history[-k:]
    shake(model, 99)
    live = values(model)
    for blend, three, two in ((0.6, 3, 2), (0.5, 1, 1)):
        with averager.swapped_into(model, coefficients=Blend(blend)):
            found = values(model)
        average = averager.average(coefficients=Blend(blend))
        for name, tensor in live.items():
            if name == "frozen" or "running" in name or "num_batches" in name:
                assert torch.equal(found[name], newest[name])
                continue
            members = [state[name] for state in window]
            for got, own in ((found, tensor), (average, newest[name])):
                exact = true_mean([*members, own], [three] * k + [two * k])
                expected = [round_fraction(m, dtype) for m in exact]
                assert got[name].double().flatten().tolist() == expected, name
    assert all(torch.equal(tensor, live[name]) for name, tensor in values(model).items())
    with averager.swapped_into(model):  # the averager's own
        assert torch.equal(model.first.weight, values(model)["tied.weight"])
    assert averager.coefficients == Blend(0.6)


@pytest.mark.parametrize("blend", [0.6, 0.5, 0.55, 1 / 3, 1.0, 0.123456789])
@pytest.mark.parametrize("rule", [Uniform(), Exponential(0.4), Recent(0.3), Explicit([1, 2, 3])])
def test_online_and_offline_are_the_same(tmp_path: Path, blend: float, rule: Coefficients) -> None:
    """Where the live weights are the newest snapshot: the last checkpoint of a run."""
    run, model = tmp_path / "run", Net()
    run.mkdir()
    averager = LatestWeightAverager(k=3, coefficients=rule, blend=blend)
    for step in (100, 200, 300, 400):
        shake(model, step)
        averager.collect(model, step=step)
        state = {n: t.contiguous() for n, t in values(model).items() if n != "tied.weight"}
        save_file(state, run / f"step_{step}.safetensors")
    options = AverageOptions(coefficients=rule, blend=blend)
    once, watched, swept = tmp_path / "a.safetensors", tmp_path / "w.safetensors", tmp_path / "s"
    average_checkpoints(run, once, last=3, options=options)
    watch_run(run, watched, k=3, settle=0, once=True, options=options)
    sweep_checkpoints(run, [3], at=[400], output=swept, options=options)
    averager.save_pretrained(tmp_path / "exported")
    online = averager.average()
    with averager.swapped_into(model):
        inside = values(model)
    for path in (once, watched, *swept.iterdir(), tmp_path / "exported" / "model.safetensors"):
        found = load_file(path)
        assert len(found) >= len(online) - 1
        for name, tensor in found.items():
            if (
                name != "frozen" or "exported" in path.parts
            ):  # offline nothing is known to be frozen
                assert same_bits(tensor, online[name].contiguous()), (path, name)
    if rule == Uniform() and blend != 0.123456789:  # sums of whole multiples are exact
        assert all(same_bits(inside[name], tensor) for name, tensor in online.items())
    for name, tensor in online.items():
        assert torch.allclose(inside[name], tensor, rtol=1e-6, atol=1e-7)


def test_excluded_tensors_stay_raw(tmp_path: Path) -> None:
    model, averager = Net(), LatestWeightAverager(k=2, blend=0.25, exclude=["turned"])
    for step in range(3):
        shake(model, step)
        averager.collect(model)
    raw = values(model)
    with averager.swapped_into(model):
        assert torch.equal(model.turned, raw["turned"])
        assert not torch.equal(model.first.bias, raw["first.bias"])


def test_the_weights_of_a_blend() -> None:
    weights = Blend(0.6).weights(5)
    shares = [Fraction(w) / Fraction(weights.divisor) for w in weights.numerators]
    assert shares == [Fraction(3, 25)] * 4 + [Fraction(3, 25) + Fraction(2, 5)]
