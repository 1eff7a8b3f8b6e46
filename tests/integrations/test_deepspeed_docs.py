"""docs/guides/deepspeed.md and examples/deepspeed_digits.py: their code does what they say."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import same_bits
from torch import Tensor, nn

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="DeepSpeed is not installed here: make test-deepspeed",
    ),
    pytest.mark.timeout(3600),  # the first start compiles
]
from support.deepspeed_engines import masters, on_engines, to_universal  # noqa: E402

ROOT = Path(__file__).parents[2]


def guide(rank: int, folder: str) -> None:
    import os

    os.chdir(folder)
    page = (ROOT / "docs" / "guides" / "deepspeed.md").read_text()
    blocks = [part.split("```")[0] for part in page.split("```python\n")[1:]]
    train, evaluate, universal, export = blocks
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    seen: list[dict[str, Tensor]] = []
    names: dict[str, Any] = {
        "torch": torch,
        "model": model,
        "config": {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
        },
        "resuming": False,
        "loader": [(torch.randn(2, 3), torch.randn(2, 1)) for _ in range(120)],
        "loss_function": nn.functional.mse_loss,
        "evaluate": lambda engine: seen.append(masters(engine)),
        "tag": "global_step60",
    }
    exec(train, names)
    engine, averager = names["engine"], names["averager"]
    assert averager.snapshot_steps == [10, 20, 30, 40, 50, 60]  # optimizer steps
    assert (Path("run") / "latest").read_text() == "global_step60"
    exec(evaluate, names)
    average = {n: t.full_tensor() for n, t in averager.average().items()}
    assert all(same_bits(seen[0][name], tensor) for name, tensor in average.items())
    before = masters(engine)
    exec(export, names)
    assert same_bits(names["whole"], average["0.weight"])
    # Resumed, and then continued from a universal checkpoint.
    names["model"] = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    names |= {"resuming": True, "loader": []}
    exec(train, names)
    assert names["averager"].snapshot_steps == [10, 20, 30, 40, 50, 60]
    if rank == 0:
        to_universal(Path("run/global_step60"), Path("universal/global_step60"))
    torch.distributed.barrier()
    names["averager"] = type(averager)(k=6, schedule=averager.schedule)
    names["model"] = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    exec(universal, names)
    again = {n: t.full_tensor() for n, t in names["averager"].average().items()}
    assert all(same_bits(again[name], tensor) for name, tensor in average.items())
    loaded = masters(names["engine"])
    assert all(same_bits(loaded[name], tensor) for name, tensor in before.items())


def test_the_guide(tmp_path: Path) -> None:
    on_engines(2, guide, str(tmp_path))


def example(rank: int, folder: str) -> tuple[tuple[float, float], tuple[float, float]]:
    spec = importlib.util.spec_from_file_location("example", ROOT / "examples/deepspeed_digits.py")
    assert spec is not None
    assert spec.loader is not None
    digits = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(digits)
    whole: tuple[float, float] = digits.main(f"{folder}/whole", stop_after=8)
    digits.main(f"{folder}/parts", stop_after=6)
    return whole, digits.main(f"{folder}/parts", stop_after=8)


def test_the_example(tmp_path: Path) -> None:
    for whole, resumed in on_engines(2, example, str(tmp_path)):
        assert whole == resumed
        assert whole[1] < 0.5
    assert (tmp_path / "whole" / "averaged" / "model.safetensors").exists()
