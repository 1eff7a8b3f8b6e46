"""Real training programs in JAX (Flax linen, nnx, optax), averaged from their checkpoints."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("orbax.checkpoint", reason="make test-jax has an environment with Orbax")

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from click.testing import CliRunner
from flax import nnx
from flax.training.train_state import TrainState

from torch_lawa import average_checkpoints, sweep_checkpoints
from torch_lawa.cli.main import lawa

KEY = jax.random.key(0)
INPUTS = jax.random.normal(jax.random.key(1), (512, 8))
TARGETS = jnp.sin(INPUTS @ jax.random.normal(jax.random.key(2), (8, 2)))


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.LayerNorm()(nn.Dense(16)(x))
        return nn.Dense(2)(nn.gelu(x))


def new_state() -> TrainState:
    model = MLP()
    params = model.init(KEY, INPUTS[:1])["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(0.01))


def loss_of(params: Any, x: jax.Array = INPUTS, y: jax.Array = TARGETS) -> jax.Array:
    return jnp.mean((MLP().apply({"params": params}, x) - y) ** 2)


@jax.jit
def train_step(state: TrainState, start: jax.Array) -> TrainState:
    batch = [jax.lax.dynamic_slice_in_dim(of, start, 16) for of in (INPUTS, TARGETS)]
    return state.apply_gradients(grads=jax.grad(loss_of)(state.params, *batch))


def train(run: Path, num_steps: int = 160, every: int = 20) -> list[TrainState]:
    """Train and save; the states that were saved."""
    state, saved = new_state(), []
    with ocp.CheckpointManager(run) as manager:
        for step in range(1, num_steps + 1):
            state = train_step(state, 16 * step % 496)
            if step % every == 0:
                manager.save(step, args=ocp.args.StandardSave(state))
                saved.append(state)
    return saved


def same_bits(found: Any, expected: Any) -> bool:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def mean(trees: list[Any]) -> Any:
    def of(*leaves: Any) -> np.ndarray:
        total = sum(np.asarray(leaf, np.float64) for leaf in leaves)
        return np.asarray(total / len(leaves)).astype(np.asarray(leaves[0]).dtype)

    return jax.tree.map(of, *trees)


def test_a_train_state_continues_from_the_average(tmp_path: Path) -> None:
    saved = train(tmp_path / "run")
    arguments = ["average", tmp_path / "run", "--last", 4, "-o", tmp_path / "mean" / "160"]
    result = CliRunner().invoke(lawa, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    assert "not averaged: 'opt_state', 'step'" in result.output
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, new_state())
    with ocp.CheckpointManager(tmp_path / "mean") as manager:
        state = manager.restore(160, args=ocp.args.StandardRestore(abstract))
    assert same_bits(state.params, mean([each.params for each in saved[-4:]]))
    assert same_bits(state.opt_state, saved[-1].opt_state)
    assert train_step(state, 0).step == 161


def test_only_the_params_are_restored_from_the_average(tmp_path: Path) -> None:
    saved = train(tmp_path / "run", 60)
    average_checkpoints(tmp_path / "run", tmp_path / "mean", last=3)
    abstract = {"params": jax.tree.map(ocp.utils.to_shape_dtype_struct, new_state().params)}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        found = reader.restore(
            tmp_path / "mean" / "default",
            args=ocp.args.PyTreeRestore(item=abstract, partial_restore=True),
        )
    assert same_bits(found["params"], mean([each.params for each in saved]))


def test_sweep(tmp_path: Path) -> None:
    saved = train(tmp_path / "run", 80)

    def evaluate(state: dict[str, Any]) -> dict[str, float]:
        tree: dict[str, Any] = {}
        for name, tensor in state.items():
            layer, _, key = name.partition(".")
            tree.setdefault(layer, {})[key] = tensor.numpy()
        return {"loss": float(loss_of(tree))}

    rows = sweep_checkpoints(tmp_path / "run", [2, 4], evaluator=evaluate)
    found = {row["k"]: row["loss"] for row in rows if row["step"] == 80}
    assert found[4] == float(loss_of(mean([each.params for each in saved])))
    assert found.keys() == {2, 4}


def test_nnx(tmp_path: Path) -> None:
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.first = nnx.Linear(8, 16, rngs=rngs)
            self.second = nnx.Linear(16, 2, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.second(nnx.relu(self.first(x)))

    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    states = []
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        for step in range(1, 5):
            gradients = nnx.grad(lambda m: jnp.mean((m(INPUTS) - TARGETS) ** 2))(model)
            optimizer.update(model, gradients)
            states.append(jax.tree.map(np.array, nnx.state(model)))  # the model changes in place
            tree = {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}
            manager.save(step, args=ocp.args.StandardSave(tree))
            manager.wait_until_finished()
    average_checkpoints(tmp_path / "run", tmp_path / "mean" / "4", last=4)
    abstract = {"model": states[0], "optimizer": nnx.state(optimizer)}
    with ocp.CheckpointManager(tmp_path / "mean") as manager:
        found = manager.restore(4, args=ocp.args.StandardRestore(abstract))
    assert same_bits(found["model"], mean(states))
    nnx.update(model, found["model"])
    assert model(INPUTS).shape == TARGETS.shape
