"""Masking: how many, which, what becomes of them, and the same again from the same generator."""

import math

import pytest
import torch
from torch import Tensor

from lawa_lab.recipes.data.tokens import MASK
from lawa_lab.recipes.task import seeded
from lawa_lab.recipes.tasks.masking import IGNORED, mask_tokens, num_masked

CPU = torch.device("cpu")
VOCABULARY = 1000


def sequences(num_rows: int, length: int) -> Tensor:
    ids = torch.randint(5, VOCABULARY, (num_rows, length))
    ids[:, 0], ids[:, -1] = 0, 2
    return ids


def test_the_number_of_a_sequence_is_fixed() -> None:
    assert num_masked(512, 0.15) == 76
    assert num_masked(128, 0.15) == 19
    assert num_masked(32, 0.15) == 4
    assert num_masked(4, 0.01) == 1
    assert num_masked(12, 0.99) == 10


@pytest.mark.parametrize("num_chosen", [1, 19, 126])
def test_labels_are_the_true_ids_at_chosen_places(num_chosen: int) -> None:
    ids = sequences(50, 128)
    kept = ids.clone()
    inputs, labels = mask_tokens(ids, num_chosen, VOCABULARY, seeded(CPU, 1))
    chosen = labels != IGNORED
    assert torch.equal(ids, kept)
    assert (chosen.sum(1) == num_chosen).all()
    assert torch.equal(labels[chosen], ids[chosen])
    assert torch.equal(inputs[~chosen], ids[~chosen])
    assert not chosen[:, [0, -1]].any()
    assert inputs.dtype == labels.dtype == torch.int64


def test_eight_in_ten_are_hidden_one_is_another_one_stays() -> None:
    ids = sequences(800, 512)
    inputs, labels = mask_tokens(ids, 76, VOCABULARY, seeded(CPU, 2))
    chosen = labels != IGNORED
    num_chosen = 800 * 76
    assert int(chosen.sum()) == num_chosen
    seen, true = inputs[chosen], ids[chosen]
    hidden, same = seen == MASK, seen == true
    other = ~hidden & ~same
    # A token drawn at random is the true one in 1 of 995 cases.
    lucky = 0.1 / (VOCABULARY - 5)
    for found, share in ((hidden, 0.8), (same, 0.1 + lucky), (other, 0.1 - lucky)):
        deviation = math.sqrt(share * (1 - share) * num_chosen)
        assert abs(int(found.sum()) - share * num_chosen) < 4 * deviation
    # Strangers are ordinary tokens, all of them about equally often.
    assert int(seen[other].min()) == 5
    assert int(seen[other].max()) == VOCABULARY - 1
    counts = torch.bincount(seen[other], minlength=VOCABULARY)[5:].double()
    assert float(((counts - counts.mean()) ** 2).sum() / counts.mean()) < 995 + 5 * 45
    # And every position of a sequence is chosen about equally often.
    per_place = chosen.sum(0)[1:-1].double()
    expected = 800 * 76 / 510
    assert float((per_place - expected).abs().max()) < 5 * math.sqrt(expected)


def test_special_tokens_are_never_chosen_even_if_little_else_is_there() -> None:
    ids = torch.tensor([[0, 3, 700, 1, 4, 2], [0, 10, 11, 12, 13, 2], [0, 1, 1, 1, 1, 2]])
    inputs, labels = mask_tokens(ids, 3, VOCABULARY, seeded(CPU, 3))
    assert labels[0].tolist() == [IGNORED, IGNORED, 700, IGNORED, IGNORED, IGNORED]
    assert (labels[1] != IGNORED).sum() == 3
    assert (labels[2] == IGNORED).all()
    assert torch.equal(inputs[2], ids[2])


def test_the_same_generator_gives_the_same_masking_and_another_another() -> None:
    ids = sequences(20, 64)
    first, again, other = (
        mask_tokens(ids, 9, VOCABULARY, seeded(CPU, *numbers)) for numbers in ((1, 2), (1, 2), (2,))
    )
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[1], other[1])


def test_rows_are_masked_independently_of_their_tokens() -> None:
    a, b = sequences(20, 64), sequences(20, 64)
    chosen = [mask_tokens(ids, 9, VOCABULARY, seeded(CPU, 1))[1] != IGNORED for ids in (a, b)]
    assert torch.equal(*chosen)
    assert len({tuple(row) for row in chosen[0].tolist()}) == 20
