"""`lawa train` on several processes: copies and shards train alike, and resume on any number."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.ranks import on_ranks
from support.training import rows_of, run, smoke_plan
from torch import nn
from torch.distributed.fsdp import fully_shard

from lawa_lab.recipes.optimizers import build_optimizer
from lawa_lab.recipes.runtime import choose_worker
from torch_lawa.errors import StateError
from torch_lawa.metrics import Row

TESTS = str(Path(__file__).parents[1])
SHORT: dict[str, dict[str, Any]] = {  # steps of shards are slow on CPUs
    "digits": {"batch_size": 96},  # 4 epochs of 9 steps
    "cifar100-resnet34": {"epochs": 2, "ks": (2,), "coefficients": ("uniform",)},
}


def train(rank: int, path: str, parallel: str, stop: int, recipe: str) -> str | None:
    """Train a smoke run, or go on with it, until it is stopped."""
    sys.path.insert(0, TESTS)
    plan = smoke_plan(recipe, wrap=("lookahead",), methods=("ema:0.9",), **SHORT.get(recipe, {}))
    worker = choose_worker("cpu")
    options = {"parallel": parallel, "save_trajectory": True}
    try:
        run(plan, Path(path), stop_at=stop, worker=worker, **options)
    except StateError as error:
        return str(error)
    return None


def trained(
    world_size: int,
    path: Path,
    parallel: str,
    stops: tuple[int, ...] = (-1,),
    recipe: str = "digits",
) -> list[str | None]:
    """All processes started anew for each stop; -1 is the end."""
    said: list[str | None] = []
    for stop in stops:
        said = on_ranks(world_size, train, str(path), parallel, stop, recipe, join=False)
    return said


def rows(path: Path) -> list[Row]:
    return [{k: v for k, v in row.items() if k != "num_devices"} for row in rows_of(path)]


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("copies")
    trained(2, path, "ddp")
    return path


def assert_close(found: list[Row], expected: list[Row]) -> None:
    assert len(found) == len(expected)
    for mine, other in zip(found, expected, strict=True):
        assert (mine["step"], mine["weights"], mine["k"]) == (
            other["step"],
            other["weights"],
            other["k"],
        )
        loss = "test_loss" if "test_loss" in mine else "valid_loss"
        assert mine[loss] == pytest.approx(other[loss], rel=1e-3)


def test_shards_train_as_copies_do_and_resume_bit_for_bit(copies: Path, tmp_path: Path) -> None:
    trained(2, tmp_path / "whole", "fsdp")
    trained(2, tmp_path / "parts", "fsdp", (13, -1))
    assert_close(rows(tmp_path / "whole"), rows(copies))
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")
    for name in ("averaged.safetensors", "trajectory/step-00000027-epoch-3.safetensors"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not list(tmp_path.rglob("*.partial"))
    # The average is whole in its file, whatever the shards.
    window = [load_file(path) for path in sorted((tmp_path / "whole/trajectory").iterdir())[-2:]]
    mean = torch.stack([each["0.weight"].double() for each in window]).mean(0).float()
    assert torch.equal(load_file(tmp_path / "whole/averaged.safetensors")["0.weight"], mean)


@pytest.mark.matrix
@pytest.mark.parametrize("world_size", [1, 4])
def test_shards_resume_on_another_number_of_processes(
    world_size: int, copies: Path, tmp_path: Path
) -> None:
    trained(2, tmp_path, "fsdp", (20,))
    before = rows(tmp_path)
    trained(world_size, tmp_path, "fsdp")
    found = rows(tmp_path)
    assert found[: len(before)] == before
    assert found[-1]["step"] == 36
    assert found[-1]["test_loss"] == pytest.approx(rows(copies)[-1]["test_loss"], rel=0.1)


@pytest.mark.parametrize(
    "recipe",
    ["cifar100-resnet34", pytest.param("imagenet-resnet50", marks=pytest.mark.matrix)],
)
def test_layers_inside_of_layers_in_shards(recipe: str, tmp_path: Path) -> None:
    """A residual block holds a list of layers of its own."""
    trained(2, tmp_path / "shards", "fsdp", recipe=recipe)
    trained(2, tmp_path / "copies", "ddp", recipe=recipe)
    assert_close(rows(tmp_path / "shards"), rows(tmp_path / "copies"))


def fused_step(rank: int, optimizer: str) -> bool:
    """Whether a step with what a GPU would be given moves shards as plain weights move."""
    sys.path.insert(0, TESTS)
    nets = [nn.Linear(4, 6, bias=False) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    fully_shard(nets[1])
    config = smoke_plan("digits", optimizer=optimizer).config
    for net in nets:
        stepper = build_optimizer(config, net, fused=True)
        for seed in range(3):
            inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
            stepper.zero_grad()
            net(inputs).square().sum().backward()
            stepper.step()
    return torch.allclose(nets[1].weight.full_tensor(), nets[0].weight, rtol=1e-5)  # type: ignore[operator]


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_every_optimizer_takes_shards_where_fused_ones_are_wanted(optimizer: str) -> None:
    assert on_ranks(1, fused_step, optimizer) == [True]


@pytest.mark.matrix
def test_a_model_with_tied_weights_in_shards(tmp_path: Path) -> None:
    trained(2, tmp_path, "fsdp", (10, -1), recipe="wikitext103-roberta")
    losses = [row["valid_loss"] for row in rows(tmp_path) if row["weights"] == "raw"]
    assert losses[-1] < losses[0]


@pytest.mark.matrix
def test_a_checkpoint_of_the_other_kind_is_refused(copies: Path, tmp_path: Path) -> None:
    refused = trained(2, copies, "fsdp")
    assert all("without --parallel fsdp" in str(each) for each in refused)
    trained(2, tmp_path, "fsdp", (10,))
    refused = trained(2, tmp_path, "ddp")
    assert all("with --parallel fsdp" in str(each) for each in refused)
