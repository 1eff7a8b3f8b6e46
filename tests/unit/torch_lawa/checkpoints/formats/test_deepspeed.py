"""DeepSpeed's folders: what DeepSpeed itself recorded, what is refused, and that nothing runs."""

import contextlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from support.checkpoints import assert_holds, read_all
from support.deepspeed import MODEL, OPTIM, save_zero, unpack_recorded
from support.models import same_bits
from torch import Tensor

from torch_lawa import LatestWeightAverager, average_checkpoints, inspect_checkpoint
from torch_lawa.checkpoints.formats import deepspeed
from torch_lawa.checkpoints.formats.deepspeed import DeepSpeedCheckpoint
from torch_lawa.checkpoints.storage.paths import LocalPath
from torch_lawa.cli.main import lawa as cli
from torch_lawa.errors import ConfigError, FormatError
from torch_lawa.offline.options import AverageOptions
from torch_lawa.offline.watch.watcher import watch_run

ZERO = ["zero1", "zero2", "zero3", "zero1-bf16-3", "zero2-3", "zero3-3"]
UNIVERSAL = ["zero2/universal", "zero3-3/universal"]
STEPS = (1, 2, 3)
State = dict[str, Tensor]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_recorded(tmp_path_factory.mktemp("deepspeed"))


def expected(recorded: Path, run: str, step: int) -> State:
    """What DeepSpeed's zero_to_fp32.py wrote."""
    path = recorded / run.split("/")[0] / "expected" / f"global_step{step}.pt"
    found: State = torch.load(path, weights_only=True)
    return found


def mean(states: list[State]) -> State:
    averager = LatestWeightAverager(k=len(states))
    for state in states:
        averager.collect(state)
    # As everywhere, integers and running statistics come from the newest.
    newest = {n: t for n, t in states[-1].items() if n.endswith(("running_mean", "num_batches"))}
    return {**averager.average(), **newest}


@pytest.mark.parametrize("run", [*ZERO, *UNIVERSAL])
def test_the_weights_are_those_of_zero_to_fp32(recorded: Path, run: str) -> None:
    for step in STEPS:
        state = expected(recorded, run, step)
        with DeepSpeedCheckpoint(LocalPath(recorded / run / f"global_step{step}")) as found:
            assert found.progress.step == step
            assert found.aliases == {"head.weight": "embedding.weight"}
            if found.notes:  # ZeRO-1: its tool loses what is not trained
                saved = torch.load(
                    recorded / run / f"global_step{step}" / MODEL, weights_only=False
                )
                rest = {"empty", "frozen.bias", "frozen.weight"}
                state |= {name: saved["module"][name].float() for name in rest}
            assert_holds(found, state)


@pytest.mark.parametrize("run", [*ZERO, *UNIVERSAL])
def test_the_average_is_that_of_the_converted_checkpoints(
    recorded: Path, run: str, tmp_path: Path
) -> None:
    average_checkpoints(recorded / run, tmp_path / "mean.safetensors", last=3)
    made = load_file(tmp_path / "mean.safetensors")
    wanted = mean([expected(recorded, run, step) for step in STEPS])
    assert wanted.keys() - made.keys() == {"head.weight"}
    for name, tensor in made.items():
        if name in wanted:
            assert same_bits(tensor, wanted[name]), name
    extra = {"empty", "frozen.bias", "frozen.weight"} if run.startswith("zero1") else set()
    assert made.keys() - wanted.keys() == extra


def lawa(*arguments: object) -> str:
    result = CliRunner().invoke(cli, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize(
    ("name", "title"), [("zero3", "ZeRO-3, 2 ranks"), ("zero2/universal", "universal checkpoint")]
)
def test_average_sweep_watch_and_inspect_find_the_run(
    recorded: Path, name: str, title: str, tmp_path: Path
) -> None:
    run = recorded / name
    wanted = mean([expected(recorded, name, step) for step in (2, 3)])["middle.weight"]
    lawa("average", run, "--last", 2, "-o", tmp_path / "mean.pt")
    made = torch.load(tmp_path / "mean.pt", weights_only=True)
    assert same_bits(made["middle.weight"], wanted)
    assert made["head.weight"].data_ptr() == made["embedding.weight"].data_ptr()
    lawa("sweep", run, "--k", 2, "-o", tmp_path / "sweep")
    (swept,) = (tmp_path / "sweep").glob("*step*3*k*2*")
    watch_run(str(run), str(tmp_path / "watched.safetensors"), k=2, once=True, settle=0)
    for path in (swept, tmp_path / "watched.safetensors"):
        weights = path if path.is_file() else next(path.glob("*.safetensors"))
        assert same_bits(load_file(weights)["middle.weight"], wanted)
    shown = json.loads(lawa("inspect", run, "--json"))
    assert [c["step"] for c in shown["checkpoints"]] == [1, 2, 3]
    assert title in lawa("inspect", run / "global_step3")
    assert "ZeRO-3, 2 ranks" in lawa("inspect", recorded / "zero3" / "latest")


def test_a_folder_for_from_pretrained(recorded: Path, tmp_path: Path) -> None:
    """With the config of the Trainer's folder around it, and without DeepSpeed's scripts."""
    for step in STEPS:
        trainer = tmp_path / "run" / f"checkpoint-{step}"
        tag = f"global_step{step}"
        shutil.copytree(recorded / "zero2" / tag, trainer / tag)
        (trainer / "config.json").write_text(json.dumps({"step": step}))
        (trainer / "zero_to_fp32.py").touch()
    average_checkpoints(tmp_path / "run", tmp_path / "mean", last=2)
    assert {p.name for p in (tmp_path / "mean").iterdir()} == {"config.json", "model.safetensors"}
    assert json.loads((tmp_path / "mean" / "config.json").read_text()) == {"step": 3}
    options = AverageOptions(dtype="bfloat16", max_shard_size=300)
    average_checkpoints(tmp_path / "run", tmp_path / "shards", last=2, options=options)
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 1


def test_few_files_of_a_universal_checkpoint_are_open(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepspeed, "_MAX_OPEN", 1)
    with DeepSpeedCheckpoint(LocalPath(recorded / "zero2/universal/global_step2")) as found:
        assert_holds(found, expected(recorded, "zero2", 2))
    shown = inspect_checkpoint(recorded / "zero2/universal/global_step2")
    assert f"zero{os.sep}middle.bias{os.sep}fp32.pt" in shown.files


def test_a_file_of_any_rank_that_is_missing_is_named(recorded: Path, tmp_path: Path) -> None:
    for run in ("zero1", "zero2-3", "zero3-3", *UNIVERSAL):
        source = recorded / run / "global_step1"
        needed = [p.relative_to(source) for p in source.rglob("*.pt") if _is_needed(p)]
        assert len(needed) > 2
        for file in needed:
            folder = tmp_path / "run" / "global_step1"
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(source, folder)
            (folder / file).unlink()
            with pytest.raises(FormatError) as error:
                DeepSpeedCheckpoint(LocalPath(folder))
            assert str(error.value).startswith(f"{folder / file}: does not exist")


def _is_needed(path: Path) -> bool:
    trained = ("embedding.weight", "middle.weight", "middle.bias", "scale")
    return path.name.endswith("_states.pt") or (
        path.name == "fp32.pt" and path.parent.name in trained
    )


def test_files_of_another_checkpoint_are_named(recorded: Path, tmp_path: Path) -> None:
    folder = tmp_path / "global_step1"
    shutil.copytree(recorded / "zero2-3" / "global_step1", folder)
    shutil.copy(folder / f"zero_pp_rank_2_{OPTIM}", folder / f"zero_pp_rank_3_{OPTIM}")
    with pytest.raises(FormatError, match=r"zero_pp_rank_3_.*from 3 ranks.*Remove"):
        DeepSpeedCheckpoint(LocalPath(folder))
    (folder / f"zero_pp_rank_3_{OPTIM}").rename(folder / f"bf16_zero_pp_rank_2_{OPTIM}")
    with pytest.raises(FormatError, match=r"bf16_zero_pp_rank_2|zero_pp_rank_2.*another"):
        DeepSpeedCheckpoint(LocalPath(folder))
    (folder / f"bf16_zero_pp_rank_2_{OPTIM}").rename(folder / f"zero_pp_rank_1_{MODEL}")
    with pytest.raises(FormatError, match=rf"{MODEL}: there is also zero_pp_rank_1_{MODEL}"):
        DeepSpeedCheckpoint(LocalPath(folder))
    (folder / f"zero_pp_rank_1_{MODEL}").unlink()
    # Rank 2 of a run with other parameters.
    save_zero(tmp_path / "other", [{"w": torch.rand(9)}], stage=2, ranks=3)
    shutil.copy(tmp_path / "other" / f"zero_pp_rank_2_{OPTIM}", folder)
    with pytest.raises(FormatError, match=r"zero_pp_rank_2_.*do not fit"):
        DeepSpeedCheckpoint(LocalPath(folder))


class Harmful:
    """Creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_unknown_classes_are_skipped_and_never_executed(tmp_path: Path, stage: int) -> None:
    victim = tmp_path / "executed"
    group = {"w": torch.rand(3, 5), "v": torch.rand(7)}
    folder = tmp_path / "global_step7"
    save_zero(
        folder, [group], stage=stage, ranks=2, step=7,
        trainer=Harmful(victim), nested={"below": [Fraction(1, 3), {"a": Harmful(victim)}]},
        buffers={"b": torch.ones(2)}, optimizer_state={"param_groups": [Harmful(victim)]},
    )  # fmt: skip
    for file in folder.iterdir():  # what PyTorch would do
        with contextlib.suppress(FileExistsError):
            torch.load(file, weights_only=False)
        victim.rmdir()
    with DeepSpeedCheckpoint(LocalPath(folder)) as found:
        assert_holds(found, {**group, "b": torch.ones(2)})
        assert found.progress.step == 7
    assert not victim.exists()


def test_objects_in_place_of_the_weights_are_refused(tmp_path: Path) -> None:
    victim = tmp_path / "executed"
    for stage, key in ((2, "single_partition_of_fp32_groups"), (3, "fp32_flat_groups")):
        folder = tmp_path / f"global_step{stage}"
        save_zero(folder, [{"w": torch.rand(4)}], stage=stage, ranks=1)
        states = {"zero_stage": stage, "partition_count": 1}
        for value in (Harmful(victim), [Harmful(victim)], None, [None], [[torch.rand(4)]]):
            torch.save(
                {"optimizer_state_dict": {**states, key: value}}, folder / f"zero_pp_rank_0_{OPTIM}"
            )
            with pytest.raises(FormatError, match=f"zero_pp_rank_0_{OPTIM}"):
                DeepSpeedCheckpoint(LocalPath(folder))
    assert not victim.exists()


def test_weights_without_zero_are_those_of_the_module(tmp_path: Path) -> None:
    state = {"w": torch.rand(3).bfloat16(), "n": torch.tensor(3)}
    folder = tmp_path / "global_step9"
    folder.mkdir()
    entries = {"module": state, "param_shapes": None, "buffer_names": [], "global_steps": 9}
    torch.save(entries, folder / MODEL)
    with DeepSpeedCheckpoint(LocalPath(folder)) as found:
        assert_holds(found, state)
        assert "without ZeRO" in found.notes[0]


REFUSED: dict[str, tuple[str, str]] = {
    "tensor parallelism": (f"zero_pp_rank_0_{OPTIM.replace('00', '01')}", "tensor or pipeline"),
    "pipeline parallelism": ("layer_03-model_00-model_states.pt", "tensor or pipeline"),
    "a mixture of experts": (f"layer_0_expert_1_{MODEL}", "mixture of experts"),
    "its optimizer": (f"expp_rank_1_{OPTIM}", "mixture of experts"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_other_parallelism_is_refused(tmp_path: Path, what: str) -> None:
    name, message = REFUSED[what]
    save_zero(tmp_path / "a", [{"w": torch.rand(3)}], stage=2, ranks=1)
    (tmp_path / "a" / name).touch()
    with pytest.raises(FormatError, match=rf"{name}: .*{message}.*state dict"):
        DeepSpeedCheckpoint(LocalPath(tmp_path / "a"))


def test_experts_of_autoep_and_a_key_are_refused(tmp_path: Path) -> None:
    group = {"w": torch.rand(3)}
    save_zero(tmp_path / "a", [group], stage=2, ranks=1, ds_autoep_layers=[{"num_experts": 4}])
    with pytest.raises(FormatError, match="AutoEP"):
        DeepSpeedCheckpoint(LocalPath(tmp_path / "a"))
    save_zero(tmp_path / "b", [group], stage=2, ranks=1)
    with pytest.raises(ConfigError, match=r"--key module.*Leave it out"):
        DeepSpeedCheckpoint(LocalPath(tmp_path / "b"), key="module")


DAMAGED: dict[str, tuple[str, Any]] = {
    "no shapes": ("param_shapes", {"w": (3,)}),
    "a negative size": ("param_shapes", [{"w": (-3,)}]),
    "too many values": ("param_shapes", [{"w": (3000,)}]),
    "fewer values": ("param_shapes", [{"w": (1,)}]),
    "another number of groups": ("param_shapes", [{"w": (5,)}, {"v": (5,)}]),
    "a name that is none": ("param_shapes", [{7: (5,)}]),
    "no module": ("module", [1]),
    "no list of buffers": ("buffer_names", "w"),
    "frozen, without values": ("frozen_param_shapes", {"f": (2,)}),
    "tied, not by name": ("shared_params", ["w"]),
}


@pytest.mark.parametrize("what", DAMAGED)
@pytest.mark.parametrize("stage", [2, 3])
def test_damaged_model_states(tmp_path: Path, what: str, stage: int) -> None:
    key, value = DAMAGED[what]
    save_zero(tmp_path / "a", [{"w": torch.rand(5)}], stage=stage, ranks=2)
    file = tmp_path / "a" / (f"zero_pp_rank_0_{MODEL}" if stage == 3 else MODEL)
    found = torch.load(file, weights_only=True)
    torch.save({**found, key: value}, file)
    with pytest.raises(FormatError, match=r"_states\.pt: "):
        DeepSpeedCheckpoint(LocalPath(tmp_path / "a"))


@pytest.mark.parametrize("paddings", [[[0]], [[0, -1]], [0, 0], [[0, 0], [0]], "ab", [[9, 999]]])
def test_damaged_paddings(tmp_path: Path, paddings: object) -> None:
    folder = tmp_path / "a"
    save_zero(folder, [{"w": torch.rand(5), "v": torch.rand(4)}], stage=2, ranks=1)
    file = folder / f"zero_pp_rank_0_{OPTIM}"
    found = torch.load(file, weights_only=True)
    found["optimizer_state_dict"]["param_alignment_paddings"] = paddings
    torch.save(found, file)
    with pytest.raises(FormatError, match=OPTIM):
        DeepSpeedCheckpoint(LocalPath(folder))


def test_values_between_parameters_are_skipped(tmp_path: Path) -> None:
    """Some optimizers need parameters that begin at aligned addresses."""
    folder = tmp_path / "a"
    flat = torch.arange(12.0)
    save_zero(folder, [{"w": flat[:5], "unused": flat[5:8], "v": flat[8:]}], stage=2, ranks=2)
    for rank, file in itertools.product((0, 1), [MODEL, OPTIM]):
        path = folder / (MODEL if file == MODEL else f"zero_pp_rank_{rank}_{OPTIM}")
        found = torch.load(path, weights_only=True)
        if file == MODEL:
            found["param_shapes"] = [{"w": (5,), "v": (4,)}]
        else:
            found["optimizer_state_dict"]["param_alignment_paddings"] = [[3, 0]]
        torch.save(found, path)
    with DeepSpeedCheckpoint(LocalPath(folder)) as checkpoint:
        assert_holds(checkpoint, {"w": flat[:5], "v": flat[8:]})
        together = checkpoint.read_all(["w", "v"]).view(np.float32)
        assert together.tolist() == [*range(5), *range(8, 12)]


def test_a_rank_with_fewer_values_is_refused(tmp_path: Path) -> None:
    """Also if so few are missing that it could be padding."""
    for stage, key in ((2, "single_partition_of_fp32_groups"), (3, "fp32_flat_groups")):
        folder = tmp_path / str(stage)
        save_zero(folder, [{"w": torch.rand(7)}], stage=stage, ranks=2)
        file = folder / f"zero_pp_rank_1_{OPTIM}"
        found = torch.load(file, weights_only=True)
        found["optimizer_state_dict"][key] = [torch.rand(1)]
        torch.save(found, file)
        with pytest.raises(FormatError, match=rf"{OPTIM}: .*values"):
            DeepSpeedCheckpoint(LocalPath(folder))


def test_damaged_parameters_of_a_universal_checkpoint(recorded: Path, tmp_path: Path) -> None:
    folder = tmp_path / "global_step1"
    shutil.copytree(recorded / "zero2/universal/global_step1", folder)
    file = folder / "zero" / "middle.weight" / "fp32.pt"
    for value in (torch.rand(34), {"param": torch.rand(7, 6)}, {"param": [1]}, [1], {}):
        torch.save(value, file)
        with pytest.raises(FormatError, match=re.escape(f"{file}: ")):
            DeepSpeedCheckpoint(LocalPath(folder))
    states = torch.load(folder / MODEL, weights_only=False)
    for name in ("../middle.weight", "..", "a/b"):
        torch.save({**states, "param_shapes": [{name: (5, 7)}]}, folder / MODEL)
        with pytest.raises(FormatError, match=r"not that of a folder"):
            DeepSpeedCheckpoint(LocalPath(folder))


def test_every_truncation_is_refused_by_name(recorded: Path, tmp_path: Path) -> None:
    folder = tmp_path / "global_step1"
    shutil.copytree(recorded / "zero3" / "global_step1", folder)
    for file in folder.iterdir():
        good = file.read_bytes()
        for part in range(0, 20, 3):
            file.write_bytes(good[: len(good) * part // 20])
            with pytest.raises(FormatError, match=rf"{file.name}: "), contextlib.ExitStack() as s:
                read_all(s.enter_context(DeepSpeedCheckpoint(LocalPath(folder))))
        file.write_bytes(good)
