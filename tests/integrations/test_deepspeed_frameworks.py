"""DeepSpeed through the Transformers Trainer and Accelerate, on two ranks."""

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models import brute_force, same_bits
from torch import Tensor, nn

from torch_lawa.errors import ConfigError

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="DeepSpeed is not installed here: make test-deepspeed",
    ),
    pytest.mark.timeout(3600),  # the first start compiles
]
from support.deepspeed_engines import on_engines  # noqa: E402


def config(stage: int, *, bf16: bool) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10},
    }


def masters(model: nn.Module) -> dict[str, Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param

    return {
        name: safe_get_full_fp32_param(parameter).detach().clone()
        for name, parameter in model.named_parameters()
    }


def mean(snapshots: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {
        name: torch.from_numpy(brute_force([s[name] for s in snapshots])).float()
        for name in snapshots[0]
    }


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Bit for bit; a file leaves out what is tied."""
    return bool(found) and all(same_bits(found[name], expected[name]) for name in found)


def use_ranks() -> None:
    """Without a GPU, Accelerate would take every rank of DeepSpeed for the only one."""
    from accelerate.state import PartialState

    PartialState._prepare_backend = lambda *_, **__: ("gloo", None)
    os.environ.update(ACCELERATE_TORCH_DEVICE="cpu", ACCELERATE_USE_DEEPSPEED="true")


def trainer_run(rank: int, folder: str, stage: int, bf16: bool) -> None:
    import transformers.training_args
    from support.transformers import (
        MODEL,
        TRAIN,
        VALID,
        Fails,
        averaging,
        history,
        saved,
        tiny_model,
        trainer,
    )
    from transformers import TrainerCallback

    class Recorder(TrainerCallback):  # type: ignore[misc]
        """The masters after every step."""

        def __init__(self) -> None:
            self.weights: dict[int, dict[str, Tensor]] = {}

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.weights[state.global_step] = masters(kwargs["model"])

    def averaged_loss(weights: dict[str, Tensor]) -> float:
        model = tiny_model()
        model.load_state_dict(weights)
        model.eval()
        rows = torch.stack([row["input_ids"] for row in VALID])
        with torch.no_grad():
            return float(model(input_ids=rows, labels=rows).loss)

    use_ranks()
    transformers.training_args.is_torch_bf16_gpu_available = lambda: True
    place = Path(folder)
    run: dict[str, Any] = {
        "use_cpu": False,
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "train_dataset": TRAIN[:8],  # learnt by heart: the best average is not the last
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_averaged_loss",
        "bf16": bf16,
        "save_total_limit": None,
    }
    recorder = Recorder()
    ran = trainer(
        place / "whole", averaging(k=2), recorder, deepspeed=config(stage, bf16=bf16), **run
    )
    ran.train()
    losses = history(ran, "eval_averaged_loss")
    assert list(losses) == [4, 6]
    dtype = torch.bfloat16 if bf16 else torch.float32
    for step, loss in losses.items():
        average = mean([recorder.weights[step - 2], recorder.weights[step]])
        assert loss == pytest.approx(averaged_loss(average), abs=0.1 if bf16 else 1e-5)
        found = saved(place / "whole" / f"checkpoint-{step}" / MODEL)
        assert same(found, {n: t.to(dtype) for n, t in average.items()})
    best = int(ran.state.best_global_step)
    chosen = mean([recorder.weights[best - 2], recorder.weights[best]])
    assert same(masters(ran.model), chosen)
    assert ran.evaluate()["eval_loss"] == pytest.approx(losses[best], abs=1e-5)
    # The same with a crash in between.
    failing, again = Fails("on_step_begin", 5), Recorder()
    with pytest.raises(RuntimeError, match="a hook failed"):
        trainer(
            place / "parts", averaging(k=2), failing, deepspeed=config(stage, bf16=bf16), **run
        ).train()
    dist.barrier()
    resumed = trainer(
        place / "parts",
        averaging(k=2),
        again,
        model=tiny_model(seed=99),
        deepspeed=config(stage, bf16=bf16),
        **run,
    )
    resumed.train(resume_from_checkpoint=True)
    assert same(again.weights[6], recorder.weights[6])
    assert history(resumed, "eval_averaged_loss") == losses
    assert same(masters(resumed.model), chosen)
    rescued = averaging(k=2, rescue_spikes=True)
    with pytest.raises(ConfigError, match="step of a DeepSpeedEngine"):
        trainer(place / "r", rescued, deepspeed=config(stage, bf16=bf16), **run).train()


@pytest.mark.parametrize(("stage", "bf16"), [(2, False), (3, False), (3, True)])
def test_the_trainer(stage: int, bf16: bool, tmp_path: Path) -> None:
    on_engines(2, trainer_run, str(tmp_path), stage, bf16)


def accelerated(rank: int, folder: str, stage: int) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DeepSpeedPlugin

    from torch_lawa import LatestWeightAverager
    from torch_lawa.errors import ConfigError, SwapError
    from torch_lawa.integrations.accelerate import register_averager

    use_ranks()

    def prepared(seed: int) -> tuple[Any, Any, LatestWeightAverager]:
        GradientState._reset_state()
        AcceleratorState._reset_state(reset_partial_state=True)
        plugin = DeepSpeedPlugin(hf_ds_config=config(stage, bf16=False))
        accelerator = Accelerator(deepspeed_plugin=plugin)
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        engine, _ = accelerator.prepare(model, optimizer)
        averager = LatestWeightAverager(k=2)
        if stage == 3:
            with pytest.raises(ConfigError, match="give the engine"):
                register_averager(accelerator, averager, engine.module)
        register_averager(accelerator, averager, engine)
        return accelerator, engine, averager

    def train(accelerator: Any, engine: Any, averager: LatestWeightAverager, *steps: int) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            loss = engine(torch.randn(2, 3, generator=generator)).square().mean()
            accelerator.backward(loss)
            averager.step(engine)
            snapshots.append(masters(engine.module))

    snapshots: list[dict[str, Tensor]] = []
    accelerator, engine, averager = prepared(0)
    train(accelerator, engine, averager, 1, 2, 3)
    accelerator.save_state(f"{folder}/state")
    with averager.swapped_into(engine):
        assert same(masters(engine.module), mean(snapshots[1:]))
        with pytest.raises(SwapError, match="save_state"):
            accelerator.save_state(f"{folder}/never")
    train(accelerator, engine, averager, 4)
    accelerator, engine, averager = prepared(1)
    accelerator.load_state(f"{folder}/state")
    assert averager.snapshot_steps == [2, 3]
    train(accelerator, engine, averager, 4)
    assert same(snapshots[-1], snapshots[-2])
    average = {name: t.full_tensor() for name, t in averager.average().items()}  # type: ignore[attr-defined]
    assert same(average, mean([snapshots[2], snapshots[3]]))


@pytest.mark.parametrize("stage", [2, 3])
def test_accelerate(stage: int, tmp_path: Path) -> None:
    on_engines(2, accelerated, str(tmp_path), stage)
