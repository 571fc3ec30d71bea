"""Reductions that MPI has no operator for: half precision, bfloat16 and logical sums of bool.

The one table of ops x dtypes. `substitute` says with which MPI datatype and operator
a NumPy dtype is reduced on the host; everything else goes to MPI as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from gdcomm.errors import BufferSpecError

__all__ = ["check_reduction", "name_of", "substitute", "wire_dtype"]

_UFUNCS: dict[str, np.ufunc] = {
    "SUM": np.add,
    "PROD": np.multiply,
    "MAX": np.maximum,
    "MIN": np.minimum,
    "LAND": np.logical_and,
    "LOR": np.logical_or,
    "LXOR": np.logical_xor,
}
# On truth values a sum is "any", a product "all"; a bitwise operation is the logical one.
_BOOL = {
    "SUM": MPI.LOR,
    "MAX": MPI.LOR,
    "BOR": MPI.LOR,
    "PROD": MPI.LAND,
    "MIN": MPI.LAND,
    "BAND": MPI.LAND,
    "BXOR": MPI.LXOR,
}
_made: dict[tuple[str, str], MPI.Op] = {}


def _is_half(dtype: np.dtype[Any]) -> bool:
    """Tell whether `dtype` is float16 or bfloat16."""
    return dtype.itemsize == 2 and (dtype.char == "e" or dtype.name == "bfloat16")


def wire_dtype(dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    """The dtype under which MPI can move elements of `dtype`; None when it knows `dtype` itself."""
    if _is_half(dtype):
        return np.dtype(np.uint16)
    if not dtype.isnative or dtype.hasobject:
        return None  # mpi4py refuses it with its own words
    if dtype.kind in "biufc" and dtype.num < 17:
        return None
    if dtype.kind in "mM":
        return np.dtype(np.int64)
    return np.dtype(np.uint8)  # structured, void, text, 8-bit floats: bytes


def substitute(dtype: np.dtype[Any], op: MPI.Op) -> MPI.Op | None:
    """The operator that reduces elements of `dtype` moved as `wire_dtype`; None if MPI's own does."""
    if dtype.kind == "b":
        return _BOOL.get(name_of(op))
    if not _is_half(dtype):
        return None
    name = name_of(op)
    if name not in _UFUNCS:
        return None
    key = (dtype.name, name)
    if key not in _made:
        _made[key] = MPI.Op.Create(_elementwise(_UFUNCS[name], dtype), commute=True)
    return _made[key]


def check_reduction(name: str, dtypes: list[np.dtype[Any]], op: MPI.Op) -> None:
    """Refuse what MPI would do on the integers or bytes under which these dtypes travel.

    Raises:
        BufferSpecError: dtypes that differ, or an operator that has no meaning for them.
    """
    odd = [dtype for dtype in dtypes if wire_dtype(dtype) is not None]
    if not odd:
        return
    if len(set(dtypes)) > 1:
        raise BufferSpecError(
            f"{name}: sendbuf and recvbuf differ ({', '.join(map(str, dtypes))}); give arrays of one dtype"
        )
    op_name = name_of(op)
    allowed = _UFUNCS if _is_half(odd[0]) else _TIMES.get(odd[0].kind, ())
    if op_name and op_name not in allowed:
        raise BufferSpecError(f"{name}: op: MPI.{op_name} has no meaning for {odd[0]}; convert, or use MPI.Op.Create")


_TIMES = {"m": ("SUM", "MAX", "MIN"), "M": ("MAX", "MIN")}
_PREDEFINED = {
    name: getattr(MPI, name)
    for name in ("SUM", "PROD", "MAX", "MIN", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR")
}


def name_of(op: MPI.Op) -> str:
    """The name of a predefined operator, without "MPI."; "" of others."""
    for name, known in _PREDEFINED.items():
        if op == known:
            return name
    return ""


def _elementwise(ufunc: np.ufunc, dtype: np.dtype[Any]) -> Callable[[Any, Any, Any], None]:
    def reduce(invec: Any, inoutvec: Any, _datatype: MPI.Datatype) -> None:
        left = np.frombuffer(invec, dtype)
        right = np.frombuffer(inoutvec, dtype)
        # float32 holds every product and sum of two halves before the one rounding. Overflow gives
        # inf silently, as in MPI's own operators: an exception here would abort the job.
        with np.errstate(all="ignore"):
            right[...] = ufunc(left.astype(np.float32), right.astype(np.float32)).astype(dtype)

    return reduce
