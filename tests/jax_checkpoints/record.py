"""Writes `recorded` again: small checkpoints by Orbax itself. Run it with `make record-jax`.

Two steps of a run as Flax programs save it (OCDBT, zarr), and one checkpoint in files of its own
(zarr3, lists in the tree, a text, several dtypes).
"""

import shutil
from pathlib import Path

RECORDED = Path(__file__).parent.resolve() / "recorded"


def main() -> None:
    """Replace the folder."""
    import jax
    import jax.numpy as jnp
    import optax
    import orbax.checkpoint as ocp
    from flax.training.train_state import TrainState

    shutil.rmtree(RECORDED, ignore_errors=True)
    params = {"dense": {"kernel": jnp.arange(12.0).reshape(4, 3), "bias": jnp.ones(3)}}
    state = TrainState.create(
        apply_fn=lambda params, x: x, params=params, tx=optax.sgd(0.5, momentum=0.9)
    )
    with ocp.CheckpointManager(RECORDED / "run") as manager:
        for step in (10, 20):
            state = state.apply_gradients(grads=jax.tree.map(jnp.ones_like, state.params))
            state = state.replace(step=step)
            manager.save(step, args=ocp.args.StandardSave(state))
    tree = {
        "params": {
            "layers": [jnp.full(2, 0.5, jnp.bfloat16), jnp.full(2, 1.5, jnp.bfloat16)],
            "a.b": jnp.float16(2.5),
            "count": jnp.arange(3),
        },
        "opt_state": [jnp.zeros(2)],
        "note": "text",
    }
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(RECORDED / "files", args=ocp.args.PyTreeSave(tree))


if __name__ == "__main__":
    main()
