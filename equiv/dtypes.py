"""The element types that operands can have, as bits, as torch dtypes, and as values.

Comparison is by bits alone; values exist for messages. Formats: IEEE 754 binary16 and
binary32, bfloat16 (the upper half of binary32), and e4m3fn of "FP8 Formats for Deep
Learning" (arXiv:2209.05433): 4 exponent bits with bias 7, 3 mantissa bits, no infinity, NaN is
S.1111.111.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DType:
    """One element type.

    Attributes
    ----------
    name : as written in cases.
    torch_name : attribute of ``torch``.
    bits : numpy dtype of the same size, in which elements are generated and compared.
    exponent_bits, mantissa_bits : 0 for integers.

    """

    name: str
    torch_name: str
    bits: Any
    exponent_bits: int = 0
    mantissa_bits: int = 0

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return int(np.dtype(self.bits).itemsize)

    @property
    def is_float(self) -> bool:
        """Whether elements are floating-point numbers."""
        return self.exponent_bits > 0

    def torch(self) -> torch.dtype:
        """Return the torch dtype."""
        import torch

        return getattr(torch, self.torch_name)  # type: ignore[no-any-return]


DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        DType("bf16", "bfloat16", np.uint16, 8, 7),
        DType("fp16", "float16", np.uint16, 5, 10),
        DType("fp32", "float32", np.uint32, 8, 23),
        DType("e4m3", "float8_e4m3fn", np.uint8, 4, 3),
        DType("u8", "uint8", np.uint8),
        DType("i32", "int32", np.uint32),
        DType("i64", "int64", np.uint64),
    )
}


def dtype_of(name: str) -> DType:
    """Look a dtype up by its name in cases, or by torch's (``torch.bfloat16``)."""
    if name in DTYPES:
        return DTYPES[name]
    for d in DTYPES.values():
        if name.removeprefix("torch.") == d.torch_name:
            return d
    msg = f"unknown dtype {name!r}; known: {', '.join(DTYPES)}"
    raise KeyError(msg)


def decode(bits: int, dtype: DType) -> float:
    """Return the value of one element; NaN for every NaN.

    ``(-1)^s * 2^(e - bias) * (1 + m / 2^M)``, or ``(-1)^s * 2^(1 - bias) * m / 2^M`` where e = 0.
    """
    if not dtype.is_float:
        signed = dtype.torch_name.startswith("int") and bits >> (8 * dtype.itemsize - 1)
        return float(bits - (1 << 8 * dtype.itemsize) if signed else bits)
    e_bits, m_bits = dtype.exponent_bits, dtype.mantissa_bits
    sign = -1.0 if bits >> (e_bits + m_bits) & 1 else 1.0
    exponent = bits >> m_bits & ((1 << e_bits) - 1)
    mantissa = bits & ((1 << m_bits) - 1)
    bias = (1 << (e_bits - 1)) - 1
    top = exponent == (1 << e_bits) - 1
    if dtype.name == "e4m3":
        if top and mantissa == (1 << m_bits) - 1:
            return float("nan")
    elif top:
        return float("nan") if mantissa else sign * float("inf")
    if exponent == 0:
        return float(sign * mantissa * 2.0 ** (1 - bias - m_bits))
    return float(sign * ((1 << m_bits) + mantissa) * 2.0 ** (exponent - bias - m_bits))


def describe(bits: int, dtype: DType) -> str:
    """Return one element as hex with what it means: ``7f (NaN)``, ``80 (-0.0)``."""
    width = 2 * dtype.itemsize
    text = f"{bits:0{width}x}"
    if not dtype.is_float:
        return f"{text} ({decode(bits, dtype):.0f})"
    value = decode(bits, dtype)
    negative = bits >> (dtype.exponent_bits + dtype.mantissa_bits) & 1
    if value != value:  # noqa: PLR0124 - NaN is the one value unequal to itself
        return f"{text} ({'-' if negative else '+'}NaN)"
    return f"{text} ({value:g})" if value or not negative else f"{text} (-0.0)"


def ulp_distance(a: int, b: int, dtype: DType) -> int | None:
    """Return the count of representable values from ``a`` to ``b``; None where one is NaN.

    Bits are read as sign and magnitude, so +0 and -0 are 0 apart.
    """
    if not dtype.is_float:
        return abs(a - b)
    if decode(a, dtype) != decode(a, dtype) or decode(b, dtype) != decode(b, dtype):
        return None
    sign_bit = 1 << (dtype.exponent_bits + dtype.mantissa_bits)
    lines = [-(x & (sign_bit - 1)) if x & sign_bit else x for x in (a, b)]
    return abs(lines[0] - lines[1])


def explain(a: int, b: int, dtype: DType) -> str:
    """Say in a few words how element ``b`` differs from element ``a``."""
    va, vb = decode(a, dtype), decode(b, dtype)
    nan_a, nan_b = va != va, vb != vb  # noqa: PLR0124
    if nan_a and nan_b:
        return "both NaN, other sign or payload"
    if nan_a or nan_b:
        return "NaN against a number"
    if va == vb == 0:
        return "zeros of opposite sign"
    return f"{ulp_distance(a, b, dtype)} ULP apart"
