"""The process that forks programs with faults at their file-system calls (see `file_faults`).

It starts with the library of `file_faults.c` preloaded, imports everything once, and reads jobs
from its standard input: lists of programs that run at the same time, one JSON list per line.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import sys
import threading
import traceback
import warnings
import weakref
from typing import Any, NoReturn

IMPORTED = (
    "torch.distributed.checkpoint",
    "torch_lawa",
    "torch_lawa.averager",
    "torch_lawa.cli.average",
    "torch_lawa.cli.main",
    "torch_lawa.cli.progress",
    "torch_lawa.cli.ranks",
    "torch_lawa.cli.sweep",
    "torch_lawa.cli.watch",
    "torch_lawa.checkpoints.formats.dcp",
    "torch_lawa.checkpoints.formats.deepspeed",
    "torch_lawa.checkpoints.formats.megatron_write",
    "torch_lawa.checkpoints.formats.safetensors_torch",
    "torch_lawa.checkpoints.formats.torch_file",
    "torch_lawa.checkpoints.formats.torch_write",
    "torch_lawa.export",
    "torch_lawa.integrations.window_files",
    "torch_lawa.offline.multi_process",
    "torch_lawa.offline.sweep",
    "torch_lawa.offline.watch.watcher",
    "torch_lawa.stores.disk",
    "torch_lawa.mean.kernels_numpy",
    "lawa_lab.cli",
    "lawa_lab.recipes.run_folder",
)
SECONDS = 60.0  # for one program
_NEW_USER, _NEW_PID = 0x10000000, 0x20000000  # flags of unshare


def serve() -> None:
    """Answer each job with how its programs ended, until the standard input ends."""
    library = ctypes.CDLL(None)
    library.faults_where.restype = ctypes.c_char_p
    library.faults_count.restype = ctypes.c_long
    os.environ.pop("LD_PRELOAD", None)  # not for programs that the programs start
    warnings.filterwarnings("ignore")
    for name in IMPORTED:
        importlib.import_module(name)
    import torch

    from torch_lawa.cli.main import _verbs

    _verbs()  # reads the metadata of all installed packages
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    answers = os.fdopen(os.dup(1), "w")
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        started = [_start(library, slot, job) for slot, job in enumerate(json.loads(line))]
        ended = [_end(library, slot, *each) for slot, each in enumerate(started)]
        print(json.dumps(ended), file=answers, flush=True)


def _start(library: Any, slot: int, job: dict[str, Any]) -> tuple[int, int, int, dict[str, Any]]:
    library.faults_reset(slot)
    outputs = os.memfd_create("stdout"), os.memfd_create("stderr")
    pid = os.fork()
    if pid == 0:
        _child(library, slot, job, *outputs)
    return pid, *outputs, job


def _end(
    library: Any, slot: int, pid: int, stdout: int, stderr: int, job: dict[str, Any]
) -> dict[str, Any]:
    watched = os.pidfd_open(pid)
    waiting = select.poll()
    waiting.register(watched, select.POLLIN)
    number, delay = job["signal"] or (0, 0.0)
    if number and not waiting.poll(delay * 1000):
        signal.pidfd_send_signal(watched, number)
    hangs = not waiting.poll(SECONDS * 1000)
    if hangs:
        signal.pidfd_send_signal(watched, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(watched)
    return {
        "code": None if hangs else code,
        "stdout": _text(stdout),
        "stderr": _text(stderr),
        "count": library.faults_count(slot),
        "where": library.faults_where(slot).decode(errors="replace"),
    }


def _text(handle: int) -> str:
    with os.fdopen(handle, "rb") as file:
        file.seek(0)
        return file.read().decode(errors="replace")


def _child(library: Any, slot: int, job: dict[str, Any], stdout: int, stderr: int) -> NoReturn:
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(job["folder"])
        if job["container"]:
            _enter_container()
        code = _run(library, slot, job)
    except KeyboardInterrupt:  # before or after the program
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _enter_container() -> None:
    """Continue as process 1 of a new PID namespace; this one waits for it."""
    library, user, group = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
    if library.unshare(_NEW_PID) != 0:
        if library.unshare(_NEW_USER | _NEW_PID) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"),
                           ("gid_map", f"{group} {group} 1")):  # fmt: skip
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    pid = os.fork()
    if pid:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os._exit(code if code >= 0 else 128 - code)
    assert os.getpid() == 1


def _run(library: Any, slot: int, job: dict[str, Any]) -> int:
    fault = job["fault"]
    code: object = 0
    if fault:
        folder = os.path.realpath(job["folder"]).encode()
        library.faults_arm(slot, folder, ctypes.c_long(fault[0]), *fault[1:])
    try:
        exec(compile(job["code"], "<program>", "exec"), {"__name__": "__main__"})
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
        code = 1
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        weakref.finalize._exitfunc()  # type: ignore[attr-defined]
    library.faults_disarm()
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)
