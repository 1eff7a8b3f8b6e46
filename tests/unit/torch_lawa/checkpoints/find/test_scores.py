"""The best checkpoints by a recorded metric: where values come from, and which are chosen."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from torch_lawa import average_checkpoints, inspect_checkpoint, plan_average, plan_sweep
from torch_lawa.checkpoints.find.discovery import Discovery, FoundCheckpoint
from torch_lawa.checkpoints.find.scores import choose_best, find_scores, mode_of
from torch_lawa.checkpoints.formats.safetensors_torch import save_tensors
from torch_lawa.checkpoints.storage.paths import LocalPath
from torch_lawa.cli.main import lawa
from torch_lawa.errors import ConfigError, FormatError

LOSSES = {100: 0.9, 200: 0.4, 300: 0.6, 400: 0.5}
RECORDED = Path(__file__).parents[4] / "jax_checkpoints" / "recorded"


def save_steps(run: Path) -> Path:
    run.mkdir()
    for step in LOSSES:
        save_tensors(run / f"step_{step}.safetensors", {"w": torch.full((2,), float(step))})
    return run


def save_rows(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def save_trainer(run: Path) -> Path:
    """As the Trainer of Transformers saves: the state has what was logged until then."""
    history: list[object] = []
    for step, loss in LOSSES.items():
        history.append({"loss": 2 * loss, "step": step, "epoch": step / 100})
        history.append({"eval_loss": loss, "eval_accuracy": 1 - loss, "step": step})
        folder = run / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        save_tensors(folder / "model.safetensors", {"w": torch.full((2,), float(step))})
        state = {"global_step": step, "log_history": history}
        (folder / "trainer_state.json").write_text(json.dumps(state))
    return run


def named(*names: str) -> Discovery:
    found = [FoundCheckpoint(LocalPath(name), None, epoch) for epoch, name in enumerate(names)]
    return Discovery(tuple(found), "epoch", is_run=True)


@pytest.mark.parametrize(
    ("metric", "steps"),
    [("eval_loss", [200, 400]), ("eval_accuracy", [200, 400]), ("accuracy", [200, 400])],
)
def test_trainer_states(metric: str, steps: list[int], tmp_path: Path) -> None:
    run = save_trainer(tmp_path / "run")
    plan = plan_average(run, tmp_path / "mean", best=2, metric=metric)
    assert [i.step for i in plan.inputs] == steps
    assert [i.value for i in plan.inputs] == pytest.approx(
        [LOSSES[s] if "loss" in metric else 1 - LOSSES[s] for s in steps]
    )


def test_the_plan_shows_the_values_and_the_result_keeps_them(tmp_path: Path) -> None:
    run = save_trainer(tmp_path / "run")
    out = tmp_path / "mean"
    command = ["average", str(run), "--best", "2", "--metric", "eval_loss", "-o", str(out)]
    shown = CliRunner().invoke(lawa, [*command, "--dry-run"]).output
    assert "the lowest eval_loss" in shown
    assert "eval_loss 0.4 " in shown
    listed = json.loads(CliRunner().invoke(lawa, [*command, "--dry-run", "--json"]).output)
    assert (listed["metric"], listed["mode"]) == ("eval_loss", "min")
    assert [each["value"] for each in listed["inputs"]] == [0.4, 0.5]
    assert CliRunner().invoke(lawa, command).exit_code == 0
    made = inspect_checkpoint(out).provenance
    assert made is not None
    assert [each["metric"] for each in made["inputs"]] == [{"eval_loss": 0.4}, {"eval_loss": 0.5}]


@pytest.mark.parametrize(
    ("name", "metric", "value"),
    [
        ("epoch=3-val_loss=0.25.ckpt", "val_loss", 0.25),
        ("epoch=3-val_loss=0.25-v1.ckpt", "val_loss", 0.25),
        ("epoch=3-val_loss=-1.5e-03.ckpt", "val_loss", -1.5e-3),
        ("epoch03-val_loss0.25.ckpt", "val_loss", 0.25),
        ("val_loss=2-epoch=3.ckpt", "val_loss", 2.0),
        ("epoch=3-val_loss=0.25.ckpt", "loss", None),
        ("epoch=3-val_loss=nan.ckpt", "val_loss", None),
        ("epoch=3.ckpt", "val_loss", None),
    ],
)
def test_names_of_lightning(name: str, metric: str, value: float | None) -> None:
    beside = f"epoch=9-{metric}=1.0.ckpt"
    assert find_scores(named(name, beside).found, metric) == [value, 1.0]


def test_a_metrics_file(tmp_path: Path) -> None:
    run = save_steps(tmp_path / "run")
    rows = [{"step": step, "valid_loss": loss, "k": None} for step, loss in LOSSES.items()]
    averages = [{"step": 100, "valid_loss": 0.1, "k": 6}, {"step": 300, "weights": "averaged"}]
    file = save_rows(tmp_path / "metrics.jsonl", *rows, *averages, {"valid_loss": 1.0})
    out = tmp_path / "mean.safetensors"
    plan = plan_average(run, out, best=3, metric="valid_loss", metrics=file, stop=300)
    assert [(i.step, i.value) for i in plan.inputs] == [(100, 0.9), (200, 0.4), (300, 0.6)]
    average_checkpoints(run, out, best=2, metric="valid_loss", mode="max", metrics=file)
    made = inspect_checkpoint(out).provenance
    assert made is not None
    assert [each["step"] for each in made["inputs"]] == [100, 300]


def test_rows_of_re_estimated_statistics_do_not_contradict(tmp_path: Path) -> None:
    """Runs of `lawa train` and `evaluate_side_by_side` have both; a sweep has only these."""
    run = save_steps(tmp_path / "run")
    raw: dict[str, object] = {"weights": "raw", "k": None}
    own = [{"step": s, "loss": loss, **raw, "batch_norm": None} for s, loss in LOSSES.items()]
    again = [{"step": s, "loss": s, **raw, "batch_norm": "re-estimated"} for s in LOSSES]
    for rows, steps in (([*own, *again], [200, 400]), (again, [100, 200])):
        file = save_rows(tmp_path / "metrics.jsonl", *rows)
        plan = plan_average(run, tmp_path / "mean", best=2, metric="loss", metrics=file)
        assert [i.step for i in plan.inputs] == steps


def test_metrics_of_orbax(tmp_path: Path) -> None:
    run = shutil.copytree(RECORDED / "run", tmp_path / "run")
    for step, loss in (10, 0.5), (20, 0.25):
        (run / str(step) / "metrics").mkdir()
        (run / str(step) / "metrics" / "metrics").write_text(json.dumps({"loss": loss}))
    found = [FoundCheckpoint(LocalPath(run / str(step)), step, None) for step in (10, 20)]
    assert find_scores(found, "loss") == [0.5, 0.25]


def test_checkpoints_without_a_value_are_left_out_and_ties_are_named(tmp_path: Path) -> None:
    run = save_steps(tmp_path / "run")
    rows = [{"step": step, "loss": loss} for step, loss in ((100, 0.5), (200, 0.5), (300, None))]
    file = save_rows(tmp_path / "m.jsonl", *rows)
    plan = plan_average(run, tmp_path / "mean", best=1, metric="loss", metrics=file)
    assert [i.step for i in plan.inputs] == [200]
    notes = "; ".join(plan.notes)
    assert "step 300, step 400 (no value of loss)" in notes
    assert "step 200 and step 100 have the same loss" in notes
    with pytest.raises(ConfigError, match=r"only 2 of 4 checkpoints.*--best 2 or fewer"):
        plan_average(run, tmp_path / "mean", best=3, metric="loss", metrics=file)
    with pytest.raises(ConfigError, match=r"there are only 2 checkpoints.*--best 2 or fewer"):
        plan_average(run, tmp_path / "mean", best=3, metric="loss", metrics=file, stop=200)


def test_a_step_that_does_not_exist_has_neighbours(tmp_path: Path) -> None:
    run = save_steps(tmp_path / "run")
    for plan in (
        lambda: plan_sweep(run, [2], at=[200, 350]),
        lambda: plan_average(run, tmp_path / "mean", last=2, at=350),
    ):
        with pytest.raises(ConfigError, match=r"--at 350: .* The nearest: 300, 400"):
            plan()


def test_a_horizon_with_one_checkpoint_is_noted(tmp_path: Path) -> None:
    run = save_steps(tmp_path / "run")
    notes = [plan_average(run, tmp_path / "mean", horizon=h).notes for h in (0.2, 0.5)]
    assert ["nothing to average" in "; ".join(each) for each in notes] == [True, False]


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ({"best": 2}, "by which metric"),
        ({"metric": "loss"}, "--best 5"),
        ({"mode": "max", "last": 2}, "--best 5"),
        ({"best": 2, "metric": "loss", "last": 2}, "--last"),
        ({"best": 2, "metric": "loss", "horizon": 0.5}, "--horizon"),
        ({"best": 0, "metric": "loss"}, "at least 1"),
        ({"best": 2, "metric": "loss"}, "no value of 'loss'"),
        ({"best": 2, "metric": "spread", "mode": "up"}, "mode"),
        ({"best": 2, "metric": "spread"}, "--mode"),
        ({"best": 2, "metric": "loss", "metrics": "missing.jsonl"}, "no such file"),
    ],
)
def test_misuse(selection: dict[str, object], message: str, tmp_path: Path) -> None:
    run = save_steps(tmp_path / "run")
    with pytest.raises(ConfigError, match=message):
        plan_average(run, tmp_path / "mean", **selection)  # type: ignore[arg-type]


def test_unknown_metrics_are_listed_and_contradictions_refused(tmp_path: Path) -> None:
    run = save_trainer(tmp_path / "run")
    with pytest.raises(ConfigError, match="eval_accuracy, eval_loss"):
        plan_average(run, tmp_path / "mean", best=2, metric="val_loss")
    rows = [{"step": 100, "loss": 0.5}, {"step": 100, "loss": 0.25}]
    file = save_rows(tmp_path / "m.jsonl", *rows)
    with pytest.raises(FormatError, match=r"step 100 is both 0\.5 and 0\.25"):
        plan_average(run, tmp_path / "mean", best=1, metric="loss", metrics=file)


@pytest.mark.parametrize(
    ("metric", "mode"),
    [
        ("valid_loss", "min"),
        ("val/ppl", "min"),
        ("wer", "min"),
        ("eval_f1", "max"),
        ("top1_acc", "max"),
    ],
)
def test_modes(metric: str, mode: str) -> None:
    assert mode_of(metric) == mode
    for unclear in ("epoch_time", "loss_accuracy"):
        with pytest.raises(ConfigError, match="--mode"):
            mode_of(unclear)


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=12), st.data())
def test_none_that_is_left_out_is_better(values: list[int], data: st.DataObject) -> None:
    best = data.draw(st.integers(1, len(values)))
    discovery = named(*(f"epoch={i}-score={value}.ckpt" for i, value in enumerate(values)))
    chosen = choose_best(discovery, best, "score")
    kept = chosen.discovery.numbers
    assert kept == sorted(kept)
    assert [values[i] for i in kept] == list(chosen.values)
    others = [value for i, value in enumerate(values) if i not in kept]
    assert len(kept) == best
    assert all(value <= min(chosen.values) for value in others)
