"""The folder of an export: written under a temporary name by one process, flushed, then renamed."""

import contextlib
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from torch_lawa.checkpoints.formats.registry import checkpoint_parts
from torch_lawa.checkpoints.formats.safetensors_folder import FolderSink, create_file, write_index
from torch_lawa.checkpoints.replacement import require_replaceable
from torch_lawa.checkpoints.storage.atomic import (
    publish,
    require_space,
    staging,
    sync_file,
    sync_folder,
)
from torch_lawa.checkpoints.storage.paths import LocalPath
from torch_lawa.errors import OutputError
from torch_lawa.export.plan import ExportedTensor, ExportPlan

__all__ = ["FolderWriter"]


class FolderWriter:
    """A folder of safetensors files under a temporary name, removed unless it is published."""

    def __init__(self, folder: Path, plan: ExportPlan, *, overwrite: bool) -> None:
        _refuse(folder, overwrite)
        self._target, self._plan, self._overwrite = folder, plan, overwrite
        self._stack = ExitStack()

    def __enter__(self) -> "FolderWriter":
        with ExitStack() as stack:
            with self._explained():
                self._aside = stack.enter_context(staging(self._target))
                require_space(self._target.parent, self._plan.num_bytes)
                self._sink = FolderSink(self._aside, self._create_files())
                stack.callback(self._sink.close)
            self._stack = stack.pop_all()
        return self

    def _create_files(self) -> dict[str, dict[str, int]]:
        """Make all files before the first value is computed, so that a full disk is found now."""
        found = {}
        for file in self._plan.files:
            entries = [(tensor.written, tensor.spec) for tensor in file.tensors]
            metadata = {**self._plan.metadata, **file.aliases}
            starts, _ = create_file(self._aside / file.name, entries, metadata)
            found[file.name] = {tensor.name: starts[tensor.written] for tensor in file.tensors}
        return found

    def write(self, tensor: ExportedTensor, value: Tensor) -> None:
        """Write all values of one tensor."""
        if value.numel():
            flat = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
            with self._explained():
                self._sink.write(tensor.name, 0, flat.numpy())

    def finish(self) -> None:
        """Write the files beside the weights; after this everything survives a power cut."""
        plan, files = self._plan, self._plan.files
        sizes = [(tensor.dtype, tensor.spec.numel) for file in files for tensor in file.tensors]
        with self._explained():
            if plan.index is not None:
                weight_map = {
                    tensor.written: file.name for file in files for tensor in file.tensors
                }
                write_index(self._aside / plan.index, weight_map, plan.num_bytes)
            plan.hub_files.write(self._aside, sizes)
            for path in self._aside.iterdir():
                sync_file(path)
            sync_folder(self._aside)

    def publish(self) -> None:
        """Rename the folder to its final name, replacing the checkpoint in an older one."""
        with self._explained():
            publish(
                self._aside,
                self._target,
                overwrite=self._overwrite,
                is_outdated=checkpoint_parts(LocalPath(self._target)),
            )

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OutputError:
            raise
        except OSError as error:
            raise OutputError(
                f"{self._target}: cannot be written ({error}); the unfinished folder was removed. "
                "Free some space, check the permissions, or write elsewhere."
            ) from error


def _refuse(folder: Path, overwrite: bool) -> None:
    if not os.path.lexists(folder):
        return
    if not overwrite and folder.is_dir():
        raise OutputError(f"{folder}: exists already. Pass overwrite=True to replace it.")
    require_replaceable(LocalPath(folder), is_file=False)
