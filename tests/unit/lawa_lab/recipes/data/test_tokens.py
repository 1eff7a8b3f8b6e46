"""Token ids: what they say, that they are made once, and never half."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from lawa_lab.recipes.data import tokens as module
from lawa_lab.recipes.data.text import smoke_text
from lawa_lab.recipes.data.tokens import SPECIAL_TOKENS, encode, load_tokens
from torch_lawa.errors import ConfigError, DataError, LawaError, OutputError


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    found = {split: tmp_path / "text" / f"{split}.txt" for split in ("train", "valid")}
    found["train"].parent.mkdir()
    for number, path in enumerate(found.values()):
        path.write_text(smoke_text(60, seed=number))
    return found


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The vocabulary of every training."""
    sizes: list[int] = []
    train = module._train

    def counted(pieces, vocabulary):  # type: ignore[no-untyped-def]
        sizes.append(vocabulary)
        return train(pieces, vocabulary)

    monkeypatch.setattr(module, "_train", counted)
    return sizes


def test_ids_give_the_text_back(files: dict[str, Path]) -> None:
    # Bytes that the training text has not, a line that is empty, special tokens as text.
    files["valid"].write_text("Ünïcödé \u4e16 <mask> and </s>\n\n  <pad>x\r\nend")
    tokens = load_tokens(files, 300)
    assert tokens.vocabulary == 300
    tokenizer = Tokenizer.from_file(str(tokens.folder / "tokenizer.json"))
    for split, path in files.items():
        ids = tokens.ids[split]
        assert ids.dtype == np.uint16
        assert ids.min() >= len(SPECIAL_TOKENS)
        assert tokenizer.decode(ids.tolist()) == path.read_bytes().decode()
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2, 3, 4]
    assert SPECIAL_TOKENS == ("<s>", "<pad>", "</s>", "<unk>", "<mask>")


def test_merges_shorten_the_training_text(files: dict[str, Path]) -> None:
    num_bytes = files["train"].stat().st_size
    sizes = [len(load_tokens(files, size).ids["train"]) for size in (261, 300, 400)]
    assert num_bytes == sizes[0] > sizes[1] > sizes[2]


def test_a_large_vocabulary_takes_four_bytes_and_a_short_text_does_not_fill_it(
    files: dict[str, Path],
) -> None:
    assert load_tokens(files, 70_000).vocabulary < 2_000
    assert module._dtype(2**16) == np.uint16
    assert module._dtype(2**16 + 1) == np.int32


def test_batches_of_lines_make_no_difference(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = load_tokens(files, 320)
    tokenizer = Tokenizer.from_file(str(tokens.folder / "tokenizer.json"))
    lines = files["train"].read_text().splitlines(keepends=True)
    reference = [i for line in lines for i in tokenizer.encode(line, add_special_tokens=False).ids]
    assert tokens.ids["train"].tolist() == reference
    monkeypatch.setattr(module, "_BATCH", 100)
    assert encode(tokenizer, iter(lines)).tolist() == reference


def test_the_same_text_gives_the_same_ids_whatever_the_threads(
    files: dict[str, Path], tmp_path: Path
) -> None:
    made = []
    for number, parallel in enumerate(("true", "false")):
        code = (
            "import sys; from pathlib import Path\n"
            "from lawa_lab.recipes.data.tokens import load_tokens\n"
            "files = {'train': Path(sys.argv[1]), 'valid': Path(sys.argv[2])}\n"
            "print(load_tokens(files, 500, cache=Path(sys.argv[3])).folder)"
        )
        arguments = [*map(str, files.values()), str(tmp_path / f"cache-{number}")]
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env={**os.environ, "TOKENIZERS_PARALLELISM": parallel},
            check=True,
            capture_output=True,
            text=True,
        )
        folder = Path(done.stdout.strip())
        made.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert sorted(made[0]) == ["tokenizer.json", "train.npy", "valid.npy"]
    assert made[0] == made[1]


def test_made_once_and_again_when_anything_changes(
    files: dict[str, Path], trained: list[int]
) -> None:
    first = load_tokens(files, 300)
    again = load_tokens(files, 300)
    assert trained == [300]
    assert isinstance(again.ids["train"], np.memmap)
    assert np.array_equal(first.ids["train"], again.ids["train"])
    os.utime(files["train"], (0, 0))  # a copy of the same text is the same text
    assert load_tokens(files, 300).folder == first.folder
    assert trained == [300]
    load_tokens(files, 310)
    assert trained == [300, 310]
    files["valid"].write_text(smoke_text(5, seed=2))
    load_tokens(files, 300)
    files["train"].write_text(smoke_text(60, seed=3))
    changed = load_tokens(files, 300)
    assert trained == [300, 310, 300, 300]
    assert not np.array_equal(first.ids["train"], changed.ids["train"])


@pytest.mark.parametrize("name", ["tokenizer.json", "train.npy", "valid.npy"])
@pytest.mark.parametrize("damage", ["gone", "short", "other"])
def test_a_damaged_folder_is_made_anew(
    files: dict[str, Path], trained: list[int], name: str, damage: str
) -> None:
    tokens = load_tokens(files, 300)
    before = tokens.ids["train"].tolist()
    path = tokens.folder / name
    if damage == "gone":
        path.unlink()
    elif damage == "short":
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content[:-5])
    elif name == "tokenizer.json":
        path.write_text("{}")
    else:
        path.unlink()
        np.save(path, np.zeros(3))
    assert load_tokens(files, 300).ids["train"].tolist() == before
    assert trained == [300, 300]
    assert load_tokens(files, 300).ids["train"].tolist() == before
    assert trained == [300, 300]


def test_a_killed_process_leaves_nothing_that_passes_for_whole(
    files: dict[str, Path], tmp_path: Path, trained: list[int]
) -> None:
    cache = tmp_path / "cache"
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from lawa_lab.recipes.data import tokens\n"
        "save = tokens.np.save\n"
        "def once(path, ids):\n"
        "    if 'valid' in str(path): os.kill(os.getpid(), signal.SIGKILL)\n"
        "    save(path, ids)\n"
        "tokens.np.save = once\n"
        "files = {'train': Path(sys.argv[1]), 'valid': Path(sys.argv[2])}\n"
        "tokens.load_tokens(files, 300, cache=Path(sys.argv[3]))"
    )
    done = subprocess.run([sys.executable, "-c", code, *map(str, files.values()), str(cache)])
    assert done.returncode == -signal.SIGKILL
    [partial] = [path for path in cache.iterdir() if path.is_dir()]
    assert (partial / "new" / "train.npy").is_file()
    tokens = load_tokens(files, 300, cache=cache)
    assert trained == [300]
    assert [path for path in cache.iterdir() if path.is_dir()] == [tokens.folder]


def test_a_full_disk_says_so_and_leaves_nothing(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, ids: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.np, "save", full)
    with pytest.raises(OutputError, match="No space left"):
        load_tokens(files, 300)
    cache = files["train"].parent / ".lawa-cache"
    assert [path.name for path in cache.iterdir()] == ["lock"]


def test_where_the_text_cannot_be_written_the_users_cache_is_used(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: list[int]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert load_tokens(files, 300).folder.parent == files["train"].parent / ".lawa-cache"
    blocked = files["train"].parent / ".lawa-cache"
    blocked.rename(tmp_path / "away")
    blocked.touch()  # refuses a folder even to root
    tokens = load_tokens(files, 300)
    assert tokens.folder.parent == tmp_path / "home" / "torch-lawa"
    load_tokens(files, 300)
    assert trained == [300, 300]
    (tmp_path / "home" / "torch-lawa").rename(tmp_path / "home" / "gone")
    (tmp_path / "home" / "torch-lawa").touch()
    with pytest.raises(OutputError, match="XDG_CACHE_HOME"):
        load_tokens(files, 300)


def test_the_users_cache_is_in_the_usual_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert module._user_cache() == tmp_path / ".cache" / "torch-lawa"


@pytest.mark.slow
def test_processes_wait_for_the_one_that_makes_them(files: dict[str, Path]) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from lawa_lab.recipes.data import tokens\n"
        "train = tokens._train\n"
        "def slow(pieces, vocabulary):\n"
        "    print('trained', flush=True); time.sleep(1.0); return train(pieces, vocabulary)\n"
        "tokens._train = slow\n"
        "files = {'train': Path(sys.argv[1]), 'valid': Path(sys.argv[2])}\n"
        "print(len(tokens.load_tokens(files, 300).ids['train']))"
    )
    command = [sys.executable, "-c", code, *map(str, files.values())]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate()[0].split() for process in running]
    assert sorted(len(words) for words in said) == [1, 1, 2]
    assert len({words[-1] for words in said}) == 1


def test_mistakes_are_named(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="vocabulary=260: must be at least 261"):
        load_tokens(files, 260)
    files["valid"].write_bytes(b"abc\xff")
    with pytest.raises(DataError, match=r"valid\.txt: not UTF-8 at byte 3"):
        load_tokens(files, 300)
    files["valid"].write_text("fine")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(LawaError, match=r"pip install 'torch-lawa\[roberta\]'"):
        load_tokens(files, 300)
