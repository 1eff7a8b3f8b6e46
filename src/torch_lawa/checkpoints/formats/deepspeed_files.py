"""The names of the files in a DeepSpeed checkpoint, and which of them belong to which rank."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_lawa.errors import FormatError

if TYPE_CHECKING:
    from torch_lawa.checkpoints.storage.paths import Location

__all__ = ["FOLDER_FILES", "FOLDER_PARTS", "RankFiles"]

_MODEL, _OPTIM = "mp_rank_00_model_states.pt", "mp_rank_00_optim_states.pt"
_PRECISIONS = ("", "bf16_", "fp16_")
FOLDER_FILES = (
    *(_MODEL, f"zero_pp_rank_0_{_MODEL}"),
    *(f"{precision}zero_pp_rank_0_{_OPTIM}" for precision in _PRECISIONS),
)
FOLDER_PARTS = (
    rf"(?:(?P<precision>{'|'.join(_PRECISIONS)})zero_pp_rank_(?P<rank>[0-9]{{1,9}})_)?"
    r"mp_rank_(?P<slice>[0-9]{1,9})_(?P<kind>model|optim)_states\.pt"
)
_PART = re.compile(FOLDER_PARTS)
_EXPERTS = re.compile(r"(layer_.*_expert|expp_rank)_.*_states\.pt")
_LAYER = re.compile(r"layer_.*model_states\.pt")
_INSTEAD = "save the model's state dict instead"
_AGAIN = "Save or copy the checkpoint again."


@dataclass(frozen=True)
class RankFiles:
    """The files in a folder: with ZeRO-3 `model` has one per rank, otherwise `whole` is one."""

    folder: "Location"
    whole: "Location | None"
    model: "Mapping[int, Location]"
    optim: "Mapping[int, Location]"

    @classmethod
    def find(cls, folder: "Location", names: Iterable[str]) -> "RankFiles":
        """Sort the names in a folder; refuse parallelism other than data parallelism."""
        whole = None
        model: dict[int, Location] = {}
        optim: dict[int, Location] = {}
        for name in sorted(names):
            file, found = folder.child(name), _PART.fullmatch(name)
            if _EXPERTS.fullmatch(name):
                raise FormatError(
                    f"{file}: from a mixture of experts, whose DeepSpeed checkpoints are not "
                    f"supported: {_INSTEAD}."
                )
            if _LAYER.fullmatch(name) or (found and int(found["slice"])):
                raise FormatError(
                    f"{file}: from tensor or pipeline parallelism; DeepSpeed checkpoints are "
                    f"supported if they are data-parallel only: {_INSTEAD}."
                )
            if found is None:
                continue
            if found["rank"] is None:
                whole = file if found["kind"] == "model" else whole
                continue
            ranks, rank = model if found["kind"] == "model" else optim, int(found["rank"])
            if rank in ranks:
                raise FormatError(
                    f"{file}: there is also {ranks[rank].name}. One of them is from another "
                    "checkpoint: remove it."
                )
            ranks[rank] = file
        if whole is not None and model:
            raise FormatError(
                f"{whole}: there is also {model[min(model)].name}, which only ZeRO-3 writes. One "
                "of them is from another checkpoint: remove it."
            )
        return cls(folder, whole, model, optim)

    def require_model(self, count: int) -> "list[Location]":
        """The model states of ranks 0 to `count` - 1, with ZeRO-3."""
        return self._require(self.model, count, _MODEL)

    def require_optim(self, count: int) -> "list[Location]":
        """The optimizer states of ranks 0 to `count` - 1."""
        return self._require(self.optim, count, _OPTIM)

    def require_whole(self) -> "Location":
        """The model states of all ranks, before ZeRO-3."""
        return self.folder.child(_MODEL) if self.whole is None else self.whole

    def _require(self, ranks: "Mapping[int, Location]", count: int, kind: str) -> "list[Location]":
        """The files of all ranks; there must be no others."""
        known = next(iter(ranks.values())).name if ranks else f"zero_pp_rank_0_{kind}"
        for rank in range(min(count, len(ranks) + 1)):
            if rank not in ranks:
                name = re.sub(r"(?<=zero_pp_rank_)[0-9]+", str(rank), known)
                raise FormatError(
                    f"{self.folder.child(name)}: does not exist, but the checkpoint is from "
                    f"{count} ranks. {_AGAIN}"
                )
        extra = [file for rank, file in ranks.items() if rank >= count]
        if extra:
            raise FormatError(
                f"{extra[0]}: the checkpoint is from {count} ranks, so this file is from another. "
                "Remove it."
            )
        return [ranks[rank] for rank in range(count)]
