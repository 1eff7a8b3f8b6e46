"""`lawa inspect` as it is typed: exit codes, both outputs, no PyTorch where none is needed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from torch_lawa.cli import main as cli

PROBE = """
import sys
from torch_lawa.cli.main import main
try:
    main(sys.argv[1:])
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""


def lawa(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(["inspect", *map(str, arguments)])
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (100, 200):
        state = {f"w{i:02d}": torch.full((3,), float(step + i)) for i in range(12)}
        save_file(state, tmp_path / f"step_{step}.safetensors")
    return tmp_path


def test_one(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lawa(run / "step_100.safetensors") == 0
    short = capsys.readouterr().out
    assert "12 with 36 values" in short
    assert "w05" not in short
    assert lawa(run / "step_100.safetensors", "--tensors") == 0
    long = capsys.readouterr().out
    assert long.startswith(short)
    assert long.splitlines()[-1] == "F32    [3]     12 B  w11"
    assert lawa(run / "step_100.safetensors", "--tensors", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["tensors"]) == 12


def test_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lawa(run) == 0
    assert "2 checkpoints, oldest first (by step)" in capsys.readouterr().out
    assert lawa(run, "--json", "--tensors") == 0
    assert [c["step"] for c in json.loads(capsys.readouterr().out)["checkpoints"]] == [100, 200]


def test_two_that_differ_are_no_failure(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = run / "step_100.safetensors", run / "step_200.safetensors"
    assert lawa(*paths) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "  Different  12 tensors, in 36 values" in shown
    at = shown.index("Tensors that differ, largest difference first, 2 more with --tensors:")
    # 100 away from 100, 101, ...: relative to A the first is the worst
    assert [line.split()[-1] for line in shown[at + 2 :]] == [f"w{i:02d}" for i in range(10)]
    assert shown[at + 2].split() == ["3", "3", "1.00e+02", "1.00e+00", "w00"]
    assert max(map(len, shown[2:])) <= 80
    assert lawa(*paths, "--tensors") == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[-1] == "w11"
    assert lawa(*paths, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_differing"] == len(found["tensors"]) == 12
    assert found["max_abs"] == 100.0


def test_two_that_are_the_same(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "step_100.safetensors"
    assert lawa(path, path) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "Identical, bit for bit."


def test_the_key_of_a_pytorch_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {"net": {"w": torch.ones(2)}, "ema": {"w": torch.zeros(2)}}
    torch.save(state, tmp_path / "a.pt")
    assert lawa(tmp_path / "a.pt", tmp_path / "a.pt", "--key", "ema", "--json") == 0
    assert json.loads(capsys.readouterr().out)["identical"]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["nothing"], 1, "no such file or folder"),
        (["step_100.safetensors", "."], 2, "Give one of them"),
        ([], 2, "Missing argument"),
    ],
)
def test_mistakes(
    run: Path,
    arguments: list[str],
    code: int,
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(run)
    assert lawa(*arguments) == code
    shown = capsys.readouterr()
    assert says in shown.err
    assert shown.out == ""


@pytest.mark.parametrize("second", [[], ["step_200.safetensors"], ["--tensors"]])
def test_safetensors_need_no_pytorch(run: Path, second: list[str]) -> None:
    words = [str(run / word) if word.endswith(".safetensors") else word for word in second]
    done = subprocess.run(
        [sys.executable, "-c", PROBE, "inspect", str(run / "step_100.safetensors"), *words],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr == "False\n"
