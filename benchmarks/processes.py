"""`lawa average` with 1, 2 and 4 processes on one machine, with one thread each and by default.

All variants take turns, round by round, over the same cached files of a 350 M-parameter
transformer. "Process" is the whole command, with the start of torchrun and PyTorch where there are
several processes; "engine" is reading, averaging and writing; "cpu" is the processor time of all
processes, which depends little on what else the machine does.

    python benchmarks/processes.py --data /scratch          # needs 16 GB of disk
    python benchmarks/processes.py --quick                  # a smoke test of the script itself
"""

import argparse
import filecmp
import os
import resource
import sys
from pathlib import Path
from typing import Any

from offline_data import MEDIUM, TINY, generate, paths
from offline_process import execute, resident, warm
from record import Log, median

K = 6
VARIANTS = [(processes, threads) for threads in (1, None) for processes in (1, 2, 4)]


def command(processes: int, threads: int | None, inputs: list[Path], output: Path) -> list[str]:
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
    words = [sys.executable, "-m", *(torchrun if processes > 1 else []), "torch_lawa", "average"]
    words += [*map(str, inputs), "-o", str(output), "--overwrite", "--json"]
    return words + ([] if threads is None else ["--threads", str(threads)])


def cpu_seconds() -> float:
    """Of all processes that have ended: this counts work, however busy the machine is."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(dtype: str, inputs: list[Path], rounds: int, log: Log) -> None:
    found: dict[tuple[int, int | None], list[dict[str, Any]]] = {v: [] for v in VARIANTS}
    outputs = {v: inputs[0].parents[1] / f"mean-{v[0]}-{v[1]}.safetensors" for v in VARIANTS}
    for number in range(rounds):
        turned = VARIANTS[number % len(VARIANTS) :] + VARIANTS[: number % len(VARIANTS)]
        for variant in turned:
            warm(inputs)
            load = os.getloadavg()[0]
            before = cpu_seconds()
            row = execute(command(*variant, inputs, outputs[variant]))
            row["cpu_s"] = cpu_seconds() - before
            processes, threads = variant
            log.add(kind="run", dtype=dtype, processes=processes, threads=threads, round=number,
                    cached=resident(inputs), load=load, **row)  # fmt: skip
            if "failed" in row:
                raise SystemExit(row["failed"])
            found[variant].append(row)
    first, *others = outputs.values()
    assert all(filecmp.cmp(first, other, shallow=False) for other in others)
    for output in outputs.values():
        output.unlink()
    print(f"\n{dtype}, {K} checkpoints, median of {rounds} (fastest to slowest); same bytes")
    reference = found[1, None]
    for (processes, threads), rows in found.items():
        cells = [f"{processes} processes, threads {threads or 'default'}:"]
        for name in ("wall_s", "engine_s", "cpu_s"):
            seconds = sorted(row[name] for row in rows)
            ratio = median(seconds) / median([row[name] for row in reference])
            cells.append(
                f"{name[:-2]} {median(seconds):.2f} s ({seconds[0]:.2f} to {seconds[-1]:.2f}), "
                f"{ratio:.2f} of one process;"
            )
        print(" ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("data/offline"))
    parser.add_argument("--output", type=Path, default=Path("runs/processes"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    os.environ["SOURCE_DATE_EPOCH"] = "1700000000"  # the date is inside the results
    os.environ["OMP_NUM_THREADS"] = "1"  # else torchrun warns that it sets this
    config = TINY if options.quick else MEDIUM
    generate(options.data, config, {"fp32": K, "bf16": K})
    log = Log(options.output)
    for dtype in ("fp32", "bf16"):
        measure(dtype, paths(options.data, config, dtype, K), options.rounds, log)


if __name__ == "__main__":
    main()
