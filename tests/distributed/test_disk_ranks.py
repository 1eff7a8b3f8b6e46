"""The window on disk over two ranks: the unsharded mean, whichever rank dies at what moment."""

import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.programs import Program
from support.ranks import free_port, on_ranks
from support.sharded import refill
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DeviceMesh, DTensor, Shard, distribute_tensor, init_device_mesh

from torch_lawa import DiskStore, LatestWeightAverager
from torch_lawa.errors import LayoutError, StoreError

K = 3
SCRIPT = """
import json, runpy, sys
runpy.run_path(sys.argv[1])["train"](*json.loads(sys.argv[2]))
"""


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 1))


def collect(model: nn.Module, averager: LatestWeightAverager, steps: range) -> None:
    for step in steps:
        refill(model, step)
        averager.collect(model, step=step)


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors.items()}


def make(folder: str, k: int = K) -> LatestWeightAverager:
    return LatestWeightAverager(k=k, store=DiskStore(folder))


def first_run(rank: int, folder: str) -> dict[str, Any]:
    """A window, and its take-over once the one who uses it is gone."""
    model, averager = fully_shard(net()), make(folder)
    collect(model, averager, range(1, 6))
    found: dict[str, Any] = {"average": whole(averager.average())}
    if rank == 0:
        averager.wait()
        del averager
    with pytest.raises(StoreError) as error:  # rank 1 still uses its folder
        make(folder)
    found["error"] = str(error.value)
    if rank == 1:
        del averager
    error = None  # type: ignore[assignment]
    averager = make(folder)
    averager.bind(model)
    found["taken over"] = whole(averager.average())
    collect(model, averager, range(6, 7))
    averager.wait()
    found["files"] = sorted(path.name for path in Path(folder).iterdir())
    return found


def second_run(rank: int, folder: str) -> dict[str, Any]:
    model, averager = fully_shard(net()), make(folder)
    averager.bind(model)
    found = {"steps": averager.snapshot_steps, "average": whole(averager.average())}
    collect(model, averager, range(7, 8))
    found["later"] = whole(averager.average())
    swapped = fully_shard(net(), mesh=DeviceMesh("cpu", [1, 0]))  # the other's parts
    with pytest.raises(LayoutError, match="other shards"):
        averager.collect(swapped)
    return found


def unsharded(steps: range) -> dict[str, Tensor]:
    model, averager = net(), LatestWeightAverager(k=K)
    collect(model, averager, steps)
    return averager.average()


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_each_rank_has_a_folder_and_a_later_run_takes_over(tmp_path: Path) -> None:
    folders = ["rank-00000-of-00002", "rank-00001-of-00002"]
    for rank, found in enumerate(on_ranks(2, first_run, str(tmp_path))):
        assert_same(found["average"], unsharded(range(1, 6)))
        assert_same(found["taken over"], unsharded(range(1, 6)))
        assert found["files"] == folders
        assert "another averager" in found["error"]
        assert found["error"].startswith("rank 1 cannot") == (rank == 0)
    for found in on_ranks(2, second_run, str(tmp_path)):
        assert found["steps"] == [4, 5, 6]
        assert_same(found["average"], unsharded(range(1, 7)))
        assert_same(found["later"], unsharded(range(1, 8)))
    with pytest.raises(StoreError, match=r"2 processes.* one process"):
        make(str(tmp_path))


def refused(rank: int, folder: str) -> str:
    with pytest.raises(StoreError) as error:
        make(folder)
    return str(error.value)


@pytest.mark.matrix
def test_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    on_ranks(2, second_window, str(tmp_path))
    for message in on_ranks(3, refused, str(tmp_path)):
        assert "the window of 2 processes, but this run has 3 processes" in message


def second_window(rank: int, folder: str) -> None:
    averager = make(folder)
    collect(fully_shard(net()), averager, range(1, 3))
    averager.wait()


# A run that dies. Its snapshots tell when they were taken, and in which attempt.


def values(attempt: int, step: int, size: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * attempt + step)
    return {
        "w": torch.randn(size, 3, generator=generator),
        "n": torch.tensor(1000 * attempt + step),  # from the newest snapshot
    }


def sharded(tensors: dict[str, Tensor], mesh: DeviceMesh) -> dict[str, Tensor]:
    return {**tensors, "w": distribute_tensor(tensors["w"], mesh, [Shard(0)])}


def digest(tensors: dict[str, Tensor]) -> str:
    told = hashlib.sha256()
    for name, tensor in sorted(whole(tensors).items()):
        told.update(name.encode() + tensor.numpy().tobytes())
    return told.hexdigest()


def train(folder: str, attempt: int, size: int, last: int, faults: dict[str, int]) -> None:
    """Say what was taken over, then collect, in step with the others, up to `last`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    fault = faults.get(str(dist.get_rank()))
    if fault is not None:
        die_before_manifest(fault, other_manifest(Path(folder), dist.get_rank()))
    averager = make(folder)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    told: dict[str, Any] = {
        "steps": averager.snapshot_steps,
        "num_collected": averager.num_collected,
    }
    if averager.snapshot_steps:
        averager.bind(sharded(values(0, 0, size), mesh))  # to know what the parts are parts of
        told["digest"] = digest(averager.average(k=len(averager)))
    sharded(values(0, 0, size), mesh)  # the first takes long
    print(json.dumps(told), flush=True)
    for step in range(averager.num_collected + 1, last + 1):
        live = sharded(values(attempt, step, size), mesh)
        dist.all_reduce(torch.zeros(1))  # the gradients
        averager.collect(live, step=step)
    averager.wait()
    dist.barrier()
    print(
        json.dumps({"steps": averager.snapshot_steps, "digest": digest(averager.average())}),
        flush=True,
    )


def die_before_manifest(call: int, other: Path) -> None:
    """Kill this process when files are written and its `call`-th manifest is not.

    Its training goes on meanwhile, so the other gets as far ahead as it ever can.
    """
    original, calls = DiskStore._write_manifest, []

    def write(store: DiskStore, manifest: Any) -> None:
        calls.append(manifest)
        if len(calls) == call:
            deadline = time.monotonic() + 60
            while newest_step(other) < call and time.monotonic() < deadline:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        original(store, manifest)

    DiskStore._write_manifest = write  # type: ignore[method-assign]


def other_manifest(folder: Path, rank: int) -> Path:
    return folder / f"rank-{1 - rank:05d}-of-00002" / "manifest.json"


def newest_step(manifest: Path) -> int:
    rows = json.loads(manifest.read_text())["snapshots"] if manifest.exists() else []
    return int(rows[-1]["step"]) if rows else 0


class Attempts:
    """A run in two processes, started as often as it takes; knows what it must hold."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size
        self.attempts: list[int] = []  # the last step that each attempt took over

    def start(self, last: int, **faults: int) -> list[Program]:
        arguments = [str(self.folder), len(self.attempts), self.size, last, faults]
        environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
        return [
            Program(SCRIPT, __file__, json.dumps(arguments), environ={**environ, "RANK": str(rank)})
            for rank in range(2)
        ]

    def check_start(self, processes: list[Program]) -> int:
        """What both took over is the same, whole, and bit for bit what was collected."""
        told = [json.loads(process.stdout.readline()) for process in processes]
        assert told[0] == told[1]
        last = int(told[0]["num_collected"])
        assert told[0]["steps"] == list(range(max(1, last - K + 1), last + 1))
        if last:
            assert told[0]["digest"] == self.expected(last)
        self.attempts.append(last)
        return last

    def expected(self, last: int) -> str:
        """The digest of the unsharded average of the window that ends with step `last`."""
        reference = LatestWeightAverager(k=K, min_snapshots=1)
        for step in range(max(1, last - K + 1), last + 1):
            attempt = max(i for i, before in enumerate(self.attempts) if before < step)
            reference.collect(values(attempt, step, self.size), step=step)
        return digest(reference.average())

    def kill(self, processes: list[Program], first: int) -> None:
        for process in (processes[first], processes[1 - first]):
            process.send_signal(signal.SIGKILL)
            process.wait()
            time.sleep(random.uniform(0.0, 0.05))  # the other gets as far as it can
        for process in processes:
            process.close()

    def check_end(self, last: int) -> None:
        """Left alone, the run goes on to the end."""
        processes = self.start(last)
        self.check_start(processes)
        for process in processes:
            found = json.loads(process.communicate()[0])
            assert process.returncode == 0
            process.close()
            assert found == {
                "steps": list(range(last - K + 1, last + 1)),
                "digest": self.expected(last),
            }


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGKILL")
@pytest.mark.parametrize(
    ("rank", "call"),
    [
        (1, 7),
        *(pytest.param(*p, marks=pytest.mark.matrix) for p in [(0, 7), (0, 1), (1, 2), (0, 3)]),
    ],
)
def test_killed_between_files_and_manifest(rank: int, call: int, tmp_path: Path) -> None:
    """One rank dies exactly there, the other is two snapshots ahead; both go back."""
    run = Attempts(tmp_path, 5)
    processes = run.start(50, **{str(rank): call})
    assert run.check_start(processes) == 0
    assert processes[rank].wait() == -signal.SIGKILL
    # The first manifest is that of the empty window, so this one would have been of call - 1.
    assert newest_step(other_manifest(tmp_path, rank)) == call
    assert newest_step(other_manifest(tmp_path, 1 - rank)) == max(0, call - 2)
    run.kill(processes, rank)
    run.check_end(12)
    assert run.attempts[-1] == max(0, call - 2)


@pytest.mark.matrix
@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGKILL")
@pytest.mark.parametrize("size", [5, 200_001])
def test_killed_at_random_moments(size: int, tmp_path: Path) -> None:
    run = Attempts(tmp_path, size)
    for attempt in range(8):
        processes = run.start(100_000)
        run.check_start(processes)
        time.sleep(random.uniform(0.0, 0.4))
        run.kill(processes, attempt % 2)
    assert run.attempts[-1] > run.attempts[1]
    newest = max(newest_step(other_manifest(tmp_path, rank)) for rank in range(2))
    run.check_end(newest + 100)  # the last attempt may have taken hundreds of steps
