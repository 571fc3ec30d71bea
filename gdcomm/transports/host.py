"""The host side: NumPy arrays that mpi4py does not take as they are.

mpi4py sends an array in memory order and knows MPI's datatypes only. Here a Fortran-
ordered array travels in logical (C) order, and dtypes that MPI lacks travel as
integers or bytes of the same size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from gdcomm.large import LIMIT
from gdcomm.reductions import wire_dtype
from gdcomm.transports.base import derived, split_spec, type_per_rank

__all__ = ["HostSide", "datatype_of", "host_side", "memory_spec"]

_datatypes: dict[np.dtype[Any], MPI.Datatype | None] = {}


class HostSide:
    """A host array seen through another dtype or in another order; see `base.Side`."""

    def __init__(self, array: np.ndarray[Any, Any], rest: tuple[Any, ...], reads: bool, writes: bool) -> None:
        self._array = array
        self._reads = reads
        self._copied = not array.flags.c_contiguous
        self.finishes = self._copied and writes
        flat = np.empty(array.size, array.dtype) if self._copied else array.reshape(-1)
        self._flat = flat
        wire = wire_dtype(array.dtype)
        view = flat if wire is None else flat.view(wire)
        if writes and not array.flags.writeable:
            view.flags.writeable = False  # mpi4py then says what is wrong
        if wire is not None and wire.itemsize < array.dtype.itemsize:
            # Moved as bytes: MPI must not cut an element when it shares blocks out.
            self._type: MPI.Datatype | None = MPI.BYTE.Create_contiguous(array.dtype.itemsize).Commit()
            if not (rest and isinstance(rest[-1], MPI.Datatype)):
                rest = (*(rest[:-1] if rest and rest[-1] is None else rest), self._type)
        else:
            self._type = None
        self.holds = self._type is not None
        self.spec: Any = [view, *rest] if rest else view

    @property
    def memory(self) -> np.ndarray[Any, Any]:
        """The bytes that MPI sees."""
        return self._flat.view(np.uint8)

    def begin(self) -> None:
        if self._copied and self._reads:
            self._flat.reshape(self._array.shape)[...] = self._array

    def ready(self) -> None:
        pass

    def end(self, nbytes: int | None) -> None:
        if not self.finishes:
            return
        count = self._flat.size if nbytes is None else nbytes // self._array.itemsize
        if count == self._flat.size:
            self._array[...] = self._flat.reshape(self._array.shape)
        else:
            self._array.flat[:count] = self._flat[:count]

    def close(self) -> None:
        if self._type is not None:
            self._type.Free()
            self._type = None


def host_side(spec: Any, reads: bool, writes: bool) -> HostSide | None:
    """Adapt a host buffer argument, or return None if mpi4py serves it as it is.

    An explicit derived datatype addresses memory, so such an argument is left alone.
    """
    array, rest = split_spec(spec)
    if not isinstance(array, np.ndarray) or isinstance(array, np.ma.MaskedArray):
        return None
    if any(derived(item) for item in rest):
        return None
    fortran = array.ndim > 1 and not array.flags.c_contiguous and array.flags.f_contiguous
    typed = bool(rest) and (isinstance(rest[-1], (MPI.Datatype, str)) or type_per_rank(rest[-1]))
    odd = not typed and not array.dtype.hasobject and wire_dtype(array.dtype) is not None
    if not fortran and not (odd and array.flags.c_contiguous):
        return None
    return HostSide(array, rest, reads or not _whole(rest), writes)


def memory_spec(
    address: int, nbytes: int, dtype: np.dtype[Any], rest: tuple[Any, ...], reads: bool, writes: bool
) -> tuple[Any, HostSide | None]:
    """The buffer argument that shows mpi4py `nbytes` of contiguous memory at `address` as elements of `dtype`.

    Nobody but MPI reads through it: it may be device memory. The caller keeps the memory alive.

    Returns:
        The argument, and the side to close after use if a datatype had to be made for it.
    """
    memory = MPI.buffer.fromaddress(address, nbytes)
    if not rest and nbytes <= LIMIT:
        datatype = datatype_of(dtype)
        if datatype is not None:
            return [memory, datatype], None
    view = np.frombuffer(memory, dtype) if nbytes else np.empty(0, dtype)  # type: ignore[call-overload]
    spec = [view, *rest] if rest else view
    inner = host_side(spec, reads, writes)
    return (spec if inner is None else inner.spec), inner


def datatype_of(dtype: np.dtype[Any]) -> MPI.Datatype | None:
    """MPI's own datatype under which elements of `dtype` travel, if there is one."""
    found = _datatypes.get(dtype)
    if found is None and dtype not in _datatypes:
        found = _datatypes[dtype] = _find_datatype(dtype)
    return found


def _find_datatype(dtype: np.dtype[Any]) -> MPI.Datatype | None:
    wire = wire_dtype(dtype)
    if wire is None:
        wire = dtype if dtype.isnative and dtype.kind in "biufc" else None
    if wire is None or wire.itemsize != dtype.itemsize:
        return None
    return MPI.Datatype.fromcode(wire.char)


def _whole(rest: tuple[Any, ...]) -> bool:
    """Whether the operation covers the array whole (no explicit counts)."""
    return all(isinstance(item, (MPI.Datatype, str)) or item is None for item in rest)
