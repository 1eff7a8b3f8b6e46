"""Folders of checkpoints, as frameworks leave them: empty files, or small ones with a step."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from torch_lawa.checkpoints.find.discovery import Discovery


def make(root: Path, names: Iterable[str]) -> Path:
    """Empty files; folders where a name ends with a slash."""
    for name in names:
        path = root / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.touch()
    return root


def save(path: Path, **metadata: str) -> Path:
    """A safetensors file with one small tensor."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"w": np.zeros(2, np.float32)}, path, metadata=metadata)
    return path


def names(discovery: Discovery, root: Path) -> list[str]:
    """What was found, relative to `root`."""
    return [Path(str(found.location)).relative_to(root).as_posix() for found in discovery.found]


def hugging_face(*names: str) -> list[str]:
    """A checkpoint of the Trainer."""
    files = (
        "model.safetensors", "optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state_0.pth",
        "training_args.bin", "trainer_state.json", "config.json",
    )  # fmt: skip
    return [f"{name}/{file}" for name in names for file in files]
