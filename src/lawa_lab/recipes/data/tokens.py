"""Text as token ids: a byte-level BPE trained on the training text, made once and kept.

`<cache>/<digest>/` holds `tokenizer.json` and the ids of each split as `{split}.npy`. The digest
is of the texts' contents, the vocabulary's size and the format, so a folder that was made on one
machine is found on another. A folder appears whole, by a rename, or not at all.
"""

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lawa_lab.recipes.data.text import check_text, read_text
from torch_lawa.checkpoints.storage.atomic import (
    clear_stale,
    publish,
    remove,
    sync_file,
    temporary_name,
)
from torch_lawa.errors import ConfigError, LawaError, OutputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["BOS", "EOS", "MASK", "SPECIAL_TOKENS", "TokenIds", "Tokens", "encode", "load_tokens"]

# RoBERTa's, in its order; ids below len(SPECIAL_TOKENS) are no ordinary tokens.
SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
BOS, EOS, MASK = (SPECIAL_TOKENS.index(token) for token in ("<s>", "</s>", "<mask>"))
_SMALLEST = len(SPECIAL_TOKENS) + 256  # and every byte
_FORMAT = 1  # raise it when the same text would give other ids
_BATCH = 2**22  # characters encoded at a time: the library's results take some 50 times as much

TokenIds: TypeAlias = npt.NDArray[np.uint16] | npt.NDArray[np.int32]


@dataclass(frozen=True)
class Tokens:
    """The ids of each split, mapped into memory, and how many tokens there are."""

    ids: Mapping[str, TokenIds]
    vocabulary: int
    """May be less than was asked for: a short text has few pairs to merge."""
    folder: Path


def load_tokens(files: Mapping[str, Path], vocabulary: int, *, cache: Path | None = None) -> Tokens:
    """The ids of every file, with a vocabulary made of `files["train"]`; from the cache if there.

    The cache is `.lawa-cache` beside the training text or, where that cannot be written, the
    user's cache folder. Processes that want the same tokens wait for the one that makes them.
    """
    if vocabulary < _SMALLEST:
        raise ConfigError(
            f"vocabulary={vocabulary}: must be at least {_SMALLEST}, {len(SPECIAL_TOKENS)} special "
            "tokens and one for every byte"
        )
    facts = {
        "format": _FORMAT,
        "vocabulary": vocabulary,
        "files": {split: check_text(path) for split, path in files.items()},
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    places = [cache] if cache else [files["train"].parent / ".lawa-cache", _user_cache()]
    for place in places:
        if found := _read(place / digest, files, vocabulary):
            return found
    refused = []
    for place in places:
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(_only_one(place))
            except OSError as error:
                refused.append(f"{place} ({error.strerror})")
                continue
            folder = place / digest
            if found := _read(folder, files, vocabulary):  # another process was faster
                return found
            if sys.stderr.isatty():  # a line rather than a bar: the loop may be showing its own
                print(
                    f"Making a vocabulary of {vocabulary:,} tokens from {files['train']} and "
                    f"keeping the ids in {folder}; 100 MB take about a minute.",
                    file=sys.stderr,
                )
            _make(folder, files, vocabulary)
            found = _read(folder, files, vocabulary)
            assert found is not None
            return found
    raise OutputError(
        f"token ids cannot be kept in {' or '.join(refused)}. Make one of them writable, or name "
        "another folder with the environment variable XDG_CACHE_HOME."
    )


def encode(tokenizer: "Tokenizer", pieces: Iterable[str]) -> TokenIds:
    """The ids of a text, its pieces one after the other."""
    # "<mask>" in a text is text: no reader can slip a special token in.
    tokenizer.encode_special_tokens = True
    dtype = _dtype(tokenizer.get_vocab_size())
    parts = [np.empty(0, dtype)]
    for batch in _batches(pieces):
        encoded = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        parts += [np.array(line.ids, dtype) for line in encoded]
    return np.concatenate(parts)


def _batches(pieces: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece)
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _dtype(vocabulary: int) -> Any:
    return np.uint16 if vocabulary <= 2**16 else np.int32


def _make(folder: Path, files: Mapping[str, Path], vocabulary: int) -> None:
    clear_stale(folder)
    temporary = temporary_name(folder)
    try:
        temporary.mkdir()
        tokenizer = _train(read_text(files["train"]), vocabulary)
        tokenizer.save(str(temporary / "tokenizer.json"))
        for split, path in files.items():
            np.save(temporary / f"{split}.npy", encode(tokenizer, read_text(path)))
        for written in temporary.iterdir():
            sync_file(written)
        publish(temporary, folder)
    except OSError as error:
        raise OutputError(
            f"{folder}: token ids cannot be written ({error}). Free some space, or make the text "
            "lie elsewhere."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            remove(temporary)


def _train(pieces: Iterator[str], vocabulary: int) -> "Tokenizer":
    library = _tokenizers()
    tokenizer: Tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(pieces, trainer)
    return tokenizer


def _read(folder: Path, files: Mapping[str, Path], vocabulary: int) -> Tokens | None:
    """What a folder holds; None where it is not there or is damaged, and must be made."""
    if not folder.is_dir():
        return None
    library = _tokenizers()
    try:
        text = (folder / "tokenizer.json").read_text(encoding="utf-8")
        size = library.Tokenizer.from_str(text).get_vocab_size()
        # Copy on write, because PyTorch warns of arrays that cannot be written.
        ids = {split: np.load(folder / f"{split}.npy", mmap_mode="c") for split in files}
    except Exception:  # the library raises nothing narrower
        return None
    sound = all(array.ndim == 1 and array.dtype == _dtype(size) for array in ids.values())
    return Tokens(ids, size, folder) if sound and size <= vocabulary else None


@contextlib.contextmanager
def _only_one(place: Path) -> Iterator[None]:
    """Wait until no other process makes tokens here. The lock goes with the process that has it."""
    place.mkdir(parents=True, exist_ok=True)
    lock = os.open(place / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with contextlib.suppress(ImportError):
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _user_cache() -> Path:
    named = os.environ.get("XDG_CACHE_HOME")
    return (Path(named) if named else Path.home() / ".cache") / "torch-lawa"


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise LawaError(
            f"the vocabulary is made with tokenizers, which could not be imported ({error}): "
            "pip install 'torch-lawa[roberta]'"
        ) from None
    return tokenizers
