"""Soups over several runs of one recipe: the uniform and the greedy one of their averages.

    python benchmarks/seed_soups.py RUN... --out results/NAME/seed-soups.jsonl

Each RUN is a finished folder of `lawa train`, or of `ring_methods.py`. Validation loss chooses the
members of the greedy soup; BatchNorm statistics are re-estimated for every soup.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from lawa_lab.methods.soups import greedy_soup
from lawa_lab.recipes.run_evaluator import RunEvaluator
from torch_lawa import average_checkpoints


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    evaluator = RunEvaluator(arguments.runs[0], device="cpu")
    files = [run / "averaged.safetensors" for run in arguments.runs]

    def values(file: Path) -> dict[str, Any]:
        found = evaluator(load_file(file))
        return {name: found[name] for name in found if name.startswith(("valid", "test"))}

    rows = [
        {"soup": run.name, **values(file)} for run, file in zip(arguments.runs, files, strict=True)
    ]
    with tempfile.TemporaryDirectory() as scratch:
        uniform, greedy = Path(scratch, "uniform.safetensors"), Path(scratch, "greedy.safetensors")
        average_checkpoints(files, uniform)
        rows.append({"soup": "uniform", **values(uniform)})
        members = greedy_soup(files, lambda file: float(values(file)["valid_loss"]), greedy)
        rows.append({"soup": "greedy", "members": members, **values(greedy)})
    arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
