"""Running a command and measuring it from outside: time, memory, and what the cache held before."""

import contextlib
import ctypes
import json
import mmap
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

INTERVAL = 0.005  # seconds between two looks at a process's memory
Watch = Callable[["subprocess.Popen[bytes]"], None]


def execute(command: list[str], watch: Watch | None = None) -> dict[str, Any]:
    """Wall and processor time of a process, and its engine's wall time where its JSON says so."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        process = subprocess.Popen(command, stdout=out, stderr=err)
        try:
            if watch is not None:
                watch(process)
            code = process.wait()
            wall = time.perf_counter() - start
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
        finally:
            process.kill()  # if we are stopped, so is it
        out.seek(0)
        err.seek(0)
        if code:
            last = err.read().decode(errors="replace").strip()[-2000:]
            return {"failed": f"exit code {code}: {last}"}
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return {"wall_s": wall, "cpu_s": cpu, "engine_s": engine_seconds(out.read().decode())}


def engine_seconds(printed: str) -> float | None:
    """The field of that name in the JSON object a process printed, alone or as its last line."""
    for text in (printed, *printed.splitlines()[-1:]):
        with contextlib.suppress(json.JSONDecodeError):
            found = json.loads(text)
            if isinstance(found, dict) and "engine_seconds" in found:
                return float(found["engine_seconds"])
    return None


def peak_memory(command: list[str]) -> dict[str, Any]:
    """The most memory of its own that a process and its children had at one time, in bytes.

    Pages of mapped files belong to the cache and are not counted, which VmHWM would do.
    """
    peak = 0

    def watch(process: "subprocess.Popen[bytes]") -> None:
        nonlocal peak
        while process.poll() is None:
            peak = max(peak, sum(anonymous(pid) for pid in family(process.pid)))
            time.sleep(INTERVAL)

    done = execute(command, watch)
    return {"peak_bytes": peak, **{k: v for k, v in done.items() if k == "failed"}}


def bare_interpreter() -> int:
    """What `peak_memory` sees of a Python that does nothing."""
    command = [sys.executable, "-c", "import time; time.sleep(0.2)"]
    return int(peak_memory(command)["peak_bytes"])


def family(pid: int) -> list[int]:
    found = [pid]
    with contextlib.suppress(OSError):  # it may end while we look
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += family(int(child))
    return found


def anonymous(pid: int) -> int:
    total = 0
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(("RssAnon:", "RssShmem:")):
                total += 1024 * int(line.split()[1])
    return total


def total_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def resident(paths: list[Path]) -> float:
    """The share of these files that is in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    held = pages = 0
    for path in paths:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            view = np.frombuffer(mapped, np.uint8)
            seen = np.zeros(-(-len(mapped) // mmap.PAGESIZE), np.uint8)
            address = ctypes.c_void_p(view.ctypes.data)
            length = ctypes.c_size_t(len(mapped))
            if libc.mincore(address, length, ctypes.c_void_p(seen.ctypes.data)):
                raise OSError(ctypes.get_errno(), "mincore", str(path))
            held += int((seen & 1).sum())
            pages += len(seen)
            del view
    return held / max(pages, 1)


def warm(paths: list[Path]) -> None:
    """Read everything once."""
    buffer = bytearray(1 << 20)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def drop(paths: list[Path]) -> None:
    """Evict these files from the page cache, and if possible nothing else.

    The libraries that a process loads stay in the cache, or large ones would seem slow.
    """
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident(paths) > 0.01:
        with contextlib.suppress(OSError):
            Path("/proc/sys/vm/drop_caches").write_text("3")
