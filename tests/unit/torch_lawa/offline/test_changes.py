"""Files that are written to, replaced or deleted while they are read; two that write one result."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from torch_lawa.errors import FormatError, OutputError
from torch_lawa.offline import average, sweep
from torch_lawa.offline.average import average_checkpoints, run_average
from torch_lawa.offline.options import AverageOptions
from torch_lawa.offline.plan import plan_average

OLD, NEW = np.full(1000, 1.0, np.float32), np.full(1000, 5.0, np.float32)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    for step, value in (1, OLD), (2, NEW):
        save_file({"w": value}, folder / f"step-{step}.safetensors")
        os.utime(folder / f"step-{step}.safetensors", (1_700_000_000, 1_700_000_000))
    return folder


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """Have something happen when all was read and nothing has its name yet."""

    def arrange(happen: Callable[[], Any]) -> None:
        for module, name in (average, "average_spans"), (sweep, "in_threads"):
            work = getattr(module, name)

            def worked(*args: Any, work: Any = work, **how: Any) -> Any:
                done = work(*args, **how)
                happen()
                return done

            monkeypatch.setattr(module, name, worked)

    return arrange


def write_in_place(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(np.float32(9).tobytes())


def test_written_to_while_read(run: Path, tmp_path: Path, meanwhile: Any) -> None:
    meanwhile(lambda: write_in_place(run / "step-1.safetensors"))
    out = tmp_path / "mean.safetensors"
    with pytest.raises(FormatError, match=r"step-1.*written to while"):
        average_checkpoints(run, out, last=2)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_written_to_during_a_sweep(run: Path, tmp_path: Path, meanwhile: Any) -> None:
    meanwhile(lambda: write_in_place(run / "step-2.safetensors"))
    with pytest.raises(FormatError, match=r"step-2.*written to while"):
        sweep.run_sweep(sweep.plan_sweep(run, [2]), output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def replace_it(run: Path) -> None:
    save_file({"w": NEW}, run / "new")
    os.replace(run / "new", run / "step-1.safetensors")


@pytest.mark.parametrize("act", [replace_it, lambda run: (run / "step-1.safetensors").unlink()])
def test_replaced_or_deleted_it_was_read_as_it_had_been(
    run: Path, tmp_path: Path, meanwhile: Any, act: Callable[[Path], None]
) -> None:
    meanwhile(lambda: act(run))
    average_checkpoints(run, tmp_path / "mean.safetensors", last=2)
    assert (load_file(tmp_path / "mean.safetensors")["w"] == 3.0).all()


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["mean.safetensors", "mean"])
def test_another_process_was_quicker(
    run: Path, tmp_path: Path, meanwhile: Any, name: str, overwrite: bool
) -> None:
    out = tmp_path / name
    theirs = out if out.suffix else out / "model.safetensors"

    def write_theirs() -> None:
        theirs.parent.mkdir(exist_ok=True)
        save_file({"theirs": OLD}, theirs)

    plan = plan_average(run, out, last=2, overwrite=overwrite)
    meanwhile(write_theirs)
    if overwrite:
        run_average(plan)
        assert (load_file(theirs)["w"] == 3.0).all()
    else:
        with pytest.raises(OutputError, match="another process"):
            run_average(plan)
        assert (load_file(theirs)["theirs"] == OLD).all()
    assert {p.name for p in tmp_path.iterdir()} == {"run", name}


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_device_or_a_link_to_nowhere_is_not_replaced(
    run: Path, tmp_path: Path, overwrite: bool
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link.safetensors").symlink_to("nowhere")
    for name in ("pipe", "link.safetensors"):
        with pytest.raises(OutputError, match="neither a file nor a folder"):
            plan_average(run, tmp_path / name, last=2, overwrite=overwrite)
    inside = run / "step-1.safetensors" / "deep" / "mean.safetensors"
    with pytest.raises(OutputError, match=r"step-1.safetensors is not a folder"):
        plan_average(run, inside, last=1, overwrite=overwrite)


def test_the_key_is_part_of_what_a_result_was_made_of(tmp_path: Path) -> None:
    for step in (1, 2):
        weights = {"model": {"w": torch.ones(2)}, "ema": {"w": torch.zeros(2)}}
        torch.save(weights, tmp_path / f"step-{step}.pt")
    out = tmp_path / "out"
    for _ in range(2):  # the second finds what the first made
        sweep.run_sweep(
            sweep.plan_sweep(tmp_path, [2], options=AverageOptions(key="ema")), output=out
        )
    with pytest.raises(OutputError, match="is not the mean of these checkpoints"):
        sweep.run_sweep(
            sweep.plan_sweep(tmp_path, [2], options=AverageOptions(key="model")), output=out
        )
    assert (load_file(out / "step-2-k-2.safetensors")["w"] == 0).all()
