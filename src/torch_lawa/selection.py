"""Which tensors of a model are averaged, which come from the newest snapshot, and their names.

Names are canonical, without the prefixes of DDP, `torch.compile` and activation checkpointing. Tied
weights appear once, under their first name; the other names are recorded as ties. A sharded tensor
is represented by its local shard, a parameter whose master is elsewhere by that master.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Literal
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torch_lawa.errors import ConfigError, LayoutError
from torch_lawa.masters import Masters, check_own_weights, masters_of
from torch_lawa.mean.dtypes import is_statistic
from torch_lawa.shards import Sharding, is_fsdp, is_sharded, local, reshard, sharding_of

__all__ = [
    "BufferRule",
    "FrozenRule",
    "ModelParts",
    "Selection",
    "Selector",
    "check_same",
    "live_shardings",
    "live_tensors",
    "unwrap",
    "wrappers",
    "write_into",
]

BufferRule = Literal["newest", "average"]
FrozenRule = Literal["keep", "omit"]

# Wrapper classes, and the attribute under which each holds the wrapped module.
_WRAPPERS = {
    "DeepSpeedEngine": "module",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}
_WRAPPED_BY = ("torch.", "deepspeed.")
_wrapper_attributes: dict[type[nn.Module], str | None] = {}

# What must be unchanged for a tensor of a model to count as the one seen before. Its strides may
# change: copying goes by position. No weak reference: PyTorch could not convert the tensor any more
# (`torch.utils.swap_tensors`).
_Seen = tuple[int, int, torch.Size, torch.dtype, bool]


@dataclass(frozen=True, eq=False)
class Selection:
    """The live tensors of one model, each once, by their rule."""

    averaged: dict[str, Tensor]
    kept: dict[str, Tensor]  # from the newest snapshot: integers, buffers, frozen, excluded
    omitted: dict[str, Tensor]  # frozen, and not collected at all
    ties: dict[str, str]  # another name of a tensor -> its name above
    shardings: dict[str, Sharding]  # what the sharded tensors above are shards of
    excluded: tuple[str, ...]  # those of the kept that are floating-point, but excluded by name
    version: int  # the same as long as the selector sees the same, unchanged tensors

    def all(self) -> dict[str, Tensor]:
        """Every tensor, of any rule."""
        return {**self.averaged, **self.kept, **self.omitted}


class ModelParts(nn.ModuleList):
    """The pipeline stages that one rank holds, as one model.

    The names of the tensors are those in the stages, which are those of the whole model.

    >>> stages = [nn.ModuleDict({"a": nn.Linear(1, 1)}), nn.ModuleDict({"b": nn.Linear(1, 1)})]
    >>> list(live_tensors(ModelParts(stages)))
    ['a.weight', 'a.bias', 'b.weight', 'b.bias']
    """

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        super().__init__(parts)
        seen: set[str] = set()
        for name, _, _ in _of_module(self, None):
            if name in seen:
                raise LayoutError(
                    f"two parts of the model have a tensor {name!r}: pass the stages of one model, "
                    "with the names that they have in it."
                )
            seen.add(name)


class Selector:
    """Sorts the tensors of a module, or of a state dict, by their rule.

    It remembers the last model, without keeping its tensors alive, so that the usual case (the same
    model again) costs one quick traversal.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    >>> chosen = Selector()(model)
    >>> list(chosen.averaged), list(chosen.kept)[:2]
    (['0.weight', '0.bias', '1.weight', '1.bias'], ['1.running_mean', '1.running_var'])
    """

    def __init__(
        self,
        *,
        buffers: BufferRule = "newest",
        frozen: FrozenRule = "keep",
        include: str | Sequence[str] = (),
        exclude: str | Sequence[str] = (),
    ) -> None:
        self.buffers, self.frozen = buffers, frozen
        self.include, self.exclude = _patterns("include", include), _patterns("exclude", exclude)
        self._model: ref[nn.Module] | None = None  # what was seen last
        self._seen: list[_Seen] | None = None
        self._version = 0  # counts how often the tensors were sorted
        self._positions: list[dict[str, int]] = []
        self._ties: dict[str, str] = {}
        self._shardings: dict[str, Sharding] = {}
        self._excluded: tuple[str, ...] = ()

    def __call__(self, source: nn.Module | Mapping[str, Tensor]) -> Selection:
        """The selection of one model."""
        if isinstance(source, nn.Module):
            masters = masters_of(source)
            found = _tensors(source)
            held = found if masters is None else [masters.of(tensor) for tensor in found]
            tensors = [local(tensor) for tensor in held]
            same = self._model is not None and self._model() is unwrap(source)
            if not same or not _unchanged(tensors, found, self._seen):
                self._sort(list(_of_module(source, masters)))
                self._model = ref(unwrap(source))
                self._seen = list(map(_note, tensors, found))
        elif isinstance(source, Mapping):
            walked = list(_of_mapping(source))
            tensors = [local(tensor) for _, tensor, _ in walked]
            self._sort(walked)
        else:
            raise LayoutError(
                f"expected a module or a state dict, got {type(source).__name__}: pass the model "
                "itself or model.state_dict()."
            )
        averaged, kept, omitted = (
            {name: tensors[i] for name, i in positions.items()} for positions in self._positions
        )
        ties, shardings = self._ties, self._shardings
        return Selection(averaged, kept, omitted, ties, shardings, self._excluded, self._version)

    def _sort(self, walked: list[tuple[str, Tensor, str]]) -> None:
        self._seen = None
        self._version += 1
        averaged: dict[str, int] = {}
        kept: dict[str, int] = {}
        omitted: dict[str, int] = {}
        excluded: list[str] = []
        ties: dict[str, str] = {}
        names: dict[object, list[str]] = {}  # the names of each tensor: more than one if tied
        trained: set[object] = set()  # by any of their names
        identities = []
        for name, tensor, kind in walked:
            _check(name, tensor)
            identities.append(_identity(tensor))
            names.setdefault(identities[-1], []).append(name)
            if kind == "trained" or (kind == "buffer" and self.buffers == "average"):
                trained.add(identities[-1])
        self._check_patterns([name for name, _, _ in walked])
        for i, (name, tensor, kind) in enumerate(walked):
            first, *others = names[identities[i]]
            if first != name:
                ties[name] = first
                continue
            inexact = tensor.is_floating_point() or tensor.is_complex()
            left_out = inexact and not self._included([first, *others])
            if left_out:
                excluded.append(name)
            if inexact and identities[i] in trained and not left_out:
                averaged[name] = i
            elif kind == "frozen" and self.frozen == "omit":
                omitted[name] = i
            else:
                kept[name] = i
        self._excluded = tuple(excluded)
        self._positions, self._ties = [averaged, kept, omitted], ties
        shardings = {name: sharding_of(walked[i][1]) for name, i in (averaged | kept).items()}
        self._shardings = {name: found for name, found in shardings.items() if found is not None}

    def _included(self, names: Sequence[str]) -> bool:
        """Whether the patterns select a tensor with these names, any of which may match."""
        if self.include and not _any_match(names, self.include):
            return False
        return not _any_match(names, self.exclude)

    def _check_patterns(self, names: Sequence[str]) -> None:
        """Raise for a pattern that matches no tensor: most likely it is misspelled."""
        for option, patterns in (("include", self.include), ("exclude", self.exclude)):
            for pattern in patterns:
                if not _any_match(names, [pattern]):
                    near = get_close_matches(pattern.replace("*", ""), names, n=3, cutoff=0.0)
                    raise ConfigError(
                        f"{option}={pattern!r}: no tensor of the model has a name that matches; "
                        f"the nearest are {', '.join(map(repr, near))}."
                    )


def _patterns(option: str, given: str | Sequence[str]) -> tuple[str, ...]:
    listed = isinstance(given, Iterable) and not isinstance(given, str)
    patterns = tuple(given) if listed else (given,)
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            raise ConfigError(
                f"{option}={given!r}: give name patterns, such as {option}=['*.embed.*']."
            )
    return patterns  # type: ignore[return-value]


def _any_match(names: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def live_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Canonical name -> live tensor (or its local shard); tied tensors once."""
    found: dict[object, tuple[str, Tensor]] = {}
    for name, tensor, _ in _live(model):
        _check(name, tensor)
        found.setdefault(_identity(tensor), (name, local(tensor)))
    return dict(found.values())


def live_shardings(model: nn.Module) -> dict[str, Sharding]:
    """Canonical name -> what the tensor is a shard of, for sharded tensors."""
    found = {name: sharding_of(tensor) for name, tensor, _ in _live(model)}
    return {name: sharding for name, sharding in found.items() if sharding is not None}


def _live(model: nn.Module) -> Iterator[tuple[str, Tensor, str]]:
    if not isinstance(model, nn.Module):
        raise LayoutError(
            f"expected a module, got {type(model).__name__}: weights are swapped into the model "
            "itself; averager.average() returns a state dict."
        )
    reshard(model)
    return _of_module(model, masters_of(model))


def write_into(target: Tensor, source: Tensor) -> None:
    """`target.copy_(source)`, also for an expanded `target`, and for one made in inference mode."""
    for dim, stride in enumerate(target.stride()):
        if stride == 0 and target.shape[dim] > 1:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    with torch.inference_mode() if target.is_inference() else contextlib.nullcontext():
        target.copy_(source)


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside DDP, `torch.compile` and the like."""
    while (inside := _wrapped(module)) is not None:
        module = inside
    return module


def wrappers(module: nn.Module) -> list[nn.Module]:
    """What `unwrap` takes off, outermost first."""
    found = []
    while (inside := _wrapped(module)) is not None:
        found.append(module)
        module = inside
    return found


def _wrapped(module: nn.Module) -> nn.Module | None:
    attribute = _wrapper_attribute(type(module))
    return None if attribute is None else module._modules.get(attribute)


def _wrapper_attribute(cls: type[nn.Module]) -> str | None:
    """Where a class holds the wrapped module, by name: importing wrappers loads half of PyTorch."""
    if cls not in _wrapper_attributes:
        names = (c.__name__ for c in cls.__mro__ if c.__module__.startswith(_WRAPPED_BY))
        _wrapper_attributes[cls] = next((_WRAPPERS[n] for n in names if n in _WRAPPERS), None)
    return _wrapper_attributes[cls]


def _of_module(
    module: nn.Module, masters: Masters | None, prefix: str = ""
) -> Iterator[tuple[str, Tensor, str]]:
    """Every parameter and persistent buffer with its canonical name, duplicates included."""
    module = unwrap(module)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            kind = "trained" if parameter.requires_grad else "frozen"
            yield prefix + name, parameter if masters is None else masters.of(parameter), kind
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield prefix + name, buffer, "buffer"
    for name, child in module._modules.items():
        if child is not None:
            inside = prefix if isinstance(module, ModelParts) else f"{prefix}{name}."
            yield from _of_module(child, masters, inside)


def _tensors(module: nn.Module) -> list[Tensor]:
    """The tensors of `_of_module` in the same order, without the cost of their names.

    Frees gathered parameters of FSDP2 on the way: see `reshard`.
    """
    found: list[Tensor | None] = []
    todo: list[nn.Module | None] = [module]
    while todo:
        inside = todo.pop()
        if inside is None:
            continue
        if _wrapper_attribute(type(inside)):
            inside = unwrap(inside)
        if is_fsdp(type(inside)):
            inside.reshard()  # type: ignore[operator]
        if inside._parameters:
            found += inside._parameters.values()
        if inside._buffers:
            hidden = inside._non_persistent_buffers_set
            found += [b for name, b in inside._buffers.items() if name not in hidden]
        if inside._modules:
            todo += reversed(inside._modules.values())
    return [tensor for tensor in found if tensor is not None]


def _note(tensor: Tensor, found: Tensor) -> _Seen:
    """What is compared of a tensor; `found` is the one in the module.

    Neither the local shard of a parameter nor its master follows its `requires_grad`.
    """
    return id(tensor), tensor.data_ptr(), tensor.shape, tensor.dtype, found.requires_grad


def _unchanged(tensors: list[Tensor], found: list[Tensor], seen: list[_Seen] | None) -> bool:
    """Whether every tensor is the one seen before: not replaced, moved, reshaped or (un)frozen.

    The dtype is compared too: a model that was converted twice may have its old memory again.
    """
    if seen is None or len(tensors) != len(seen):
        return False
    return all(
        identity == id(tensor)
        and tensor.data_ptr() == address
        and tensor.shape == shape
        and tensor.dtype == dtype
        and own.requires_grad == trained
        for tensor, own, (identity, address, shape, dtype, trained) in zip(
            tensors, found, seen, strict=True
        )
    )


def _of_mapping(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, str]]:
    """The tensors of a state dict; all but running statistics count as trained."""
    strip = "module." if state and all(name.startswith("module.") for name in state) else ""
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise LayoutError(
                f"{name!r} is of type {type(tensor).__name__}, not a tensor: pass the model itself "
                "or the flat state dict inside the checkpoint."
            )
        kind = "buffer" if is_statistic(name) else "trained"
        yield name[len(strip) :].replace("_orig_mod.", ""), tensor, kind


def _identity(tensor: Tensor) -> object:
    """Equal for tensors that view the same memory in the same way.

    A sharded tensor is identified by its DTensor: its local shard may be empty, and ties must be
    the same on every rank. Subclasses that wrap other tensors have no address, and all say 0.
    """
    if is_sharded(tensor) or tensor.numel() == 0 or tensor.data_ptr() == 0:
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _check(name: str, tensor: Tensor) -> None:
    check_own_weights(name, tensor)
    problem, dense = None, "only dense tensors are collected; give such a buffer persistent=False"
    if is_lazy(tensor):
        problem = "is not initialised yet (a lazy layer): run one forward pass first"
    elif tensor.is_meta:
        problem = "is on the meta device and has no values: materialise the model first"
    elif tensor.layout != torch.strided:
        problem = f"has layout {tensor.layout}: {dense}"
    elif tensor.is_quantized or tensor.is_nested:
        problem = f"is {'quantized' if tensor.is_quantized else 'nested'}: {dense}"
    if problem:
        raise LayoutError(f"tensor {name!r} {problem}.")


def _replaced_by(name: str, live: Mapping[str, Tensor]) -> str:
    """What replaced a tensor, if its module was re-parametrised."""
    module, dot, attribute = name.rpartition(".")
    # torch.nn.utils.prune, weight_norm and spectral_norm, and torch.nn.utils.parametrize.
    stems = (f"{attribute}_orig", f"{attribute}_g", f"parametrizations.{attribute}.original")
    for stem in stems:
        found = next((other for other in live if other.startswith(f"{module}{dot}{stem}")), None)
        if found is not None:
            return (
                f": {found!r} replaced it. Pruning, weight_norm and other re-parametrisations must "
                "happen before the first snapshot"
            )
    return ""


def check_same(
    averaged: Mapping[str, tuple[torch.Size, torch.dtype]],
    kept: Mapping[str, tuple[torch.Size, torch.dtype]],
    joined: Sequence[str],
    selection: Selection,
) -> None:
    """Raise if the model does not match the window.

    Tensors that only come from the newest snapshot may have another shape and dtype in each.
    """
    advice = "call averager.reset() to begin a new window with this model."
    before, live = {**averaged, **kept}, selection.all()
    for name, (shape, dtype) in before.items():
        tensor = live.get(name)
        if tensor is None:
            raise LayoutError(
                f"tensor {name!r} is in the window, but the model no longer has it"
                f"{_replaced_by(name, live)}; {advice}"
            )
        if name in kept and name not in joined:
            continue
        if tensor.shape != shape:
            raise LayoutError(
                f"tensor {name!r} has shape {tuple(tensor.shape)}, but {tuple(shape)} in the "
                f"window; {advice}"
            )
        if tensor.dtype != dtype:
            raise LayoutError(
                f"tensor {name!r} is {tensor.dtype}, but {dtype} in the window; {advice}"
            )
    for name in (*selection.averaged, *selection.kept):
        if name not in before:
            raise LayoutError(
                f"tensor {name!r} is new: when the window began, the model did not have it, it "
                f"was tied to another one, or it was frozen and omitted; {advice}"
            )
