"""Several gloo processes on this machine, each running one function of a test module."""

import importlib.util
import os
import secrets
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def free_port() -> int:
    """A port nobody listens on, below those the system hands to outgoing connections.

    One of the system's own choosing may be handed out again before the first rank listens.
    """
    while True:
        port = 20000 + secrets.randbelow(12000)  # the global generator may be seeded
        with socket.socket() as trial:
            try:
                trial.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def on_ranks(
    world_size: int, function: Callable[..., Any], *arguments: Any, join: bool = True
) -> list[Any]:
    """Run `function(rank, *arguments)` in `world_size` processes; what each returned, by rank.

    The function must be importable: it is sent by its module's file and its name. Without `join`
    it makes the process group itself.
    """
    module = sys.modules[function.__module__]
    assert module.__file__ is not None
    # Kept here, as torchrun does: one that a rank keeps ends with it, before the others are done.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            _work,
            (world_size, store.port, module.__file__, function.__name__, arguments, folder, join),
            nprocs=world_size,
            start_method="spawn",
        )
        return [
            torch.load(Path(folder) / f"{rank}.pt", weights_only=False)
            for rank in range(world_size)
        ]


def _work(
    rank: int,
    world_size: int,
    port: int,
    file: str,
    name: str,
    arguments: tuple[Any, ...],
    folder: str,
    join: bool,
) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("ranked", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["ranked"] = module
    spec.loader.exec_module(module)
    if join:
        dist.init_process_group("gloo")
    try:
        result = getattr(module, name)(rank, *arguments)
        torch.save(result, Path(folder) / f"{rank}.pt")
        if join:
            dist.barrier()  # gloo may abort a process whose peer is gone
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        if join:
            dist.destroy_process_group()
    # All is done: without what Python does at its end, when a thread of PyTorch's that still wants
    # to run has been seen to abort the process, about once in hundreds of times.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
