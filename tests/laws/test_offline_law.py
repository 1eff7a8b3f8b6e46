"""The offline average equals the online averager's, bit for bit, whatever the format.

One battery over every format: the same training, collected online and saved, then averaged from
the files.
"""

import json
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.deepspeed import save_zero
from support.megatron import write_torch_dist
from support.models import same_bits
from torch import Tensor, nn

from torch_lawa import Exponential, LatestWeightAverager, Recent, Uniform
from torch_lawa.coefficients import Annealing
from torch_lawa.offline.average import average_checkpoints, run_average
from torch_lawa.offline.options import AverageOptions
from torch_lawa.offline.plan import plan_average

State = dict[str, Tensor]
STEPS = [100, 200, 300, 400]


class Net(nn.Module):
    """Ties, integers, scalars, an empty tensor, BatchNorm; every float dtype that trains."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5, dtype=dtype)
        self.middle = nn.Linear(5, 5, dtype=dtype)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 7, bias=False, dtype=dtype)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.zeros((), dtype=dtype))
        self.nothing = nn.Parameter(torch.zeros(0, 3, dtype=dtype))
        self.turned = nn.Parameter(torch.zeros(3, 5, dtype=dtype).t())
        self.register_buffer("mask", torch.zeros(3, dtype=torch.bool))


def shake(model: nn.Module, generator: torch.Generator) -> None:
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.dtype == torch.bool:
                tensor.copy_(torch.randint(0, 2, tensor.shape, generator=generator).bool())
            elif tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
            else:
                tensor.add_(1)


def untied(model: nn.Module) -> State:
    state = {name: t.contiguous() for name, t in model.state_dict().items()}
    del state["head.weight"]
    return state


def widened(model: nn.Module) -> nn.Module:
    """The model in float32."""
    made = Net(torch.float32)
    made.load_state_dict(model.state_dict())
    return made


def save_single(model: nn.Module, run: Path, step: int) -> None:
    save_file(untied(model), run / f"step_{step}.safetensors")


def save_sharded(model: nn.Module, run: Path, step: int) -> None:
    folder = run / f"checkpoint-{step}"
    folder.mkdir()
    state = untied(model)
    names = sorted(state)
    weight_map = {}
    for i, part in enumerate((names[:4], names[4:]), start=1):
        file = f"model-{i:05d}-of-00002.safetensors"
        save_file({name: state[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")


def save_torch(model: nn.Module, run: Path, step: int) -> None:
    torch.save(model.state_dict(), run / f"step_{step}.pt")


def save_lightning(model: nn.Module, run: Path, step: int) -> None:
    state = {f"model.{name}": t for name, t in model.state_dict().items()}
    content = {"state_dict": state, "epoch": step // 100, "global_step": step, "loops": {"a": 1}}
    torch.save(content, run / f"epoch={step // 100}-step={step}.ckpt")


def save_distributed(model: nn.Module, run: Path, step: int) -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = dcp.FileSystemWriter(run / f"step-{step}")
        dcp.save({"model": untied(model)}, storage_writer=writer)


def save_megatron(model: nn.Module, run: Path, step: int) -> None:
    write_torch_dist(run / f"iter_{step:07d}", untied(model), step)


def save_deepspeed(model: nn.Module, run: Path, step: int, *, stage: int) -> None:
    """With float32 weights in the optimizer's state, whatever the model trains in."""
    state = untied(model)
    trained = {name for name, _ in model.named_parameters()}
    groups = [{n: t.float() for n, t in state.items() if n in trained}]
    buffers = {n: t for n, t in state.items() if n not in trained}
    folder = run / f"global_step{step}"
    save_zero(folder, groups, stage=stage, ranks=3, buffers=buffers, step=step)


def save_orbax(model: nn.Module, run: Path, step: int) -> None:
    import orbax.checkpoint as ocp

    # Orbax cannot save an array without values.
    state = {name: as_array(t) for name, t in untied(model).items() if t.numel()}
    with ocp.PyTreeCheckpointer() as writer:
        writer.save(run / str(step), {"params": state, "step": step})


def as_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    import ml_dtypes

    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


FORMATS: dict[str, Callable[[nn.Module, Path, int], None]] = {
    "single": save_single,
    "sharded": save_sharded,
    "torch": save_torch,
    "lightning": save_lightning,
    "distributed": save_distributed,
    "megatron": save_megatron,
    "zero2": partial(save_deepspeed, stage=2),
    "zero3": partial(save_deepspeed, stage=3),
}
if find_spec("orbax"):  # in make test-jax
    FORMATS["orbax"] = save_orbax
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def trained(
    run: Path,
    save: Callable[[nn.Module, Path, int], None],
    dtype: torch.dtype,
    seed: int,
    k: int,
    *,
    widen: bool = False,
) -> tuple[nn.Module, LatestWeightAverager]:
    generator = torch.Generator().manual_seed(seed)
    model, averager = Net(dtype), LatestWeightAverager(k=k)
    for step in STEPS:
        shake(model, generator)
        averager.collect(widened(model) if widen else model)
        save(model, run, step)
    return model, averager


def assert_equal(made: State, expected: State) -> None:
    assert set(made) == set(expected)
    for name, tensor in expected.items():
        assert same_bits(made[name], tensor.contiguous()), name


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("form", list(FORMATS))
def test_every_format_gives_the_online_bits(tmp_path: Path, form: str, dtype: torch.dtype) -> None:
    run = tmp_path / "run"
    run.mkdir()
    # The files of DeepSpeed have float32 weights; what a model trains in does not matter.
    widen = form.startswith("zero")
    _, averager = trained(run, FORMATS[form], dtype, seed=0, k=3, widen=widen)
    plan = plan_average(
        run,
        tmp_path / "mean.safetensors",
        last=3,
        options=AverageOptions(strip_prefix="model." if form == "lightning" else ""),
    )
    run_average(plan)
    expected = averager.average()
    expected.pop("head.weight", None)  # tied: one of the two is written
    if form == "orbax":
        del expected["nothing"]
    assert_equal(load_file(tmp_path / "mean.safetensors"), expected)


@pytest.mark.parametrize(
    "rule", [Uniform(), Exponential(0.4), Recent(0.3), Annealing("1-sqrt"), Annealing("cosine")]
)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("buffers", ["average", "newest"])
def test_every_rule_and_number_of_threads(
    tmp_path: Path, rule: Uniform, threads: int, buffers: Literal["average", "newest"]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    trained(run, save_single, torch.bfloat16, seed=1, k=4)
    averager = LatestWeightAverager(k=4, coefficients=rule, buffers=buffers)
    for step in STEPS:
        averager.collect(load_file(run / f"step_{step}.safetensors"), step=step)
    plan = plan_average(
        run,
        tmp_path / "m.safetensors",
        last=4,
        options=AverageOptions(coefficients=rule, buffers=buffers),
    )
    run_average(plan, threads=threads)
    assert_equal(load_file(tmp_path / "m.safetensors"), averager.average())


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 2**32 - 1),
    shapes=st.lists(st.lists(st.integers(0, 40), max_size=3), min_size=1, max_size=5),
    dtype=st.sampled_from([*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64]),
    k=st.integers(1, 4),
    threads=st.integers(1, 3),
)
def test_any_tensors(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    shapes: list[list[int]],
    dtype: torch.dtype,
    k: int,
    threads: int,
) -> None:
    folder = tmp_path_factory.mktemp("law")
    generator = torch.Generator().manual_seed(seed)
    averager = LatestWeightAverager(k=k)
    for step in range(k):
        state: State = {"anchor": torch.randn(3, generator=generator)}
        for i, shape in enumerate(shapes):
            state[f"t{i}"] = (torch.randn(shape, generator=generator) * 9).to(dtype)
        averager.collect(state)
        save_file(state, folder / f"step_{step}.safetensors")
    average_checkpoints(folder, folder / "m.safetensors", last=k, threads=threads)
    made, expected = load_file(folder / "m.safetensors"), averager.average()
    assert set(made) == set(expected)
    for name, tensor in expected.items():
        assert made[name].shape == tensor.shape
        bits = [t.reshape(-1).view(torch.uint8) for t in (made[name], tensor)]
        assert torch.equal(*bits), name


def test_ties_stay_tied_in_a_torch_file(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    model, averager = trained(run, save_torch, torch.float32, seed=2, k=2)
    average_checkpoints(run, tmp_path / "mean.pt", last=2)
    made = torch.load(tmp_path / "mean.pt", weights_only=True)
    assert made["head.weight"].data_ptr() == made["embedding.weight"].data_ptr()
    assert_equal(made, averager.average())
    model.load_state_dict(made)


def test_a_distributed_folder_in_gives_one_out(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    run = tmp_path / "run"
    run.mkdir()
    model, averager = trained(run, save_distributed, torch.float32, seed=3, k=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        average_checkpoints(run, tmp_path / "mean", last=2)
        state = {"model": {name: torch.zeros_like(t) for name, t in untied(model).items()}}
        dcp.load(state, checkpoint_id=tmp_path / "mean")
    expected = averager.average()
    del expected["head.weight"]
    assert_equal(state["model"], expected)


def test_sharded_in_gives_the_same_shards_out(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    _, averager = trained(run, save_sharded, torch.bfloat16, seed=4, k=2)
    average_checkpoints(run, tmp_path / "mean", last=2)
    index = json.loads((tmp_path / "mean" / "model.safetensors.index.json").read_text())
    newest = json.loads((run / "checkpoint-400" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == newest["weight_map"]
    made: State = {}
    for file in set(index["weight_map"].values()):
        made |= load_file(tmp_path / "mean" / file)
    expected = averager.average()
    del expected["head.weight"]
    assert_equal(made, expected)
    assert (tmp_path / "mean" / "config.json").exists()


@pytest.mark.parametrize(
    ("include", "exclude"),
    [((), ("middle.*", "turned")), (("middle.*", "norm.*"), ()), (("*e*",), ("*.bias", "embed*"))],
)
def test_include_and_exclude_select_the_same_tensors_online_and_offline(
    include: tuple[str, ...], exclude: tuple[str, ...], tmp_path: Path
) -> None:
    """The same bits where both average; the rest is raw online and left out offline."""
    run = tmp_path / "run"
    run.mkdir()
    generator, model = torch.Generator().manual_seed(5), Net(torch.bfloat16)
    averager = LatestWeightAverager(k=3, include=include, exclude=exclude)
    for step in STEPS:
        shake(model, generator)
        averager.collect(model, step=step)
        save_single(model, run, step)
    out = tmp_path / "mean.safetensors"
    options = AverageOptions(include=include, exclude=exclude)
    average_checkpoints(run, out, last=3, options=options)
    made, online, newest = load_file(out), averager.average(), untied(model)
    del online["head.weight"]
    assert 0 < len(made) < len(newest)
    assert_equal(made, {name: online[name] for name in made})
    assert_equal(
        {name: tensor for name, tensor in online.items() if name not in made},
        {name: tensor for name, tensor in newest.items() if name not in made},
    )
    averager.save_pretrained(tmp_path / "exported")
    assert_equal(load_file(tmp_path / "exported" / "model.safetensors"), online)
