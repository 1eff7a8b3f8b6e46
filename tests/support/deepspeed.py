"""Folders like those of DeepSpeed, written by PyTorch alone, and folders that it wrote itself."""

import math
import tarfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

RECORDED = Path(__file__).parents[1] / "recorded" / "deepspeed.tar.xz"
MODEL, OPTIM = "mp_rank_00_model_states.pt", "mp_rank_00_optim_states.pt"

State = Mapping[str, Tensor]


def unpack_recorded(folder: Path) -> Path:
    """The checkpoints that `tests/recorded/record_deepspeed.py` recorded."""
    with tarfile.open(RECORDED) as archive:
        archive.extractall(folder, filter="data")
    return folder


def save_zero(
    folder: Path,
    groups: Sequence[State],
    *,
    stage: int,
    ranks: int,
    buffers: State | None = None,
    frozen: State | None = None,
    tied: Mapping[str, str] | None = None,
    step: int = 0,
    optimizer_state: Mapping[str, Any] | None = None,
    **client_state: Any,
) -> None:
    """Save the parameters of each group, and other tensors, as ZeRO of a stage does."""
    folder.mkdir(parents=True)
    buffers, frozen = buffers or {}, frozen or {}
    for rank in range(ranks):
        model = {
            "module": OrderedDict(buffers),
            "buffer_names": list(buffers),
            "param_shapes": [OrderedDict((n, t.shape) for n, t in g.items()) for g in groups],
            "frozen_param_shapes": {name: tensor.shape for name, tensor in frozen.items()},
            "frozen_param_fragments": {
                name: _share(tensor, ranks)[rank].clone() if stage == 3 else tensor
                for name, tensor in frozen.items()
            },
            "shared_params": dict(tied or {}),
            "global_steps": step,
            **client_state,
        }
        if stage == 3 or rank == 0:
            name = f"zero_pp_rank_{rank}_{MODEL}" if stage == 3 else MODEL
            torch.save(model, folder / name)
        optim = {
            "zero_stage": stage,
            "partition_count": ranks if stage == 3 else [ranks] * len(groups),
            ("fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"): [
                _flatten(group, stage, ranks)[rank].clone() for group in groups
            ],
            "base_optimizer_state": {"state": {0: {"exp_avg": torch.rand(3)}}},
            **(optimizer_state or {}),
        }
        torch.save({"optimizer_state_dict": optim}, folder / f"zero_pp_rank_{rank}_{OPTIM}")


def _flatten(group: State, stage: int, ranks: int) -> list[Tensor]:
    """Each rank's part of a group."""
    if stage == 3:
        shares = [_share(tensor, ranks) for tensor in group.values()]
        return [torch.cat([share[rank] for share in shares]) for rank in range(ranks)]
    values = torch.cat([tensor.reshape(-1) for tensor in group.values()])
    unit = 2 * ranks
    padded = values.new_zeros(math.ceil(len(values) / unit) * unit)
    padded[: len(values)] = values
    parts = list(padded.split(len(padded) // ranks)) if len(padded) else [padded] * ranks
    parts[-1] = parts[-1][: max(0, len(parts[-1]) - len(padded) + len(values))]  # without the end
    return parts


def _share(tensor: Tensor, ranks: int) -> list[Tensor]:
    """A parameter of ZeRO-3: equal parts, the last of them padded."""
    size = math.ceil(tensor.numel() / ranks)
    padded = tensor.new_full((size * ranks,), float("nan"))
    padded[: tensor.numel()] = tensor.reshape(-1)
    return [padded[rank * size : (rank + 1) * size] for rank in range(ranks)]
