"""The indices of `results` and `benchmarks` name everything that is there, and nothing else."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_record_is_listed_once() -> None:
    text = (ROOT / "results/README.md").read_text()
    listed = re.findall(r"\]\(([\w-]+)/README\.md\)", text)
    assert sorted(listed) == sorted(path.parent.name for path in ROOT.glob("results/*/README.md"))


def test_every_benchmark_is_listed_once() -> None:
    listed = re.findall(r"`(\w+\.(?:py|txt))`", (ROOT / "benchmarks/README.md").read_text())
    there = [path for path in (ROOT / "benchmarks").iterdir() if path.suffix in (".py", ".txt")]
    assert sorted(listed) == sorted(path.name for path in there)
