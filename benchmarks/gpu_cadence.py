"""What snapshots cost a training run on a GPU, by how often they are taken.

    python benchmarks/gpu_cadence.py --out results/NAME    # with torch for CUDA and transformers
    python benchmarks/gpu_cadence.py --smoke               # tiny models, in seconds, on a CPU too

RoBERTa-Base and a decoder of a billion parameters train in short blocks: without snapshots, and
with one every 1, 10 or 100 steps into a window in host or in device memory, in turn, so that the
slow noise of a machine falls on all alike. A block waits for training's own stream at its end; the
snapshot of a block of 10 or 100 steps is taken in its middle, so that its way to the host is over
by then. What is counted besides: how long `collect` holds the caller, GPU memory, and the host
copy.
"""

import argparse
import contextlib
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu_models import DEVICE, GPU, MODELS, Step, prepare
from record import Log
from torch import Tensor, nn

from torch_lawa import LatestWeightAverager

K = 2
STORES = ("host", "device")
LONG = 100

Variant = tuple[str, int]  # store and how many steps lie between snapshots


def settle(*, all_streams: bool = True) -> None:
    if GPU and all_streams:
        torch.cuda.synchronize()
    elif GPU:
        torch.cuda.current_stream().synchronize()


def part(tensor: Tensor) -> Tensor:
    """What of a sharded tensor lies here: on one process all of it."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def allocated() -> int:
    return torch.cuda.memory_allocated() if GPU else 0


def anonymous() -> int:
    """The process's own host memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


@contextlib.contextmanager
def peak() -> Iterator[list[int]]:
    """The most GPU memory that was allocated inside the block."""
    found: list[int] = []
    settle()
    if GPU:
        torch.cuda.reset_peak_memory_stats()
    yield found
    settle()
    found.append(torch.cuda.max_memory_allocated() if GPU else 0)


@dataclass
class Bench:
    """One model, its two windows, and what was measured so far."""

    name: str
    model: nn.Module
    step: Step
    averagers: dict[str, LatestWeightAverager] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)
    held: dict[str, list[float]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.model.parameters())

    def memory(self) -> dict[str, float]:
        """Make the windows; copies of the parameters that each adds to the peak of training."""
        found: dict[str, float] = {}
        with peak() as before:
            for _ in range(3):
                self.step()
        for store in STORES:
            averager = self.averagers[store] = LatestWeightAverager(k=K, store=store)  # type: ignore[arg-type]
            with peak() as after:
                for _ in range(K + 2):  # memory is made and page-locked here, and never again
                    self.step()
                    averager.collect(self.model)
            found[store] = (after[0] - before[0]) / self.size
            before = after
            start = allocated()
            with peak() as lent, averager.swapped_into(self.model):
                pass
            found[f"{store}, lent"] = (lent[0] - start) / self.size
        return found

    def held_idle(self, store: str, repeats: int = 10) -> float:
        """Milliseconds that `collect` takes from the caller while the GPU has nothing to do."""
        spent = []
        for _ in range(repeats):
            self.averagers[store].wait()
            settle()
            start = time.perf_counter()
            self.averagers[store].collect(self.model)
            spent.append(time.perf_counter() - start)
        return 1e3 * median(spent)

    def equal(self, store: str) -> bool:
        """Whether a snapshot has the bits of the weights, which move on at once."""
        averager = self.averagers[store]
        before = {name: part(p).detach().clone() for name, p in self.model.named_parameters()}
        averager.collect(self.model)
        self.step()
        found = averager.average(k=1, device=DEVICE)
        return all(torch.equal(part(found[name]), value) for name, value in before.items())

    def host_copy(self, repeats: int = 6) -> dict[str, float]:
        """The way to the host with nothing else to do, and what `.item()` waits for meanwhile."""
        averager, loss = self.averagers["host"], torch.ones(1, device=DEVICE)
        spent, idle, during = [], [], []
        for _ in range(repeats):
            averager.wait()
            settle()
            start = time.perf_counter()
            loss.item()
            idle.append(time.perf_counter() - start)
            start = time.perf_counter()
            averager.collect(self.model)
            settle(all_streams=False)  # the staging copy is made, the other one is under way
            begin = time.perf_counter()
            loss.item()
            during.append(time.perf_counter() - begin)
            averager.wait()
            spent.append(time.perf_counter() - start)
        return {
            "host_copy_ms": 1e3 * median(spent),
            "host_copy_GB_per_s": self.size / median(spent) / 1e9,
            "item_ms_idle": 1e3 * median(idle),
            "item_ms_during_copy": 1e3 * median(during),
        }

    def block(self, key: str, num_steps: int, variant: Variant | None) -> None:
        """Time some steps; a snapshot every so many, in the middle of that many."""
        for averager in self.averagers.values():
            averager.wait()
        settle()
        start = time.perf_counter()
        for i in range(num_steps):
            self.step()
            if variant is not None and i % variant[1] == variant[1] // 2:
                before = time.perf_counter()
                self.averagers[variant[0]].collect(self.model)
                self.held.setdefault(key, []).append(time.perf_counter() - before)
        settle(all_streams=False)
        spent = (time.perf_counter() - start) / num_steps
        self.times.setdefault(key, []).append(spent)

    def rounds(self, seconds: float) -> None:
        """Long blocks for the rare snapshots, then short ones while there is time."""
        begin = time.perf_counter()
        self.block("warm", 10, None)
        long = [(f"none {LONG}", None), *((f"{s} {LONG}", (s, LONG)) for s in STORES)]
        number = 2 if self.times["warm"][0] * LONG * 6 < 0.8 * seconds else 1
        for i in range(number):
            for key, variant in long[:: 1 - 2 * (i % 2)]:
                self.block(key, LONG, variant)
        pairs = [(store, nu) for nu in (1, 10) for store in STORES]
        short: list[tuple[str, Variant | None]] = [("none", None)]
        short += [(f"{store} {nu}", (store, nu)) for store, nu in pairs]
        short += [("none again", None)]
        for i in itertools.count():
            start = time.perf_counter()
            for key, variant in short[:: 1 - 2 * (i % 2)]:
                self.block(key, 10, variant)
            now = time.perf_counter()
            if i >= 2 and now - begin + (now - start) > seconds:
                return

    def cells(self) -> Iterator[dict[str, Any]]:
        """A row for each store and cadence."""
        for nu in (1, 10, LONG):
            base = self.times[f"none {LONG}" if nu == LONG else "none"]
            for store in STORES:
                key = f"{store} {nu}"
                ratios = [a / b for a, b in zip(self.times[key], base, strict=True)]
                held = self.held[key]
                yield {
                    "store": store,
                    "every": nu,
                    "rounds": len(ratios),
                    "ms_without": 1e3 * median(base),
                    "ms_with": 1e3 * median(self.times[key]),
                    "ratio": median(ratios),
                    "ratio_low": min(ratios),
                    "ratio_high": max(ratios),
                    "held_ms": 1e3 * median(held),
                    "held_ms_high": 1e3 * max(held),
                }


def measure(log: Log, name: str, options: argparse.Namespace) -> None:
    began = time.perf_counter()
    model, step = prepare(name, options.smoke, options.compile)
    for _ in range(5):
        step()
    bench = Bench(name, model, step)
    added = bench.memory()
    copy = bench.host_copy()
    start = allocated(), anonymous()
    bench.rounds(options.seconds)
    equal = {store: bench.equal(store) for store in STORES}
    idle = {store: bench.held_idle(store) for store in STORES}
    settle()
    grown = {"gpu_grown": allocated() - start[0], "host_grown": anonymous() - start[1]}
    again = [b / a for a, b in zip(bench.times["none"], bench.times["none again"], strict=True)]
    whole = {"parameters": sum(p.numel() for p in model.parameters()), **copy, **grown}
    whole["snapshots_equal"] = all(equal.values())
    log.add(kind="model", model=name, compiled=options.compile, copies_added=added, **whole)
    log.add(kind="raw", model=name, seconds_per_step=bench.times, held_s=bench.held)
    print(f"\n{name}: {whole['parameters']:,} parameters, k = {K}")
    print(
        "  store   every   ms without   with     ratio (of rounds)          collect holds, at most"
    )
    rows = list(bench.cells())
    for row in rows:
        print(
            f"  {row['store']:7} {row['every']:5} {row['ms_without']:12.2f} {row['ms_with']:7.2f}"
            f"  {row['ratio']:8.4f} ({row['ratio_low']:.4f} to {row['ratio_high']:.4f},"
            f" {row['rounds']:2}) {row['held_ms']:8.3f} {row['held_ms_high']:8.3f} ms"
        )
    print(f"  none against none: {median(again):.4f} ({min(again):.4f} to {max(again):.4f})")
    print("  copies added to the peak: " + ", ".join(f"{s} {n:.3f}" for s, n in added.items()))
    print(
        f"  to the host in {copy['host_copy_ms']:.1f} ms, {copy['host_copy_GB_per_s']:.1f} GB/s;"
        f" loss.item() takes {copy['item_ms_idle']:.3f} ms, {copy['item_ms_during_copy']:.3f} ms"
        " meanwhile"
    )
    print(
        f"  collect holds an idle caller for {idle['host']:.3f} ms (host), {idle['device']:.3f} ms"
        f" (device); snapshots have the bits of the weights: {whole['snapshots_equal']}"
    )
    print(f"  grown since the windows were made: {grown}")
    for row in rows:
        row["held_ms_idle"] = idle[row["store"]]
        row = {"kind": "cell", "model": name, **row, "copies_added": added[row["store"]]}
        log.add(**row)
        print(json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()}))
    print(f"  {name} took {time.perf_counter() - began:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench-gpu-cadence"))
    parser.add_argument("--model", action="append", choices=list(MODELS), help="repeat for more")
    parser.add_argument("--seconds", type=float, default=120.0, help="for the blocks of one model")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model first")
    parser.add_argument("--smoke", action="store_true", help="tiny models: tries the script itself")
    options = parser.parse_args()
    if options.smoke:
        options.seconds = 1.0
    log = Log(options.out)
    torch.set_float32_matmul_precision("high")
    for name in options.model or ("roberta", "decoder"):
        measure(log, name, options)
        if GPU:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
