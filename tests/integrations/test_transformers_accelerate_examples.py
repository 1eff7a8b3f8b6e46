"""The examples for plain PyTorch, Accelerate and Transformers run, and say what they say."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file
from transformers import GPT2LMHeadModel

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    yield
    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_plain_pytorch(tmp_path: Path) -> None:
    script = example("plain_pytorch")
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    raw, mean = script.main(tmp_path / "a", stop_after=12)
    assert mean < raw
    script.main(tmp_path / "b", stop_after=8)
    assert script.main(tmp_path / "b", stop_after=12) == (raw, mean)  # resumed


def test_accelerate_digits(tmp_path: Path) -> None:
    script = example("accelerate_digits")
    raw, mean = script.main(str(tmp_path / "a"), stop_after=9)
    assert mean < raw
    averaged = load_file(tmp_path / "a" / "averaged" / "model.safetensors")
    GradientState._reset_state()
    script.main(str(tmp_path / "b"), stop_after=7)
    GradientState._reset_state()
    assert script.main(str(tmp_path / "b"), stop_after=9) == (raw, mean)
    again = load_file(tmp_path / "b" / "averaged" / "model.safetensors")
    assert all(torch.equal(again[name], averaged[name]) for name in averaged)
    assert len(list((tmp_path / "b" / "checkpoints").iterdir())) == 2


def test_transformers_text(tmp_path: Path) -> None:
    script = example("transformers_text")
    metrics = script.main(str(tmp_path), max_steps=80)
    assert metrics["eval_loss"] == pytest.approx(metrics["best"], abs=1e-5)
    best = GPT2LMHeadModel.from_pretrained(tmp_path / "best")
    last = load_file(tmp_path / "checkpoint-80" / "averaged" / "model" / "model.safetensors")
    found = dict(best.named_parameters())
    assert all(torch.equal(found[name], last[name]) for name in last if name in found)
