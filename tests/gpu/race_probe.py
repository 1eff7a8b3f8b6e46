"""A short run of the asynchronous path for compute-sanitizer: no pytest, small sizes, no timing.

    export PYTHONPATH=src:tests
    compute-sanitizer --tool memcheck --error-exitcode 9 python3 tests/gpu/race_probe.py
    compute-sanitizer --tool racecheck --error-exitcode 9 python3 tests/gpu/race_probe.py
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool initcheck --error-exitcode 9 \
        python3 tests/gpu/race_probe.py
    PYTORCH_ALLOC_CONF=backend:cudaMallocAsync compute-sanitizer --tool memcheck \
        --track-stream-ordered-races all --error-exitcode 9 python3 tests/gpu/race_probe.py

Without PyTorch's cache every tensor is an allocation of its own, so that reading what was never
written is seen. With cudaMallocAsync memory is freed in the order of a stream, and the tool sees
who uses it on another stream after that. Exits 1 where a snapshot has other bits than the weights.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from cuda_support import DEVICE, Weights, agree, make
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
    return good


def training(kind: str, folder: Path, num_steps: int) -> bool:
    """A small model, its window lent to it between steps, and dropped during a copy."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(65, 33), nn.BatchNorm1d(33), nn.Linear(33, 5)).to(DEVICE)
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
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    failed = 0
    for kind in ("host", "device", "disk"):
        for numel in (1, 1000, 70_001):
            with tempfile.TemporaryDirectory() as folder:
                good = snapshots(kind, Path(folder), numel, rounds)
            print(f"{kind:6} {numel:6} values: {'equal' if good else 'NOT EQUAL'}", flush=True)
            failed += not good
        with tempfile.TemporaryDirectory() as folder:
            good = training(kind, Path(folder), 2 * rounds)
        print(f"{kind:6} training: {'equal' if good else 'NOT EQUAL'}", flush=True)
        failed += not good
    torch.cuda.synchronize()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
