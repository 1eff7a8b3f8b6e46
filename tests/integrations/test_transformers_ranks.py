"""Averaging in the Transformers Trainer on two processes: DDP, and FSDP2 by Accelerate's plugin.

Accelerate does not use its FSDP plugin on CPUs (it takes DDP and says nothing), so the test tells
it to; everything after that decision is the code that runs on GPUs.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from support.ranks import on_ranks
from support.transformers import (
    MODEL,
    TRAIN,
    VALID,
    WINDOW,
    Fails,
    Recorder,
    averaging,
    history,
    same,
    saved,
    tiny_model,
    trainer,
    weights_of,
)
from torch import Tensor
from transformers import AutoModelForCausalLM, set_seed

from torch_lawa import WindowSearch


def shard_on_cpus() -> None:
    """Let Accelerate use FSDP2 without a GPU, and remember it as it does with one."""
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    make = AcceleratorState.__init__

    def make_sharded(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        make(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = self.distributed_type

    AcceleratorState.__init__ = make_sharded


def loss_of(model: Any, weights: dict[str, Tensor]) -> float:
    """By hand: a Trainer made here would share its data with the other process."""
    model.load_state_dict(weights)
    model.eval()
    rows = torch.stack([row["input_ids"] for row in VALID])
    with torch.no_grad():
        return float(model(input_ids=rows, labels=rows).loss)


def leave() -> None:
    dist.barrier()  # gloo may abort a process whose peer is gone
    dist.destroy_process_group()


RUN: dict[str, Any] = {
    "max_steps": 6,
    "per_device_train_batch_size": 2,
    "train_dataset": TRAIN[:8],  # learnt by heart: the best average is not the last
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_averaged_loss",
}


def with_adapter() -> PeftModel:
    base = tiny_model()
    set_seed(5)
    return get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


def train_adapter(rank: int, folder: str, kind: str) -> dict[str, Tensor]:
    """An adapter on a sharded model: the same, of the adapter only."""
    shard_on_cpus()
    place = Path(folder)
    config = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "state_dict_type": kind}
    run: dict[str, Any] = {**RUN, "fsdp": True, "fsdp_config": config, "learning_rate": 0.3}
    recorder, again = Recorder(), Recorder()
    ran = trainer(place / "a", averaging(k=2), recorder, model=with_adapter(), **run)
    ran.train()
    best = ran.state.best_global_step
    assert same(weights_of(ran.model), recorder.mean(best - 2, best))
    resumed = trainer(place / "b", averaging(k=2), again, model=with_adapter(), **run)
    resumed.train(resume_from_checkpoint=str(place / "a" / "checkpoint-4"))
    assert same(again.weights[6], recorder.weights[6])
    assert history(resumed, "eval_averaged_loss") == history(ran, "eval_averaged_loss")
    leave()
    return recorder.mean(4, 6)


def train_and_resume(place: Path, **run: Any) -> Recorder:
    """Once in one go and once with a crash in between; the weights that there were."""
    recorder, plain = Recorder(), tiny_model()
    ran = trainer(place / "whole", averaging(k=2), recorder, **RUN, **run)
    ran.train()
    losses = history(ran, "eval_averaged_loss")
    assert list(losses) == [4, 6]
    for step, loss in losses.items():
        average = recorder.mean(step - 2, step)
        assert loss == pytest.approx(loss_of(plain, average), abs=1e-5)
        assert same(saved(place / "whole" / f"checkpoint-{step}" / MODEL), average)
    assert losses[4] < losses[6]
    assert same(weights_of(ran.model), recorder.mean(2, 4))
    assert ran.evaluate()["eval_loss"] == pytest.approx(losses[4], abs=1e-5)
    failing = Fails("on_step_begin", 5)
    with pytest.raises(RuntimeError, match="a hook failed"):
        trainer(place / "parts", averaging(k=2), failing, **RUN, **run).train()
    dist.barrier()
    again = Recorder()
    resumed = trainer(
        place / "parts", averaging(k=2), again, model=tiny_model(seed=99), **RUN, **run
    )
    resumed.train(resume_from_checkpoint=True)
    assert history(resumed, "eval_averaged_loss") == losses
    assert same(again.weights[6], recorder.weights[6])
    assert same(weights_of(resumed.model), weights_of(ran.model))
    return recorder


def train_copies(rank: int, folder: str) -> dict[str, Tensor]:
    recorder = train_and_resume(Path(folder))
    leave()
    return recorder.mean(4, 6)


def test_copies_on_two_processes(tmp_path: Path) -> None:
    first, second = on_ranks(2, train_copies, str(tmp_path), join=False)
    assert same(first, second)
    folder = tmp_path / "parts" / "checkpoint-6"
    assert (folder / WINDOW).is_file()
    assert same(saved(folder / MODEL), first)


def train_choosing(rank: int, folder: str) -> dict[int, float]:
    """The windows that were chosen, by step."""
    place, search = Path(folder), WindowSearch(margin=0.5, full_every=3)
    run: dict[str, Any] = {"max_steps": 12, "per_device_train_batch_size": 2, "learning_rate": 0.3}
    recorder, plain = Recorder(), tiny_model()
    whole = averaging(k=4, choose_window=search)
    ran = trainer(place / "whole", whole, recorder, **run)
    ran.train()
    chosen, losses = history(ran, "eval_averaged_k"), history(ran, "eval_averaged_loss")
    assert list(chosen) == list(range(2, 13, 2))
    for step, k in chosen.items():
        steps = range(step - 2 * (int(max(k, 1)) - 1), step + 1, 2)
        served = recorder.mean(*steps)
        assert losses[step] == pytest.approx(loss_of(plain, served), abs=1e-5)
        assert losses[step] <= history(ran, "eval_loss")[step]
        saved_here = place / "whole" / f"checkpoint-{step}" / MODEL
        assert saved_here.exists() is (k > 0)
        assert not k or same(saved(saved_here), served)
    with pytest.raises(RuntimeError, match="a hook failed"):
        crashing = averaging(k=4, choose_window=search)
        trainer(place / "parts", crashing, Fails("on_step_begin", 9), **run).train()
    dist.barrier()
    again = averaging(k=4, choose_window=search)
    resumed = trainer(place / "parts", again, model=tiny_model(seed=99), **run)
    resumed.train(resume_from_checkpoint=True)
    assert history(resumed, "eval_averaged_k") == chosen
    assert history(resumed, "eval_averaged_loss") == losses
    leave()
    return chosen


def test_two_processes_choose_one_window(tmp_path: Path) -> None:
    first, second = on_ranks(2, train_choosing, str(tmp_path), join=False)
    assert first == second
    assert len(set(first.values())) > 1


def train_shards(rank: int, folder: str, kind: str) -> dict[str, Tensor]:
    shard_on_cpus()
    config = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "state_dict_type": kind}
    recorder = train_and_resume(Path(folder), fsdp=True, fsdp_config=config)
    leave()
    return recorder.mean(4, 6)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_shards_on_two_processes(kind: str, tmp_path: Path) -> None:
    average, _ = on_ranks(2, train_shards, str(tmp_path), kind, join=False)
    last = tmp_path / "parts" / "checkpoint-6"
    assert (last / WINDOW.with_suffix("")).is_dir()
    loaded = AutoModelForCausalLM.from_pretrained(last / MODEL)
    assert same(weights_of(loaded), average)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_an_adapter_on_a_sharded_model(kind: str, tmp_path: Path) -> None:
    average, _ = on_ranks(2, train_adapter, str(tmp_path), kind, join=False)
    found = load_file(tmp_path / "b" / "checkpoint-6" / MODEL / "adapter_model.safetensors")
    named = {n.replace(".default.", "."): t for n, t in average.items() if "lora_" in n}
    assert found.keys() == named.keys()
    assert same(found, named)
