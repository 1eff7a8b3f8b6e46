"""Megatron's torch_dist folders, as megatron-core has written them: what is read and replaced."""

import argparse
import enum
import io
import json
import math
import shutil
import zipfile
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from support.megatron import unpack_run, write_chunks, write_torch_dist
from support.models import same_bits
from torch import Tensor

from torch_lawa import AverageOptions, average_checkpoints, inspect_checkpoint, sweep_checkpoints
from torch_lawa.checkpoints.find.discovery import find_checkpoints
from torch_lawa.checkpoints.formats.megatron import MegatronCheckpoint
from torch_lawa.checkpoints.formats.registry import open_checkpoint
from torch_lawa.checkpoints.formats.safetensors_torch import dtype_of
from torch_lawa.checkpoints.storage.paths import LocalPath
from torch_lawa.coefficients import Annealing
from torch_lawa.errors import ConfigError, FormatError
from torch_lawa.offline.plan import plan_average
from torch_lawa.offline.watch.watcher import watch_run
from torch_lawa.units import format_bytes

MASTERS = AverageOptions(key="masters")
RUNS = ["0.16.1", "0.9.0"]  # with masters by parameter; those of 0.9.0 are flattened


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("megatron")
    return {name: unpack_run(name, folder) for name in (*RUNS, "0.16.1-buckets")}


def read(folder: Path, key: str | None = None) -> dict[str, Tensor]:
    with open_checkpoint(LocalPath(folder), key=key) as opened:
        found = {}
        for name, spec in opened.tensors.items():
            data = bytearray(opened.read(name, 0, spec.nbytes).tobytes())
            found[name] = torch.frombuffer(data, dtype=dtype_of(spec.dtype)).view(spec.shape)
        return found


def items(folder: Path, checkpoint: MegatronCheckpoint) -> Iterator[tuple[str, int]]:
    """The file and position of every chunk of the tensors of a checkpoint."""
    for name in checkpoint.tensors:
        for chunk, _ in checkpoint.stored(name):
            yield chunk.file, chunk.offset


def archives(file: Path) -> Iterator[tuple[int, bytes]]:
    """The zips in a file, each with its position."""
    data = file.read_bytes()
    begin = 0
    while begin < len(data):
        end = data.index(b"PK\5\6", begin) + 22
        yield begin, data[begin:end]
        begin = end


def mean(tensors: list[Tensor]) -> Tensor:
    total = torch.stack([t.double() for t in tensors]).sum(0) / len(tensors)
    return total.to(tensors[0].dtype)


@pytest.mark.parametrize("name", RUNS)
def test_the_model_is_read_and_the_optimizer_is_not(runs: dict[str, Path], name: str) -> None:
    found = inspect_checkpoint(runs[name] / "iter_0000020")
    assert found.progress.step == 20
    assert found.layout == "megatron"
    assert {"embedding.word_embeddings.weight", "output_layer.weight"} < set(found.tensors)
    assert not [n for n in found.tensors if "optimizer" in n or "rng" in n or "extra" in n]
    assert {spec.dtype for spec in found.tensors.values()} == {"BF16"}
    assert any("masters" in note for note in found.notes)


@pytest.mark.parametrize("name", RUNS)
def test_masters_have_the_shapes_and_values_of_their_parameters(
    runs: dict[str, Path], name: str
) -> None:
    for step in (10, 20):
        folder = runs[name] / f"iter_{step:07d}"
        weights, masters = read(folder), read(folder, "masters")
        assert weights.keys() == masters.keys()
        for tensor, master in masters.items():
            assert master.dtype == torch.float32
            assert same_bits(master.bfloat16(), weights[tensor]), tensor


@given(st.data())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_cuts_of_flattened_masters(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    grid = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    local = data.draw(st.tuples(*(st.integers(1, 4) for _ in grid)))
    whole = torch.randn([g * n for g, n in zip(grid, local, strict=True)])
    flat, chunks = math.prod(local), {}
    for at in product(*map(range, grid)):
        box = tuple(slice(i * n, i * n + n) for i, n in zip(at, local, strict=True))
        shard = whole[box].reshape(-1)
        cuts = sorted({0, flat, *data.draw(st.lists(st.integers(0, flat), max_size=3))})
        for begin, end in pairwise(cuts):
            chunks[(*at, begin)] = shard[begin:end].clone().view(*(1 for _ in at), -1)
    folder = tmp_path_factory.mktemp("run") / "iter_0000010"
    zeros = {(0,) * whole.ndim: torch.zeros_like(whole, dtype=torch.bfloat16)}
    master = ((*grid, flat), chunks)
    tensors = {"decoder.w": (tuple(whole.shape), zeros), "optimizer.state.param.decoder.w": master}
    write_chunks(folder, tensors)
    assert same_bits(read(folder, "masters")["decoder.w"], whole)
    average_checkpoints([folder], folder.parent / "out", options=MASTERS)
    assert same_bits(read(folder.parent / "out", "masters")["decoder.w"], whole)
    assert same_bits(read(folder.parent / "out")["decoder.w"], whole.bfloat16())


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_values_are_those_that_pytorch_loads(runs: dict[str, Path]) -> None:
    import torch.distributed.checkpoint as dcp

    folder = runs["0.16.1"] / "iter_0000020"
    found = read(folder)
    state = {name: torch.zeros_like(t) for name, t in found.items()}
    dcp.load(state, checkpoint_id=folder)  # older versions of PyTorch have no `no_dist`
    for name, tensor in state.items():
        assert same_bits(found[name], tensor), name


@pytest.mark.parametrize("name", [*RUNS, "0.16.1-buckets"])
@pytest.mark.parametrize("key", [None, "masters"])
def test_only_averaged_values_differ_from_the_newest(
    runs: dict[str, Path], tmp_path: Path, name: str, key: str | None
) -> None:
    newest, out = runs[name] / "iter_0000020", tmp_path / "out"
    average_checkpoints(runs[name], out, last=2, options=AverageOptions(key=key))
    changed: set[tuple[str, int]] = set()
    for each in {key, None}:
        with MegatronCheckpoint(LocalPath(newest), key=each) as checkpoint:
            changed |= set(items(newest, checkpoint))
    names = {path.name for path in newest.iterdir()}
    assert {path.name for path in out.iterdir()} == names | {"lawa.json"}
    for file in names:
        if not file.endswith(".distcp"):
            assert (out / file).read_bytes() == (newest / file).read_bytes()
            continue
        pairs = zip(archives(newest / file), archives(out / file), strict=True)
        for (at, before), (_, after) in pairs:
            assert zipfile.ZipFile(io.BytesIO(after)).testzip() is None
            assert len(before) == len(after)
            assert before == after or (file, at) in changed
    raw = [read(runs[name] / f"iter_{step:07d}", key) for step in (10, 20)]
    made, weights = read(out, key), read(out)
    for tensor in made:
        assert same_bits(made[tensor], mean([r[tensor] for r in raw])), tensor
        if tensor in weights:
            assert same_bits(weights[tensor], made[tensor].bfloat16()), tensor
    if key is None and name in RUNS:
        assert all(
            same_bits(a, b)
            for a, b in zip(
                read(out, "masters").values(), read(newest, "masters").values(), strict=True
            )
        )


def test_a_plan_says_how_large_the_copy_is(runs: dict[str, Path], tmp_path: Path) -> None:
    plan = plan_average(runs["0.16.1"], tmp_path / "out", last=2)
    size = sum(path.stat().st_size for path in (runs["0.16.1"] / "iter_0000020").iterdir())
    assert f"a copy of the newest ({format_bytes(size)})" in str(plan)
    assert size > 2 * plan.bytes_written  # the optimizer


def test_masters_in_buckets_need_their_own_layout(runs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="layout megatron"):
        plan_average(runs["0.16.1-buckets"], tmp_path / "mean.safetensors", last=2, options=MASTERS)


def test_other_formats_from_masters(runs: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "mean.safetensors"
    average_checkpoints(runs["0.9.0"], out, last=2, options=MASTERS)
    raw = [read(runs["0.9.0"] / f"iter_{step:07d}", "masters") for step in (10, 20)]
    for name, tensor in load_file(out).items():
        assert same_bits(tensor, mean([r[name] for r in raw])), name
    average_checkpoints(
        runs["0.9.0"], tmp_path / "hf", last=2, options=AverageOptions(layout="single")
    )
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("change", [{"dtype": "float32"}, {"strip_prefix": "decoder."}])
def test_names_and_dtypes_stay(
    runs: dict[str, Path], tmp_path: Path, change: dict[str, str]
) -> None:
    options = AverageOptions(**change, include="decoder.*")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="keeps names and dtypes"):
        plan_average(runs["0.16.1"], tmp_path / "out", last=2, options=options)


def test_the_layout_needs_megatron_inputs(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "step-1.pt")
    with pytest.raises(ConfigError, match="layout megatron"):
        plan_average(
            [tmp_path / "step-1.pt"], tmp_path / "out", options=AverageOptions(layout="megatron")
        )


def test_excluded_tensors_are_those_of_the_newest(runs: dict[str, Path], tmp_path: Path) -> None:
    options = AverageOptions(exclude="embedding.*")
    average_checkpoints(runs["0.16.1"], tmp_path / "out", last=2, options=options)
    made, newest = read(tmp_path / "out"), read(runs["0.16.1"] / "iter_0000020")
    same = {name for name in made if same_bits(made[name], newest[name])}
    assert {name for name in made if name.startswith("embedding.")} <= same
    assert "output_layer.weight" not in same


def test_the_tracker_names_a_result_but_never_replaces_a_run(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    tracker = "latest_checkpointed_iteration.txt"
    out = tmp_path / "averaged"
    average_checkpoints(runs["0.16.1"], out / "iter_0000010", last=1, at=10)
    assert (out / tracker).read_text() == "10"
    average_checkpoints(runs["0.16.1"], out / "iter_0000020", last=2)
    assert (out / tracker).read_text() == "20"
    average_checkpoints(out, tmp_path / "plain", last=2)
    assert not (tmp_path / tracker).exists()
    run = shutil.copytree(runs["0.16.1"], tmp_path / "run")
    average_checkpoints(run, run / "iter_0000030", last=2)
    assert (run / tracker).read_text() == "20"


def test_checkpoints_after_the_tracker_are_unfinished(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    run = shutil.copytree(runs["0.16.1"], tmp_path / "run")
    shutil.copytree(run / "iter_0000020", run / "iter_0000030")
    found = find_checkpoints([run])
    assert found.numbers == [10, 20]
    assert any("iter_0000030" in note for note in found.notes)
    (run / "latest_checkpointed_iteration.txt").write_text("release")
    assert find_checkpoints([run]).numbers == [10, 20, 30]


def test_sweeps_read_the_model(runs: dict[str, Path]) -> None:
    rows = sweep_checkpoints(
        runs["0.16.1"], [1, 2], evaluator=lambda state: {"tensors": len(state)}
    )
    num = len(inspect_checkpoint(runs["0.16.1"] / "iter_0000010").tensors)
    assert [row["tensors"] for row in rows] == [num] * 3


def test_a_watch_writes_what_megatron_loads(runs: dict[str, Path], tmp_path: Path) -> None:
    run, out = shutil.copytree(runs["0.9.0"], tmp_path / "run"), tmp_path / "averaged"
    watch_run(run, out / "iter_{step:07}", k=2, settle=0, once=True, options=MASTERS)
    average_checkpoints(run, tmp_path / "expected", last=2, options=MASTERS)
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "20"
    for path in (tmp_path / "expected").iterdir():
        if path.name != "lawa.json":
            assert (out / "iter_0000020" / path.name).read_bytes() == path.read_bytes(), path.name


def test_unusable_folders_are_named(runs: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(runs["0.16.1"] / "iter_0000010", tmp_path / "iter_0000010")
    with pytest.raises(FormatError, match="key ema"):
        inspect_checkpoint(folder, key="ema")
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    with pytest.raises(FormatError, match="zarr"):
        inspect_checkpoint(folder)
    (folder / "metadata.json").write_text("{")
    with pytest.raises(FormatError, match=r"metadata\.json"):
        inspect_checkpoint(folder)
    (folder / ".metadata").unlink()
    with pytest.raises(FormatError, match="unfinished"):
        inspect_checkpoint(folder)


class Backend(enum.Enum):
    """Like the enums among the arguments of a training script."""

    FUSED = 1


class Attack:
    def __reduce__(self) -> tuple[object, ...]:
        return exec, ("raise SystemExit('executed')",)


@pytest.mark.parametrize("argument", [Backend.FUSED, Attack()], ids=["enum", "attack"])
def test_the_iteration_is_found_beside_objects_of_any_class(
    argument: object, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    write_torch_dist(folder, {"w": torch.ones(2)}, 30)
    arguments = argparse.Namespace(backend=argument)
    torch.save({"args": arguments, "iteration": 30}, folder / "common.pt")
    assert inspect_checkpoint(folder).progress.step == 30


def test_without_an_optimizer_there_are_no_masters(tmp_path: Path) -> None:
    write_torch_dist(tmp_path / "iter_0000010", {"decoder.w": torch.ones(2)}, 10)
    with pytest.raises(FormatError, match="no float32 masters"):
        inspect_checkpoint(tmp_path / "iter_0000010", key="masters")


def test_metadata_of_somebody_else(tmp_path: Path) -> None:
    write_torch_dist(tmp_path / "iter_0000010", {"decoder.w": torch.ones(2)}, 10)
    (tmp_path / "iter_0000010/metadata.json").write_text('{"author": "me"}')
    assert inspect_checkpoint(tmp_path / "iter_0000010", key=".").layout == "distributed"


@pytest.mark.parametrize("n", range(2, 33))
def test_1_sqrt_weights_are_those_of_nvidias_tool(n: int) -> None:
    # Megatron-LM's tools/checkpoint/weighted_merge.py, --merge-style minus-sqrt
    curve = [1 - math.sqrt(i / n) for i in range(n)]
    theirs = [0.0] + [curve[i] - curve[i + 1] for i in range(1, n - 1)] + [curve[-1]]
    theirs[0] = 1 - sum(theirs)
    ours = Annealing("1-sqrt").weights(n)
    for a, b in zip(ours.numerators, theirs, strict=True):
        assert abs(a / ours.divisor - b) <= 2**-53
