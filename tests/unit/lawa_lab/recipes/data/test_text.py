"""Text files are found in the layouts people have, and refused with the position of the damage."""

import hashlib
import itertools
from pathlib import Path

import pytest

from lawa_lab.recipes.data import text
from lawa_lab.recipes.data.text import check_text, find_text, read_text, smoke_text
from torch_lawa.errors import DataError


def put(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("some text\n")


@pytest.mark.parametrize("sub", [".", "wikitext-103", "wikitext-103-raw", "wikipedia"])
@pytest.mark.parametrize("name", ["wiki.{}.tokens", "wiki.{}.raw", "wiki.{}.txt", "{}.txt"])
def test_every_layout_is_found(tmp_path: Path, sub: str, name: str) -> None:
    put(tmp_path / sub, *(name.format(split) for split in ("train", "valid", "test")))
    assert find_text(tmp_path) == {
        split: tmp_path / sub / name.format(split) for split in ("train", "valid")
    }
    assert find_text(tmp_path, ["test"]) == {"test": tmp_path / sub / name.format("test")}


def test_the_first_complete_kind_is_taken(tmp_path: Path) -> None:
    put(tmp_path / "wikitext-103", "wiki.valid.tokens", "wiki.test.tokens", "train.txt")
    put(tmp_path / "wikipedia", "wiki.train.txt", "wiki.valid.txt")
    assert find_text(tmp_path)["train"] == tmp_path / "wikipedia" / "wiki.train.txt"
    put(tmp_path / "wikitext-103", "wiki.train.tokens")
    assert find_text(tmp_path)["train"] == tmp_path / "wikitext-103" / "wiki.train.tokens"


def test_missing_text_says_what_to_fetch_and_where_to_put_it(tmp_path: Path) -> None:
    put(tmp_path / "wikitext-103", "wiki.valid.tokens")
    with pytest.raises(DataError) as error:
        find_text(tmp_path)
    for part in ("wikitext-103-v1.zip", "Salesforce/wikitext", "--data", str(tmp_path)):
        assert part in str(error.value)
    wanted = tmp_path / "wikitext-103" / "wiki.train.tokens"
    assert f"wiki.valid.tokens exists, but {wanted} does not" in str(error.value)
    with pytest.raises(DataError, match="no WikiText-103"):
        find_text(tmp_path / "nowhere")


def test_the_digest_is_that_of_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_PIECE", 7)  # characters of two, three and four bytes are cut
    path = tmp_path / "a.txt"
    content = ("äöü€𝄞\n" * 20).encode()
    path.write_bytes(content)
    assert check_text(path) == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("piece", [2**20, 4, 1])
@pytest.mark.parametrize(
    ("content", "offset"),
    [
        (b"fine\xff and on", 4),
        ("ä€".encode() + b"\xe2\x82", 5),  # ends within a character
        ("ä€".encode() + b"\xe2\x82x", 5),
        (b"\x80", 0),
        (b"12345678\xc3(9", 8),
    ],
)
def test_what_is_not_utf8_is_refused_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, offset: int, piece: int
) -> None:
    monkeypatch.setattr(text, "_PIECE", piece)
    path = tmp_path / "wiki.train.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"wiki\.train\.txt: not UTF-8 at byte {offset} "):
        check_text(path)


def test_an_empty_or_unreadable_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "wiki.train.txt").touch()
    with pytest.raises(DataError, match=r"wiki\.train\.txt: is empty"):
        check_text(tmp_path / "wiki.train.txt")
    with pytest.raises(DataError, match="cannot be read"):
        check_text(tmp_path / "gone.txt")


@pytest.mark.parametrize("piece", [2**20, 5, 1])
def test_reading_keeps_every_character(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(text, "_PIECE", piece)
    content = " = Title = \n \nä long€ line𝄞\r\nno newline at the end"
    (tmp_path / "a.txt").write_bytes(content.encode())
    pieces = list(read_text(tmp_path / "a.txt"))
    assert "".join(pieces) == content
    if piece == 2**20:
        assert pieces == content.splitlines(keepends=True)


def test_made_up_text_can_be_learned_and_repeats() -> None:
    said = smoke_text(300)
    assert said == smoke_text(300)
    assert said != smoke_text(300, seed=1)
    lines = said.splitlines()
    assert len(lines) == 300
    follow: dict[str, set[str]] = {}
    for line in lines + smoke_text(300, seed=1).splitlines():  # one language in both
        words = line.rstrip(".").split()
        for a, b in itertools.pairwise(words):
            follow.setdefault(a, set()).add(b)
    assert 190 <= len(follow) <= 200
    assert max(len(after) for after in follow.values()) == 4
