"""What every benchmark record says of itself: machine, versions, commit, command."""

import json
import os
import platform
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def provenance() -> dict[str, Any]:
    """Where and how a measurement was made."""
    import torch

    def git(*words: str) -> str:
        if shutil.which("git") is None:
            return ""
        done = subprocess.run(["git", *words], capture_output=True, text=True)
        return done.stdout.strip()

    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [x.split(":")[1] for x in info.read_text().splitlines() if "model name" in x]
        cpu = names[0].strip() if names else cpu
    found: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "commit": git("rev-parse", "--short", "HEAD") or os.environ.get("LAWA_COMMIT", "unknown"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": cpu,
        "num_cores": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


class Log:
    """Raw measurements, a JSON object a line, as they come."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "raw.jsonl"
        self._path.write_text("")
        self.add(kind="provenance", **provenance())

    def add(self, **fields: Any) -> None:
        """Append one row."""
        with self._path.open("a") as file:
            file.write(json.dumps(fields) + "\n")


def median(values: list[float]) -> float:
    """The middle one."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
