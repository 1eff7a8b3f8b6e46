"""A short run of the asynchronous path for tools that watch memory: no pytest, no timing.

    export PYTHONPATH=src:tests
    checked="compute-sanitizer --report-api-errors no --error-exitcode 9 --print-limit 20"
    $checked --tool memcheck python3 tests/gpu/race_probe.py
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 $checked --tool initcheck python3 tests/gpu/race_probe.py
    PYTORCH_ALLOC_CONF=backend:cudaMallocAsync $checked --tool memcheck \
        --track-stream-ordered-races all python3 tests/gpu/race_probe.py
    TORCH_CUDA_SANITIZER=1 python3 tests/gpu/race_probe.py

Without PyTorch's cache every tensor is an allocation of its own, so that reading what was never
written is seen. With cudaMallocAsync memory is freed in the order of a stream, and the tool sees
who uses it on another stream after that. PyTorch's own sanitizer looks for two streams that use a
tensor without waiting for each other. Failed API calls are not reported, since PyTorch asks the
driver for functions that it need not have. Of racecheck, which looks at memory that threads of one
kernel share, there is no use: this library has no kernels of its own on the GPU.

Small sizes and no matrix products: a tool prepares each new kernel it meets, and those of cuBLAS
and cuDNN are large. Exits 1 where a snapshot has other bits than the weights.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch
from support.cuda import DEVICE, Weights, agree, make
from torch import nn


def snapshots(kind: str, folder: Path, numel: int, rounds: int) -> bool:
    """Collect on streams in turn, overwrite at once, read on the default stream."""
    weights, averager = Weights(numel), make(kind, folder, k=2)
    streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    good = True
    for i in range(3 * rounds):
        stream = streams[i % 3]
        stream.wait_stream(streams[(i - 1) % 3])
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000)
            weights.move()
            averager.collect(weights.tensors)
            weights.poison()
        if i % 3 == 2:
            good = agree(averager, weights) and good
    averager.wait()
    return good


def training(kind: str, folder: Path, num_steps: int) -> bool:
    """A small model: averages are swapped in between steps, and windows dropped during a copy."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(65), nn.BatchNorm1d(65), nn.PReLU(65)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averager, x = make(kind, folder, k=2), torch.randn(16, 65, device=DEVICE)
    taken, good = [], True
    for step in range(num_steps):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        averager.collect(model)
        taken.append(model[0].weight.detach().clone())
        if step:
            with averager.swapped_into(model), torch.no_grad():
                model(x)
                exact = (taken[-2].double() + taken[-1].double()) / 2
                good = torch.equal(model[0].weight, exact.float()) and good
            good = torch.equal(model[0].weight, taken[-1]) and good
    averager.collect(model)
    if kind == "disk":  # its folder goes, too, and would go under the file that is written
        averager.wait()
    return good


def tell(what: str, good: bool, began: float) -> bool:
    """Say how it went; whether it failed."""
    spent = time.perf_counter() - began
    print(f"{spent:6.1f} s  {what}: {'equal' if good else 'NOT EQUAL'}", flush=True)
    return not good


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=2)
    rounds = parser.parse_args().rounds
    torch.backends.cudnn.enabled = False
    began, failed = time.perf_counter(), 0
    for kind in ("host", "device", "disk"):
        for numel in (1, 1000, 70_001):
            with tempfile.TemporaryDirectory() as folder:
                good = snapshots(kind, Path(folder), numel, rounds)
            failed += tell(f"{kind:6} {numel:6} values", good, began)
        with tempfile.TemporaryDirectory() as folder:
            good = training(kind, Path(folder), 2 * rounds)
        failed += tell(f"{kind:6} training", good, began)
    torch.cuda.synchronize()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
