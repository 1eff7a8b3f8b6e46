"""Averaging in the Transformers Trainer: a run that stopped goes on as if it had not."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import GradientState
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from support.transformers import (
    MODEL,
    VALID,
    WINDOW,
    Fails,
    Recorder,
    averaging,
    history,
    loss_of,
    mean,
    same,
    saved,
    tiny_model,
    trainer,
    weights_of,
)
from torch import Tensor, nn
from transformers import (
    ResNetConfig,
    ResNetForImageClassification,
    Trainer,
    TrainerState,
    set_seed,
)

from torch_lawa import DiskStore, recalibrate_batch_norm
from torch_lawa.errors import StateError
from torch_lawa.integrations import window_files
from torch_lawa.integrations.transformers import LatestWeightAveragingTrainer


def window(folder: Path) -> dict[str, Any]:
    """The saved state of the averager."""
    state: dict[str, Any] = torch.load(folder / WINDOW, weights_only=True)["windows"]["averager"]
    return state


def assert_same_window(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["counters"] == expected["counters"]
    assert [row["step"] for row in found["snapshots"]] == [
        row["step"] for row in expected["snapshots"]
    ]
    for row, other in zip(found["snapshots"], expected["snapshots"], strict=True):
        assert row["tensors"].keys() == other["tensors"].keys()
        assert same(row["tensors"], other["tensors"])


@pytest.mark.parametrize(
    ("callback", "run"),
    [
        ({}, {}),
        ({"collect_strategy": "steps", "collect_every": 1}, {"save_steps": 3, "eval_steps": 1}),
        ({"collect_strategy": "epoch", "k": 2}, {"max_steps": 28, "save_steps": 8}),
        ({"metrics": "averaged"}, {"gradient_accumulation_steps": 2, "max_steps": 14}),
    ],
    ids=["saves", "steps", "epochs", "accumulated"],
)
def test_a_crashed_run_goes_on_exactly(
    callback: dict[str, Any], run: dict[str, Any], tmp_path: Path
) -> None:
    """Also where fewer checkpoints are kept than the window holds."""
    options = {"k": 4, **callback}
    run = {"save_total_limit": 1, **run}
    whole = trainer(tmp_path / "whole", averaging(**options), **run)
    whole.train()
    crash = 17 if callback.get("collect_strategy") == "epoch" else 9
    first = trainer(tmp_path / "parts", averaging(**options), Fails("on_step_begin", crash), **run)
    with pytest.raises(RuntimeError, match="a hook failed"):
        first.train()
    assert len(list((tmp_path / "parts").glob("checkpoint-*"))) == 1
    second = averaging(**options)
    resumed = trainer(tmp_path / "parts", second, model=tiny_model(seed=99), **run)
    resumed.train(resume_from_checkpoint=True)
    last = f"checkpoint-{whole.state.global_step}"
    assert same(weights_of(resumed.model), weights_of(whole.model))
    assert_same_window(window(tmp_path / "parts" / last), window(tmp_path / "whole" / last))
    assert same(saved(tmp_path / "parts" / last / MODEL), saved(tmp_path / "whole" / last / MODEL))
    for name in ("eval_loss", "eval_averaged_loss"):
        assert history(resumed, name) == history(whole, name)
    assert history(resumed, "eval_loss")


def test_resumed_from_a_checkpoint_elsewhere_and_with_a_smaller_window(tmp_path: Path) -> None:
    recorder = Recorder()
    trainer(tmp_path / "a", averaging(k=4), recorder).train()
    small = averaging(k=2)
    resumed = trainer(tmp_path / "b", small, model=tiny_model(seed=99))
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-8"))
    assert small.averager.snapshot_steps == [10, 12]
    assert same(saved(tmp_path / "b" / "checkpoint-10" / MODEL), recorder.mean(8, 10))


def test_a_checkpoint_saved_where_an_epoch_ends_has_that_epoch(tmp_path: Path) -> None:
    """The event for the end of an epoch comes after the save, and not again when resumed."""
    callback = {"k": 2, "collect_strategy": "epoch"}
    run = {"max_steps": 32, "save_steps": 8, "eval_strategy": "no"}
    trainer(tmp_path, averaging(**callback), **run).train()
    assert [row["step"] for row in window(tmp_path / "checkpoint-16")["snapshots"]] == [8, 16]
    again = averaging(**callback)
    resumed = trainer(tmp_path / "b", again, **run)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-16"))
    assert again.averager.num_collected == 4


def test_a_checkpoint_without_a_window_begins_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer(tmp_path, kind=Trainer, max_steps=4).train()
    callback = averaging(k=3)
    trainer(tmp_path, callback).train(resume_from_checkpoint=True)
    assert "checkpoint-4 holds no window of snapshots" in caplog.text
    assert callback.averager.snapshot_steps == [8, 10, 12]
    assert callback.averager.num_collected == 4


def test_a_window_on_disk_is_not_that_of_another_checkpoint(tmp_path: Path) -> None:
    first = averaging(k=3, store=DiskStore(tmp_path / "window"))
    trainer(tmp_path / "run", first).train()
    first.averager.wait()
    del first
    (tmp_path / "run" / "checkpoint-8" / WINDOW).unlink()
    second = averaging(k=3, store=DiskStore(tmp_path / "window"))
    resumed = trainer(tmp_path / "run", second, max_steps=14)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-8"))
    assert second.averager.snapshot_steps == [10, 12, 14]


def test_a_resume_that_failed_leaves_nothing_to_a_new_run(tmp_path: Path) -> None:
    trainer(tmp_path, averaging(k=3)).train()
    failing, callback = Fails("on_train_begin", 8), averaging(k=3)
    ran = trainer(tmp_path / "b", failing, callback)
    with pytest.raises(RuntimeError, match="a hook failed"):
        ran.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    ran.remove_callback(failing)
    ran.train()
    assert callback.averager.snapshot_steps == [8, 10, 12]
    assert not (tmp_path / "b" / "checkpoint-4" / MODEL).exists()


@pytest.mark.parametrize("written", [False, True])
def test_a_save_that_is_cut_short_leaves_nothing_that_looks_whole(
    written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window comes before the file that makes a checkpoint valid, and older ones stay."""
    name = "save_to_json" if written else "save"
    place: Any = TrainerState if written else window_files
    save = getattr(place, name)

    def fail(first: Any, second: Any, *args: Any, **kwargs: Any) -> None:
        path = str(getattr(second, "name", second))
        if "checkpoint-8" in path and (written or "window" in path):
            raise KeyboardInterrupt
        save(first, second, *args, **kwargs)

    whole = trainer(tmp_path / "whole", averaging(k=3))
    whole.train()
    with monkeypatch.context() as patch:
        patch.setattr(place, name, fail)
        with pytest.raises(KeyboardInterrupt):
            trainer(tmp_path / "cut", averaging(k=3), save_total_limit=1).train()
    cut = tmp_path / "cut" / "checkpoint-8"
    assert (cut / "optimizer.pt").exists()
    assert (cut / WINDOW).exists() == written
    assert not (cut / "trainer_state.json").exists()
    shutil.rmtree(cut)
    resumed = trainer(tmp_path / "cut", averaging(k=3), model=tiny_model(seed=99))
    resumed.train(resume_from_checkpoint=True)
    assert history(resumed, "eval_averaged_loss") == history(whole, "eval_averaged_loss")
    assert history(resumed, "eval_averaged_loss")


def test_a_damaged_window_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path, averaging(k=3)).train()
    (tmp_path / "checkpoint-12" / WINDOW).write_bytes(b"nothing")
    again = trainer(tmp_path, averaging(k=3), max_steps=16)
    with pytest.raises(StateError, match=r"checkpoint-12.*window\.pt: the window cannot be read"):
        again.train(resume_from_checkpoint=True)


def test_a_window_on_disk_goes_back_with_the_run(tmp_path: Path) -> None:
    """The folder may be ahead of the checkpoint that a run is resumed from."""
    recorder = Recorder()
    first = averaging(k=3, store=DiskStore(tmp_path / "window"))
    trainer(tmp_path / "run", first, recorder).train()
    first.averager.wait()
    del first
    second = averaging(k=3, store=DiskStore(tmp_path / "window"))
    resumed = trainer(tmp_path / "run", second, model=tiny_model(seed=99), max_steps=10)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-6"))
    assert second.averager.snapshot_steps == [6, 8, 10]
    assert same(second.averager.average(), recorder.mean(6, 8, 10))


_KILLED = """
import os, sys
from pathlib import Path
from transformers import TrainerCallback
from support.transformers import averaging, trainer

class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 9:
            os.kill(os.getpid(), 9)

trainer(Path(sys.argv[1]), averaging(k=3), Kill(), save_total_limit=1).train()
"""


@pytest.mark.matrix
def test_a_killed_process_goes_on_exactly(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", averaging(k=3))
    whole.train()
    tests = Path(__file__).parents[1]
    killed = subprocess.run(
        [sys.executable, "-c", _KILLED, str(tmp_path / "parts")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), *sys.path])},
        capture_output=True,
        timeout=120,
    )
    assert killed.returncode == -9, killed.stderr.decode()
    torch.set_num_threads(1)
    resumed = trainer(tmp_path / "parts", averaging(k=3), model=tiny_model(seed=99))
    resumed.train(resume_from_checkpoint=True)
    assert same(weights_of(resumed.model), weights_of(whole.model))
    assert history(resumed, "eval_averaged_loss") == history(whole, "eval_averaged_loss")


def with_adapter(name: str = "default") -> PeftModel:
    base = tiny_model()
    set_seed(5)
    return get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]), name)


def adapter(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def test_of_an_adapter_nothing_else_is_averaged(tmp_path: Path) -> None:
    callback = averaging(k=3)
    ran = trainer(tmp_path, callback, model=with_adapter(), learning_rate=0.3)
    ran.train()
    kept = window(tmp_path / "checkpoint-12")
    assert all(
        "lora_" in name for row in kept["snapshots"] for name in [*row["tensors"], *kept["kept"]]
    )
    latest = [adapter(tmp_path / f"checkpoint-{step}") for step in (8, 10, 12)]
    found = adapter(tmp_path / "checkpoint-12" / MODEL)
    assert found.keys() == latest[0].keys()
    assert same(found, mean(latest))
    assert not same(found, latest[-1])
    loaded = PeftModel.from_pretrained(tiny_model(), tmp_path / "checkpoint-12" / MODEL)
    expected = loss_of(loaded, weights_of(loaded), VALID)
    assert history(ran, "eval_averaged_loss")[12] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", ["default", "mine"])
def test_a_run_with_an_adapter_goes_on_exactly(name: str, tmp_path: Path) -> None:
    """The averaged adapter in a checkpoint is not taken for the trained one, nor for another."""
    options = {"learning_rate": 0.3}
    whole = trainer(tmp_path / "whole", averaging(k=3), model=with_adapter(name), **options)
    whole.train()
    resumed = trainer(tmp_path / "b", averaging(k=3), model=with_adapter(name), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-8"))
    assert list(resumed.model.peft_config) == [name]
    assert same(weights_of(resumed.model), weights_of(whole.model))
    assert_same_window(
        window(tmp_path / "b" / "checkpoint-12"), window(tmp_path / "whole" / "checkpoint-12")
    )


@pytest.mark.parametrize("name", ["default", "mine"])
def test_the_best_averaged_adapter_is_loaded_at_the_end(name: str, tmp_path: Path) -> None:
    recorder = Recorder()
    ran = trainer(
        tmp_path,
        averaging(k=2),
        recorder,
        model=with_adapter(name),
        learning_rate=1.0,
        load_best_model_at_end=True,
        metric_for_best_model="eval_averaged_loss",
    )
    ran.train()
    losses = history(ran, "eval_averaged_loss")
    best = min(losses, key=losses.__getitem__)
    assert best != 12
    assert same(weights_of(ran.model), recorder.mean(best - 2, best))


def resnet() -> nn.Module:
    set_seed(0)
    config = ResNetConfig(
        num_channels=1, embedding_size=4, hidden_sizes=[4], depths=[1], layer_type="basic"
    )
    return ResNetForImageClassification(config)


def images(seed: int, count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "pixel_values": torch.randn(1, 8, 8, generator=generator) + i % 2,
            "labels": torch.tensor(i % 2),
        }
        for i in range(count)
    ]


def test_batch_norm_is_re_estimated_for_what_is_evaluated_and_saved(tmp_path: Path) -> None:
    data, judged = images(1, 32), images(2, 8)
    recorder = Recorder()
    run: dict[str, Any] = {"train_dataset": data, "eval_dataset": judged, "learning_rate": 0.05}
    run["per_device_train_batch_size"] = 32  # all of it, whatever the order
    callback = averaging(k=2, batch_norm_batches=1)
    ran = trainer(tmp_path / "a", callback, recorder, model=resnet(), **run)
    ran.train()
    expected = resnet()
    expected.load_state_dict(recorder.mean(10, 12))
    everything = torch.stack([row["pixel_values"] for row in data])
    recalibrate_batch_norm(expected, [everything])
    found = saved(tmp_path / "a" / "checkpoint-12" / MODEL)
    newest = recorder.weights[12]
    for name, tensor in expected.state_dict().items():
        if "running" in name:
            assert torch.allclose(found[name], tensor, rtol=1e-4, atol=1e-6), name
            assert not torch.allclose(newest[name], tensor, rtol=1e-2), name
        elif tensor.is_floating_point():
            assert torch.equal(found[name], tensor)
    loaded = ResNetForImageClassification.from_pretrained(tmp_path / "a" / "checkpoint-12" / MODEL)
    plain = trainer(tmp_path / "c", model=loaded, kind=Trainer, **run)
    loss = history(ran, "eval_averaged_loss")[12]
    assert plain.evaluate()["eval_loss"] == pytest.approx(loss, abs=1e-6)
    assert same(weights_of(ran.model), newest)  # its own statistics are back


class Counting(LatestWeightAveragingTrainer):
    """Counts how often the training data is asked for."""

    num_loaders = 0

    def get_train_dataloader(self) -> Any:
        self.num_loaders += 1
        return super().get_train_dataloader()


@pytest.mark.parametrize(
    ("callback", "run"), [({}, {}), ({"metrics": "averaged"}, {}), ({}, {"eval_strategy": "no"})]
)
def test_batch_norm_does_not_disturb_training(
    callback: dict[str, Any], run: dict[str, Any], tmp_path: Path
) -> None:
    data: dict[str, Any] = {"train_dataset": images(1, 32), "eval_dataset": images(2, 8)}
    data["max_steps"] = 8  # a whole epoch
    plain = trainer(tmp_path / "a", model=resnet(), kind=Trainer, **data, **run)
    plain.train()
    random_state = torch.get_rng_state()
    open_loaders = GradientState().dataloader_references
    given = averaging(k=2, batch_norm_batches=3, **callback)
    ran = trainer(tmp_path / "b", given, model=resnet(), kind=Counting, **data, **run)
    ran.train()
    assert same(weights_of(ran.model), weights_of(plain.model))
    assert history(ran, "loss") == history(plain, "loss")
    assert torch.equal(torch.get_rng_state(), random_state)
    assert isinstance(ran, Counting)
    assert ran.num_loaders == 1 + 3  # once for each average, evaluated and saved
    # Trainer leaves the loader it trains from unfinished; there are no others.
    assert len(GradientState().dataloader_references) == len(open_loaders) + 1


def test_batch_norm_of_the_newest_snapshot(tmp_path: Path) -> None:
    run: dict[str, Any] = {"train_dataset": images(1, 32), "eval_dataset": images(2, 8)}
    trainer(tmp_path, averaging(k=2, batch_norm_batches=0), model=resnet(), **run).train()
    found, own = saved(tmp_path / "checkpoint-12" / MODEL), saved(tmp_path / "checkpoint-12")
    kept = [name for name in own if "running" in name]
    assert same({name: found[name] for name in kept}, own)


class Finetuned(ResNetForImageClassification):  # type: ignore[misc]
    """Its BatchNorm layers stay in evaluation mode while it is trained."""

    def train(self, mode: bool = True) -> "Finetuned":
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self


@pytest.mark.parametrize(
    "options", [{}, {"choose_window": True, "collect_strategy": "steps", "collect_every": 2}]
)
def test_frozen_batch_norm_keeps_its_statistics(tmp_path: Path, options: dict[str, Any]) -> None:
    run: dict[str, Any] = {"train_dataset": images(1, 32), "eval_dataset": images(2, 8)}
    callback, recorder, model = averaging(k=2, **options), Recorder(), resnet()
    model.__class__ = Finetuned  # Transformers chooses a loss by the name of the first class
    ran = trainer(tmp_path, callback, recorder, model=model, **run)
    ran.train()
    untouched = resnet().state_dict()
    with ran._average(callback):
        found = weights_of(ran.model)
    expected = recorder.mean(10, 12) if callback.k in (None, 2) else recorder.weights[12]
    assert same(found, expected)
    assert all(torch.equal(found[name], untouched[name]) for name in found if "running" in name)
