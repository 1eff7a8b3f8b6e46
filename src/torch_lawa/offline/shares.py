"""Who makes which part of a result: shares of about equal cost, in whole blocks of its files.

The files of the output are thought of as one line, each beginning at a whole block. The line is cut
where the cost is even, also in the middle of a tensor. No two processes write to the same block, so
none to the same page: file systems that several machines share may lose one of two such writes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch_lawa.offline.engine import Span, value_width
from torch_lawa.offline.matching import PlannedTensor

__all__ = ["BLOCK", "LaidFile", "cut_evenly", "spans_between"]

BLOCK = 1 << 16  # the largest page that machines of today use


@dataclass(frozen=True)
class LaidFile:
    """A safetensors file of the output: its size, its tensors, and where in it each begins."""

    file: str
    size: int
    tensors: tuple[tuple[PlannedTensor, int], ...]


def cut_evenly(files: Sequence[LaidFile], num_shares: int, num_averaged: int) -> list[int]:
    """Where each share begins on the line, and where the last one ends.

    The cost of a value is its bytes: read once for each of `num_averaged` checkpoints (once where
    it comes from the newest), written once.
    """
    costs = []
    for tensor, begin, _ in _on_line(files):
        width, source = value_width(tensor.target.dtype), value_width(tensor.source.dtype)
        reads = num_averaged if tensor.rule == "average" else 1
        costs.append((begin, tensor.target.nbytes // width, width, source * reads + width))
    total = sum(numel * cost for _, numel, _, cost in costs)
    end = sum(_blocks(file) for file in files) * BLOCK
    dues = iter([total * i // num_shares for i in range(1, num_shares)])
    cuts, done, due = [0], 0, next(dues, None)
    for begin, numel, width, cost in costs:
        while due is not None and due < done + numel * cost:
            at = begin + (due - done) // cost * width
            cuts.append((at + BLOCK // 2) // BLOCK * BLOCK)
            due = next(dues, None)
        done += numel * cost
    return [*cuts, *[end] * (num_shares + 1 - len(cuts))]


def spans_between(files: Iterable[LaidFile], begin: int, end: int) -> list[Span]:
    """The parts of tensors that lie on the line from `begin` to `end`, both at whole blocks."""
    spans = []
    for tensor, start, stop in _on_line(files):
        first, last = max(start, begin), min(stop, end)
        if first < last:
            width = value_width(tensor.target.dtype)
            # Every tensor lies at a multiple of its width, so a block's edge is a value's edge.
            assert (first - start) % width == 0
            assert (last - start) % width == 0
            spans.append((tensor, (first - start) // width, (last - start) // width))
    return spans


def _on_line(files: Iterable[LaidFile]) -> Iterable[tuple[PlannedTensor, int, int]]:
    base = 0
    for file in files:
        for tensor, start in file.tensors:
            yield tensor, base + start, base + start + tensor.target.nbytes
        base += _blocks(file) * BLOCK


def _blocks(file: LaidFile) -> int:
    return -(-file.size // BLOCK)
