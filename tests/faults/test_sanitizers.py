"""The compiled kernels under AddressSanitizer and UndefinedBehaviorSanitizer, against NumPy."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from support import kernel_trials
from support.campaign import Campaign, CountTrials

import torch_lawa
from torch_lawa.mean import kernels_native

pytestmark = pytest.mark.faults

ROOT = Path(__file__).parents[2]
FLAGS = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def build_hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sanitizer_libraries(compiler: list[str]) -> list[str]:
    """The paths of the run-time libraries; empty if the compiler has none."""
    found = []
    for name in ("libasan.so", "libubsan.so"):
        command = [*compiler, f"-print-file-name={name}"]
        path = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        if not Path(path).is_absolute():
            return []
        found.append(path)
    return found


@pytest.fixture
def sanitizers() -> tuple[ModuleType, list[str]]:
    hook = build_hook()
    compiler = hook.find_compiler()
    if not shutil.which(compiler[0]):
        pytest.skip("no C compiler")
    if not (libraries := sanitizer_libraries(compiler)):
        pytest.skip(f"{compiler[0]} has no sanitizers that can be loaded first")
    return hook, libraries


def test_kernels_under_sanitizers(
    sanitizers: tuple[ModuleType, list[str]],
    campaign: Campaign,
    trials: CountTrials,
    tmp_path: Path,
) -> None:
    hook, libraries = sanitizers
    shutil.copy(Path(kernels_native.__file__).with_name("kernels.c"), tmp_path)
    assert hook.build(tmp_path, FLAGS) is not None
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": str(Path(torch_lawa.__file__).parents[1]),
    }
    command = [sys.executable, kernel_trials.__file__, str(tmp_path)]
    done = subprocess.run(
        [*command, str(campaign.seed), str(campaign.seconds)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    for kind, number in json.loads(done.stdout).items():
        trials(kind, number)
