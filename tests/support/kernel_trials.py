"""Random trials of compiled kernels against NumPy: `kernel_trials.py FOLDER SEED SECONDS`.

A program of its own, since the kernels are built with sanitizers and these must be loaded first.
Prints how many trials of each kind passed, as JSON.
"""

import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from torch_lawa.checkpoints.storage.byte_sources import GuardedSource, find_damaged
from torch_lawa.coefficients import Explicit, Exponential, Uniform, Weights
from torch_lawa.mean import kernels_native
from torch_lawa.mean.dtypes import DTYPES
from torch_lawa.mean.kernels import Bytes, Pieces, real
from torch_lawa.mean.kernels_native import CompiledPieces
from torch_lawa.mean.kernels_numpy import NumpyPieces

FLOATS = [code for code, dtype in DTYPES.items() if dtype.kind == "float"]
ALONE = Uniform().weights(1)
THREADS = 3
Make = Callable[[Pieces], list[Bytes]]


class Draw:
    """Random inputs. Memory is allocated to the byte, so that accesses beyond it are noticed."""

    def __init__(self, seed: int) -> None:
        self.chance, self.bits = random.Random(seed), np.random.default_rng(seed)

    def size(self) -> int:
        sizes = (self.chance.randrange(70), self.chance.choice([0, 511, 512, 513, 1024, 1025]))
        return self.chance.choice([*sizes, self.chance.randrange(5000)])

    def code(self) -> str:
        return self.chance.choice(FLOATS)

    def weights(self, k: int) -> Weights:
        some = [self.chance.choice([-1.0, 0.5, 1.0, 3.0]) for _ in range(k - 1)]
        rules = (Uniform(), Uniform(), Exponential(self.chance.random()), Explicit([*some, 50.0]))
        return self.chance.choice(rules).weights(k)

    def pieces(self, code: str, size: int, k: int) -> list[Bytes]:
        """k inputs of one tensor; some of them unaligned."""
        kind = self.chance.choice(["any bits", "ordinary", "subnormal", "large", "zeros", "mixed"])
        shift = self.chance.choice([0, 0, 1, 2, 4, 7])
        return [_placed(values, shift) for values in self.values(code, size, k, kind)]

    def values(self, code: str, size: int, k: int, kind: str) -> list[Bytes]:
        """The bytes of k inputs of one kind."""
        width = DTYPES[real(code)].itemsize
        if kind == "any bits":
            return list(self.bits.integers(0, 256, (k, size * width), np.uint8))
        values = self.bits.standard_normal(size * k)
        if kind == "subnormal":
            values *= {8: 1e-310, 4: 1e-40, 2: 1e-6 if code == "F16" else 1e-40, 1: 1e-3}[width]
        elif kind == "large":
            values *= {8: 2e307, 4: 3e38, 2: 6e4 if code == "F16" else 3e38, 1: 400.0}[width]
        elif kind == "zeros":
            values = np.where(values < 0, -0.0, 0.0)
        elif kind == "mixed" and size:
            worst = [np.nan, np.inf, -np.inf, 1e30, -0.0, 1e-300]
            values[self.bits.integers(0, size * k, 3)] = self.bits.choice(worst, 3)
        rounded = NumpyPieces(size * k).mean([values.view(np.uint8)], ALONE, "F64", code)
        return np.split(rounded, k)


def _placed(values: Bytes, shift: int) -> Bytes:
    room = np.empty(len(values) + shift, np.uint8)
    room[shift:] = values
    return room[shift:]


def wide(raw: Bytes, code: str) -> Bytes:
    """The values as float64, with one kind of NaN."""
    size = len(raw) // DTYPES[real(code)].itemsize
    pieces = [np.ascontiguousarray(raw)]
    values = NumpyPieces(size).mean(pieces, ALONE, code, "F64").view(np.float64)
    values[np.isnan(values)] = np.nan
    return values.view(np.uint8)


def check(made: list[Bytes], expected: list[Bytes], code: str) -> None:
    """Equal bits, except that any NaN equals any other."""
    assert len(made) == len(expected)
    for one, other in zip(made, expected, strict=True):
        if not np.array_equal(one, other):
            assert np.array_equal(wide(one, code), wide(other, code)), (code, len(one))


def mean_trial(draw: Draw) -> tuple[int, str, Make]:
    """One mean, of a list (blocks in the cache) or of pieces that come one by one."""
    code, target, size = draw.code(), draw.code(), draw.size()
    k = draw.chance.randint(1, 40)
    pieces, weights = draw.pieces(code, size, k), draw.weights(k)
    together = draw.chance.random() < 0.7

    def make(used: Pieces) -> list[Bytes]:
        if isinstance(used, CompiledPieces):
            used._out = np.empty(size * DTYPES[real(target)].itemsize, np.uint8)
        return [used.mean(pieces if together else iter(pieces), weights, code, target).copy()]

    return size, target, make


def windows_trial(draw: Draw) -> tuple[int, str, Make]:
    """Means of windows that slide over many inputs, and of others."""
    code, target, size = draw.code(), draw.code(), draw.size() // 3
    num = draw.chance.randint(1, 24)
    pieces = draw.pieces(code, size, num)
    k = draw.chance.randint(1, num)
    windows = [(range(end - k, end), Uniform().weights(k)) for end in range(k, num + 1)]
    for _ in range(draw.chance.randrange(4)):
        first = draw.chance.randrange(num)
        length = draw.chance.randint(1, num - first)
        windows.append((range(first, first + length), draw.weights(length)))

    def make(used: Pieces) -> list[Bytes]:
        return [mean.copy() for mean in used.means(iter(pieces), windows, code, target)]

    return size, target, make


def compare(draw: Draw, trial: Callable[[Draw], tuple[int, str, Make]]) -> None:
    size, target, make = trial(draw)
    expected = make(NumpyPieces(size))
    check(make(CompiledPieces(size)), expected, target)


def threads_trial(draw: Draw) -> None:
    """Several threads, each with its own pieces and all with the same inputs."""
    trials = [mean_trial(draw), windows_trial(draw)]
    expected = [make(NumpyPieces(size)) for size, _, make in trials]
    with ThreadPoolExecutor(THREADS) as threads:
        work = [(number, make, size) for number, (size, _, make) in enumerate(trials)] * THREADS
        made = list(threads.map(lambda job: (job[0], job[1](CompiledPieces(job[2]))), work))
    for number, means in made:
        check(means, expected[number], trials[number][1])


def truncated_trial(draw: Draw) -> None:
    """Files that lose their ends while threads read them: right means, or it is known."""
    code, k = draw.chance.choice(["F32", "BF16", "F64"]), draw.chance.randint(1, 6)
    width, size = DTYPES[code].itemsize, draw.chance.randint(1, 20_000)
    pieces = draw.values(code, size, k, "ordinary")
    weights = Uniform().weights(k)
    expected = NumpyPieces(size).mean(pieces, weights, code, code).copy()
    library = kernels_native.native_library()
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, str(number)) for number in range(k)]
        for path, piece in zip(paths, pieces, strict=True):
            path.write_bytes(piece.tobytes())
        sources = [GuardedSource(path, library) for path in paths]
        start = threading.Barrier(THREADS + 1)

        def read() -> list[Bytes]:
            start.wait()
            views = [source.view(0, size * width) for source in sources]
            return [CompiledPieces(size).mean(views, weights, code, code).copy() for _ in range(2)]

        with ThreadPoolExecutor(THREADS) as threads:
            reading = [threads.submit(read) for _ in range(THREADS)]
            victim, left = draw.chance.choice(paths), draw.chance.randrange(size * width)
            pause = draw.chance.random() * 2e-4
            start.wait()
            time.sleep(pause)
            os.truncate(victim, left)
            made = [mean for job in reading for mean in job.result()]
        damaged = find_damaged(paths)
        assert damaged in ([], [victim])
        # What may be wrong: all that the file lost, or the end of its last page, which is zero
        # without a signal.
        page = os.sysconf("SC_PAGESIZE")
        lost = slice(left // width * width, None if damaged else -(-left // page) * page)
        for mean in [expected, *made]:
            mean[lost] = 0
            assert np.array_equal(mean, expected)
        del made
        for source in sources:
            source.close()


KINDS: dict[str, Callable[[Draw], None]] = {
    "sanitized means": lambda draw: compare(draw, mean_trial),
    "sanitized windows": lambda draw: compare(draw, windows_trial),
    "sanitized threads": threads_trial,
    "sanitized truncations": truncated_trial,
}


def main(folder: str, seed: str, seconds: str) -> None:
    kernels_native._FOLDER = Path(folder)
    assert CompiledPieces.available()
    counts: Counter[str] = Counter()
    end, serial = time.monotonic() + float(seconds), int(seed) * 1_000_000
    while time.monotonic() < end or len(counts) < len(KINDS):
        kind = list(KINDS)[serial % len(KINDS)]
        try:
            KINDS[kind](Draw(serial))
        except BaseException as error:
            error.add_note(f"{kind}: Draw({serial})")
            raise
        counts[kind] += 1
        serial += 1
    print(json.dumps(counts))


if __name__ == "__main__":
    main(*sys.argv[1:])
