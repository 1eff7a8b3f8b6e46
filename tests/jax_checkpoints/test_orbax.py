"""Orbax checkpoints, written and restored by Orbax itself: every layout, shardings, all of a state.

`make test-jax` runs this in an environment with JAX; elsewhere it is skipped.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("orbax.checkpoint", reason="make test-jax has an environment with Orbax")

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from torch_lawa import AverageOptions, average_checkpoints, inspect_checkpoint, watch_run
from torch_lawa.checkpoints.formats import orbax_write
from torch_lawa.checkpoints.formats.registry import open_checkpoint
from torch_lawa.checkpoints.storage.paths import LocalPath
from torch_lawa.errors import ConfigError, FormatError, LawaError

Tree = dict[str, Any]
LAYOUTS = {
    "ocdbt": {},
    "ocdbt zarr3": {"use_zarr3": True},
    "files": {"use_ocdbt": False},
    "files zarr3": {"use_ocdbt": False, "use_zarr3": True},
}
STEPS = [100, 200, 300]


def sharded(array: jax.Array, *axes: str | None) -> jax.Array:
    mesh = Mesh(np.array(jax.devices()).reshape(2, -1), ("x", "y"))
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))


def params_of(seed: int) -> Tree:
    def normal(*shape: int) -> np.ndarray:
        return np.random.default_rng([seed, *shape]).normal(size=shape)

    return {
        "rows": sharded(jnp.asarray(normal(64, 32), jnp.float32), "x"),
        "columns": sharded(jnp.asarray(normal(6, 8), jnp.bfloat16), None, "y"),
        "both": sharded(jnp.asarray(normal(4, 4, 3), jnp.float32), "x", "y"),
        "layers": [{"w": jnp.asarray(normal(5), jnp.float16)}, {"w": jnp.asarray(normal(7))}],
        "a.b": {"c/d": jnp.float32(normal(1)[0])},
        "count": jnp.arange(3) + seed,
    }


def state_of(seed: int) -> Tree:
    params = params_of(seed)
    return {
        "params": params,
        "opt_state": [None, {"mu": jax.tree.map(lambda x: x + 1, params)}, {}],
        "step": seed,
        "key": jax.random.key(seed),
        "note": f"seed {seed}",
    }


def manager(folder: Path, layout: str = "ocdbt", **options: Any) -> ocp.CheckpointManager:
    return ocp.CheckpointManager(
        folder,
        item_handlers=ocp.PyTreeCheckpointHandler(**LAYOUTS[layout]),
        options=ocp.CheckpointManagerOptions(**options),
    )


def save(run: Path, layout: str = "ocdbt", **options: Any) -> list[Tree]:
    states = [state_of(step) for step in STEPS]
    with manager(run, layout, **options) as writer:
        for step, state in zip(STEPS, states, strict=True):
            writer.save(step, args=ocp.args.PyTreeSave(state))
    return states


def same(found: Any, expected: Any) -> None:
    """Equal trees, bit for bit."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = (jax.random.key_data(x) if _is_key(x) else x for x in (a, b))
        assert np.asarray(a).dtype == np.asarray(b).dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def mean(trees: list[Tree]) -> Tree:
    """In float64, rounded once; integers of the newest."""

    def of(*leaves: Any) -> np.ndarray:
        arrays = [np.asarray(leaf) for leaf in leaves]
        if not jnp.issubdtype(arrays[0].dtype, jnp.floating):
            return arrays[-1]
        total = sum(array.astype(np.float64) for array in arrays)
        return np.asarray(total / len(arrays)).astype(arrays[0].dtype)

    return jax.tree.map(of, *trees)


@pytest.fixture(autouse=True)
def _nothing_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_orbax_restores_the_average_in_place_of_the_newest(layout: str, tmp_path: Path) -> None:
    states = save(tmp_path / "run", layout)
    average_checkpoints(tmp_path / "run", tmp_path / "mean" / "300", last=3)
    with manager(tmp_path / "mean", layout) as reader, manager(tmp_path / "run", layout) as old:
        assert reader.all_steps() == [300]
        found, newest = reader.restore(300), old.restore(300)
    same(found["params"], mean([state["params"] for state in states]))
    same({**found, "params": None}, {**newest, "params": None})
    assert found["note"] == "seed 300"
    made = inspect_checkpoint(tmp_path / "mean" / "300")
    assert made.provenance is not None
    assert [each["step"] for each in made.provenance["inputs"]] == STEPS


@pytest.mark.parametrize("layout", LAYOUTS)
def test_safetensors_have_a_map_of_the_keys(layout: str, tmp_path: Path) -> None:
    states = save(tmp_path / "run", layout)
    average_checkpoints(tmp_path / "run", tmp_path / "mean.safetensors", last=3)
    found = load_file(tmp_path / "mean.safetensors")
    paths = json.loads(inspect_checkpoint(tmp_path / "mean.safetensors").metadata["key_map"])
    expected = {"params": mean([state["params"] for state in states])}
    assert paths.keys() == found.keys()
    for name, array in found.items():
        leaf: Any = expected
        for key in paths[name]:
            leaf = leaf[key]
        same(array, leaf)


def test_the_bits_are_those_of_other_formats(tmp_path: Path) -> None:
    states = save(tmp_path / "run")
    names = {"rows": "rows", "layers.0.w": "w"}
    for step, state in zip(STEPS, states, strict=True):
        params = {"rows": state["params"]["rows"], "w": state["params"]["layers"][0]["w"]}
        arrays = {name: np.array(array) for name, array in params.items()}
        save_file(arrays, tmp_path / f"step-{step}.safetensors")
    options = AverageOptions(coefficients="exponential:0.7", include=list(names))
    average_checkpoints(tmp_path / "run", tmp_path / "a.safetensors", last=3, options=options)
    others = sorted(tmp_path.glob("step-*.safetensors"))
    plain = AverageOptions(coefficients="exponential:0.7")
    average_checkpoints(others, tmp_path / "b.safetensors", options=plain)
    ours, theirs = load_file(tmp_path / "a.safetensors"), load_file(tmp_path / "b.safetensors")
    same({names[name]: array for name, array in ours.items()}, theirs)


@settings(max_examples=25)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    chunk=st.integers(1, 64),
    zarr3=st.booleans(),
    target=st.sampled_from([1, 64, 1 << 23]),
)
def test_ranges_of_chunked_arrays(
    shape: list[int], chunk: int, zarr3: bool, target: int, tmp_path_factory: Any
) -> None:
    folder = tmp_path_factory.mktemp("chunks")
    array = np.random.default_rng(0).normal(size=shape)
    saved = ocp.SaveArgs(chunk_byte_size=8 * chunk)
    handler = ocp.PyTreeCheckpointHandler(use_zarr3=zarr3)
    with ocp.Checkpointer(handler) as writer:
        writer.save(folder / "one", args=ocp.args.PyTreeSave({"w": array}, {"w": saved}))
        writer.save(folder / "two", args=ocp.args.PyTreeSave({"w": 3 * array}, {"w": saved}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch_lawa.checkpoints.formats.orbax._ROWS", target)
        with open_checkpoint(LocalPath(folder / "one")) as opened:
            raw = array.tobytes()
            for begin, end in ((0, len(raw)), (len(raw) // 3, len(raw) // 2), (8, 8)):
                assert opened.read("w", begin, end).tobytes() == raw[begin:end]
        average_checkpoints([folder / "one", folder / "two"], folder / "mean")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        same(np.asarray(reader.restore(folder / "mean")["w"]), (array + 3 * array) / 2)


def test_another_dtype(tmp_path: Path) -> None:
    states = save(tmp_path / "run", "ocdbt zarr3")
    options = AverageOptions(dtype="bfloat16")
    average_checkpoints(tmp_path / "run", tmp_path / "mean" / "300", last=3, options=options)
    with manager(tmp_path / "mean", "ocdbt zarr3") as reader:
        found = reader.restore(300)["params"]
    assert found["rows"].dtype == jnp.bfloat16
    trees = [{"rows": np.asarray(s["params"]["rows"], np.float64)} for s in states]
    same(found["rows"], mean(trees)["rows"].astype(jnp.bfloat16))


def test_items_metrics_and_a_key(tmp_path: Path) -> None:
    states = [state_of(step) for step in STEPS]
    with ocp.CheckpointManager(
        tmp_path / "run", options=ocp.CheckpointManagerOptions(best_fn=lambda m: m["loss"])
    ) as writer:
        for step, state in zip(STEPS, states, strict=True):
            items = {
                "state": ocp.args.PyTreeSave(state),
                "ema": ocp.args.StandardSave({"params": state["params"]}),
                "config": ocp.args.JsonSave({"width": 8}),
            }
            metrics = {"loss": 1 / step}
            writer.save(step, args=ocp.args.Composite(**items), metrics=metrics)
    with pytest.raises(FormatError, match=r"--key.*'state\.params'"):
        average_checkpoints(tmp_path / "run", tmp_path / "mean" / "300", last=3)
    options = AverageOptions(key="state.params")
    average_checkpoints(tmp_path / "run", tmp_path / "mean" / "300", last=3, options=options)
    with ocp.CheckpointManager(tmp_path / "mean") as reader:
        restored = reader.restore(
            300,
            args=ocp.args.Composite(
                state=ocp.args.PyTreeRestore(),
                ema=ocp.args.StandardRestore(),
                config=ocp.args.JsonRestore(),
            ),
        )
        assert reader.metrics(300) == {"loss": 1 / 300}
    same(restored.state["params"], mean([state["params"] for state in states]))
    same(restored.ema["params"], states[-1]["params"])
    assert restored.config == {"width": 8}


def test_watch_follows_a_run_that_deletes_checkpoints(tmp_path: Path) -> None:
    run, said = tmp_path / "run", []
    states = [state_of(step) for step in STEPS]
    with manager(run, max_to_keep=1) as writer:
        for step, state in zip(STEPS, states, strict=True):
            writer.save(step, args=ocp.args.PyTreeSave(state))
            writer.wait_until_finished()
            watch_run(run, tmp_path / "mean", k=2, once=True, settle=0, on_message=said.append)
            if step == 200:
                (tmp_path / "mean" / "notes.txt").write_text("mine")
    assert [path.name for path in run.iterdir()] == ["300"]
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        found = reader.restore(tmp_path / "mean" / "default")["params"]
    same(found, mean([state["params"] for state in states[1:]]))
    assert "step 300: added (2 of 2)" in said
    assert (tmp_path / "mean" / "notes.txt").read_text() == "mine"


def test_no_average_imports_jax(tmp_path: Path) -> None:
    save(tmp_path / "run")
    code = (
        "import sys; from torch_lawa import average_checkpoints\n"
        "average_checkpoints(sys.argv[1], sys.argv[2], last=3)\n"
        "assert not {'jax', 'orbax', 'flax'} & set(sys.modules)\n"
    )
    subprocess.run(
        [sys.executable, "-c", code, tmp_path / "run", tmp_path / "mean"], check=True, timeout=60
    )


@pytest.mark.parametrize("layout", ["files", "files zarr3"])
def test_a_missing_chunk_is_no_zero(layout: str, tmp_path: Path) -> None:
    save(tmp_path / "run", layout)
    chunk = next(
        path
        for path in (tmp_path / "run" / "200" / "default" / "params.rows").rglob("*")
        if path.is_file() and path.name not in (".zarray", "zarr.json")
    )
    chunk.unlink()
    with pytest.raises(FormatError, match=r"200/default.*'rows'"):
        average_checkpoints(tmp_path / "run", tmp_path / "mean", last=3)
    assert not (tmp_path / "mean").exists()


@pytest.mark.parametrize("lost", ["manifest.ocdbt", "ocdbt.process_0", "_METADATA"])
def test_missing_parts_are_errors(lost: str, tmp_path: Path) -> None:
    save(tmp_path / "run")
    path = tmp_path / "run" / "200" / "default" / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(LawaError, match="200"):
        average_checkpoints(tmp_path / "run", tmp_path / "mean", last=3)
    assert not (tmp_path / "mean").exists()


@pytest.mark.parametrize("size", [None, 0, 100])
def test_other_arrays_of_the_newest_may_be_damaged(size: int | None, tmp_path: Path) -> None:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as writer:
        big = {"params": {"w": np.ones(3)}, "opt_state": np.random.default_rng(0).normal(size=999)}
        for name in ("one", "two"):
            writer.save(tmp_path / name, args=ocp.args.PyTreeSave(big))
    largest = max((tmp_path / "two").rglob("d/*"), key=lambda path: path.stat().st_size)
    largest.unlink() if size is None else os.truncate(largest, size)
    average_checkpoints([tmp_path / "one", tmp_path / "two"], tmp_path / "mean.safetensors")
    with pytest.raises(FormatError, match="two: cannot be copied"):
        average_checkpoints([tmp_path / "one", tmp_path / "two"], tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


def test_links_to_files_elsewhere_are_not_copied(tmp_path: Path) -> None:
    save(tmp_path / "run")
    (tmp_path / "secret").write_text("mine")
    (tmp_path / "run" / "300" / "link").symlink_to(tmp_path / "secret")
    average_checkpoints(tmp_path / "run", tmp_path / "mean", last=3)
    assert not (tmp_path / "mean" / "link").exists()


def test_a_failure_while_writing_leaves_the_older_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = save(tmp_path / "run")
    average_checkpoints(tmp_path / "run", tmp_path / "mean", last=3)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device", str(tmp_path / "mean"))

    monkeypatch.setattr(orbax_write, "_write_array", fail)
    with pytest.raises(OSError, match="No space"):
        average_checkpoints(tmp_path / "run", tmp_path / "mean", last=2, overwrite=True)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        found = reader.restore(tmp_path / "mean" / "default")
    same(found["params"], mean([state["params"] for state in states]))


@pytest.mark.parametrize("commits", [0, 1])
def test_a_killed_process_leaves_the_older_result(commits: int, tmp_path: Path) -> None:
    states = save(tmp_path / "run")
    run, out = tmp_path / "run", tmp_path / "mean"
    average_checkpoints(run, out, last=3)
    code = (
        "import os, signal, sys\n"
        "from torch_lawa import average_checkpoints\n"
        "from torch_lawa.checkpoints.formats import orbax_write\n"
        "commit, left = orbax_write._Database.commit, int(sys.argv[3])\n"
        "def killed(self):\n"
        "    global left\n"
        "    left -= 1\n"
        "    commit(self) if left >= 0 else os.kill(os.getpid(), signal.SIGKILL)\n"
        "orbax_write._Database.commit = killed\n"
        "average_checkpoints(sys.argv[1], sys.argv[2], last=2, overwrite=True)\n"
    )
    command = [sys.executable, "-c", code, run, out, str(commits)]
    assert subprocess.run(command, timeout=60).returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob("mean.*.partial"))) == 1
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        same(reader.restore(out / "default")["params"], mean([s["params"] for s in states]))
        average_checkpoints(run, out, last=2, overwrite=True)
        same(reader.restore(out / "default")["params"], mean([s["params"] for s in states[1:]]))


def test_arrays_that_are_not_included_are_those_of_the_newest(tmp_path: Path) -> None:
    states = save(tmp_path / "run")
    options = AverageOptions(include="rows")
    average_checkpoints(tmp_path / "run", tmp_path / "mean", last=3, options=options)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        found = reader.restore(tmp_path / "mean" / "default")["params"]
    rows = mean([{"rows": state["params"]["rows"]} for state in states])
    same(found, {**states[-1]["params"], **rows})


def test_names_are_kept_in_an_orbax_folder(tmp_path: Path) -> None:
    save(tmp_path / "run")
    options = AverageOptions(include="layers.*", strip_prefix="layers.")
    with pytest.raises(ConfigError, match="--strip-prefix"):
        average_checkpoints(tmp_path / "run", tmp_path / "mean", last=3, options=options)


def test_the_tree_of_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = save(tmp_path / "run")
    average_checkpoints(tmp_path / "run", tmp_path / "averaged.safetensors", last=3)
    guide = Path(__file__).parents[2] / "docs" / "guides" / "offline.md"
    block = guide.read_text().split("## JAX")[1].split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    made: Tree = {}
    exec(block, made)
    expected = mean([state["params"] for state in states])
    layers = made["tree"]["params"].pop("layers")
    same(layers, dict(enumerate(expected.pop("layers"))))
    same(made["tree"]["params"], expected)


def test_a_run_of_two_processes(tmp_path: Path) -> None:
    program = Path(__file__).with_name("two_processes.py")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, program, port, tmp_path / "run"]
    writers = [subprocess.Popen([*command, rank]) for rank in ("0", "1")]
    try:
        assert [writer.wait(timeout=120) for writer in writers] == [0, 0]
    finally:
        for writer in writers:
            writer.kill()
    assert (tmp_path / "run" / "2" / "default" / "ocdbt.process_1").is_dir()
    average_checkpoints(tmp_path / "run", tmp_path / "mean.safetensors", last=2)
    rows = np.arange(64, dtype=np.float32).reshape(8, 8)
    found = load_file(tmp_path / "mean.safetensors")
    same(found, {"columns": -1.5 * rows, "rows": 1.5 * rows})
