"""What fits, why not, advice that holds, and the page made from it."""

import dataclasses
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support import scale_tables

from torch_lawa.capacity.estimate import TrainingRun, cost_of
from torch_lawa.capacity.fit import (
    Fit,
    check_fit,
    format_seconds,
    largest_k,
    smallest_nu,
)
from torch_lawa.capacity.machine import Machine


def replace(run: TrainingRun, **change: Any) -> TrainingRun:
    return dataclasses.replace(run, **change)


def kinds(verdict: Fit) -> list[str]:
    return [problem.kind for problem in verdict.problems]


def following(run: TrainingRun, advice: str) -> TrainingRun:
    """`run` changed as a line of advice says."""
    words = advice.removesuffix(" (or more)").split()
    change: dict[str, Any] = {}
    for flag, value in zip(words[::2], words[1::2], strict=True):
        change[flag.removeprefix("--").replace("-", "_")] = int(value) if value.isdigit() else value
    return replace(run, **change)


def test_the_limit_of_gpu_memory_is_where_it_should_be() -> None:
    """5 copies of 4 GB: 4 of training, one on its way or set aside; in 20 GB, to the byte."""
    exact = Machine(gpu_memory_gib=20e9 / 2**30)
    run = TrainingRun(params=8 * 10**9, gpus=8, machine=exact)
    assert check_fit(cost_of(run)).fits
    assert cost_of(run).gpu_left == 0
    verdict = check_fit(cost_of(replace(run, params=8 * 10**9 + 8)))
    assert kinds(verdict) == ["gpu"]
    assert "20 GB per GPU, which has 20 GB" in verdict.problems[0].text


def test_the_limit_of_host_memory_counts_what_average_returns() -> None:
    """7 copies of 32 GB a node; three quarters of 299 GB are 224.25."""
    room = {"host_ram_gib": 299e9 / 2**30}
    assert check_fit(cost_of(TrainingRun(params=8 * 10**9, gpus=8, machine=Machine(**room)))).fits
    less = Machine(**room, host_share=0.74)
    verdict = check_fit(cost_of(TrainingRun(params=8 * 10**9, gpus=8, machine=less)))
    assert kinds(verdict) == ["host"]
    assert verdict.advice[:3] == ("--storage-dtype bfloat16", "--store disk", "--store device")
    assert "--k 5" in verdict.advice


def test_a_run_that_does_not_fit_by_itself_is_not_the_fault_of_the_window() -> None:
    verdict = check_fit(cost_of(TrainingRun(params=70 * 10**9, gpus=8, k=100)))
    assert kinds(verdict) == ["run"]
    assert "without averaging" in verdict.problems[0].text
    assert "140 GB per GPU, which has 85.9 GB" in verdict.problems[0].text
    assert verdict.advice == ("--gpus 512",)  # 256 hold the run, but not 101 x 8.75 GB of RAM


def test_too_little_time_between_snapshots() -> None:
    run = TrainingRun(params=70 * 10**9, gpus=64, store="disk", nu=1, step_seconds=2.0)
    verdict = check_fit(cost_of(run))
    assert kinds(verdict) == ["time"]
    assert "takes 7.08 s" in verdict.problems[0].text
    assert "training would wait 5.08 s" in verdict.problems[0].text
    # bfloat16 alone still takes 3.54 s; k has nothing to do with it.
    assert verdict.advice == ("--store host", "--store device", "--nu 4 (or more)", "--gpus 256")


def test_under_ddp_more_gpus_are_no_advice() -> None:
    verdict = check_fit(cost_of(TrainingRun(params=7 * 10**9, gpus=8, sharding="ddp")))
    assert kinds(verdict) == ["run"]
    assert verdict.advice == ("--sharding fsdp",)


def test_two_changes_where_one_does_not_do() -> None:
    run = TrainingRun(params=70 * 10**9, gpus=32, k=12, store="host", nu=1, step_seconds=9.0)
    verdict = check_fit(cost_of(replace(run, machine=Machine(host_ram_gib=200))))
    assert kinds(verdict) == ["host"]
    assert verdict.advice[0] == "--storage-dtype bfloat16 --store disk"


def test_a_window_of_one_is_no_advice() -> None:
    """32 GB a node and snapshot; 80 GB hold one, and the result of average(), but not two."""
    run = TrainingRun(
        params=8 * 10**9, gpus=8, machine=Machine(host_ram_gib=80e9 / 2**30, host_share=1)
    )
    assert largest_k(run) == 1
    assert not [advice for advice in check_fit(cost_of(run)).advice if "--k" in advice]


def test_no_advice_where_nothing_helps() -> None:
    run = TrainingRun(params=10**12, gpus=8, machine=Machine(gpu_memory_gib=1e-6))
    assert check_fit(cost_of(run)).advice == ()


@given(
    st.builds(
        lambda nodes, ram, **rest: TrainingRun(
            gpus=8 * nodes, machine=Machine(host_ram_gib=ram), **rest
        ),
        params=st.integers(10**9, 10**12),
        nodes=st.integers(1, 256),
        ram=st.sampled_from([64, 256, 1024]),
        k=st.integers(1, 64),
        dtype=st.sampled_from(["float32", "bfloat16"]),
        storage_dtype=st.sampled_from([None, "bfloat16"]),
        store=st.sampled_from(["host", "device", "disk"]),
        sharding=st.sampled_from(["fsdp", "ddp"]),
        nu=st.none() | st.integers(1, 10),
        step_seconds=st.none() | st.floats(0.1, 20),
    )
)
def test_all_advice_helps(run: TrainingRun) -> None:
    verdict = check_fit(cost_of(run))
    if verdict.fits:
        assert verdict.advice == ()
    for advice in verdict.advice:
        assert not check_fit(cost_of(following(run, advice))).problems, advice


def test_seconds_are_short_to_read() -> None:
    shown = [format_seconds(s) for s in (0, 5e-5, 0.00123, 0.25, 1, 100, 120, 7200)]
    assert shown == ["0 ms", "< 0.1 ms", "1.2 ms", "250 ms", "1 s", "100 s", "2 min", "2 h"]


def test_the_page_has_the_tables_of_the_calculator() -> None:
    """To write them anew: python tests/support/scale_tables.py."""
    text = scale_tables.PAGE.read_text()
    assert scale_tables.filled(text) == text
    assert sum(line.startswith("| --- ") for line in text.splitlines()) == len(scale_tables.TABLES)


def test_the_fewest_steps_and_the_longest_window() -> None:
    run = TrainingRun(params=70 * 10**9, gpus=64, store="disk", step_seconds=2.0)
    assert smallest_nu(run) == 4  # 7.08 s
    assert smallest_nu(replace(run, step_seconds=None)) is None
    assert check_fit(cost_of(replace(run, nu=4))).fits
    assert not check_fit(cost_of(replace(run, nu=3))).fits
    host = TrainingRun(params=70 * 10**9, gpus=64)
    # 35 GB a node and snapshot, one of them for the result: 23 in 824.6 GB.
    assert largest_k(host) == 22
    assert check_fit(cost_of(replace(host, k=22))).fits
    assert not check_fit(cost_of(replace(host, k=23))).fits
    assert largest_k(TrainingRun(params=70 * 10**9, gpus=8)) is None
