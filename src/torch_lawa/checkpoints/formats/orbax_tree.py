"""The tree of an Orbax checkpoint: its items, its leaves, and which of them are the weights.

A folder of a `CheckpointManager` has one sub-folder per item and `_CHECKPOINT_METADATA`; an item
has `_METADATA`, which lists the leaves of its tree. Both are JSON, so nothing here needs
tensorstore.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_lawa.checkpoints.formats.base import is_text
from torch_lawa.errors import FormatError
from torch_lawa.units import few

if TYPE_CHECKING:
    from torch_lawa.checkpoints.storage.paths import Location

__all__ = [
    "CHECKPOINT_FILE",
    "ITEM_FILE",
    "ChosenWeights",
    "Leaf",
    "OrbaxItem",
    "choose_weights",
    "find_step",
    "list_parts",
    "read_items",
]

CHECKPOINT_FILE, ITEM_FILE = "_CHECKPOINT_METADATA", "_METADATA"
# What an item consists of where its arrays are in one OCDBT database, as in what is written here.
_STORE_PARTS = r"_sharding|_strings\.json|manifest\.ocdbt|d|ocdbt\.process_\w+|array_metadatas"
_ARRAY_FILES = (".zarray", "zarr.json")  # in the folder of an array that has its own
_WEIGHT_KEYS = ("params", "model", "target")  # Flax and MaxText; nnx; T5X
_STEP_KEYS = ("step", "global_step", "iteration")
# Beginnings of keys beside the weights in a train state.
_TRAINING_STATE = ("opt", "step", "global_step", "iteration", "epoch", "rng", "scheduler", "loss")
_ARRAYS = ("jax.Array", "np.ndarray", "scalar")
_MAX_LEAVES = 1_000_000
_CHOOSE = "choose with --key"


@dataclass(frozen=True)
class Leaf:
    """A leaf of a tree: the keys that lead to it, and its name in the store."""

    item: "OrbaxItem"
    keys: tuple[str, ...]
    is_sequence: tuple[bool, ...]  # for each key, whether it is the index of a list or tuple

    @property
    def stored(self) -> str:
        """The name of its array in the store of its item."""
        return ".".join(self.keys)

    @property
    def path(self) -> list[str | int]:
        """Its path in the tree, with numbers for the indices of lists."""
        pairs = zip(self.keys, self.is_sequence, strict=True)
        return [int(key) if index else key for key, index in pairs]


class OrbaxItem:
    """One item: a folder with `_METADATA` and a store of arrays."""

    def __init__(self, folder: "Location", name: str) -> None:
        self.folder, self.name = folder, name  # "" if the checkpoint is this item alone
        self._file = folder.child(ITEM_FILE)
        found = self._file.read_json()
        self.metadata = found
        self.zarr3 = found.get("use_zarr3") is True
        self.ocdbt = folder.child("manifest.ocdbt").is_file()
        # Otherwise a chunk that is missing holds the fill value.
        self.stores_all = found.get("store_array_data_equal_to_fill_value") is True
        self.leaves = list(self._leaves(found.get("tree_metadata")))

    def _leaves(self, tree: object) -> Iterator[Leaf]:
        if not isinstance(tree, dict) or len(tree) > _MAX_LEAVES:
            raise FormatError(f"{self._file}: has no tree_metadata, so it is not one of Orbax.")
        for label, entry in tree.items():
            value = entry.get("value_metadata") if isinstance(entry, dict) else None
            keys = entry.get("key_metadata") if isinstance(entry, dict) else None
            if not isinstance(value, dict) or not isinstance(keys, list) or not keys:
                raise self._broken(label)
            if value.get("value_type") not in _ARRAYS or value.get("skip_deserialize") is True:
                continue  # a text or an empty node
            names, kinds = [], []
            for part in keys:
                name = part.get("key") if isinstance(part, dict) else None
                kind = part.get("key_type") if isinstance(part, dict) else None
                if not isinstance(name, str) or not is_text(name) or "\0" in name:
                    raise self._broken(label)
                names.append(name)
                kinds.append(kind == 1 and name.isdecimal() and len(name) < 10)
            if not self.ocdbt and {"..", ""} & set(".".join(names).split("/")):
                raise self._broken(label)  # a path out of the folder
            yield Leaf(self, tuple(names), tuple(kinds))

    def _broken(self, label: object) -> FormatError:
        return FormatError(f"{self._file}: its entry for {label!r:.200} is damaged.")


@dataclass(frozen=True)
class ChosenWeights:
    """The leaves that are the weights by dotted name, the key they are under, and notes."""

    leaves: dict[str, Leaf]
    key: str
    notes: tuple[str, ...]

    @property
    def key_map(self) -> str:
        """Where each tensor is in the tree of its item, as JSON: from names to paths."""
        return json.dumps({name: leaf.path for name, leaf in self.leaves.items()})


def list_parts(folder: "Location") -> list[str]:
    """The entries of a checkpoint's folder that belong to it, by what Orbax says of its items."""
    file = folder.child(CHECKPOINT_FILE)
    handlers = file.read_json().get("item_handlers") if file.is_file() else None
    items = handlers if isinstance(handlers, dict) else ()
    return [
        child.name
        for child in folder.children()
        if child.name in items
        or re.fullmatch(_STORE_PARTS, child.name)
        or any(child.child(name).is_file() for name in _ARRAY_FILES)
    ]


def read_items(folder: "Location") -> list[OrbaxItem]:
    """The items with arrays of a checkpoint; a folder may be an item itself."""
    if folder.child(ITEM_FILE).is_file():
        return [OrbaxItem(folder, "")]
    found = [child for child in folder.children() if child.child(ITEM_FILE).is_file()]
    if not found:
        raise FormatError(
            f"{folder}: no item with {ITEM_FILE} here. Either it has no arrays, or Orbax older "
            "than 0.5 wrote it: restore and save it with a newer one."
        )
    return [OrbaxItem(child, child.name) for child in found]


def choose_weights(
    items: Sequence[OrbaxItem], location: object, key: str | None = None
) -> ChosenWeights:
    """The weights: what is under `key` ("." is everything), else under `params` or a similar key.

    Of several items, the first part of a key is the name of one. A tree without such a key and
    without the state of a training loop is used as a whole.
    """
    if key is not None:
        for item in items:
            prefix = _split_key(item, key, len(items) > 1)
            if prefix is not None:
                return _collect(item, prefix, key if key != "." else "", (), location)
        raise FormatError(
            f"{location}: no arrays under the key {key!r}; there are {_list_keys(items)}."
        )
    found = [(item, prefix) for item in items if (prefix := _guess(item)) is not None]
    if len(found) != 1:
        raise FormatError(
            f"{location}: it is not clear which arrays are the weights; {_CHOOSE} from: "
            f"{_list_keys(items)}."
        )
    item, prefix = found[0]
    shown = ".".join((*((item.name,) if len(items) > 1 else ()), *prefix))
    rest = {leaf.keys[0] for leaf in item.leaves if leaf.keys[: len(prefix)] != prefix}
    rest |= {other.name for other in items if other is not item}
    notes = () if not rest else (f"weights under {shown!r}; not averaged: {_listed(rest)}",)
    return _collect(item, prefix, shown, notes, location)


def find_step(item: OrbaxItem, prefix: str) -> Leaf | None:
    """The leaf that holds the step of a train state, if its tree has one at the top."""
    tops = [leaf for leaf in item.leaves if len(leaf.keys) == 1 and leaf.keys[0] in _STEP_KEYS]
    return tops[0] if tops and prefix else None


def _guess(item: OrbaxItem) -> tuple[str, ...] | None:
    tops = {leaf.keys[0] for leaf in item.leaves}
    nested = {leaf.keys[0] for leaf in item.leaves if len(leaf.keys) > 1}
    if item.name in _WEIGHT_KEYS and tops:
        return ()
    for key in _WEIGHT_KEYS:
        if key in nested:
            return (key,)
    for top in nested if len(tops) == 1 else ():  # {"state": {"params": …}}
        inner = {leaf.keys[1] for leaf in item.leaves if len(leaf.keys) > 2}
        for key in _WEIGHT_KEYS:
            if key in inner:
                return (top, key)
        tops = {leaf.keys[1] for leaf in item.leaves if len(leaf.keys) > 1}
    if not tops or item.name.lower().startswith(_TRAINING_STATE):
        return None
    return None if any(top.lower().startswith(_TRAINING_STATE) for top in tops) else ()


def _split_key(item: OrbaxItem, key: str, several: bool) -> tuple[str, ...] | None:
    """The keys that a dotted key means in this item; None if nothing is there."""
    if item.name and (key == item.name or key.startswith(f"{item.name}.")):
        rest = key[len(item.name) + 1 :]
        found = _match_keys(item, rest) if rest else ()
        if found is not None:
            return found
    if several:
        return None
    return () if key == "." else _match_keys(item, key)


def _match_keys(item: OrbaxItem, key: str) -> tuple[str, ...] | None:
    """Keys may contain dots themselves."""
    for leaf in item.leaves:
        for length in range(1, len(leaf.keys)):
            if ".".join(leaf.keys[:length]) == key:
                return leaf.keys[:length]
    return None


def _collect(
    item: OrbaxItem, prefix: tuple[str, ...], key: str, notes: tuple[str, ...], location: object
) -> ChosenWeights:
    found: dict[str, Leaf] = {}
    for leaf in item.leaves:
        if leaf.keys[: len(prefix)] != prefix:
            continue
        name = ".".join(leaf.keys[len(prefix) :])
        if name in found:
            raise FormatError(f"{location}: two arrays have the name {name!r}: rename one.")
        found[name] = leaf
    if not found:
        raise FormatError(f"{location}: contains no arrays. Save it with the weights.")
    return ChosenWeights(found, key, notes)


def _list_keys(items: Sequence[OrbaxItem]) -> str:
    before = [f"{item.name}." if len(items) > 1 else "" for item in items]
    names = {
        f"{start}{leaf.keys[0]}"
        for item, start in zip(items, before, strict=True)
        for leaf in item.leaves
        if len(leaf.keys) > 1
    }
    everything = "" if len(items) > 1 else " ('.' is everything)"
    return (_listed(names | {i.name for i in items if len(items) > 1}) or "none") + everything


def _listed(names: set[str]) -> str:
    return few(map(repr, sorted(names)), limit=12)
