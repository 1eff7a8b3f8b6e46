"""Build the loops in C where there is a compiler; do without them where there is none.

Run by hatchling at every install, and by hand (`python hatch_build.py`) while working on them.
"""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zlib
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand, outside of a build
    BuildHookInterface = object  # type: ignore[assignment,misc]

_FOLDER = Path(__file__).parent / "src" / "torch_lawa" / "mean"
# Contraction would fuse multiply and add, and change bits from machine to machine.
_FLAGS = ["-O3", "-std=c11", "-fPIC", "-shared", "-ffp-contract=off", "-fno-trapping-math"]


def build() -> Path | None:
    """Compile `kernels.c` beside itself; None where that is not possible."""
    source = _FOLDER / "kernels.c"
    target = _FOLDER / f"_kernels_{zlib.crc32(source.read_bytes()):08x}.so"
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    if not shutil.which(compiler[0]):
        compiler = ["cc"]
    if sys.platform == "win32" or not shutil.which(compiler[0]):
        return None
    for old in _FOLDER.glob("_kernels_*"):
        old.unlink()
    temporary = target.with_suffix(".partial")
    command = [*compiler, *_FLAGS, str(source), "-o", str(temporary), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        print(f"torch-lawa: built without its C loops:\n{done.stderr}", file=sys.stderr)
        return None
    temporary.rename(target)
    return target


class KernelsHook(BuildHookInterface):  # type: ignore[misc,valid-type]
    """Adds what was built to a wheel, which is then one for this platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a wheel is put together."""
        if build() is not None:
            build_data["pure_python"] = False
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform}"


if __name__ == "__main__":
    print(build() or "no compiler: the package will use NumPy")
