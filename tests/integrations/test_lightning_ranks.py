"""The callback on two processes: DDP, FSDP2 by `ModelParallelStrategy`, and `FSDPStrategy`."""

import logging
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy
from support.lightning import Net, Weights, by_hand, data, mean, same, trainer, weights
from support.ranks import on_ranks
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from torch_lawa.errors import StateError
from torch_lawa.integrations.lightning import LatestWeightAveraging

EPOCHS = 4


class Sharded(Net):
    """Cut up by FSDP2."""

    def configure_model(self) -> None:
        from torch.distributed.fsdp import FSDPModule, fully_shard

        if not isinstance(self.net, FSDPModule):
            for module in (self.net[0], self.net[3], self.net):
                fully_shard(module, mesh=self.device_mesh["data_parallel"])


class OnCPU(FSDPStrategy):
    """Lightning and PyTorch want a GPU for it, and can be talked out of that."""

    def __init__(self, **options: Any) -> None:
        super().__init__(process_group_backend="gloo", **options)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import CustomPolicy

        # What is left for the outermost module stays gathered after a forward pass.
        policy = CustomPolicy(
            lambda module: isinstance(module, nn.Linear) and module.bias.numel() == 5
        )
        return FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), auto_wrap_policy=policy, **self.kwargs
        )


def strategy(kind: str) -> Strategy | str:
    if kind == "model parallel":
        return ModelParallelStrategy(
            data_parallel_size=int(os.environ["WORLD_SIZE"]),
            tensor_parallel_size=1,
            process_group_backend="gloo",
        )
    if kind.startswith("fsdp"):
        return OnCPU(state_dict_type=kind.removeprefix("fsdp "))
    return kind


class Gather(Callback):
    """The whole weights after each epoch and in each validation, as the strategy saves them."""

    def __init__(self) -> None:
        self.epochs: list[Weights] = []
        self.validated: list[Weights] = []
        self.metrics: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.is_last_batch:
            self.epochs.append(whole(trainer))

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        if rest[2] == 1:  # after a forward pass, when parts of a model may be gathered
            self.validated.append(whole(trainer))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.metrics.append({k: v.item() for k, v in trainer.callback_metrics.items()})


def whole(trainer: Any) -> Weights:
    """Not by the strategy's own method, which never shows averaged weights."""
    model = trainer.strategy.model
    if isinstance(trainer.strategy, FSDPStrategy):
        from torch.distributed.fsdp import FullyShardedDataParallel

        with FullyShardedDataParallel.summon_full_params(model):
            found = {n.replace("_fsdp_wrapped_module.", ""): p for n, p in model.named_parameters()}
            return {name: value.detach().clone() for name, value in found.items()}
    state = trainer.lightning_module.state_dict()
    return {
        n: (t.full_tensor() if hasattr(t, "full_tensor") else t).clone() for n, t in state.items()
    }


def prepare(kind: str) -> tuple[Net, dict[str, Any]]:
    """A model and a trainer's options, in a process that another has started."""
    size = os.environ["WORLD_SIZE"]
    os.environ |= {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": size}
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    model = Sharded() if kind == "model parallel" else Net(batch_norm=kind == "ddp")
    options = {"devices": int(size), "strategy": strategy(kind), "num_sanity_val_steps": 0}
    return model, options


def run(
    rank: int, kind: str, folder: Path, k: int, epochs: int, ckpt: Path | None, **options: Any
) -> dict[str, Any]:
    """A whole run, or the rest of one; without averaging where k is 0."""
    model, made = prepare(kind)
    watch, averaging = Gather(), LatestWeightAveraging(k=k or 1, **options)
    saving = ModelCheckpoint(folder, save_last=True, monitor="val_loss", save_top_k=1)
    callbacks = [averaging, watch, saving] if k else [watch]
    trained = trainer(folder, *callbacks, max_epochs=epochs, **made)
    sampler = DistributedSampler(data(48), made["devices"], rank, shuffle=False)
    train = DataLoader(data(48), batch_size=8, sampler=sampler)
    trained.fit(model, train, DataLoader(data(48, 1), batch_size=8), ckpt_path=ckpt)
    facts = {
        "epochs": watch.epochs,
        "validated": watch.validated,
        "metrics": watch.metrics,
        "steps": averaging.averager.snapshot_steps,
        "final": whole(trained),
    }
    if kind == "ddp":
        tested = trained.test(model, DataLoader(data(48, 2), batch_size=8), verbose=False)
        facts["tested"] = tested[0]["test_loss"]
        facts["after"] = weights(model)
    torch.distributed.barrier()
    return facts


def run_side_by_side(rank: int, *arguments: Any) -> dict[str, Any]:
    return run(rank, *arguments, side_by_side=True)


def run_choosing(rank: int, *arguments: Any) -> dict[str, Any]:
    return run(rank, *arguments, choose_window=True)


def look(rank: int, kind: str, folder: Path, ckpt: Path) -> Any:
    """Validate a checkpoint: what was evaluated, or what was wrong."""
    model, made = prepare(kind)
    watch = Gather()
    trained = trainer(folder, watch, LatestWeightAveraging(k=2), **made)
    try:
        trained.validate(model, DataLoader(data(48, 1), 8), ckpt_path=ckpt, verbose=False)
    except StateError as error:
        return str(error)
    return watch.validated[-1]


def without_statistics(state: Weights) -> Weights:
    return {n: t for n, t in state.items() if "running" not in n and "num_batches" not in n}


def check(found: list[dict[str, Any]]) -> None:
    for facts in found:
        assert facts["steps"] == [9, 12]
        expected = [facts["epochs"][0]]
        expected += [mean(facts["epochs"][i - 1 : i + 1]) for i in range(1, EPOCHS)]
        # Statistics of BatchNorm are estimated, and looked at elsewhere.
        for state, right in zip(facts["validated"], expected, strict=True):
            assert same(*map(without_statistics, (state, right)))
        assert same(facts["final"], facts["epochs"][-1])
        assert facts["metrics"] == found[0]["metrics"]


def names(folder: Path) -> set[str]:
    found = [*folder.iterdir(), *(folder / ".lawa").glob("*")]
    return {str(path.relative_to(folder)) for path in found if path.name != ".lawa"}


def test_ddp(tmp_path):
    found = on_ranks(2, run, "ddp", tmp_path, 2, EPOCHS, None, join=False)
    check(found)
    kept = {path.name for path in tmp_path.glob("*.ckpt")}
    assert len(kept) == 2
    assert names(tmp_path) == kept | {f".lawa/{name}.window" for name in kept}
    assert found[0]["tested"] == found[1]["tested"]
    # DDP sends the buffers of rank 0 to the others whenever it likes; it does not change them.
    assert all(same(facts["after"], found[0]["epochs"][-1]) for facts in found)
    # Each process ran other batches, and all have the statistics of all of them.
    x, y = data(48, 0).tensors
    batches = [(x[r::2][i : i + 8], y) for r in (0, 1) for i in (0, 8, 16)]
    expected = by_hand(mean(found[0]["epochs"][-2:]), batches)
    for facts in found:
        state = facts["validated"][-1]
        for name in ("net.1.running_mean", "net.1.running_var"):
            torch.testing.assert_close(state[name], expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["ddp", "model parallel", "fsdp sharded"])
def test_two_processes_go_on_bit_for_bit(tmp_path, kind):
    """A whole run, one that is resumed after two epochs, and one without averaging."""
    found = on_ranks(2, run, kind, tmp_path / "whole", 2, EPOCHS, None, join=False)
    check(found)
    on_ranks(2, run, kind, tmp_path / "first", 2, 2, None, join=False)
    last = tmp_path / "first" / "last.ckpt"
    resumed = on_ranks(2, run, kind, tmp_path / "rest", 2, EPOCHS, last, join=False)
    plain = on_ranks(2, run, kind, tmp_path / "plain", 0, EPOCHS, None, join=False)
    for ours, theirs, alone in zip(resumed, found, plain, strict=True):
        assert ours["steps"] == theirs["steps"]
        assert ours["metrics"] == theirs["metrics"][2:]
        assert all(map(same, ours["validated"], theirs["validated"][2:]))
        assert all(map(same, ours["epochs"], theirs["epochs"][2:]))
        for a, b in zip(theirs["epochs"], alone["epochs"], strict=True):
            assert same(*map(without_statistics, (a, b)))
    if kind != "ddp":
        window = tmp_path / "first" / ".lawa" / "last.ckpt.window"
        assert (window / "notes.pt").is_file()
        alone = on_ranks(1, look, kind, tmp_path, last, join=False)[0]
        if kind == "model parallel":
            assert same(alone, found[0]["validated"][1])  # shards of two, on one
        else:
            assert "for 2 processes, and now there are 1" in alone


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["ddp", "model parallel"])
def test_both_weights_side_by_side(tmp_path, kind):
    found = on_ranks(2, run_side_by_side, kind, tmp_path / "a", 2, EPOCHS, None, join=False)
    alone = on_ranks(2, run, kind, tmp_path / "b", 2, EPOCHS, None, join=False)
    for ours, theirs in zip(found, alone, strict=True):
        assert [metrics["val_loss_averaged"] for metrics in ours["metrics"]] == [
            metrics["val_loss"] for metrics in theirs["metrics"]
        ]
        assert same(*(without_statistics(facts["final"]) for facts in (ours, theirs)))
    if kind == "ddp":
        # It sends buffers once after each step: to the trained weights, as if they were alone.
        plain = on_ranks(2, run, kind, tmp_path / "c", 0, EPOCHS, None, join=False)
        for ours, theirs in zip(found, plain, strict=True):
            assert [metrics["val_loss"] for metrics in ours["metrics"]] == [
                metrics["val_loss"] for metrics in theirs["metrics"]
            ]
            assert same(ours["final"], theirs["final"])


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["ddp", "model parallel", "fsdp sharded"])
def test_all_processes_choose_the_same_window_and_go_on_with_it(tmp_path, kind):
    found = on_ranks(2, run_choosing, kind, tmp_path / "whole", 2, EPOCHS, None, join=False)
    on_ranks(2, run_choosing, kind, tmp_path / "first", 2, 2, None, join=False)
    last = tmp_path / "first" / "last.ckpt"
    resumed = on_ranks(2, run_choosing, kind, tmp_path / "rest", 2, EPOCHS, last, join=False)
    for facts in (*found, *resumed):
        assert facts["steps"] == [9, 12]
        assert all(metrics.pop("averaged_seconds") >= 0 for metrics in facts["metrics"])
        assert facts["metrics"] == found[0]["metrics"][-len(facts["metrics"]) :]
    for metrics in found[0]["metrics"]:
        assert metrics["val_loss_averaged"] <= metrics["val_loss"]
        assert metrics["averaged_k"] in (0, 1, 2)
    assert all(map(same, found[0]["validated"], found[0]["epochs"]))
