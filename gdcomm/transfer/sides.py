"""The two sides of a copy: what memory an object is, whether both agree, how their bytes lie."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from gdcomm import devices
from gdcomm.devices.base import Buffer, Device
from gdcomm.devices.memory import address_of as block_address
from gdcomm.errors import BufferSpecError

__all__ = [
    "Runs", "Side", "address_of", "agree", "describe", "is_dense", "is_locked", "library_of", "pieces", "raw",
    "reorder", "runs", "share_memory", "span_of", "strides_of",
]  # fmt: skip

Array = np.ndarray[Any, Any]
Side: TypeAlias = "Buffer | np.ndarray[Any, Any]"  # device memory | host memory

_WORDS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}  # NumPy copies these faster than void of the same size
_READS = "a NumPy array, a CPU tensor, anything with the buffer protocol or DLPack, or a device array"


def describe(obj: Any, name: str, stream: Any = None, writable: bool = False) -> Side:
    """The memory of an object: a Buffer if it is the device's, else a NumPy view of it.

    Raises:
        BufferSpecError: it is no array, or can't be written and `writable` asks for that.
        DeviceError: it is on a GPU that is not the current one, or that can't be reached.
    """
    if type(obj) is np.ndarray:
        view: Array = obj
    else:
        buffer = None if isinstance(obj, np.ndarray) else devices.find(obj, stream)
        if buffer is not None:
            if writable:
                buffer.require_writable("copy", name)
                _refuse_overlap(buffer, name)
            return buffer
        view = _host_view(obj, name)
    if view.dtype.hasobject:
        raise BufferSpecError(f"{name}: dtype {view.dtype} holds Python objects, which have no bytes to copy")
    if writable:
        if not view.flags.writeable:
            raise BufferSpecError(f"{name}: this {type(obj).__name__} is read-only; give a writable one")
        if 0 in view.strides:
            _refuse_overlap(view, name)
    return view


def _host_view(obj: Any, name: str) -> Array:
    if isinstance(obj, np.ma.MaskedArray):
        raise BufferSpecError(f"{name}: a masked array has two parts; give .data and .mask, or .filled()")
    if isinstance(obj, np.ndarray):
        return np.asarray(obj)  # np.memmap, or a subclass that indexes in its own way
    try:
        library = library_of(obj)
        if library == "torch":
            return _torch_view(obj)
        if library == "jax":
            return np.asarray(obj)
        if hasattr(obj, "__dlpack__"):
            return np.from_dlpack(obj)
        return np.asarray(memoryview(obj))
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        if isinstance(error, BufferSpecError):
            raise
        raise BufferSpecError(
            f"{name}: a {type(obj).__module__}.{type(obj).__name__} is no memory to copy ({error}); give {_READS}"
        ) from None


def _torch_view(tensor: Any) -> Array:
    if tensor.requires_grad:
        raise BufferSpecError("the tensor requires grad: the copy is not recorded; give tensor.detach()")
    torch = importlib.import_module("torch")
    try:
        return tensor.numpy()
    except TypeError:
        kind = str(tensor.dtype).removeprefix("torch.")  # bfloat16 and 8-bit floats, which NumPy lacks
        dtype = np.dtype(getattr(importlib.import_module("ml_dtypes"), kind, kind))
        return tensor.view(getattr(torch, f"int{8 * dtype.itemsize}")).numpy().view(dtype)


def library_of(obj: Any) -> str:
    """The library that makes arrays like this one: "torch", "jax" or "cupy" (of NumPy and all others)."""
    root = type(obj).__module__.partition(".")[0]
    return {"torch": "torch", "jax": "jax", "jaxlib": "jax"}.get(root, "cupy")


def _refuse_overlap(side: Side, name: str) -> None:
    if any(step == 0 and extent > 1 for step, extent in zip(side.strides or (), side.shape)):  # noqa: B905
        raise BufferSpecError(f"{name}: several elements share memory (a broadcast view); give a copy of it")


def agree(dst: Side, src: Side, names: tuple[str, str] = ("dst", "src")) -> None:
    """Raise unless both sides have one shape and one dtype.

    Raises:
        BufferSpecError: naming both.
    """
    if dst.shape != src.shape:
        raise BufferSpecError(
            f"{names[0]} has shape {dst.shape}, {names[1]} has {src.shape}; a copy does not broadcast or reshape: "
            "give views of one shape"
        )
    if dst.dtype != src.dtype:
        raise BufferSpecError(
            f"{names[0]} has dtype {dst.dtype}, {names[1]} has {src.dtype}; a copy does not convert: "
            "give arrays of one dtype, or convert one first with astype"
        )


# -- where the bytes are ---------------------------------------------------------------------------


def address_of(array: Array) -> int:
    """Address of the element at index 0."""
    try:
        return block_address(array)
    except (TypeError, ValueError, BufferError):  # read-only, with gaps, or empty
        return int(array.__array_interface__["data"][0])


def strides_of(side: Side) -> tuple[int, ...]:
    """Byte step of each axis."""
    if side.strides is not None:
        return side.strides
    steps, step = [], side.dtype.itemsize
    for extent in reversed(side.shape):
        steps.append(step)
        step *= extent
    return tuple(reversed(steps))


def span_of(side: Side) -> tuple[int, int]:
    """First address of the memory of a side that is not empty, and the one after its last."""
    start = side.ptr if isinstance(side, Buffer) else address_of(side)
    reach = [(extent - 1) * step for extent, step in zip(side.shape, strides_of(side), strict=True)]
    return start + sum(r for r in reach if r < 0), start + sum(r for r in reach if r > 0) + side.dtype.itemsize


def share_memory(a: Side, b: Side) -> bool:
    """Whether the memory of two sides may have bytes in common."""
    (first, end), (other, stop) = span_of(a), span_of(b)
    return first < stop and other < end


def is_locked(device: Device, array: Array) -> bool | None:
    """Whether the device reads and writes this host memory by itself, without the driver's detour; None: in part.

    Both ends are asked, each time: an array may be registered in part, or no longer.
    """
    first, end = span_of(array)
    ends = device.is_pinned(first), device.is_pinned(end - 1)
    if all(ends):
        return True
    if any(ends):
        return None
    return device.owns(first) and device.owns(end - 1)  # managed memory


# -- how the bytes lie -----------------------------------------------------------------------------


class Runs(NamedTuple):
    """The same elements on both sides as runs of `width` contiguous bytes, counted by axes from the outermost in.

    Args:
        width: bytes of a run.
        extents: runs along each axis; empty if the whole is one run.
        dst_steps, src_steps: bytes from one run to the next along each axis.
        dst, src: addresses of the first run.
    """

    width: int
    extents: tuple[int, ...]
    dst_steps: tuple[int, ...]
    src_steps: tuple[int, ...]
    dst: int
    src: int


def runs(dst: Side, src: Side) -> Runs:
    """The longest runs that a copy between two sides that agree, and are not empty, consists of."""
    width = dst.dtype.itemsize
    to, origin = (side.ptr if isinstance(side, Buffer) else address_of(side) for side in (dst, src))
    axes = []
    for extent, d, s in zip(dst.shape, strides_of(dst), strides_of(src), strict=True):
        if extent == 1:
            continue
        if d < 0 and s < 0:  # backwards on both sides is forwards
            to, origin, d, s = to + (extent - 1) * d, origin + (extent - 1) * s, -d, -s
        axes.append((d, s, extent))
    outer: list[tuple[int, int, int]] = []  # innermost first
    for d, s, extent in sorted(axes, key=lambda axis: (abs(axis[0]), abs(axis[1]))):
        if not outer and d == s == width:
            width *= extent
        elif outer and (d, s) == (outer[-1][0] * outer[-1][2], outer[-1][1] * outer[-1][2]):
            outer[-1] = (*outer[-1][:2], outer[-1][2] * extent)
        else:
            outer.append((d, s, extent))
    outer.reverse()
    return Runs(width, tuple(a[2] for a in outer), tuple(a[0] for a in outer), tuple(a[1] for a in outer), to, origin)


def reorder(host: Array, buffer: Buffer) -> tuple[Array, Buffer]:
    """Views of both sides with their axes in one order, in which at least one is contiguous if any order makes it so.

    The host's comes first: the device rearranges faster than the processor.
    """
    order = _order(host)
    if not host.transpose(order).flags.c_contiguous and is_dense(buffer, _order(buffer)):
        order = _order(buffer)
    host = host.transpose(order)
    host = host.reshape(-1).view(np.uint8) if host.flags.c_contiguous else raw(host)
    steps = strides_of(buffer)
    strides = None if is_dense(buffer, order) else tuple(steps[axis] for axis in order)
    return host, buffer._replace(shape=tuple(buffer.shape[axis] for axis in order), strides=strides)


def raw(array: Array) -> Array:
    """The same elements as plain words, which NumPy copies fast and without the interpreter's lock."""
    return array.view(_WORDS.get(array.itemsize, f"V{array.itemsize}"))


def _order(side: Side) -> list[int]:
    """Axes from the largest step to the smallest."""
    strides = strides_of(side)
    return sorted(range(len(strides)), key=lambda axis: (side.shape[axis] == 1, -abs(strides[axis])))


def is_dense(side: Side, order: Sequence[int]) -> bool:
    """Whether the elements lie without gaps when the axes are taken in this order, the outermost first."""
    expected, strides = side.dtype.itemsize, strides_of(side)
    for axis in reversed(order):
        if side.shape[axis] > 1:
            if strides[axis] != expected:
                return False
            expected *= side.shape[axis]
    return True


def pieces(limit: int, *views: Array, offset: int = 0) -> Iterator[tuple[int, tuple[Array, ...]]]:
    """Cut arrays of one shape alike, in logical order, into views of at most `limit` bytes (or one element).

    Yields:
        Byte at which a piece begins in the content, and the piece of each array.
    """
    first = views[0]
    if first.nbytes <= limit or first.ndim == 0:
        yield offset, views
        return
    row = first.nbytes // len(first)
    if row > limit:
        for i in range(len(first)):
            yield from pieces(limit, *(view[i, ...] for view in views), offset=offset + i * row)
        return
    step = limit // row
    for i in range(0, len(first), step):
        yield offset + i * row, tuple(view[i : i + step] for view in views)
