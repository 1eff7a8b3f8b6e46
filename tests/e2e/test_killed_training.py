"""A training script that is killed again and again ends with the average of one that was not."""

import random
import signal
import sys
import time
from pathlib import Path

import pytest
from support.programs import Program

SCRIPT = """
import hashlib, os, sys, torch
from torch import nn
from torch_lawa import Every, LatestWeightAverager

path = sys.argv[1]
torch.set_num_threads(1)
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(20, 50), nn.BatchNorm1d(50), nn.Tanh(), nn.Linear(50, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
averager = LatestWeightAverager(k=4, schedule=Every(7, start=5))
first = 0
if os.path.exists(path):
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    averager.load_state_dict(state["averager"])
    first = state["step"]
print("from", first, flush=True)
for step in range(first, 120):
    x = torch.randn(16, 20, generator=torch.Generator().manual_seed(step))
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    averager.step(model)
    if step % 3 == 0:  # falls inside the window and inside the period of 7
        torch.save(
            {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "averager": averager.state_dict(),
                "step": step + 1,
            },
            path + ".new",
        )
        os.replace(path + ".new", path)
    if len(sys.argv) > 2:
        import time
        time.sleep(0.01)
digest = hashlib.sha256()
for name, tensor in sorted(averager.average().items()):
    digest.update(name.encode() + tensor.numpy().tobytes())
print("end", digest.hexdigest(), averager.snapshot_steps, flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGKILL")
def test_killed_again_and_again(tmp_path: Path) -> None:
    with Program(SCRIPT, tmp_path / "whole.pt") as process:
        whole, _ = process.communicate()
    beginnings = []
    for attempt in range(20):
        with Program(SCRIPT, tmp_path / "killed.pt", "slow") as process:
            beginnings.append(int(process.stdout.readline().split()[1]))
            if attempt < 3:
                deadline = time.monotonic() + 60
                while not (tmp_path / "killed.pt").exists() and time.monotonic() < deadline:
                    time.sleep(0.01)
                time.sleep(random.uniform(0.05, 0.3))
                process.send_signal(signal.SIGKILL)
            rest, _ = process.communicate()
        if "end" in rest:
            break
    assert rest.splitlines()[-1] == whole.splitlines()[-1]
    assert len(beginnings) > 1
    assert beginnings[-1] > 0  # it really went on from a checkpoint
