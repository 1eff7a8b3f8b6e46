"""Several gloo processes on this machine, each running one function of a test module.

They are forked from a server that has imported PyTorch, which takes each new process two seconds.
"""

import importlib.util
import multiprocessing
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

FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",  # which optimizers import when they are made
        "torch._inductor.config",  # and torch.use_deterministic_algorithms
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch_lawa.averager",
        "torch_lawa.cli.average",
        "torch_lawa.offline.multi_process",
        "lawa_lab.recipes.loop",
        "sklearn.datasets",  # the digits
    ]
)


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
    environ = os.environ | {  # the server has the environment that it was started in
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(world_size),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            _work,
            (environ, module.__file__, function.__name__, arguments, folder, join),
            nprocs=world_size,
            start_method="forkserver",
        )
        return [
            torch.load(Path(folder) / f"{rank}.pt", weights_only=False)
            for rank in range(world_size)
        ]


def _work(
    rank: int,
    environ: dict[str, str],
    file: str,
    name: str,
    arguments: tuple[Any, ...],
    folder: str,
    join: bool,
) -> None:
    os.environ |= environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
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
