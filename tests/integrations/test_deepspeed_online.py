"""The averager on DeepSpeed engines, against DeepSpeed's own view of its weights."""

import functools
import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.models import brute_force, same_bits
from torch import Tensor

from torch_lawa import Every, LatestWeightAverager, SpikeRescue, average_checkpoints
from torch_lawa.errors import ConfigError, LayoutError, StateError, SwapError
from torch_lawa.integrations.deepspeed import load_checkpoint, put_average, save_checkpoint
from torch_lawa.integrations.window_files import load_window

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="DeepSpeed is not installed here: make test-deepspeed",
    ),
    pytest.mark.timeout(3600),  # the first start compiles
]
sys.path.insert(0, str(Path(__file__).parents[1] / "recorded"))
from support.deepspeed_engines import (  # noqa: E402
    ENGINES,
    TOKENS,
    masters,
    on_engines,
    to_universal,
    train_step,
    whole,
    working_weights,
)

K, STEPS, SAVED = 3, 6, 4
CASES = [
    ("zero0", 2), ("zero0-bf16", 2), ("zero1", 2), ("zero1-bf16", 3), ("zero2", 2),
    ("zero2-fp32", 3), ("zero2-offload", 2), ("zero3", 2), ("zero3-fp32", 3), ("zero3-offload", 2),
]  # fmt: skip


def averaged_run(rank: int, case: str, folder: str) -> dict[str, Any]:
    """A run that is not averaged, the same averaged and swapped, and both saved."""
    place = Path(folder)
    plain = ENGINES[case]()
    trained, states = [], []
    for step in range(1, STEPS + 1):
        train_step(plain, step)
        trained.append(masters(plain))
        states.append(working_weights(plain))
        plain.save_checkpoint(place / "plain")
    engine = ENGINES[case]()
    averager = LatestWeightAverager(k=K)
    inside: dict[str, Any] = {}
    for step in range(1, STEPS + 1):
        train_step(engine, step)
        averager.step(engine)
        if averager.ready:
            before = masters(engine), working_weights(engine)
            with torch.no_grad(), averager.swapped_into(engine):
                # Twice: what was gathered for the first pass may be gathered again.
                outputs = [engine(TOKENS) for _ in range(2)]
                inside = {"outputs": outputs, "weights": working_weights(engine)}
                inside["masters"] = masters(engine)
            after = masters(engine), working_weights(engine)
            inside["restored"] = before, after
        if step == SAVED:
            save_checkpoint(engine, averager, place / "averaged")
    averager.save_pretrained(place / "exported", engine)
    average = averager.average()
    kinds = {name: type(tensor).__name__ for name, tensor in average.items()}
    found = {
        "trained": trained,
        "states": states,
        "again": masters(engine),
        "average": whole(average),
        "kinds": kinds,
        "inside": inside,
        "steps": averager.snapshot_steps,
        "dtypes": {n: p.dtype for n, p in engine.module.named_parameters()},
    }
    put_average(engine, averager.average())
    return {**found, "put": (masters(engine), working_weights(engine))}


def resumed_run(rank: int, case: str, folder: str) -> dict[str, Any]:
    """Continue from the checkpoint that was saved in the middle."""
    engine, averager = ENGINES[case](seed=1), LatestWeightAverager(k=K)
    path, _ = load_checkpoint(engine, averager, Path(folder) / "averaged")
    assert path is not None
    steps = averager.snapshot_steps
    for step in range(SAVED + 1, STEPS + 1):
        train_step(engine, step)
        averager.step(engine)
    return {"steps": steps, "again": masters(engine), "average": whole(averager.average())}


def all_cases(rank: int, cases: list[str], folder: str) -> list[tuple[Any, Any]]:
    """In one start of the ranks, which takes longer than a case."""
    found = []
    for case in cases:
        place = f"{folder}/{case}"
        found.append((averaged_run(rank, case, place), resumed_run(rank, case, place)))
    return found


@functools.cache
def results(case: str, ranks: int) -> tuple[list[Any], list[Any], Path]:
    """What each rank found in a run, what it found after resuming it, and the run's folder."""
    found, folder = started(ranks)
    mine = [by_case[case] for by_case in found]
    return [first for first, _ in mine], [second for _, second in mine], folder / case


@functools.cache
def started(ranks: int) -> tuple[list[dict[str, Any]], Path]:
    cases = [case for case, count in CASES if count == ranks]
    folder = FOLDER / str(ranks)
    found = on_engines(ranks, all_cases, cases, str(folder))
    return [dict(zip(cases, each, strict=True)) for each in found], folder


@pytest.fixture(scope="module", autouse=True)
def _folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    global FOLDER
    FOLDER = tmp_path_factory.mktemp("engines")


FOLDER = Path()


def expected(found: Any, newest: int = STEPS) -> dict[str, Tensor]:
    """The mean of the masters that DeepSpeed gathered itself; the rest of the newest snapshot."""
    window = found["trained"][newest - K : newest]
    mean = dict(found["states"][newest - 1])
    for name in window[0]:
        values = brute_force([state[name] for state in window])
        mean[name] = torch.from_numpy(values).to(window[0][name].dtype)
    mean["head.weight"] = mean["embedding.weight"]
    return mean


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if not same_bits(a[name], b[name])]


@pytest.mark.parametrize(("case", "ranks"), CASES)
def test_the_average_is_the_mean_of_the_masters(case: str, ranks: int) -> None:
    found, _, folder = results(case, ranks)
    for each in found:
        mean = expected(each)
        assert differing(each["average"], mean) == []
        assert each["steps"] == [4, 5, 6]
        sharded = {name for name, kind in each["kinds"].items() if kind == "FlatShard"}
        assert ("middle.weight" in sharded) == (ENGINES[case].stage > 0)
        assert ("frozen.weight" in sharded) == (ENGINES[case].stage == 3)
    exported = load_file(folder / "exported" / "model.safetensors")
    mean.pop("head.weight")  # tied
    assert differing(exported, mean) == []


@pytest.mark.parametrize(("case", "ranks"), CASES)
def test_inside_a_swap_every_rank_computes_with_the_average(case: str, ranks: int) -> None:
    for each in results(case, ranks)[0]:
        mean = expected(each)
        rounded = {n: t.to(each["dtypes"].get(n, t.dtype)) for n, t in mean.items()}
        rounded["head.weight"] = rounded["embedding.weight"]
        weights = each["inside"]["weights"]
        named = each["dtypes"].keys()
        assert differing({n: weights[n] for n in named}, {n: rounded[n] for n in named}) == []
        inside = each["inside"]["masters"]
        assert differing(inside, {n: mean[n] for n in inside}) == []
        model = ENGINES[case].model()
        if ENGINES[case].bf16:
            for parameter in model.parameters():
                parameter.data = parameter.data.bfloat16()
        model.load_state_dict(rounded)
        with torch.no_grad():
            for output in each["inside"]["outputs"]:
                assert same_bits(output, model(TOKENS))


@pytest.mark.parametrize(("case", "ranks"), CASES)
def test_a_swap_leaves_no_trace(case: str, ranks: int) -> None:
    for each in results(case, ranks)[0]:
        before, after = each["inside"]["restored"]
        assert differing(before[0], after[0]) == []
        assert differing(before[1], after[1]) == []
        assert differing(each["again"], each["trained"][-1]) == []


@pytest.mark.parametrize(("case", "ranks"), [c for c in CASES if ENGINES[c[0]].stage > 0])
def test_the_same_as_averaging_its_checkpoints(case: str, ranks: int, tmp_path: Path) -> None:
    found, _, folder = results(case, ranks)
    average_checkpoints(folder / "plain", tmp_path / "mean.safetensors", last=K)
    offline = load_file(tmp_path / "mean.safetensors")
    online = load_file(folder / "exported" / "model.safetensors")
    # The reader averages buffers, too, except for running statistics, and converts what is not
    # trained to float32, as DeepSpeed's own converter does.
    converted = {n: t.to(offline[n].dtype) for n, t in online.items()}
    assert set(differing(converted, offline)) <= {"wide", "narrow"}
    for name in found[0]["trained"][0].keys() - {"empty"}:
        assert online[name].dtype == offline[name].dtype == torch.float32
    # A window beside the files of a checkpoint does not confuse the reader.
    average_checkpoints(folder / "averaged", tmp_path / "one.safetensors", last=1)
    one = load_file(tmp_path / "one.safetensors")
    assert same_bits(one["middle.bias"], found[0]["trained"][SAVED - 1]["middle.bias"])


# DeepSpeed's converter does not read the checkpoints of its bfloat16 optimizer.
CONVERTED = [c for c in CASES if ENGINES[c[0]].stage > 0 and c[0] != "zero1-bf16"]


@pytest.mark.parametrize(("case", "ranks"), CONVERTED)
def test_the_same_as_converting_its_checkpoints(
    case: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    found, _, folder = results(case, ranks)
    states = [
        get_fp32_state_dict_from_zero_checkpoint(str(folder / "plain"), f"global_step{step}")
        for step in range(STEPS - K + 1, STEPS + 1)
    ]
    for name in found[0]["trained"][0].keys() - {"empty"}:
        mean = torch.from_numpy(brute_force([state[name].detach() for state in states])).float()
        assert same_bits(found[0]["average"][name], mean), name


@pytest.mark.parametrize(("case", "ranks"), CASES)
def test_an_average_can_be_put_in_for_good(case: str, ranks: int) -> None:
    for each in results(case, ranks)[0]:
        mean, (own, working) = expected(each), each["put"]
        assert differing(own, {n: mean[n] for n in own}) == []
        for name, dtype in each["dtypes"].items():
            assert same_bits(working[name], mean[name].to(dtype)), name


@pytest.mark.parametrize(("case", "ranks"), CASES)
def test_resumed_from_a_checkpoint(case: str, ranks: int) -> None:
    found, resumed, _ = results(case, ranks)
    for each, again in zip(found, resumed, strict=True):
        assert again["steps"] == [2, 3, 4]
        assert differing(again["again"], each["trained"][-1]) == []
        assert differing(again["average"], each["average"]) == []


OTHERS = [  # saved by, loaded with
    ("zero2", 2, "zero2", 3), ("zero3", 2, "zero3", 3), ("zero3", 2, "zero1-bf16", 3),
    ("zero3-fp32", 3, "zero3-fp32", 2), ("zero1-bf16", 3, "zero3", 2),
    ("zero2", 2, "zero2", 1),
]  # fmt: skip


def loaded_windows(rank: int, folders: list[tuple[str, str]]) -> list[tuple[Any, Any, Any]]:
    """Windows of checkpoints, on another number of ranks or with another stage."""
    found = []
    for case, folder in folders:
        engine, averager = ENGINES[case](), LatestWeightAverager(k=K)
        path = Path(folder) / "averaged" / f"global_step{SAVED}" / "averager"
        assert load_window(averager, engine, path) is not None
        with averager.swapped_into(engine):
            swapped = masters(engine)
        found.append((averager.snapshot_steps, swapped, whole(averager.average())))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_loaded_on_other_ranks_or_another_stage(ranks: int) -> None:
    saved = [results(case, count) for case, count, _, others in OTHERS if others == ranks]
    cases = [case for _, _, case, others in OTHERS if others == ranks]
    folders = [(case, str(folder)) for case, (_, _, folder) in zip(cases, saved, strict=True)]
    for of_rank in on_engines(ranks, loaded_windows, folders):
        for (steps, swapped, average), (found, _, _) in zip(of_rank, saved, strict=True):
            mean = expected(found[0], SAVED)
            assert steps == [2, 3, 4]
            for name in found[0]["trained"][0].keys() - {"empty"}:
                assert same_bits(average[name], mean[name]), name
                assert same_bits(swapped[name], mean[name]), name
            frozen = "frozen.weight"
            assert torch.equal(average[frozen].float(), mean[frozen].float())


@pytest.mark.parametrize(("case", "ranks"), [("zero2", 2), ("zero3-fp32", 3)])
def test_loaded_into_a_plain_model(case: str, ranks: int) -> None:
    found, _, folder = results(case, ranks)
    model, averager = ENGINES[case].model(), LatestWeightAverager(k=K)
    path = folder / "averaged" / f"global_step{SAVED}" / "averager"
    assert load_window(averager, model, path) is not None
    average, mean = averager.average(), expected(found[0], SAVED)
    for name in found[0]["trained"][0].keys() - {"empty"}:
        assert same_bits(average[name], mean[name]), name


def universal_run(rank: int, case: str, folder: str) -> tuple[list[int], Any, Any]:
    """Continue on another number of ranks from a universal checkpoint."""
    config = ENGINES[case]
    config.more["checkpoint"] = {"load_universal": True}
    engine, averager = config(seed=1), LatestWeightAverager(k=K)
    place, tag = Path(folder), f"global_step{SAVED}"
    load_checkpoint(engine, averager, place / "universal", tag, window=place / "averaged" / tag)
    steps, loaded = averager.snapshot_steps, masters(engine)
    train_step(engine, SAVED + 1)
    averager.step(engine)
    return steps, loaded, whole(averager.average())


@pytest.mark.parametrize("case", ["zero2", "zero3"])
def test_continued_on_other_ranks_from_a_universal_checkpoint(case: str) -> None:
    found, _, folder = results(case, 2)
    tag = f"global_step{SAVED}"
    to_universal(folder / "averaged" / tag, folder / "universal" / tag)
    trained = found[0]["trained"]
    for steps, loaded, average in on_engines(3, universal_run, case, str(folder)):
        assert steps == [2, 3, 4]
        for name in trained[0].keys() - {"empty"}:
            assert same_bits(loaded[name], trained[SAVED - 1][name]), name
        assert average["middle.bias"].isfinite().all()


def killed_run(rank: int, case: str, folder: str) -> None:
    engine, averager = ENGINES[case](), LatestWeightAverager(k=K)
    for step in range(1, STEPS):
        train_step(engine, step)
        averager.step(engine)
        if step == SAVED:
            save_checkpoint(engine, averager, Path(folder) / "averaged")
    with averager.swapped_into(engine):
        with pytest.raises(SwapError, match="save_checkpoint"):
            save_checkpoint(engine, averager, Path(folder) / "averaged")
        torch.distributed.barrier()
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("case", ["zero2", "zero3"])
def test_killed_inside_a_swap(case: str, tmp_path: Path) -> None:
    found = results(case, 2)[0]
    with pytest.raises(Exception, match="SIGKILL"):
        on_engines(2, killed_run, case, str(tmp_path))
    assert (tmp_path / "averaged" / "latest").read_text() == f"global_step{SAVED}"
    for each, again in zip(found, on_engines(2, resumed_run, case, str(tmp_path)), strict=True):
        assert differing(again["again"], each["trained"][-1]) == []
        assert differing(again["average"], each["average"]) == []


def options(rank: int, case: str) -> dict[str, Any]:
    """Patterns, buffers, weights, a narrow store, a schedule: as for any model."""
    engine = ENGINES[case]()
    patterns = LatestWeightAverager(k=2, exclude="*embedding*", buffers="average", frozen="omit")
    narrow = LatestWeightAverager(k=2, storage_dtype=torch.bfloat16, store="device")
    rare = LatestWeightAverager(k=2, schedule=Every(2))
    blended = LatestWeightAverager(k=2, blend=0.5)
    sampled = LatestWeightAverager(k=2, samples=2)
    every = (patterns, narrow, rare, blended, sampled)
    trained, states = [], []
    for step in range(1, 5):
        train_step(engine, step)
        due = [averager.step(engine) for averager in every]
        assert due == [True, True, step % 2 == 0, True, True]
        trained.append(masters(engine))
        states.append(working_weights(engine))
    with blended.swapped_into(engine):
        live = masters(engine)
    with pytest.raises(LayoutError, match=r"pass the engine"):
        patterns.collect(engine.module)
    with pytest.raises(ConfigError, match="step of a DeepSpeedEngine"):
        SpikeRescue(rare)(engine, None, 1.0)
    with pytest.raises(LayoutError, match="full_tensor"):
        _ = rare.average()["scale"] + 1
    with rare.swapped_into(engine):
        with pytest.raises(SwapError, match="collect"):
            patterns.collect(engine)
        with pytest.raises(SwapError, match="swapped_into"), patterns.swapped_into(engine):
            pass
    averages = [whole(averager.average()) for averager in every]
    return {"trained": trained, "states": states, "averages": averages, "live": live}


@pytest.mark.parametrize("case", ["zero2", "zero3"])
def test_options_are_those_of_any_model(case: str) -> None:
    for found in on_engines(2, options, case):
        patterns, narrow, rare, _, sampled = found["averages"]
        states, trained = found["states"], found["trained"]

        def mean(name: str, *steps: int, values: Any = trained) -> Tensor:
            chosen = [values[step - 1][name] for step in steps]
            return torch.from_numpy(brute_force(chosen)).to(chosen[0].dtype)

        assert "frozen.weight" not in patterns
        assert same_bits(patterns["embedding.weight"], trained[-1]["embedding.weight"])
        assert same_bits(patterns["head.weight"], trained[-1]["embedding.weight"])
        assert same_bits(patterns["middle.weight"], mean("middle.weight", 3, 4))
        assert same_bits(patterns["wide"], mean("wide", 3, 4, values=states))
        assert same_bits(patterns["num_batches"], states[-1]["num_batches"])
        rounded = [{n: t.bfloat16() for n, t in state.items()} for state in trained]
        for name in trained[0].keys() - {"empty"}:
            assert same_bits(rare[name], mean(name, 2, 4)), name
            values = brute_force([state[name] for state in rounded[-2:]])
            assert same_bits(narrow[name], torch.from_numpy(values).float()), name
            half = brute_force([mean(name, 3, 4), trained[-1][name]])
            assert torch.allclose(found["live"][name], torch.from_numpy(half).float()), name
            assert torch.allclose(sampled[name], mean(name, 1, 2, 3, 4)), name


def missing_window(rank: int, folder: str) -> list[int]:
    engine, averager = ENGINES["zero2"](), LatestWeightAverager(k=K)
    train_step(engine, 1)
    averager.collect(engine)
    engine.save_checkpoint(folder)
    again = ENGINES["zero2"]()
    with pytest.raises(ConfigError, match="window="):
        load_checkpoint(again, averager, folder, window=folder)
    path, _ = load_checkpoint(again, averager, folder)
    assert path is not None
    with pytest.raises(StateError, match="k=3"):
        save_checkpoint(again, averager, folder, "other")
        load_checkpoint(ENGINES["zero2"](), LatestWeightAverager(k=K + 1), folder, "other")
    assert load_checkpoint(again, averager, f"{folder}/nothing")[0] is None
    return averager.snapshot_steps


def test_a_checkpoint_without_a_window(tmp_path: Path) -> None:
    assert on_engines(2, missing_window, str(tmp_path)) == [[], []]
