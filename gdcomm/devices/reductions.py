"""Element-wise reductions on the device, for collectives of its arrays."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from gdcomm.errors import BufferSpecError

if TYPE_CHECKING:
    from gdcomm.devices.base import Buffer

__all__ = ["BOOL", "HALVES", "Reductions", "element", "require_reducible"]

HALVES = frozenset({"float16", "bfloat16"})
_INTEGERS = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
_REALS = _INTEGERS | HALVES | {"bool", "float32", "float64"}
_NUMBERS = _REALS | {"complex64", "complex128"}
_WHOLE = _INTEGERS | {"bool"}

# MPI's name of each operator, and the types of elements that kernels apply it to.
_TABLE = {
    "SUM": _NUMBERS,
    "PROD": _NUMBERS,
    "MAX": _REALS,
    "MIN": _REALS,
    "LAND": _REALS,
    "LOR": _REALS,
    "LXOR": _REALS,
    "BAND": _WHOLE,
    "BOR": _WHOLE,
    "BXOR": _WHOLE,
}

# What operators mean on truth values, as in `gdcomm.reductions`.
BOOL = {
    "SUM": "LOR",
    "MAX": "LOR",
    "LOR": "LOR",
    "BOR": "LOR",
    "PROD": "LAND",
    "MIN": "LAND",
    "LAND": "LAND",
    "BAND": "LAND",
    "LXOR": "LXOR",
    "BXOR": "LXOR",
}


class Reductions(ABC):
    """Kernels that combine two arrays into one, element by element.

    Integers wrap. MAX and MIN of floats give NaN where either is NaN, as NumPy does and as `gdcomm.reductions`
    does with halves (MPI's own operators keep or lose it, by the order of operands); which zero is the larger is
    not said. float16 and bfloat16 are computed in float32 and rounded once, to nearest, ties to even. Logical
    operators take what is not zero as true (also NaN) and give 0 or 1. Complex products are plain: infinities
    are not recovered, as in NumPy.
    """

    def reduces(self, op: str, dtype: np.dtype[Any]) -> bool:
        """Whether there is a kernel for MPI's operator of this name on this dtype: on one rank as on any other."""
        return element(dtype) in _TABLE.get(op, ())

    @abstractmethod
    def reduce(self, op: str, out: Buffer, lower: Buffer, higher: Buffer) -> None:
        """Queue on `out.stream`: each element of `out` becomes that of `lower` op that of `higher`.

        All three are contiguous, of one dtype and length, aligned as the dtype wants, where kernels reach: in device or
        page-locked memory, which is read when the stream gets there. `out` may be the same memory as `lower` or
        `higher`, or both; otherwise it shares none with them. It is fastest where the three addresses are alike
        modulo 16.

        Raises:
            BufferSpecError: there is no such kernel, or the arrays don't fit together.
        """


@functools.cache
def element(dtype: np.dtype[Any]) -> str | None:
    """The name under which kernels know elements of this dtype; None if they don't."""
    known = dtype.isnative and dtype.names is None and dtype.name in _NUMBERS
    return dtype.name if known else None


def require_reducible(op: str, out: Buffer, lower: Buffer, higher: Buffer) -> None:
    """Raise unless the arrays are as `Reductions.reduce` wants them.

    Raises:
        BufferSpecError: saying what is wrong.
    """
    if element(out.dtype) not in _TABLE.get(op, ()):
        raise BufferSpecError(f"no kernel reduces {out.dtype} by {op or 'this operator'}; ask `reduces` first")
    nbytes = out.nbytes
    for name, other in (("lower", lower), ("higher", higher)):
        if other.dtype != out.dtype or other.nbytes != nbytes:
            raise BufferSpecError(
                f"reduce: {name} is {other.nbytes} bytes of {other.dtype}, out is {nbytes} bytes of {out.dtype}"
            )
        if 0 < abs(other.ptr - out.ptr) < nbytes:
            raise BufferSpecError(f"reduce: out and {name} share a part of their memory; give all of it or none")
    if any(array.ptr % out.dtype.alignment for array in (out, lower, higher)):
        raise BufferSpecError(f"reduce: an array is not aligned to {out.dtype.alignment} bytes; give aligned copies")
    if not (out.contiguous and lower.contiguous and higher.contiguous):
        raise BufferSpecError("reduce: the arrays are not contiguous; give packed ones")
