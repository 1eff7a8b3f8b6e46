"""Methods that learn or choose inside a run: on the right data, at their own cost, resumable."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.training import rows_of, run, smoke_plan

from lawa_lab.methods.fitting import FittingData
from lawa_lab.methods.ring import PhasedAverage
from lawa_lab.recipes.run_folder import RunPlan
from torch_lawa.errors import ConfigError
from torch_lawa.metrics import read_metrics

METHODS = (
    "twa:0.1:3", "greedy-soup", "phase", "rna:0.1", "rna-per-tensor:0.1", "swag:1", "two-tailed",
    "bema:0.5:0.2", "corrected-ema:0.9",
)  # fmt: skip


def plan(**changes: Any) -> RunPlan:
    settings = {
        "validation_fraction": 0.3, "evaluate_test": True, "batch_norm": ("re-estimated",),
        "horizon": 0.5, "ks": (4, 2), "epochs": 3, "coefficients": ("uniform", "recency:1"),
    }  # fmt: skip
    return smoke_plan("digits", **{**settings, **changes})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole")
    run(plan(methods=METHODS), path)
    return path


def test_a_run_with_every_method_resumes_bit_for_bit(whole: Path, tmp_path: Path) -> None:
    assert not run(plan(methods=METHODS), tmp_path, stop_at=25).finished
    run(plan(methods=METHODS), tmp_path)
    assert rows_of(tmp_path) == rows_of(whole)
    found = {row["weights"] for row in rows_of(whole)}
    assert {method.partition(":")[0] for method in METHODS} <= found


def test_the_run_itself_does_not_notice_them(whole: Path, tmp_path: Path) -> None:
    run(plan(), tmp_path)
    own = [row for row in rows_of(whole) if row["weights"] in ("raw", "averaged")]
    assert own == rows_of(tmp_path)


def test_validation_images_choose_and_test_images_are_measured(whole: Path) -> None:
    rows = [row for row in rows_of(whole) if row["epoch"] == 3]
    losses = {(row["weights"], row["k"], row["coefficients"]): row for row in rows}
    uniform, recency = (losses["averaged", 4, rule] for rule in ("uniform", "recency:1"))
    better = min(uniform, recency, key=lambda row: row["valid_loss"])
    phase = losses["phase", None, ""]
    assert (phase["valid_loss"], phase["test_loss"]) == (better["valid_loss"], better["test_loss"])
    assert uniform["valid_loss"] != uniform["test_loss"]


def test_without_validation_data_choosing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="valid_loss"):
        run(plan(validation_fraction=0.0, evaluate_test=False, methods=("phase",)), tmp_path)


def test_the_time_is_charged_to_the_method_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(self: PhasedAverage, data: FittingData, n: int) -> Sequence[float]:
        time.sleep(0.5)
        return [1.0] * n

    monkeypatch.setattr(PhasedAverage, "chosen", slow)
    timed = plan(methods=("phase", "rna:0.1"))
    assert not run(timed, tmp_path, stop_at=25).finished  # seconds continue in a resumed run
    run(timed, tmp_path)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    by_method = {
        name: [row for row in rows if row["weights"] == name] for name in ("raw", "phase", "rna")
    }
    trained = [row["train_seconds"] for row in by_method["rna"]]
    assert 0 < trained[0] < trained[1] < trained[2]
    assert by_method["phase"][-1]["collect_seconds"] >= 1.5  # three evaluations
    # A method that reads the window is charged with collecting for it.
    assert by_method["rna"][-1]["collect_seconds"] > by_method["raw"][-1]["collect_seconds"] > 0
