"""Build hook: compile the C kernels where there is a compiler, and tag the wheel accordingly.

With kernels the wheel is for one platform but any Python 3, because they are loaded with ctypes.
Without a compiler, or with `LAWA_BUILD=pure`, the wheel is pure Python and NumPy does the work.
hatchling runs this at every install; `python hatch_build.py` rebuilds the kernels by hand.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand, outside of a build
    BuildHookInterface = object  # type: ignore[assignment,misc]

_FOLDER = Path(__file__).parent / "src" / "torch_lawa" / "mean"
# Contraction would fuse multiply and add, and the bits would differ between machines.
_FLAGS = ["-O3", "-std=c11", "-fPIC", "-shared", "-ffp-contract=off", "-fno-trapping-math"]
_OLDEST_GLIBC = 17  # manylinux_2_17 is what pip and auditwheel call manylinux2014


def build(folder: Path = _FOLDER, flags: Sequence[str] = ()) -> Path | None:
    """Compile the `kernels.c` of a folder next to itself; None if there is no usable compiler."""
    source = folder / "kernels.c"
    target = folder / f"_kernels_{zlib.crc32(source.read_bytes()):08x}.so"
    for old in folder.glob("_kernels_*"):
        old.unlink()
    compiler = find_compiler()
    if sys.platform == "win32" or not shutil.which(compiler[0]):
        return None
    temporary = target.with_suffix(".partial")
    command = [*compiler, *_FLAGS, *flags, str(source), "-o", str(temporary), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        print(f"torch-lawa: built without its C kernels:\n{done.stderr}", file=sys.stderr)
        return None
    temporary.rename(target)
    return target


def find_compiler() -> list[str]:
    """The command of the C compiler; it may not exist."""
    found = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    return found if shutil.which(found[0]) else ["cc"]


def platform_tag(library: Path) -> str:
    """The wheel's platform tag, from the newest glibc symbol that the library needs."""
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    versions = re.findall(rb"GLIBC_2\.(\d+)", library.read_bytes())
    if not platform.startswith("linux_") or not versions:
        return platform  # macOS, or musl, whose wheels are repaired by cibuildwheel
    newest = max(_OLDEST_GLIBC, *map(int, versions))
    machine = platform.removeprefix("linux_")
    tag = f"manylinux_2_{newest}_{machine}"
    return f"{tag}.manylinux2014_{machine}" if newest == _OLDEST_GLIBC else tag


class KernelsHook(BuildHookInterface):  # type: ignore[misc,valid-type]
    """Adds the kernels to the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before a wheel is assembled."""
        pure = os.environ.get("LAWA_BUILD") == "pure"
        library = None if pure else build()
        if library is None:
            build_data["tag"] = "py3-none-any"
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag(library)}"
        build_data["artifacts"].append(f"src/torch_lawa/mean/{library.name}")


if __name__ == "__main__":
    print(build() or "no compiler: the package will use NumPy")
