"""Our reader of `torch.save` files against `torch.load`, against broken files and hostile ones."""

import argparse
import io
import itertools
import math
import subprocess
import sys
import tracemalloc
import types
import warnings
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import assert_holds, raw, write_zip
from support.models import small_net
from torch import Tensor, nn

from torch_lawa.checkpoints.formats.base import TrainingProgress
from torch_lawa.checkpoints.formats.registry import open_checkpoint
from torch_lawa.checkpoints.formats.torch_file import TorchFile
from torch_lawa.checkpoints.formats.torch_pickle import strided
from torch_lawa.checkpoints.storage.paths import LocalPath, parse_location
from torch_lawa.errors import FormatError
from torch_lawa.mean.kernels_native import native_library

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.complex64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
]  # fmt: skip


def save(path: Path, made: object, **kwargs: Any) -> TorchFile:
    torch.save(made, path, **kwargs)
    return TorchFile(LocalPath(path))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    made = {
        "w": (torch.rand(3, 5) * 3).to(dtype),
        "scalar": torch.ones((), dtype=dtype),
        "empty": torch.empty(0, 3, dtype=dtype),
        "turned": (torch.rand(4, 3) * 3).to(dtype).t(),
    }
    found = save(tmp_path / "a.pt", made)
    assert_holds(found, torch.load(tmp_path / "a.pt"))
    assert (found.format, found.layout, found.notes, found.key) == (
        "PyTorch file",
        "single",
        (),
        "",
    )
    assert found.files == [found.location] == [found.file_of("w")]


@pytest.mark.skipif(native_library() is None, reason="files are read, not mapped")
def test_tensors_are_views_of_the_file(tmp_path: Path) -> None:
    found = save(tmp_path / "a.pt", {"w": torch.arange(1000.0)})
    piece = found.read("w", 8, 800)
    assert not piece.flags.owndata
    assert not piece.flags.writeable
    found.close()
    assert piece.view(np.float32).tolist() == list(range(2, 200))


def test_a_model_with_parameters_and_buffers(tmp_path: Path) -> None:
    model = small_net()
    assert_holds(save(tmp_path / "a.pt", model.state_dict()), model.state_dict())
    named = dict(model.named_parameters())
    named["0.weight"].note = "an attribute"  # type: ignore[attr-defined]
    marked = torch.rand(2)
    marked.note = "another"  # type: ignore[attr-defined]
    made = {**named, "marked": marked, "buffer": nn.Buffer(torch.rand(2))}
    assert_holds(save(tmp_path / "b.pt", made), made)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_other_pickle_protocols(tmp_path: Path, protocol: int) -> None:
    made = small_net().state_dict()
    found = save(tmp_path / "a.pt", {"state_dict": made, "x": {b"\xff"}}, pickle_protocol=protocol)
    assert_holds(found, made)


def strided_tensors() -> dict[str, Tensor]:
    base = torch.arange(120.0).view(4, 5, 6)
    return {
        "transposed": base.permute(2, 0, 1),
        "sliced": base[1:3, ::2, 1:5:3],
        "expanded": torch.arange(3.0)[:, None].expand(3, 50),
        "expanded in front": torch.arange(3.0).expand(7, 2, 3),
        "one value": torch.tensor(2.5).expand(3, 4),
        "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "diagonal": torch.arange(16.0).view(4, 4).diagonal(),
        "windows": torch.arange(10.0).unfold(0, 4, 1),
        "inside": torch.arange(10.0)[3:7],
        "one row": base[:1].transpose(0, 2),
        "many dimensions": torch.arange(2.0**10).view((2,) * 10).permute(*range(9, -1, -1)),
    }


def test_tensors_that_do_not_lie_in_order(tmp_path: Path) -> None:
    for name, tensor in strided_tensors().items():
        assert_holds(save(tmp_path / "a.pt", {name: tensor}), {name: tensor})


def test_strided_values_fetched_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strided, "_MAX_VIEW", 16)
    test_tensors_that_do_not_lie_in_order(tmp_path)


@given(data=st.data())
def test_any_strides(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    tensor = torch.arange(math.prod(shape), dtype=torch.int16).view(shape)
    tensor = tensor.permute(*data.draw(st.permutations(range(len(shape)))))
    cuts = [slice(data.draw(st.integers(0, n)), n, data.draw(st.integers(1, 3))) for n in shape]
    tensor = tensor[tuple(cuts)]
    found = save(tmp_path_factory.mktemp("s") / "a.pt", {"w": tensor})
    begin = data.draw(st.integers(0, tensor.nbytes))
    end = data.draw(st.integers(begin, tensor.nbytes))
    assert found.read("w", begin, end).tobytes() == raw(tensor)[begin:end]


@pytest.mark.skipif(native_library() is None, reason="files are read, not mapped")
def test_a_piece_of_a_strided_tensor_takes_little_memory(tmp_path: Path) -> None:
    found = save(tmp_path / "a.pt", {"w": torch.ones(2000, 1000).t()})
    tracemalloc.start()
    try:
        piece = found.read("w", 4000, 44_000)
        assert piece.view(np.float32).tolist() == [1.0] * 10_000
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_what_is_fetched_together_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strided, "_MAX_VIEW", 100)
    data = np.arange(20 * 30, dtype=np.uint16)
    asked: list[int] = []

    def view(begin: int, end: int) -> np.ndarray:
        asked.append(end - begin)
        return data.view(np.uint8)[begin:end]

    out = np.empty((30, 20), dtype=np.uint16)
    strided.copy_strided(view, 0, (1, 30), out)
    assert out.tolist() == data.reshape(20, 30).T.tolist()
    assert 50 < max(asked) <= 100


def test_tied_tensors_are_there_once(tmp_path: Path) -> None:
    weight = torch.rand(3, 3)
    made = {
        "a": weight, "b": weight, "c": nn.Parameter(weight), "half": weight[:2],
        "turned": weight.t(), "copy": weight.clone(), "none": weight[:0], "nothing": weight[:0],
    }  # fmt: skip
    found = save(tmp_path / "a.pt", made)
    assert found.aliases == {"b": "a", "c": "a"}
    assert_holds(found, made)


# Where the weights are.


def two() -> dict[str, Tensor]:
    return {"a.w": torch.rand(2, 3), "a.b": torch.rand(2)}


def adam_state() -> dict[str, Any]:
    model = nn.Linear(2, 2)
    adam = torch.optim.AdamW(model.parameters())
    model(torch.rand(1, 2)).sum().backward()
    adam.step()
    return adam.state_dict()


def test_a_file_of_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type("AttributeDict", (dict,), {"__module__": "lightning.fabric.utilities.data"})
    for parent in itertools.accumulate(kind.__module__.split("."), "{}.{}".format):
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    monkeypatch.setattr(sys.modules[kind.__module__], "AttributeDict", kind, raising=False)
    weights = two()
    made = {
        "epoch": 3,
        "global_step": 400,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": weights,
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"current": {"ready": 4}}}},
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_score": torch.tensor(0.5)}},
        "optimizer_states": [adam_state()],
        "lr_schedulers": [{"last_epoch": 3}],
        "hparams_name": "kwargs",
        "hyper_parameters": kind(args=argparse.Namespace(lr=0.1, out=Path("runs")), size={1, 2}),
    }
    found = save(tmp_path / "a.ckpt", made)
    assert_holds(found, weights)
    assert (found.key, found.notes, found.progress) == ("state_dict", (), TrainingProgress(400, 3))


def test_a_file_of_timm_with_two_choices(tmp_path: Path) -> None:
    weights, ema = two(), two()
    made = {
        "epoch": 7, "arch": "resnet", "state_dict": weights, "optimizer": adam_state(),
        "version": 2, "args": argparse.Namespace(lr=0.1), "amp_scaler": {"scale": 2.0},
        "state_dict_ema": ema, "metric": np.float64(0.5),
    }  # fmt: skip
    found = save(tmp_path / "a.pth.tar", made)
    assert_holds(found, weights)
    assert found.progress == TrainingProgress(None, 7)
    assert found.notes == (
        "weights under 'state_dict' (also found: 'state_dict_ema'; choose with --key)",
    )
    chosen = open_checkpoint(LocalPath(tmp_path / "a.pth.tar"), key="state_dict_ema")
    assert_holds(chosen, ema)
    assert chosen.notes == ()


@pytest.mark.parametrize(
    "key", ["state_dict", "model_state_dict", "model", "module", "state_dict_ema", "model_ema"]
)
def test_the_known_keys(tmp_path: Path, key: str) -> None:
    weights = two()
    found = save(tmp_path / "a.pt", {"opt": adam_state(), key: weights, "epoch": True, "step": 3})
    assert_holds(found, weights)
    assert (found.key, found.progress) == (key, TrainingProgress(3, None))


def test_a_key_may_be_a_path(tmp_path: Path) -> None:
    nets = {"g.ema": two(), "d": two(), "blocks": {0: two()}}
    torch.save({"nets": nets, "step": -1, "epoch": 2**70}, tmp_path / "a.pt")
    location = LocalPath(tmp_path / "a.pt")
    for key, expected in (
        ("nets.d", nets["d"]),
        ("nets.g.ema", nets["g.ema"]),
        ("nets.blocks.0", nets["blocks"][0]),
    ):
        found = TorchFile(location, key=key)
        assert_holds(found, expected)
        assert (found.key, found.progress) == (key, TrainingProgress())
    for wrong in ("", "x", "nets.x", "nets.d.a.w", "nets.d.x", "step", "nets."):
        with pytest.raises(FormatError, match=r"a\.pt: .*'nets\.g\.ema', 'nets\.d', 'nets\.bl"):
            TorchFile(location, key=wrong)
    with pytest.raises(FormatError, match=r"not clear .* choose with --key from: 'nets\.g\.ema'"):
        TorchFile(location)


def test_tensors_at_the_top_beside_nested_ones(tmp_path: Path) -> None:
    weights = two()
    found = save(tmp_path / "a.pt", {**weights, "optimizer": adam_state(), "epoch": 2})
    assert_holds(found, weights)
    assert found.notes == ("left out, not weights: 'optimizer'", "left out, not tensors: 'epoch'")
    assert found.progress.epoch == 2
    made = {"latent_avg": torch.rand(2), "g_ema": weights}
    with pytest.raises(FormatError, match=r"from: 'g_ema' \('\.' is everything\)"):
        save(tmp_path / "b.pt", made)
    found = TorchFile(LocalPath(tmp_path / "b.pt"), key=".")
    assert_holds(
        found, {"latent_avg": made["latent_avg"]} | {f"g_ema.{n}": w for n, w in weights.items()}
    )


def test_what_is_not_a_tensor_is_left_out_with_a_note(tmp_path: Path) -> None:
    weights = two()
    extra = {"_extra_state": None, "b._extra_state": b"\xff", "n": 3, "s": "x", "d": {"e": {}}}
    found = save(tmp_path / "a.pt", {"model": {**weights, **extra, "sub": {"w": weights["a.w"]}}})
    assert found.notes == (
        "left out, not tensors: '_extra_state', 'b._extra_state', 'n' and 2 more",
    )
    assert found.aliases == {"sub.w": "a.w"}
    assert_holds(found, {**weights, "sub.w": weights["a.w"]})


def test_names_lose_what_wrappers_put_in_front(tmp_path: Path) -> None:
    weights = two()
    made = {f"module._orig_mod.{name}": t for name, t in weights.items()}
    assert_holds(save(tmp_path / "a.pt", made), weights)
    made = {"module.a": torch.rand(2), "b._orig_mod.c": torch.rand(2)}
    assert set(save(tmp_path / "b.pt", made).tensors) == {"module.a", "b.c"}
    with pytest.raises(FormatError, match=r"c\.pt: two tensors have the name 'a\.b'"):
        save(tmp_path / "c.pt", {"a.b": torch.rand(2), "_orig_mod.a.b": torch.rand(2)})
    with pytest.raises(FormatError, match=r"d\.pt: two tensors have the name 'a\.b'"):
        save(tmp_path / "d.pt", {"model": {"a.b": torch.rand(2), "a": {"b": torch.rand(2)}}})


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (torch.rand(2), r"a StoredTensor, not a dict"),
        ([torch.rand(2)], r"a list, not a dict"),
        ({}, r"no tensors \(keys: none"),
        ({"epoch": 3, "path": "x"}, r"no tensors \(keys: 'epoch', 'path'"),
        ({"model": {"a": [torch.rand(2)]}}, r"'a' is a list with tensors in it"),
        ({"model": {None: torch.rand(2)}}, r"NoneType as key"),
        ({"net": two(), "optimizer": adam_state()}, r"from: 'net', 'optimizer\.state' "),
        ({"w": torch.ones(2, dtype=torch.complex128)}, r"tensor 'w' has dtype torch\.complex128"),
        ({"w": torch.eye(2).to_sparse()}, r"tensor 'w' is sparse"),
        ({"w": torch.ones(2, dtype=torch.complex64).conj()}, r"tensor 'w' is a lazy conjugate"),
        ({"w": torch.empty(2, device="meta")}, r"tensor 'w' is on the meta device"),
        ({"\ud800": torch.rand(2)}, r"not valid text"),
    ],
)
def test_what_has_no_weights_is_refused(tmp_path: Path, made: object, message: str) -> None:
    with pytest.raises(FormatError, match=r"a\.pt: .*" + message):
        save(tmp_path / "a.pt", made)


def test_quantized_tensors_are_refused_by_name(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        packed = torch.quantize_per_tensor(torch.rand(4), 0.1, 0, torch.qint8)
        torch.save({"fine": torch.rand(2), "packed": packed}, tmp_path / "a.pt")
    with pytest.raises(FormatError, match=r"a\.pt: tensor 'packed' is quantized"):
        TorchFile(LocalPath(tmp_path / "a.pt"))


def test_odd_tensors_outside_of_the_weights_are_no_trouble(tmp_path: Path) -> None:
    weights = two()
    odd = {"z": torch.ones(2, dtype=torch.complex128), "s": torch.eye(2).to_sparse()}
    assert_holds(save(tmp_path / "a.pt", {"model": weights, "other": odd}), weights)


def test_other_files_of_pytorch_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"a\.pt: .*PyTorch before 1\.6: load it with torch and"):
        save(tmp_path / "a.pt", two(), _use_new_zipfile_serialization=False)
    for name in ("constants.pkl", "code/__torch__.py"):
        write_zip(tmp_path / "b.pt", b"}.", {name: b""})
        with pytest.raises(FormatError, match=r"b\.pt: a TorchScript program"):
            TorchFile(LocalPath(tmp_path / "b.pt"))
    write_zip(tmp_path / "c.pt", b"}.", {"byteorder": b"big"})
    with pytest.raises(FormatError, match=r"c\.pt: .*little-endian"):
        TorchFile(LocalPath(tmp_path / "c.pt"))


def test_remote_files_are_read_in_few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {f"layer{i}": torch.rand(3000) for i in range(50)}
    file = io.BytesIO()
    torch.save(made, file)
    fs = fsspec.filesystem("memory")
    fs.pipe_file("/remote/a.pt", file.getvalue())
    asked: list[tuple[int, int]] = []
    original = type(fs).cat_file

    def cat_file(self: Any, path: str, start: int, end: int) -> bytes:
        asked.append((start, end))
        return bytes(original(self, path, start=start, end=end))

    monkeypatch.setattr(type(fs), "cat_file", cat_file)
    found = open_checkpoint(parse_location("memory://remote/a.pt"))
    assert len(asked) <= 3
    assert sum(end - start for start, end in asked) < len(file.getvalue()) / 2
    asked.clear()
    found.read("layer30", 0, 6000)
    found.read("layer30", 6000, 12000)
    assert len(asked) == 3  # the entry's header, and the two ranges
    assert_holds(found, made)


READ = """
import sys
from torch_lawa.checkpoints.formats.registry import open_checkpoint
from torch_lawa.checkpoints.storage.paths import LocalPath
found = open_checkpoint(LocalPath(sys.argv[1]))
for name, spec in found.tensors.items():
    found.read(name, 0, spec.nbytes)
print(len(found.tensors), "torch" in sys.modules)
"""


def test_reading_does_not_import_torch(tmp_path: Path) -> None:
    torch.save(small_net().state_dict(), tmp_path / "a.pt")
    command = [sys.executable, "-c", READ, str(tmp_path / "a.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["9", "False"]
