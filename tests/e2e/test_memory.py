"""How much memory of its own averaging takes: little, whatever the size of the model and k."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

LIMIT = 64 * 1024 * 1024
NUM_VALUES = 6_000_000  # four such tensors make a checkpoint of 96 MB

PROBE = """
import sys, threading, time

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))

bare, peak, ended = anonymous(), [0], threading.Event()

def watch():
    while not ended.wait(0.001):
        peak[0] = max(peak[0], anonymous())

threading.Thread(target=watch, daemon=True).start()
from torch_lawa.cli.main import _run
code = _run(sys.argv[1:])
ended.set()
assert "torch" not in sys.modules
print("peak", max(peak[0], anonymous()) - bare)
sys.exit(code)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize(("suffix", "k"), [("safetensors", 2), ("safetensors", 6), ("pt", 2)])
@pytest.mark.parametrize("verb", ["average", "sweep"])
def test_memory_does_not_grow_with_the_model_or_k(
    tmp_path: Path, verb: str, suffix: str, k: int
) -> None:
    state = {f"t{i}": torch.zeros(NUM_VALUES) for i in range(4)}
    first = tmp_path / f"step_0.{suffix}"
    save_file(state, first) if suffix == "safetensors" else torch.save(state, first)
    for step in range(1, k):
        (tmp_path / f"step_{step}.{suffix}").hardlink_to(first)
    words = ["average", str(tmp_path), "--last", str(k), "-o", str(tmp_path / "out.safetensors")]
    if verb == "sweep":
        ks = f"1,{k}"
        words = ["sweep", str(tmp_path), "--k", ks, "--at", str(k - 1), "-o", str(tmp_path / "s")]
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *words], capture_output=True, text=True, check=True
    )
    assert int(done.stdout.split()[-1]) < LIMIT, done.stdout
