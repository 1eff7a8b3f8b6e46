"""What the tests of checkpoint readers share: comparing with tensors, and making broken files."""

import itertools
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from torch_lawa.checkpoints.formats.base import Checkpoint
from torch_lawa.mean.dtypes import DTYPES


def raw(tensor: Tensor) -> bytes:
    """The values in row-major order."""
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes()


def assert_holds(found: Checkpoint, expected: Mapping[str, Tensor]) -> None:
    """The same names, specs and bytes; the bytes also in pieces that fit nothing."""
    assert {*found.tensors, *found.aliases} == {*expected}
    for name, tensor in expected.items():
        kept = found.aliases.get(name, name)
        spec = found.tensors[kept]
        assert (DTYPES[spec.dtype].torch_name, spec.shape) == (str(tensor.dtype)[6:], tensor.shape)
        whole = found.read(kept, 0, spec.nbytes)
        assert whole.dtype == np.uint8
        assert whole.tobytes() == raw(tensor), name
        cuts = [0, *range(7, spec.nbytes, 13), spec.nbytes]
        pieces = [found.read(kept, a, b).tobytes() for a, b in itertools.pairwise(cuts)]
        assert b"".join(pieces) == raw(tensor), name


def read_all(found: Checkpoint) -> None:
    """Something of every tensor; of damaged files that are readable still, sizes are right."""
    for name, spec in found.tensors.items():
        end = min(spec.nbytes, 100_000)
        assert len(found.read(name, 0, end)) == end


def write_zip(
    path: Path, content: bytes, entries: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED
) -> Path:
    """A zip like those of `torch.save` with any pickle and entries."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("top/data.pkl", content)
        for name, data in entries.items():
            archive.writestr(f"top/{name}", data)
    return path


def patched(data: bytes, at: int, new: bytes) -> bytes:
    """The data with other bytes from `at` on."""
    return data[:at] + new + data[at + len(new) :]
