"""The command itself: quick answers, exit codes, plain errors."""

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from torch_lawa import __version__
from torch_lawa.cli import main as cli
from torch_lawa.errors import ConfigError

PROBE = """
import sys
from torch_lawa.cli.main import main
try:
    main(sys.argv[1:])
finally:
    heavy = {"torch", "numpy", "rich", "matplotlib", "sklearn"} & set(sys.modules)
    print("heavy:", sorted(heavy), file=sys.stderr)
    print("plug-ins:", "importlib.metadata" in sys.modules, file=sys.stderr)
"""
LOOKING_FOR_PLUG_INS = ("--help", "demo", "train")


def exit_code(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["demo", "--help"],
        ["average", "--help"],
        ["sweep", "--help"],
        ["watch", "--help"],
        ["inspect", "--help"],
        ["train", "--help"],
        ["plan", "--help"],
        ["train", "cifar100-resnet34", "--help"],
    ],
)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments], capture_output=True, text=True, check=True
    )
    looks = arguments[0] in LOOKING_FOR_PLUG_INS
    assert done.stderr == f"heavy: []\nplug-ins: {looks}\n"


def test_help_names_every_verb_and_each_can_be_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["--help"]) == 0
    shown = capsys.readouterr().out
    context = click.Context(cli.lawa)
    for verb in cli.lawa.list_commands(context):
        command = cli.lawa.get_command(context, verb)
        assert command is not None
        said = re.escape(command.get_short_help_str(200))
        assert re.search(rf"^  {verb} +{said}$", shown, re.MULTILINE), verb


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["--version"]) == 0
    assert capsys.readouterr().out == f"lawa, version {__version__}\n"


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["demo", "--k", "0"], ["demo", "--epochs", "0"], ["--nonsense"]]
)
def test_a_mistake_on_the_command_line_is_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    output = tmp_path / "run"
    extra = ["-o", str(output)] if arguments[0] == "demo" else []
    assert exit_code([*arguments, *extra]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "Error: " in shown.err
    assert not output.exists()


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("k=0:\n  too few."), 2), (OSError("disk full"), 1)]
)
def test_an_error_is_one_line_and_2_for_a_bad_value(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(cli.lawa, "invoke", fail)
    assert exit_code(["demo"]) == code
    assert capsys.readouterr().err in {"Error: k=0: too few.\n", "Error: disk full\n"}


def test_a_system_error_names_the_file_as_the_user_did(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "out/mean.pt.0123456789abcdef.partial")

    monkeypatch.setattr(cli.lawa, "invoke", fail)
    assert exit_code(["average"]) == 1
    assert capsys.readouterr().err == "Error: out/mean.pt: Permission denied.\n"


def test_ctrl_c_is_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.lawa, "invoke", interrupt)
    assert exit_code(["demo"]) == 130
    assert capsys.readouterr().err.strip() == "Stopped."


def test_an_earlier_demo_is_not_replaced_unasked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "demo.json").write_text('{"command": "lawa demo", "seeds": [0]}')
    assert exit_code(["demo", "-o", str(tmp_path)]) == 1
    assert "--overwrite" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["demo.json"]


def test_another_run_is_never_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = tmp_path / "seed-0" / "metrics.jsonl"
    metrics.parent.mkdir()
    metrics.write_text("precious\n")
    assert exit_code(["demo", "-o", str(tmp_path), "--overwrite"]) == 1
    assert "holds seed-0" in capsys.readouterr().err
    assert metrics.read_text() == "precious\n"
