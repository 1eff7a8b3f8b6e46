"""Row-major bytes of tensors that are stored otherwise: strided, expanded, or in chunks.

Only the requested range is assembled, whatever the size of the tensor.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from torch_lawa.boxes import boxes
from torch_lawa.checkpoints.formats.base import TensorSpec
from torch_lawa.mean.dtypes import DTYPES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from torch_lawa.mean.kernels import Bytes

    Values = NDArray[np.unsignedinteger[Any]]

__all__ = ["MAX_DIMS", "copy_strided", "gather_bytes", "is_row_major"]

MAX_DIMS = 32  # the limit of NumPy before 2
_MAX_VIEW = 64 * 1024 * 1024  # bytes of a source that are read at once


def is_row_major(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether values with these strides (in elements) are contiguous and in row-major order.

    >>> is_row_major((2, 3), (3, 1)), is_row_major((2, 3), (1, 2)), is_row_major((1, 3), (0, 1))
    (True, False, True)
    """
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def gather_bytes(
    spec: TensorSpec, fill: "Callable[[Values, tuple[int, ...]], None]", begin: int, end: int
) -> "Bytes":
    """Bytes `begin` to `end`; `fill(out, starts)` fills `out` with the box at `starts`."""
    item = DTYPES[spec.dtype].itemsize
    first, last = begin // item, -(-end // item)
    out = np.empty(last - first, dtype=f"u{item}")
    at = 0
    for starts, sizes in boxes(spec.shape, first, last):
        fill(out[at : at + math.prod(sizes)].reshape(sizes), starts)
        at += math.prod(sizes)
    return out.view(np.uint8)[begin - first * item : end - first * item]


def copy_strided(
    view: "Callable[[int, int], Bytes]", start: int, stride: tuple[int, ...], out: "Values"
) -> None:
    """Fill `out` with the values at `start` and `stride`, both in elements.

    `view(begin, end)` returns bytes. Values that span a large range are fetched in parts.
    """
    if not out.size:
        return
    item = out.itemsize
    spans = [(size - 1) * step for size, step in zip(out.shape, stride, strict=True)]
    extent = 1 + sum(spans)
    if extent * item > _MAX_VIEW:
        axis = spans.index(max(spans))
        half = out.shape[axis] // 2
        before = (slice(None),) * axis
        copy_strided(view, start, stride, out[(*before, slice(None, half))])
        copy_strided(view, start + half * stride[axis], stride, out[(*before, slice(half, None))])
        return
    data = view(start * item, (start + extent) * item)
    steps = tuple(step * item for step in stride)
    # This constructor checks that every value is within the buffer.
    out[...] = np.ndarray(out.shape, out.dtype, buffer=data.data, strides=steps)
