"""Text of a language recipe: finding its files, checking them, and a synthetic text."""

import codecs
import hashlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch_lawa.errors import DataError

__all__ = ["WIKITEXT", "check_text", "find_text", "read_text", "smoke_text"]

_FOLDERS = (".", "wikitext-103", "wikitext-103-raw", "wikipedia")
_NAMES = ("wiki.{}.tokens", "wiki.{}.raw", "wiki.{}.txt", "{}.txt")
WIKITEXT = (
    "contains no WikiText-103 (wiki.train.tokens and wiki.valid.tokens; .raw and .txt work too). "
    "Download the data set of Merity et al. (2016), wikitext-103-raw-v1.zip or "
    "wikitext-103-v1.zip, or save the splits of Salesforce/wikitext (wikitext-103-raw-v1) from "
    "the Hugging Face Hub as wiki.train.txt and wiki.valid.txt. Put the files into this folder "
    "or its subfolder wikitext-103, or pass their folder with --data. Any other UTF-8 text of "
    "that name works."
)
_PIECE = 2**20  # bytes; longer lines are read in pieces


def find_text(
    folder: Path, splits: Sequence[str] = ("train", "valid"), *, missing: str = WIKITEXT
) -> dict[str, Path]:
    """The files of the splits, all of one kind and in one folder: this one or a usual subfolder.

    Kinds are `wiki.train.tokens` (WikiText-103 as published), `wiki.train.raw`, `wiki.train.txt`
    and `train.txt`; the first complete kind is used. Without one, an error says what is `missing`.
    """
    incomplete = ""
    for parent in (folder / name for name in _FOLDERS):
        for name in _NAMES:
            files = {split: parent / name.format(split) for split in splits}
            absent = [path for path in files.values() if not path.is_file()]
            if not absent:
                return files
            if len(absent) < len(files) and not incomplete:
                there = next(path for path in files.values() if path not in absent)
                incomplete = f" {there} exists, but {absent[0]} does not."
    raise DataError(f"{folder}: {missing}{incomplete}")


def check_text(path: Path) -> str:
    """The SHA-256 of a text file; refuses an empty file and one that is not UTF-8.

    A digest of the content instead of a time stamp: it is the same on another machine.
    """
    digest, decoder = hashlib.sha256(), codecs.getincrementaldecoder("utf-8")()
    num_read = 0
    try:
        with path.open("rb") as file:
            while True:
                piece = file.read(_PIECE)
                num_held = len(decoder.getstate()[0])  # the first bytes of a split character
                try:
                    decoder.decode(piece, final=not piece)
                except UnicodeDecodeError as error:
                    offset = num_read - num_held + error.start
                    raise DataError(
                        f"{path}: not UTF-8 at byte {offset:,} ({error.reason}). Convert the text "
                        "to UTF-8, or download the file again."
                    ) from None
                if not piece:
                    break
                digest.update(piece)
                num_read += len(piece)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error}).") from error
    if num_read == 0:
        raise DataError(f"{path}: is empty. Download the file again.")
    return digest.hexdigest()


def read_text(path: Path) -> Iterator[str]:
    """The lines of a file with their newlines; very long lines in pieces."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with path.open("rb") as file:
        while piece := file.readline(_PIECE):
            if text := decoder.decode(piece):
                yield text


def smoke_text(num_sentences: int, *, seed: int = 0) -> str:
    """Synthetic text with something to learn: each of 200 words has four possible successors.

    >>> smoke_text(2) == smoke_text(2), smoke_text(2).count(".")
    (True, 2)
    """
    grammar = random.Random(0)  # the same language for every seed
    syllables = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
    words = sorted({"".join(grammar.choices(syllables, k=2)) for _ in range(230)})[:200]
    followers = {word: grammar.sample(words, 4) for word in words}
    voice = random.Random(seed)
    lines = []
    for _ in range(num_sentences):
        line = [voice.choice(words)]
        while len(line) < 8:
            line += voice.choices(followers[line[-1]], weights=(70, 20, 7, 3))
        lines.append(" ".join(line) + ".\n")
    return "".join(lines)
