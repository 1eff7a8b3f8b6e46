"""The calculator against numbers worked out by hand, and the laws it must keep."""

import dataclasses
import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_lawa.capacity.estimate import Sizes, TrainingRun, cost_of, parse_count
from torch_lawa.capacity.machine import RECORD, Machine, constants
from torch_lawa.errors import ConfigError

RESNET, ROBERTA = 21_328_292, 124_697_433

counts = st.integers(1, 10**12)
nodes = st.integers(1, 512)
runs = st.builds(
    lambda nodes, **rest: TrainingRun(gpus=8 * nodes, **rest),
    params=counts,
    nodes=nodes,
    k=st.integers(1, 64),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    storage_dtype=st.sampled_from([None, "bfloat16", "float16"]),
    store=st.sampled_from(["host", "device", "disk"]),
    sharding=st.sampled_from(["fsdp", "ddp"]),
    nu=st.none() | st.integers(1, 1000),
    step_seconds=st.none() | st.floats(0.01, 100),
)


def replace(run: TrainingRun, **change: Any) -> TrainingRun:
    return dataclasses.replace(run, **change)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("70e9", 70 * 10**9),
        ("70B", 70 * 10**9),
        ("70b", 70 * 10**9),
        ("1.3B", 1_300_000_000),
        ("7_000_000_000", 7 * 10**9),
        (" 125 M ", 125 * 10**6),
        ("1.1T", 1_100_000_000_000),
        ("12", 12),
    ],
)
def test_numbers_of_parameters_as_people_write_them(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "B", "0", "-7B", "nan", "inf", "1.5", "7BB", "70 G", "1e999"])
def test_what_is_no_number_of_parameters(text: str) -> None:
    with pytest.raises(ConfigError, match="write it like 70e9"):
        parse_count(text)


def test_host_memory_by_hand() -> None:
    """70e9 / 512 = 136,718,750 values a GPU, 4 bytes each."""
    cost = cost_of(TrainingRun(params=70 * 10**9, gpus=512, nu=100, step_seconds=4.0))
    assert cost.snapshot == Sizes(546_875_000, 4_375_000_000, 280 * 10**9)
    assert cost.window == Sizes(3_281_250_000, 26_250_000_000, 1_680 * 10**9)
    assert cost.gpu_training == 4 * 546_875_000
    assert (cost.gpu_added, cost.gpu_swapped) == (546_875_000, 0)  # the staging memory is idle then
    assert cost.gpu_left == 80 * 2**30 - 5 * 546_875_000
    assert cost.host == cost.window
    assert cost.host_result == cost.snapshot
    assert cost.host_peak == 30_625_000_000
    assert cost.disk == Sizes(0, 0, 0)
    assert cost.collect_seconds == pytest.approx(0.003)
    assert cost.stream_seconds == pytest.approx(2 * 546.875e6 / 2970e9)
    assert cost.behind_seconds == pytest.approx(546.875e6 / 55e9)  # 9.9 ms
    assert (cost.write_seconds, cost.wait_seconds) == (0, 0)
    assert (cost.lock_seconds, cost.num_locked) == (pytest.approx(0.1640625), 6)
    assert cost.held_share == pytest.approx(0.0033683 / 400.0033683, rel=1e-4)
    assert cost.read_seconds == pytest.approx(0.005 + 0.0596591 + 0.0062145, rel=1e-4)
    assert cost.checkpoint_plain == 840 * 10**9
    assert cost.checkpoint_window == 1_680 * 10**9
    assert cost.checkpoint_seconds == pytest.approx(5.25)


def test_disk_by_hand() -> None:
    """70e9 / 64 = 1,093,750,000 values a GPU; bfloat16 files; 8 GPUs share 5 GB/s."""
    cost = cost_of(
        TrainingRun(
            params=70 * 10**9,
            gpus=64,
            store="disk",
            storage_dtype="bfloat16",
            nu=2,
            step_seconds=1.0,
        )
    )
    assert cost.snapshot.gpu == 2_187_500_000
    assert cost.gpu_added == 2_187_500_000  # stored bytes on their way
    assert cost.gpu_swapped == 2_187_500_000  # to the weights as they are
    assert cost.host.gpu == 2_187_500_000
    assert cost.host_result.gpu == 4_375_000_000
    assert cost.disk.node == 7 * 8 * 2_187_500_000
    assert cost.stream_seconds == pytest.approx(6.5625e9 / 2970e9)
    assert cost.write_seconds == pytest.approx(3.5)
    assert cost.behind_seconds == pytest.approx(3.5 + 2.1875 / 55)
    assert cost.wait_seconds == pytest.approx(1.5 + 2.1875 / 55)
    assert cost.num_locked == 1
    assert cost.read_seconds == pytest.approx(0.005 + 21 + 13.125 / 55 + 6.5625 / 132)


def test_device_by_hand() -> None:
    cost = cost_of(TrainingRun(params=8 * 10**9, gpus=8, k=3, store="device"))
    assert cost.gpu_added == 12 * 10**9
    assert (cost.host.node, cost.host_result.node, cost.behind_seconds) == (0, 0, 0)
    assert (cost.lock_seconds, cost.num_locked) == (0, 0)
    assert cost.read_seconds == pytest.approx(0.005 + 3 / 132)


def test_under_ddp_every_rank_holds_everything_and_one_saves() -> None:
    cost = cost_of(TrainingRun(params=10**9, gpus=16, sharding="ddp"))
    assert cost.window == Sizes(24 * 10**9, 192 * 10**9, 384 * 10**9)
    assert cost.saved_by_sharing == 168 * 10**9
    assert cost.checkpoint_plain == 12 * 10**9
    assert cost.checkpoint_window == 24 * 10**9
    assert cost.checkpoint_seconds == pytest.approx(4.8)
    assert cost_of(TrainingRun(params=10**9, gpus=16)).saved_by_sharing == 0


def test_the_constants_give_back_what_was_measured() -> None:
    """Four swaps at k = 6 within 3 %, and the copy on the GPU of the larger model."""
    record = Path(__file__).parents[4] / RECORD / "raw.jsonl"
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    swaps = [row for row in rows if row["kind"] == "swap"]
    assert len(swaps) == 4
    for row in swaps:
        params = ROBERTA if row["model"] == "RoBERTa-Base" else RESNET
        cost = cost_of(TrainingRun(params=params, gpus=1, gpus_per_node=1, store=row["store"]))
        assert cost.read_seconds == pytest.approx(median(row["seconds"]), rel=0.03)
    copy = next(
        row for row in rows if row.get("act", "").startswith("device") and "RoB" in row["model"]
    )
    cost = cost_of(TrainingRun(params=ROBERTA, gpus=1, gpus_per_node=1))
    assert cost.stream_seconds == pytest.approx(median(copy["stream_s"]), rel=0.01)
    locks = [row["copy_s"] for row in rows if row["kind"] == "pinning"]
    assert [0.5 / median(times) for times in locks] == pytest.approx([55, 55], rel=0.01)


def test_every_constant_has_a_source() -> None:
    known = {c.name: c for c in constants(Machine())}
    assert {c.source for c in known.values() if not c.measured} == {"assumed"}
    assert {name for name, c in known.items() if c.measured} == {
        "pcie_gbs",
        "device_gbs",
        "mean_gvalues",
        "collect_ms",
        "read_ms",
        "lock_s_per_gb",
    }
    by_hand = {c.name: c for c in constants(Machine(pcie_gbs=20))}
    assert (by_hand["pcie_gbs"].source, by_hand["pcie_gbs"].measured) == ("given", False)


@given(runs)
def test_the_window_is_k_snapshots_everywhere(run: TrainingRun) -> None:
    cost = cost_of(run)
    for size in (cost.snapshot, cost.window, cost.host, cost.disk):
        assert size.node == 8 * size.gpu
        assert size.total == run.gpus * size.gpu
    assert cost.window.gpu == run.k * cost.snapshot.gpu
    assert cost.gpu_added == (cost.window.gpu if run.store == "device" else cost.snapshot.gpu)
    if run.sharding == "fsdp":
        # Nothing is lost or kept twice but for the rounding up of shards.
        width = cost.snapshot.gpu // run.values
        assert 0 <= cost.snapshot.total - run.params * width < run.gpus * width


def sizes(run: TrainingRun) -> list[float]:
    cost = cost_of(run)
    return [
        cost.snapshot.gpu,
        cost.window.node,
        cost.gpu_peak,
        cost.host_peak,
        cost.disk.node,
        cost.stream_seconds,
        cost.behind_seconds,
        cost.lock_seconds,
        cost.read_seconds,
    ]


def never_more(less: list[float], more: list[float]) -> bool:
    return all(a <= b for a, b in zip(less, more, strict=True))


@given(runs, st.integers(2, 8))
def test_more_gpus_never_cost_more_a_gpu(run: TrainingRun, times: int) -> None:
    wider = replace(run, gpus=run.gpus * times)
    assert never_more(sizes(wider), sizes(run))
    if run.sharding == "ddp":
        assert sizes(wider) == sizes(run)


@given(runs, st.integers(1, 64))
def test_a_longer_window_never_costs_less_and_collecting_never_more(
    run: TrainingRun, more: int
) -> None:
    longer = replace(run, k=run.k + more)
    assert never_more(sizes(run), sizes(longer))
    assert cost_of(longer).behind_seconds == cost_of(run).behind_seconds
    assert cost_of(longer).stream_seconds == cost_of(run).stream_seconds


@given(runs)
def test_narrower_snapshots_never_cost_more(run: TrainingRun) -> None:
    wide, narrow = replace(run, storage_dtype=None), replace(run, storage_dtype="bfloat16")
    assert never_more(sizes(narrow), sizes(wide))
    if run.dtype == "float32":
        assert 2 * cost_of(narrow).window.gpu == cost_of(wide).window.gpu
    else:
        assert sizes(narrow) == sizes(wide)


@given(runs)
def test_faster_links_never_take_longer(run: TrainingRun) -> None:
    fast = replace(run, machine=Machine(pcie_gbs=110, disk_gbs=10, device_gbs=6000))
    assert never_more(sizes(fast), sizes(run))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 0}, "k=0: give a whole number"),
        ({"params": 0}, "params=0"),
        ({"nu": 0}, "nu=0"),
        ({"gpus": 12}, "gpus=12 is not a multiple of gpus_per_node=8"),
        ({"dtype": "int8"}, "dtype='int8': choose one of 'float32', 'bfloat16', 'float16'"),
        ({"store": "tape"}, "store='tape': choose one of 'host', 'device', 'disk'"),
        ({"sharding": "zero"}, "choose one of 'fsdp', 'ddp'"),
        ({"storage_dtype": "float8"}, "choose one of 'bfloat16', 'float16'"),
        ({"storage_dtype": "float32"}, "as wide as the weights"),
        ({"storage_dtype": "float32", "dtype": "bfloat16"}, "wider than the weights"),
        ({"step_seconds": 0.0}, "step_seconds"),
        ({"step_seconds": float("nan")}, "step_seconds"),
    ],
)
def test_what_cannot_be_planned(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainingRun(**{"params": 10**9, "gpus": 8, **change})


@pytest.mark.parametrize(
    "change",
    [{"disk_gbs": 0}, {"pcie_gbs": float("nan")}, {"host_share": 1.5}, {"state_copies": 1}],
)
def test_what_no_machine_has(change: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(change))}=.*give a"):
        Machine(**change)


def test_costs_that_may_be_nothing() -> None:
    assert Machine(collect_ms=0, read_ms=0, lock_s_per_gb=0).read_ms == 0
