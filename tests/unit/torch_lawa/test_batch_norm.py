"""Re-estimated BatchNorm statistics, against ones computed by hand."""

from collections import namedtuple
from typing import Any

import pytest
import torch
from support.models import assert_same_state
from torch import nn

from torch_lawa import recalibrate_batch_norm
from torch_lawa.errors import BatchNormError


def batches(*sizes: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(n, 3, generator=generator) * 2 + 1 for n in sizes]


def expected(data: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    total = sum(len(x) for x in data)
    mean = sum(len(x) * x.double().mean(0) for x in data) / total
    var = sum(len(x) * x.double().var(0, unbiased=True) for x in data) / total
    return mean, var  # type: ignore[return-value]


@pytest.mark.parametrize("num_batches", [None, 1, 2, 10])
def test_statistics_are_the_average_weighted_by_batch_size(num_batches: int | None) -> None:
    data = batches(16, 16, 4)
    model = nn.BatchNorm1d(3, momentum=0.3)
    used = recalibrate_batch_norm(model, data, num_batches)
    assert used == min(num_batches or 3, 3)
    mean, var = expected(data[:used])
    torch.testing.assert_close(model.running_mean.double(), mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.running_var.double(), var, rtol=1e-5, atol=1e-6)
    assert model.momentum == 0.3


def test_a_default_device_is_none_of_its_business() -> None:
    data, model, other = batches(16, 4), nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    recalibrate_batch_norm(model, data)
    with torch.device("meta"):
        recalibrate_batch_norm(other, data)
    assert_same_state(other.state_dict(), model.state_dict())


Pair = namedtuple("Pair", ["inputs", "labels"])


class Keyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, inputs: torch.Tensor, labels: Any = None) -> torch.Tensor:
        return self.norm(inputs)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: x,
        lambda x: (x, torch.zeros(len(x))),
        lambda x: [x, "names", 3],
        lambda x: {"inputs": x, "labels": torch.zeros(len(x))},
        lambda x: Pair(x, torch.zeros(len(x))),
    ],
)
def test_batches_of_every_kind(wrap) -> None:  # type: ignore[no-untyped-def]
    data = batches(8, 8)
    model = Keyword()
    assert recalibrate_batch_norm(model, [wrap(x) for x in data]) == 2
    torch.testing.assert_close(
        model.norm.running_mean.double(), expected(data)[0], rtol=1e-5, atol=1e-6
    )


def test_anything_else_through_forward() -> None:
    data = batches(8, 8)
    model = nn.BatchNorm1d(3)

    class Batch:
        def __init__(self, x: torch.Tensor) -> None:
            self.x = x

    with pytest.raises(BatchNormError, match=r"type Batch .* forward="):
        recalibrate_batch_norm(model, [Batch(x) for x in data])
    recalibrate_batch_norm(model, [Batch(x) for x in data], forward=lambda m, b: m(b.x))
    torch.testing.assert_close(model.running_mean.double(), expected(data)[0], rtol=1e-5, atol=1e-6)


def test_modes_momenta_and_other_layers_are_left_alone() -> None:
    model = nn.Sequential(
        nn.Dropout(0.5),
        nn.BatchNorm1d(3, momentum=None),
        nn.InstanceNorm1d(3, track_running_stats=True),
        nn.BatchNorm1d(3, momentum=0.2),
    )
    model.eval()
    model[3].train()
    instance = {n: t.clone() for n, t in model[2].state_dict().items()}
    recalibrate_batch_norm(
        model, [torch.randn(4, 3, 6) for _ in range(2)], forward=lambda m, x: m(x)
    )
    assert [m.training for m in model] == [False, False, False, True]
    assert not model.training
    assert (model[1].momentum, model[3].momentum) == (None, 0.2)
    for name, value in model[2].state_dict().items():
        assert torch.equal(value, instance[name])


def test_frozen_layers_keep_their_statistics_and_are_used_as_in_training() -> None:
    data = batches(16, 8)
    frozen, switched_off, trained = (nn.BatchNorm1d(3) for _ in range(3))
    for layer in (frozen, switched_off):
        layer.running_mean.fill_(2.0)
        layer.running_var.fill_(9.0)
    switched_off.track_running_stats = False  # as by Lightning's `BaseFinetuning.freeze`
    model = nn.Sequential(frozen, switched_off, trained)
    frozen.eval()
    before = {n: t.clone() for n, t in model.state_dict().items() if not n.startswith("2.")}
    wrapped = nn.DataParallel(model)
    wrapped.training = False  # the mode of the wrapped module counts
    seen = [((x - 2.0) / 3.0 - 2.0) / 3.0 for x in data]
    assert recalibrate_batch_norm(wrapped, data) == 2
    assert_same_state({n: model.state_dict()[n] for n in before}, before)
    torch.testing.assert_close(
        trained.running_mean.double(), expected(seen)[0], rtol=1e-4, atol=1e-5
    )
    frozen.train()
    assert recalibrate_batch_norm(model, data) == 2
    assert not torch.equal(frozen.running_mean, before["0.running_mean"])
    model.train()
    for layer in (frozen, trained):
        layer.eval()
    with pytest.warns(UserWarning, match="every BatchNorm layer is in evaluation mode"):
        assert recalibrate_batch_norm(model, iter(())) == 0  # none left: no batch is needed


def test_dropout_is_off_while_estimating() -> None:
    data = batches(32)
    model = nn.Sequential(nn.Dropout(0.9), nn.BatchNorm1d(3))
    model.train()
    recalibrate_batch_norm(model, data)
    torch.testing.assert_close(
        model[1].running_mean.double(), expected(data)[0], rtol=1e-5, atol=1e-6
    )


def test_a_model_without_batch_norm_costs_nothing() -> None:
    class Untouchable:
        def __iter__(self) -> Any:
            raise AssertionError("the loader was touched")

    assert recalibrate_batch_norm(nn.Linear(2, 2), Untouchable()) == 0
    assert recalibrate_batch_norm(nn.BatchNorm1d(2, track_running_stats=False), Untouchable()) == 0


def test_an_empty_loader_and_a_failing_forward_leave_the_statistics() -> None:
    model = nn.BatchNorm1d(3, momentum=0.3)
    model.running_mean.fill_(4.0)
    model.num_batches_tracked.fill_(9)
    with pytest.raises(BatchNormError, match="gave no batches"):
        recalibrate_batch_norm(model, iter([]))
    with pytest.raises(RuntimeError):
        recalibrate_batch_norm(model, [torch.randn(4, 3), torch.randn(4, 5)])
    with pytest.raises(BatchNormError, match="num_batches=0"):
        recalibrate_batch_norm(model, batches(4), 0)
    with pytest.raises(BatchNormError, match=r"num_batches=2\.0"):
        recalibrate_batch_norm(model, batches(4), 2.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        recalibrate_batch_norm(model, 5)  # type: ignore[arg-type]
    assert model.running_mean.tolist() == [4.0] * 3
    assert model.running_var.tolist() == [1.0] * 3
    assert model.num_batches_tracked.item() == 9
    assert model.momentum == 0.3
    assert model.training


def test_a_batch_without_examples_counts_for_nothing() -> None:
    data = batches(16, 0, 4)
    model = nn.BatchNorm1d(3)
    recalibrate_batch_norm(model, data)
    mean, var = expected([data[0], data[2]])
    torch.testing.assert_close(model.running_mean.double(), mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.running_var.double(), var, rtol=1e-5, atol=1e-6)


class Shared(nn.Module):
    """One layer used twice in a pass, one every other time, one never."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.sometimes, self.never = (nn.BatchNorm1d(3) for _ in range(3))
        self.num_passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_passes += 1
        out: torch.Tensor = self.twice(x) + self.twice(3 * x + 10)
        return out + self.sometimes(x) if len(x) == 4 else out


def test_layers_used_twice_or_not_at_all() -> None:
    data = batches(16, 4, 8, 4)
    model = Shared()
    for norm in (model.twice, model.sometimes, model.never):
        norm.running_mean.fill_(7.0)
        norm.running_var.fill_(torch.nan)
    recalibrate_batch_norm(model, data)
    uses = [use for x in data for use in (x, 3 * x + 10)]
    for norm, seen in ((model.twice, uses), (model.sometimes, data[1::2])):
        mean, var = expected(seen)
        torch.testing.assert_close(norm.running_mean.double(), mean, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(norm.running_var.double(), var, rtol=1e-5, atol=1e-6)
    assert model.never.running_mean.tolist() == [7.0] * 3
    assert model.never.running_var.isnan().all()
    calls = [int(n.num_batches_tracked) for n in (model.twice, model.sometimes, model.never)]
    assert calls == [8, 2, 0]
    assert [n.momentum for n in (model.twice, model.sometimes, model.never)] == [0.1] * 3
    assert model.num_passes == 5  # the first batch again, once it is known how layers are used


def test_a_compiled_model_is_not_compiled_for_every_batch() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    data = batches(*[8] * 5)
    recalibrate_batch_norm(model, data)
    plain = {name: value.clone() for name, value in model[1].named_buffers()}
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    model[1].reset_running_stats()
    recalibrate_batch_norm(compiled, data[:1])  # type: ignore[arg-type]
    with torch._dynamo.config.patch(error_on_recompile=True):
        recalibrate_batch_norm(compiled, data)  # type: ignore[arg-type]
    for name, value in model[1].named_buffers():
        assert torch.equal(value, plain[name])
