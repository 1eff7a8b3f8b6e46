"""Distributed checkpoints that are broken or lie: a FormatError that names file and tensor."""

import contextlib
import pickle
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import patched, read_all
from support.distributed import cut_up, save_shards, sharded
from torch.distributed.checkpoint.metadata import Metadata

from torch_lawa.checkpoints.formats.base import TensorSpec
from torch_lawa.checkpoints.formats.dcp import DistributedCheckpoint
from torch_lawa.checkpoints.formats.dcp_chunks import Chunk, ChunkedTensor, find_problem
from torch_lawa.checkpoints.storage.paths import LocalPath
from torch_lawa.errors import FormatError


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    tensors, boxes = sharded()
    folder = tmp_path_factory.mktemp("good") / "a"
    paths = {name: ("model", name) for name in tensors}
    save_shards(folder, tensors, boxes, paths)
    return folder


def rewrite(good: Path, to: Path, change: Callable[[Metadata], None]) -> Path:
    shutil.copytree(good, to)
    metadata = pickle.loads((to / ".metadata").read_bytes())
    change(metadata)
    (to / ".metadata").write_bytes(pickle.dumps(metadata))
    return to


def part_of(metadata: Metadata, name: str, at: int = 0) -> Any:
    return metadata.state_dict_metadata[name].chunks[at]


def info_of(metadata: Metadata, name: str) -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == name)


def set_info(**values: object) -> Callable[[Metadata], None]:
    return lambda metadata: vars(info_of(metadata, "uneven")).update(values)


def set_chunk(at: int, **values: object) -> Callable[[Metadata], None]:
    return lambda metadata: vars(part_of(metadata, "uneven", at)).update(values)


def drop_chunk(metadata: Metadata) -> None:
    del metadata.state_dict_metadata["uneven"].chunks[0]


def drop_storage(metadata: Metadata) -> None:
    for index in [index for index in metadata.storage_data if index.fqn == "uneven"]:
        del metadata.storage_data[index]


def swap_items(metadata: Metadata) -> None:
    vars(info_of(metadata, "uneven")).update(vars(info_of(metadata, "columns")))


def set_type(metadata: Metadata) -> None:
    metadata.state_dict_metadata["uneven"].properties.dtype = torch.float64


CHANGES: dict[str, tuple[Callable[[Metadata], None], str]] = {
    "hole": (drop_chunk, r"\.metadata: tensor 'uneven': 20 of its 35 values are in no chunk"),
    "overlap": (set_chunk(1, offsets=torch.Size([0, 0])), r"'uneven': the chunks .* overlap"),
    "beyond": (set_chunk(1, sizes=torch.Size([4, 5])), r"'uneven': the chunk .* exceeds"),
    "other dimensions": (set_chunk(1, sizes=torch.Size([15])), r"'uneven': .* dimensions"),
    "unknown place": (drop_storage, r"does not say where 'uneven' at \(0, 0\) is stored"),
    "another's item": (swap_items, r"__0_0\.distcp: .*'uneven' is F32\[5, 1\], expected F32\[4"),
    "another dtype": (set_type, r"distcp: .*'uneven' is F32\[4, 5\], expected F64\[4, 5\]"),
    "absolute": (set_info(relative_path="/etc/passwd"), r"'uneven' .*in '/etc/passwd'"),
    "above": (set_info(relative_path="a/../../b"), r"'uneven'.*in the folder"),
    "windows": (set_info(relative_path="..\\b"), r"'uneven'"),
    "no text": (set_info(relative_path=3), r"'uneven'"),
    "missing": (set_info(relative_path="__7_0.distcp"), r"__7_0\.distcp: does not exist.*'uneven'"),
    "folder": (set_info(relative_path="."), r"'uneven'"),
    "negative": (set_info(offset=-5), r"'uneven'"),
    "too long": (set_info(length=10**9), r"__0_0\.distcp: 'uneven' is at 0 to 1000000000"),
    "too short": (set_info(length=100), r"__0_0\.distcp: .* 'uneven'"),
    "elsewhere": (set_info(offset=1), r"__0_0\.distcp: .* 'uneven'"),
    "nothing": (set_info(length=0), r"__0_0\.distcp: .* 'uneven'"),
    "transformed": (set_info(transform_descriptors=["stream.zstd/1"]), r"'uneven' is stored compr"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_lies_are_refused_by_file_and_tensor(tmp_path: Path, good: Path, kind: str) -> None:
    change, message = CHANGES[kind]
    folder = rewrite(good, tmp_path / "bad", change)
    with pytest.raises(FormatError, match=message):
        DistributedCheckpoint(LocalPath(folder)).read("uneven", 0, 140)


def test_broken_metadata_is_refused(tmp_path: Path, good: Path) -> None:
    text = (good / ".metadata").read_bytes()
    shutil.copytree(good, tmp_path / "bad")
    canary = tmp_path / "canary"
    attack = f"cos\nsystem\n(Vtouch {canary}\ntR.".encode()
    for content in (b"", b"}.", text[:-40], pickle.dumps({"model": 3}), pickle.dumps([1])):
        (tmp_path / "bad" / ".metadata").write_bytes(content)
        with pytest.raises(FormatError, match=r"bad/\.metadata: "):
            DistributedCheckpoint(LocalPath(tmp_path / "bad"))
    (tmp_path / "bad" / ".metadata").write_bytes(attack)
    with pytest.raises(FormatError, match=r"bad/\.metadata: refers to os\.system.* not executed"):
        DistributedCheckpoint(LocalPath(tmp_path / "bad"))
    assert not canary.exists()
    with pytest.raises(FormatError, match=r"/\.metadata: does not exist"):
        DistributedCheckpoint(LocalPath(tmp_path))


@pytest.mark.parametrize(
    "path",
    [(), ["model"], ("model", None), ("model", "uneven"), ("model", "uneven", "x"), ("model",)],
)
def test_broken_paths_are_refused(tmp_path: Path, good: Path, path: object) -> None:
    folder = rewrite(good, tmp_path / "bad", lambda m: m.planner_data.update(whole=path))
    with pytest.raises(FormatError, match=r"\.metadata: .*'whole'"):
        DistributedCheckpoint(LocalPath(folder))


def test_truncated_files_are_refused(tmp_path: Path, good: Path) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(good, folder)
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        content = (good / name).read_bytes()
        for part in range(20):
            (folder / name).write_bytes(content[: len(content) * part // 20])
            with pytest.raises(FormatError, match=rf"cut/{name}: "):
                read_all(DistributedCheckpoint(LocalPath(folder)))
        (folder / name).write_bytes(content)
    (folder / "__1_0.distcp").unlink()
    with pytest.raises(FormatError, match=r"cut/__1_0\.distcp: does not exist"):
        DistributedCheckpoint(LocalPath(folder))


@settings(max_examples=80)
@given(
    file=st.sampled_from([".metadata", "__0_0.distcp"]),
    changes=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=4),
)
def test_no_bytes_crash_the_reader(
    tmp_path_factory: pytest.TempPathFactory,
    good: Path,
    file: str,
    changes: list[tuple[float, int]],
) -> None:
    folder = tmp_path_factory.mktemp("fuzz") / "a"
    shutil.copytree(good, folder)
    content = (folder / file).read_bytes()
    for location, value in changes:
        content = patched(content, int(location * (len(content) - 1)), bytes([value]))
    (folder / file).write_bytes(content)
    with contextlib.suppress(FormatError):
        read_all(DistributedCheckpoint(LocalPath(folder)))


def test_an_overlap_with_a_long_chunk_is_seen() -> None:
    """A column; then its neighbour in rows, of which one lies on the column."""
    starts = [(0, 0), (0, 1), (1, 1), (2, 1), (2, 0)]
    chunks = [Chunk(at, (1, 1) if n else (4, 1), "f", 0, 1) for n, at in enumerate(starts)]
    assert find_problem((4, 2), chunks) == "the chunks at (0, 0) and (2, 0) overlap"
    chunks[-1] = Chunk((3, 1), (1, 1), "f", 0, 1)
    assert find_problem((4, 2), chunks) is None


@settings(max_examples=300)
@given(data=st.data(), moved=st.booleans())
def test_problems_of_chunks_are_those_of_counting(data: st.DataObject, moved: bool) -> None:
    """Every value once, counted one by one; a box that is moved leaves as much as it hides."""
    shape = tuple(data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3)))
    boxes = cut_up(shape, data)
    if moved:
        _, sizes = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        room = zip(shape, sizes, strict=True)
        boxes.append((tuple(data.draw(st.integers(0, n - m)) for n, m in room), sizes))
    count = np.zeros(shape, dtype=int)
    for starts, sizes in boxes:
        count[tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))] += 1
    chunks = [Chunk(starts, sizes, "f", 0, 1) for starts, sizes in boxes]
    assert (find_problem(shape, chunks) is None) == bool((count == 1).all())


class Loaded:
    """Stands for a stored chunk whose values are all 1."""

    def fill(self, out: Any, _first: tuple[int, ...]) -> None:
        out += 1


@pytest.mark.parametrize("regular", [True, False])
def test_many_chunks_in_linear_time(regular: bool) -> None:
    """24 x 24 x 24 of them took 23 s to check; each box looked at all of them."""
    grid = [(x, y, z) for x in range(24) for y in range(24) for z in range(24)]
    chunks = [Chunk(at, (1, 1, 1), "f", 0, 1) for at in grid]
    if not regular:
        joined = Chunk((0, 0, 0), (2, 1, 1), "f", 0, 1)
        chunks = [joined, *(chunk for chunk in chunks if chunk.starts[1:] != (0, 0))]
        chunks += [Chunk((x, 0, 0), (1, 1, 1), "f", 0, 1) for x in range(2, 24)]
    began = time.process_time()
    assert find_problem((24, 24, 24), chunks) is None
    assert "in no chunk" in (find_problem((24, 24, 24), chunks[:-1]) or "")
    twice = [*chunks[:-2], chunks[-1], chunks[-1]]
    assert find_problem((24, 24, 24), twice) is not None
    assert time.process_time() - began < 5.0
    loads: list[Chunk] = []

    def load(chunk: Chunk) -> Any:
        loads.append(chunk)
        return Loaded()

    tensor = ChunkedTensor(TensorSpec("U8", (24, 24, 24)), tuple(chunks), load)
    out = np.zeros((2, 3, 4), np.uint8)
    tensor.fill(out, (0, 0, 0))
    assert (out == 1).all()
    assert len(loads) == (24 if regular else 23)
    near = tensor._index.near((5, 6, 7), (6, 7, 9))
    assert len(list(near)) <= (2 if regular else 3 * 24 * 24)


def test_cut_along_many_dimensions() -> None:
    """Checking would take a time exponential in their number."""
    ends = [Chunk((i,) * 20, (1,) * 20, "f", 0, 1) for i in range(2)]
    assert "20 dimensions" in (find_problem((2,) * 20, ends) or "")
