"""Where the weights are in what a training loop saved, and their canonical names.

`torch.save` stores any object; usually it is a state dict, or a dict with one under a known key
beside the state of the optimizer and others.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch_lawa.checkpoints.formats.base import TrainingProgress, is_text
from torch_lawa.checkpoints.formats.torch_pickle.safe_pickle import Tree, inside
from torch_lawa.errors import FormatError
from torch_lawa.units import few

__all__ = [
    "PROGRESS_KEYS",
    "FoundWeights",
    "find_progress",
    "find_weights",
    "is_training_state",
    "refuse_window",
]

WEIGHT_KEYS = ("state_dict", "model_state_dict", "model", "module", "state_dict_ema", "model_ema")
_STEP_KEYS = ("global_step", "step", "iteration", "iter_num")
PROGRESS_KEYS = (*_STEP_KEYS, "epoch")
_TRAINING_STATE = (
    *("optim", "lr_sched", "scheduler", "averager", "scaler", "callback", "loops"),
    *("dataloader", "train_state", "rng", "random_state"),
)
_WINDOW_KEYS = {"version", "token", "notes", "k", "windows"}  # what integrations save
_MAX_DEPTH = 32
_MAX_NAMES = 1_000_000
_MAX_TEXT = 1 << 27  # a long key is repeated in the name of every tensor under it
_CHOOSE = "choose with --key"

Leaf = TypeVar("Leaf")
Dict = dict[object, object]


@dataclass(frozen=True)
class FoundWeights(Generic[Leaf]):
    """The tensors that were found, the dotted key they are under ("" for the top), and notes.

    `metadata` has the text entries of the state dict's `_metadata`.
    """

    tensors: dict[str, Leaf]
    key: str
    notes: tuple[str, ...]
    metadata: dict[str, str]


def find_weights(
    top: object,
    leaf: type[Leaf],
    location: object,
    *,
    key: str | None = None,
    all_if_unclear: bool = False,
) -> FoundWeights[Leaf]:
    """Find the weights in a loaded object; `leaf` is the class of its tensors.

    `key` says where they are ("." is the top). With `all_if_unclear`, a dict of dicts without a
    known key and without an optimizer is used as a whole; otherwise an error lists the choices.

    >>> found = find_weights({"model": {"module.w": 1.5}, "optimizer": {"m": 2.5}}, float, "a.pt")
    >>> found.tensors, found.key
    ({'w': 1.5}, 'model')
    """
    finder = _Finder(leaf, location)
    if not isinstance(top, dict):
        raise FormatError(
            f"{location}: contains a {type(top).__name__}, not a dict of named tensors: save "
            "model.state_dict()."
        )
    if key is None:
        refuse_window(top, location)
    else:
        return finder.collect(finder.look_up(top, key), key if key != "." else "", ())
    return finder.collect(*finder.guess(top, all_if_unclear))


def find_progress(top: object) -> TrainingProgress:
    """Step and epoch, if they are plain numbers at the top level.

    >>> find_progress({"global_step": 500, "epoch": 3})
    TrainingProgress(step=500, epoch=3)
    """

    def number(*keys: str) -> int | None:
        if not isinstance(top, dict):
            return None
        values = (top[k] for k in keys if k in top)
        return next((v for v in values if type(v) is int and 0 <= v < 2**63), None)

    return TrainingProgress(number(*_STEP_KEYS), number("epoch"))


def is_training_state(key: object) -> bool:
    """Whether a key names training state other than the weights.

    >>> is_training_state("optimizer_states"), is_training_state("encoder")
    (True, False)
    """
    return str(key).lower().startswith(_TRAINING_STATE)


def refuse_window(top: object, location: object) -> None:
    """Raise if what was read from `location` is a window that was saved beside a checkpoint."""
    if isinstance(top, dict) and top.keys() >= _WINDOW_KEYS:
        raise FormatError(
            f"{location}: this is the window of snapshots of a checkpoint, not a checkpoint. Pass "
            "the checkpoint: for .lawa/NAME.window, the file NAME in the folder above .lawa."
        )


class _Finder(Generic[Leaf]):
    def __init__(self, leaf: type[Leaf], location: object) -> None:
        self._leaf, self._location = leaf, location
        self._known: dict[int, bool] = {}  # by id: everything is alive as long as the top is

    def look_up(self, top: Dict, key: str) -> Dict:
        """The dict under a dotted key."""
        if key == ".":
            return top
        node: object = top
        rest = key
        while rest and isinstance(node, dict):
            named = {str(k): v for k, v in node.items() if isinstance(k, str | int)}
            parts = rest.split(".")
            heads = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
            head = next((h for h in heads if h in named), None)
            if head is None:
                break
            node, rest = named[head], rest[len(head) + 1 :]
        whole = not rest and key and not key.endswith(".")
        if not whole or not isinstance(node, dict) or not self._holds(node):
            raise FormatError(
                f"{self._location}: no weights under the key {key!r}; entries with tensors: "
                f"{self._list_entries(top)}."
            )
        return node

    def guess(self, top: Dict, all_if_unclear: bool) -> tuple[Dict, str, tuple[str, ...]]:
        """The dict with the weights, its key, and a note if there was a choice."""
        nested = [k for k, v in top.items() if not isinstance(v, self._leaf) and self._holds(v)]
        direct = [k for k, v in top.items() if isinstance(v, self._leaf)]
        for prefix, tree in self._candidates(top, direct, nested):
            present = [k for k in WEIGHT_KEYS if self._is_weights(tree.get(k))]
            if present:
                first, *others = (prefix + k for k in present)
                also = ", ".join(map(repr, others))
                note = f"weights under {first!r} (also found: {also}; {_CHOOSE})"
                chosen = tree[present[0]]
                assert isinstance(chosen, dict)
                return chosen, first, (note,) if others else ()
        aside = [k for k in nested if is_training_state(k)]
        if direct and len(aside) == len(nested):
            note = "left out, not weights: " + ", ".join(map(repr, aside))
            if not aside:
                return top, "", ()
            return {k: v for k, v in top.items() if k not in aside}, "", (note,)
        inner = [k for name in nested for k in _keys(top[name])]
        if all_if_unclear and not any(map(is_training_state, (*nested, *inner))):
            return top, "", ()
        if not direct and not nested:
            keys = few((repr(str(k)) for k in top), limit=12) or "none"
            raise FormatError(
                f"{self._location}: contains no tensors (keys: {keys}): save model.state_dict()."
            )
        raise FormatError(
            f"{self._location}: it is not clear which tensors are the weights; {_CHOOSE} from: "
            f"{self._list_entries(top)}."
        )

    def _candidates(
        self, top: Dict, direct: list[object], nested: list[object]
    ) -> Iterator[tuple[str, Dict]]:
        """The top, and the dict under its only key (`app` in PyTorch's own examples)."""
        yield "", top
        if len(nested) == 1 and not direct and isinstance(only := top[nested[0]], dict):
            yield f"{nested[0]}.", only

    def _is_weights(self, value: object) -> bool:
        return isinstance(value, dict) and self._holds(value)

    def _holds(self, thing: object) -> bool:
        """Whether it contains a tensor at any depth; reference cycles are handled."""
        if id(thing) not in self._known:
            todo, seen = [thing], {id(thing)}
            found = False
            while todo and not found:
                for value in inside(todo.pop()):
                    found = found or isinstance(value, self._leaf)
                    if id(value) not in seen:
                        seen.add(id(value))
                        todo.append(value)
            self._known[id(thing)] = found
        return self._known[id(thing)]

    def _list_entries(self, top: Dict) -> str:
        names = []
        value: Any
        for key, value in top.items():
            if isinstance(value, self._leaf) or not self._holds(value):
                continue
            direct = any(isinstance(part, self._leaf) for part in inside(value))
            deeper = [] if direct else [k for k in _keys(value) if self._is_weights(value[k])]
            names += [f"{key}.{k}" for k in deeper] or [str(key)]
        return (few(map(repr, names), limit=12) or "none") + " ('.' is everything)"

    def collect(self, tree: Dict, key: str, notes: tuple[str, ...]) -> FoundWeights[Leaf]:
        """The tensors in a dict by dotted names, without the prefixes of wrappers."""
        flat: list[tuple[str, Leaf]] = []
        left_out: list[str] = []
        text = 0
        for name, value in self._walk(tree, "", 0):
            text += len(name)
            if isinstance(value, self._leaf):
                flat.append((name, value))
            else:
                left_out.append(name)
            if len(flat) + len(left_out) > _MAX_NAMES or text > _MAX_TEXT:
                raise FormatError(
                    f"{self._location}: more than {_MAX_NAMES} names, or more than {_MAX_TEXT} "
                    "characters in them; the file may be damaged."
                )
        if left_out:
            notes += (f"left out, not tensors: {few(map(repr, left_out), limit=3)}",)
        return FoundWeights(self._canonical(flat), key, notes, _metadata(tree))

    def _walk(self, tree: Dict, prefix: str, depth: int) -> Iterator[tuple[str, object]]:
        for key, value in tree.items():
            if not isinstance(key, str | int):
                raise FormatError(
                    f"{self._location}: {prefix!r} has a tensor with a {type(key).__name__} as key."
                )
            name = f"{prefix}{key}"
            if isinstance(value, self._leaf) or not self._holds(value):
                yield name, value
            elif isinstance(value, dict) and depth < _MAX_DEPTH:
                yield from self._walk(value, f"{name}.", depth + 1)
            else:
                raise FormatError(
                    f"{self._location}: {name[:200]!r} is a {type(value).__name__} with tensors in "
                    "it, or nested too deeply; weights are dicts of named tensors."
                )

    def _canonical(self, flat: list[tuple[str, Leaf]]) -> dict[str, Leaf]:
        wrapped = bool(flat) and all(name.startswith("module.") for name, _ in flat)
        found: dict[str, Leaf] = {}
        for name, value in flat:
            plain = name.removeprefix("module." if wrapped else "").replace("_orig_mod.", "")
            if plain in found:
                raise FormatError(
                    f"{self._location}: two tensors have the name {plain!r} (one of them from "
                    f"{name!r}): rename one."
                )
            if not plain.isascii() and not is_text(plain):
                raise FormatError(f"{self._location}: the name {plain!r} is not valid text.")
            found[plain] = value
        return found


def _metadata(tree: object) -> dict[str, str]:
    attributes = tree.attributes if isinstance(tree, Tree) else None
    found = attributes.get("_metadata") if isinstance(attributes, dict) else None
    pairs = found.items() if isinstance(found, dict) else ()
    return {k: v for k, v in pairs if isinstance(k, str) and isinstance(v, str)}


def _keys(thing: object) -> list[object]:
    return list(thing) if isinstance(thing, dict) else []
