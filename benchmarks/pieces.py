"""What averaging a piece costs in cache: the loops in C, and NumPy.

    python benchmarks/pieces.py --out results/NAME

Nanoseconds per output value for a mean of k, on one thread: the slope over k is the cost of one
more checkpoint, the rest that of dividing and rounding.
"""

import argparse
import time
from pathlib import Path

import numpy as np
from record import Log, median

from torch_lawa.coefficients import Uniform
from torch_lawa.mean.dtypes import DTYPES
from torch_lawa.mean.kernels import Pieces, piece_length
from torch_lawa.mean.kernels_native import CompiledPieces
from torch_lawa.mean.kernels_numpy import NumpyPieces


def values(code: str, n: int, seed: int) -> np.ndarray:
    made = np.random.default_rng(seed).standard_normal(n, dtype=np.float32) * np.float32(0.02)
    if code == "BF16":
        return (made.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return made.astype(np.float16 if code == "F16" else np.float32).view(np.uint8)


def cost(pieces: Pieces, code: str, k: int) -> list[float]:
    n = piece_length(code, code) // 4  # k of them stay in the cache
    raws = [values(code, n, seed) for seed in range(k)]
    times = []
    for _ in range(60):
        start = time.perf_counter()
        pieces.mean(raws, Uniform().weights(k), code, code)
        times.append((time.perf_counter() - start) / n * 1e9)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench-pieces"))
    log = Log(parser.parse_args().out)
    print(f"{'':18}{'k = 3':>8}{'k = 6':>8}{'k = 12':>8}   one more checkpoint")
    for made_by in (CompiledPieces, NumpyPieces):
        for code in ("F32", "BF16", "F16"):
            found = {}
            for k in (3, 6, 12):
                times = cost(made_by(), code, k)
                log.add(kind="piece", by=made_by.__name__, dtype=code, k=k, nanoseconds=times)
                found[k] = median(times)
            name = f"{made_by.__name__[:-6].lower()} {DTYPES[code].torch_name}"
            slope = (found[12] - found[3]) / 9
            print(f"{name:18}" + "".join(f"{t:8.2f}" for t in found.values()) + f"{slope:12.2f}")


if __name__ == "__main__":
    main()
