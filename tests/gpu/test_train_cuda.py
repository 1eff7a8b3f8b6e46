"""The training loop on a GPU: compiled, in bfloat16, and still resumed bit for bit."""

from pathlib import Path

import pytest
import torch
from training import rows_of, run, smoke_plan

from torch_lawa.recipes.task import Place

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        ("cifar100-resnet34", {"width": 16}),
        ("cifar100-resnet34", {"lookahead": True}),
        ("wikitext103-roberta", {}),
    ],
)
def test_it_resumes_bit_for_bit(recipe: str, changes: dict[str, object], tmp_path: Path) -> None:
    plan = smoke_plan(recipe, **changes)
    place = Place(torch.device("cuda", 0))
    assert run(plan, tmp_path / "whole", place=place).finished
    assert not run(plan, tmp_path / "parts", place=place, stop_at=7).finished
    assert run(plan, tmp_path / "parts", place=place).finished
    whole, parts = rows_of(tmp_path / "whole"), rows_of(tmp_path / "parts")
    assert whole == parts
    assert whole[0]["device"] == torch.cuda.get_device_name()
    averaged = [
        (tmp_path / name / "averaged.safetensors").read_bytes() for name in ("whole", "parts")
    ]
    assert averaged[0] == averaged[1]
