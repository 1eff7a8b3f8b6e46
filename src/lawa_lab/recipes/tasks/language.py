"""Next-token prediction on a stream of text, cut into sequences of one length."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from lawa_lab.recipes.catalog.decoder import DecoderConfig
from lawa_lab.recipes.data.sequences import Sequences
from lawa_lab.recipes.data.text import find_text
from lawa_lab.recipes.data.tokens import Tokens, load_smoke_tokens, load_tokens
from lawa_lab.recipes.models.llama import LlamaDecoder
from lawa_lab.recipes.task import Batch, Worker, seeded
from torch_lawa.errors import DataError

__all__ = ["LanguageTask", "load_language_tokens"]

_MISSING = (
    "contains no text (wiki.train.txt and wiki.valid.txt, and wiki.test.txt if there is one). "
    "Write articles of Wikipedia, or any other UTF-8 text, into files of these names, and pass "
    "their folder with --data, or put them into the folder data, which is the default."
)


class LanguageTask:
    """Batches are token ids and, one position later, the tokens to predict."""

    strict = True  # fused attention is deterministic only then
    evaluated_at_once = 2**15  # tokens

    def __init__(self, config: DecoderConfig, tokens: Tokens, *, seed: int, worker: Worker) -> None:
        self._config, self._seed, self._worker = config, seed, worker
        length = config.sequence_length
        self._splits = {
            split: Sequences(ids, length + 1, worker.device, framed=False)
            for split, ids in tokens.ids.items()
        }
        self._train = self._splits.pop("train")
        self.metrics = tuple(f"{split}_loss" for split in self._splits)
        self.num_batches = len(self._train) // config.batch_size
        if not self.num_batches or not all(map(len, self._splits.values())):
            counts = ", ".join(f"{len(rows):,} for {split}" for split, rows in self._splits.items())
            raise DataError(
                f"the text gives {len(self._train):,} sequences of {length} tokens for training, "
                f"{counts}, but one step needs {config.batch_size:,}: use more text, or a smaller "
                "batch_size or sequence_length."
            )

    def build_model(self) -> nn.Module:
        """A new decoder."""
        config = self._config
        return LlamaDecoder(
            width=config.width,
            depth=config.depth,
            vocabulary=config.vocabulary,
            sequence_length=config.sequence_length,
        )

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """The sequences in random order; the last partial batch is dropped."""
        size = self._config.batch_size
        generator = seeded(torch.device("cpu"), self._seed, epoch)
        for _, rows in self._train.shuffled(size, generator, self._worker.share(size), first):
            yield _shifted(rows)

    def calibration(self) -> list[Batch]:
        """Empty: the model has no BatchNorm."""
        return []

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean cross-entropy per token."""
        loss: Tensor = model(*batch)
        return loss

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        """The cross-entropy per token of the first validation text, and of the first test text."""
        return {f"{split}_loss": self._loss_of(model, rows) for split, rows in self._splits.items()}

    def _loss_of(self, model: nn.Module, sequences: Sequences) -> float:
        worker, length = self._worker, self._config.sequence_length
        num_rows = min(len(sequences), max(1, self._config.evaluation_tokens // length))
        size = min(max(1, self.evaluated_at_once // length), num_rows)
        sums = torch.zeros(2, dtype=torch.float64, device=worker.device)
        batches = sequences.in_order(size, num_rows, worker.rank, worker.world_size)
        for _, rows, used in batches:
            losses = model(*_shifted(rows), per_token=True)
            counted = used.unsqueeze(1).expand_as(losses)
            sums += torch.stack(((losses.double() * counted).sum(), counted.sum()))
        loss, num_tokens = worker.total(sums.tolist(), "the sums of an evaluation")
        return loss / num_tokens


def load_language_tokens(config: DecoderConfig, data: Path | None, *, smoke: bool) -> Tokens:
    """The text in `data` (default: the folder `data`), or a synthetic one for a smoke run."""
    if smoke:
        return load_smoke_tokens(config.vocabulary)
    folder = data or Path("data")
    try:
        files = find_text(folder, ("train", "valid", "test"))
    except DataError:
        files = find_text(folder, missing=_MISSING)
    return load_tokens(files, config.vocabulary)


def _shifted(rows: Tensor) -> Batch:
    return rows[:, :-1], rows[:, 1:]
