"""The order to fill the files of a result: all that a process must know to make its share."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch_lawa.checkpoints.formats.base import Checkpoint, TensorSpec
from torch_lawa.checkpoints.storage.paths import LocalPath, Location
from torch_lawa.coefficients import Weights
from torch_lawa.errors import LayoutError
from torch_lawa.offline.engine import Span
from torch_lawa.offline.matching import PlannedTensor
from torch_lawa.offline.plan import AveragePlan
from torch_lawa.offline.shares import LaidFile, cut_evenly, spans_between

__all__ = ["Filling", "check_same", "check_unchanged", "plan_filling", "whole_name"]

_SAMPLES, _SAMPLED = 8, 4096


@dataclass(frozen=True)
class Filling:
    """Which checkpoints make which bytes of which files, and where the shares begin and end."""

    inputs: tuple[str, ...]
    fingerprints: tuple[str, ...]
    key: str | None
    weights: Weights
    files: tuple[LaidFile, ...]
    cuts: tuple[int, ...]

    def spans(self, rank: int) -> list[Span]:
        """The share of a process."""
        return spans_between(self.files, self.cuts[rank], self.cuts[rank + 1])

    def files_of(self, rank: int) -> list[LaidFile]:
        """The files that it writes to."""
        names = {tensor.name for tensor, _, _ in self.spans(rank)}
        return [f for f in self.files if any(tensor.name in names for tensor, _ in f.tensors)]

    def to_json(self) -> dict[str, Any]:
        """As it is sent."""
        return {
            "act": "fill",
            "inputs": self.inputs,
            "fingerprints": self.fingerprints,
            "key": self.key,
            "numerators": self.weights.numerators,
            "divisor": self.weights.divisor,
            "files": [[f.file, f.size, [_pack(*entry) for entry in f.tensors]] for f in self.files],
            "cuts": self.cuts,
        }

    @classmethod
    def from_json(cls, sent: dict[str, Any]) -> "Filling":
        """As it was sent."""
        return cls(
            inputs=tuple(sent["inputs"]),
            fingerprints=tuple(sent["fingerprints"]),
            key=sent["key"],
            weights=Weights(tuple(sent["numerators"]), sent["divisor"]),
            files=tuple(
                LaidFile(file, size, tuple(_unpack(entry) for entry in entries))
                for file, size, entries in sent["files"]
            ),
            cuts=tuple(sent["cuts"]),
        )


def plan_filling(
    plan: AveragePlan, opened: Sequence[Checkpoint], files: Sequence[LaidFile], num_shares: int
) -> Filling:
    """Share the work of a plan."""
    num_averaged = sum(w != 0.0 for w in plan.weights.numerators)
    return Filling(
        inputs=tuple(whole_name(i.location) for i in plan.inputs),
        fingerprints=tuple(_fingerprint(checkpoint) for checkpoint in opened),
        key=plan.key,
        weights=plan.weights,
        files=tuple(files),
        cuts=tuple(cut_evenly(files, num_shares, num_averaged)),
    )


def whole_name(location: Location) -> str:
    """A name that means the same in a process with another current folder."""
    return os.path.abspath(location.path) if isinstance(location, LocalPath) else str(location)


def check_unchanged(tensors: Iterable[PlannedTensor], opened: Sequence[Checkpoint]) -> None:
    """Refuse checkpoints that are not what the plan was made for."""
    tensors = list(tensors)
    for checkpoint in opened:
        for tensor in tensors:
            if checkpoint.tensors.get(tensor.name) != tensor.source:
                raise LayoutError(
                    f"{checkpoint.location}: tensor {tensor.name!r} changed since the plan was "
                    "made; plan again."
                )


def check_same(filling: Filling, opened: Sequence[Checkpoint]) -> None:
    """Refuse files that are others than rank 0 has under the same names."""
    check_unchanged((tensor for file in filling.files for tensor, _ in file.tensors), opened)
    for checkpoint, fingerprint in zip(opened, filling.fingerprints, strict=True):
        if _fingerprint(checkpoint) != fingerprint:
            raise LayoutError(
                f"{checkpoint.location}: is another checkpoint here than where rank 0 runs. All "
                "processes must read the same files."
            )


def _fingerprint(checkpoint: Checkpoint) -> str:
    """Of its tensors and, where reading costs nothing, of some values."""
    digest = hashlib.sha256()
    names = list(checkpoint.tensors)
    for name in names:
        digest.update(f"{name} {checkpoint.tensors[name]}\n".encode())
    if checkpoint.location.local:
        for name in names[:: -(-len(names) // _SAMPLES) or 1]:
            end = min(_SAMPLED, checkpoint.tensors[name].nbytes)
            digest.update(checkpoint.read(name, 0, end).tobytes())
    return digest.hexdigest()


def _pack(tensor: PlannedTensor, start: int) -> list[Any]:
    source, target = tensor.source, tensor.target
    return [tensor.name, source.dtype, target.dtype, source.shape, tensor.rule, start]


def _unpack(entry: list[Any]) -> tuple[PlannedTensor, int]:
    name, source, target, shape, rule, start = entry
    specs = TensorSpec(source, tuple(shape)), TensorSpec(target, tuple(shape))
    # What it is called in the output stands in the header, which rank 0 wrote.
    return PlannedTensor(name, *specs, rule, name), start
