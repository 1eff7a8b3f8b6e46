"""The checks of torchtitan's export settings; stand-ins for torchtitan's classes are enough."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from torch_lawa.errors import ConfigError

OURS = "torch_lawa.integrations.torchtitan"
NEEDED = {
    "torchtitan": (),
    "torchtitan.components": (),
    "torchtitan.components.checkpointer": ("MODEL", "AsyncMode", "BaseCheckpointManager"),
    "torchtitan.components.metrics": ("BaseLogger", "MetricsProcessor"),
    "torchtitan.components.validate": ("BaseValidator",),
    "torchtitan.tools": (),
    "torchtitan.tools.logging": ("logger",),
    "torchtitan.trainer": ("Trainer",),
}


class FakeTrainer:
    """As much of torchtitan's trainer as the mixin uses before training."""

    Config = type("Config", (), {})

    def __init__(self, config: Any) -> None:
        self.config, self.step = config, 0
        self.model_parts = [nn.Linear(2, 2)]
        self.checkpointer = FakeManager(config.checkpoint, self.model_parts[0])


class FakeManager:
    """A checkpoint manager that remembers what it was told to write."""

    def __init__(self, checkpoint: SimpleNamespace, model: nn.Module) -> None:
        self.enable = checkpoint.enable
        self.written: list[tuple[str, dict[str, Any], bool]] = []
        if self.enable:  # torchtitan's has no other attribute otherwise
            self.states: dict[str, Any] = {"model": model}
            self.sd_adapter = checkpoint.adapter
            self.export_dtype = torch.bfloat16

    def maybe_wait_for_staging(self) -> None: ...

    def dcp_save(self, state: dict[str, Any], folder: str, mode: Any, *, to_hf: bool) -> None:
        copied = {name: tensor.clone() for name, tensor in state.items()}
        self.written.append((folder, copied, to_hf))


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Our module, imported with the stand-ins; it is forgotten afterwards."""
    monkeypatch.delitem(sys.modules, OURS, raising=False)
    for name, attributes in NEEDED.items():
        module = ModuleType(name)
        for attribute in attributes:
            setattr(module, attribute, type(attribute, (), {}))
        monkeypatch.setitem(sys.modules, name, module)
    found = sys.modules
    found["torchtitan.components.checkpointer"].MODEL = "model"  # type: ignore[attr-defined]
    found["torchtitan.components.checkpointer"].AsyncMode.DISABLED = None  # type: ignore[attr-defined]
    found["torchtitan.trainer"].Trainer = FakeTrainer  # type: ignore[attr-defined]
    logger = SimpleNamespace(info=lambda text: None, warning=lambda text: None)
    found["torchtitan.tools.logging"].logger = logger  # type: ignore[attr-defined]
    yield importlib.import_module(OURS)
    found.pop(OURS, None)


def make(ours: ModuleType, export: str, *, enable: bool = True, adapter: object = None) -> Any:
    """A trainer with these settings; it collects a snapshot at every step."""
    config = SimpleNamespace(
        averager=ours.AveragingOptions(k=2, collect_every=1, min_snapshots=1, export=export),
        checkpoint=SimpleNamespace(enable=enable, adapter=adapter),
        validator=SimpleNamespace(enable=False),
        training=SimpleNamespace(steps=4),
        dump_folder="dump",
    )
    kind = type("FakeAveragedTrainer", (ours.AveragedTrainerMixin, FakeTrainer), {})
    return kind(config)


@pytest.mark.parametrize(
    ("export", "enable", "message"),
    [
        ("dcp", False, r"checkpoint\.enable"),
        ("hf", False, r"checkpoint\.enable"),
        ("hf", True, r"state dict adapter.*averager\.export to dcp"),
    ],
)
def test_an_export_that_cannot_be_written_is_refused_before_training(
    ours: ModuleType, export: str, enable: bool, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(ours, export, enable=enable)


@pytest.mark.parametrize(
    ("export", "enable", "adapter"),
    [("none", False, None), ("none", True, None), ("dcp", True, None), ("hf", True, object())],
)
def test_other_settings_are_taken(
    ours: ModuleType, export: str, enable: bool, adapter: object
) -> None:
    trainer = make(ours, export, enable=enable, adapter=adapter)
    assert ("averager" in getattr(trainer.checkpointer, "states", {})) == enable


def test_a_call_is_checked_like_the_settings(ours: ModuleType, tmp_path: Path) -> None:
    """`save_average` of a run without an export in its settings."""
    trainer = make(ours, "none")
    weight = trainer.model_parts[0].weight
    for value in (1.0, 4.0):
        nn.init.constant_(weight, value)
        trainer.averager.collect(trainer._parts, step=int(value))
    with pytest.raises(ConfigError, match="state dict adapter"):
        trainer.save_average(str(tmp_path), to_hf=True)
    assert trainer.checkpointer.written == []
    trainer.save_average(str(tmp_path), to_hf=False)
    [(folder, state, to_hf)] = trainer.checkpointer.written
    assert (folder, to_hf) == (str(tmp_path), False)
    assert state["weight"].dtype == torch.bfloat16
    assert state["weight"].unique().tolist() == [2.5]
    assert weight.unique().tolist() == [4.0]
