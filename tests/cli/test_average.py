"""`lawa average` and `lawa sweep` as they are typed."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from torch_lawa.cli import main
from torch_lawa.metrics import read_metrics
from torch_lawa.offline.sweep import run_sweep, sweep_checkpoints
from torch_lawa.offline.sweep_plan import plan_sweep
from torch_lawa.offline.threads import Meter, Stopped


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    folder.mkdir()
    torch.manual_seed(0)
    for step in range(100, 600, 100):
        state = {"w": torch.randn(50, 3), "n": torch.tensor(step)}
        save_file(state, folder / f"step_{step}.safetensors")
    return folder


Lawa = Callable[..., tuple[int, str, str]]


@pytest.fixture
def lawa(capsys: pytest.CaptureFixture[str]) -> Lawa:
    """Run the command here; the exit code, what it said, what it complained of."""

    def go(*words: object) -> tuple[int, str, str]:
        code = main._run([str(w) for w in words])
        return code, *capsys.readouterr()

    return go


def mean(run: Path, steps: list[int]) -> torch.Tensor:
    files = [load_file(run / f"step_{s}.safetensors")["w"].double() for s in steps]
    return (sum(files[1:], files[0]) / len(files)).float()


def test_the_last_k(run: Path, lawa: Lawa) -> None:
    code, said, complained = lawa("average", "run", "--last", 3, "-o", "m.safetensors")
    assert (code, complained) == (0, "")
    assert said.startswith("m.safetensors: the mean of 3 checkpoints, step 300 to step 500.")
    made = load_file("m.safetensors")
    assert torch.equal(made["w"], mean(run, [300, 400, 500]))
    assert made["n"] == 500


def test_provenance_is_inside(run: Path, lawa: Lawa) -> None:
    args = ("--last", 2, "-o", "m.safetensors", "--digests", "--coefficients", "exponential:0.75")
    assert lawa("average", "run", *args)[0] == 0
    with safe_open("m.safetensors", "pt") as file:
        made = json.loads(file.metadata()["torch_lawa"])
    assert made["coefficients"] == "exponential:0.75"
    assert [i["weight"] for i in made["inputs"]] == [0.25, 0.75]
    import hashlib

    newest = hashlib.sha256((run / "step_500.safetensors").read_bytes()).hexdigest()
    assert list(made["inputs"][1]["sha256"].values()) == [newest]


@pytest.mark.parametrize(
    ("rule", "weights"), [("recency:2", [1, 4, 9]), ("trend:0.5", [-2, 1, 4]), ("blend:1", [1] * 3)]
)
def test_rules_of_lawa_train(run: Path, lawa: Lawa, rule: str, weights: list[int]) -> None:
    """Those with which the lab's recipes compare; `lawa train` takes them from the same table."""
    done = lawa("average", "run", "--last", 3, "-o", "m.safetensors", "--coefficients", rule)
    assert done[0] == 0, done[2]
    files = [load_file(run / f"step_{step}.safetensors")["w"].double() for step in (300, 400, 500)]
    expected = sum(w * file for w, file in zip(weights, files, strict=True)) / sum(weights)
    torch.testing.assert_close(load_file("m.safetensors")["w"], expected.float())
    assert rule in lawa("inspect", "m.safetensors")[1]
    code, said, _ = lawa("average", "--help")
    assert code == 0
    assert f"{rule.split(':')[0]}:" in said


def test_a_dry_run_writes_nothing(run: Path, lawa: Lawa) -> None:
    code, said, _ = lawa("average", "run", "--last", 2, "-o", "m", "--dry-run")
    assert code == 0
    assert "Average of 2 checkpoints (uniform)" in said
    code, said, _ = lawa("average", "run", "--last", 2, "-o", "m", "--dry-run", "--json")
    assert [i["step"] for i in json.loads(said)["inputs"]] == [400, 500]
    assert not Path("m").exists()


def test_json_for_programs(run: Path, lawa: Lawa) -> None:
    code, said, complained = lawa("average", "run", "--last", 2, "-o", "m", "--json")
    result = json.loads(said)
    assert (code, complained, result["output"]) == (0, "", "m")
    assert result["layout"]["files"] == ["model.safetensors"]
    assert result["engine_seconds"] > 0
    assert Path("m/model.safetensors").is_file()


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("average", "run", "--last", "9", "-o", "m"), 2, "5"),
        (("average", "run", "--at", "250", "-o", "m"), 2, "200"),
        (("average", "run", "--at", "400", "-o", "m"), 2, "4 checkpoints up to --at 400"),
        (("average", "nowhere", "-o", "m"), 1, "nowhere"),
        (("average", "run", "--last", "2", "-o", "m", "--dtype", "int8"), 2, "int8"),
        (("average", "run", "--last", "2", "-o", "m", "--coefficients", "x"), 2, "exponential"),
        (("average", "run", "--last", "2"), 2, "--output"),
        (("average", "run", "--last", "2", "-o", "m", "--weights", "a"), 2, "--weights"),
        (("average", "run", "--last", "2", "-o", "m", "--threads", "0"), 2, "threads"),
        (("average", "run", "--last", "2", "-o", "m", "--threads", "100000"), 2, "threads"),
        (("average", "run", "--last", "2", "-o", "m", "--max-shard-size", "big"), 2, "5GB"),
        (("sweep", "run", "--k", "2"), 2, "--evaluator"),
        (("sweep", "run", "--k", "0", "-o", "s"), 2, "at least 1"),
        (("sweep", "run", "--k", "0", "--evaluator", "bad:number"), 2, "--k 0: give"),
        (("sweep", "run", "--k", "x", "-o", "s"), 2, "--k"),
        (("sweep", "run", "--k", "6", "-o", "s"), 2, "--k 5 or less"),
        (("sweep", "run", "--k", "2", "--at", "150", "-o", "s"), 2, "--at 150"),
        (("sweep", "run", "--k", "2", "--evaluator", "no.such:f"), 2, "no"),
        (("sweep", "run", "--k", "2", "--evaluator", "bad:number"), 2, "named values"),
        (("sweep", "run", "--k", "2", "--evaluator", "bad:tensor"), 2, "Tensor as 'w'"),
        (("sweep", "run", "--k", "2", "--evaluator", "bad:nothing"), 2, "no number, but {}"),
        (("sweep", "run", "--k", "2", "--evaluator", "bad:text"), 2, "no number"),
        (("sweep", "run", "--k", "2", "--evaluator", "bad:names"), 2, "named 'step', which"),
    ],
)
def test_mistakes(run: Path, lawa: Lawa, args: tuple[str, ...], code: int, message: str) -> None:
    Path("bad.py").write_text(
        "def number(state): return 1\ndef tensor(state): return {'w': state['w']}\n"
        "def nothing(state): return {}\ndef text(state): return {'loss': 'low'}\n"
        "def names(state): return {'loss': 1.0, 'k': 3, 'step': 9}\n"
    )
    found, _, complained = lawa(*args)
    assert found == code, complained
    assert message in complained
    assert "Traceback" not in complained
    assert not Path("m").exists()
    assert not Path("metrics.jsonl").exists()


def test_a_sweep_without_space_leaves_nothing(
    run: Path, lawa: Lawa, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("my_evaluator.py").write_text(EVALUATOR)
    words = ["sweep", "run", "--k", "2", "--evaluator", "my_evaluator:evaluate"]
    words += ["--scratch", ".", "--metrics", "swept/here/metrics.jsonl"]
    before = sorted(Path().rglob("*"))
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full_disk)
        code, _, complained = lawa(*words)
    assert code == 1
    assert "no space" in complained
    assert {path.name for path in {*Path().rglob("*")} - {*before}} <= {"__pycache__"}
    assert lawa(*words)[0] == 0
    assert len(read_metrics(Path("swept/here/metrics.jsonl"))) == 9


def test_a_sweep_that_cannot_write_its_rows_averages_nothing(
    run: Path, lawa: Lawa, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("my_evaluator.py").write_text(EVALUATOR)
    Path("file").touch()
    # Root may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, _: path != Path("closed"))
    Path("closed").mkdir()
    words = ("sweep", "run", "--k", "2", "--evaluator", "my_evaluator:evaluate", "-o", "s")
    for metrics in ("file/metrics.jsonl", "closed/metrics.jsonl"):
        code, _, complained = lawa(*words, "--metrics", metrics)
        assert code == 1
        assert Path(metrics).parts[0] in complained
        assert not Path("s").exists()


def test_an_exception_in_an_evaluator_names_the_window(run: Path) -> None:
    def fails(state: Mapping[str, torch.Tensor]) -> dict[str, float]:
        raise KeyError("head")

    with pytest.raises(KeyError, match="head") as caught:
        sweep_checkpoints(run, [2], evaluator=fails)
    [note] = caught.value.__notes__
    assert "raised by the evaluator, for" in note
    assert "step-200" in note


def test_nan_is_spoken_of(run: Path, lawa: Lawa) -> None:
    save_file({"w": torch.full((50, 3), torch.nan), "n": torch.tensor(1)},
              run / "step_300.safetensors")  # fmt: skip
    code, _, complained = lawa("average", "run", "--last", 3, "-o", "m.safetensors")
    assert code == 0
    assert "the mean of 'w' contains NaN or Inf: so does" in complained
    assert "step_300.safetensors." in complained


@pytest.mark.parametrize("kernels", ["", "numpy"])
def test_a_sum_that_overflows_is_spoken_of(
    run: Path, lawa: Lawa, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAWA_KERNELS", kernels)
    for step in (700, 800, 900):
        save_file({"w": torch.full((4,), 1.7e308, dtype=torch.float64), "v": torch.ones(2)},
                  run / f"step_{step}.safetensors")  # fmt: skip
    files = [run / f"step_{step}.safetensors" for step in (700, 800, 900)]
    code, _, complaint = lawa("average", *files, "-o", "m.safetensors")
    assert code == 0
    assert "the mean of 'w' contains NaN or Inf: the sum" in complaint
    assert "so does" not in complaint
    code, shown, _ = lawa("average", *files, "-o", "n.safetensors", "--json")
    assert json.loads(shown)["overflowed"] == ["w"]


# A tensor of one number, as people return them.
EVALUATOR = "def evaluate(state):\n    return {'size': state['w'].double().abs().sum()}\n"


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_values_too_large_for_the_dtype_are_spoken_of(run: Path, lawa: Lawa) -> None:
    for step in (700, 800):
        large = {"w": torch.full((50, 3), 7e4 + step), "v": torch.ones(2)}
        save_file(large, run / f"step_{step}.safetensors")
    files = [run / f"step_{step}.safetensors" for step in (700, 800)]
    code, _, complaint = lawa("average", *files, "-o", "m.safetensors", "--dtype", "float16")
    assert code == 0
    assert "mean of 'w' contains NaN or Inf" in complaint
    assert "too large for F16" in complaint
    assert "so does" not in complaint
    assert load_file("m.safetensors")["w"].isinf().all()
    code, _, complaint = lawa("average", *files, "-o", "b.safetensors", "--dtype", "bfloat16")
    assert (code, "NaN" in complaint) == (0, False)


def test_one_checkpoint_is_called_what_it_is(run: Path, lawa: Lawa) -> None:
    code, said, _ = lawa("average", run, "--last", 1, "-o", "m.safetensors")
    assert code == 0
    assert said.startswith("m.safetensors: the mean of step 500. Read ")


def test_a_sweep_evaluates_every_window(run: Path, lawa: Lawa) -> None:
    Path("my_evaluator.py").write_text(EVALUATOR)
    words = ("sweep", "run", "--k", "2,3", "--evaluator", "my_evaluator:evaluate")
    code, said, complained = lawa(*words)
    assert code == 0, complained
    rows = read_metrics(Path("metrics.jsonl"))
    assert len(rows) == 5 + 4 + 3
    assert len(said.splitlines()) == len(rows)
    for row in rows:
        steps = list(range(row["step"] - 100 * ((row["k"] or 1) - 1), row["step"] + 1, 100))
        assert row["size"] == float(mean(run, steps).double().abs().sum())
        assert row["weights"] == ("raw" if row["k"] is None else "averaged")
    # Again: everything is there already. One row less: it is made again.
    assert lawa(*words)[1] == ""
    lines = Path("metrics.jsonl").read_text().splitlines(keepends=True)
    Path("metrics.jsonl").write_text("".join(lines[:-1]))
    assert len(lawa(*words)[1].splitlines()) == 1
    assert len(read_metrics(Path("metrics.jsonl"))) == len(rows)


def test_a_sweep_does_not_take_the_rows_of_another_run(run: Path, lawa: Lawa) -> None:
    """The same steps in the same metrics file: its values would be those of the other run."""
    Path("my_evaluator.py").write_text(EVALUATOR)
    words = ("--k", "2", "--evaluator", "my_evaluator:evaluate")
    assert lawa("sweep", "run", *words)[0] == 0
    shutil.copytree(run, "other")
    rows = Path("metrics.jsonl").read_bytes()
    code, said, complained = lawa("sweep", "other", *words)
    assert (code, said) == (1, "")
    assert "run/step_100.safetensors" in complained
    assert "--metrics" in complained
    assert Path("metrics.jsonl").read_bytes() == rows
    assert lawa("sweep", "other", *words, "--metrics", "other.jsonl")[0] == 0
    # Moved together with the run, or seen from another folder, it is the same one.
    Path("moved").mkdir()
    Path("run").rename("moved/run")
    Path("metrics.jsonl").rename("moved/metrics.jsonl")
    code, said, complained = lawa("sweep", "moved/run", *words, "--metrics", "moved/metrics.jsonl")
    assert (code, said) == (0, "")
    assert "0 evaluated, 9 evaluated before" in complained


def test_a_row_of_json_is_one_line_on_a_terminal(run: Path) -> None:
    Path("slow.py").write_text(
        "import time\ndef f(state):\n    time.sleep(0.6)\n    return {'x' * 90: 1.0}\n"
    )
    words = ["sweep", "run", "--k", "2", "--at", "200", "--no-raw", "--evaluator", "slow:f"]
    above, below = os.openpty()
    command = [sys.executable, "-m", "torch_lawa", *words, "--json"]
    subprocess.run(command, stdin=below, stdout=below, stderr=below, check=True)
    os.close(below)
    shown = os.read(above, 1 << 16).decode()
    os.close(above)
    assert json.loads(shown)["x" * 90] == 1.0


def test_other_coefficients_are_other_rows(run: Path, lawa: Lawa) -> None:
    Path("my_evaluator.py").write_text(EVALUATOR)
    words = ("sweep", "run", "--k", "2", "--evaluator", "my_evaluator:evaluate")
    assert len(lawa(*words)[1].splitlines()) == 5 + 4
    assert len(lawa(*words, "--coefficients", "exponential:0.5")[1].splitlines()) == 4  # no raw
    assert lawa(*words, "--coefficients", "exponential:0.5")[1] == ""


def test_a_sweep_reads_what_its_windows_need(run: Path, lawa: Lawa) -> None:
    """Step 300 belongs to no window, and is not even opened; two that do not fit are refused."""
    (run / "step_300.safetensors").write_bytes(b"broken")
    code, _, complained = lawa("sweep", "run", "--k", "2", "--at", "200,500", "-o", "s")
    assert code == 0, complained
    assert torch.equal(load_file("s/step-500-k-2.safetensors")["w"], mean(run, [400, 500]))
    assert torch.equal(load_file("s/step-200-k-2.safetensors")["w"], mean(run, [100, 200]))
    for step in (100, 200):
        save_file({"v": torch.ones(1)}, run / f"step_{step}.safetensors")
    code, _, complained = lawa("sweep", "run", "--k", "2", "--at", "200,500", "-o", "t")
    assert code == 1
    assert "step_100.safetensors" in complained
    assert "is missing" in complained


def test_what_is_evaluated_must_lie_here(run: Path, lawa: Lawa) -> None:
    Path("my_evaluator.py").write_text(EVALUATOR)
    words = ("--k", "2", "--evaluator", "my_evaluator:evaluate", "-o", "memory://out")
    code, _, complained = lawa("sweep", "run", *words)
    assert code == 2
    assert "local files" in complained


def test_a_sweep_writes_every_window(run: Path, lawa: Lawa) -> None:
    code, _, complained = lawa("sweep", "run", "--k", "2,3", "--at", "300,500", "-o", "s")
    assert code == 0, complained
    names = sorted(p.name for p in Path("s").iterdir())
    assert names == [f"step-{s}-k-{k}.safetensors" for s in (300, 500) for k in (2, 3)]
    made = load_file("s/step-300-k-3.safetensors")
    assert torch.equal(made["w"], mean(run, [100, 200, 300]))
    assert made["n"] == 300
    assert torch.equal(load_file("s/step-500-k-2.safetensors")["w"], mean(run, [400, 500]))


def test_a_sweep_goes_on_with_the_results_that_are_there(run: Path, lawa: Lawa) -> None:
    Path("my_evaluator.py").write_text(EVALUATOR)
    windows = ("--k", "2,3", "-o", "s")
    assert lawa("sweep", "run", *windows, "--to", 400)[0] == 0
    made = {path: path.stat().st_mtime_ns for path in Path("s").iterdir()}
    words = (*windows, "--evaluator", "my_evaluator:evaluate", "--no-raw")
    code, _, complained = lawa("sweep", "run", *words)
    assert code == 0, complained
    assert {path: path.stat().st_mtime_ns for path in made} == made
    assert len(list(Path("s").iterdir())) == 7
    for steps in ([100, 200], [400, 500], [300, 400, 500]):
        result = load_file(f"s/step-{steps[-1]}-k-{len(steps)}.safetensors")
        assert torch.equal(result["w"], mean(run, steps))
    rows = {(row["step"], row["k"]) for row in read_metrics(Path("metrics.jsonl"))}
    assert rows == {(s, k) for k in (2, 3) for s in range(100 * k, 600, 100)}


@pytest.mark.parametrize("change", ["input", "rule", "foreign"])
def test_a_sweep_refuses_results_of_something_else(run: Path, lawa: Lawa, change: str) -> None:
    words = ["--k", "2", "-o", "s"]
    assert lawa("sweep", "run", *words)[0] == 0
    if change == "input":
        later = Path("s/step-300-k-2.safetensors").stat().st_mtime + 1
        os.utime(run / "step_300.safetensors", (later, later))
    elif change == "foreign":
        save_file({"w": torch.ones(1)}, "s/step-300-k-2.safetensors")
    else:
        words += ["--coefficients", "annealing:linear"]
    before = {path: path.read_bytes() for path in Path("s").iterdir()}
    code, _, complained = lawa("sweep", "run", *words)
    assert code == 1
    assert "is not the mean of these checkpoints as they are now" in complained
    assert {path: path.read_bytes() for path in Path("s").iterdir()} == before


def test_a_stopped_sweep_evaluates_no_more(run: Path, tmp_path: Path) -> None:
    meter, seen = Meter(), list[float]()

    def evaluate(state: dict[str, torch.Tensor]) -> dict[str, float]:
        seen.append(float(state["w"].sum()))
        meter.stop()  # as Ctrl-C does
        return {"x": seen[-1]}

    plan, metrics = plan_sweep(run, [2]), tmp_path / "m.jsonl"
    with pytest.raises(Stopped):
        run_sweep(plan, evaluator=evaluate, metrics=str(metrics), meter=meter)
    assert len(seen) == len(read_metrics(metrics)) == 1
    run_sweep(plan, evaluator=lambda state: {"x": 0.0}, metrics=metrics)
    assert [row["step"] for row in read_metrics(metrics)] == [200, 300, 400, 500]


def test_a_sweep_plan(run: Path, lawa: Lawa) -> None:
    code, said, _ = lawa("sweep", "run", "--k", "2,3", "--evaluator", "x:y", "--dry-run")
    assert code == 0
    assert "k = 1, 2, 3" in said
    code, said, _ = lawa("sweep", "run", "--k", "2,3", "--dry-run", "--json")
    assert len(json.loads(said)["windows"]) == 4 + 3


def test_a_share_of_the_run(run: Path, lawa: Lawa) -> None:
    words = ["run", "--horizon", 0.5, "-o", "m.safetensors"]
    code, said, _ = lawa("average", *words, "--at", 400, "--dry-run")
    assert code == 0
    assert "2 checkpoints (uniform), the last 0.5 of the steps up to step 400" in said
    code, said, _ = lawa("average", *words, "--json")
    assert code == 0
    assert json.loads(said)["horizon"] == 0.5
    assert torch.equal(load_file("m.safetensors")["w"], mean(run, [300, 400, 500]))
    code, _, complained = lawa("average", *words, "--last", 2, "--overwrite")
    assert code == 2
    assert "--last 2 and --horizon 0.5" in complained


def test_a_share_may_be_a_fraction(run: Path, lawa: Lawa) -> None:
    """As in Python, where it is `horizon=1/3`."""
    words = ["run", "-o", "m", "--dry-run", "--horizon"]
    assert json.loads(lawa("average", *words, "1/3", "--json")[1])["horizon"] == 1 / 3
    assert "horizon = 0.5, 0.75, ending" in lawa("sweep", *words, "1/2,3/4")[1]
    for wrong in ("1/0", "a/b", "1/2/3", "1/"):
        for verb in ("average", "sweep"):
            code, _, complained = lawa(verb, *words, wrong)
            assert code == 2
            assert f"{wrong!r} is not a" in complained
    for wrong in ("3/2", "-1/4", "4/4", "0/3"):
        code, _, complained = lawa("average", *words, wrong)
        assert code == 2
        assert "between 0 and 1" in complained


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_an_average_among_the_checkpoints_is_noted(run: Path, lawa: Lawa, suffix: str) -> None:
    """It would be averaged a second time: most likely it was written into the run by mistake."""
    lawa("average", "run", "--last", 3, "-o", f"run/step_600.{suffix}")
    single = f"run/step_600.{suffix}"
    assert "made by lawa" not in lawa("average", single, "-o", "a.pt", "--dry-run")[1]
    complained = lawa("average", "run", "--last", 3, "-o", "m.safetensors")[2]
    assert f"averages made by lawa are among the checkpoints: step_600.{suffix}. If" in complained
    lawa("average", "run", "--last", 2, "-o", f"run/step_700.{suffix}")
    text = f"averages made by lawa are among the checkpoints: step_600.{suffix}, step_700.{suffix}."
    assert text in lawa("average", "run", "--last", 3, "-o", "n.safetensors")[2]
    assert "made by lawa" not in lawa("average", "run", "--last", 2, "-o", "o.safetensors")[2]


def test_uneven_steps_are_noted_where_they_matter(run: Path, lawa: Lawa) -> None:
    """The snapshots of a growing window are never evenly spaced, and a share does not need that."""
    (run / "step_300.safetensors").unlink()
    words = ["sweep", "run", "--at", 500, "--dry-run", "-o", "s", "--horizon", "0.9"]
    assert "uneven steps" not in lawa(*words)[1]
    assert "uneven steps" in lawa(*words, "--k", 2)[1]


def test_a_sweep_over_shares(run: Path, lawa: Lawa) -> None:
    Path("measures.py").write_text("def f(state):\n    return {'x': state['w'].sum().item()}\n")
    words = ["run", "--horizon", "0.5,0.9", "--k", 4, "--evaluator", "measures:f", "-o", "s"]
    code, said, _ = lawa("sweep", *words, "--dry-run")
    assert "k = 1, 4, horizon = 0.5, 0.9, ending at" in said
    code, said, complained = lawa("sweep", *words)
    assert code == 0, complained
    assert "horizon = 0.9 (k = 4)" in said
    rows = read_metrics(Path("metrics.jsonl"))
    assert {(r["step"], r["horizon"], r["k"]) for r in rows if "horizon" in r} == {
        (300, 0.5, 2), (400, 0.5, 2), (500, 0.5, 3),
        (200, 0.9, 2), (300, 0.9, 3), (400, 0.9, 4), (500, 0.9, 5),
    }  # fmt: skip
    assert len(rows) == 5 + 2 + 7
    made = load_file("s/step-500-horizon-0.5.safetensors")
    assert torch.equal(made["w"], mean(run, [300, 400, 500]))
    code, said, complained = lawa("sweep", *words)  # resumed: everything is known
    assert (code, said) == (0, "")
    for wrong, message in (
        (["--horizon", "0.1"], "fewer than two checkpoints"),
        (["--horizon", "2"], "between 0 and 1"),
        ([], "--k, --horizon, or both"),
    ):
        code, _, complained = lawa("sweep", "run", *wrong, "-o", "t")
        assert code == 2, complained
        assert message in complained


def test_more_checkpoints_than_files_may_be_open_at_first(tmp_path: Path) -> None:
    for step in range(100):
        save_file({"w": torch.full((3,), float(step))}, tmp_path / f"step-{step}.safetensors")
    out = tmp_path / "mean.safetensors"
    words = f"-m torch_lawa average {tmp_path} --last 100 -o {out}"
    limited = f"ulimit -Sn 64; exec {sys.executable} {words}"
    subprocess.run(["sh", "-c", limited], check=True, capture_output=True)
    assert load_file(out)["w"].tolist() == [49.5] * 3


def test_averaging_safetensors_imports_no_torch(run: Path) -> None:
    code = (
        "import sys\n"
        "from torch_lawa.cli.main import _run\n"
        "assert _run(['average', 'run', '--last', '2', '-o', 'm']) == 0\n"
        "assert not {'torch', 'rich', 'fsspec', 'safetensors'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))
