"""Saves checkpoints as one of two JAX processes. Arguments: a port, the run's folder, the rank."""

import sys
from pathlib import Path


def main(port: str, run: str, rank: str) -> None:
    """Save steps 1 and 2, with arrays that both processes hold a part of."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, int(rank))
    mesh = Mesh(np.array(jax.devices()), ("x",))
    rows = np.arange(64, dtype=np.float32).reshape(8, 8)

    def shared(whole: np.ndarray, *axes: str | None) -> jax.Array:
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    options = ocp.CheckpointManagerOptions(create=True)
    with ocp.CheckpointManager(Path(run), options=options) as manager:
        for step in (1, 2):
            params = {"rows": shared(step * rows, "x"), "columns": shared(-step * rows, None, "x")}
            manager.save(step, args=ocp.args.StandardSave({"params": params, "step": step}))


if __name__ == "__main__":
    main(*sys.argv[1:])
