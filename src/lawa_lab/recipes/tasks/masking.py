"""Dynamic masking as in BERT and RoBERTa: which tokens are predicted, and what replaces them.

Ours: in every sequence exactly `mask_fraction` of the ordinary tokens (rounded) are predicted, as
in BERT's code; fairseq rounds up or down at random, and others draw each token independently.
Batches then have a fixed shape, which a compiled model needs, and the mean over micro-batches of
equal size is the mean of the batch.
"""

import torch
from torch import Tensor

from lawa_lab.recipes.data.tokens import MASK, SPECIAL_TOKENS

__all__ = ["IGNORED", "mask_tokens", "num_masked"]

IGNORED = -100  # the label that cross-entropy ignores


def num_masked(sequence_length: int, mask_fraction: float) -> int:
    """The number of tokens to predict in each sequence, at least one.

    >>> num_masked(512, 0.15)
    76
    """
    return max(1, round(mask_fraction * (sequence_length - 2)))


def mask_tokens(
    ids: Tensor, num_chosen: int, vocabulary: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Model inputs and labels: the true ids at the chosen positions, ignored elsewhere.

    In each row, `num_chosen` ordinary (not special) tokens are chosen uniformly at random. 80 % of
    them become `<mask>`, 10 % a random ordinary token, and 10 % are unchanged. The same generator
    gives the same masks on the same device.
    """
    ordinary = ids >= len(SPECIAL_TOKENS)
    draws = torch.rand(ids.shape, device=ids.device, generator=generator)
    # Stable, so that ties do not make two runs differ.
    order = draws.masked_fill(~ordinary, 2.0).argsort(dim=1, stable=True)
    chosen = (order.argsort(dim=1) < num_chosen) & ordinary
    fate = torch.rand(ids.shape, device=ids.device, generator=generator)
    strangers = torch.randint(
        len(SPECIAL_TOKENS), vocabulary, ids.shape, device=ids.device, generator=generator
    )
    inputs = ids.masked_fill(chosen & (fate < 0.8), MASK)
    inputs = torch.where(chosen & (fate >= 0.8) & (fate < 0.9), strangers, inputs)
    return inputs, ids.masked_fill(~chosen, IGNORED)
