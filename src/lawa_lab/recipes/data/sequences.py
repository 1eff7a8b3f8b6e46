"""Token ids on a device, cut into sequences of one length."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from lawa_lab.recipes.data.tokens import BOS, EOS, TokenIds

__all__ = ["Sequences"]

_MOST_ON_DEVICE = 4 * 2**30  # bytes


class Sequences:
    """A stream of ids in rows of `length`, each between `<s>` and `</s>` if `framed`.

    The incomplete last row is dropped. The ids are stored on the device if they fit, in two bytes
    each if the vocabulary allows; on the host they stay memory-mapped.

    >>> rows = Sequences(np.arange(10, 17, dtype=np.uint16), 5, torch.device("cpu"))
    >>> rows[torch.tensor([1, 0])]
    tensor([[ 0, 13, 14, 15,  2],
            [ 0, 10, 11, 12,  2]])
    """

    def __init__(
        self, ids: TokenIds, length: int, device: torch.device, *, framed: bool = True
    ) -> None:
        self._framed = framed
        body = length - 2 if framed else length
        num_rows = len(ids) // body
        rows = ids[: num_rows * body].reshape(num_rows, body)
        # PyTorch supports few operations on uint16, so the ids are viewed as int16.
        self._mask = 0xFFFF if ids.dtype == np.uint16 else -1
        tensor = torch.from_numpy(rows.view(np.int16) if ids.dtype == np.uint16 else rows)
        self._rows = tensor.to(device) if rows.nbytes <= _MOST_ON_DEVICE else tensor
        self._device = device

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, chosen: Tensor) -> Tensor:
        """The rows with these indices, int64, on the device."""
        rows = self._rows[chosen.to(self._rows.device)].to(self._device)
        if not self._framed:
            return rows.long() & self._mask
        out = torch.empty(len(rows), rows.shape[1] + 2, dtype=torch.int64, device=self._device)
        out[:, 0], out[:, -1] = BOS, EOS
        out[:, 1:-1] = rows.long() & self._mask
        return out

    def shuffled(
        self, size: int, generator: torch.Generator, share: slice, first: int
    ) -> Iterator[tuple[int, Tensor]]:
        """Numbered batches of `size` rows in random order, from the `first` on.

        Of each batch only a rank's `share` is read. The last partial batch is dropped.
        """
        # Moved to the device of the rows once: a copy per step would wait for the step before.
        order = torch.randperm(len(self), generator=generator).to(self._rows.device)
        for number in range(first, len(self) // size):
            yield number, self[order[number * size : (number + 1) * size][share]]

    def in_order(
        self, size: int, num_rows: int, rank: int, world_size: int
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """A rank's numbered batches of the first `num_rows` rows, and which rows of them count.

        Every rank gets the same number of batches of `size` rows: a distributed model may
        synchronise in every call, and a compiled one would be recompiled for another size. Rows
        that only fill up the last batches do not count.
        """
        num_rounds = -(-num_rows // (size * world_size))
        for number in range(rank, num_rounds * world_size, world_size):
            rows = torch.arange(number * size, (number + 1) * size)
            yield number, self[rows % num_rows], (rows < num_rows).to(self._device)
