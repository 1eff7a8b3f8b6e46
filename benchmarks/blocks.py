"""How long a block of the mean should be, and how much of a sliding sum is added up afresh.

python benchmarks/blocks.py --out results/NAME      # a few minutes on one core
"""

import argparse
import time
from pathlib import Path

import torch
from record import Log, median

from torch_lawa.coefficients import Uniform
from torch_lawa.mean import blocks as mean_module
from torch_lawa.mean.blocks import mean_blocks
from torch_lawa.mean.sliding_sum import _ROW, SlidingSum


def lengths(log: Log) -> None:
    """The mean of 6 snapshots of 25 M values into memory that was touched before."""
    snapshots = [torch.randn(25_000_000) for _ in range(6)]
    out = torch.zeros(25_000_000)
    weights = Uniform().weights(6)
    for power in (12, 14, 15, 16, 17, 18, 19, 20, 22, 25):
        mean_module._CPU_BLOCK = 1 << power
        spent = []
        for _ in range(7):
            start = time.perf_counter()
            for at, block in mean_blocks(snapshots, weights):
                out[at : at + block.numel()].copy_(block)
            spent.append(time.perf_counter() - start)
        log.add(kind="length", power=power, seconds=spent)
        print(f"2**{power} values a block: {1e3 * median(spent):.0f} ms", flush=True)
    mean_module._CPU_BLOCK = 1 << 18


def rows(log: Log) -> None:
    """Weights of a ResNet's size that drift by 1 % of their scale a snapshot."""
    for k in (4, 16, 64):
        torch.manual_seed(0)
        stream = [torch.randn(2_000_000) * 0.02]
        for _ in range(k + 20):
            stream.append(stream[-1] + torch.randn(2_000_000) * 2e-4)
        total = SlidingSum(k)
        total.rebuild(range(k), stream[:k])
        afresh = []
        for i in range(k, k + 20):
            ids = range(i - k + 1, i + 1)
            total.slide(ids, [stream[j] for j in ids], stream[i - k])
            distrusted = int((total._until >= i - k).sum())
            afresh.append(distrusted / (2_000_000 // _ROW))
        log.add(kind="rows", k=k, share_afresh=afresh)
        print(f"k={k}: {1e6 * median(afresh):.0f} rows in a million are added up afresh")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench-blocks"))
    torch.set_num_threads(1)
    log = Log(parser.parse_args().out)
    lengths(log)
    rows(log)


if __name__ == "__main__":
    main()
