"""The training loop on a GPU: compiled, in bfloat16, and still resumed bit for bit."""

from pathlib import Path

import pytest
import torch
from support.ranks import free_port
from support.training import rows_of, run, smoke_plan

from lawa_lab.recipes.data.tokens import Tokens
from lawa_lab.recipes.run_evaluator import RunEvaluator
from lawa_lab.recipes.runtime import deterministic
from lawa_lab.recipes.task import Worker, seeded
from lawa_lab.recipes.tasks.masked_language import MaskedLanguageTask
from lawa_lab.recipes.trainer import Trainer
from torch_lawa.offline.sweep import run_sweep
from torch_lawa.offline.sweep_plan import plan_sweep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    """What other tests compiled would count against the limit after which PyTorch gives up."""
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        ("cifar100-resnet34", {"width": 16}),
        ("cifar100-resnet34", {"wrap": ("lookahead", "sam", "rescue")}),
        ("wikitext103-roberta", {}),
    ],
)
def test_it_resumes_bit_for_bit(recipe: str, changes: dict[str, object], tmp_path: Path) -> None:
    plan = smoke_plan(recipe, **changes)
    worker = Worker(torch.device("cuda", 0))
    assert run(plan, tmp_path / "whole", worker=worker).finished
    assert not run(plan, tmp_path / "parts", worker=worker, stop_at=7).finished
    assert run(plan, tmp_path / "parts", worker=worker).finished
    whole, parts = rows_of(tmp_path / "whole"), rows_of(tmp_path / "parts")
    assert whole == parts
    assert whole[0]["device"] == torch.cuda.get_device_name()
    averaged = [
        (tmp_path / name / "averaged.safetensors").read_bytes() for name in ("whole", "parts")
    ]
    assert averaged[0] == averaged[1]


@pytest.mark.parametrize("compile", [False, True])
def test_steps_through_fused_attention_repeat(compile: bool) -> None:
    """With sequences so long that several parts of one are added to the same gradient at once."""
    device = torch.device("cuda", 0)
    plan = smoke_plan(
        "wikitext103-roberta", width=256, sequence_length=512, batch_size=32, vocabulary=1000,
        dropout=0.1, epochs=3,
    )  # fmt: skip
    ids = torch.randint(5, 1000, (32 * 600,), generator=seeded(torch.device("cpu"), 1)).numpy()
    tokens = Tokens({"train": ids, "valid": ids}, 1000, Path())
    found: list[list[torch.Tensor]] = []
    with deterministic(None):
        for _ in range(4):
            task = MaskedLanguageTask(plan.config, tokens, seed=0, worker=Worker(device))  # type: ignore[arg-type]
            trainer = Trainer(plan, task, Worker(device), compile=compile)
            for batch in trainer.batches():
                trainer.train_step(batch)
            found.append([p.detach().clone() for p in trainer.model.parameters()])
    assert all(
        torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True)
    )


def test_convolutions_train_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 takes no weights in channels-last order, which is that of every other run."""
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    group |= {"RANK": "0", "WORLD_SIZE": "1", "NCCL_SOCKET_IFNAME": "lo"}
    for name, value in group.items():
        monkeypatch.setenv(name, value)
    plan, worker = smoke_plan("cifar100-resnet34"), Worker(torch.device("cuda", 0))
    assert run(plan, tmp_path / "shards", worker=worker, parallel="fsdp").finished
    assert run(plan, tmp_path / "alone", worker=worker).finished
    shards, alone = rows_of(tmp_path / "shards"), rows_of(tmp_path / "alone")
    kind = ("step", "weights", "k", "coefficients", "batch_norm")
    assert [[r[name] for name in kind] for r in shards] == [[r[n] for n in kind] for r in alone]
    # Other algorithms for another order in memory, and a few steps in bfloat16: alike, not equal.
    assert shards[-1]["test_loss"] == pytest.approx(alone[-1]["test_loss"], rel=0.3)


def test_a_sweep_of_the_trajectory_gives_the_rows_of_the_run(tmp_path: Path) -> None:
    plan = smoke_plan("cifar100-resnet34", width=16)
    run(plan, tmp_path, worker=Worker(torch.device("cuda", 0)), save_trajectory=True)
    swept = run_sweep(
        plan_sweep(tmp_path / "trajectory", [1, 2, 3]), evaluator=RunEvaluator(tmp_path)
    )
    key = ("step", "k", "test_loss", "test_accuracy")
    online = {
        tuple(row[name] for name in key)
        for row in rows_of(tmp_path)
        if row["batch_norm"] == "re-estimated" and row["coefficients"] in (None, "uniform")
    }
    assert {tuple(row[name] for name in key) for row in swept} == online
