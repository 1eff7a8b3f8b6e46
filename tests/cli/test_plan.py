"""`lawa plan` as it is typed: both outputs, exit codes, mistakes, and nothing heavy."""

import json
import subprocess
import sys
from typing import Any

import pytest

from torch_lawa import window_mean
from torch_lawa.cli import main as cli
from torch_lawa.cli import plan_text

PROBE = """
import sys
from torch_lawa.cli.main import main
try:
    main(sys.argv[1:])
finally:
    print(sorted({"torch", "numpy", "rich"} & set(sys.modules)), file=sys.stderr)
"""


def lawa(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(["plan", *arguments])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def parsed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert lawa(*arguments, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def row(text: str, label: str) -> list[str]:
    """The cells of the only line that begins with `label`."""
    (line,) = [line for line in text.splitlines() if line.strip().startswith(label)]
    return [cell.strip() for cell in line[44:].split("  ") if cell.strip()]


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert lawa("--params", "70e9", "--gpus", "512", "--nu", "100", "--step-seconds", "4") == 0
    shown = capsys.readouterr().out
    assert "70,000,000,000 parameters in float32, FSDP on 512 GPUs (64 nodes of 8)" in shown
    assert row(shown, "one snapshot ") == ["547 MB", "4.38 GB", "280 GB"]
    assert row(shown, "the window of 6") == ["3.28 GB", "26.2 GB", "1.68 TB"]
    assert row(shown, "averaging: staging buffer") == ["547 MB"]
    assert row(shown, "share of 1024 GiB") == ["2.8 %"]
    assert row(shown, "copy to RAM") == ["9.9 ms"]
    assert row(shown, "time between two snapshots") == ["6.67 min"]
    assert row(shown, "read the mean of 6") == ["71 ms"]
    assert row(shown, "time to write") == ["5.25 s"]
    assert shown.splitlines()[-1] == "FITS, with 83.2 GB per GPU left for activations."
    assert "--pcie-gbs               55 GB/s   H200, one GPU" in shown


@pytest.mark.parametrize(
    "arguments",
    [
        ["--params", "70e9", "--gpus", "512"],
        ["--params", "1T", "--gpus", "8192", "--store", "disk", "--nu", "1", "--step-seconds", "1"],
        ["--params", "7B", "--gpus", "8", "--sharding", "ddp", "--dtype", "bfloat16", "--k", "100"],
        ["--params", "400B", "--gpus", "8", "--k", "1000"],
        ["--params", "1.3B", "--gpus", "1", "--store", "device"],
    ],
)
def test_no_line_is_longer_than_a_terminal(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert lawa(*arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    table = lines[lines.index("") + 1 : lines.index("CONSTANTS")]
    assert not [line for line in table if line[43:45].strip()]  # no label runs into its numbers


def test_what_does_not_fit_says_why_and_what_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    disk = ["--params", "70B", "--gpus", "64", "--store", "disk"]
    assert lawa(*disk, "--nu", "1", "--step-seconds", "2") == 0
    shown = capsys.readouterr().out
    assert row(shown, "files: 6") == ["30.6 GB", "245 GB", "1.96 TB"]
    assert row(shown, "training waits") == ["5.08 s"]
    assert row(shown, "share of training") == ["72 %"]
    verdict = shown[shown.index("DOES NOT FIT") :].splitlines()
    assert verdict[1].startswith("- time: copying a snapshot takes 7.08 s")
    assert verdict[3:] == [
        "Any one of these options makes it fit:",
        *("  --store host", "  --store device", "  --nu 4 (or more)", "  --gpus 256"),
    ]


def test_without_nu_it_says_what_to_give(capsys: pytest.CaptureFixture[str]) -> None:
    disk = ["--params", "70B", "--gpus", "64", "--store", "disk"]
    assert lawa(*disk) == 0
    shown = capsys.readouterr().out
    assert "Snapshots must be at least 7.08 s apart" in " ".join(shown.split())
    assert lawa(*disk, "--step-seconds", "2") == 0
    assert row(capsys.readouterr().out, "smallest ν") == ["4 steps"]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = parsed(capsys, "--params", "70B", "--gpus", "512")
    assert (found["fits"], found["problems"], found["advice"]) == (True, [], [])
    assert found["run"]["params"] == 70 * 10**9
    assert found["run"]["num_nodes"] == 64
    assert found["cost"]["window"] == {
        "gpu": 3_281_250_000,
        "node": 26_250_000_000,
        "total": 1_680_000_000_000,
    }
    assert found["cost"]["wait_seconds"] is None
    pcie = next(c for c in found["constants"] if c["name"] == "pcie_gbs")
    assert (pcie["value"], pcie["record"]) == (55.0, "results/2026-11-15-gpu-h200")

    found = parsed(capsys, "--params", "400B", "--gpus", "8")
    assert found["fits"] is False
    assert [problem["kind"] for problem in found["problems"]] == ["run"]
    assert found["advice"] == ["--gpus 128"]


def test_every_constant_can_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    plain = ["--params", "7B", "--gpus", "8"]
    for c in parsed(capsys, *plain)["constants"]:
        value = 0.5 if c["name"] == "host_share" else 7.0
        given = parsed(capsys, *plain, f"--{c['name'].replace('_', '-')}", str(value))
        (changed,) = [g for g in given["constants"] if g["name"] == c["name"]]
        assert (changed["value"], changed["source"], changed["record"]) == (value, "given", None)


def test_a_small_machine_needs_no_gpus_per_node(capsys: pytest.CaptureFixture[str]) -> None:
    assert parsed(capsys, "--params", "1B", "--gpus", "2")["run"]["gpus_per_node"] == 2
    assert parsed(capsys, "--params", "1B", "--gpus", "16")["run"]["gpus_per_node"] == 8


def test_notes(capsys: pytest.CaptureFixture[str]) -> None:
    assert parsed(capsys, "--params", "1B", "--gpus", "8", "--k", "15")["notes"] == []
    (sliding,) = parsed(capsys, "--params", "1B", "--gpus", "8", "--k", "16")["notes"]
    assert "1.5 GB more per GPU" in sliding  # 125 M values: 8 bytes, and 4 of a snapshot
    (ddp,) = parsed(capsys, "--params", "1B", "--gpus", "8", "--sharding", "ddp")["notes"]
    assert "168 GB per node" in ddp


def test_sliding_begins_where_the_averager_begins() -> None:
    """The averager's own number is in a module that imports PyTorch, as a plan does not."""
    assert window_mean._SLIDING_FROM == plan_text._SLIDING_FROM


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--k", "0"], "k=0: give a whole number of at least 1"),
        (["--gpus", "12"], "not a multiple of gpus_per_node=8"),
        (["--gpus", "0"], "gpus=0"),
        (["--gpus-per-node", "3"], "not a multiple of gpus_per_node=3"),
        (["--params", "many"], "write it like 70e9"),
        (["--dtype", "bfloat16", "--storage-dtype", "float32"], "wider than the weights"),
        (["--dtype", "int4"], "choose one of 'float32'"),
        (["--store", "tape"], "choose one of 'host', 'device', 'disk'"),
        (["--sharding", "zero"], "choose one of 'fsdp', 'ddp'"),
        (["--disk-gbs", "0"], "disk_gbs=0.0: give a number of more than 0"),
        (["--nonsense"], "No such option"),
    ],
)
def test_a_mistake_says_what_to_change(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lawa("--params", "7B", "--gpus", "8", *arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert message in " ".join(shown.err.split())


def test_a_plan_loads_nothing_heavy() -> None:
    arguments = ["plan", "--params", "70e9", "--gpus", "512"]
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments], capture_output=True, text=True, check=True
    )
    assert done.stderr == "[]\n"
    assert "FITS" in done.stdout
