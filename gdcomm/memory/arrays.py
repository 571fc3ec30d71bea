"""NumPy arrays in page-locked memory, which the GPU copies at the speed of the link and while the program goes on."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Literal, SupportsIndex

import numpy as np
import numpy.typing as npt

from gdcomm import devices
from gdcomm.errors import BufferSpecError, DeviceError
from gdcomm.memory.pages import fill, ordinary
from gdcomm.memory.pinned import pool_of

__all__ = ["pinned_array", "pinned_empty", "pinned_like", "pinned_zeros"]

_Array = np.ndarray[Any, Any]
Shape = SupportsIndex | Iterable[SupportsIndex]
Order = Literal["C", "F"]
_MOST_AXES = 64 if int(np.__version__.partition(".")[0]) > 1 else 32


def pinned_empty(
    shape: Shape,
    dtype: npt.DTypeLike = float,
    *,
    order: Order = "C",
    write_combined: bool = False,
    mapped: bool = False,
    numa: int | None = None,
) -> _Array:
    """Return an uninitialised NumPy array in page-locked memory, from a pool.

    The memory goes back to the pool with the last view of the array, and is used again once the copies of
    gdcomm that touch it are done, and what the current stream of the dropping thread holds then. Work that other
    libraries queued on other streams is unknown: keep the array until that is done. A forked child does
    not get arrays of 4 MiB and more; start workers by "spawn" or "forkserver", or copy what they need.

    Where no GPU (nor emulated device) is, the memory is ordinary and page-aligned.

    Args:
        shape: an int or ints.
        dtype: any without Python objects.
        order: "C" or "F".
        write_combined: memory that the CPU writes past its caches. Reading it is very slow; for data that the
            CPU only writes and the GPU only reads. Measure: on many machines it brings nothing.
        mapped: kernels are to reach the memory (`mapped_empty` gives their view of it as well); refused
            where the GPU can't.
        numa: the NUMA node to take the memory from; None takes the GPU's, for large arrays, where it is known.

    Raises:
        PinnedMemoryError: over the budget, see `GDCOMM_PINNED_LIMIT`. (It is a MemoryError.)
        BufferSpecError: an argument can't be used.
        DeviceError: the driver gives no such memory.
    """
    extents, kind, nbytes = checked(shape, dtype, order)
    device = devices.current()
    if device is None:
        memory: Any = ordinary(nbytes)
    else:
        if mapped and not device.properties().can_map_host_memory:
            raise DeviceError("mapped: kernels of this GPU can't reach host memory; leave mapped out and copy")
        if numa is not None:
            numa = _node(numa, write_combined)
        memory = pool_of(device).hold(nbytes, write_combined=bool(write_combined), mapped=bool(mapped), node=numa)
    return np.ndarray(extents, kind, memory, order=order)


def pinned_zeros(
    shape: Shape,
    dtype: npt.DTypeLike = float,
    *,
    order: Order = "C",
    write_combined: bool = False,
    mapped: bool = False,
    numa: int | None = None,
) -> _Array:
    """Return zeros in page-locked memory; the rest is as in `pinned_empty`."""
    made = pinned_empty(shape, dtype, order=order, write_combined=write_combined, mapped=mapped, numa=numa)
    fill(made.reshape(-1, order="A").view(np.uint8), 0)
    return made


def pinned_like(
    prototype: Any,
    dtype: npt.DTypeLike | None = None,
    *,
    shape: Shape | None = None,
    write_combined: bool = False,
    mapped: bool = False,
    numa: int | None = None,
) -> _Array:
    """Return an uninitialised array in page-locked memory, of the shape, dtype and order of another array.

    Args:
        prototype: an array of any library (its memory is not looked at), or nested sequences.
        dtype: another dtype.
        shape: another shape.
        write_combined, mapped, numa: as in `pinned_empty`, which also says what is raised.
    """
    if not (hasattr(prototype, "shape") and hasattr(prototype, "dtype")):
        prototype = _host_array("prototype", prototype)
    return pinned_empty(
        tuple(prototype.shape) if shape is None else shape,
        _numpy_dtype(prototype.dtype) if dtype is None else dtype,
        order="F" if shape is None and _fortran(prototype) else "C",
        write_combined=write_combined,
        mapped=mapped,
        numa=numa,
    )


def pinned_array(
    values: Any,
    dtype: npt.DTypeLike | None = None,
    *,
    write_combined: bool = False,
    mapped: bool = False,
    numa: int | None = None,
) -> _Array:
    """Return a copy of host values in page-locked memory.

    Args:
        values: an array in host memory, or nested sequences. Of a Fortran-ordered array the copy is in that
            order too, else in C order.
        dtype: to convert to.
        write_combined, mapped, numa: as in `pinned_empty`, which also says what is raised.
    """
    if devices.possible() and devices.find(values) is not None:
        raise BufferSpecError(
            f"values: this {type(values).__name__} is on a GPU; copy it by gdcomm.to_host, or gdcomm.copy into "
            "gdcomm.pinned_like(values)"
        )
    if isinstance(values, np.ma.MaskedArray):
        raise BufferSpecError("values: a masked array has two parts; give .data and .mask, or .filled()")
    source = _host_array("values", values, dtype)
    made = pinned_like(source, write_combined=write_combined, mapped=mapped, numa=numa)
    np.copyto(made, source)
    return made


def checked(shape: Shape, dtype: npt.DTypeLike, order: str = "C") -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """The shape as a tuple, the dtype and the length in bytes, if an array in page-locked memory can have them.

    Raises:
        BufferSpecError: it can't.
    """
    extents = (shape,) if type(shape) is int else _extents(shape)
    if isinstance(dtype, np.dtype):
        kind = dtype
    else:
        try:
            kind = np.dtype(dtype)
        except (TypeError, ValueError, SyntaxError) as error:
            raise BufferSpecError(f"dtype: {dtype!r} is none ({error})") from None
    nbytes = kind.itemsize
    if kind.hasobject:
        raise BufferSpecError(f"dtype: {kind} holds Python objects, which a GPU can't read; give numbers or bytes")
    if not nbytes:
        raise BufferSpecError(f"dtype: {kind} has elements of no bytes; say how long they are, as in 'S8'")
    whole = nbytes
    for extent in extents:
        nbytes *= extent  # Python integers: no overflow
        whole *= extent or 1
        if extent < 0:
            raise BufferSpecError(f"shape: {shape!r} has a negative extent")
    if len(extents) > _MOST_AXES or whole > sys.maxsize:
        raise BufferSpecError(f"shape: {shape!r} of {kind} is more than NumPy's arrays hold")
    if order not in ("C", "F"):
        raise BufferSpecError(f'order: {order!r} is neither "C" nor "F"')
    return extents, kind, nbytes


def _extents(shape: Any) -> tuple[int, ...]:
    try:
        return (operator.index(shape),)
    except TypeError:
        pass
    try:
        if not isinstance(shape, (str, bytes, bytearray, AbstractSet, Mapping)):
            return tuple(operator.index(n) for n in shape)
    except TypeError:
        pass
    raise BufferSpecError(f"shape: {shape!r} is no int, nor a sequence of ints")


def _node(numa: Any, write_combined: bool) -> int:
    if write_combined:
        raise BufferSpecError("numa: write-combined memory can't be placed; give one of numa and write_combined")
    try:
        return operator.index(numa)
    except TypeError:
        raise BufferSpecError(f"numa: {numa!r} is no number of a node") from None


def _host_array(name: str, values: Any, dtype: npt.DTypeLike | None = None) -> _Array:
    try:
        return np.asarray(values, dtype)
    except (TypeError, ValueError, SyntaxError) as error:
        raise BufferSpecError(f"{name}: this {type(values).__name__} makes no array ({error})") from None


def _numpy_dtype(dtype: Any) -> np.dtype[Any]:
    if isinstance(dtype, np.dtype):
        return dtype
    name = str(dtype).removeprefix("torch.")
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    try:
        return np.dtype(name)
    except TypeError:
        raise BufferSpecError(f"prototype: dtype {dtype} is none of NumPy's; say which dtype is wanted") from None


def _fortran(array: Any) -> bool:
    flags = getattr(array, "flags", None)
    if flags is not None:
        return bool(flags["F_CONTIGUOUS"] and not flags["C_CONTIGUOUS"]) if hasattr(flags, "__getitem__") else False
    strides = getattr(array, "stride", None)  # torch
    if not callable(strides) or array.ndim < 2 or array.is_contiguous():
        return False
    return bool(array.permute(*reversed(range(array.ndim))).is_contiguous())
