"""The wheel, the pure-Python wheel and the sdist: built, checked, and installed from nothing."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
CHECK = Path(__file__).with_name("check_install.py")


def run(*command: object, **environment: str) -> str:
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", ROOT, "-o", folder)
    run(sys.executable, "-m", "build", "--wheel", ROOT, "-o", folder, LAWA_BUILD="pure")
    (sdist,) = folder.glob("*.tar.gz")
    (pure,) = folder.glob("*-py3-none-any.whl")
    (native,) = set(folder.glob("*.whl")) - {pure}
    return {"native": native, "pure": pure, "sdist": sdist}


def test_an_index_would_accept_them(distributions: dict[str, Path]) -> None:
    run(sys.executable, "-m", "twine", "check", "--strict", *distributions.values())
    wheels = distributions["native"], distributions["pure"]
    run(sys.executable, "-m", "check_wheel_contents", *wheels, "--config", ROOT / "pyproject.toml")


@pytest.mark.skipif(sys.platform != "linux", reason="auditwheel is for Linux wheels")
def test_the_platform_tag_is_one_that_auditwheel_confirms(distributions: dict[str, Path]) -> None:
    native = distributions["native"]
    assert re.search(r"-py3-none-(manylinux|musllinux)", native.name)
    report = run(sys.executable, "-m", "auditwheel", "show", native)
    (tag,) = re.findall(r'consistent with\s+the\s+following platform tag:\s+"(\w+)"', report)
    assert tag in native.name


def test_the_kernels_do_not_use_pythons_api(distributions: dict[str, Path], tmp_path: Path) -> None:
    """So one wheel serves every Python 3."""
    with zipfile.ZipFile(distributions["native"]) as wheel:
        (name,) = [n for n in wheel.namelist() if "_kernels_" in n]
        library = Path(wheel.extract(name, tmp_path))
    assert b"lawa_mean" in library.read_bytes()
    assert not re.search(rb"\x00_?Py[A-Z]\w+\x00", library.read_bytes())


@pytest.mark.parametrize("kind", ["native", "pure", "sdist"])
def test_installed_into_an_empty_environment(
    distributions: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    run(sys.executable, "-m", "venv", tmp_path)
    python = tmp_path / "bin" / "python"
    pip = [python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt"]
    # A compiler that fails stands for none: the sdist must install all the same.
    run(*pip, distributions[kind], CC="false")
    said = run(python, CHECK, "--kernels", "native" if kind == "native" else "numpy")
    assert "installed and working" in said
