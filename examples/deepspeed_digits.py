"""Digits with DeepSpeed ZeRO-3: average, evaluate, save and resume with its checkpoints.

pip install 'torch-lawa[lab,deepspeed]' && torchrun --nproc-per-node 2 examples/deepspeed_digits.py
On CPUs: pip install ninja, and set DS_ACCELERATOR=cpu; the first start compiles for minutes.
"""

import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from torch_lawa import LatestWeightAverager
from torch_lawa.integrations.deepspeed import load_checkpoint, save_checkpoint

EPOCHS, BATCH = 16, 32
CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "zero_optimization": {"stage": 3},
    "bf16": {"enabled": True},
}


def main(folder: str = "runs/digits", *, stop_after: int = EPOCHS) -> tuple[float, float]:
    """Train, or resume from `folder`; returns the test loss of the raw and averaged weights."""
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    engine: Any
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=dict(CONFIG)
    )
    digits = load_digits()
    images = torch.tensor(digits.data / 16).to(engine.device, torch.bfloat16)
    labels = torch.tensor(digits.target).to(engine.device)

    def loss_of(rows: Tensor | slice) -> Tensor:
        return cross_entropy(engine(images[rows]).float(), labels[rows])

    def evaluate() -> float:
        with torch.no_grad():
            return float(loss_of(slice(1200, None)))

    averager = LatestWeightAverager(k=6)
    first = 0
    if (Path(folder) / "latest").exists():
        load_checkpoint(engine, averager, folder)
        first = averager.num_collected

    raw = mean = float("nan")
    for epoch in range(first, stop_after):
        order = torch.randperm(1200, generator=torch.Generator().manual_seed(epoch))
        for rows in order[rank::ranks].split(BATCH):
            engine.backward(loss_of(rows))
            engine.step()
        averager.collect(engine)
        raw = evaluate()
        if averager.ready:
            with averager.swapped_into(engine):
                mean = evaluate()
        if rank == 0:
            print(
                f"epoch {epoch + 1:2d}   raw {raw:.3f}   mean of the last {averager.k} {mean:.3f}"
            )
        save_checkpoint(engine, averager, folder)
    averager.save_pretrained(f"{folder}/averaged", engine, overwrite=True)
    return raw, mean


if __name__ == "__main__":
    main(*sys.argv[1:])
