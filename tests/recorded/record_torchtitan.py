"""Checkpoints written by torchtitan itself, with the window of an averager, and its average.

`make record-torchtitan` writes `torchtitan.tar.xz`, which fast tests read; `make test-torchtitan`
records again and compares. Needs torchtitan, and no GPU.
"""

import sys
import tarfile
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.torchtitan import RECORDED, train


def record(folder: Path) -> Path:
    """A run on two ranks with a window of two snapshots; saved at steps 2, 4 and 6."""
    run = folder / "run"
    options = ["--training.steps", 6, "--averager.k", 2, "--averager.export", "dcp"]
    train(run, *options, config="smallest")
    return run


def main() -> None:
    """Record the archive."""
    with tempfile.TemporaryDirectory() as folder, tarfile.open(RECORDED, "w:xz", preset=9) as out:
        run = record(Path(folder))
        for path in sorted((*run.glob("checkpoint/*/*"), *run.glob("averaged/*/*"))):
            entry = out.gettarinfo(path, path.relative_to(run).as_posix())
            # Without the time and the user of the recording.
            entry.mtime = entry.uid = entry.gid = 0
            entry.uname = entry.gname = ""
            with path.open("rb") as file:
                out.addfile(entry, file)


if __name__ == "__main__":
    main()
