"""Text as token ids: a byte-level BPE trained on the training text, and a cache of the ids.

`<cache>/<digest>/` contains `tokenizer.json` and the ids of each split as `{split}.npy`. The digest
covers the contents of the texts, the vocabulary size and the format, so a cache made on one machine
is valid on another. A folder appears complete, by a rename, or not at all.
"""

import contextlib
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lawa_lab.recipes.data.text import check_text, read_text, smoke_text
from torch_lawa.checkpoints.storage.atomic import (
    publish,
    staging,
    sync_file,
)
from torch_lawa.errors import ConfigError, LawaError, OutputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = [
    "BOS",
    "EOS",
    "MASK",
    "SPECIAL_TOKENS",
    "TokenIds",
    "Tokens",
    "encode",
    "load_smoke_tokens",
    "load_tokens",
]

# RoBERTa's, in its order; ids below len(SPECIAL_TOKENS) are special tokens.
SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
BOS, EOS, MASK = (SPECIAL_TOKENS.index(token) for token in ("<s>", "</s>", "<mask>"))
_SMALLEST = len(SPECIAL_TOKENS) + 256  # one token per byte
_FORMAT = 1  # increment it when the same text would give different ids
_BATCH = 2**22  # characters per batch: the library's results take about 50 times the memory

TokenIds: TypeAlias = npt.NDArray[np.uint16] | npt.NDArray[np.int32]


@dataclass(frozen=True)
class Tokens:
    """The memory-mapped ids of each split, and the vocabulary size."""

    ids: Mapping[str, TokenIds]
    vocabulary: int
    """May be smaller than requested: a short text has few pairs to merge."""
    folder: Path


def load_tokens(files: Mapping[str, Path], vocabulary: int, *, cache: Path | None = None) -> Tokens:
    """The ids of every file, with a vocabulary trained on `files["train"]`; cached.

    The cache is `.lawa-cache` beside the training text or, if that is not writable, the user's
    cache folder. Processes that need the same tokens wait for the one that makes them.
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
    caches = [cache] if cache else [files["train"].parent / ".lawa-cache", _user_cache()]
    for root in caches:
        if found := _read(root / digest, files, vocabulary):
            return found
    refused = []
    for root in caches:
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(_only_one(root))
            except OSError as error:
                refused.append(f"{root} ({error.strerror})")
                continue
            folder = root / digest
            if found := _read(folder, files, vocabulary):  # another process was faster
                return found
            if sys.stderr.isatty():  # a line, because the caller may show a progress bar
                print(
                    f"Training a vocabulary of {vocabulary:,} tokens on {files['train']} and "
                    f"caching the ids in {folder}; 100 MB take about a minute.",
                    file=sys.stderr,
                )
            _make(folder, files, vocabulary)
            found = _read(folder, files, vocabulary)
            assert found is not None
            return found
    raise OutputError(
        f"token ids cannot be cached in {' or '.join(refused)}. Make one of them writable, or set "
        "the environment variable XDG_CACHE_HOME to another folder."
    )


def load_smoke_tokens(vocabulary: int) -> Tokens:
    """The ids of a short synthetic text, for a smoke run."""
    with tempfile.TemporaryDirectory(prefix="lawa-smoke-") as folder:
        files = {split: Path(folder, f"{split}.txt") for split in ("train", "valid")}
        for number, path in enumerate(files.values()):
            path.write_text(smoke_text(400 if number == 0 else 60, seed=number), encoding="utf-8")
        tokens = load_tokens(files, vocabulary, cache=Path(folder, "cache"))
        # The arrays are mapped from files that are deleted now.
        kept = {split: ids.copy() for split, ids in tokens.ids.items()}
    return Tokens(kept, tokens.vocabulary, tokens.folder)


def encode(tokenizer: "Tokenizer", pieces: Iterable[str]) -> TokenIds:
    """The ids of a text given in pieces."""
    # "<mask>" in a text is encoded as text, not as the special token.
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
    try:
        with staging(folder) as made:
            tokenizer = _train(read_text(files["train"]), vocabulary)
            tokenizer.save(str(made / "tokenizer.json"))
            for split, path in files.items():
                np.save(made / f"{split}.npy", encode(tokenizer, read_text(path)))
            for written in made.iterdir():
                sync_file(written)
            publish(made, folder)
    except OSError as error:
        raise OutputError(
            f"{folder}: token ids cannot be written ({error}). Free some space, or move the "
            "text elsewhere."
        ) from error


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
    """The contents of a cache folder; None if it is missing or damaged."""
    if not folder.is_dir():
        return None
    library = _tokenizers()
    try:
        text = (folder / "tokenizer.json").read_text(encoding="utf-8")
        size = library.Tokenizer.from_str(text).get_vocab_size()
        # Copy on write, because PyTorch warns about read-only arrays.
        ids = {split: np.load(folder / f"{split}.npy", mmap_mode="c") for split in files}
    except Exception:  # the library raises nothing more specific
        return None
    sound = all(array.ndim == 1 and array.dtype == _dtype(size) for array in ids.values())
    return Tokens(ids, size, folder) if sound and size <= vocabulary else None


@contextlib.contextmanager
def _only_one(root: Path) -> Iterator[None]:
    """Wait until no other process makes tokens here; the lock ends with its process."""
    root.mkdir(parents=True, exist_ok=True)
    lock = os.open(root / "lock", os.O_RDWR | os.O_CREAT, 0o644)
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
            f"the vocabulary is trained with tokenizers, which could not be imported ({error}): "
            "pip install 'torch-lawa[roberta]'"
        ) from None
    return tokenizers
