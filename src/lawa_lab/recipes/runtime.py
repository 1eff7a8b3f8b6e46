"""The runtime of a recipe: device and rank, process group, deterministic algorithms, Ctrl-C."""

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta

import torch

from lawa_lab.recipes.task import Worker
from torch_lawa.errors import ConfigError, RankError
from torch_lawa.ranks.barrier import explain_missing_ranks
from torch_lawa.signals import StopRequest

__all__ = [
    "choose_worker",
    "deterministic",
    "process_group",
    "require_deterministic",
    "stop_request",
]

# Timeout of collectives: longer than a rank may take to write a checkpoint.
_TIMEOUT = timedelta(minutes=10)


def choose_worker(device: str | None = None) -> Worker:
    """The device and rank of this process: a GPU if there is one; ranks as torchrun sets them."""
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
            raise ConfigError(f"device={device!r}: PyTorch sees no CUDA device; use --device cpu.")
        index = local_rank if chosen.index is None else chosen.index
        if index >= torch.cuda.device_count():
            raise ConfigError(
                f"device={device!r}: rank {rank} needs GPU {index}, but this machine has "
                f"{torch.cuda.device_count()}. Start at most one process per GPU."
            )
        chosen = torch.device("cuda", index)
        torch.cuda.set_device(chosen)
    elif chosen.type != "cpu":
        raise ConfigError(f"device={device!r}: recipes run on cpu or cuda only.")
    return Worker(chosen, rank, world_size)


@contextlib.contextmanager
def process_group(worker: Worker, *, always: bool = False) -> Iterator[None]:
    """Initialise the default process group for the block; a single process needs none by default.

    If a rank is killed or hangs, the other ranks fail with an error that names it.
    """
    if worker.world_size == 1 and not always:
        yield
        return
    if "MASTER_ADDR" not in os.environ:
        raise ConfigError(
            "--parallel fsdp needs a process group: start the command with torchrun "
            "--nproc-per-node N -m torch_lawa train ..., also for one process."
        )
    backend = "nccl" if worker.device.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, timeout=_TIMEOUT)
    intact = True
    try:
        yield
        worker.barrier("the end of the run")
        # gloo may abort a process whose peer has exited first; NCCL needs to know the GPU.
        torch.distributed.barrier(device_ids=[worker.device.index] if backend == "nccl" else None)
    except (RuntimeError, RankError) as error:
        intact = False
        try:
            # torchrun sends SIGTERM to the remaining ranks; they first report which one is missing.
            with stop_request(), explain_missing_ranks():
                raise
        except RankError as found:
            raise RankError(f"{found} Resume with the same command and --resume.") from error
    finally:
        if intact:  # otherwise it may wait for ranks that are gone
            torch.distributed.destroy_process_group()


@contextlib.contextmanager
def deterministic(num_threads: int | None) -> Iterator[None]:
    """Use deterministic algorithms in the block; settings and generators are restored."""
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
def require_deterministic() -> Iterator[None]:
    """Inside `deterministic`: raise an error for operations without a deterministic algorithm.

    Otherwise PyTorch may choose cuDNN's fused attention, whose gradients differ from call to call
    for long sequences.
    """
    on = torch.are_deterministic_algorithms_enabled()
    lenient = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(on)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(on, warn_only=lenient)


def stop_request() -> StopRequest:
    """Ctrl-C and SIGTERM as a request to stop after the current step.

    torchrun may repeat a signal that the terminal has already sent to every process.
    """
    return StopRequest(repeat_seconds=2.0)
