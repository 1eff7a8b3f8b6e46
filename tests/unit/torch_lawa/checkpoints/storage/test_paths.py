"""One battery for every kind of place; then what only remote ones can get wrong."""

import http.server
import io
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from torch_lawa.checkpoints.formats.registry import open_checkpoint
from torch_lawa.checkpoints.storage import byte_sources, paths
from torch_lawa.checkpoints.storage.byte_sources import RemoteSource, SourceFile
from torch_lawa.checkpoints.storage.paths import (
    LocalPath,
    Location,
    RemoteURL,
    is_url,
    parse_location,
)
from torch_lawa.checkpoints.storage.remote_errors import translated_errors
from torch_lawa.errors import ConfigError, FormatError, LawaError, OutputError


class Ground:
    """A folder of either kind, and a way to fill it that is not the one under test."""

    def __init__(self, kind: str, tmp_path: Path) -> None:
        self.memory = fsspec.filesystem("memory")
        self.path = tmp_path / "ground" if kind == "local" else None
        self.url = str(self.path) if self.path else f"memory:/{tmp_path}/ground"
        self.location = parse_location(self.url)
        self.write("here", b"")

    def write(self, name: str, content: bytes) -> None:
        if self.path:
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            (self.path / name).write_bytes(content)
        else:
            self.memory.pipe(f"{self.url}/{name}", content)


@pytest.fixture(params=["local", "memory"])
def ground(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ground]:
    found = Ground(request.param, tmp_path)
    yield found
    found.memory.store.clear()
    found.memory.pseudo_dirs[:] = [""]


def test_names(ground: Ground) -> None:
    location = ground.location.child("run").child("Step_1.SafeTensors")
    assert (location.name, location.suffix) == ("Step_1.SafeTensors", ".safetensors")
    assert str(location) == f"{str(ground.location).rstrip('/')}/run/Step_1.SafeTensors"
    assert location.parent == ground.location.child("run")
    assert location.parent.parent == ground.location
    assert ground.location.child("run").suffix == ""
    assert parse_location(str(location)) == location
    assert len({location, parse_location(str(location)), location.parent}) == 2
    assert location.local == isinstance(location, LocalPath)
    assert parse_location(ground.url + "/") == ground.location


def test_what_is_there(ground: Ground) -> None:
    ground.write("run/a.pt", b"a")
    file, folder, nothing = (ground.location.child(n) for n in ("run/a.pt", "run", "nothing"))
    kinds = [(p.is_file(), p.is_folder(), p.exists()) for p in (file, folder, nothing)]
    assert kinds == [(True, False, True), (False, True, True), (False, False, False)]
    assert not file.child("b").exists()


def test_children(ground: Ground) -> None:
    for name in ("run/b.pt", "run/.hidden", "run/a/x.pt", "run/a/y.pt", "running/c.pt"):
        ground.write(name, b"x")
    run = ground.location.child("run")
    assert [p.name for p in run.children()] == [".hidden", "a", "b.pt"]
    assert run.children()[1] == run.child("a")
    assert [p.is_folder() for p in run.children()] == [False, True, False]
    ground.write("run/c.pt", b"x")  # a live run adds files
    assert [p.name for p in run.children()] == [".hidden", "a", "b.pt", "c.pt"]
    with pytest.raises(FileNotFoundError, match=re.escape(str(ground.location.child("nothing")))):
        ground.location.child("nothing").children()


def test_patterns(ground: Ground) -> None:
    for name in ("run/step_1.pt", "run/step_20.pt", "run/step_3.bin", "run/deep/step_4.pt"):
        ground.write(name, b"x")
    assert [p.name for p in ground.location.child("run/step_*.pt").glob()] == [
        "step_1.pt",
        "step_20.pt",
    ]
    assert [p.name for p in ground.location.child("run/step_?.*").glob()] == [
        "step_1.pt",
        "step_3.bin",
    ]
    assert [p.name for p in ground.location.child("run/step_[13].*").glob()] == [
        "step_1.pt",
        "step_3.bin",
    ]
    assert ground.location.child("run/step_1.pt").glob() == [ground.location.child("run/step_1.pt")]
    assert ground.location.child("run/other*").glob() == []
    assert ground.location.child("nothing/*").glob() == []


def test_stamps(ground: Ground) -> None:
    ground.write("a", b"12345")
    location = ground.location.child("a")
    before = location.stamp()
    assert (before, location.size) == (location.stamp(), 5)
    assert before[0] == 5
    ground.write("a", b"54321")
    assert location.stamp() != before
    with pytest.raises(FileNotFoundError, match="nothing"):
        ground.location.child("nothing").stamp()


def test_bytes(ground: Ground) -> None:
    content = bytes(range(256))
    ground.write("a", content)
    ground.write("empty", b"")
    location = ground.location.child("a")
    source = location.open()
    assert source.size == 256
    assert source.view(3, 9).tobytes() == content[3:9]
    assert source.view(0, 256).tobytes() == location.read_bytes() == content
    assert source.view(7, 7).tobytes() == b""
    view = source.view(250, 256)
    assert view.dtype == np.uint8
    source.close()
    assert view.tobytes() == content[250:]  # views outlive their source
    assert ground.location.child("empty").read_bytes() == b""
    for act in (ground.location.child("nothing").open, ground.location.child("nothing").read_bytes):
        with pytest.raises(FileNotFoundError, match="nothing"):
            act()


def test_a_source_as_a_file(ground: Ground) -> None:
    ground.write("a", b"234567")
    file = SourceFile(ground.location.child("a").open())
    assert file.read(2) == b"23"
    assert (file.seek(-2, io.SEEK_END), file.read()) == (4, b"67")
    assert (file.seek(1), file.seek(1, io.SEEK_CUR), file.tell()) == (1, 2, 2)
    assert file.read(100) == b"4567"
    assert file.read(1) == b""
    with pytest.raises(ValueError):
        file.seek(-1)


@pytest.fixture
def remote() -> Iterator[RemoteURL]:
    location = parse_location("memory://unit/remote")
    assert isinstance(location, RemoteURL)
    yield location
    location.fs.store.clear()
    location.fs.pseudo_dirs[:] = [""]


def test_upload_and_remove(remote: RemoteURL, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    target = remote.child("deep").child("a.bin")
    target.upload(tmp_path / "a")
    assert target.read_bytes() == b"abc"
    assert remote.child("deep").is_folder()
    target.remove()
    assert not target.exists()
    target.remove()  # it is gone already, which is what was wanted


def test_a_file_that_changes_while_it_is_read(remote: RemoteURL) -> None:
    location = remote.child("a")
    remote.fs.pipe(location.path, b"0123456789")
    source = location.open()
    remote.fs.pipe(location.path, b"0123")
    with pytest.raises(FormatError, match=r"memory://unit/remote/a: requested 6 bytes .* got 2"):
        source.view(2, 8)
    remote.fs.rm(location.path)
    with pytest.raises(FormatError, match=r"memory://unit/remote/a: was removed"):
        source.view(2, 8)


def test_only_what_is_asked_for_is_fetched(
    remote: RemoteURL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = torch.arange(1000.0)
    save_file({"big": torch.zeros(5_000_000), "small": small}, tmp_path / "a.safetensors")
    location = remote.child("a.safetensors")
    location.upload(tmp_path / "a.safetensors")
    fetched: list[int] = []
    original = type(remote.fs).cat_file

    def counting(*args: Any, **kwargs: Any) -> bytes:
        fetched.append(len(found := original(*args, **kwargs)))
        return found

    monkeypatch.setattr(type(remote.fs), "cat_file", counting)
    with open_checkpoint(location) as opened:
        assert sum(fetched) < 1000
        read = opened.read("small", 400, 4000)
    assert np.array_equal(read.view(np.float32), small[100:].numpy())
    assert 3600 < sum(fetched) < 4600
    assert location.size > 20_000_000


def make_error(name: str, base: type[Exception], text: str) -> Exception:
    """As a library that need not be installed would raise it."""
    error: Exception = type(name, (base,), {})(text)
    return error


BOTO = type("BotoCoreError", (Exception,), {})
UNREACHABLE = type("ConnectionError", (BOTO,), {})  # not the built-in one


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (PermissionError("Forbidden"), ConfigError, r"denied .*\(Forbidden\).*AWS_PROFILE"),
        (make_error("NoCredentialsError", BOTO, "Unable to locate credentials"), ConfigError,
         r"no credentials .*Unable to locate.*AWS_ACCESS_KEY_ID"),
        (make_error("EndpointConnectionError", UNREACHABLE, "Could not connect\n to x"),
         ConnectionError, r"cannot be reached \(Could not connect to x\).*AWS_ENDPOINT_URL"),
        (TimeoutError("slow"), ConnectionError, "cannot be reached"),
        (ConnectionResetError("reset"), ConnectionError, "cannot be reached"),
        (make_error("ProfileNotFound", BOTO, "The config profile (x) could not be found"),
         ConfigError, "profile.*settings"),
        (ValueError("Invalid bucket name"), ConfigError, r"Invalid bucket name\. Check the URL"),
        (OSError("SlowDown"), OSError, r"the server failed \(OSError: SlowDown\)"),
        (make_error("ResponseParserError", Exception, "bad XML"), OSError, "ResponseParserError"),
        (FormatError("ours"), FormatError, "^ours$"),
    ],
)  # fmt: skip
def test_what_a_server_says_becomes_what_to_do(
    error: Exception, kind: type[Exception], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = fsspec.filesystem("memory")

    def fail(*_: object, **__: object) -> None:
        raise error

    location = RemoteURL(fs, "bucket/a.pt", "s3")
    for method in ("info", "ls", "glob", "cat_file", "put_file", "rm_file"):
        monkeypatch.setattr(type(fs), method, fail)
    source = RemoteSource(fs, location.path, str(location), size=10)
    acts = ("is_file", "is_folder", "exists", "children", "glob", "stamp", "open", "read_bytes")
    for act in (*(getattr(location, name) for name in acts), lambda: source.view(0, 4)):
        with pytest.raises(kind, match=says) as caught:
            act()
        if error is not caught.value:
            assert str(caught.value).startswith("s3://bucket/a.pt: ")
    for act in (lambda: location.upload(Path(__file__)), location.remove):
        with pytest.raises(OutputError, match=r"not (written|removed)"):
            act()


def test_a_web_server_that_fails_is_not_a_missing_file() -> None:
    pytest.importorskip("aiohttp")
    codes = {"/gone.pt": 404, "/secret.pt": 403, "/broken.pt": 500}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(codes[self.path])

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert not parse_location(f"{url}/gone.pt").is_file()
        for name, code in (("secret", "403"), ("broken", "500")):
            with pytest.raises(OSError, match=f"{name}.pt: the server failed .*{code}"):
                parse_location(f"{url}/{name}.pt").is_file()
        server.shutdown()
    with pytest.raises(ConnectionError, match=r"gone.pt: the server cannot be reached"):
        parse_location(f"{url}/gone.pt").is_file()


def test_a_url_is_shown_as_it_was_given() -> None:
    for url in ("http://127.0.0.1:9/run/step-1.pt", "memory://run/step-1.pt"):
        assert str(parse_location(url)) == url
        assert str(parse_location(url).parent) == url.rpartition("/")[0]


def test_other_servers_get_other_advice() -> None:
    error = make_error("DefaultCredentialsError", Exception, "none")
    with pytest.raises(ConfigError, match="gcloud auth"), translated_errors("gs://bucket/x"):
        raise error
    with (
        pytest.raises(ConfigError, match="Log in first"),
        translated_errors("abfs://bucket/x"),
    ):
        raise error


@pytest.mark.parametrize(
    ("url", "module", "package"),
    [
        ("gs://bucket/run", "gcsfs", "pip install 'gcsfs'"),
        ("gcs://bucket/run", "gcsfs", "pip install 'gcsfs'"),
        ("s3://bucket/run", "s3fs", r"pip install 'torch-lawa\[s3\]'"),
        ("abfs://bucket/run", "adlfs", "pip install 'adlfs'"),
        ("lakefs://repository/run", "lakefs_spec", "lakefs-spec.*Install it"),
    ],
)
def test_a_package_that_is_missing(
    url: str, module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    protocol = url.partition("://")[0]
    monkeypatch.setitem(sys.modules, module, None)
    registry = sys.modules["fsspec.registry"]._registry  # what was imported before
    monkeypatch.delitem(registry, protocol, raising=False)
    with pytest.raises(ConfigError, match=f"{url}: {protocol}:// needs .*{package}"):
        parse_location(url)


def test_other_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse_location("~/a") == LocalPath(tmp_path / "a")
    assert parse_location("file:///tmp/a") == LocalPath("/tmp/a")
    assert parse_location(tmp_path) == LocalPath(tmp_path)
    assert not is_url("C:/runs/a.pt")
    with pytest.raises(ConfigError, match=r"nonsense://x: .*Give a path or a URL"):
        parse_location("nonsense://x")
    with pytest.raises(LawaError):
        open_checkpoint(parse_location("memory://nowhere/a.pt"))


def test_place_is_whole() -> None:
    """The battery above calls every method that a place must have."""
    assert Location.__abstractmethods__ == {
        "name", "child", "parent", "is_file", "is_folder", "children", "glob", "stamp", "open"
    }  # fmt: skip


def test_large_side_files_are_copied_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were read whole, twice: 3 GB of memory for a text of 1.5 GB."""
    monkeypatch.setattr(paths, "_COPIED", 1000)
    monkeypatch.setattr(paths, "_MAX_SMALL", 5000)
    content = bytes(range(256)) * 100
    (tmp_path / "vocab.txt").write_bytes(content)
    longest = 0
    view = byte_sources.ReadSource.view

    def watched(self: Any, begin: int, end: int) -> Any:
        nonlocal longest
        longest = max(longest, end - begin)
        return view(self, begin, end)

    monkeypatch.setattr(byte_sources, "native_library", lambda: None)
    monkeypatch.setattr(byte_sources.ReadSource, "view", watched)
    LocalPath(tmp_path / "vocab.txt").copy_to(tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == content
    assert longest == 1000
    with pytest.raises(FormatError, match="25600 bytes"):
        LocalPath(tmp_path / "vocab.txt").read_bytes()
