"""Faults of ranks: one that hangs, is at another call, holds a NaN, or is killed."""

import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import on_ranks
from support.sharded import refill
from support.training import run, smoke_plan
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from lawa_lab.recipes.run_folder import RunFolder
from lawa_lab.recipes.task import Worker
from torch_lawa import LatestWeightAverager, OnPlateau, recalibrate_batch_norm
from torch_lawa.checkpoints.storage.atomic import replacing
from torch_lawa.errors import LawaError
from torch_lawa.evaluation import evaluate_side_by_side
from torch_lawa.ranks import barrier

TESTS = Path(__file__).parents[1]
LATE = 1  # the rank that hangs
K = 3


# One that hangs, or is at another call.


def faults(rank: int) -> dict[str, Any]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    exact = not_a_number(rank)
    said = messages(rank)
    dist.barrier()
    dist.destroy_process_group()
    return {"exact": exact, "said": said}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """Of three ranks, started once."""
    return on_ranks(3, faults, join=False)


def messages(rank: int) -> dict[str, str]:
    """What each exchange says when one rank is late, and after that when none is."""
    patient, hurried = barrier._SHARE, 0.015
    barrier._AFTER_FAILURE = 0.9
    other = dist.new_group(timeout=timedelta(seconds=30))
    sharded, averager = fully_shard(nn.Linear(4, 4)), LatestWeightAverager(schedule=OnPlateau())
    normed, loader = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), [torch.ones(4, 2)]
    single = LatestWeightAverager(k=1)
    single.collect(normed)
    averager.step(sharded, loss=1.0)
    worker = Worker(rank=rank, world_size=3)

    def failed() -> None:
        with barrier.explain_missing_ranks():
            raise RuntimeError("Connection closed by peer")  # as gloo does; see below for real ones

    acts: dict[str, Callable[[], Any]] = {
        "step": lambda: averager.step(sharded, loss=1.0),
        "batch norm": lambda: recalibrate_batch_norm(normed, loader, group=dist.group.WORLD),
        "total": lambda: worker.total([1.0], "a total"),
        "different": lambda: acts["batch norm" if rank == LATE else "step"](),
        "failed": failed,
    }
    said = {}
    before = [buffer.clone() for buffer in normed.buffers()]
    for name, act in acts.items():
        barrier._SHARE = patient if name == "different" else hurried
        dist.barrier()
        if rank == LATE and name != "different":
            time.sleep(1.5)
        try:
            act()
        except LawaError as error:
            said[name] = str(error)
        assert all(map(torch.equal, before, normed.buffers()))
    barrier._SHARE = patient
    dist.barrier()
    averager = LatestWeightAverager(schedule=OnPlateau())  # ranks have counted different calls
    for name in ("step", "batch norm", "total"):  # nothing is left of the faults
        acts[name]()
    group = dist.group.WORLD
    evaluate_side_by_side(normed, single, lambda _: {}, loader=loader, group=group)
    keys = dist.distributed_c10d._get_default_store().num_keys()
    for _ in range(20):
        acts["total"]()
    assert dist.distributed_c10d._get_default_store().num_keys() <= keys + 8
    said["timeouts"] = f"{barrier._timeout(dist.group.WORLD)} {barrier._timeout(other)}"
    return said


def test_a_rank_that_hangs_is_named(found: list[dict[str, Any]]) -> None:
    for said in (each["said"] for each in found):
        assert said.pop("timeouts") == "60.0 30.0"
        late = f"rank {LATE} of 3 did not reach "
        locations = {
            "step": "averager.step, call 2 within 0.9 s",
            "batch norm": "recalibrate_batch_norm of 1 layers within 0.9 s",
            "total": "a total within 0.9 s",
            "failed": "the barrier after a collective failed within 0.9 s",
        }
        for name, location in locations.items():
            assert said[name].startswith(f"{late}{location}"), said[name]
        assert "Rank 1 was last at averager.step, call 2 (pid " in said["batch norm"]
        assert (
            "ranks 0, 2 at averager.step, call 2" in said["different"]
        )  # the failed one does not count
        assert "rank 1 at recalibrate_batch_norm of 1 layers" in said["different"]


def test_a_process_that_has_ended_is_known_to_have() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # its entry is still there
    other = {**barrier._this_process(), "pid": ended.pid}
    linux = sys.platform == "linux"
    assert barrier._has_ended(other) == linux
    ended.wait()
    assert barrier._has_ended(other) == linux
    assert not barrier._has_ended({**other, "machine": "another"})
    assert not barrier._has_ended({**other, "machine": None})
    assert not barrier._has_ended(barrier._this_process())


# A NaN in one rank's part.


def not_a_number(rank: int) -> list[bool]:
    """Of each window: whether this rank's part of the mean is exact, read and swapped in."""
    model = fully_shard(nn.Linear(4, 6, bias=False))
    averager = LatestWeightAverager(k=K)
    snapshots, exact = [], []
    for step in range(8):
        part = model.weight.to_local().detach()  # type: ignore[operator, union-attr]
        value = torch.randn(part.shape, generator=torch.Generator().manual_seed(10 * step + rank))
        if (rank, step) == (1, 3):
            value[0, 2] = float("nan")
        part.copy_(value)
        snapshots.append(value.double())
        averager.collect(model)
        if averager.ready:
            mean = (torch.stack(snapshots[-K:]).sum(0) / K).float()
            assert bool(mean.isnan().any()) == (rank == 1 and 3 <= step < 3 + K)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                read = averager.average()["weight"].to_local()  # type: ignore[attr-defined]
                with averager.swapped_into(model):
                    swapped = part.clone()
            same = [torch.equal(t.nan_to_num(9.0), mean.nan_to_num(9.0)) for t in (read, swapped)]
            exact.append(all(same) and torch.equal(part.nan_to_num(9.0), value.nan_to_num(9.0)))
    return exact


def test_a_nan_in_one_part_leaves_the_others_exact(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert each["exact"] == [True] * 6


# One that is killed.


def strike(target: str, call: int, fault: Callable[[], None]) -> None:
    """Let a fault happen at the n-th call of a function."""
    module, _, path = target.partition(":")
    owner = importlib.import_module(module)
    *inside, name = path.split(".")
    for part in inside:
        owner = getattr(owner, part)
    real, calls = getattr(owner, name), itertools.count(1)

    def act(*arguments: Any, **options: Any) -> Any:
        if next(calls) == call:
            fault()
        return real(*arguments, **options)

    setattr(owner, name, act)


def end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stall() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun need not wait for it
    time.sleep(150)


def launched(
    words: list[str], world_size: int = 2, **fault: Any
) -> "subprocess.CompletedProcess[str]":
    """`lawa` under torchrun, by this file; one rank has a fault at the n-th call of a target."""
    fault = {"rank": -1, "target": "", "call": 0, "prepare": "", **fault}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={world_size}", __file__, json.dumps([fault, words])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)


def killed(found: "subprocess.CompletedProcess[str]", rank: int) -> str:
    """What those that were left said; torchrun tells which rank was killed."""
    assert found.returncode != 0
    assert f"exitcode  : {-signal.SIGKILL} " in found.stderr
    root = found.stderr.partition("Root Cause")[2]
    assert f"rank      : {rank} " in root, found.stderr
    return found.stderr


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 1))


def save_in_a_loop(rank: int, folder: str, last: int, fault: tuple[int, str, int] | None) -> None:
    """A user's loop: a checkpoint in a new folder after every step; on from the last whole one."""
    if fault is not None and fault[0] == rank:
        strike(*fault[1:], end)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    model, averager = fully_shard(net()), LatestWeightAverager(k=K, min_snapshots=1)
    averager.bind(model)
    checkpoints = sorted(path.parent for path in Path(folder).glob("*/.metadata"))
    first = 1
    if checkpoints:
        state = {"model": model.state_dict(), "averager": averager, "step": 0}
        dcp.load(state, checkpoint_id=checkpoints[-1])
        model.load_state_dict(state["model"])  # type: ignore[arg-type]
        first = int(state["step"]) + 1  # type: ignore[call-overload]
    for step in range(first, last + 1):
        refill(model, step)
        averager.collect(model, step=step)
        state = {"model": model.state_dict(), "averager": averager, "step": step}
        dcp.save(state, checkpoint_id=Path(folder) / f"step-{step:04d}")
    average = {n: whole(t) for n, t in averager.average().items()}
    found = {"first": first, "steps": averager.snapshot_steps, "average": average}
    torch.save(found, Path(folder) / f"end-{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


WRITE, INDEX = "os:fsync", "torch.distributed.checkpoint.filesystem:FileSystem.rename"


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGKILL")
@pytest.mark.parametrize(
    ("rank", "target", "call", "first"),
    [
        (1, WRITE, 4, 4),  # rank 1 writes one file in each of four saves: three are whole
        *(
            pytest.param(*case, marks=pytest.mark.matrix)
            for case in [
                (0, WRITE, 7, 4),  # rank 0 writes an index, too
                (0, WRITE, 8, 4),
                (0, INDEX, 4, 4),
                (1, "torch_lawa.window:Window.put", 4, 4),  # in `collect`
                (0, "torch.distributed.checkpoint:save", 1, 1),
            ]
        ),
    ],
)
def test_killed_while_a_user_saves(
    rank: int, target: str, call: int, first: int, tmp_path: Path
) -> None:
    # Of both ranks, the other one's error may be seen first.
    with pytest.raises((ProcessExitedException, ProcessRaisedException)):
        on_ranks(2, save_in_a_loop, str(tmp_path), 6, (rank, target, call), join=False)
    assert len(list(tmp_path.glob("*/.metadata"))) == first - 1
    assert not list(tmp_path.glob("end-*"))
    on_ranks(2, save_in_a_loop, str(tmp_path), 6, None, join=False)
    model, snapshots = net(), []
    for step in (4, 5, 6):
        refill(model, step)
        snapshots.append({n: t.double().clone() for n, t in model.named_parameters()})
    for each in range(2):
        found = torch.load(tmp_path / f"end-{each}.pt", weights_only=True)
        assert (found["first"], found["steps"]) == (first, [4, 5, 6])
        for name in snapshots[0]:
            mean = (torch.stack([s[name] for s in snapshots]).sum(0) / K).float()
            assert torch.equal(found["average"][name], mean), name


def train(
    path: Path, parallel: str, *more: str, **fault: Any
) -> "subprocess.CompletedProcess[str]":
    """`lawa train`, a checkpoint after every tenth of 56 steps, and a snapshot after 28 and 56."""
    options = ["--smoke", "--device", "cpu", "--epochs", "2", "--ks", "2", "--parallel", parallel]
    saving = ["--save-trajectory", "--save-minutes", "1e-9", "-o", str(path)]
    return launched(["train", "digits", *options, *saving, *more], **fault)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A run without faults, made once for each way to run in parallel."""
    made: dict[str, Path] = {}

    def path(parallel: str) -> Path:
        if parallel not in made:
            made[parallel] = tmp_path_factory.mktemp(parallel) / "run"
            found = train(made[parallel], parallel)
            assert found.returncode == 0, found.stderr
        return made[parallel]

    return path


def saved_step(run: Path) -> int:
    """Of the checkpoint that the run would go on from."""
    if (run / "checkpoint.pt").exists():
        return int(torch.load(run / "checkpoint.pt", weights_only=True)["step"])
    if not (run / "checkpoint").exists():
        return 0
    state = {"progress": {"step": 0}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.load(state, checkpoint_id=run / "checkpoint", no_dist=True)
    return state["progress"]["step"]


def rows(run: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{n: v for n, v in row.items() if not n.endswith("_seconds")} for row in lines]


def assert_goes_on(run: Path, whole: Path, parallel: str) -> None:
    """Resumed it ends as if nothing had happened: rows, weights, average; nothing else is left."""
    again = train(run, parallel, "--resume")
    assert again.returncode == 0, again.stderr
    assert rows(run) == rows(whole)
    names = sorted(path.relative_to(whole) for path in whole.rglob("*.safetensors"))
    assert len(names) == 3
    for name in names:
        assert (run / name).read_bytes() == (whole / name).read_bytes(), name
    assert sorted(path.name for path in run.iterdir()) == sorted(
        path.name for path in whole.iterdir()
    )


STATE = "lawa_lab.recipes.trainer:Trainer.state_dict"
STEP = "lawa_lab.recipes.trainer:Trainer.train_step"
FAULTS = [
    ("fsdp", 1, STEP, 25, 20),
    ("fsdp", 0, STEP, 25, 20),
    ("fsdp", 1, "torch_lawa.window:Window.put", 1, 20),  # in `collect`
    ("fsdp", 1, WRITE, 3, 20),  # of its part of the third checkpoint
    ("fsdp", 0, INDEX, 3, 20),
    ("fsdp", 0, "lawa_lab.recipes.parallel:publish", 3, 20),
    ("fsdp", 0, "shutil:rmtree", 2, 30),  # of the second checkpoint, when the third is there
    ("fsdp", 1, WRITE, 1, 0),  # of the first
    ("ddp", 1, STEP, 45, 40),
    ("ddp", 0, STEP, 45, 40),
    ("ddp", 1, STEP, 5, 0),
    ("ddp", 0, "torch:save", 4, 30),
    ("ddp", 0, "os:replace", 6, 30),  # of config.json, two checkpoints, a snapshot, two more
    ("ddp", 1, "lawa_lab.recipes.trainer:Trainer.evaluate", 1, 20),
]


@pytest.mark.matrix
@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGKILL")
@pytest.mark.parametrize(("parallel", "rank", "target", "call", "step"), FAULTS)
def test_lawa_train_is_killed_and_goes_on(
    parallel: str,
    rank: int,
    target: str,
    call: int,
    step: int,
    undisturbed: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    said = killed(train(run, parallel, rank=rank, target=target, call=call), rank)
    told = [line for line in said.splitlines() if line.startswith("Error: ")]
    assert any(line.startswith(f"Error: rank {rank} of 2 ended") for line in told), said
    assert all("--resume" in line for line in told)
    assert saved_step(run) == step
    assert_goes_on(run, undisturbed(parallel), parallel)


@pytest.mark.matrix
@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGKILL")
def test_killed_where_folders_cannot_change_places(
    undisturbed: Callable[[str], Path], tmp_path: Path
) -> None:
    """Between two renames no checkpoint has its name; the new one, which is whole, gets it."""
    run = tmp_path / "run"
    # Each save renames its index and its folder; the second also moves the first one aside.
    killed(train(run, "fsdp", rank=0, target="os:rename", call=5, prepare="no exchange"), 0)
    assert saved_step(run) == 0
    assert (run / "checkpoint.partial" / ".metadata").exists()
    assert len(list(run.glob("checkpoint.*.partial/old"))) == 1
    killed(train(run, "fsdp", "--resume", rank=1, target=STEP, call=6), 1)
    assert saved_step(run) == 20
    assert_goes_on(run, undisturbed("fsdp"), "fsdp")


@pytest.mark.matrix
def test_a_damaged_checkpoint_is_told(tmp_path: Path) -> None:
    run = tmp_path / "run"
    killed(train(run, "fsdp", rank=1, target=STEP, call=15), 1)
    [part] = (run / "checkpoint").glob("__1_*")
    part.write_bytes(part.read_bytes()[:100])
    again = train(run, "fsdp", "--resume")
    told = [line for line in again.stderr.splitlines() if line.startswith("Error: ")]
    assert len(told) == 2
    assert all("checkpoint cannot be read (rank " in line for line in told)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("parallel", "target", "call", "location"),
    [
        ("ddp", STEP, 10, "the barrier after a collective failed within 5 s"),
        ("fsdp", STEP, 10, "the barrier after a collective failed within 5 s"),
        (
            "ddp",
            "lawa_lab.recipes.trainer:Trainer.agree",
            10,
            "the agreement to stop or save within 13.5 s",
        ),
        ("fsdp", STATE, 3, "the losses of all ranks within 13.5 s"),
    ],
)
def test_lawa_train_names_a_rank_that_hangs(
    parallel: str, target: str, call: int, location: str, tmp_path: Path
) -> None:
    options = ["--batch-size", "48"]  # for three processes
    found = train(
        tmp_path,
        parallel,
        *options,
        rank=1,
        target=target,
        call=call,
        prepare="stall",
        world_size=3,
    )
    assert found.returncode != 0
    told = [line for line in found.stderr.splitlines() if line.startswith("Error: ")]
    assert len(told) == 2, found.stderr
    for line in told:
        assert line.startswith(f"Error: rank 1 of 3 did not reach {location}"), line


# What is left of a killed run.


def test_a_checkpoint_between_two_names_gets_its_own(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    halves = [
        tmp_path / f"checkpoint.pt.{1:016x}.partial",
        tmp_path / "trajectory" / f"step-00000028-epoch-1.safetensors.{2:016x}.partial",
    ]
    folder.trajectory.mkdir()
    for path in halves:
        path.write_bytes(b"half")
    folder.unfinished.mkdir()
    with replacing(folder.checkpoint) as file:
        folder.recover()  # it has no index, so it is not whole
        file.write(b"whole")
    assert not folder.shards.exists()
    assert not any(path.exists() for path in halves)
    assert folder.checkpoint.read_bytes() == b"whole"
    (folder.unfinished / ".metadata").write_bytes(b"newer")
    aside = tmp_path / f"checkpoint.{3:016x}.partial"
    (aside / "old").mkdir(parents=True)
    (aside / "lock").touch()
    folder.recover()
    assert (folder.shards / ".metadata").read_bytes() == b"newer"
    assert not aside.exists()
    folder.unfinished.mkdir()
    (folder.unfinished / ".metadata").write_bytes(b"newest, or the one before")
    folder.recover()
    assert (folder.shards / ".metadata").read_bytes() == b"newer"


def test_killed_before_its_first_checkpoint_a_run_writes_its_rows_anew(tmp_path: Path) -> None:
    plan = smoke_plan("digits", epochs=2)
    run(plan, tmp_path, save_trajectory=True)
    before = rows(tmp_path)
    (tmp_path / "checkpoint.pt").unlink()
    run(plan, tmp_path, stop_at=30, save_trajectory=True)
    assert [row["step"] for row in rows(tmp_path)] == [28, 28]
    assert [path.name for path in (tmp_path / "trajectory").iterdir()] == [
        "step-00000028-epoch-1.safetensors"
    ]
    run(plan, tmp_path, save_trajectory=True)
    assert rows(tmp_path) == before


def prepare(how: str) -> None:
    """Change what is not a fault of this process."""
    if how == "no exchange":
        atomic = importlib.import_module("torch_lawa.checkpoints.storage.atomic")
        atomic._renameat2 = lambda *_: False
    elif how == "stall":
        importlib.import_module("lawa_lab.recipes.runtime")._TIMEOUT = timedelta(seconds=15)


if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))
    torch.set_num_threads(1)
    fault, words = json.loads(sys.argv[1])
    prepare(fault["prepare"])
    if int(os.environ["RANK"]) == fault["rank"]:
        strike(fault["target"], fault["call"], stall if fault["prepare"] == "stall" else end)
    from torch_lawa.cli.main import main

    main(words)
