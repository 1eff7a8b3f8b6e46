"""RoBERTa for masked-language modelling: transformers' model, its head on masked tokens only."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import RobertaConfig, RobertaForMaskedLM

from lawa_lab.recipes.data.tokens import BOS, EOS, SPECIAL_TOKENS
from lawa_lab.recipes.tasks.masking import IGNORED

__all__ = ["SparseRobertaForMaskedLM", "roberta"]


class _OnlyRow(nn.Embedding):
    """An embedding of one row, expanded instead of looked up.

    Its gradient is then one sum over all tokens; the deterministic gradient of a lookup adds up
    token by token, which is slow.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__(weight.shape[0], weight.shape[1], _weight=weight)
        self.weight = weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight.expand(*ids.shape, -1)


class SparseRobertaForMaskedLM(RobertaForMaskedLM):  # type: ignore[no-untyped-call]
    """Predicts `num_chosen` tokens of each sequence and no others.

    The head is a large part of the computation, and 85 % of its outputs would be discarded.
    Parameters keep transformers' names, so the weights load into a plain `RobertaForMaskedLM`.
    """

    def __init__(self, config: RobertaConfig, num_chosen: int) -> None:
        super().__init__(config)  # type: ignore[no-untyped-call]
        self.num_chosen = num_chosen
        embeddings: Any = self.roberta.embeddings
        embeddings.token_type_embeddings = _OnlyRow(embeddings.token_type_embeddings.weight)

    def forward(
        self, input_ids: Tensor, labels: Tensor, *, per_token: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The mean loss; `per_token`: the loss of each predicted token and whether it is right.

        A row of `labels` has at most `num_chosen` labels that are not ignored, so shapes are fixed.
        Missing ones do not count: their loss is 0, and they are never right.
        """
        # Not through `self.roberta`: compiled, some versions create a mask that hides nothing,
        # and attention with a mask is slower and takes more memory.
        hidden = self.roberta.encoder(self.roberta.embeddings(input_ids)).last_hidden_state
        ignored = (labels == IGNORED).int()
        positions = ignored.argsort(dim=1, stable=True)[:, : self.num_chosen]
        rows = torch.arange(len(labels), device=labels.device).unsqueeze(1)
        logits = self.lm_head(hidden[rows, positions].flatten(0, 1)).float()
        targets = labels[rows, positions].flatten()
        if not per_token:
            return F.cross_entropy(logits, targets, ignore_index=IGNORED)
        losses = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
        return losses, logits.argmax(1) == targets


def roberta(
    *,
    width: int,
    depth: int,
    vocabulary: int,
    sequence_length: int,
    dropout: float,
    num_chosen: int,
) -> SparseRobertaForMaskedLM:
    """A new model; RoBERTa-Base has width 768, depth 12 and 50,265 tokens."""
    config = RobertaConfig(  # type: ignore[call-arg]
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=max(1, width // 64),
        intermediate_size=4 * width,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        max_position_embeddings=sequence_length + 2,  # positions start after that of <pad>
        type_vocab_size=1,
        bos_token_id=BOS,
        pad_token_id=SPECIAL_TOKENS.index("<pad>"),
        eos_token_id=EOS,
        attn_implementation="sdpa",
    )
    return SparseRobertaForMaskedLM(config, num_chosen)
