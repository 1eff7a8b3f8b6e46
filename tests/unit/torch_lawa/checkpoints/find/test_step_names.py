"""What names say, and what they do not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_lawa.checkpoints.find.step_names import parse_name, parse_names
from torch_lawa.checkpoints.formats.base import TrainingProgress

At = TrainingProgress
BOTH = At(400, 3)
NAMES = {
    "step500": At(500), "step_500.pt": At(500), "global_step500": At(500),
    "globalstep-500": At(500), "checkpoint-500": At(500), "ckpt_500": At(500),
    "iter_0000500": At(500), "iteration500.pth": At(500), "Step=500": At(500),
    "epoch=3-step=400.ckpt": BOTH, "epoch=3-step=400-v1.ckpt": BOTH,
    "name--val_loss=0.2-step=400-epoch=3": BOTH, "ep3-ba400-rank0.pt": BOTH,
    "epoch_12": At(None, 12), "ep12": At(None, 12),
    "checkpoint_epoch_12.pth": At(None, 12), "checkpoint-12.pth.tar": At(12),
    "ckpt-1-step-500": At(500), "step-500-ckpt-1": At(500), "step-0": At(0),
    "checkpoint_3_400.pt": BOTH, "step 500.pt": At(500), "epoch 3 step 400": BOTH,
    # not guessed
    "step-1k": At(), "step_1_000": At(), "step-1.5": At(), "step=-5": At(),
    "gpt2-350m": At(), "resnet50": At(), "v1.5": At(), "llama-3-8b": At(),
    "deep12": At(), "timestep500x": At(), "checkpoint-500-merged": At(),
    "checkpoint_1_500_2.pt": At(), "my_checkpoint_1_500": At(),
    "step-1-step-2": At(), "checkpoint": At(),
    "model_best.pth.tar": At(), "": At(), ".pt": At(), "..": At(),
    "step" + "9" * 5000: At(),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_the_number_that_a_name_spells_out(name: str) -> None:
    assert parse_name(name) == NAMES[name]


@pytest.mark.parametrize(
    ("names", "steps"),
    [
        (["500.pt", "1000.pt"], [500, 1000]),
        (["500", "best"], [500, None]),
        (["gpt2-500.pt", "gpt2-1000.pt"], [500, 1000]),
        (["model.500.pt", "model.1000.pt", "model.pt"], [500, 1000, None]),
        (["model_0500.safetensors"], [500]),
        (["model_0500.safetensors", "other.safetensors"], [None, None]),
        (["model_1.pt", "ema_2.pt"], [None, None]),
        (["step-5.pt", "top_1.pt", "top_2.pt"], [5, None, None]),
        (["step-5.pt", "6.pt"], [5, None]),
        (["step5.pt", "top.1.pt", "top.2.pt"], [5, None, None]),
        (["step5.pt", "ema_1.pt", "ema_2.pt"], [5, None, None]),
        (["v1.5", "v1.6"], [None, None]),
        (["llama-3-8", "llama-3-9"], [None, None]),
        (["model_seed_1.pt", "model_seed_2.pt"], [None, None]),
        (["resnet50", "resnet101"], [None, None]),
        (["a (1).pt", "a (2).pt"], [None, None]),
    ],
)
def test_bare_numbers_count_where_the_rest_is_the_same(
    names: list[str], steps: list[int | None]
) -> None:
    assert [progress.step for progress in parse_names(names)] == steps


def test_fairseq_counts_epochs_where_there_is_one_number() -> None:
    names = ["checkpoint2.pt", "checkpoint_1_500.pt", "checkpoint_best.pt"]
    assert parse_names(names) == [At(None, 2), At(500, 1), At()]
    assert parse_names(["checkpoint2.pt", "checkpoint_best.pt"]) == [At(2), At()]


def test_a_bare_number_alone_may_be_a_version() -> None:
    assert parse_names(["llama-3.pt"], alone=False) == [At()]
    assert parse_names(["500.pt"], alone=False) == [At(500)]


@given(st.lists(st.text(max_size=40), max_size=4))
def test_no_name_raises(names: list[str]) -> None:
    for progress in (*map(parse_name, names), *parse_names(names)):
        assert all(n is None or n >= 0 for n in (progress.step, progress.epoch))


PREFIX = st.sampled_from(["", "model-", "gpt2_", "resnet50.", "llama-3-8b_", "My run "])
SUFFIX = st.sampled_from(["", ".pt", ".safetensors", ".pth.tar", "-val_loss=0.25.ckpt"])
NUMBER = st.integers(0, 10**18 - 1)


@given(
    prefix=PREFIX, suffix=SUFFIX, number=NUMBER, width=st.integers(0, 12),
    label=st.sampled_from(["step", "steps", "global_step", "iter", "iteration", "ba", "Step"]),
    delimiter=st.sampled_from(["", "_", "-", "=", "."]),
)  # fmt: skip
def test_the_step_written_is_the_step_read(
    prefix: str, label: str, delimiter: str, number: int, width: int, suffix: str
) -> None:
    name = f"{prefix}{label}{delimiter}{number:0{width}}{suffix}"
    assert parse_name(name) == At(step=number)


@given(prefix=PREFIX, suffix=SUFFIX, epoch=NUMBER, step=NUMBER)
def test_both_numbers_are_read(prefix: str, suffix: str, epoch: int, step: int) -> None:
    assert parse_name(f"{prefix}epoch={epoch}-step={step}{suffix}") == At(step, epoch)


@given(
    steps=st.lists(st.integers(0, 10**9), min_size=2, max_size=8, unique=True),
    form=st.sampled_from(["{}.pt", "model_{:06}.safetensors", "checkpoint-{}", "gpt2-{}.pth.tar"]),
)
def test_a_series_of_names_is_read(steps: list[int], form: str) -> None:
    assert parse_names([form.format(n) for n in steps]) == [At(n) for n in steps]
