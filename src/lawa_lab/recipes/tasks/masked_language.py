"""Section 3.2 of the paper: RoBERTa-Base, masked-language modelling on WikiText-103.

The model is transformers' RoBERTa, the vocabulary a byte-level BPE trained on the training text.
The text is one stream cut into sequences of full length. The paper follows fairseq's recipe, which
uses GPT-2's vocabulary and breaks sequences at line ends: its losses are per token of a different
vocabulary, so their shape is comparable with ours but not their level.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from lawa_lab.recipes.catalog.wikitext import WikiTextConfig
from lawa_lab.recipes.data.sequences import Sequences
from lawa_lab.recipes.data.text import find_text
from lawa_lab.recipes.data.tokens import Tokens, load_smoke_tokens, load_tokens
from lawa_lab.recipes.task import Batch, Worker, seeded
from lawa_lab.recipes.tasks.masking import IGNORED, mask_tokens, num_masked
from torch_lawa.errors import DataError, LawaError

__all__ = ["MaskedLanguageTask", "load_wikitext_tokens"]

_EVALUATION_SEED = 2**31  # no run uses it


class MaskedLanguageTask:
    """Batches are masked token ids and the labels of the tokens to predict."""

    metrics: tuple[str, ...] = ("valid_loss", "valid_accuracy")
    strict = True  # fused attention is deterministic only then
    evaluated_at_once = 2**15  # tokens

    def __init__(
        self, config: WikiTextConfig, tokens: Tokens, *, seed: int, worker: Worker
    ) -> None:
        self._config, self._seed, self._worker = config, seed, worker
        self._vocabulary = tokens.vocabulary
        self._num_chosen = num_masked(config.sequence_length, config.mask_fraction)
        self._train, self._valid = (
            Sequences(tokens.ids[split], config.sequence_length, worker.device)
            for split in ("train", "valid")
        )
        self.num_batches = len(self._train) // config.batch_size
        if not self.num_batches or not len(self._valid):
            raise DataError(
                f"the text gives {len(self._train):,} sequences of {config.sequence_length} tokens "
                f"for training and {len(self._valid):,} for validation, but one step needs "
                f"{config.batch_size:,}: use more text, or a smaller batch_size or "
                "sequence_length."
            )

    def build_model(self) -> nn.Module:
        """RoBERTa, from transformers."""
        try:
            from lawa_lab.recipes.models.roberta import roberta
        except ImportError as error:
            raise LawaError(
                f"the model comes from transformers, which could not be imported ({error}): "
                "pip install 'torch-lawa[roberta]'"
            ) from None
        config = self._config
        return roberta(
            width=config.width,
            depth=config.depth,
            vocabulary=config.vocabulary,
            sequence_length=config.sequence_length,
            dropout=config.dropout,
            num_chosen=self._num_chosen,
        )

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """The sequences in random order, with new masks; the last partial batch is dropped."""
        size, worker = self._config.batch_size, self._worker
        generator = seeded(torch.device("cpu"), self._seed, epoch)
        for number, rows in self._train.shuffled(size, generator, worker.share(size), first):
            step = epoch * self.num_batches + number
            yield self._masked(rows, seeded(worker.device, self._seed, step, worker.rank))

    def _masked(self, ids: Tensor, generator: torch.Generator) -> Batch:
        return mask_tokens(ids, self._num_chosen, self._vocabulary, generator)

    def calibration(self) -> list[Batch]:
        """Empty: the model has no BatchNorm."""
        return []

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean cross-entropy of the masked tokens."""
        loss: Tensor = model(*batch)
        return loss

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        """Cross-entropy and accuracy of the masked tokens of all validation text.

        The masks depend neither on the run's seed nor on the number of ranks.
        """
        worker, num_rows = self._worker, len(self._valid)
        size = min(max(1, self.evaluated_at_once // self._config.sequence_length), num_rows)
        sums = torch.zeros(3, dtype=torch.float64, device=worker.device)
        batches = self._valid.in_order(size, num_rows, worker.rank, worker.world_size)
        for number, rows, used in batches:
            generator = seeded(worker.device, _EVALUATION_SEED, number)
            inputs, labels = self._masked(rows, generator)
            labels[~used] = IGNORED
            losses, hits = model(inputs, labels, per_token=True)
            sums += torch.stack((losses.double().sum(), hits.sum(), (labels != IGNORED).sum()))
        loss, num_hits, num_chosen = worker.total(sums.tolist(), "the sums of an evaluation")
        return {"valid_loss": loss / num_chosen, "valid_accuracy": num_hits / num_chosen}


def load_wikitext_tokens(config: WikiTextConfig, data: Path | None, *, smoke: bool) -> Tokens:
    """The text in `data` (default: the folder `data`), or a synthetic one for a smoke run."""
    if smoke:
        return load_smoke_tokens(config.vocabulary)
    return load_tokens(find_text(data or Path("data")), config.vocabulary)
