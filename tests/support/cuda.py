"""What tests on a GPU share: slow streams, moving weights, poisoned memory, a group of one."""

import contextlib
import gc
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from support.models import same_bits
from torch_lawa import DiskStore, LatestWeightAverager
from torch_lawa.stores import memory

DEVICE = "cuda:0"


def make(kind: str, folder: Path, **options: Any) -> LatestWeightAverager:
    store: Any = DiskStore(folder / "window") if kind == "disk" else kind
    return LatestWeightAverager(store=store, **options)


_rate: list[float] = []  # cycles a millisecond, once measured


def sleep(milliseconds: float) -> None:
    """Hold back the current stream of the GPU."""
    if not _rate:
        torch.cuda._sleep(500_000_000)  # the clock of an idle GPU is slow
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        spent = []
        for _ in range(5):
            first.record()
            torch.cuda._sleep(20_000_000)
            last.record()
            last.synchronize()
            spent.append(first.elapsed_time(last))
        _rate.append(20_000_000 / min(spent))  # the rest waited for other users of the GPU
    if milliseconds:
        torch.cuda._sleep(int(milliseconds * _rate[0]))


def settled() -> int:
    """Bytes that are allocated on the GPU once all that was let go of is free; peaks begin anew.

    Memory that another stream used counts until PyTorch looks whether that stream is done.
    """
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


@contextlib.contextmanager
def one_rank(folder: Path, *backends: str) -> Iterator[None]:
    """A process group of this process alone, with the first of `backends` that works here."""
    for library in ("NCCL", "GLOO"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")  # a machine may have no other
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    for i, backend in enumerate(backends):
        store = dist.FileStore(str(folder / f"store-{i}"), 1)
        try:
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
            dist.all_reduce(torch.ones(1, device=DEVICE))
            break
        except (RuntimeError, ValueError):
            if dist.is_initialized():
                dist.destroy_process_group()
            if backend == backends[-1]:
                raise
    try:
        yield
    finally:
        dist.destroy_process_group()


class Weights:
    """Named tensors that change at once after each snapshot, and what they were when it was taken.

    float32 and bfloat16, so that a snapshot has two buffers; an integer is kept, not averaged.
    """

    def __init__(self, numel: int) -> None:
        self.tensors = {
            "wide": torch.empty(numel, device=DEVICE),
            "narrow": torch.empty(numel // 2 + 1, 3, device=DEVICE, dtype=torch.bfloat16),
            "count": torch.zeros(2, device=DEVICE, dtype=torch.int64),
        }
        self.taken: list[dict[str, Tensor]] = []

    def move(self) -> None:
        """Draw new values on the current stream, and remember them."""
        for tensor in self.tensors.values():
            if tensor.is_floating_point():
                tensor.normal_()
            else:
                tensor.random_(1 << 40)
        now = {name: tensor.clone() for name, tensor in self.tensors.items()}
        self.taken = [*self.taken[-7:], now]

    def poison(self) -> None:
        """Overwrite them on the current stream, as the next training step would."""
        for tensor in self.tensors.values():
            tensor.fill_(float("nan") if tensor.is_floating_point() else -1)


def agree(averager: LatestWeightAverager, weights: Weights) -> bool:
    """Whether each snapshot, and the mean, has the bits it should have."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of NaN: the controls want to see it
        state = averager.state_dict()
        # Copied before anything else waits: reading it late would hide a race.
        found = [{n: t.clone() for n, t in s["tensors"].items()} for s in state["snapshots"]]
        count = state["kept"]["count"].clone()
        mean = {name: tensor.to(DEVICE) for name, tensor in averager.average().items()}
    torch.cuda.synchronize()
    want = weights.taken[-len(found) :]
    # By a tensor: a number on the host would become a product with its reciprocal on the GPU.
    count_of = torch.tensor(float(len(want)), dtype=torch.float64, device=DEVICE)
    exact = {n: sum(w[n].double() for w in want) / count_of for n in ("wide", "narrow")}
    # PyTorch rounds to bfloat16 twice: the last bit may differ.
    near = (mean["narrow"] - exact["narrow"]).abs() <= exact["narrow"].abs() / 250
    return all(
        [
            *(
                same_bits(f[n].to(DEVICE), w[n])
                for f, w in zip(found, want, strict=True)
                for n in f
            ),
            same_bits(mean["wide"], exact["wide"].float()),
            bool(near.all()),
            torch.equal(count.to(DEVICE), want[-1]["count"]),
        ]
    )


class Poison:
    """Copies to the host come late, and leave NaN in the staging memory when they are done."""

    def __init__(self) -> None:
        self.late: Callable[[], float] = lambda: 0.0  # milliseconds
        self._full: dict[tuple[torch.dtype, torch.Size], Tensor] = {}

    def _bad(self, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        key = dtype, shape
        if key not in self._full:
            value = float("nan") if dtype.is_floating_point else -1
            self._full[key] = torch.full(shape, value, dtype=dtype, device=DEVICE)
            torch.cuda.synchronize()
        return self._full[key]

    def copy(self, stage: memory.Stage, original: Callable[[], None], buffers: list[Any]) -> None:
        stream = stage._stream(torch.device(DEVICE))
        flats = [buffer.flat for buffer in buffers]
        bad = [self._bad(flat.dtype, flat.shape) for flat in flats]
        with torch.cuda.stream(stream):
            for flat, value in zip(flats, bad, strict=True):
                flat.copy_(value, non_blocking=True)  # host memory before the snapshot is there
            sleep(self.late())
        original()
        after = [
            (
                staging.flat[entry.offset : entry.offset + entry.numel],
                self._bad(staging.flat.dtype, torch.Size([entry.numel])),
            )
            for i, staging in stage._staging.items()
            for entry in stage._groups[i].entries  # the padding stays a number
        ]
        for feed in stage._feeds.values():  # after the last piece, whoever enqueues that one
            with feed._lock:
                feed._left.extend(after)
