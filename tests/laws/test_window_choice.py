"""A resumed run chooses what an uninterrupted one chooses, and serves the same bits."""

import io

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torch_lawa import LatestWeightAverager, WindowChooser, WindowSearch

values = st.floats(allow_nan=True, allow_infinity=True, width=32)


@settings(max_examples=60)
@given(
    rows=st.lists(st.lists(values, min_size=4, max_size=4), min_size=1, max_size=12),
    mode=st.sampled_from(["min", "max"]),
    margin=st.sampled_from([0.0, 0.01, 0.5]),
)
def test_the_choice_is_never_worse_than_raw_nor_far_from_the_best(
    rows: list[list[float]], mode: str, margin: float
) -> None:
    search = WindowSearch(mode=mode, margin=margin)  # type: ignore[arg-type]
    sign = 1.0 if mode == "min" else -1.0
    for row in rows:
        measured = dict(zip((0, 1, 4, 8), row, strict=True))
        finite = {k: sign * v for k, v in measured.items() if abs(v) < float("inf")}
        chosen = search.decide(measured)
        if not finite:
            assert chosen == 0
            continue
        best = min(finite.values())
        raw = finite.get(0)
        assert finite[chosen] - best <= (0.0 if raw is None else margin * (raw - best))
        assert raw is None or finite[chosen] <= raw


@settings(max_examples=20)
@given(
    k=st.integers(1, 9),
    full_every=st.integers(1, 4),
    steps=st.integers(2, 14),
    data=st.data(),
    seed=st.integers(0, 2**31),
)
def test_resumed_equals_uninterrupted(
    k: int, full_every: int, steps: int, data: st.DataObject, seed: int
) -> None:
    killed_at = data.draw(st.integers(1, steps))

    def evaluate(model: nn.Module) -> float:
        return float(next(model.parameters()).square().sum())

    def make() -> tuple[LatestWeightAverager, WindowChooser]:
        averager = LatestWeightAverager(k=k)
        search = WindowSearch(full_every=full_every, margin=0.3)
        return averager, WindowChooser(averager, evaluate, search)

    def run(interrupted: bool) -> list[tuple[int, list[float]]]:
        generator = torch.Generator().manual_seed(seed)
        model, (averager, chooser), trace = nn.Linear(3, 1, bias=False), make(), []
        for step in range(1, steps + 1):
            model.weight.data.copy_(torch.randn(1, 3, generator=generator))
            averager.collect(model)
            choice = chooser.choose(model)
            if interrupted and step == killed_at:
                file = io.BytesIO()
                torch.save([averager.state_dict(), chooser.state_dict()], file)
                file.seek(0)
                averager, chooser = make()
                for part, state in zip((averager, chooser), torch.load(file), strict=True):
                    part.load_state_dict(state)
            with chooser.swapped_into(model):
                trace.append((choice.k, model.weight.flatten().tolist()))
            assert chooser.k == choice.k
        return trace

    assert run(True) == run(False)
