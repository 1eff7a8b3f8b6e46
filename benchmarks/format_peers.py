"""Writes checkpoints of each format, averages them as its users do today, and exports results.

    python benchmarks/format_peers.py write FORMAT FOLDER SAFETENSORS...
    python benchmarks/format_peers.py average FORMAT OUTPUT CHECKPOINT...
    python benchmarks/format_peers.py export FORMAT CHECKPOINT SAFETENSORS
    python benchmarks/format_peers.py versions FORMAT

A program of its own because each format is measured in its own environment. `average` prints
`{"engine_seconds": ...}`: the time from after the imports until the output is written.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

State = dict[str, Any]  # tensors, or arrays, by name


class Peer(Protocol):
    """What is done with checkpoints of one format."""

    package: str

    def write(self, folder: Path, sources: list[str]) -> None: ...
    def load(self, checkpoint: Path) -> State: ...
    def save(self, state: State, output: Path, newest: Path) -> None: ...


def accumulate(states: Iterator[State]) -> State:
    """One at a time, added in place in the dtype of the weights, divided at the end."""
    total, count = next(states), 1
    for state in states:
        for name, value in state.items():
            total[name] += value
        count += 1
    for value in total.values():
        value /= count
    return total


class Safetensors:
    """Files of safetensors; its functions are imported here for all the others."""

    package = "safetensors"
    name = "step-{}.safetensors"

    def __init__(self) -> None:
        from safetensors.torch import load_file, save_file

        self.load_file, self.save_file = load_file, save_file

    def write(self, folder: Path, sources: list[str]) -> None:
        folder.mkdir(parents=True)
        for i, source in enumerate(sources):
            self.save(self.load_file(source), folder / self.name.format(i + 1), folder)

    def load(self, checkpoint: Path) -> State:
        found: State = self.load_file(checkpoint)
        return found

    def save(self, state: State, output: Path, newest: Path) -> None:
        self.save_file(state, output)


class Torch(Safetensors):
    """Files of torch.save, with the weights under a key as training scripts save them."""

    package = "torch"
    name = "step-{}.pt"

    def load(self, checkpoint: Path) -> State:
        import torch

        state = torch.load(checkpoint, weights_only=True, mmap=True)["model"]
        return {name: tensor.clone() for name, tensor in state.items()}

    def save(self, state: State, output: Path, newest: Path) -> None:
        import torch

        torch.save({"model": state}, output)


class Distributed(Safetensors):
    """Folders of torch.distributed.checkpoint, of one process."""

    package = "torch"
    name = "step-{}"

    def __init__(self) -> None:
        super().__init__()
        import torch
        import torch.distributed.checkpoint as dcp

        self.torch, self.dcp = torch, dcp

    def load(self, checkpoint: Path) -> State:
        about = self.dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
        state = {
            name: self.torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in about.items()
        }
        self.dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
        return state

    def save(self, state: State, output: Path, newest: Path) -> None:
        self.dcp.save(state, checkpoint_id=output, no_dist=True)


class Megatron(Distributed):
    """Folders like Megatron's, without an optimizer: PyTorch's own and two files beside them."""

    name = "iter_000000{}"

    def save(self, state: State, output: Path, newest: Path) -> None:
        super().save(state, output, newest)
        iteration = int(output.name.removeprefix("iter_"))
        self.torch.save({"iteration": iteration, "checkpoint_version": 3.0}, output / "common.pt")
        about = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        (output / "metadata.json").write_text(json.dumps(about))


class DeepSpeed(Torch):
    """Folders of ZeRO by DeepSpeed itself, on two ranks, with Adam's moments."""

    package = "deepspeed"

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.stage = stage

    def write(self, folder: Path, sources: list[str]) -> None:
        """On every rank: a step of Adam for each checkpoint, from the first of the weights."""
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo")
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": {"stage": self.stage},
            "bf16": {"enabled": True},
        }
        model = _module(self.load_file(sources[0]))
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
        for _ in sources:
            engine.backward(engine())
            engine.step()
            engine.save_checkpoint(folder)

    def load(self, checkpoint: Path) -> State:
        """What DeepSpeed's converter makes of a folder; files are results."""
        if checkpoint.is_file():
            import torch

            found = torch.load(checkpoint, weights_only=True, mmap=True)
            return dict(found.get("module", found.get("model", found)))
        aside = checkpoint.parent.parent / "converted"
        script = checkpoint.parent / "zero_to_fp32.py"
        tag = ["--tag", checkpoint.name, "--max_shard_size", "100GB"]
        command = [sys.executable, str(script), str(checkpoint.parent), str(aside), *tag]
        subprocess.run(command, check=True, capture_output=True)
        try:
            import torch

            found = torch.load(aside / "pytorch_model.bin", weights_only=True)
            return {name: tensor.detach() for name, tensor in found.items()}
        finally:
            shutil.rmtree(aside)


def _module(weights: State) -> Any:
    """A model with these parameters, whose loss gives each of them some gradient."""
    import torch
    from torch import Tensor, nn

    class Node(nn.Module):
        def forward(self) -> Tensor:
            """Module by module, as ZeRO-3 gathers parameters; backward needs no values."""
            own = [p.float().sum() for p in self.parameters(recurse=False)]
            return torch.stack([*own, *(child() for child in self.children())]).sum()

    root = Node()
    for name, value in weights.items():
        *path, last = name.split(".")
        node: nn.Module = root
        for part in path:
            if not hasattr(node, part):
                node.add_module(part, Node())
            node = getattr(node, part)
        node.register_parameter(last, nn.Parameter(value.clone()))
    return root


class Orbax(Safetensors):
    """Folders of Orbax, one item called `params`."""

    package = "orbax-checkpoint"
    name = "{}"

    def __init__(self) -> None:
        super().__init__()
        import jax
        import orbax.checkpoint as ocp

        self.jax, self.ocp = jax, ocp

    def load(self, checkpoint: Path) -> State:
        with self.ocp.StandardCheckpointer() as checkpointer:
            tree = checkpointer.restore(checkpoint.absolute())
        import numpy as np

        return {name: np.array(array) for name, array in _leaves(tree["params"])}

    def save(self, state: State, output: Path, newest: Path) -> None:
        tree: State = {}
        for name, value in state.items():
            *path, last = name.split(".")
            node = tree
            for part in path:
                node = node.setdefault(part, {})
            node[last] = self.jax.numpy.asarray(value)
        with self.ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(output.absolute(), {"params": tree})


def _leaves(tree: State, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


PEERS = {
    "safetensors": Safetensors,
    "torch": Torch,
    "distributed": Distributed,
    "megatron": Megatron,
    "zero2": lambda: DeepSpeed(2),
    "zero3": lambda: DeepSpeed(3),
    "orbax": Orbax,
}


def main() -> None:
    act, kind, *words = sys.argv[1:]
    peer: Peer = PEERS[kind]()
    if act == "write":
        peer.write(Path(words[0]), words[1:])
    elif act == "average":
        output, *inputs = map(Path, words)
        start = time.perf_counter()
        peer.save(accumulate(peer.load(path) for path in inputs), output, inputs[-1])
        print(json.dumps({"engine_seconds": time.perf_counter() - start}))
    elif act == "export":
        import torch
        from safetensors.torch import save_file

        state = peer.load(Path(words[0]))
        save_file({n: torch.as_tensor(value).contiguous() for n, value in state.items()}, words[1])
    else:
        from importlib import metadata

        print(f"{peer.package} {metadata.version(peer.package)}, {os.uname().sysname}")


if __name__ == "__main__":
    main()
