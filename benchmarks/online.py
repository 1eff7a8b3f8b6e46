"""What collecting and averaging cost on a CPU, beside what people use today.

Each variant runs in a process of its own, in turn with a plain copy of the parameters. Time and
memory are given as multiples of that copy's, so that a busy machine changes them little. Memory is
measured in a second process in which glibc returns what is freed (MALLOC_MMAP_THRESHOLD_), or its
fragmentation would be counted.

    make bench                                    # all of it: about half an hour
    python benchmarks/online.py --sizes 25M --k 2 6
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from record import Log, median
from torch import nn

SIZES = ("25M", "125M")
FIXED = ("torch-ema-avg", "torch-swa-avg", "ema-pytorch", "torch-ema")
WINDOWED = ("collect", "ring", "sliding", "naive")


class Transformer(nn.Module):
    """The parameters of RoBERTa-Base, 124 M of them, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50265, 768)
        self.position = nn.Embedding(514, 768)
        layer = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)


def build(size: str) -> nn.Module:
    from lawa_lab.recipes.models.resnet import resnet50

    torch.manual_seed(0)
    return resnet50(1000) if size == "25M" else Transformer()


def train(parameters: list[torch.Tensor], scratch: torch.Tensor) -> None:
    """Move the weights a little, as an optimizer would, so that no two snapshots are equal."""
    with torch.no_grad():
        for p in parameters:
            p.add_(scratch[: p.numel()].view_as(p), alpha=1e-3)
    scratch.neg_().mul_(0.9)


Variant = tuple[Callable[[], Any], Callable[[], Any]]  # an update, and reading the mean after it


def nothing() -> None:
    """Averages that are kept up to date need no reading."""


def variant(name: str, model: nn.Module, k: int, narrow: bool) -> Variant:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    if name in ("collect", "ring", "sliding"):
        from torch_lawa import LatestWeightAverager

        averager = LatestWeightAverager(
            k=k,
            _sliding=name == "sliding",
            storage_dtype=torch.bfloat16 if narrow else None,
        )
        read = nothing if name == "collect" else averager.average
        for _ in range(k):
            averager.collect(model)
        return (lambda: averager.collect(model)), read
    if name == "naive":
        ring: deque[dict[str, torch.Tensor]] = deque(maxlen=k)

        def update() -> None:
            ring.append({n: p.detach().clone() for n, p in model.named_parameters()})

        def mean() -> dict[str, torch.Tensor]:
            return {n: torch.stack([c[n] for c in ring]).mean(0) for n in ring[0]}

        for _ in range(k):
            update()
        return update, mean
    if name == "torch-ema-avg":
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
        return (lambda: ema.update_parameters(model)), nothing
    if name == "torch-swa-avg":
        swa = AveragedModel(model)
        return (lambda: swa.update_parameters(model)), nothing
    if name == "ema-pytorch":
        from ema_pytorch import EMA

        other = EMA(model, beta=0.999, update_every=1, update_after_step=0)
        return other.update, nothing
    from torch_ema import ExponentialMovingAverage

    plain = ExponentialMovingAverage(model.parameters(), decay=0.999)
    return plain.update, nothing


def memory() -> tuple[float, float]:
    """Resident memory now and at its peak, in bytes."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return tuple(float(fields[f].split()[0]) * 1024 for f in ("VmRSS", "VmHWM"))  # type: ignore[return-value]


def clock(act: Callable[[], Any]) -> float:
    start = time.perf_counter()
    result = act()
    spent = time.perf_counter() - start
    del result
    return spent


def measure(name: str, size: str, k: int, repeats: int, narrow: bool) -> dict[str, Any]:
    """In a process of its own: time one variant in turn with a plain copy."""
    torch.set_num_threads(1)
    model = build(size)
    parameters = [p.detach() for p in model.parameters()]
    copy_bytes = sum(p.numel() * p.element_size() for p in parameters)
    scratch = torch.randn(max(p.numel() for p in parameters))
    gc.collect()
    before = memory()[0]
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    update, read = variant(name, model, k, narrow)
    for _ in range(2):
        train(parameters, scratch)
        update()
        read()
    held, peak = memory()
    target = [p.clone() for p in parameters]
    times: dict[str, list[float]] = {"copy": [], "update": [], "read": []}

    def copy() -> None:
        for t, p in zip(target, parameters, strict=True):
            t.copy_(p)

    copy()
    for _ in range(repeats):
        train(parameters, scratch)
        times["copy"].append(clock(copy))
        times["update"].append(clock(update))
        times["read"].append(clock(read))
    return {
        "held": (held - before) / copy_bytes,
        "peak": (peak - before) / copy_bytes,
        "times": times,
    }


def in_a_process(
    name: str, size: str, k: int, repeats: int, narrow: bool, **environment: str
) -> dict[str, Any]:
    command = [sys.executable, __file__, "--measure", name, size, str(k), str(repeats)]
    done = subprocess.run(
        [*command, *(["narrow"] if narrow else [])],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    if done.returncode:
        raise SystemExit(f"{name} {size} k={k}:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def run(folder: Path, sizes: list[str], ks: list[int], repeats: int) -> None:
    """All variants, each in its own process; writes the raw log and prints tables."""
    log = Log(folder)
    rows: list[dict[str, Any]] = []
    available = 1024 * float(
        next(
            x for x in Path("/proc/meminfo").read_text().splitlines() if "MemAvailable" in x
        ).split()[1]
    )
    for size in sizes:
        one = 4 * (25_557_032 if size == "25M" else 124_436_736)
        plan = [(name, k) for k in ks for name in WINDOWED] + [(name, 0) for name in FIXED]
        for name, k in plan:
            # The mean of the naive one stacks all k copies of its largest tensor once more.
            need = (k + 6) * one + (0.35 * k * one if name == "naive" else 0)
            narrow = need > 0.85 * available
            if narrow and (name == "naive" or need / 2 > 0.85 * available):
                row = {"name": name, "size": size, "k": k, "fits": False}
            else:
                row = {"name": name, "size": size, "k": k, "fits": True, "narrow": narrow}
                row |= {"times": in_a_process(name, size, k, repeats, narrow)["times"]}
                used = in_a_process(name, size, k, 0, narrow, MALLOC_MMAP_THRESHOLD_="65536")
                row |= {"held": used["held"], "peak": used["peak"]}
            rows.append(row)
            log.add(kind="measurement", **row)
            print(describe(row), flush=True)
    judge(rows)


def units(row: dict[str, Any]) -> tuple[float, float]:
    """Update, and update with reading, as multiples of a plain copy."""
    copy = median(row["times"]["copy"])
    update = median(row["times"]["update"])
    both = median(
        [u + r for u, r in zip(row["times"]["update"], row["times"]["read"], strict=True)]
    )
    return update / copy, both / copy


def describe(row: dict[str, Any]) -> str:
    label = f"{row['size']:>5} k={row['k']:<3} {row['name']:<14}"
    if not row["fits"]:
        return f"{label} does not fit into this machine's memory"
    update, both = units(row)
    note = "  (snapshots in bfloat16)" if row["narrow"] else ""
    return (
        f"{label} update {update:6.2f}   update + mean {both:7.2f}   "
        f"held {row['held']:6.2f}   peak {row['peak']:6.2f}{note}"
    )


def judge(rows: list[dict[str, Any]]) -> None:
    """The figures the project promises, from the rows above."""
    found = {(r["size"], r["name"], r["k"]): r for r in rows if r["fits"]}
    print("\nEverything above is in plain copies of the parameters: time and memory.")
    for size, name, k in found:
        if name == "collect":
            print(f"{size} k={k}: collect / plain copy {units(found[size, name, k])[0]:.2f}")
        if name == "naive":
            naive = units(found[size, name, k])[1]
            for ours in ("ring", "sliding"):
                ratio = naive / units(found[size, ours, k])[1]
                print(f"{size} k={k}: naive / {ours} {ratio:.1f} (k/3 = {k / 3:.1f})")
    for size in {s for s, _, _ in found}:
        pair = [found.get((size, "sliding", k)) for k in (64, 4)]
        if all(r is not None and not r["narrow"] for r in pair):
            print(f"{size}: sliding k=64 / k=4 {units(pair[0])[1] / units(pair[1])[1]:.2f}")  # type: ignore[arg-type]


def main() -> None:
    if "--measure" in sys.argv:
        name, size, k, repeats, *rest = sys.argv[2:]
        print(json.dumps(measure(name, size, int(k), int(repeats), bool(rest))))
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--k", nargs="+", type=int, default=[2, 4, 6, 16, 64])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("runs/bench-online"))
    options = parser.parse_args()
    run(options.out, options.sizes, options.k, options.repeats)


if __name__ == "__main__":
    main()
