"""The registry of formats: a format added with one entry is found, read, written and listed."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from torch_lawa.checkpoints.formats.base import Checkpoint, TensorSpec, TrainingProgress
from torch_lawa.checkpoints.formats.registry import (
    FORMATS,
    Format,
    FormatWriter,
    StagedValues,
    file_suffixes,
    format_titles,
    open_checkpoint,
    output_layouts,
    register_format,
)
from torch_lawa.checkpoints.formats.safetensors import SafetensorsFile
from torch_lawa.checkpoints.storage.paths import LocalPath, Location
from torch_lawa.cli.main import lawa as cli
from torch_lawa.errors import ConfigError
from torch_lawa.offline.average import average_checkpoints
from torch_lawa.offline.options import AverageOptions
from torch_lawa.offline.plan import plan_average

CODES = {np.dtype(np.float32): "F32", np.dtype(np.int64): "I64"}
Arrays = dict[str, np.ndarray]


class NpzFile(Checkpoint):
    """A toy format: arrays in a file of `np.savez`."""

    def __init__(self, location: Location) -> None:
        assert isinstance(location, LocalPath)
        with np.load(location.path) as found:
            self._arrays = {name: found[name] for name in found.files}
        self._made = str(self._arrays.pop("torch_lawa", ""))
        super().__init__(
            location=location,
            format="NumPy arrays",
            layout="single",
            tensors={n: TensorSpec(CODES[a.dtype], a.shape) for n, a in self._arrays.items()},
            metadata={"torch_lawa": self._made} if self._made else {},
            progress=TrainingProgress(),
        )

    def read(self, name: str, begin: int, end: int) -> np.ndarray:
        return self._arrays[name].reshape(-1).view(np.uint8)[begin:end]

    def file_of(self, name: str) -> Location:
        return self.location

    @property
    def files(self) -> list[Location]:
        return [self.location]

    def close(self) -> None:
        pass


def read_values(values: Path) -> Arrays:
    with SafetensorsFile(LocalPath(values)) as staged:
        dtypes = {code: dtype for dtype, code in CODES.items()}
        return {
            name: staged.read(name, 0, spec.nbytes).view(dtypes[spec.dtype]).reshape(spec.shape)
            for name, spec in staged.tensors.items()
        }


def write_npz(staged: StagedValues) -> None:
    with staged.target.open("wb") as file:
        np.savez(file, torch_lawa=staged.metadata["torch_lawa"], **read_values(staged.values))


@pytest.fixture
def npz() -> Iterator[Format]:
    yield register_format(
        Format(
            name="npz",
            title="NumPy file",
            description="arrays of np.savez",
            open=lambda location, key: NpzFile(location),
            suffixes=(".npz",),
            writer=FormatWriter(convert=write_npz),
        )
    )
    del FORMATS["npz"]


@pytest.fixture
def folder_format() -> Iterator[Format]:
    """The same, in folders with an `arrays.npz`."""

    def write(staged: StagedValues) -> None:
        np.savez(staged.target / "arrays.npz", **read_values(staged.values))

    yield register_format(
        Format(
            name="npz-folder",
            title="folder of arrays",
            description="folder with arrays of np.savez",
            open=lambda location, key: NpzFile(location.child("arrays.npz")),
            folder_files=("arrays.npz",),
            writer=FormatWriter(layouts=("arrays",), convert=write),
        )
    )
    del FORMATS["npz-folder"]


def make_run(run: Path, name: str = "step-{}.npz") -> list[Arrays]:
    made = []
    for step in (100, 200, 300):
        rng = np.random.default_rng(step)
        arrays = {"w": rng.standard_normal((3, 4)).astype(np.float32), "n": np.array([step])}
        path = run / name.format(step)
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, **arrays)
        made.append(arrays)
    return made


def mean(run: list[Arrays]) -> np.ndarray:
    return np.mean([arrays["w"].astype(np.float64) for arrays in run], axis=0).astype(np.float32)


def lawa(*arguments: object) -> Result:
    result = CliRunner().invoke(cli, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.usefixtures("npz")
def test_a_run_in_a_new_format_is_averaged_and_inspected(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (tmp_path / "run/notes.txt").touch()
    out = tmp_path / "mean.npz"
    lawa("average", tmp_path / "run", "--last", 2, "-o", out)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mean.npz", "run"]
    with np.load(out) as found:
        np.testing.assert_array_equal(found["w"], mean(run[-2:]))
        np.testing.assert_array_equal(found["n"], [300])
    said = json.loads(lawa("inspect", out, "--json").stdout)
    assert (said["format"], said["num_tensors"]) == ("NumPy arrays", 2)
    assert [each["step"] for each in said["provenance"]["inputs"]] == [200, 300]


@pytest.mark.usefixtures("npz")
def test_formats_convert_into_each_other(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    lawa("average", tmp_path / "run", "--last", 3, "-o", tmp_path / "mean")
    assert (tmp_path / "mean/model.safetensors").is_file()
    plan = lawa("average", tmp_path / "mean", "-o", tmp_path / "copy.npz", "--dry-run", "--json")
    assert json.loads(plan.stdout)["layout"]["kind"] == "npz"
    assert "NumPy file" in lawa("average", tmp_path / "mean", "-o", "x.npz", "--dry-run").stdout
    lawa("average", tmp_path / "mean", "-o", tmp_path / "copy.npz")
    with np.load(tmp_path / "copy.npz") as found:
        np.testing.assert_array_equal(found["w"], mean(run))


@pytest.mark.usefixtures("folder_format")
def test_a_new_format_of_folders(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "step-{}/arrays.npz")
    options = AverageOptions(layout="arrays")
    average_checkpoints(tmp_path / "run", tmp_path / "mean", last=2, options=options)
    assert [p.name for p in (tmp_path / "mean").iterdir()] == ["arrays.npz"]
    with open_checkpoint(LocalPath(tmp_path / "mean")) as found:
        np.testing.assert_array_equal(
            found.read("w", 0, 48).view(np.float32).reshape(3, 4), mean(run[-2:])
        )


def test_a_new_format_is_listed(npz: Format, folder_format: Format) -> None:
    assert file_suffixes()[-1] == ".npz"
    assert output_layouts()[-1] == "arrays"
    assert npz.title in format_titles()


@pytest.mark.parametrize(
    "clash",
    [{"name": "torch"}, {"suffixes": (".npz", ".ckpt")}, {"writer": FormatWriter(("sharded",))}],
)
def test_two_formats_cannot_claim_the_same(clash: dict[str, object]) -> None:
    how = {"name": "npz", "title": "", "description": "", "open": lambda *_: None, **clash}
    before = list(FORMATS)
    with pytest.raises(ConfigError, match="already belongs to"):
        register_format(Format(**how))  # type: ignore[arg-type]
    assert list(FORMATS) == before


def test_a_format_that_is_only_read(npz: Format, tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    FORMATS["npz"] = replace(npz, writer=None)
    with pytest.raises(ConfigError, match=r"mean\.npz: .*not written"):
        plan_average(tmp_path / "run", tmp_path / "mean.npz", last=2)
    plan = plan_average(tmp_path / "run", tmp_path / "mean.safetensors", last=2)
    assert plan.output.kind == "safetensors"
