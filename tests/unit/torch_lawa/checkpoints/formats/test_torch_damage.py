"""Files of `torch.save` that are broken, lie or mean harm: a FormatError, and nothing runs."""

import argparse
import contextlib
import io
import pickle
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import patched, read_all, write_zip
from support.models import small_net

from torch_lawa.checkpoints.formats.torch_file import TorchFile
from torch_lawa.checkpoints.formats.torch_pickle import archive as torch_archive
from torch_lawa.checkpoints.formats.torch_pickle import state_dicts as nested
from torch_lawa.checkpoints.storage.paths import LocalPath
from torch_lawa.errors import FormatError


def tensor_pickle(
    offset: int = 0,
    size: str = "(I4\nt",
    stride: str = "(I1\nt",
    pid: str = "(Vstorage\nctorch\nFloatStorage\nV0\nVcpu\nI4\nt",
) -> bytes:
    """`{"w": tensor}` as torch pickles it, with any numbers."""
    rebuild = f"ctorch._utils\n_rebuild_tensor_v2\n({pid}QI{offset}\n{size}{stride}I00\n}}tR"
    return f"}}Vw\n{rebuild}s.".encode()


DATA = {"data/0": np.arange(4, dtype=np.float32).tobytes()}


def test_the_handmade_file_is_good(tmp_path: Path) -> None:
    found = TorchFile(LocalPath(write_zip(tmp_path / "a.pt", tensor_pickle(), DATA)))
    assert found.read("w", 4, 12).view(np.float32).tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    "content",
    [
        tensor_pickle(offset=1),
        tensor_pickle(offset=-1),
        tensor_pickle(offset=2**62),
        tensor_pickle(size="(I5\nt"),
        tensor_pickle(size="(I-4\nt"),
        tensor_pickle(size="(F4.0\nt"),
        tensor_pickle(size="(I01\nt"),
        tensor_pickle(size="(I4\nI1\nt"),
        tensor_pickle(size=f"(I{2**63}\nt", stride="(I0\nt"),
        tensor_pickle(size="(I1048576\nI1048576\nI1048576\nI4\nt", stride="(I0\nI0\nI0\nI0\nt"),
        tensor_pickle(size="(" + "I1\n" * 40 + "t", stride="(" + "I1\n" * 40 + "t"),
        tensor_pickle(stride="(I2\nt"),
        tensor_pickle(stride="(I-1\nt"),
        tensor_pickle(stride=f"(I{2**61}\nt"),
        tensor_pickle(size="N"),
        tensor_pickle(pid="(Vstorage\nctorch\nFloatStorage\nV1\nVcpu\nI4\nt"),
        tensor_pickle(pid="(Vstorage\nctorch\nFloatStorage\nI0\nVcpu\nI4\nt"),
        tensor_pickle(pid="(Vmodule\nctorch\nFloatStorage\nV0\nVcpu\nI4\nt"),
        tensor_pickle(pid="(Vstorage\ncargparse\nNamespace\nV0\nVcpu\nI4\nt"),
        tensor_pickle(pid="(Vstorage\nVtorch.FloatStorage\nV0\nVcpu\nI4\nt"),
        tensor_pickle(pid="(Vstorage\nt"),
        tensor_pickle(pid="I0\n"),
        tensor_pickle(pid="]"),
        tensor_pickle(pid="(" * 50 + "t" * 50),
        tensor_pickle(pid="cos\nsystem\n"),
        b"}Vw\nctorch._utils\n_rebuild_tensor_v2\n(I1\nI0\n)))I00\n}tRs.",
        b"}Vw\nctorch._utils\n_rebuild_parameter\n(I1\nI0\n}tRs.",
        b"}Vw\nctorch._tensor\n_rebuild_from_type_v2\n(cos\nsystem\ntRs.",
        b"}Vw\nctorch._tensor\n_rebuild_from_type_v2\n(cbuiltins\ngetattr\nctorch\nTensor\n)}tRs.",
        b"",
        b"}",
        b"\0" * 50,
        b"]" * 1000 + b".",
        b"}q\0Vw\nh\0s.",
        b"}q\0Vmodel\nh\0s.",
    ],
)
def test_lies_about_tensors_are_refused(tmp_path: Path, content: bytes) -> None:
    write_zip(tmp_path / "broken.pt", content, DATA)
    with pytest.raises(FormatError, match=r"broken\.pt"):
        TorchFile(LocalPath(tmp_path / "broken.pt"))


def test_a_dict_in_itself_and_dicts_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nested, "_MAX_NAMES", 1000)
    path = tmp_path / "broken.pt"
    tensor = tensor_pickle()[4:-2]
    write_zip(path, b"}Vmodel\n}q\0Vw\n" + tensor + b"sVx\nh\0ss.", DATA)
    with pytest.raises(FormatError, match=r"broken\.pt: .* nested too deeply"):
        TorchFile(LocalPath(path))
    # Thirty dicts, each twice in the next: a thousand million names.
    twice = b"}q\0Vw\n" + tensor + b"s0"
    for n in range(30):
        twice += b"}Va\nh%csVb\nh%csq%c0" % (n, n, n + 1)
    write_zip(path, twice + b"}Vmodel\nh\x1es.", DATA)
    with pytest.raises(FormatError, match=r"broken\.pt: more than 1000 names"):
        TorchFile(LocalPath(path))


def test_a_tensor_of_another_class_is_refused(tmp_path: Path) -> None:
    args = tensor_pickle()[4:-2].split(b"_rebuild_tensor_v2\n")[1].removesuffix(b"R")
    for kind, fine in ((b"ctorch\nTensor\n", True), (b"cargparse\nNamespace\n", False)):
        call = b"(ctorch._utils\n_rebuild_tensor_v2\n" + kind + args + b"}tR"
        content = b"}Vw\nctorch._tensor\n_rebuild_from_type_v2\n" + call + b"s."
        location = LocalPath(write_zip(tmp_path / "a.pt", content, DATA))
        if fine:
            assert TorchFile(location).read("w", 4, 8).view(np.float32) == 1.0
        else:
            with pytest.raises(FormatError, match=r"tensor 'w' is rebuilt as argparse\.Names"):
                TorchFile(location)


def test_a_large_pickle_is_not_even_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_archive, "MAX_PICKLE", 100)
    write_zip(tmp_path / "a.pt", tensor_pickle(), DATA)
    with pytest.raises(FormatError, match=r"a\.pt: data\.pkl in it is too large"):
        TorchFile(LocalPath(tmp_path / "a.pt"))


@pytest.mark.parametrize("where", ["weights", "hyper-parameters", "persistent id", "class"])
def test_hostile_files_are_refused_and_nothing_runs(tmp_path: Path, where: str) -> None:
    canary = tmp_path / "canary"
    call = f"cos\nsystem\n(Vtouch {canary}\ntR".encode()
    tensor = tensor_pickle()
    content = {
        "weights": b"}Vw\n" + call + b"s.",
        "hyper-parameters": b"}Vhyper_parameters\n}Vx\n]" + call + b"ass" + tensor[1:],
        "persistent id": tensor_pickle(pid="(Vstorage\n" + call.decode() + "V0\nVcpu\nI4\nt"),
        "class": b"}Vx\ncargparse\nNamespace\n)\x81}V__class__\n" + call + b"sbs" + tensor[1:],
    }[where]
    write_zip(tmp_path / "bad.pt", content, DATA)
    with pytest.raises(FormatError, match=r"bad\.pt: refers to os\.system, .* was not executed"):
        TorchFile(LocalPath(tmp_path / "bad.pt"))
    assert not canary.exists()
    data = zipfile.ZipFile(tmp_path / "bad.pt").read("top/data.pkl")
    with contextlib.suppress(Exception):
        Trusting(io.BytesIO(data)).load()
    assert canary.exists(), "the file would not have done harm elsewhere either"


class Trusting(pickle.Unpickler):
    def persistent_load(self, pid: object) -> object:
        return pid


def test_a_pickled_model_is_refused_with_the_way_out(tmp_path: Path) -> None:
    torch.save(small_net(), tmp_path / "a.pt")
    with pytest.raises(FormatError, match=r"refers to torch\.nn\.modules.*model\.state_dict"):
        TorchFile(LocalPath(tmp_path / "a.pt"))


def test_zips_that_lie_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    good = write_zip(path, tensor_pickle(), DATA).read_bytes()
    with zipfile.ZipFile(path) as archive:
        first, second = archive.infolist()
        directory = archive.start_dir
    entry = good.index(b"PK\1\2", directory + 4)  # of data/0
    lies = {
        "signature": patched(good, second.header_offset, b"XX"),
        "name": patched(good, second.header_offset + 30, b"X"),
        "length of the name": patched(good, second.header_offset + 26, b"\xff\xff"),
        "extra that pushes the data out": patched(good, second.header_offset + 28, b"\x01\0"),
        "offset": patched(good, entry + 42, first.header_offset.to_bytes(4, "little")),
        "offset beyond": patched(good, entry + 42, b"\xff\xff\xff\x00"),
        "sizes": patched(good, entry + 20, (2000).to_bytes(4, "little") * 2),
        "compressed size": patched(good, entry + 20, b"\x01"),
        "compressed": patched(good, entry + 10, b"\x08"),
        "encrypted": patched(good, entry + 8, b"\x01"),
        "offset of the pickle": patched(good, directory + 42, b"\x05"),
        "size of the pickle": patched(good, directory + 20, b"\xff\xff\xff\x7f" * 2),
    }
    for kind, content in lies.items():
        path.write_bytes(content)
        with pytest.raises(FormatError, match=r"a\.pt: "):
            TorchFile(LocalPath(path)).read("w", 0, 16)
            pytest.fail(kind)
    write_zip(path, tensor_pickle(), DATA, zipfile.ZIP_DEFLATED)
    with pytest.raises(FormatError, match=r"a\.pt: the entry 'top/data.pkl' is compressed"):
        TorchFile(LocalPath(path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with zipfile.ZipFile(path, "w") as archive:
            for name in ("a/data.pkl", "a/data/0", "a/data/0"):
                archive.writestr(name, tensor_pickle())
    with pytest.raises(FormatError, match=r"a\.pt: .*an entry twice"):
        TorchFile(LocalPath(path))
    for names in ([], ["x"], ["data.pkl"], ["a/b/data.pkl"], ["a/data.pkl", "b/data.pkl"]):
        with zipfile.ZipFile(path, "w") as archive:
            for name in names:
                archive.writestr(name, b"}.")
        with pytest.raises(FormatError, match=r"a\.pt: "):
            TorchFile(LocalPath(path))


def test_a_wrong_checksum_is_not_looked_at(tmp_path: Path) -> None:
    """PyTorch may be told not to compute them."""
    path = tmp_path / "a.pt"
    torch.save({"w": torch.rand(2)}, path)
    good = path.read_bytes()
    at = good.rindex(b"PK\1\2", 0, good.index(b"a/data.pkl", good.index(b"PK\1\2")))
    path.write_bytes(patched(good, at + 16, b"\1\2\3\4"))
    assert set(TorchFile(LocalPath(path)).tensors) == {"w"}


def test_truncated_files_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "cut.pt"
    torch.save(small_net().state_dict(), path)
    good = path.read_bytes()
    for part in range(20):
        path.write_bytes(good[: len(good) * part // 20])
        with pytest.raises(FormatError, match=r"cut\.pt: "):
            TorchFile(LocalPath(path))


GOOD = io.BytesIO()
torch.save({"model": {"w": torch.arange(6.0).view(2, 3).t()}, "args": argparse.Namespace()}, GOOD)


@settings(max_examples=150)
@given(
    content=st.binary(max_size=100),
    changes=st.lists(
        st.tuples(st.integers(0, len(GOOD.getvalue()) - 1), st.integers(0, 255)), max_size=4
    ),
    cut=st.integers(0, len(GOOD.getvalue())),
)
def test_no_bytes_crash_the_reader(
    tmp_path_factory: pytest.TempPathFactory,
    content: bytes,
    changes: list[tuple[int, int]],
    cut: int,
) -> None:
    """Random bytes, a good file with some changed, and one cut: an answer or a FormatError."""
    path = tmp_path_factory.mktemp("fuzz") / "f.pt"
    changed = bytearray(GOOD.getvalue())
    for location, value in changes:
        changed[location] = value
    for candidate in (content, b"PK\3\4" + content, bytes(changed), bytes(changed[:cut])):
        path.write_bytes(candidate)
        with contextlib.suppress(FormatError):
            read_all(TorchFile(LocalPath(path)))


def test_a_pickle_with_every_byte_changed(tmp_path: Path) -> None:
    """The pickle is small beside the rest of the file, so each of its bytes has a turn."""
    path = tmp_path / "f.pt"
    good = GOOD.getvalue()
    begin = good.index(b"\x80\x02")
    end = good.index(b"PK\7\10", begin)
    for at in range(begin, end):
        for value in (0x28, 0x72, good[at] ^ 1):
            path.write_bytes(patched(good, at, bytes([value])))
            with contextlib.suppress(FormatError):
                read_all(TorchFile(LocalPath(path)))


def test_an_expanded_tensor_does_not_claim_what_no_file_has(tmp_path: Path) -> None:
    small = write_zip(
        tmp_path / "a.pt", tensor_pickle(size="(I1000\nI4\nt", stride="(I0\nI1\nt"), DATA
    )
    with TorchFile(LocalPath(small)) as found:
        assert found.read("w", 15_984, 16_000).view(np.float32).tolist() == [0.0, 1.0, 2.0, 3.0]
    large = write_zip(
        tmp_path / "b.pt", tensor_pickle(size="(I262144\nI262144\nt", stride="(I0\nI0\nt"), DATA
    )
    with pytest.raises(FormatError, match=r"claim 275 GB.*'w'.*contiguous"):
        TorchFile(LocalPath(large))


def test_a_long_key_is_not_multiplied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One key of 1 MiB over 20,000 tensors took more than 6 GB."""
    monkeypatch.setattr(nested, "_MAX_TEXT", 10_000)
    torch.save({"model": {"k" * 90: {str(i): torch.ones(1) for i in range(100)}}}, tmp_path / "a")
    assert len(TorchFile(LocalPath(tmp_path / "a")).tensors) == 100
    torch.save({"model": {"k" * 900: {str(i): torch.ones(1) for i in range(100)}}}, tmp_path / "b")
    with pytest.raises(FormatError, match="characters"):
        TorchFile(LocalPath(tmp_path / "b"))
