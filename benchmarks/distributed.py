"""What averaging a sharded model costs: on its shards, or by gathering them.

    python benchmarks/distributed.py --out results/NAME      # two gloo processes on one machine

A transformer-like stack sharded by FSDP2. In turn, on the same shards: one plain copy of the
local shards (the floor), our `collect`, our `collect` and `average`, and an averager that gathers
every parameter (`full_tensor`) and adds it to a running mean, as averagers do that do not support
sharding. Times are of the slowest process, as ratios to the floor.
"""

import argparse
import os
import socket
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from record import Log, median
from torch import nn
from torch.distributed.fsdp import fully_shard

from torch_lawa import LatestWeightAverager


def stack(width: int, depth: int) -> nn.Module:
    def layer() -> nn.Module:
        return nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    model = nn.Sequential(*(layer() for _ in range(depth)))
    for part in model:
        fully_shard(part)
    return fully_shard(model)


class Gathering:
    """A running mean of whole parameters, on every rank."""

    def __init__(self) -> None:
        self.mean: list[torch.Tensor] = []
        self.count = 0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        whole = [parameter.full_tensor() for parameter in model.parameters()]  # type: ignore[attr-defined]
        if not self.mean:
            self.mean = [torch.zeros_like(tensor) for tensor in whole]
        self.count += 1
        torch._foreach_lerp_(self.mean, whole, 1.0 / self.count)


def work(
    rank: int, world_size: int, port: int, rounds: int, size: tuple[int, int], queue: Any
) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    model = stack(*size)
    shards = [parameter._local_tensor for parameter in model.parameters()]  # type: ignore[attr-defined]
    copies = [torch.empty_like(shard) for shard in shards]
    ours, read, gathering = LatestWeightAverager(k=6), LatestWeightAverager(k=6), Gathering()

    def collect_and_average() -> None:
        read.collect(model)
        read.average(min(len(read), 6))

    acts: dict[str, Callable[[], Any]] = {
        "copy of the shards (the floor)": lambda: torch._foreach_copy_(copies, shards),
        "collect": lambda: ours.collect(model),
        "collect and average of 6": collect_and_average,
        "gather and average": lambda: gathering.update(model),
    }
    for act in acts.values():
        for _ in range(7):  # buffers are made, memory is touched
            act()
    times: dict[str, list[float]] = {name: [] for name in acts}
    for _ in range(rounds):
        for name, act in acts.items():
            dist.barrier()
            begin = time.perf_counter()
            act()
            spent = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(spent, op=dist.ReduceOp.MAX)
            times[name].append(spent.item())
    if rank == 0:
        numel = sum(parameter.numel() for parameter in model.parameters())
        queue.put({"world_size": world_size, "numel": numel, "seconds": times})
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench-distributed"))
    parser.add_argument("--ranks", type=int, nargs="*", default=[2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=12)
    arguments = parser.parse_args()
    log = Log(arguments.out)
    for world_size in arguments.ranks:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        queue = mp.get_context("spawn").SimpleQueue()
        size = (arguments.width, arguments.depth)
        mp.start_processes(
            work,
            (world_size, port, arguments.rounds, size, queue),
            world_size,
            start_method="spawn",
        )
        found = queue.get()
        log.add(kind="update", **found)
        floor = median(found["seconds"]["copy of the shards (the floor)"])
        print(f"{found['numel']:,} parameters on {world_size} ranks, in copies of the shards")
        for name, seconds in found["seconds"].items():
            print(f"  {name:32} {median(seconds) / floor:8.2f}")


if __name__ == "__main__":
    main()
