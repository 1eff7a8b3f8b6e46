"""One schedule, registered once, decides in Lightning and in Transformers, through resume."""

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from support.lightning import QUIET, Net, loader, weights
from support.lightning import trainer as lightning_trainer
from support.transformers import Fails, averaging, history, tiny_model, trainer

from torch_lawa import Every, LatestWeightAverager, OnPlateau, WindowSearch
from torch_lawa.errors import ConfigError, NotReadyError
from torch_lawa.integrations.lightning import LatestWeightAveraging
from torch_lawa.schedule import Schedule

pytestmark = QUIET


@dataclass
class Growing(Schedule):
    """A snapshot whenever the step has doubled, as a window that grows with the run needs it."""

    ratio: float = 2.0
    last: int = field(default=0, init=False)

    def due(self, step: int, loss: float | None = None) -> bool:
        if step < self.ratio * self.last:
            return False
        self.last = step
        return True


class Crash(Callback):
    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 7:
            raise ConnectionError("the machine is gone")


def fit(folder: Path, *callbacks: Callback, ckpt: Path | None = None, **options: Any) -> Any:
    run = lightning_trainer(folder, *callbacks, **{"max_epochs": 6, **options})
    run.fit(Net(), loader(), loader(seed=1), ckpt_path=ckpt)  # three steps per epoch
    return run


def by_loss() -> dict[str, Any]:
    return {"k": 9, "min_snapshots": 1, "schedule": OnPlateau(min_delta=0.2)}


def test_an_own_schedule_in_lightning(tmp_path: Path) -> None:
    options = {"k": 3, "schedule": Growing()}
    whole, first, rest = (LatestWeightAveraging(**options) for _ in range(3))
    fit(tmp_path, whole)
    assert whole.averager.snapshot_steps == [4, 8, 16]
    assert whole.averager.num_collected == 5
    with pytest.raises(ConnectionError):
        fit(tmp_path, first, ModelCheckpoint(tmp_path / "run", save_last=True), Crash())
    fit(tmp_path, rest, ckpt=tmp_path / "run" / "last.ckpt")
    assert rest.averager.snapshot_steps == whole.averager.snapshot_steps
    assert rest.averager.num_collected == whole.averager.num_collected
    assert options["schedule"].state_dict() == {"last": 0}  # the user's object is not shared


def test_a_horizon_in_lightning_and_transformers(tmp_path: Path) -> None:
    """The window of both is that of a plain loop, from the first snapshot on, also resumed."""
    plain = LatestWeightAverager(k=4, horizon=0.5)
    for _ in range(18):
        plain.step({"w": torch.zeros(1)})
    whole, rest = (LatestWeightAveraging(k=4, horizon=0.5) for _ in range(2))
    fit(tmp_path, whole)
    with pytest.raises(ConnectionError):
        saves = ModelCheckpoint(tmp_path / "run", save_last=True)
        fit(tmp_path, LatestWeightAveraging(k=4, horizon=0.5), saves, Crash())
    fit(tmp_path, rest, ckpt=tmp_path / "run" / "last.ckpt")
    callback = averaging(k=4, horizon=0.5)
    ran = trainer(tmp_path / "transformers", callback, max_steps=18, save_strategy="no")
    ran.train()
    assert plain.snapshot_steps == [10, 12, 14, 16]
    for found in (whole.averager, rest.averager, callback.averager):
        assert found.snapshot_steps == plain.snapshot_steps
        assert found.schedule == plain.schedule
        assert found.ready
    assert min(history(ran, "eval_averaged_loss")) == 2  # the first evaluation


def test_samples_in_lightning_and_transformers(tmp_path: Path) -> None:
    """Blocks of both are those of a plain loop, also resumed."""
    options: dict[str, Any] = {"k": 3, "horizon": 0.5, "samples": 2}
    plain = LatestWeightAverager(**options)
    for _ in range(18):
        plain.step({"w": torch.zeros(1)})
    whole, rest = (LatestWeightAveraging(**options) for _ in range(2))
    fit(tmp_path, whole)
    with pytest.raises(ConnectionError):
        saves = ModelCheckpoint(tmp_path / "run", save_last=True)
        fit(tmp_path, LatestWeightAveraging(**options), saves, Crash())
    fit(tmp_path, rest, ckpt=tmp_path / "run" / "last.ckpt")
    callback = averaging(**options)
    trainer(tmp_path / "transformers", callback, max_steps=18, save_strategy="no").train()
    for found in (whole.averager, rest.averager, callback.averager):
        assert found.snapshot_steps == plain.snapshot_steps
        assert found.samples == 2
    for name, tensor in whole.averager.average().items():
        assert torch.equal(tensor, rest.averager.average()[name])


def test_a_new_run_begins_the_schedule_again(tmp_path: Path) -> None:
    averaging = LatestWeightAveraging(k=3, schedule=Growing())
    fit(tmp_path, averaging)
    with pytest.warns(UserWarning, match="a new window begins"):
        fit(tmp_path, averaging)
    assert averaging.averager.snapshot_steps == [4, 8, 16]


def test_a_new_run_drops_samples_that_were_no_snapshot_yet(tmp_path: Path) -> None:
    averaging = LatestWeightAveraging(k=2, schedule=Every(1), samples=12, min_snapshots=1)
    with pytest.warns(UserWarning, match="gives 0 snapshots"):
        fit(tmp_path, averaging, max_epochs=3)
    assert averaging.averager.newest_step == 9
    assert not averaging.averager.snapshot_steps
    with pytest.warns(UserWarning, match="up to step 9 of another one: a new window begins"):
        fit(tmp_path, averaging, max_epochs=5)
    assert averaging.averager.snapshot_steps == [12]


class Unseen(Net):
    """It steps without Lightning's optimizer, so `global_step` stays 0."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(1.0)


def test_samples_of_an_optimizer_that_lightning_does_not_know(tmp_path: Path) -> None:
    averaging = LatestWeightAveraging(k=2, samples=2, min_snapshots=1)
    model = Unseen()
    before = weights(model)
    lightning_trainer(tmp_path, averaging, max_epochs=6).fit(model, loader(), loader(8, seed=9))
    assert averaging.averager.num_collected == 3
    found = averaging.averager.average()
    for name, value in before.items():  # 3 steps an epoch; the mean of epochs 3, 4, 5 and 6
        assert torch.allclose(found[name], value + 3 * 4.5)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"schedule": Every(4)}, [4, 8, 12, 16]),
        ({"schedule": Every(4, start=2)}, [6, 10, 14, 18]),
        ({"schedule": Every(4), "update_starting_at_step": 9}, [12, 16]),
        ({"schedule": Every(2), "interval": "epoch"}, [6, 12, 18]),
        ({"horizon": 0.75, "k": 3}, [7, 11, 16]),
        ({"horizon": 0.75, "k": 3, "interval": "epoch"}, [6, 9, 12]),
        ({"horizon": 0.75, "k": 3, "update_starting_at_step": 13}, [14, 16]),
    ],
)
def test_units_in_lightning(tmp_path: Path, options: dict[str, Any], expected: list[int]) -> None:
    averaging = LatestWeightAveraging(**{"k": 9, "min_snapshots": 1, **options})
    fit(tmp_path, averaging)
    assert averaging.averager.snapshot_steps == expected


def due_after(losses: dict[int, float]) -> list[int]:
    schedule = OnPlateau(min_delta=0.2)
    return [step for step, loss in losses.items() if schedule.due(step, loss)]


class Losses(Callback):
    def __init__(self) -> None:
        self.found: dict[int, float] = {}

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.found[trainer.global_step] = trainer.callback_metrics["val_loss"].item()


def test_a_plateau_in_lightning(tmp_path: Path) -> None:
    whole, first, rest = (LatestWeightAveraging(**by_loss(), side_by_side=True) for _ in range(3))
    losses = Losses()
    fit(tmp_path, whole, losses)
    assert whole.averager.snapshot_steps == due_after(losses.found)
    assert 0 < len(whole.averager) < 6
    with pytest.raises(ConnectionError):
        fit(tmp_path, first, ModelCheckpoint(tmp_path / "run", save_last=True), Crash())
    fit(tmp_path, rest, ckpt=tmp_path / "run" / "last.ckpt")
    assert rest.averager.snapshot_steps == whole.averager.snapshot_steps
    wrong = LatestWeightAveraging(**by_loss(), monitor="val_lose")
    with pytest.raises(ConfigError, match=r"monitor='val_lose'.*val_loss"):
        fit(tmp_path, wrong)


@pytest.mark.parametrize("monitor", ["val_acc", "eval_accuracy"])
def test_a_plateau_of_an_accuracy_is_refused(monitor: str) -> None:
    """It would be taken for a loss, and each improvement for a plateau."""
    for make in (LatestWeightAveraging, averaging):
        with pytest.raises(ConfigError, match="OnPlateau waits for a loss"):
            make(**by_loss(), monitor=monitor)
        assert make(k=2, monitor=monitor) is not None  # nobody reads it


def test_a_registered_schedule_in_transformers(tmp_path: Path) -> None:
    options: dict[str, Any] = {"k": 3, "schedule": Growing()}
    run = {"max_steps": 17, "save_steps": 3, "eval_strategy": "no"}
    whole, first, rest = (averaging(**options) for _ in range(3))
    trainer(tmp_path / "whole", whole, **run).train()
    assert whole.averager.snapshot_steps == [4, 8, 16]
    with pytest.raises(RuntimeError, match="a hook failed"):
        trainer(tmp_path / "parts", first, Fails("on_step_begin", 7), **run).train()
    resumed = trainer(tmp_path / "parts", rest, model=tiny_model(seed=99), **run)
    resumed.train(resume_from_checkpoint=True)
    assert rest.averager.snapshot_steps == whole.averager.snapshot_steps
    assert rest.averager.num_collected == whole.averager.num_collected
    assert options["schedule"].state_dict() == {"last": 0}
    resumed.train()  # a new run begins the schedule again
    assert rest.averager.snapshot_steps == [4, 8, 16]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"schedule": Every(4)}, [4, 8, 12]),
        ({"schedule": Every(4, start=2)}, [6, 10]),
        ({"schedule": Every(4), "start": 0.5}, [8, 12]),
        ({"schedule": Every(4), "collect_strategy": "save"}, [4, 8, 12]),
        ({"horizon": 0.75, "k": 3}, [4, 7, 11]),
        ({"horizon": 0.75, "k": 3, "collect_strategy": "save"}, [4, 8, 12]),
        ({"schedule": Every(3), "collect_strategy": "save"}, [6, 12]),  # of saves at 2, 4, ...
    ],
)
def test_units_in_transformers(
    tmp_path: Path, options: dict[str, Any], expected: list[int]
) -> None:
    callback = averaging(**{"k": 9, "min_snapshots": 1, **options})
    trainer(tmp_path, callback, eval_strategy="no").train()
    assert callback.averager.snapshot_steps == expected


def test_a_schedule_of_epochs_in_transformers(tmp_path: Path) -> None:
    callback = averaging(k=2, schedule=Every(2), collect_strategy="epoch")
    trainer(tmp_path, callback, max_steps=32, save_strategy="no", eval_strategy="no").train()
    assert callback.averager.snapshot_steps == [16, 32]


@pytest.mark.parametrize("metrics", ["both", "averaged"])
def test_a_plateau_in_transformers(tmp_path: Path, metrics: Any) -> None:
    run = {"learning_rate": 0.1, "max_steps": 16}
    options = {**by_loss(), "metrics": metrics}
    whole, first, rest = (averaging(**options) for _ in range(3))
    ran = trainer(tmp_path / "whole", whole, **run)
    ran.train()
    assert whole.averager.snapshot_steps == due_after(history(ran, "eval_loss"))
    assert 0 < len(whole.averager) < 8
    with pytest.raises(RuntimeError, match="a hook failed"):
        trainer(tmp_path / "parts", first, Fails("on_step_begin", 9), **run).train()
    resumed = trainer(tmp_path / "parts", rest, model=tiny_model(seed=99), **run)
    resumed.train(resume_from_checkpoint=True)
    assert rest.averager.snapshot_steps == whole.averager.snapshot_steps
    wrong = averaging(**options, monitor="eval_lose")
    with pytest.raises(ConfigError, match=r"monitor='eval_lose'.*eval_loss"):
        trainer(tmp_path / "wrong", wrong, **run).train()


def test_contradictions_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"schedule=Every.*collect_every=3"):
        averaging(schedule=Every(2), collect_every=3)
    with pytest.raises(ConfigError, match=r"horizon=0\.5 and collect_every=3"):
        averaging(horizon=0.5, collect_every=3)
    with pytest.raises(ConfigError, match="horizon, update_every_n_steps"):
        LatestWeightAveraging(horizon=0.5, update_every_n_steps=3)
    for callback in (averaging, LatestWeightAveraging):
        with pytest.raises(ConfigError, match="pass only one"):
            callback(horizon=0.5, schedule=Every(2))
        with pytest.raises(ConfigError, match=r"^samples='16'"):  # not of k times samples
            callback(horizon=0.5, k=2, samples="16")
        with pytest.raises(ConfigError, match=r"^samples=0"):
            callback(horizon=0.5, samples=0)
    with pytest.raises(ConfigError, match="schedule"):
        averaging(schedule=Every)


def test_a_schedule_with_too_few_snapshots_is_found_at_the_start(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="gives 4 snapshots, but an average needs 9"):
        trainer(tmp_path, averaging(k=9, schedule=Growing())).train()
    averaging_9 = LatestWeightAveraging(k=9, schedule=Growing())
    with pytest.warns(UserWarning, match="gives 5 snapshots, but an average needs 9"):
        fit(tmp_path, averaging_9)
    assert copy.deepcopy(averaging_9).averager.snapshot_steps == [1, 2, 4, 8, 16]


def test_what_to_change_for_an_average_depends_on_the_window(tmp_path: Path) -> None:
    """With a horizon one snapshot is enough: a smaller k would change nothing."""
    growing: dict[str, Any] = {"k": 9, "horizon": 0.5, "samples": 99}
    with pytest.warns(UserWarning, match="needs 1. Train longer.*, or lower samples=99. The"):
        trainer(tmp_path / "a", averaging(**growing)).train()
    lightning = LatestWeightAveraging(**growing)
    with pytest.warns(UserWarning, match="start earlier, or lower samples=99.$"):
        run = fit(tmp_path / "b", lightning)
    with pytest.raises(
        NotReadyError, match=r"0 of 1 snapshots.* train longer, or lower samples=99"
    ):
        lightning.save_averaged(run, tmp_path / "averaged.ckpt")
    windows = averaging(k=9, choose_window=WindowSearch([9]))
    with pytest.warns(UserWarning, match="needs 9. Train longer.*, or compare smaller windows."):
        trainer(tmp_path / "c", windows).train()
