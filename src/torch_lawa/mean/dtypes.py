"""What can be averaged, by dtype (under its safetensors name) and by name of the tensor.

Pure Python: no tensors here.
"""

from dataclasses import dataclass
from typing import Literal

from torch_lawa.errors import ConfigError

__all__ = ["DTYPES", "averageable", "is_statistic", "parse_dtype"]


@dataclass(frozen=True)
class DType:
    """A dtype: the size of a value, and how it is averaged.

    Float and complex values are averaged, exact ones come from the newest checkpoint, opaque ones
    (scales and packed numbers, which have no meaning of their own) can only be excluded.
    """

    code: str
    itemsize: int
    kind: Literal["float", "complex", "exact", "opaque"]
    torch_name: str


DTYPES = {
    d.code: d
    for d in (
        DType("F64", 8, "float", "float64"),
        DType("F32", 4, "float", "float32"),
        DType("F16", 2, "float", "float16"),
        DType("BF16", 2, "float", "bfloat16"),
        DType("F8_E4M3", 1, "float", "float8_e4m3fn"),
        DType("F8_E5M2", 1, "float", "float8_e5m2"),
        DType("C64", 8, "complex", "complex64"),
        DType("I64", 8, "exact", "int64"),
        DType("I32", 4, "exact", "int32"),
        DType("I16", 2, "exact", "int16"),
        DType("I8", 1, "exact", "int8"),
        DType("U64", 8, "exact", "uint64"),
        DType("U32", 4, "exact", "uint32"),
        DType("U16", 2, "exact", "uint16"),
        DType("U8", 1, "exact", "uint8"),
        DType("BOOL", 1, "exact", "bool"),
        DType("F8_E8M0", 1, "opaque", "float8_e8m0fnu"),
        DType("F8_E4M3FNUZ", 1, "opaque", "float8_e4m3fnuz"),
        DType("F8_E5M2FNUZ", 1, "opaque", "float8_e5m2fnuz"),
    )
}


def averageable(code: str) -> bool:
    """Whether values of this dtype have a mean.

    >>> averageable("BF16"), averageable("I64")
    (True, False)
    """
    return DTYPES[code].kind in ("float", "complex")


def is_statistic(name: str) -> bool:
    """Whether a tensor is a running statistic of BatchNorm, by PyTorch's names.

    They do not fit averaged weights and should be re-estimated.

    >>> is_statistic("layer1.bn.running_var"), is_statistic("layer1.bn.weight")
    (True, False)
    """
    return name.rpartition(".")[2] in ("running_mean", "running_var")


def parse_dtype(text: str) -> str:
    """The code of a float dtype by any of its names: `bf16`, `bfloat16`, `BF16`.

    >>> parse_dtype("bfloat16"), parse_dtype("fp32")
    ('BF16', 'F32')
    """
    names = {"half": "F16", "float": "F32", "double": "F64", "fp8": "F8_E4M3"}
    for dtype in DTYPES.values():
        if dtype.kind == "float":
            names |= {dtype.code.lower(): dtype.code, dtype.torch_name: dtype.code}
            names[dtype.code.lower().replace("f", "fp", 1)] = dtype.code
    code = names.get(text.strip().lower().removeprefix("torch."))
    if code is None:
        raise ConfigError(
            f"dtype {text!r} is not supported for output: use float32, bfloat16, float16, "
            "float64, float8_e4m3fn or float8_e5m2."
        )
    return code
