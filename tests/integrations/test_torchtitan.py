"""Averaging in torchtitan's own trainer, on CPU ranks (make test-torchtitan)."""

import importlib.util
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import fields
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.guides import GUIDES, blocks
from support.models import round_fraction, same_bits, true_mean
from support.torchtitan import load, losses, train, weights_of
from torch import Tensor

from torch_lawa import average_checkpoints

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("torchtitan") is None,
        reason="torchtitan is not installed here: make test-torchtitan",
    ),
    pytest.mark.timeout(1200),  # each run imports torchtitan on every rank
    pytest.mark.filterwarnings("default"),
]

PIPELINE = ["--parallelism.pipeline_parallel_degree", 2]
PIPELINE += ["--parallelism.pipeline_parallel_schedule", "Interleaved1F1B"]  # two stages per rank
RAW, AVERAGED = "validation_metrics/loss", "validation_metrics/averaged_loss"
State = dict[str, Tensor]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("torchtitan")


@pytest.fixture(scope="module")
def whole(runs: Path) -> Path:
    """Eight steps on two ranks without an interruption; a snapshot and a checkpoint every two."""
    train(runs / "whole", "--training.steps", 8, "--averager.export", "dcp")
    return runs / "whole"


@pytest.fixture(scope="module")
def plain(runs: Path) -> Path:
    """The same with torchtitan alone."""
    train(runs / "plain", "--training.steps", 8, config="plain")
    return runs / "plain"


@pytest.fixture(scope="module")
def pipeline(runs: Path) -> Path:
    train(runs / "pipeline", "--training.steps", 6, "--averager.export", "hf", *PIPELINE)
    return runs / "pipeline"


def mean(states: Sequence[State]) -> State:
    """By exact fractions, rounded once."""

    def one(tensors: list[Tensor]) -> Tensor:
        values: list[Fraction] = true_mean(tensors)
        rounded = [round_fraction(value, tensors[0].dtype) for value in values]
        return torch.tensor(rounded, dtype=tensors[0].dtype).view(tensors[0].shape)

    return {name: one([state[name] for state in states]) for name in states[0]}


def mean_of_checkpoints(run: Path, steps: Sequence[int]) -> State:
    return mean([weights_of(load(run / "checkpoint" / f"step-{step}")) for step in steps])


def assert_same(found: Any, expected: Any, where: str = "") -> None:
    """The same tree of tensors and values, bit for bit."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name, value in expected.items():
            assert_same(found[name], value, f"{where}/{name}")
    elif isinstance(expected, Tensor):
        assert same_bits(found, expected), where
    else:
        assert found == expected, where


def test_the_window_is_that_of_the_checkpoints(whole: Path, tmp_path: Path) -> None:
    """Online, in torchtitan's format, equals exact fractions and `lawa average` offline."""
    expected = mean_of_checkpoints(whole, (2, 4, 6, 8))
    assert_same(load(whole / "averaged" / "step-8"), expected)
    average_checkpoints(whole, tmp_path / "offline", last=4)
    assert_same(weights_of(load(tmp_path / "offline")), expected)
    state = load(whole / "checkpoint" / "step-8")["averager"]
    for age, step in enumerate((8, 6, 4, 2)):
        own = weights_of(load(whole / "checkpoint" / f"step-{step}"))
        slot = state["slots"][str(age)]
        # The window has the parameters: queries, keys and values in one.
        assert sum(tensor.numel() for tensor in slot.values()) == sum(
            map(Tensor.numel, own.values())
        )
        for name in slot.keys() & own.keys():
            assert same_bits(slot[name], own[name])


def test_training_is_not_disturbed(whole: Path, plain: Path) -> None:
    assert len(losses(plain)) == 8
    for name in ("loss_metrics/global_avg_loss", RAW):
        assert losses(whole, name) == losses(plain, name)
    for step in (2, 8):
        ours, theirs = (load(run / "checkpoint" / f"step-{step}") for run in (whole, plain))
        del ours["averager"]
        assert_same(ours, theirs)


def test_validation_sees_the_average(whole: Path, runs: Path) -> None:
    """torchtitan validates a model made of the exported average: the same loss, bit for bit."""
    logged = losses(whole, AVERAGED)
    assert list(logged) == [2, 4, 6, 8]
    raw = losses(whole, RAW)
    assert logged[2] == raw[2]  # one snapshot
    assert logged[8] != raw[8]
    start = ["--checkpoint.initial_load_path", whole / "averaged" / "step-8"]
    train(runs / "from average", *start, "--training.steps", 1, config="still")
    assert losses(runs / "from average", RAW)[1] == logged[8]


def test_a_run_killed_while_saving_continues(whole: Path, runs: Path) -> None:
    """Rank 0 dies in its third save; the restart takes the second and becomes the whole run."""
    run = runs / "killed"
    options = ["--training.steps", 8, "--averager.export", "dcp"]
    train(run, *options, kill_in_save=3)
    assert not (run / "checkpoint" / "step-6" / ".metadata").exists()
    train(run, *options)
    for step in (6, 8):
        ours, theirs = (load(each / "checkpoint" / f"step-{step}") for each in (run, whole))
        assert_same(ours, theirs)
    assert_same(load(run / "averaged" / "step-8"), load(whole / "averaged" / "step-8"))
    assert losses(run, AVERAGED) == losses(whole, AVERAGED)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, []),
        (3, []),
        (2, ["--parallelism.tensor_parallel_degree", 2]),
        (2, PIPELINE),
    ],
    ids=["one rank", "three ranks", "tensor parallel", "pipeline"],
)
def test_other_ranks_continue(whole: Path, runs: Path, ranks: int, options: list[object]) -> None:
    """The window is loaded into another layout: its average and its slots are the same."""
    run = runs / f"on {ranks}{''.join(map(str, options))}"
    shutil.copytree(whole / "checkpoint" / "step-8", run / "checkpoint" / "step-8")
    # The loader's position belongs to the number of ranks, in torchtitan itself. Step 9 is not
    # collected, so that the window saved there is the one that was loaded.
    train(
        run,
        *["--training.steps", 9, "--checkpoint.exclude_from_loading", "dataloader"],
        *["--averager.export", "dcp", *options],
        ranks=ranks,
    )
    assert_same(load(run / "averaged" / "step-9"), load(whole / "averaged" / "step-8"))
    before, after = (load(run / "checkpoint" / f"step-{step}") for step in (8, 9))
    assert_same(after["averager"]["slots"], before["averager"]["slots"])


def test_pipeline_stages_are_one_model(pipeline: Path, runs: Path) -> None:
    """Each rank has two stages; the window is saved, loaded and exported for Hugging Face."""
    expected = mean_of_checkpoints(pipeline, (2, 4, 6))
    file = pipeline / "averaged" / "step-6" / "model-00001-of-00001.safetensors"
    assert_same(hugging_face(load_file(file)), expected)
    run = runs / "pipeline, resumed"
    shutil.copytree(pipeline / "checkpoint" / "step-4", run / "checkpoint" / "step-4")
    train(run, "--training.steps", 6, *PIPELINE)
    ours, theirs = (load(each / "checkpoint" / "step-6") for each in (run, pipeline))
    assert_same(ours["averager"]["slots"], theirs["averager"]["slots"])
    assert_same(weights_of(ours), weights_of(theirs))
    assert {s: v for s, v in losses(pipeline, AVERAGED).items() if s > 4} == losses(run, AVERAGED)


def hugging_face(state: State) -> State:
    """Under torchtitan's names, by its own adapter."""
    from torchtitan.models.llama3 import model_registry

    spec = model_registry("debugmodel")
    model = spec.model
    model.dim = 16
    for layer in model.layers:
        layer.attention.n_heads = 2
    adapter = spec.state_dict_adapter(model, None)
    return adapter.from_hf(dict(state))  # type: ignore[no-any-return]


def test_asynchronous_saving(whole: Path, runs: Path) -> None:
    """Saved in the background, while the next steps are collected and validated."""
    run = runs / "asynchronous"
    train(run, "--training.steps", 8, "--checkpoint.async_mode", "async")
    for step in (2, 4, 6, 8):
        ours, theirs = (load(each / "checkpoint" / f"step-{step}") for each in (run, whole))
        assert_same(ours["averager"], theirs["averager"])
        assert_same(weights_of(ours), weights_of(theirs))


def test_options_and_older_checkpoints(plain: Path, runs: Path) -> None:
    """An averager joins a run that began without one; options are those of the command line."""
    run = runs / "joined"
    shutil.copytree(plain / "checkpoint" / "step-2", run / "checkpoint" / "step-2")
    options = ["--averager.k", 3, "--averager.collect_every", 0, "--averager.horizon", 0.5]
    options += ["--averager.samples", 2, "--averager.start", 0.5, "--averager.metrics", "averaged"]
    options += ["--averager.storage_dtype", "bfloat16", "--averager.store", "device"]
    options += ["--averager.export", "hf", "--checkpoint.exclude_from_loading", "averager"]
    train(run, "--training.steps", 8, *options)
    assert losses(run) == {step: loss for step, loss in losses(plain).items() if step > 2}
    assert losses(run, AVERAGED) == {}
    state = load(run / "checkpoint" / "step-8")["averager"]
    assert '"snapshots": [[0, 6], [1, 8]]' in state["notes"]
    assert {tensor.dtype for tensor in state["slots"]["0"].values()} == {torch.bfloat16}
    # The average alone is validated, once there is one.
    same = [losses(run, RAW)[step] == losses(plain, RAW)[step] for step in (4, 6, 8)]
    assert same == [True, False, False]
    assert (run / "averaged" / "step-8" / "model.safetensors.index.json").exists()


def test_staging_ends_before_weights_are_swapped() -> None:
    """With pinned memory, checkpoints are copied from the weights while training continues."""
    from support.torchtitan_ranks import use_cpu

    use_cpu()
    from torch_lawa import LatestWeightAverager
    from torch_lawa.integrations.torchtitan import AveragedTrainerMixin
    from torch_lawa.selection import ModelParts

    model, seen = torch.nn.Linear(2, 1), []

    class Manager:
        def maybe_wait_for_staging(self) -> None:
            seen.append(model.weight.detach().clone())

    trainer = object.__new__(AveragedTrainerMixin)
    trainer.checkpointer = Manager()
    trainer.averager, trainer._parts = LatestWeightAverager(k=1), ModelParts([model])
    trainer.averager.collect(trainer._parts)
    own = model.weight.data.add_(1).clone()
    with trainer.swapped():
        assert not same_bits(model.weight.data, own)
    assert len(seen) == 1
    assert same_bits(seen[0], own)


def test_the_guide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its configuration is parsed by torchtitan, and its table has every option."""
    from support.torchtitan_ranks import use_cpu

    use_cpu()
    from torchtitan.config import ConfigManager
    from torchtitan.trainer import Trainer

    from torch_lawa.errors import ConfigError
    from torch_lawa.integrations.torchtitan import AveragedTrainer, AveragingOptions, averaged

    module = ModuleType("my_configs")
    exec(blocks("torchtitan.md", "Averaged weights in torchtitan", "python")[0], vars(module))
    monkeypatch.setitem(sys.modules, "my_configs", module)
    (command,) = blocks("torchtitan.md", "Averaged weights in torchtitan", "")
    words = shlex.split(command.replace("\\\n", " "))
    words = words[words.index("--module") :]
    # torchtitan reads boolean options in this form.
    config = ConfigManager().parse_args([*words, "--checkpoint.no-last-save-model-only"])
    assert isinstance(config, AveragedTrainer.Config)
    assert config.averager == AveragingOptions(k=16, samples=4, export="hf")
    assert (config.checkpoint.enable, config.checkpoint.last_save_model_only) == (True, False)
    assert config._owner is AveragedTrainer

    text = (GUIDES / "torchtitan.md").read_text()
    listed = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", text, re.MULTILINE))
    assert list(listed) == [each.name for each in fields(AveragingOptions)]
    for name in ("k", "horizon", "samples", "metrics", "store", "storage_dtype", "export"):
        assert listed[name].strip("`") == str(getattr(AveragingOptions(), name))

    (other,) = blocks("torchtitan.md", "Other trainers", "python")
    names: dict[str, Any] = {"MyTrainer": type("MyTrainer", (Trainer,), {}), "__name__": "guide"}
    exec(other, names)
    made = names["MyAveragedTrainer"]
    assert made.Config().averager == AveragingOptions()
    assert made.Config._owner is made
    with pytest.raises(ConfigError, match="AveragedTrainerMixin"):
        averaged(made.Config())
