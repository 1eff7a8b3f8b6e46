"""The one process that writes: files laid out aside, filled, flushed, then given their name."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from torch_lawa.checkpoints.formats.registry import is_checkpoint_folder
from torch_lawa.checkpoints.formats.sharded_layout import lay_file, write_at, write_index
from torch_lawa.checkpoints.storage.atomic import (
    clear_stale,
    publish,
    remove,
    require_space,
    start_flushing,
    sync_file,
    sync_folder,
    temporary_name,
)
from torch_lawa.checkpoints.storage.paths import LocalPath
from torch_lawa.errors import OutputError
from torch_lawa.export.plan import ExportedTensor, ExportPlan

__all__ = ["FolderWriter"]

_FLUSHED = 64 * 1024 * 1024


class FolderWriter:
    """A folder of safetensors files under a temporary name; gone again unless it is published."""

    def __init__(self, folder: Path, plan: ExportPlan, *, overwrite: bool) -> None:
        _refuse(folder, overwrite)
        self._target, self._plan = folder, plan
        self._aside = temporary_name(folder)
        self._starts: dict[str, tuple[Path, int]] = {}
        self._unflushed = 0

    def __enter__(self) -> "FolderWriter":
        try:
            with self._explained():
                self._target.parent.mkdir(parents=True, exist_ok=True)
                clear_stale(self._target)
                require_space(self._target.parent, self._plan.num_bytes)
                remove(self._aside)
                self._aside.mkdir()
                # All of them before the work, so that a full disk is found now.
                for file in self._plan.files:
                    entries = [(tensor.written, tensor.spec) for tensor in file.tensors]
                    path = self._aside / file.name
                    starts, _ = lay_file(path, entries, {**self._plan.metadata, **file.aliases})
                    for tensor in file.tensors:
                        self._starts[tensor.name] = path, starts[tensor.written]
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def write(self, tensor: ExportedTensor, value: Tensor) -> None:
        """The values of one tensor, all of it."""
        path, start = self._starts[tensor.name]
        if not value.numel():
            return
        flat = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
        with self._explained():
            handle = os.open(path, os.O_WRONLY)
            try:
                write_at(handle, flat.numpy().data, start)
                self._unflushed += flat.numel()
                if self._unflushed > _FLUSHED:
                    self._unflushed = 0
                    start_flushing(handle)  # the disk works while the next tensors are made
            finally:
                os.close(handle)

    def finish(self) -> None:
        """Write what goes beside the weights; everything survives a power cut from here on."""
        plan, files = self._plan, self._plan.files
        sizes = [(tensor.dtype, tensor.spec.numel) for file in files for tensor in file.tensors]
        with self._explained():
            if plan.index is not None:
                weight_map = {
                    tensor.written: file.name for file in files for tensor in file.tensors
                }
                write_index(self._aside / plan.index, weight_map, plan.num_bytes)
            plan.beside.write(self._aside, sizes)
            for path in self._aside.iterdir():
                sync_file(path)
            sync_folder(self._aside)

    def publish(self) -> None:
        """Give the folder its name; an older one of that name is gone."""
        with self._explained():
            publish(self._aside, self._target)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(OSError):
            remove(self._aside)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OutputError(
                f"{self._target}: cannot be written ({error}); what was begun is removed. Make "
                "room or mend the folder, or write elsewhere."
            ) from error


def _refuse(folder: Path, overwrite: bool) -> None:
    if not os.path.lexists(folder):
        return
    if not folder.is_dir():
        raise OutputError(f"{folder}: is a file, and the export makes a folder; write elsewhere.")
    if not overwrite:
        raise OutputError(f"{folder}: exists already. Pass overwrite=True to replace it.")
    if any(folder.iterdir()) and not is_checkpoint_folder(LocalPath(folder)):
        raise OutputError(
            f"{folder}: is a folder with other things than a checkpoint in it, which replacing it "
            "would remove. Write elsewhere, or remove it yourself."
        )
