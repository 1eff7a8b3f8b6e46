"""Writes Orbax checkpoints: the newest input again, with averaged arrays in place of its own.

Everything else in it (the state of the optimizer, other items, what Orbax says of shardings) is
copied. The arrays are written into one OCDBT database, which Orbax reads whatever the inputs had.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch_lawa.checkpoints.formats.base import Checkpoint
from torch_lawa.checkpoints.formats.orbax import (
    Rows,
    array_spec,
    load_tensorstore,
    store_spec,
)
from torch_lawa.checkpoints.formats.orbax_tree import (
    ITEM_FILE,
    OrbaxItem,
    choose_weights,
    list_parts,
    read_items,
)
from torch_lawa.checkpoints.formats.registry import StagedValues
from torch_lawa.checkpoints.formats.safetensors import SafetensorsFile
from torch_lawa.checkpoints.provenance import PROVENANCE_FILE, write_provenance
from torch_lawa.checkpoints.storage.paths import LocalPath
from torch_lawa.errors import FormatError, LawaError, OutputError
from torch_lawa.mean.dtypes import DTYPES
from torch_lawa.system_errors import named_errors

__all__ = ["write_orbax"]

_BATCH = 1 << 27  # bytes in memory before they are committed
# As Orbax writes them: metadata of arrays inline, and a single root node.
_CONFIG = {
    "max_inline_value_bytes": 1024,
    "max_decoded_node_bytes": 100_000_000,
    "manifest_kind": "single",
}
_DATA_FILE = 2_147_483_648


def write_orbax(staged: StagedValues) -> None:
    """Write a folder that Orbax restores in the place of the newest input."""
    assert isinstance(staged.newest, LocalPath)
    ts = load_tensorstore(staged.newest)
    items = read_items(staged.newest)
    chosen = choose_weights(items, staged.newest, staged.nested_under or ".")
    item = next(iter(chosen.leaves.values())).item
    target = staged.target / item.name if item.name else staged.target
    with named_errors(staged.target):
        _copy_files(staged.newest.path, staged.target, staged.values, item)
        metadata = {**item.metadata, "use_ocdbt": True}
        (target / ITEM_FILE).write_text(json.dumps(metadata))
        write_provenance(staged.target, staged.metadata)
    with SafetensorsFile(LocalPath(staged.values)) as values:
        replaced = {chosen.leaves[name].stored: name for name in values.tensors}
        store = _Database(ts, target)
        try:
            _copy_arrays(ts, item, set(replaced), store)
            for stored, name in replaced.items():
                _create_array(ts, item, stored, values.tensors[name].dtype, store)
            store.commit()
            for stored, name in replaced.items():
                _write_array(ts, item, stored, values, name, store)
            store.commit()
        except LawaError:
            raise
        except ValueError as error:  # what tensorstore raises when the disk is full
            raise OutputError(
                f"{staged.target}: cannot be written ({str(error)[:300]}). Free some space, check "
                "the disk, or write elsewhere."
            ) from error


class _Database:
    """A new OCDBT database; what is added is committed in batches, to bound the memory."""

    def __init__(self, ts: Any, folder: Path) -> None:
        self._ts = ts
        self.context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
        self.spec: dict[str, Any] = {
            "driver": "ocdbt",
            "base": {"driver": "file", "path": f"{folder.absolute()}/"},
            "config": _CONFIG,
            "assume_config": True,
            "target_data_file_size": _DATA_FILE,
        }
        self._waiting: list[Any] = []
        self._size = 0
        self.batch = ts.Transaction()

    def array(self, item: OrbaxItem, stored: str) -> dict[str, Any]:
        """The array of this name, as tensorstore opens it."""
        driver = "zarr3" if item.zarr3 else "zarr"
        return {"driver": driver, "kvstore": {**self.spec, "path": f"{stored}/"}}

    def add(self, num_bytes: int, start: Callable[[], Any]) -> None:
        """Begin to write; commits before it if the batch is full."""
        if self._size and self._size + num_bytes > _BATCH:
            self.commit()
        self._waiting.append(start())
        self._size += num_bytes

    def commit(self) -> None:
        """Write what was added so far."""
        for future in self._waiting:
            future.result()
        self.batch.commit_async().result()
        self._waiting, self._size, self.batch = [], 0, self._ts.Transaction()


def _copy_files(source: Path, target: Path, values: Path, item: OrbaxItem) -> None:
    """Copy all files but the store of the item, and the values that wait to be written."""
    assert isinstance(item.folder, LocalPath)
    own = item.folder.path
    arrays = {own / name for name in list_parts(item.folder)}
    arrays |= {own / leaf.stored for leaf in item.leaves}
    arrays -= {own / name for name in ("_sharding", "_strings.json", "array_metadatas")}

    def ignored(folder: str, names: list[str]) -> list[str]:
        paths = [Path(folder, name) for name in names]
        aside = (PROVENANCE_FILE, values.name)
        return [p.name for p in paths if p in arrays or p.name in aside or _leads_out(p, source)]

    shutil.copytree(source, target, ignore=ignored, copy_function=_copy_file, dirs_exist_ok=True)


def _copy_file(source: str, target: str) -> None:
    LocalPath(source).copy_to(Path(target))  # unlike shutil, an error if it changes meanwhile
    shutil.copystat(source, target)


def _leads_out(path: Path, folder: Path) -> bool:
    """Whether it is a link to something elsewhere: results are passed on, such files are not."""
    return path.is_symlink() and not path.resolve().is_relative_to(folder.resolve())


def _copy_arrays(ts: Any, item: OrbaxItem, replaced: set[str], store: _Database) -> None:
    """Copy the other arrays as they are stored, chunk by chunk."""
    source = ts.KvStore.open(store_spec(item), context=store.context).result()
    target = ts.KvStore.open(store.spec, context=store.context).result()
    for leaf in item.leaves:
        if leaf.stored in replaced:
            continue
        prefix = f"{leaf.stored}/".encode()
        for key in _read(item, source.list(ts.KvStore.KeyRange(prefix, prefix[:-1] + b"0"))):
            found = _read(item, source.read(key))
            if not found.value:  # what is read of a file that is missing
                raise FormatError(
                    f"{item.folder}: cannot be copied: the data of {key.decode()!r} is missing."
                )
            value = found.value
            store.add(
                len(value),
                lambda: target.with_transaction(store.batch).write(key, value),  # noqa: B023
            )


def _read(item: OrbaxItem, future: Any) -> Any:
    try:
        return future.result()
    except ValueError as error:
        raise FormatError(
            f"{item.folder}: cannot be copied, it is incomplete or damaged ({str(error)[:300]})."
        ) from None


def _create_array(ts: Any, item: OrbaxItem, stored: str, code: str, store: _Database) -> None:
    """Create an array with the chunks that it had; its dtype may be another."""
    old = ts.open(array_spec(item, stored), open=True, read=True, context=store.context).result()
    new, dtype = store.array(item, stored), DTYPES[code].torch_name
    new["metadata"] = metadata = old.spec().to_json()["metadata"]
    if dtype != old.dtype.name:
        new["dtype"] = dtype
        for key in ("dtype", "data_type", "fill_value"):
            metadata.pop(key, None)
    ts.open(new, create=True, context=store.context, transaction=store.batch).result()


def _write_array(
    ts: Any, item: OrbaxItem, stored: str, values: Checkpoint, name: str, store: _Database
) -> None:
    """Fill an array that was created before."""
    made = ts.open(store.array(item, stored), open=True, context=store.context).result()
    rows = Rows(made, values.tensors[name], writing=True)
    for at in range(rows.num):
        begin, end = rows.span(at)
        box = rows.box(at)
        data = values.read(name, begin, end).view(box.dtype.numpy_dtype).reshape(box.shape)
        store.add(
            end - begin,
            lambda: box.with_transaction(store.batch).write(data),  # noqa: B023
        )
