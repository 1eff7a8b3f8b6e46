"""Checkpoints of Orbax, which JAX programs write: a store of arrays, read through tensorstore.

The arrays are in zarr (2 or 3), either in files of their own or in one OCDBT database. JAX is not
needed. tensorstore decodes whole chunks, so decoded rows of chunks are kept while their pieces are
being averaged.
"""

import math
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch_lawa.checkpoints.formats.base import (
    Checkpoint,
    TensorSpec,
    TrainingProgress,
    check_claims,
)
from torch_lawa.checkpoints.formats.orbax_tree import (
    ChosenWeights,
    Leaf,
    OrbaxItem,
    choose_weights,
    find_step,
    read_items,
)
from torch_lawa.checkpoints.provenance import PROVENANCE_FILE, read_provenance
from torch_lawa.checkpoints.storage.paths import LocalPath, Location
from torch_lawa.errors import ConfigError, FormatError
from torch_lawa.mean.dtypes import DTYPES

if TYPE_CHECKING:
    from torch_lawa.mean.kernels import Bytes

__all__ = [
    "OrbaxCheckpoint",
    "Rows",
    "array_spec",
    "load_tensorstore",
    "store_spec",
]

KEY_MAP = "key_map"  # the metadata with the path of each tensor in the tree
_CODES = {dtype.torch_name: code for code, dtype in DTYPES.items()}
_ROWS = 1 << 23  # bytes that are decoded at a time where chunks are smaller
_KEPT = 1 << 26  # bytes of decoded rows that a checkpoint keeps, besides the two latest
_ZSTD = 1 << 15  # Zstandard and blosc compress zeros to about this share


def load_tensorstore(location: object) -> Any:
    """The tensorstore module."""
    try:
        import tensorstore
    except ImportError as error:
        raise ConfigError(
            f"{location}: Orbax checkpoints are read with tensorstore, which is not installed "
            f"({error}). Run `pip install 'torch-lawa[orbax]'`."
        ) from None
    return tensorstore


class OrbaxCheckpoint(Checkpoint):
    """A folder that Orbax wrote: of a `CheckpointManager`, or of a single checkpointer.

    `key` is the dotted key of the weights in the tree ("." for all of it).
    """

    def __init__(self, folder: Location, key: str | None = None) -> None:
        if not isinstance(folder, LocalPath):
            raise ConfigError(f"{folder}: Orbax checkpoints are read from local paths. Copy it.")
        self._ts = load_tensorstore(folder)
        self._weights = weights = choose_weights(read_items(folder), folder, key)
        self.key = weights.key
        self.item = next(iter(weights.leaves.values())).item
        self._context = self._ts.Context({"cache_pool": {"total_bytes_limit": 0}})
        self._files = [file for file in folder.walk() if file.name != PROVENANCE_FILE]
        self._rows = self._open(weights)
        self._cache = _RowCache()
        super().__init__(
            location=folder,
            format=f"Orbax, {'OCDBT' if self.item.ocdbt else 'files'}, "
            f"{'zarr3' if self.item.zarr3 else 'zarr'}",
            layout="orbax",
            tensors={name: rows.spec for name, rows in self._rows.items()},
            metadata={KEY_MAP: weights.key_map, **read_provenance(folder)},
            progress=TrainingProgress(step=self._step()),
            notes=weights.notes,
        )
        check_claims(self, sum(file.size for file in self._files) * _ZSTD)

    def read(self, name: str, begin: int, end: int) -> "Bytes":
        import numpy as np

        rows, parts = self._rows[name], []
        while begin < end:
            at, first, last = rows.around(begin)
            stop = min(end, last)
            found = self._cache.get((name, at), lambda: self._load(name, at))  # noqa: B023
            parts.append(found[begin - first : stop - first])
            begin = stop
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint8)

    def file_of(self, name: str) -> Location:
        item = self._weights.leaves[name].item
        return item.folder if item.ocdbt else item.folder.child(self._weights.leaves[name].stored)

    @property
    def files(self) -> list[Location]:
        return self._files

    def close(self) -> None:
        self._cache.clear()

    def _open(self, weights: ChosenWeights) -> "dict[str, Rows]":
        opening = {name: self._start(leaf) for name, leaf in weights.leaves.items()}
        found = {}
        for name, future in opening.items():
            store = self._result(name, future)
            code = _CODES.get(store.dtype.name)
            if code is None:
                raise FormatError(
                    f"{self._weights.leaves[name].item.folder}: array {name!r} is of "
                    f"{store.dtype.name}, which safetensors cannot hold. Leave it out with --key."
                )
            found[name] = Rows(store, TensorSpec(code, tuple(store.shape)))
        return found

    def _start(self, leaf: Leaf) -> Any:
        """Begin to open an array; only its metadata is read."""
        spec = array_spec(leaf.item, leaf.stored)
        return self._ts.open(spec, open=True, read=True, context=self._context)

    def _load(self, name: str, at: int) -> "Bytes":
        import numpy as np

        read: np.ndarray[Any, Any] = self._result(name, self._rows[name].box(at).read())
        return np.ascontiguousarray(read).reshape(-1).view(np.uint8)

    def _result(self, name: str, future: Any) -> Any:
        try:
            return future.result()
        except MemoryError:
            raise
        except Exception as error:  # tensorstore raises ValueError for all that is damaged
            raise FormatError(
                f"{self.item.folder}: array {name!r} cannot be read, it is incomplete or damaged "
                f"({_shortened(error)})."
            ) from None

    def _step(self) -> int | None:
        leaf = find_step(self.item, self.key)
        if leaf is None:
            return None
        found = self._result(leaf.stored, self._start(leaf))
        if found.shape or not found.dtype.name.startswith(("int", "uint")):
            return None
        step = int(self._result(leaf.stored, found.read()))
        return step if step >= 0 else None


def store_spec(item: OrbaxItem) -> dict[str, Any]:
    """Where tensorstore finds the arrays of an item."""
    assert isinstance(item.folder, LocalPath)
    path = f"{item.folder.path.absolute()}/"
    files = {"driver": "file", "path": path}
    return {"driver": "ocdbt", "base": files} if item.ocdbt else files


def array_spec(item: OrbaxItem, stored: str) -> dict[str, Any]:
    """The array of this name, as tensorstore opens it."""
    kvstore = store_spec(item)
    # With a slash: other names may begin with this one.
    kvstore["path"] = f"{kvstore.get('path', '')}{stored}/"
    return {
        "driver": "zarr3" if item.zarr3 else "zarr",
        "kvstore": kvstore,
        "fill_missing_data_reads": not item.stores_all,
        "recheck_cached_data": False,
    }


class Rows:
    """An array cut into rows of chunks, which are contiguous in its row-major values.

    `writing` uses the chunks that are written as a whole, which contain several of zarr3's inner
    chunks.
    """

    def __init__(self, store: Any, spec: TensorSpec, *, writing: bool = False) -> None:
        self.store, self.spec = store, spec
        layout = store.chunk_layout
        chunk = (layout.write_chunk if writing else layout.read_chunk).shape or ()
        shape, item = spec.shape, DTYPES[spec.dtype].itemsize
        # The first axis along which a chunk has several values; one chunk at a time before it.
        self._axis = next((i for i, n in enumerate(chunk) if n != 1), max(0, len(shape) - 1))
        inner = math.prod(shape[self._axis + 1 :]) * item  # bytes of one index along that axis
        size = shape[self._axis] if shape else 1
        height = min(chunk[self._axis] if chunk else 1, size) or 1
        if inner:
            height *= max(1, _ROWS // (height * inner))
        self._height, self._size, self._inner = min(height, size) or 1, size, inner
        self._per_outer = -(-size // self._height)  # rows of chunks for each outer index
        self.num = math.prod(shape[: self._axis]) * self._per_outer if spec.nbytes else 0

    def around(self, offset: int) -> tuple[int, int, int]:
        """The number of the row at a byte, and the bytes at which it begins and ends."""
        outer, within = divmod(offset, self._size * self._inner)
        row = within // (self._height * self._inner)
        first = (outer * self._size + row * self._height) * self._inner
        stop = min((row + 1) * self._height, self._size)
        return outer * self._per_outer + row, first, (outer * self._size + stop) * self._inner

    def span(self, at: int) -> tuple[int, int]:
        """The bytes at which row `at` begins and ends."""
        outer, row = divmod(at, self._per_outer)
        return self.around((outer * self._size + row * self._height) * self._inner)[1:]

    def box(self, at: int) -> Any:
        """Row `at` of the array."""
        if not self.spec.shape:
            return self.store
        outer, row = divmod(at, self._per_outer)
        index: list[Any] = []
        for size in reversed(self.spec.shape[: self._axis]):
            outer, i = divmod(outer, size)
            index.insert(0, slice(i, i + 1))
        first = row * self._height
        return self.store[(*index, slice(first, min(first + self._height, self._size)))]


class _RowCache:
    """The rows that were decoded last; threads that need the same one wait for it."""

    def __init__(self) -> None:
        self._rows: OrderedDict[tuple[str, int], _Row] = OrderedDict()
        self._lock = threading.Lock()
        self._size = 0

    def get(self, which: tuple[str, int], load: "Callable[[], Bytes]") -> "Bytes":
        with self._lock:
            row = self._rows.setdefault(which, _Row())
            self._rows.move_to_end(which)
        with row.lock:
            if row.values is None:
                row.values = load()
                self._shrink(len(row.values))
            return row.values

    def clear(self) -> None:
        with self._lock:
            self._rows.clear()
            self._size = 0

    def _shrink(self, added: int) -> None:
        with self._lock:
            self._size += added
            for which in list(self._rows)[:-2]:
                if self._size <= _KEPT:
                    break
                values = self._rows[which].values
                if values is not None:  # not one that is being loaded
                    self._size -= len(values)
                    del self._rows[which]


class _Row:
    """Decoded bytes, once they are loaded."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.values: Bytes | None = None


def _shortened(error: Exception) -> str:
    text = " ".join(str(error).split(" [source locations=")[0].split())
    return text if len(text) <= 300 else f"{text[:300]}…"
