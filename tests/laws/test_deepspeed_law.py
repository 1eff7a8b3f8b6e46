"""ZeRO checkpoints of any shapes, ranks and stages: the offline average is the online one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from support.deepspeed import save_zero
from support.models import same_bits
from torch import Tensor

from torch_lawa import LatestWeightAverager
from torch_lawa.offline.average import average_checkpoints

SHAPES = st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=3), min_size=1, max_size=4)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    groups=st.lists(SHAPES, min_size=1, max_size=3),
    frozen=st.lists(st.lists(st.integers(0, 9), max_size=2), max_size=2),
    stage=st.integers(1, 3),
    ranks=st.integers(1, 5),
    k=st.integers(1, 3),
    threads=st.integers(1, 2),
)
def test_any_shapes_ranks_and_stages(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    groups: list[list[list[int]]],
    frozen: list[list[int]],
    stage: int,
    ranks: int,
    k: int,
    threads: int,
) -> None:
    folder = tmp_path_factory.mktemp("law")
    generator = torch.Generator().manual_seed(seed)

    def draw(shapes: list[list[int]], name: str) -> dict[str, Tensor]:
        return {f"{name}.{i}": torch.randn(s, generator=generator) for i, s in enumerate(shapes)}

    averager = LatestWeightAverager(k=k)
    for step in range(k):
        trained = [draw(shapes, f"group{i}") for i, shapes in enumerate(groups)]
        others = {"buffers": draw([[3]], "buffer"), "frozen": draw(frozen, "frozen")}
        save_zero(
            folder / "run" / f"global_step{step}", trained, stage=stage, ranks=ranks,
            tied={"tied": "group0.0"}, **others,
        )  # fmt: skip
        state = {n: t for part in (*trained, *others.values()) for n, t in part.items()}
        averager.collect(state)
    average_checkpoints(folder / "run", folder / "mean.safetensors", last=k, threads=threads)
    made, expected = load_file(folder / "mean.safetensors"), averager.average()
    assert set(made) == set(expected)
    for name, tensor in expected.items():
        assert same_bits(made[name], tensor), name
