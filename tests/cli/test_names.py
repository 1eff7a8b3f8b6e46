"""Names from files and folders: any of them is read, and none controls the terminal."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from torch_lawa.checkpoints.storage.paths import parse_location
from torch_lawa.cli import main as cli
from torch_lawa.cli.output import shortened
from torch_lawa.errors import ConfigError

Lawa = Callable[..., tuple[int, str, str]]
NASTY = os.fsdecode(b"\xff\x1b[31m")  # not UTF-8, and red


@pytest.fixture
def lawa(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Lawa:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            cli.main([str(argument) for argument in arguments])
        assert isinstance(caught.value.code, int)
        shown = capsys.readouterr()
        for text in shown.out, shown.err:
            assert "\x1b" not in text
            assert "Traceback" not in text
        return caught.value.code, shown.out, shown.err

    return run


def write(path: Path, name: str, value: float, metadata: dict[str, str] | None = None) -> None:
    path.parent.mkdir(exist_ok=True)
    data = np.float32(value).tobytes()
    entry = {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}
    head = json.dumps({"__metadata__": metadata or {}, name: entry}).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + data)


def test_files_whose_names_are_not_utf_8(tmp_path: Path, lawa: Lawa) -> None:
    run = tmp_path / f"run{NASTY}"
    for step in 1, 2:
        write(run / f"{NASTY}step-{step}.safetensors", f"w{NASTY[1:]}", step)
    out = f"{NASTY}.safetensors"
    assert "\\x1b[31m" in lawa("inspect", run)[1]
    assert "\\x1b[31m" in lawa("average", run, "--last", 2, "-o", out, "--dry-run")[1]
    code, said, _ = lawa("average", run, "--last", 2, "-o", out)
    assert code == 0
    assert said.startswith("\\udcff\\x1b[31m.safetensors: the mean of 2")
    assert list(load_file(out).values()) == [1.5]
    assert json.loads(lawa("average", run, "--last", 2, "-o", out, "--overwrite", "--json")[1])
    assert lawa("inspect", out, "--tensors")[0] == 0
    assert lawa("sweep", run, "--k", 2, "-o", f"sweep{NASTY}")[0] == 0
    assert lawa("inspect", f"no{NASTY}")[0] == 1
    assert lawa("inspect", "a", "b", f"no{NASTY}")[0] == 2


def test_names_of_tensors(tmp_path: Path, lawa: Lawa) -> None:
    for name, value in ("", 1.0), ("n" * 100_000, 2.0):
        for step in 1, 2:
            write(tmp_path / "run" / f"step-{step}.safetensors", name, value * step)
        out = tmp_path / "mean.safetensors"
        assert lawa("average", "run", "--last", 2, "-o", out, "--overwrite")[0] == 0
        assert {k: v.item() for k, v in load_file(out).items()} == {name: 1.5 * value}
        assert lawa("inspect", "run/step-1.safetensors", "run/step-2.safetensors")[0] == 0
    write(tmp_path / "run" / "step-2.safetensors", "other", 1.0)
    code, _, complained = lawa("average", "run", "--last", 2, "-o", out, "--overwrite")
    assert code == 1
    assert len(complained) < 5000
    write(tmp_path / "bad.safetensors", "a\ud800", 1.0)
    code, _, complained = lawa("inspect", "bad.safetensors")
    assert (code, "not valid text" in complained) == (1, True)


def test_a_step_of_5000_digits(tmp_path: Path, lawa: Lawa) -> None:
    for name in "a", "b":
        write(tmp_path / f"{name}.safetensors", "w", 1.0, {"step": "9" * 5000})
    code, said, _ = lawa("inspect", "a.safetensors")
    assert (code, "Progress" in said) == (0, False)
    assert lawa("average", "a.safetensors", "b.safetensors", "-o", "m.safetensors")[0] == 0
    folder = tmp_path / "hf"
    folder.mkdir()
    save_file({"w": np.zeros(1)}, folder / "model.safetensors")
    for step, shown in ("9" * 5000, None), ("9" * 40, False), ("true", False), ("7", True):
        (folder / "trainer_state.json").write_text(f'{{"global_step": {step}}}')
        code, said, complained = lawa("inspect", "hf")
        if shown is None:
            assert (code, "trainer_state.json" in complained) == (1, True)
        else:
            assert (code, "step" in said) == (0, shown)


def test_weights_that_overflow(tmp_path: Path, lawa: Lawa) -> None:
    for name in "a", "b":
        write(tmp_path / f"{name}.safetensors", "w", 1.0)
    rule = ("--coefficients", "explicit:1e308,1e308")
    code, _, complained = lawa("average", "a.safetensors", "b.safetensors", "-o", "m", *rule)
    assert (code, "too large" in complained) == (2, True)


@pytest.mark.parametrize("url", ["async_wrapper://", "dir://", "nothing://a", "a\0b"])
def test_urls_that_fsspec_refuses(url: str) -> None:
    with pytest.raises(ConfigError):
        parse_location(url)


def test_a_long_message_keeps_both_ends() -> None:
    text = "a.pt: " + "x" * 100_000 + " is missing."
    assert shortened("short") == "short"
    assert len(shortened(text)) < 5000
    assert shortened(text).startswith("a.pt: x")
    assert shortened(text).endswith(" is missing.")
