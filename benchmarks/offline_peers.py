"""The ways people average checkpoints today, and their lower bound: one process each.

    python benchmarks/offline_peers.py WAY OUTPUT CHECKPOINT...

Prints `{"engine_seconds": ...}`: the time from after the imports until the output is written. Each
way imports what it needs and no more, and is given the options that make it fastest.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

SWEEP_KS = (2, 4, 6, 10, 20)
Act = Callable[[], None]


def naive(output: str, inputs: list[str]) -> Act:
    """Everything into a list, then `torch.stack(...).mean(0)`."""
    import torch
    from safetensors.torch import load_file, save_file

    def act() -> None:
        states = [load_file(path) for path in inputs]
        mean = {name: torch.stack([s[name] for s in states]).mean(0) for name in states[0]}
        save_file(mean, output)

    return act


def accumulate(output: str, inputs: list[str]) -> Act:
    """One file at a time, added in place in the dtype of the file, divided at the end."""
    from safetensors.torch import load_file, save_file

    def act() -> None:
        total = load_file(inputs[0])
        for path in inputs[1:]:
            for name, value in load_file(path).items():
                total[name] += value
        for value in total.values():
            value /= len(inputs)
        save_file(total, output)

    return act


def timm(output: str, inputs: list[str]) -> Act:
    """What timm's avg_checkpoints.py does with --no-sort and a safetensors output.

    The script is in timm's repository but not in its package, so its steps are done here, without
    importing timm: float64 sums, a division, a clamp, a float32 result, a hash of what was written.
    """
    import hashlib

    import torch
    from safetensors.torch import load_file, save_file

    def act() -> None:
        total: dict[str, torch.Tensor] = {}
        counts: dict[str, int] = {}
        for path in inputs:
            for name, value in load_file(path).items():
                if name in total:
                    total[name] += value.to(torch.float64)
                    counts[name] += 1
                else:
                    total[name] = value.clone().to(torch.float64)
                    counts[name] = 1
        for name, value in total.items():
            value.div_(counts[name])
        finite = torch.finfo(torch.float32)
        mean = {n: v.clamp(finite.min, finite.max).to(torch.float32) for n, v in total.items()}
        save_file(mean, output)
        hashlib.sha256(Path(output).read_bytes()).hexdigest()

    return act


def mergekit(output: str, inputs: list[str]) -> Act:
    """`mergekit-yaml` with a linear merge of equal weights; `output` is a folder.

    `--low-cpu-memory`, `--read-to-gpu` and `--multi-gpu` are about an accelerator and
    `--lazy-unpickle` about pickles; `--async-write` overlaps shards, of which there is one, and
    `-j` is PyTorch's number of threads, the cores by default. Three runs each: within the noise.
    """
    from mergekit.scripts.run_yaml import main

    dtype = json.loads(Path(inputs[0]).with_name("config.json").read_text())["torch_dtype"]
    models = [{"model": str(Path(p).parent), "parameters": {"weight": 1.0}} for p in inputs]
    plan = Path(output).with_suffix(".yaml")
    # JSON is YAML.
    plan.write_text(json.dumps({"merge_method": "linear", "dtype": dtype, "models": models}))
    flags = ["--no-copy-tokenizer", "--no-write-model-card", "--quiet", "--lazy-unpickle"]

    def act() -> None:
        main([str(plan), output, *flags], standalone_mode=False)

    return act


def floor(
    output: str,
    inputs: list[str],
    *,
    num_threads: int,
    step: int,
    num_outputs: int = 1,
    flush: bool = False,
) -> Act:
    """Read one word in `step` of every input, once, and write as much as one of them, once.

    A line of the cache is 8 words, so 8 brings every byte to the processor and 1 also looks at it.
    An `output` of "-" is not written. With `flush` it is on the disk at the end, as ours is.
    """
    import mmap
    import os
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np

    piece = 1 << 20
    ready = np.ones(piece, np.uint8)

    def act() -> None:
        maps = []
        for path in inputs:
            with open(path, "rb") as file:
                maps.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        words = [np.frombuffer(m, np.int64, len(m) // 8) for m in maps]
        num_bytes = len(maps[0])

        def read(thread: int) -> None:
            for w in words:
                for at in range(piece // 8 * thread, len(w), piece // 8 * num_threads):
                    np.bitwise_or.reduce(w[at : at + piece // 8 : step])

        def write(thread: int) -> None:
            for at in range(piece * thread, num_bytes, piece * num_threads):
                os.pwrite(target, ready[: num_bytes - at], at)

        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(read, range(num_threads)))
            for i in range(num_outputs if output != "-" else 0):
                name = f"{output}.{i}" if i else output
                target = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
                os.posix_fallocate(target, 0, num_bytes)
                list(pool.map(write, range(num_threads)))
                if flush:
                    os.fsync(target)
                os.close(target)

    return act


def sweep_unwritten(output: str, inputs: list[str]) -> Act:
    """Our sweep, windows that end at the last checkpoint, with every result thrown away."""
    import contextlib
    from collections.abc import Iterator
    from pathlib import Path

    from torch_lawa.offline import sweep
    from torch_lawa.offline.sweep_plan import plan_sweep

    class Nowhere:
        def write(self, name: str, begin: int, piece: object) -> None:
            pass

    @contextlib.contextmanager
    def nowhere(*_: object) -> Iterator[Nowhere]:
        yield Nowhere()

    sweep.writing = nowhere  # type: ignore[assignment]
    folders = [str(Path(path).parent) for path in inputs]
    last = int(Path(folders[-1]).name.removeprefix("step-"))
    plan = plan_sweep(folders, SWEEP_KS, at=[last])
    return lambda: sweep.run_sweep(plan, output="nowhere")  # type: ignore[return-value]


WAYS: dict[str, Callable[[str, list[str]], Act]] = {
    "naive": naive,
    "accumulate": accumulate,
    "timm": timm,
    "mergekit": mergekit,
    "touch-1": lambda o, i: floor(o, i, num_threads=1, step=8),
    "touch-2": lambda o, i: floor(o, i, num_threads=2, step=8),
    "touch-2-flush": lambda o, i: floor(o, i, num_threads=2, step=8, flush=True),
    "read-1": lambda o, i: floor(o, i, num_threads=1, step=1),
    "read-2": lambda o, i: floor(o, i, num_threads=2, step=1),
    "lawa-unwritten": sweep_unwritten,
    "touch-2-write-5": lambda o, i: floor(o, i, num_threads=2, step=8, num_outputs=5),
}


def main() -> None:
    way, output, *inputs = sys.argv[1:]
    act = WAYS[way](output, inputs)
    start = time.perf_counter()
    act()
    print(json.dumps({"engine_seconds": time.perf_counter() - start}))


if __name__ == "__main__":
    main()
