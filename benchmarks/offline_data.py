"""The checkpoints that benchmarks/offline.py averages, and the mean they must give.

A random walk of a GPT-2: the same steps in float32 and in bfloat16, each a folder as Hugging Face
lays it out. Written once, the same on every machine.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

MEDIUM = {"n_layer": 24, "n_embd": 1024, "vocab_size": 50257, "n_positions": 1024, "n_head": 16}
BASE = {"n_layer": 12, "n_embd": 768, "vocab_size": 50257, "n_positions": 1024, "n_head": 12}
TINY = {"n_layer": 4, "n_embd": 256, "vocab_size": 8000, "n_positions": 256, "n_head": 4}
SMALL = {"num_tensors": 100_000, "numel": 64}  # as of an adapter, or of many experts
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CHECKED = ("wte", "wpe", "h.0.", "h.3.attn", "ln_f")  # the tensors whose mean is checked


def shapes(config: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a GPT-2's parameters; the head is tied to the embedding.

    Or many small tensors.
    """
    if "num_tensors" in config:
        return {
            f"transformer.h.{i // 10}.expert.{i % 10}.weight": (config["numel"],)
            for i in range(config["num_tensors"])
        }
    d = config["n_embd"]
    found: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (config["vocab_size"], d),
        "transformer.wpe.weight": (config["n_positions"], d),
    }
    for i in range(config["n_layer"]):
        for name, wide in (("ln_1", 0), ("attn.c_attn", 3), ("attn.c_proj", 1), ("ln_2", 0)):
            found[f"transformer.h.{i}.{name}.weight"] = (d, wide * d) if wide else (d,)
            found[f"transformer.h.{i}.{name}.bias"] = ((wide or 1) * d,)
        for name, rows, columns in (("mlp.c_fc", d, 4 * d), ("mlp.c_proj", 4 * d, d)):
            found[f"transformer.h.{i}.{name}.weight"] = (rows, columns)
            found[f"transformer.h.{i}.{name}.bias"] = (columns,)
    return {**found, "transformer.ln_f.weight": (d,), "transformer.ln_f.bias": (d,)}


def size(config: dict[str, int], dtype: str) -> int:
    """Bytes of the parameters of one checkpoint."""
    return sum(math.prod(s) for s in shapes(config).values()) * DTYPES[dtype].itemsize


def paths(data: Path, config: dict[str, int], dtype: str, num: int) -> list[Path]:
    """Where the first `num` checkpoints of a dtype are."""
    kind = "small" if "num_tensors" in config else "gpt2"
    model = f"{kind}-{sum(math.prod(s) for s in shapes(config).values()) // 10**6}M"
    return [
        data / model / dtype / f"step-{1000 * (i + 1):06d}" / "model.safetensors"
        for i in range(num)
    ]


def generate(data: Path, config: dict[str, int], nums: dict[str, int]) -> None:
    """Write what is missing of the first `nums[dtype]` checkpoints of each dtype."""
    wanted = {dtype: paths(data, config, dtype, num) for dtype, num in nums.items()}
    if all(path.exists() for files in wanted.values() for path in files):
        return
    rng = np.random.Generator(np.random.SFC64(0))
    about = {**config, "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    walk = {
        name: torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)).mul_(0.02)
        for name, shape in shapes(config).items()
    }
    for step in range(max(nums.values())):
        for tensor in walk.values():
            tensor += torch.from_numpy(rng.random(tensor.shape, dtype=np.float32)).sub_(0.5) * 2e-3
        for dtype, files in wanted.items():
            if step >= len(files) or files[step].exists():
                continue
            folder = files[step].parent
            folder.mkdir(parents=True, exist_ok=True)
            described = {**about, "torch_dtype": str(DTYPES[dtype]).removeprefix("torch.")}
            (folder / "config.json").write_text(json.dumps(described))
            values = {name: t.to(DTYPES[dtype]) for name, t in walk.items()}
            save_file(values, folder / "part", metadata={"format": "pt"})
            (folder / "part").rename(files[step])
            print(f"wrote {files[step]}", flush=True)


def rounded(exact: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """float64 values rounded once to `dtype`; by way of float32 they could be rounded twice."""
    single = exact.astype(np.float32)
    if dtype == torch.float32:
        return torch.from_numpy(single)
    bits = single.view(np.uint32)
    bits -= np.abs(single.astype(np.float64)) > np.abs(exact)  # towards zero
    bits |= single.astype(np.float64) != exact  # to odd: what was cut off still shows
    bits += 0x7FFF + ((bits >> 16) & 1)  # to the nearest bfloat16, ties to even
    return torch.from_numpy((bits >> 16).astype(np.uint16)).view(torch.bfloat16)


def check(output: Path, inputs: list[Path]) -> dict[str, Any]:
    """How many values of some tensors are not the exact mean, rounded once to the output's dtype.

    A sum of so few values so near to each other is exact in float64.
    """
    wrong = total = 0
    worst = 0.0
    dtypes = set()
    with safe_open(output, "pt") as result:
        names = set(result.keys())
        with safe_open(inputs[0], "pt") as first:
            missing = sorted(set(first.keys()) - names)
        for name in sorted(n for n in names if any(c in n for c in CHECKED)):
            rows = slice(0, 4096)
            value = result.get_slice(name)[rows]
            mean = np.zeros(tuple(value.shape))
            for path in inputs:
                with safe_open(path, "pt") as file:
                    mean += file.get_slice(name)[rows].double().numpy()
            mean /= len(inputs)
            off = value != rounded(mean, value.dtype)
            wrong += int(off.sum())
            total += value.numel()
            worst = max(worst, float(np.abs(value.double().numpy() - mean).max()))
            dtypes.add(str(value.dtype).removeprefix("torch."))
    return {
        "num_wrong": wrong,
        "num_checked": total,
        "worst_error": worst,
        "dtypes": sorted(dtypes),
        "missing": missing,
    }
