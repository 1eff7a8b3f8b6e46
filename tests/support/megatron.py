"""Megatron checkpoints: those in tests/fixtures/megatron, and look-alikes of any tensors."""

import json
import tarfile
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

FIXTURES = Path(__file__).parent.parent / "fixtures/megatron"


def unpack_run(name: str, folder: Path) -> Path:
    """The run of a fixture, unpacked into `folder`."""
    with tarfile.open(FIXTURES / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


def write_torch_dist(folder: Path, weights: Mapping[str, Tensor], iteration: int) -> None:
    """A folder like Megatron's, with an optimizer state, written by PyTorch."""
    state = dict(weights)
    state |= {f"optimizer.state.exp_avg.{n}": t.float() + 1 for n, t in weights.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder))
    torch.save({"iteration": iteration, "checkpoint_version": 3.0}, folder / "common.pt")
    text = json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
    (folder / "metadata.json").write_text(text)
