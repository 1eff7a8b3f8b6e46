"""Checkpoints for timm: their form, and where timm is installed, read by timm itself."""

import argparse
import runpy
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support.models import same_bits
from support.timm import import_timm
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import update_bn

from torch_lawa import LatestWeightAverager
from torch_lawa.errors import ConfigError, LayoutError, SwapError
from torch_lawa.integrations.timm import timm_checkpoint
from torch_lawa.integrations.torch_swa import from_averaged_model, to_averaged_model
from torch_lawa.offline.average import average_checkpoints
from torch_lawa.offline.options import AverageOptions


@pytest.fixture(scope="module")
def timm() -> ModuleType:
    module = import_timm()
    if module is None:
        pytest.skip("timm is not installed here; tests/support/timm.py says how to")
    return module


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.frozen = nn.Linear(4, 2).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.body(x))


def history_of(
    model: nn.Module, averager: LatestWeightAverager, num: int
) -> list[dict[str, Tensor]]:
    """Other values in every floating-point tensor, collected: copies of all of them."""
    history = []
    for _ in range(num):
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor.is_floating_point():
                    tensor.uniform_(0.1, 1.0)
        averager.collect(model)
        history.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    return history


def mean(history: list[dict[str, Tensor]], name: str) -> Tensor:
    return (sum(state[name].double() for state in history) / len(history)).float()


def check_averaged(
    found: dict[str, Tensor], model: nn.Module, history: list[dict[str, Tensor]]
) -> None:
    """The mean of every trained parameter; the newest of everything else."""
    assert list(found) == list(history[0])
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    for name, tensor in found.items():
        expected = mean(history, name) if name in trained else history[-1][name]
        assert same_bits(tensor, expected), name


@pytest.mark.parametrize("frozen", ["keep", "omit"])
def test_both_sets_of_weights_are_complete(tmp_path: Path, frozen: str) -> None:
    model, averager = Net(), LatestWeightAverager(k=3, frozen=frozen)
    history = history_of(model, averager, 3)
    torch.save(timm_checkpoint(model, averager, epoch=7, arch="net"), tmp_path / "a.pth.tar")
    checkpoint = torch.load(tmp_path / "a.pth.tar", weights_only=True)
    assert list(checkpoint) == ["state_dict", "version", "epoch", "arch", "state_dict_ema"]
    assert (checkpoint["version"], checkpoint["epoch"], checkpoint["arch"]) == (2, 7, "net")
    check_averaged(checkpoint["state_dict_ema"], model, history)
    for name, tensor in checkpoint["state_dict"].items():
        assert same_bits(tensor, history[-1][name]), name


def test_bare_names_from_wrapped_models() -> None:
    model, averager = Net(), LatestWeightAverager(k=1)
    history = history_of(model, averager, 1)
    wrapped = nn.DataParallel(torch.compile(model, backend="eager"))
    checkpoint = timm_checkpoint(wrapped, averager)
    assert list(checkpoint["state_dict"]) == list(history[0])
    assert list(checkpoint["state_dict_ema"]) == list(history[0])


def test_before_the_window_is_full() -> None:
    model, averager = Net(), LatestWeightAverager(k=2)
    history_of(model, averager, 1)
    assert "state_dict_ema" not in timm_checkpoint(model, averager)


def test_statistics_of_an_averaged_model() -> None:
    model, averager = Net(), LatestWeightAverager(k=2)
    history = history_of(model, averager, 2)
    averaged = to_averaged_model(averager, model)
    batch = torch.randn(32, 3)
    update_bn([batch], averaged)
    state = timm_checkpoint(model, averaged)["state_dict_ema"]
    weight, bias = mean(history, "body.0.weight").double(), mean(history, "body.0.bias").double()
    expected = (batch.double() @ weight.T + bias).mean(0).float()
    torch.testing.assert_close(state["body.1.running_mean"], expected)
    assert same_bits(state["body.0.weight"], mean(history, "body.0.weight"))


def test_refusals() -> None:
    model, averager = Net(), LatestWeightAverager(k=1)
    history_of(model, averager, 1)
    with pytest.raises(ConfigError, match="'state_dict_ema'"):
        timm_checkpoint(model, averager, state_dict_ema={})
    with averager.swapped_into(model), pytest.raises(SwapError, match="timm_checkpoint was called"):
        timm_checkpoint(model, averager)
    with pytest.raises(LayoutError, match=r"body.0.weight.*no such tensor"):
        timm_checkpoint(nn.Linear(2, 2), averager)
    other = Net()
    other.body[0] = nn.Linear(5, 4)
    with pytest.raises(LayoutError, match=r"body.0.weight.*\(4, 3\).*\(4, 5\)"):
        timm_checkpoint(other, averager)


def test_sharded_model_is_refused() -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model, averager = fully_shard(nn.Linear(2, 2)), LatestWeightAverager(k=1)
        averager.collect(model)
        with pytest.raises(LayoutError, match=r"torch\.distributed\.checkpoint"):
            timm_checkpoint(model, averager)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])
def test_timm_loads_raw_and_averaged_weights(timm: ModuleType, tmp_path: Path, name: str) -> None:
    model, averager = timm.create_model(name, num_classes=3), LatestWeightAverager(k=3)
    history = history_of(model, averager, 4)
    path = str(tmp_path / "last.pth.tar")
    torch.save(timm_checkpoint(model, averager), path)

    fresh = timm.create_model(name, num_classes=3)
    timm.models.load_checkpoint(fresh, path, use_ema=True)
    check_averaged(fresh.state_dict(), fresh, history[-3:])
    timm.models.load_checkpoint(fresh, path, use_ema=False)
    for key, tensor in fresh.state_dict().items():
        assert same_bits(tensor, history[-1][key]), key
    # What `create_model` does for a path takes the averaged weights.
    created = timm.create_model(name, num_classes=3, checkpoint_path=path)
    check_averaged(created.state_dict(), created, history[-3:])


def test_timm_resumes(timm: ModuleType, tmp_path: Path) -> None:
    model, averager = timm.create_model("test_vit", num_classes=3), LatestWeightAverager(k=2)
    history = history_of(model, averager, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    path = str(tmp_path / "last.pth.tar")
    entries = {"optimizer": optimizer.state_dict(), "averager": averager.state_dict()}
    torch.save(timm_checkpoint(model, averager, epoch=4, **entries), path)

    fresh = timm.create_model("test_vit", num_classes=3)
    fresh_optimizer = torch.optim.SGD(fresh.parameters(), lr=1.0)
    assert timm.models.resume_checkpoint(fresh, path, fresh_optimizer) == 5
    assert fresh_optimizer.param_groups[0]["lr"] == 0.25
    resumed = LatestWeightAverager(k=2)
    resumed.load_state_dict(torch.load(path, weights_only=True)["averager"])
    check_averaged(resumed.average(), fresh, history)


def test_timm_saves_the_mean_as_its_ema(timm: ModuleType, tmp_path: Path) -> None:
    """`CheckpointSaver` takes an AveragedModel where it expects a ModelEma."""
    model, averager = timm.create_model("test_resnet", num_classes=3), LatestWeightAverager(k=2)
    history = history_of(model, averager, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saver = timm.utils.CheckpointSaver(model, optimizer, checkpoint_dir=str(tmp_path))
    saver.model_ema = to_averaged_model(averager, model)
    saver.save_checkpoint(0, metric=0.5)
    loaded = timm.models.load_state_dict(str(tmp_path / "last.pth.tar"), use_ema=True)
    check_averaged(loaded, model, history[-2:])


def test_from_timms_ema(timm: ModuleType) -> None:
    model = timm.create_model("test_vit", num_classes=3)
    ema = timm.utils.ModelEmaV3(model, decay=0.9)
    history = history_of(model, LatestWeightAverager(k=1), 1)
    before = ema.module.state_dict()["head.weight"].double()
    ema.update(model)
    state = from_averaged_model(ema.state_dict())
    assert list(state) == list(history[0])
    expected = 0.9 * before + 0.1 * history[0]["head.weight"].double()
    torch.testing.assert_close(state["head.weight"], expected.float())


def test_average_of_timms_checkpoints(timm: ModuleType, tmp_path: Path) -> None:
    """Files as timm's trainer writes them, with its arguments inside, and a mean that it loads."""
    model, averager = timm.create_model("test_resnet", num_classes=3), LatestWeightAverager(k=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ema = timm.utils.ModelEmaV3(model, decay=0.5)
    saver = timm.utils.CheckpointSaver(
        model,
        optimizer,
        args=argparse.Namespace(model="test_resnet"),
        model_ema=ema,
        checkpoint_dir=str(tmp_path / "run"),
    )
    (tmp_path / "run").mkdir()
    history, averages = [], []
    for epoch in range(4):
        history += history_of(model, averager, 1)
        ema.update(model)
        averages.append({name: t.clone() for name, t in ema.module.state_dict().items()})
        saver.save_checkpoint(epoch, metric=float(epoch))

    for key, kept in (("state_dict", history), ("state_dict_ema", averages)):
        out = str(tmp_path / f"{key}.pth.tar")
        average_checkpoints(tmp_path / "run", out, last=3, options=AverageOptions(key=key))
        fresh = timm.create_model("test_resnet", num_classes=3)
        timm.models.load_checkpoint(fresh, out)
        check_averaged(fresh.state_dict(), fresh, kept[-3:])


def test_example(timm: ModuleType, tmp_path: Path) -> None:
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "timm_resnet.py"))
    example["main"].__globals__["EPOCHS"] = 5
    raw, averaged = example["main"](str(tmp_path / "last.pth.tar"))
    assert 0.8 < raw < 1
    assert 0.8 < averaged < 1
