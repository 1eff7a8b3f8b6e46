"""The mean of a window tensor by tensor, for who cannot have all of it in memory at once."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torch_lawa.coefficients import Uniform, Weights
from torch_lawa.mean.blocks import mean_blocks, round_into
from torch_lawa.stores.base import Entry, Layout

__all__ = ["OneByOne", "as_real"]


class OneByOne:
    """Makes single tensors of an average, with the bits that they have in the whole of it.

    `snapshots` are the flat buffers of each snapshot, oldest first, `newest` those of the kept
    tensors. `report` is called when a mean is not finite.
    """

    def __init__(
        self,
        averaged: Layout,
        kept: Layout,
        snapshots: Sequence[Sequence[Tensor]],
        newest: Sequence[Tensor],
        weights: Weights,
        report: Callable[[], None],
    ) -> None:
        self._weights, self._report = weights, report
        self._averaged = _places(averaged, [list(flats) for flats in zip(*snapshots, strict=True)])
        self._kept = _places(kept, [[flat] for flat in newest])

    def make(self, name: str, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """One tensor of the average in `dtype`, where the snapshots lie or on `device`.

        What is kept and has that dtype and place already is a view of the store: not to be
        written to.
        """
        if name in self._averaged:
            entry, flats = self._averaged[name]
            return self._mean(entry, flats, self._weights, dtype, device)
        entry, flats = self._kept[name]
        if flats[0].dtype != dtype:
            return self._mean(entry, flats, Uniform().weights(1), dtype, device)
        return entry.view(flats[0]).to(device or flats[0].device)

    def _mean(
        self,
        entry: Entry,
        flats: Sequence[Tensor],
        weights: Weights,
        dtype: torch.dtype,
        device: torch.device | None,
    ) -> Tensor:
        home = device or flats[0].device
        out = torch.empty_strided(entry.shape, entry.stride, dtype=dtype, device=home)
        if not entry.numel:
            return out
        to = as_real(out.as_strided((entry.numel,), (1,)))
        parts = [as_real(flat[entry.offset : entry.offset + entry.numel]) for flat in flats]
        finite = []
        for start, mean in mean_blocks(parts, weights, home if home.type == "cuda" else None):
            finite.append(mean.sum().isfinite())
            round_into(to[start : start + mean.numel()], mean)
        if home.type == "cuda":
            # Host buffers that were streamed from may be overwritten by the next snapshot.
            torch.cuda.current_stream(home).synchronize()
        if not all(bool(f) for f in finite):
            self._report()
        return out


def _places(
    layout: Layout, flats: Sequence[Sequence[Tensor]]
) -> dict[str, tuple[Entry, Sequence[Tensor]]]:
    """Name -> where in the flat buffers of its group a tensor lies."""
    return {
        entry.name: (entry, of_group)
        for group, of_group in zip(layout.groups, flats, strict=True)
        for entry in group.entries
    }


def as_real(flat: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones: averaging does not mix the two."""
    return torch.view_as_real(flat).flatten() if flat.is_complex() else flat
