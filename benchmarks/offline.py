"""What averaging checkpoints on disk costs, beside the ways people do it today.

Each way is a process of its own over the same files of a 350 M-parameter transformer (or, in the
part "small", of 100,000 small tensors); all of them take turns, round by round. Time is that of the
whole process, and of its engine (without starting Python and imports) where it says so. Processor
time, of all threads together, depends less on what else the machine does. Memory is the peak of
what belongs to the process, above that of a bare interpreter, from a run that is not timed. The
first column of ratios is to our median.

    make bench-offline                                     # needs 40 GB of disk; an hour
    python benchmarks/offline.py --data /scratch --only fp32-6 lawa naive touch-2
    python benchmarks/offline.py --quick                   # a smoke test of the script itself
"""

import argparse
import compileall
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from offline_data import BASE, DTYPES, MEDIUM, SMALL, TINY, check, generate, paths, size
from offline_peers import SWEEP_KS, WAYS
from offline_process import (
    bare_interpreter,
    drop,
    execute,
    peak_memory,
    resident,
    total_memory,
    warm,
)
from record import Log, median

import torch_lawa

PARTS = {"fp32-6": ("fp32", 6), "bf16-6": ("bf16", 6), "bf16-16": ("bf16", 16)}
PARTS |= {"fp32-16": ("fp32", 16), "sweep": ("bf16", 20), "small": ("fp32", 6)}
OURS = "lawa"
WRITING, UNWRITTEN = "touch-2-write-5", "lawa-unwritten"  # belong to the sweep alone
FLOORS = tuple(way for way in WAYS if way.startswith(("touch", "read")))
VARIANTS = (OURS, *WAYS)
PACKAGES = ("torch-lawa", "torch", "numpy", "safetensors", "mergekit", "transformers")

Command = Callable[[str, Path, list[Path]], list[str]]
Verify = Callable[[str, Path], dict[str, Any]]


def average_command(variant: str, output: Path, inputs: list[Path]) -> list[str]:
    files = [str(path) for path in inputs]
    if variant == OURS:
        return [sys.executable, "-m", "torch_lawa", "average", *files, "-o", str(output), "--json"]
    target = output.with_suffix("") if variant == "mergekit" else output  # it writes a folder
    script = Path(__file__).with_name("offline_peers.py")
    return [sys.executable, str(script), variant, str(target), *files]


def sweep_command(variant: str, output: Path, inputs: list[Path]) -> list[str]:
    """Several windows that end at the last checkpoint, against reading all checkpoints once.

    Ours writes a result a window, as touch-2-write-5 does; lawa-unwritten and the other floors
    write nothing.
    """
    if variant == OURS:
        run, last = inputs[0].parents[1], int(inputs[-1].parent.name.removeprefix("step-"))
        ks = ",".join(str(k) for k in SWEEP_KS)
        words = ["sweep", str(run), "--k", ks, "--at", str(last), "-o", str(output), "--json"]
        return [sys.executable, "-m", "torch_lawa", *words]
    target = str(output) if variant == WRITING else "-"
    script = Path(__file__).with_name("offline_peers.py")
    return [sys.executable, str(script), variant, target, *(str(path) for path in inputs)]


def written(variant: str, output: Path) -> Path:
    """The file of weights that a variant has made."""
    return output.with_suffix("") / "model.safetensors" if variant == "mergekit" else output


def verify_mean(inputs: list[Path], variant: str, output: Path) -> dict[str, Any]:
    return check(written(variant, output), inputs)


def version(package: str) -> str | None:
    """What is installed; None where it is not, or is run from its source."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def exists(verb: str) -> bool:
    """Whether our command line has this verb."""
    command = [sys.executable, "-m", "torch_lawa", verb, "--help"]
    return subprocess.run(command, capture_output=True).returncode == 0


def clear(scratch: Path) -> None:
    """Remove the last output, and flush the disk, so that the next run does not wait for it."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    os.sync()


def prepare(inputs: list[Path], scratch: Path, cold: bool) -> float:
    """The same start for every run; returns the share of the inputs in the page cache."""
    clear(scratch)
    if cold:
        drop(inputs)
    elif resident(inputs) < 0.999:
        warm(inputs)
    return resident(inputs)


def measure(
    log: Log,
    part: str,
    variants: list[str],
    command: Command,
    inputs: list[Path],
    *,
    scratch: Path,
    rounds: int,
    cold: bool,
    name: str = "mean.safetensors",
    verify: Verify | None = None,
) -> dict[str, dict[str, Any]]:
    """Memory and correctness of each variant once, then the time of all of them in turn.

    `verify` compares what a variant has written with the exact mean.
    """
    bare = bare_interpreter()
    output = scratch / name
    found: dict[str, dict[str, Any]] = {}
    for variant in variants:
        prepare(inputs, scratch, cold)
        row = peak_memory(command(variant, output, inputs))
        row["peak_bytes"] -= bare
        if "failed" not in row and verify is not None and variant not in FLOORS:
            row |= verify(variant, output)
        log.add(kind="memory", part=part, variant=variant, bare_bytes=bare, **row)
        found[variant] = {**row, "wall_s": [], "engine_s": [], "cpu_s": []}
    for turn in range(rounds):
        first = turn % len(variants)
        for variant in (*variants[first:], *variants[:first]):
            row = found[variant]
            if "failed" in row:
                continue
            before = {"resident": prepare(inputs, scratch, cold), "load": os.getloadavg()[0]}
            done = execute(command(variant, output, inputs))
            log.add(kind="time", part=part, variant=variant, turn=turn, cold=cold, **before, **done)
            if "failed" in done:
                row["failed"] = done["failed"]
                continue
            row["wall_s"].append(done["wall_s"])
            row["cpu_s"].append(done["cpu_s"])
            if done["engine_s"] is not None:
                row["engine_s"].append(done["engine_s"])
        print(f"{part}: round {turn + 1} of {rounds}", flush=True)
    clear(scratch)
    return found


def show(found: dict[str, dict[str, Any]], title: str) -> None:
    """A table: median and (least) seconds, ratio to ours, memory, values that are wrong."""
    ours = found.get(OURS, {})
    print(f"\n{title}")
    print(f"{'':16} {'process, s':>16} {'/ ours':>7} {'engine, s':>16} {'/ ours':>7}", end="")
    print(f" {'processor, s':>16} {'/ ours':>7} {'memory, MB':>11}   values not the exact mean")
    for variant, row in found.items():
        if "failed" in row:
            print(f"{variant:16} failed: {row['failed'].splitlines()[-1]}")
            continue
        line = f"{variant:16}"
        for field in ("wall_s", "engine_s", "cpu_s"):
            times, base = row[field], ours.get(field)
            text = f"{median(times):.3f} ({min(times):.3f})" if times else "-"
            ratio = f"{median(times) / median(base):.2f}" if times and base else "-"
            line += f" {text:>16} {ratio:>7}"
        line += f" {row['peak_bytes'] / 1e6:11.0f}"
        if "num_checked" in row:
            share = row["num_wrong"] / row["num_checked"]
            line += f"   {row['num_wrong']:,} of {row['num_checked']:,} ({share:.1%})"
            line += f" in {', '.join(row['dtypes'])}"
            line += f"; {len(row['missing'])} tensors missing" if row["missing"] else ""
        print(line)


def run(options: argparse.Namespace, data: Path) -> None:
    """Every part that was asked for; writes the raw log and prints a table each."""
    config = TINY if options.quick else BASE if options.base else MEDIUM
    parts = [p for p in PARTS if p in options.only] or list(PARTS)
    chosen = [v for v in VARIANTS if v in options.only] or list(VARIANTS)
    wanted = [PARTS[p] for p in parts if p != "small"]
    nums = {d: max([k for dtype, k in wanted if dtype == d], default=0) for d in DTYPES}
    files = {dtype: paths(data, config, dtype, num) for dtype, num in nums.items()}
    missing = [(d, path) for d, group in files.items() for path in group if not path.exists()]
    need = sum(size(config, d) for d, _ in missing) + 2 * size(config, "fp32")
    data.mkdir(parents=True, exist_ok=True)
    if need > shutil.disk_usage(data).free:
        raise SystemExit(f"{data} has no room for {need / 1e9:.0f} GB: give another with --data")
    generate(data, config, nums)
    compileall.compile_dir(Path(torch_lawa.__file__).parent, quiet=1)  # as pip does
    if "small" in parts:
        generate(data, SMALL, {"fp32": PARTS["small"][1]})
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is to be looked up
    log = Log(options.out)
    log.add(kind="versions", **{name: version(name) for name in PACKAGES})
    log.add(kind="data", **config, bytes={d: size(config, d) for d in DTYPES}, folder=str(data))
    everything = [path for group in files.values() for path in group]
    for part in parts:
        dtype, k = PARTS[part]
        model = SMALL if part == "small" else config
        inputs = paths(data, model, dtype, k)
        sweep = part == "sweep"
        variants = [
            v
            for v in chosen
            if (v in (OURS, UNWRITTEN, *FLOORS) if sweep else v not in (WRITING, UNWRITTEN))
        ]
        if OURS in variants and not exists("sweep" if sweep else "average"):
            print(f"{part}: torch-lawa has no such command yet, its row is left out")
            variants.remove(OURS)
        os.sync()
        drop([path for path in everything if path not in inputs])
        large = k * size(model, dtype) > 0.8 * total_memory()
        found = measure(
            log,
            part,
            variants,
            sweep_command if sweep else average_command,
            inputs,
            scratch=data / "output",
            rounds=options.rounds,
            cold=options.cold or large,
            verify=None if sweep else partial(verify_mean, inputs),
        )
        title = f"{part}: {k} checkpoints of {size(model, dtype) / 1e9:.2f} GB"
        title += f", windows of {SWEEP_KS}" if sweep else ""
        title += " (more than memory holds)" if large else ""
        state = "nothing cached" if options.cold or large else "all cached"
        show(found, f"{title}; {state} before each run; median (least) of {options.rounds}")
        log.add(kind="summary", part=part, title=title, state=state, rows=found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench-offline"))
    parser.add_argument("--data", type=Path, help="folder for the checkpoints, kept afterwards")
    parser.add_argument("--rounds", type=int, help="5, or 2 with --quick")
    parser.add_argument("--cold", action="store_true", help="drop the inputs from the page cache")
    parser.add_argument(
        "--base", action="store_true", help="124 M parameters: 16 float32 checkpoints are 8 GB"
    )
    parser.add_argument("--quick", action="store_true", help="5 M parameters, 2 rounds")
    parser.add_argument(
        "--only", nargs="+", default=[], choices=[*PARTS, *VARIANTS], metavar="NAME"
    )
    options = parser.parse_args()
    options.rounds = options.rounds or (2 if options.quick else 5)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or the checkpoints would stay behind
    if options.data is not None:
        run(options, options.data)
        return
    with tempfile.TemporaryDirectory(prefix="lawa-bench-") as folder:
        run(options, Path(folder))


if __name__ == "__main__":
    main()
