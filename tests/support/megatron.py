"""Megatron checkpoints: those in tests/recorded/megatron, and look-alikes of any tensors."""

import io
import json
import pickle
import tarfile
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

RECORDED = Path(__file__).parent.parent / "recorded/megatron"


def unpack_run(name: str, folder: Path) -> Path:
    """A recorded run, unpacked into `folder`."""
    with tarfile.open(RECORDED / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


def write_torch_dist(folder: Path, weights: Mapping[str, Tensor], iteration: int) -> None:
    """A folder like Megatron's, with an optimizer state, written by PyTorch."""
    state = dict(weights)
    state |= {f"optimizer.state.exp_avg.{n}": t.float() + 1 for n, t in weights.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder))
    _finish(folder, iteration)


def write_chunks(
    folder: Path, tensors: Mapping[str, tuple[tuple[int, ...], Mapping[tuple[int, ...], Tensor]]]
) -> None:
    """A folder of tensors with a given shape and given chunks, by where these begin."""
    entries, places, data = {}, {}, io.BytesIO()
    for name, (shape, chunks) in tensors.items():
        parts = []
        for starts, chunk in chunks.items():
            begin = data.tell()
            torch.save(chunk, data)
            at = torch.Size(starts)
            places[MetadataIndex(name, at)] = _StorageInfo("0.distcp", begin, data.tell() - begin)
            parts.append(ChunkStorageMetadata(at, chunk.shape))
        properties = TensorProperties(dtype=next(iter(chunks.values())).dtype)
        entries[name] = TensorStorageMetadata(properties, torch.Size(shape), parts)
    folder.mkdir(parents=True)
    (folder / "0.distcp").write_bytes(data.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(entries, storage_data=places)))
    _finish(folder, 0)


def _finish(folder: Path, iteration: int) -> None:
    torch.save({"iteration": iteration, "checkpoint_version": 3.0}, folder / "common.pt")
    text = json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
    (folder / "metadata.json").write_text(text)
