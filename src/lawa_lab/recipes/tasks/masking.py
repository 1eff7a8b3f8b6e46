"""Dynamic masking, as of BERT and RoBERTa: which tokens are to be predicted, and what hides them.

Ours: every sequence has exactly `mask_fraction` of its ordinary tokens to predict, rounded, as in
BERT's code; fairseq rounds up or down at random, and others flip a coin for every token. Batches
then have one shape, which a compiled model needs, and the mean of the means of equal parts of a
batch is the mean of the batch.
"""

import torch
from torch import Tensor

from lawa_lab.recipes.data.tokens import MASK, SPECIAL_TOKENS

__all__ = ["IGNORED", "mask_tokens", "num_masked"]

IGNORED = -100  # the label that cross entropy passes over


def num_masked(sequence_length: int, mask_fraction: float) -> int:
    """How many tokens of each sequence are to be predicted: at least one.

    >>> num_masked(512, 0.15)
    76
    """
    return max(1, round(mask_fraction * (sequence_length - 2)))


def mask_tokens(
    ids: Tensor, num_chosen: int, vocabulary: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """What the model sees of each sequence, and labels: true ids at chosen places.

    Of the ordinary tokens in a row (no special ones) `num_chosen` are chosen, each set of them
    equally likely. 80 % become `<mask>`, 10 % an ordinary token drawn from the vocabulary, and
    10 % stay. The same generator gives the same masking on a device.
    """
    ordinary = ids >= len(SPECIAL_TOKENS)
    draws = torch.rand(ids.shape, device=ids.device, generator=generator)
    # Stable, so that equal draws do not make two runs differ.
    order = draws.masked_fill(~ordinary, 2.0).argsort(dim=1, stable=True)
    chosen = (order.argsort(dim=1) < num_chosen) & ordinary
    fate = torch.rand(ids.shape, device=ids.device, generator=generator)
    strangers = torch.randint(
        len(SPECIAL_TOKENS), vocabulary, ids.shape, device=ids.device, generator=generator
    )
    inputs = ids.masked_fill(chosen & (fate < 0.8), MASK)
    inputs = torch.where(chosen & (fate >= 0.8) & (fate < 0.9), strangers, inputs)
    return inputs, ids.masked_fill(~chosen, IGNORED)
