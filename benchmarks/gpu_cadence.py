"""What snapshots cost a training run on a GPU, by how often they are taken.

    python benchmarks/gpu_cadence.py --out results/NAME    # with torch for CUDA and transformers
    python benchmarks/gpu_cadence.py --smoke               # tiny models, in seconds, on a CPU too
    python benchmarks/gpu_cadence.py --show results/NAME   # the tables of what was measured so far

RoBERTa-Base and a decoder of a billion parameters train in short blocks of steps: without
snapshots, or with one every 1, 10 or 100 steps, in host or in device memory. The variants
alternate, so that slow changes of the machine affect all of them equally. A block ends by
synchronising the training stream; in blocks of 10 or 100 steps the snapshot is taken in the middle,
so that it has reached the host by then. Also measured: GPU memory while collecting and while the
average is swapped in, how long `collect` blocks Python, and the copy to the host.

Every block is written to `raw.jsonl` when it ends, and the tables are made from that file: a run
that is interrupted loses only its current block.
"""

import argparse
import contextlib
import gc
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu_cadence_tables import LONG, SHORT, STORES, show
from gpu_models import DEVICE, GPU, MODELS, TOKENS, Step, prepare
from record import Log
from torch import Tensor, nn

from torch_lawa import LatestWeightAverager

K = 2
CYCLES, ROUNDS = 2, 3  # at least so many times: so many rounds of short blocks, one of long ones

Variant = tuple[str, int]  # store ("none": no snapshots) and steps between two


def settle(*, all_streams: bool = True) -> None:
    if GPU and all_streams:
        torch.cuda.synchronize()
    elif GPU:
        torch.cuda.current_stream().synchronize()


def part(tensor: Tensor) -> Tensor:
    """The local part of a sharded tensor: with one process, all of it."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def allocated() -> int:
    """Bytes on the GPU, when it is idle and everything unused was freed."""
    gc.collect()
    settle()
    if not GPU:
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


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


class Bench:
    """One model, its two windows, and a log of what is measured."""

    def __init__(self, log: Log, name: str, model: nn.Module, step: Step) -> None:
        self.log, self.name, self.model, self.step = log, name, model, step
        self.size = sum(p.numel() * p.element_size() for p in model.parameters())
        self.averagers: dict[str, LatestWeightAverager] = {}

    def add(self, kind: str, **fields: Any) -> None:
        """Log a row at once, and print it."""
        self.log.add(kind=kind, model=self.name, **fields)
        told = ", ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in fields.items()
            if not isinstance(value, list)
        )
        print(f"  {time.strftime('%H:%M:%S')} {self.name}: {kind}: {told}", flush=True)

    def memory(self, store: str) -> None:
        """GPU memory that a new window adds, in copies of the parameters."""
        allocated()  # of the window before this one nothing is left
        with peak() as training:
            for _ in range(3):
                self.step()
        idle = allocated()
        averager = make(store)
        with peak() as collecting:
            for _ in range(K + 2):  # memory is made and page-locked here, and never again
                self.step()
                averager.collect(self.model)
        with peak() as swapping, averager.swapped_into(self.model):
            swapped = allocated()
        self.add(
            "memory",
            store=store,
            collecting=(collecting[0] - training[0]) / self.size,
            lent=(swapped - idle) / self.size,  # named as in the records
            peak_of_lending=(swapping[0] - idle) / self.size,
        )

    def windows(self) -> None:
        """Make and fill the two windows that the blocks use, so that no block allocates."""
        for store in STORES:
            self.averagers[store] = make(store)
            for _ in range(K + 2):
                self.averagers[store].collect(self.model)

    def host_copy(self) -> None:
        """The copy to the host on an idle GPU, and how long `.item()` takes meanwhile."""
        averager, loss = self.averagers["host"], torch.ones(1, device=DEVICE)
        spent, idle, during = [], [], []
        for _ in range(6):
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
        self.add(
            "host copy",
            milliseconds=1e3 * median(spent),
            GB_per_s=self.size / median(spent) / 1e9,
            item_ms_idle=1e3 * median(idle),
            item_ms_during_copy=1e3 * median(during),
        )

    def checks(self, store: str) -> None:
        """Whether a snapshot has the bits of weights that change at once; an idle `collect`."""
        averager = self.averagers[store]
        before = {name: part(p).detach().clone() for name, p in self.model.named_parameters()}
        averager.collect(self.model)
        self.step()
        found = averager.average(k=1, device=DEVICE)
        equal = all(torch.equal(part(found[name]), value) for name, value in before.items())
        spent = []
        for _ in range(10):
            averager.wait()
            settle()
            start = time.perf_counter()
            averager.collect(self.model)
            spent.append(time.perf_counter() - start)
        self.add("checks", store=store, equal=equal, held_idle_ms=1e3 * median(spent))

    def block(self, turn: int, num_steps: int, variant: Variant, *, again: bool = False) -> float:
        """Time some steps; a snapshot every so many, in the middle of that many."""
        store, every = variant
        for averager in self.averagers.values():
            averager.wait()
        settle()
        held = []
        start = time.perf_counter()
        for i in range(num_steps):
            self.step()
            if store != "none" and i % every == every // 2:
                before = time.perf_counter()
                self.averagers[store].collect(self.model)
                held.append(time.perf_counter() - before)
        settle(all_streams=False)
        spent = (time.perf_counter() - start) / num_steps
        row = {"kind": "block", "model": self.name, "round": turn, "num_steps": num_steps}
        row |= {"store": store, "every": every, "again": again, "seconds": spent, "held": held}
        self.log.add(**row)
        return 1e3 * spent

    def rounds(self, seconds: float, *, only_short: bool) -> None:
        """Rounds of short blocks, and of long ones after every few, until the time is up."""
        begin = time.perf_counter()
        warm = self.block(-1, SHORT, ("none", 0))
        steps = 6 * SHORT * ROUNDS + (0 if only_short else 3 * LONG)
        about = max(seconds, 1e-3 * warm * CYCLES * steps)
        print(
            f"  {self.name}: {warm:.1f} ms a step; the blocks take about {about:.0f} s", flush=True
        )
        longest, cycle = 0.0, 0
        while cycle < CYCLES or time.perf_counter() - begin + longest < seconds:
            start = time.perf_counter()
            for turn in range(ROUNDS * cycle, ROUNDS * (cycle + 1)):
                self.round(turn, SHORT, [(s, nu) for nu in (1, 10) for s in STORES])
            if not only_short:
                self.round(cycle, LONG, [(s, LONG) for s in STORES])
            longest, cycle = max(longest, time.perf_counter() - start), cycle + 1

    def round(self, turn: int, num_steps: int, variants: list[Variant]) -> None:
        """One block of each, in alternating order; short ones between two without snapshots."""
        order = [(("none", 0), False), *((variant, False) for variant in variants)]
        if num_steps == SHORT:
            order.append((("none", 0), True))
        told = []
        for variant, again in order[:: 1 - 2 * (turn % 2)]:
            milliseconds = self.block(turn, num_steps, variant, again=again)
            told.append(f"{variant[0]}/{variant[1]} {milliseconds:.2f}")
        print(
            f"  {time.strftime('%H:%M:%S')} {self.name}: {num_steps} steps each,"
            f" round {turn + 1}: {', '.join(told)} ms",
            flush=True,
        )


def make(store: str) -> LatestWeightAverager:
    return LatestWeightAverager(k=K, store=store)  # type: ignore[arg-type]


def measure(log: Log, name: str, options: argparse.Namespace) -> None:
    """Everything about one model."""
    began = time.perf_counter()
    print(f"{time.strftime('%H:%M:%S')} {name}", flush=True)
    model, step = prepare(name, options.smoke, options.compile)
    for _ in range(5):
        step()
    bench = Bench(log, name, model, step)
    number = sum(p.numel() for p in model.parameters())
    tokens = "few tokens" if options.smoke else "{} x {} tokens".format(*TOKENS[name])
    bench.add("model", parameters=number, k=K, compiled=options.compile, tokens=tokens)
    for store in STORES:
        bench.memory(store)
    bench.windows()
    bench.host_copy()
    start = allocated(), anonymous()
    bench.rounds(options.seconds, only_short=options.short)
    grown = allocated() - start[0], anonymous() - start[1]
    bench.add("growth", gpu_bytes=grown[0], host_bytes=grown[1])
    for store in STORES:
        bench.checks(store)
    bench.add("end", seconds=time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench-gpu-cadence"))
    parser.add_argument("--model", action="append", choices=list(MODELS), help="repeat for more")
    parser.add_argument("--seconds", type=float, default=120.0, help="for the blocks of a model")
    parser.add_argument("--short", action="store_true", help="no blocks of 100 steps")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model first")
    parser.add_argument("--smoke", action="store_true", help="tiny models: tries the script itself")
    parser.add_argument("--show", type=Path, help="only print the tables of this folder")
    options = parser.parse_args()
    if options.show:
        return show(options.show)
    if options.smoke:
        options.seconds = 1.0
    log = Log(options.out)
    torch.set_float32_matmul_precision("high")
    for name in options.model or ("roberta", "decoder"):  # the cheapest first
        measure(log, name, options)
        allocated()
    return show(options.out)


if __name__ == "__main__":
    main()
