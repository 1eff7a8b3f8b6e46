"""The plan of an export: which tensors go into which files, in the order they are written."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from torch_lawa.checkpoints.formats.base import TensorSpec
from torch_lawa.checkpoints.formats.safetensors_folder import (
    group_by_size,
    shard_names,
    widest_first,
)
from torch_lawa.checkpoints.formats.safetensors_torch import spec_of
from torch_lawa.checkpoints.provenance import note_provenance, provenance
from torch_lawa.coefficients import Coefficients, Weights, name_coefficients
from torch_lawa.errors import LayoutError
from torch_lawa.export.hub_files import HubFiles, hub_files_for
from torch_lawa.shards import Sharding
from torch_lawa.units import parse_bytes
from torch_lawa.validation import check_float
from torch_lawa.window import Window

__all__ = ["ExportPlan", "ExportedTensor", "plan_export"]


@dataclass(frozen=True)
class ExportedTensor:
    """A tensor of the result: its name in the window and in the file, its dtype and its spec."""

    name: str
    written: str
    dtype: torch.dtype
    spec: TensorSpec


@dataclass(frozen=True)
class ExportedFile:
    """A safetensors file of the result: its tensors in order, and other names of tied ones."""

    name: str
    tensors: tuple[ExportedTensor, ...]
    aliases: Mapping[str, str]


@dataclass(frozen=True)
class ExportPlan:
    """Everything that is decided before the first value is computed."""

    n: int
    weights: Weights
    files: tuple[ExportedFile, ...]
    index: str | None  # the name of the index file, if there are several shards
    metadata: Mapping[str, str]
    hub_files: HubFiles
    signature: str  # equal on all ranks of one export

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.spec.nbytes for file in self.files for tensor in file.tensors)


def plan_export(
    window: Window,
    n: int,
    rule: Coefficients,
    model: nn.Module | None,
    *,
    dtype: torch.dtype | None,
    max_shard_size: int | str,
) -> ExportPlan:
    """Decide on names, dtypes and files; wrong arguments are refused here."""
    check_float(dtype)
    limit = parse_bytes(max_shard_size) if isinstance(max_shard_size, str) else max_shard_size
    hub_files = hub_files_for(model)
    tensors = _tensors(window, hub_files, dtype)
    groups = group_by_size(tensors, _spec, limit)
    stem = hub_files.stem
    names = shard_names(stem, len(groups)) if len(groups) > 1 else [f"{stem}.safetensors"]
    weights = window.weights(n, rule)
    steps = window.steps[-n:]
    if window.num_sampled and len(weights.numerators) > n and window.newest_step is not None:
        steps.append(window.newest_step)
    inputs = [
        {"step": step, "weight": numerator / weights.divisor}
        for step, numerator in zip(steps, weights.numerators, strict=True)
    ]
    made = {**provenance(name_coefficients(rule), inputs), "k": n}
    return ExportPlan(
        n=n,
        weights=weights,
        files=tuple(
            ExportedFile(name, widest_first(group, _spec), _aliases(window, group, hub_files))
            for name, group in zip(names, groups, strict=True)
        ),
        index=f"{stem}.safetensors.index.json" if len(groups) > 1 else None,
        metadata=note_provenance(made, {"step": str(steps[-1])}),
        hub_files=hub_files,
        signature=_signature(window, tensors, steps, weights, limit),
    )


def _tensors(
    window: Window, hub_files: HubFiles, dtype: torch.dtype | None
) -> list[ExportedTensor]:
    averaged = window.averaged.signature()
    found = []
    for name, (shape, own) in {**averaged, **window.kept.signature()}.items():
        written = hub_files.name_of(name, trained=name in averaged or name in window.excluded)
        if written is None:
            continue
        if name in window.shardings:
            shape = window.shardings[name].shape
            _check_gatherable(name, window.shardings[name])
        target = own
        if dtype is not None and own.is_floating_point:
            target = dtype
        elif dtype is not None and own.is_complex:
            target = dtype.to_complex()
        found.append(ExportedTensor(name, written, target, spec_of(name, target, shape)))
    return found


def _check_gatherable(name: str, sharding: Sharding) -> None:
    if (problem := sharding.problem) is not None:
        raise LayoutError(f"tensor {name!r} {problem}.")


def _aliases(window: Window, tensors: list[ExportedTensor], hub_files: HubFiles) -> dict[str, str]:
    """Names of tied tensors that are not in the file, with the name that is."""
    here = {tensor.name: tensor.written for tensor in tensors}
    names = {alias: hub_files.name_of(alias, trained=False) for alias in window.ties}
    return {
        written: here[window.ties[alias]]
        for alias, written in names.items()
        if written is not None and window.ties[alias] in here
    }


def _signature(
    window: Window,
    tensors: list[ExportedTensor],
    steps: list[int],
    weights: Weights,
    limit: int,
) -> str:
    digest = hashlib.sha256(f"{weights} {limit}\n".encode())
    for tensor in tensors:
        sharding = window.shardings.get(tensor.name)
        split = None if sharding is None else sharding.layout()
        digest.update(f"{tensor.name} {tensor.written} {tensor.spec} {split}\n".encode())
    return f"{len(tensors)} tensors ({digest.hexdigest()[:12]}) of steps {steps}"


def _spec(tensor: ExportedTensor) -> TensorSpec:
    return tensor.spec
