"""Our reader and writer against the safetensors library, and against broken files."""

import contextlib
import json
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from torch_lawa.checkpoints.formats.safetensors import read_header
from torch_lawa.checkpoints.formats.safetensors_torch import load_tensors, save_tensors, spec_of
from torch_lawa.errors import FormatError

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def tensors() -> dict[str, torch.Tensor]:
    made = {str(d): (torch.rand(3, 5) * 3).to(d) for d in DTYPES}
    made |= {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "turned": torch.rand(2, 3).t(),
    }
    return made


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_tensors(path, tensors(), {"step": "12"})
    found = load_file(path)
    torch.manual_seed(0)
    for name, value in tensors().items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name].double(), value.double()), name
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"step": "12"}


def test_we_read_what_the_library_writes(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    made = {n: t.contiguous() for n, t in tensors().items()}
    save_file(made, path, metadata={"format": "pt"})
    header = read_header(path)
    assert header.metadata == {"format": "pt"}
    mapped = load_tensors(path, header)
    for name, spec in header.tensors.items():
        assert spec == spec_of(name, made[name].dtype, made[name].shape)
        assert torch.equal(mapped[name].double(), made[name].double())


def test_tied_tensors_are_written_once(tmp_path: Path) -> None:
    weight = torch.rand(1000)
    save_tensors(tmp_path / "a.safetensors", {"first": weight, "second": weight})
    assert list(read_header(tmp_path / "a.safetensors").tensors) == ["first"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_tensors(path, {"w": torch.ones(2)})
    with pytest.raises(FormatError, match=r"'z': safetensors has no code for torch.complex128"):
        save_tensors(path, {"z": torch.ones(2, dtype=torch.complex128)})
    assert load_file(path)["w"].tolist() == [1.0, 1.0]
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


def test_a_reader_of_the_old_file_is_not_disturbed(tmp_path: Path) -> None:
    """The new file takes the old one's place; nothing is written into it."""
    path = tmp_path / "a.safetensors"
    save_tensors(path, {"w": torch.ones(2)})
    before = path.read_bytes()
    with path.open("rb") as reader:
        save_tensors(path, {"w": torch.zeros(2)})
        assert reader.read() == before
    assert path.read_bytes() != before


def raw(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        raw({"w": ENTRY}, b"\0" * 8, length=2**63),
        raw({"w": ENTRY}, b"\0" * 7),
        raw({"w": ENTRY}, b"\0" * 9),
        raw(b"{broken", b""),
        raw([1, 2]),
        raw({"w": 3}),
        raw({"w": {**ENTRY, "dtype": "F99"}}, b"\0" * 8),
        raw({"w": {**ENTRY, "shape": [-2]}}, b"\0" * 8),
        raw({"w": {**ENTRY, "shape": [2.0]}}, b"\0" * 8),
        raw({"w": {**ENTRY, "shape": [3]}}, b"\0" * 8),
        raw({"w": {**ENTRY, "data_offsets": [8, 0]}}, b"\0" * 8),
        raw({"w": {**ENTRY, "data_offsets": [-8, 0]}}, b"\0" * 8),
        raw({"w": {**ENTRY, "data_offsets": ["0", "8"]}}, b"\0" * 8),
        raw({"w": ENTRY, "v": ENTRY}, b"\0" * 8),
        raw({"w": {**ENTRY, "data_offsets": [4, 12]}}, b"\0" * 12),
        raw({"__metadata__": [1], "w": ENTRY}, b"\0" * 8),
        raw({"w": {**ENTRY, "shape": [True, 2]}}, b"\0" * 8),
        raw({"w": {**ENTRY, "shape": [2**70]}}, b"\0" * 8),
        raw({"w": {**ENTRY, "dtype": ["F32"]}}, b"\0" * 8),
        raw(
            b'{"w":' + json.dumps(ENTRY).encode() + b',"w":' + json.dumps(ENTRY).encode() + b"}",
            b"\0" * 8,
        ),
        raw(b"[" * 100_000 + b"]" * 100_000),
    ],
)
def test_broken_files_are_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.safetensors"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"broken\.safetensors"):
        read_header(path)


@given(content=st.binary(max_size=200), flip=st.integers(0, 150), value=st.integers(0, 255))
def test_no_bytes_crash_the_reader(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, flip: int, value: int
) -> None:
    """Random bytes, and a good file with one byte changed: an answer or a FormatError."""
    good = bytearray(raw({"__metadata__": {"a": "b"}, "w": ENTRY}, b"\0" * 8))
    good[flip % len(good)] = value
    path = tmp_path_factory.mktemp("fuzz") / "f"
    for candidate in (content, bytes(good)):
        path.write_bytes(candidate)
        with contextlib.suppress(FormatError):
            read_header(path)


def test_a_name_that_appears_twice_is_found_in_linear_time(tmp_path: Path) -> None:
    entry = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    names = [*(f'"a{i}"' for i in range(60_000)), '"twice"', '"twice"']
    text = ("{" + ",".join(f"{name}:{entry}" for name in names) + "}").encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    began = time.process_time()
    with pytest.raises(FormatError, match="'twice' appears twice"):
        read_header(path)
    assert time.process_time() - began < 5.0  # 60 s when each name was counted


@pytest.mark.parametrize(
    "text",
    [
        '{"w":5,"w":ENTRY}',
        '{"w":ENTRY,"w":ENTRY}',
        '{"w":ENTRY,"\\u0077":ENTRY}',
        '{"w":{"dtype":"F16","dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        '{"w":{"dtype":"F32","shape":[3],"shape":[2],"data_offsets":[0,8]}}',
        '{"__metadata__":{"a":"b","a":"c"},"w":ENTRY}',
        '{"__metadata__":{},"__metadata__":{"a":"b"},"w":ENTRY}',
        '{"__metadata__":{"a":1,"b":2},"w":5,"w":5,"w":ENTRY}',  # as many strings as there may be
    ],
)
def test_no_name_appears_twice(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(raw(text.replace("ENTRY", json.dumps(ENTRY)).encode(), b"\0" * 8))
    with pytest.raises(FormatError, match="appears twice"):
        read_header(path)


@pytest.mark.parametrize("name", ["w", 'with "quotes"', "größe", "data_offsets"])
def test_names_of_any_characters(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.safetensors"
    made = {"__metadata__": {"number": 1}, name: {**ENTRY, "more": "dtype"}}
    path.write_bytes(raw(made, b"\0" * 8))
    assert list(read_header(path).tensors) == [name]


def test_equal_headers_are_parsed_once(tmp_path: Path) -> None:
    for name in "a", "b":
        save_tensors(tmp_path / name, {"w": torch.ones(3)})
    a, b = read_header(tmp_path / "a"), read_header(tmp_path / "b")
    assert a is b
    with (tmp_path / "b").open("ab") as file:
        file.write(b"more")
    with pytest.raises(FormatError, match="describes"):
        read_header(tmp_path / "b")


@pytest.mark.parametrize("shape", ["[true]", "[1.0]", "[1,1.0]", f"[{2**63}]", str([1] * 2000)])
def test_shapes_that_equal_valid_ones_are_refused(tmp_path: Path, shape: str) -> None:
    entry = '{"dtype":"F32","shape":%s,"data_offsets":[%d,%d]}'
    text = ('{"a":' + entry % ("[1]", 0, 4) + ',"b":' + entry % (shape, 4, 8) + "}").encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(FormatError, match="'b'"):
        read_header(path)


@pytest.mark.parametrize("name", ["__metadata__", "\ud800w"])
def test_names_that_cannot_be_read_back_are_not_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(FormatError, match="cannot be stored"):
        save_tensors(tmp_path / "a.safetensors", {name: torch.ones(3)}, {"step": "1"})
    assert not list(tmp_path.iterdir())
