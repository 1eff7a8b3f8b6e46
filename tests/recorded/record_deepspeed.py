"""Checkpoints written by DeepSpeed itself, with what its own `zero_to_fp32.py` makes of them.

`python record_deepspeed.py` writes `deepspeed.tar.xz`, which fast tests read. `make test-deepspeed`
records again into a temporary folder and compares. Needs DeepSpeed, and no GPU.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

STEPS = (1, 2, 3)
ARCHIVE = Path(__file__).with_name("deepspeed.tar.xz")


@dataclass(frozen=True)
class Case:
    """A run: the stage of ZeRO, the number of ranks, and what else differs."""

    stage: int
    ranks: int
    bf16: bool
    universal: bool = False  # converted by ds_to_universal as well


CASES = {
    "zero1": Case(1, 2, bf16=False),
    "zero2": Case(2, 2, bf16=True, universal=True),
    "zero3": Case(3, 2, bf16=True),
    "zero1-bf16-3": Case(1, 3, bf16=True),
    "zero2-3": Case(2, 3, bf16=False),
    "zero3-3": Case(3, 3, bf16=False, universal=True),
}


class Net(nn.Module):
    """Tied, frozen and empty parameters, sizes that no number of ranks divides, buffers."""

    running_mean: Tensor
    num_batches: Tensor
    narrow: Tensor
    wide: Tensor

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.frozen = nn.Linear(5, 7)
        self.frozen.requires_grad_(False)
        self.middle = nn.Linear(7, 5)
        self.scale = nn.Parameter(torch.ones(1))
        if stage < 3:  # where DeepSpeed fails with empty ones
            self.empty = nn.Parameter(torch.zeros(0, 3))
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("running_mean", torch.zeros(5))
        self.register_buffer("num_batches", torch.tensor(0))
        self.register_buffer("narrow", torch.rand(3).half())
        self.register_buffer("wide", torch.rand(2, dtype=torch.float64))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.middle(torch.tanh(self.frozen(self.embedding(tokens))))
        self.running_mean.lerp_(hidden.detach().mean(0).to(self.running_mean), 0.25)
        self.narrow.add_(0.1)
        self.wide.add_(0.1)
        self.num_batches.add_(1)
        return self.head(hidden * self.scale)  # type: ignore[no-any-return]

    def groups(self) -> list[dict[str, object]]:
        """Two groups of parameters, with and without weight decay."""
        trained = [p for p in self.parameters() if p.requires_grad]
        return [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]


def config(case: Case) -> dict[str, object]:
    """The DeepSpeed configuration of a run."""
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "torch_adam": True}},
        "zero_optimization": {
            "stage": case.stage,
            "stage3_param_persistence_threshold": 0,
            "sub_group_size": 40,  # several flat groups for each group of parameters
        },
        "bf16": {"enabled": case.bf16},
    }


def train(names: Sequence[str], folder: Path) -> None:
    """Train the cases and save every step; on every rank."""
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    for name in names:
        torch.manual_seed(7)
        model = Net(CASES[name].stage)
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.groups(), config=config(CASES[name])
        )
        for _ in STEPS:
            tokens = torch.randint(0, 11, (4,))
            loss = nn.functional.cross_entropy(engine(tokens).float(), tokens.flip(0))
            engine.backward(loss)
            engine.step()
            engine.save_checkpoint(folder / name, client_state={"losses": deque([1.5])})
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def record(folder: Path) -> None:
    """Write the checkpoints of all cases below `folder`, and what DeepSpeed converts them to."""
    for ranks in sorted({case.ranks for case in CASES.values()}):
        names = [name for name, case in CASES.items() if case.ranks == ranks]
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
        _run(*torchrun, __file__, "--train", str(folder), *names)
    for name, case in CASES.items():
        for step in STEPS:
            _convert(folder / name, f"global_step{step}", case)


def _convert(run: Path, tag: str, case: Case) -> None:
    out = run / "expected" / f"{tag}.pt"
    _run(str(run / "zero_to_fp32.py"), str(run), str(run / "fp32"), "--tag", tag)
    out.parent.mkdir(exist_ok=True)
    (run / "fp32" / "pytorch_model.bin").rename(out)
    (run / "fp32").rmdir()
    if case.universal:
        to_universal(run / tag, run / "universal" / tag)


def to_universal(checkpoint: Path, target: Path) -> None:
    """Convert a checkpoint with DeepSpeed's own tool."""
    folders = ["--input_folder", checkpoint, "--output_folder", target]
    options = ["--num_extract_workers", 1, "--num_merge_workers", 1, "--inject_missing_state"]
    _run("-m", "deepspeed.checkpoint.ds_to_universal", *map(str, (*folders, *options)))


def environment() -> dict[str, str]:
    """What DeepSpeed needs to train on CPUs."""
    return {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # ninja
        "TORCH_EXTENSIONS_DIR": str(Path(sys.prefix) / "torch_extensions"),  # not other versions'
        "PYTHONWARNINGS": "ignore",
    }


def _run(*command: str) -> None:
    done = subprocess.run(
        [sys.executable, *command], env=environment(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")


def files_of(folder: Path) -> Iterator[Path]:
    """The recorded files, without DeepSpeed's copies of its scripts and the moments."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix != ".py" and not path.name.startswith("exp_avg"):
            yield path


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without the time and the user of the recording."""
    return entry.replace(mtime=0, uid=0, gid=0, uname="", gname="", deep=False)


def main() -> None:
    """Record the archive, or be one rank of a training."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", type=Path)
    parser.add_argument("cases", nargs="*", default=[])
    options = parser.parse_args()
    if options.train:
        train(options.cases, options.train)
        return
    folder = ARCHIVE.with_name("recording")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    record(folder)
    with tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
        for path in files_of(folder):
            archive.add(path, path.relative_to(folder).as_posix(), filter=_anonymous)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
