"""The recipe: batches follow from the seed and the step, evaluation from nothing but the text."""

import dataclasses
import itertools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import RobertaForMaskedLM

from lawa_lab.recipes.catalog.wikitext import WikiTextConfig
from lawa_lab.recipes.data.text import find_text, smoke_text
from lawa_lab.recipes.data.tokens import SPECIAL_TOKENS, Tokens, load_tokens
from lawa_lab.recipes.task import Worker
from lawa_lab.recipes.tasks.masked_language import MaskedLanguageTask
from lawa_lab.recipes.tasks.masking import IGNORED
from torch_lawa.errors import ConfigError, DataError, LawaError

CONFIG = dataclasses.replace(
    WikiTextConfig().smoke(), batch_size=6, width=32, depth=1, sequence_length=18, vocabulary=300
)
NUM_TRAIN, NUM_VALID = 21, 11


def make(seed: int = 0, worker: Worker | None = None, **changes: object) -> MaskedLanguageTask:
    """On 21 sequences to train on and 11 held out, of 16 tokens each and no two alike."""
    draw = np.random.default_rng(0)
    ids = {
        split: draw.integers(5, 280, 16 * number + 7).astype(np.uint16)
        for split, number in (("train", NUM_TRAIN), ("valid", NUM_VALID))
    }
    config = dataclasses.replace(CONFIG, **changes)  # type: ignore[arg-type]
    return MaskedLanguageTask(
        config, Tokens(ids, 280, Path()), seed=seed, worker=worker or Worker()
    )


def truth(batch: tuple[Tensor, Tensor]) -> list[list[int]]:
    """The sequences of a batch as they were."""
    inputs, labels = batch
    return torch.where(labels == IGNORED, inputs, labels).tolist()


def same(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_a_run_that_goes_on_has_the_batches_it_would_have_had(first: int) -> None:
    task = make()
    assert task.num_batches == 3
    for epoch in (0, 4):
        whole, rest = list(task.batches(epoch)), list(make().batches(epoch, first))
        assert len(whole) == 3
        assert len(rest) == 3 - first
        assert all(same(a, b) for a, b in zip(whole[first:], rest, strict=True))


def test_an_epoch_has_every_sequence_at_most_once_in_an_order_of_its_own() -> None:
    task = make()
    [whole] = make(batch_size=NUM_TRAIN).batches(0)
    every = {tuple(row) for row in truth(whole)}
    assert len(every) == NUM_TRAIN
    orders = []
    for epoch in range(3):
        rows = [tuple(row) for batch in task.batches(epoch) for row in truth(batch)]
        assert len(set(rows)) == 18
        assert set(rows) <= every
        orders.append(rows)
    assert all(a != b for a, b in itertools.pairwise(orders))
    assert [tuple(row) for batch in make(seed=1).batches(0) for row in truth(batch)] != orders[0]


def test_every_step_is_masked_anew() -> None:
    task = make(batch_size=NUM_TRAIN)
    [first], [second] = task.batches(0), task.batches(1)
    masks = [dict(zip(map(tuple, truth(b)), b[1].tolist(), strict=True)) for b in (first, second)]
    assert sum(masks[0][row] == masks[1][row] for row in masks[0]) < 5
    chosen = first[1] != IGNORED
    assert (chosen.sum(1) == 2).all()  # 15 % of 16
    assert not torch.equal(chosen, second[1] != IGNORED)


def test_strangers_are_tokens_that_there_are() -> None:
    task = make(batch_size=NUM_TRAIN, mask_fraction=0.9, vocabulary=3000)
    highest = max(int(inputs.max()) for epoch in range(20) for inputs, _ in task.batches(epoch))
    assert highest == 279


def test_two_processes_share_each_batch() -> None:
    whole = list(make().batches(2))
    parts = [list(make(worker=Worker(rank=rank, world_size=2)).batches(2)) for rank in (0, 1)]
    for number, batch in enumerate(whole):
        assert truth(parts[0][number]) + truth(parts[1][number]) == truth(batch)
        masks = [part[number][1] != IGNORED for part in parts]
        assert not torch.equal(*masks)  # each draws its own


def test_the_loss_is_transformers() -> None:
    task = make()
    model = task.build_model().eval()
    other = RobertaForMaskedLM(model.config).eval()  # type: ignore[arg-type]
    other.load_state_dict(model.state_dict())
    inputs, labels = batch = next(task.batches(0))
    expected = other(inputs, labels=labels).loss
    torch.testing.assert_close(task.loss(model, batch), expected, rtol=1e-6, atol=1e-6)
    assert task.loss(model, batch).dtype == torch.float32
    assert task.calibration() == []


def test_half_precision_is_left_before_the_loss() -> None:
    task = make()
    model = task.build_model().eval()
    batch = next(task.batches(0))
    with torch.autocast("cpu", torch.bfloat16):
        loss = task.loss(model, batch)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, task.loss(model, batch), rtol=0.02, atol=0.0)


class Seen(nn.Module):
    """Notes every batch that a model is given."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.batches: list[tuple[Tensor, Tensor]] = []

    def forward(self, inputs: Tensor, labels: Tensor, *, per_token: bool = False) -> object:
        self.batches.append((inputs, labels))
        return self.model(inputs, labels, per_token=per_token)


@pytest.mark.parametrize("size", [64, 4, 1])
def test_evaluation_is_that_of_a_plain_loop(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MaskedLanguageTask, "evaluated_at_once", size * 18 + 17)
    task = make()
    model = Seen(task.build_model().eval())
    with torch.no_grad():
        found = task.evaluate(model)
    other = RobertaForMaskedLM(model.model.config).eval()  # type: ignore[arg-type]
    other.load_state_dict(model.model.state_dict())
    rows, losses, hits = [], [], []
    for inputs, labels in model.batches:
        assert len(inputs) == min(size, NUM_VALID)
        for row, wanted in zip(inputs, labels, strict=True):
            if (wanted == IGNORED).all():
                continue
            rows.append(tuple(torch.where(wanted == IGNORED, row, wanted).tolist()))
            with torch.no_grad():
                scores = other(row.unsqueeze(0)).logits[0].double()
            for position in (wanted != IGNORED).nonzero().flatten().tolist():
                losses.append(-torch.log_softmax(scores[position], 0)[wanted[position]].item())
                hits.append(int(scores[position].argmax() == wanted[position]))
    assert len(rows) == len(set(rows)) == NUM_VALID  # all of it, once
    assert len(losses) == 2 * NUM_VALID
    assert found["valid_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    assert found["valid_accuracy"] == sum(hits) / len(hits)
    assert set(found) == {"valid_loss", "valid_accuracy"}


def test_evaluation_does_not_depend_on_the_run() -> None:
    model = make().build_model().eval()
    with torch.no_grad():
        first = make().evaluate(model)
        assert make(seed=7).evaluate(model) == first
        task = make()
        list(task.batches(1))
        torch.manual_seed(99)
        assert task.evaluate(model) == first
        assert task.evaluate(model) == first


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_processes_together_evaluate_what_one_does(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MaskedLanguageTask, "evaluated_at_once", 54)  # 4 batches, the last of 2
    model = Seen(make().build_model().eval())
    with torch.no_grad():
        whole = make().evaluate(model)
    sums: list[list[float]] = []

    class Part(Worker):
        def total(self, values, where):  # type: ignore[no-untyped-def]
            sums.append(list(values))
            return [sum(column) for column in zip(*sums, strict=True)]

    counts = []
    for rank in range(world_size):
        before = len(model.batches)
        with torch.no_grad():
            last = make(worker=Part(rank=rank, world_size=world_size)).evaluate(model)
        counts.append(len(model.batches) - before)
    assert last == pytest.approx(whole, rel=1e-12)
    assert len(set(counts)) == 1  # a model may wait for the others in every call
    assert sum(part[2] for part in sums) == 2 * NUM_VALID


def test_a_smoke_run_learns_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    task = WikiTextConfig().smoke().make_task(None, seed=0, worker=Worker(), smoke=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["temporary"]
    model = task.build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for batch in task.batches(0):
        optimizer.zero_grad()
        torch.autograd.backward(task.loss(model, batch))
        optimizer.step()
    with torch.no_grad():
        loss = task.evaluate(model.eval())["valid_loss"]
    assert 20 <= task.num_batches <= 60  # seconds
    assert loss < 5.3  # below log 400 = 5.99 by far


def test_text_of_a_folder_is_used_and_its_tokens_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data" / "wikitext-103"
    folder.mkdir(parents=True)
    (folder / "wiki.train.tokens").write_text(smoke_text(50))
    (folder / "wiki.valid.tokens").write_text(smoke_text(20, seed=1))
    monkeypatch.chdir(tmp_path)
    tasks = [
        CONFIG.make_task(data, seed=0, worker=Worker(), smoke=False)
        for data in (None, tmp_path / "data", folder)
    ]
    assert same(next(tasks[0].batches(0)), next(tasks[1].batches(0)))
    assert same(next(tasks[0].batches(0)), next(tasks[2].batches(0)))
    [made] = [path for path in (folder / ".lawa-cache").iterdir() if path.is_dir()]
    ids = np.load(made / "train.npy")
    assert len(ids) // 16 // CONFIG.batch_size == tasks[0].num_batches
    rows = {tuple(row) for row in ids[: len(ids) // 16 * 16].reshape(-1, 16).tolist()}
    assert {tuple(row[1:-1]) for batch in tasks[0].batches(0) for row in truth(batch)} <= rows


def test_mistakes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="Merity"):
        CONFIG.make_task(tmp_path, seed=0, worker=Worker(), smoke=False)
    with pytest.raises(DataError, match=r"21 sequences of 18 tokens .* one step needs 22"):
        make(batch_size=22)
    with pytest.raises(DataError, match="0 for validation"):
        make(sequence_length=200, batch_size=1)
    for name, value in (
        ("width", 200),
        ("sequence_length", 3),
        ("vocabulary", 260),
        ("mask_fraction", 1.0),
        ("mask_fraction", 0.0),
    ):
        with pytest.raises(ConfigError, match=f"{name}={value}"):
            dataclasses.replace(CONFIG, **{name: value})
    task = make()
    monkeypatch.delitem(sys.modules, "lawa_lab.recipes.models.roberta")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(LawaError, match=r"pip install 'torch-lawa\[roberta\]'"):
        task.build_model()


@pytest.mark.data
def test_real_text(data_set: Callable[[str], Path], tmp_path: Path) -> None:
    """The whole text as the paper's vocabulary sees it; a minute."""
    for path in find_text(data_set("wikipedia").parent).values():
        (tmp_path / path.name).symlink_to(path.resolve())  # so that tokens are kept elsewhere
    config = dataclasses.replace(CONFIG, vocabulary=50_265, batch_size=64, sequence_length=512)
    task = config.make_task(tmp_path, seed=0, worker=Worker(), smoke=False)
    [made] = [path for path in (tmp_path / ".lawa-cache").iterdir() if path.is_dir()]
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 50_265
    text = find_text(tmp_path)["valid"].read_bytes().decode()
    ids = np.load(made / "valid.npy")
    assert tokenizer.decode(ids.tolist()) == text
    assert 4.0 < len(text) / len(ids) < 5.0  # characters to a token, in English
    inputs, labels = next(task.batches(0))
    assert inputs.shape == (64, 512)
    assert ((labels != IGNORED).sum(1) == 76).all()


@pytest.mark.data
def test_real_wikitext(data_set: Callable[[str], Path], tmp_path: Path) -> None:
    """WikiText-103's own files: its `<unk>` is text like any other."""
    folder = data_set("wikitext-103")
    files = {"train": folder / "wiki.test.tokens", "valid": folder / "wiki.valid.tokens"}
    tokens = load_tokens(files, 2000, cache=tmp_path)
    tokenizer = Tokenizer.from_file(str(tokens.folder / "tokenizer.json"))
    ids = tokens.ids["valid"]
    assert ids.min() >= len(SPECIAL_TOKENS)
    assert tokenizer.decode(ids.tolist()) == files["valid"].read_bytes().decode()
