"""Fixtures for a bucket; the server is started by the first test that wants one."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from torch_lawa.cli import main

Lawa = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session")
def endpoint() -> Iterator[str]:
    from support.s3 import start_server

    server, url = start_server()
    yield url
    server.stop()


@pytest.fixture
def fs(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Everything comes from the environment, as a user would set it."""
    import s3fs

    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3fs.S3FileSystem.clear_instance_cache()
    yield s3fs.S3FileSystem()
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def bucket(fs: Any, request: pytest.FixtureRequest) -> str:
    name = f"test-{abs(hash(request.node.name)):x}"
    fs.mkdir(name)
    return name


@pytest.fixture
def lawa(capsys: pytest.CaptureFixture[str]) -> Lawa:
    def go(*words: object) -> tuple[int, str, str]:
        code = main._run([str(word) for word in words])
        return code, *capsys.readouterr()

    return go
