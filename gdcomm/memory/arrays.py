"""NumPy arrays in page-locked memory, which the GPU copies at the speed of the link and while the program goes on."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, Literal, SupportsIndex

import numpy as np
import numpy.typing as npt

from gdcomm import devices
from gdcomm.errors import BufferSpecError, DeviceError
from gdcomm.memory.pages import PAGE, fill
from gdcomm.memory.pinned import pool_of

__all__ = ["pinned_array", "pinned_empty", "pinned_like", "pinned_zeros"]

_Array = np.ndarray[Any, Any]
Shape = SupportsIndex | Iterable[SupportsIndex]
Order = Literal["C", "F"]


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
    shape, kind = checked(shape, dtype, order)
    return np.ndarray(shape, kind, _memory(shape, kind, write_combined, mapped, numa), order=order)


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
    shape, kind = checked(shape, dtype, order)
    memory = _memory(shape, kind, write_combined, mapped, numa)
    made: _Array = np.ndarray(shape, kind, memory, order=order)
    fill(memory[: made.nbytes], 0)
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
        prototype = np.asarray(prototype)
    own_shape = tuple(prototype.shape)
    return pinned_empty(
        own_shape if shape is None else shape,
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
        values: an array in host memory, or nested sequences.
        dtype: to convert to.
        write_combined, mapped, numa: as in `pinned_empty`, which also says what is raised.
    """
    if devices.possible() and devices.find(values) is not None:
        raise BufferSpecError(
            f"values: this {type(values).__name__} is on a GPU; copy it by gdcomm.to_host, or gdcomm.copy into "
            "gdcomm.pinned_like(values)"
        )
    source = np.asarray(values, dtype)
    made = pinned_like(source, write_combined=write_combined, mapped=mapped, numa=numa)
    np.copyto(made, source)
    return made


def checked(shape: Shape, dtype: npt.DTypeLike, order: str = "C") -> tuple[tuple[int, ...], np.dtype[Any]]:
    """The shape as a tuple and the dtype, if an array in page-locked memory can have them."""
    try:
        extents = (shape,) if type(shape) is int else _extents(shape)
    except TypeError:
        raise BufferSpecError(f"shape: {shape!r} is no int, nor a sequence of ints") from None
    if min(extents, default=0) < 0:
        raise BufferSpecError(f"shape: {shape!r} has a negative extent")
    try:
        kind = np.dtype(dtype)
    except TypeError as error:
        raise BufferSpecError(f"dtype: {error}") from None
    if kind.hasobject:
        raise BufferSpecError(f"dtype: {kind} holds Python objects, which a GPU can't read; give numbers or bytes")
    if order not in ("C", "F"):
        raise BufferSpecError(f'order: {order!r} is neither "C" nor "F"')
    return extents, kind


def _extents(shape: Shape) -> tuple[int, ...]:
    return tuple(operator.index(n) for n in shape) if isinstance(shape, Iterable) else (operator.index(shape),)


def _memory(
    shape: tuple[int, ...], dtype: np.dtype[Any], write_combined: bool, mapped: bool, numa: int | None
) -> _Array:
    """At least as many bytes as the array has."""
    nbytes = dtype.itemsize
    for extent in shape:
        nbytes *= extent  # Python integers: no overflow
    if numa is not None and write_combined:
        raise BufferSpecError("numa: write-combined memory can't be placed; give one of numa and write_combined")
    device = devices.current()
    if device is None:
        block = np.empty(nbytes + PAGE, np.uint8)
        return block[-block.ctypes.data % PAGE :][: max(nbytes, 1)]
    if mapped and not device.properties().can_map_host_memory:
        raise DeviceError("mapped: kernels of this GPU can't reach host memory; leave mapped out and copy")
    return np.asarray(pool_of(device).hold(nbytes, write_combined=write_combined, mapped=mapped, node=numa))


def _numpy_dtype(dtype: Any) -> np.dtype[Any]:
    if isinstance(dtype, np.dtype):
        return dtype
    name = str(dtype).removeprefix("torch.")
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def _fortran(array: Any) -> bool:
    flags = getattr(array, "flags", None)
    if flags is not None:
        return bool(flags["F_CONTIGUOUS"] and not flags["C_CONTIGUOUS"]) if hasattr(flags, "__getitem__") else False
    strides = getattr(array, "stride", None)  # torch
    if not callable(strides) or array.ndim < 2 or array.is_contiguous():
        return False
    return bool(array.permute(*reversed(range(array.ndim))).is_contiguous())
