"""What a fresh installation must do: five lines of the averager, and `lawa average` on files.

Run by an environment that has nothing but the installed package; no pytest there.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kernels", choices=["native", "numpy"], required=True)
    kernels = parser.parse_args().kernels

    import torch

    from torch_lawa import LatestWeightAverager
    from torch_lawa.mean.kernels_native import CompiledPieces

    model = torch.nn.Linear(3, 2)
    averager = LatestWeightAverager(k=2)
    for value in (1.0, 2.0, 4.0):
        torch.nn.init.constant_(model.weight, value)
        averager.collect(model)
    with averager.swapped_into(model):
        assert model.weight.unique().tolist() == [3.0]
    assert model.weight.unique().tolist() == [4.0]

    assert CompiledPieces.available() == (kernels == "native"), "the wrong kernels were installed"
    lawa = Path(sys.executable).with_name("lawa")
    with tempfile.TemporaryDirectory() as folder:
        for step, value in ((100, 1.0), (200, 2.0)):
            torch.save({"w": torch.full((5,), value)}, f"{folder}/step_{step}.pt")
        out = f"{folder}/mean.pt"
        command = [lawa, "average", folder, "--last", "2", "-o", out]
        if sys.platform == "win32":
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 1
            assert "needs Linux or macOS" in done.stderr, done.stderr
            return
        subprocess.run(command, check=True)
        assert torch.load(out, weights_only=True)["w"].tolist() == [1.5] * 5
    shown = subprocess.run([lawa, "--help"], check=True, capture_output=True, text=True).stdout
    assert all(verb in shown for verb in ("average", "watch", "train", "report", "demo")), shown
    print(f"installed and working, with {kernels} kernels")


if __name__ == "__main__":
    main()
