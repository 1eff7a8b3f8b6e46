"""Runs of torchtitan on CPU ranks, and folders that it wrote itself."""

import functools
import json
import os
import random
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

TESTS = Path(__file__).parents[1]
RECORDED = TESTS / "recorded" / "torchtitan.tar.xz"


def unpack_recorded(folder: Path) -> Path:
    """The run that `tests/recorded/record_torchtitan.py` recorded."""
    with tarfile.open(RECORDED) as archive:
        archive.extractall(folder, filter="data")
    return folder


def write_assets(folder: Path) -> Path:
    """A tokenizer of letters, and 400 lines of text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True)
    symbols = ["<s>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz\u0120"]
    vocabulary = {symbol: i for i, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    chance = random.Random(0)
    words = ["the", "a", "cat", "dog", "bird", "sat", "ran", "flew", "under", "mat", "tree", "far"]
    lines = [{"text": " ".join(chance.choices(words, k=12))} for _ in range(400)]
    (folder / "text").mkdir()
    (folder / "text" / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def train(
    folder: Path, *options: object, ranks: int = 2, config: str = "tiny", kill_in_save: int = 0
) -> None:
    """Run torchtitan with its output in `folder`; with `kill_in_save` it must be killed there."""
    assets = folder.parent / "assets"
    if not assets.exists():
        write_assets(assets)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    command = [*launch, "-m", "support.torchtitan_ranks", assets, "--module", "__main__"]
    command += ["--config", f"{config}_run", "--dump_folder", folder, *options]
    environment = {
        **os.environ,
        "PYTHONPATH": str(TESTS),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(assets / "cache"),
        "LAWA_KILL_IN_SAVE": str(kill_in_save),
    }
    words = [sys.executable, *map(str, command)]
    done = subprocess.run(
        words, env=environment, cwd=folder.parent, capture_output=True, text=True, check=False
    )
    if bool(done.returncode) != bool(kill_in_save):
        raise RuntimeError(f"{' '.join(words)}:\n{done.stdout[-2000:]}\n{done.stderr[-9000:]}")


def load(checkpoint: Path) -> dict[str, Any]:
    """A checkpoint as PyTorch's own converter reads it: weights at the top, the rest nested."""
    return dict(_load(checkpoint))


@functools.cache  # it takes seconds, and tests share their runs
def _load(checkpoint: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        dcp_to_torch_save(checkpoint, f"{folder}/state.pt")
        return torch.load(f"{folder}/state.pt", weights_only=False)  # type: ignore[no-any-return]


def weights_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The model in it."""
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def losses(folder: Path, name: str = "loss_metrics/global_avg_loss") -> dict[int, str]:
    """What torchtitan logged under a name, by step, as exact hexadecimal text."""
    rows = [
        json.loads(line)
        for file in folder.glob("metrics-*.jsonl")
        for line in file.read_text().splitlines()
    ]
    return {row["step"]: row[name] for row in rows if name in row}
