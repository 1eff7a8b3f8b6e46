"""An engine that keeps masters as DeepSpeed's ZeRO 1 and 2 do, for tests without DeepSpeed.

What is real is in `tests/integrations/test_deepspeed_online.py`. Here the flat groups may be cut
anywhere, not only into equal parts.
"""

import itertools
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class DeepSpeedZeroOptimizer:
    """Masters in flat groups; `cuts` are the borders of the ranks in each group.

    Masters are float64 and working copies float32: on CPUs, BatchNorm cannot mix narrower dtypes.
    """

    def __init__(self, groups: Sequence[Sequence[Any]], cuts: Sequence[Sequence[int]]) -> None:
        self.optimizer = None
        self.rank = dist.get_rank()
        self.real_dp_process_group = [dist.group.WORLD for _ in groups]
        self.nccl_start_alignment_factor, self.allgather_bucket_size = 2, 1
        self.single_partition_of_fp32_groups: list[Tensor] = []
        self.parallel_partitioned_bit16_groups: list[list[Tensor]] = []
        self.bit16_groups_flat: list[Tensor] = []
        for index, (group, borders) in enumerate(zip(groups, cuts, strict=True)):
            flat = torch.cat([p.data.flatten() for p in group])
            edges = list(itertools.pairwise([0, *borders, flat.numel()]))
            parts = [flat[begin:end] for begin, end in edges]
            begin, end = edges[self.rank]
            self.bit16_groups_flat.append(flat)
            self.parallel_partitioned_bit16_groups.append(parts)
            self.single_partition_of_fp32_groups.append(parts[self.rank].double())
            at = 0
            for p in group:
                p.data = flat[at : at + p.numel()].view(p.shape)
                low, high = max(at, begin), min(at + p.numel(), end)
                p._dp_group, p._hp_mapping = dist.group.WORLD, None
                if low < high:
                    p._hp_mapping = SimpleNamespace(
                        param_group_index=index,
                        hp_fragment_address=SimpleNamespace(start=low - begin, numel=high - low),
                        lp_fragment_address=SimpleNamespace(start=low - at, numel=high - low),
                    )
                at += p.numel()

    def update_lp_params(self) -> None:
        for parts, master in zip(
            self.parallel_partitioned_bit16_groups,
            self.single_partition_of_fp32_groups,
            strict=True,
        ):
            parts[self.rank].copy_(master)
        share(partitioned_param_groups=self.parallel_partitioned_bit16_groups)


def share(*, partitioned_param_groups: Any, **_: Any) -> None:
    """DeepSpeed's `all_gather_dp_groups`."""
    for parts in partitioned_param_groups:
        for rank, part in enumerate(parts):
            dist.broadcast(part, rank)


class DeepSpeedEngine(nn.Module):
    """The part of the engine that the averager asks."""

    has_moe_layers, mp_world_size, device = False, 1, torch.device("cpu")

    def __init__(self, module: nn.Module, optimizer: Any) -> None:
        super().__init__()
        self.module, self.optimizer = module, optimizer
        self.offload: Any = None

    def autotp_size(self) -> int:
        return 0

    def zero_offload_optimizer(self) -> Any:
        return self.offload

    def zero_offload_param(self) -> Any:
        return None

    def forward(self, *args: Any) -> Any:
        return self.module(*args)


DeepSpeedEngine.__module__ = "deepspeed.runtime.engine"


def install() -> None:
    """Let `import deepspeed` find this, in a process of its own: others look for the real one."""
    for name in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.utils"):
        sys.modules.setdefault(name, ModuleType(name))
    sys.modules["deepspeed.runtime.utils"].all_gather_dp_groups = share  # type: ignore[attr-defined]


def engine_for(module: nn.Module, seed: int) -> DeepSpeedEngine:
    """Two groups of parameters, cut at random; some rank may hold nothing of a group."""
    install()
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim < 2]
    generator = torch.Generator().manual_seed(seed)
    cuts = []
    for group in groups:
        numel = sum(p.numel() for p in group)
        borders = torch.randint(0, numel + 1, (dist.get_world_size() - 1,), generator=generator)
        cuts.append(sorted(borders.tolist()))
    return DeepSpeedEngine(module, DeepSpeedZeroOptimizer(groups, cuts))


def refill(engine: DeepSpeedEngine, step: int) -> dict[str, Tensor]:
    """New masters that do not depend on how they are cut; the whole of them, by name."""
    values = {}
    for name, p in engine.module.named_parameters():
        if not p.requires_grad:
            continue
        generator = torch.Generator().manual_seed(1000 * step + len(values))
        values[name] = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        if (found := p._hp_mapping) is not None:  # type: ignore[attr-defined]
            at, of = found.hp_fragment_address, found.lp_fragment_address
            group = engine.optimizer.single_partition_of_fp32_groups[found.param_group_index]
            run = values[name].flatten()[of.start : of.start + of.numel]
            group[at.start : at.start + at.numel] = run
    engine.optimizer.update_lp_params()
    for buffer in engine.module.buffers():
        buffer.fill_(step)
    return values
