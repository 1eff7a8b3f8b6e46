"""The machine a recipe runs on: devices and processes, bits that repeat, Ctrl-C."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from types import FrameType

import torch

from lawa_lab.recipes.task import Place
from torch_lawa.errors import ConfigError, LawaError, RankError
from torch_lawa.ranks.barrier import barrier, explain_missing_ranks

__all__ = ["StopSignal", "choose_place", "joined", "repeatable", "strictly"]

# How long a process waits for the others: longer than one may take to write a checkpoint.
_TIMEOUT = timedelta(minutes=10)


def choose_place(device: str | None = None) -> Place:
    """This process's place: a GPU where there is one; under torchrun one of several processes."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    rank, local_rank = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"device={device!r}: use cpu, cuda or cuda:N.") from None
    if chosen.type == "cuda":
        if not torch.cuda.is_available():
            raise LawaError(f"device={device!r}: PyTorch sees no CUDA device; use --device cpu.")
        index = local_rank if chosen.index is None else chosen.index
        if index >= torch.cuda.device_count():
            raise LawaError(
                f"device={device!r}: process {rank} wants GPU {index} and there are "
                f"{torch.cuda.device_count()}. Start no more processes than GPUs."
            )
        chosen = torch.device("cuda", index)
        torch.cuda.set_device(chosen)
    elif chosen.type != "cpu":
        raise ConfigError(f"device={device!r}: recipes run on cpu or cuda.")
    return Place(chosen, rank, world_size)


@contextlib.contextmanager
def joined(place: Place, *, alone: bool = True) -> Iterator[None]:
    """In touch with the other processes, where there are any; one by itself unless `alone`.

    When some of them are killed or stand still, the others end with an error that names them.
    """
    if place.world_size == 1 and alone:
        yield
        return
    if "MASTER_ADDR" not in os.environ:
        raise LawaError(
            "shards need a process group: start the command with torchrun --nproc-per-node N -m "
            "torch_lawa ..., also for one process."
        )
    backend = "nccl" if place.device.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, timeout=_TIMEOUT)
    in_touch = True
    try:
        yield
        barrier("the end of the run")
        # gloo may abort a process whose peer has left before it; NCCL wants to know the GPU.
        torch.distributed.barrier(device_ids=[place.device.index] if backend == "nccl" else None)
    except (RuntimeError, RankError) as error:
        in_touch = False
        try:
            # A launcher tells the rest to end when one has died: they say first which it was.
            with StopSignal(), explain_missing_ranks():
                raise
        except RankError as found:
            raise RankError(f"{found} The same command with --resume does that.") from error
    finally:
        if in_touch:  # else it may wait for processes that are gone
            torch.distributed.destroy_process_group()


@contextlib.contextmanager
def repeatable(num_threads: int | None) -> Iterator[None]:
    """Algorithms that give the same bits each time; settings and generators return at the end."""
    settings = (
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        torch.get_num_threads(),
    )
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    try:
        with torch.random.fork_rng():
            yield
    finally:
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = settings[:2]
        torch.use_deterministic_algorithms(settings[2], warn_only=settings[3])
        torch.utils.deterministic.fill_uninitialized_memory = settings[4]  # type: ignore[attr-defined]
        torch.set_num_threads(settings[5])


@contextlib.contextmanager
def strictly() -> Iterator[None]:
    """Inside of `repeatable`: an operation without a repeatable algorithm is an error.

    Without this, PyTorch may take cuDNN's fused attention, whose gradients differ from one call to
    the next where a sequence is long.
    """
    on = torch.are_deterministic_algorithms_enabled()
    lenient = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(on)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(on, warn_only=lenient)


class StopSignal:
    """Notices Ctrl-C and SIGTERM; a second one, later, stops at once.

    The loop asks `pending` after each step, so that what it saves is a whole step. A launcher may
    pass on what the terminal has sent already: a signal right after the first is the same one.
    """

    _SAME_SECONDS = 2.0

    def __init__(self) -> None:
        self.pending = False
        self._at = 0.0

    def __enter__(self) -> "StopSignal":
        self._before = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._notice)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _notice(self, number: int, frame: FrameType | None) -> None:
        if self.pending and time.monotonic() - self._at > self._SAME_SECONDS:
            raise KeyboardInterrupt
        if not self.pending:
            self.pending, self._at = True, time.monotonic()
