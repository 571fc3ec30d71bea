"""Copies between any two kinds of memory by the fastest way."""

from __future__ import annotations

import math
import threading
from collections import deque
from contextlib import nullcontext
from typing import Any, Literal

import numpy as np

from gdcomm import devices
from gdcomm.devices.base import Buffer, Device, Event
from gdcomm.errors import BufferSpecError, DeviceError
from gdcomm.memory.arrays import pinned_empty
from gdcomm.memory.pinned import Slots, note_use, pool_of
from gdcomm.memory.registered import active
from gdcomm.memory.registered import pieces as segments
from gdcomm.transfer.sides import (
    Array,
    Side,
    address_of,
    agree,
    describe,
    is_dense,
    is_locked,
    library_of,
    runs,
    share_memory,
    span_of,
    strides_of,
)
from gdcomm.transfer.staging import download, host_copy, upload

__all__ = ["Copying", "by_driver", "copy", "keep", "move", "to_device", "to_host"]

_BYTES = np.dtype(np.uint8)
_SMALL = Slots.SIZE  # bytes that go through one slot of the calling thread
_BY_DRIVER = 8 << 20  # bytes up to which the driver copies pageable memory faster than several threads do
_SHORTEST_ROW = 128  # bytes from which on the copy engine moves rows faster than they are packed
_MOST_PLANES = 64  # copies of rows that one copy may be made of
_LONGEST_PITCH = 2**31 - 1  # bytes, CUDA's


class Copying:
    """A copy that may not be done yet. Arrays that it uses live at least as long as it takes."""

    __slots__ = ("_event", "_keep")

    def __init__(self, event: Event | None, *keep: Any) -> None:
        self._event, self._keep = event, keep

    def query(self) -> bool:
        """Tell whether the copy is done, without waiting."""
        if self._event is not None and not self._event.query():
            return False
        self._keep = ()
        return True

    def synchronize(self) -> None:
        """Block the calling thread until the copy is done."""
        if self._event is not None:
            self._event.synchronize()
        self._keep = ()


def copy(dst: Any, src: Any, *, stream: Any = None, block: bool | None = None) -> Copying | None:
    """Copy `src` into `dst`: host to device, device to host, on the device, between GPUs or on the host.

    Both may be NumPy arrays (pageable, pinned, registered, memory-mapped files, of any layout), CuPy, PyTorch,
    JAX or Numba arrays, or anything with the buffer protocol, DLPack or the CUDA Array Interface. The logical
    content is copied: C order into Fortran order is rearranged. Without a GPU, host arrays are copied all the same.

    Args:
        dst: a writable array.
        src: an array of the same shape and dtype; nothing is broadcast or converted. It may overlap `dst`.
        stream: the stream that the copy is ordered on (an object with `__cuda_stream__`, `.ptr` or
            `.cuda_stream`, or a handle), between GPUs one of the GPU of `dst`. None: the current stream of
            each device array's own library.
        block: None returns when the host's part is over: a host destination holds its data, a host source
            may be overwritten; device arrays are ready in stream order. True waits until all is done.
            False does not wait for page-locked (pinned, registered) memory: don't touch it until the
            result says that the copy is done. Pageable memory is read or written before the call
            returns also then.

    Returns:
        With `block=False` an object with `query()` and `synchronize()`, else None.

    Raises:
        BufferSpecError: an argument is no array, shapes or dtypes differ, or `dst` is read-only.
        DeviceError: device memory that can't be reached.
    """
    if block is not False and _short(dst, src, stream, block):
        return None
    try:
        to, source = describe(dst, "dst", stream, True), describe(src, "src", stream)
    except DeviceError:
        device = devices.current()
        if device is None or device.elsewhere(dst) is device.elsewhere(src) is None:
            raise
        return _elsewhere(device, dst, src, stream, block)
    agree(to, source)
    if not to.nbytes:
        return Copying(None) if block is False else None
    return move(to, source, stream, block)


def to_device(array: Any, *, out: Any = None, stream: Any = None, block: bool | None = None) -> Any:
    """Return host memory as a new device array, of the same shape, dtype and (C or Fortran) order.

    Args:
        array: host memory as in `copy`. A CPU tensor of PyTorch becomes a CUDA tensor, a JAX array one on the
            GPU, all else a CuPy array. What is on the device already is returned as it is.
        out: a device array to copy into instead; it is returned.
        stream: the stream that the copy is ordered on, and that the new memory belongs to; None: the
            library's current one.
        block: as in `copy`. With False, page-locked memory may be overwritten only once the stream has passed.

    Raises:
        BufferSpecError: no array, or one that does not agree with `out`.
        DeviceError: there is no GPU that can be used.
    """
    if out is not None:
        if isinstance(describe(out, "out", stream, True), np.ndarray):
            raise BufferSpecError(f"out: a {type(out).__name__} is host memory; give a device array, or use copy")
        copy(out, array, stream=stream, block=block)
        return out
    source = describe(array, "array", stream)
    if isinstance(source, Buffer):
        return array
    if not source.dtype.isnative:
        raise BufferSpecError(f"array: dtype {source.dtype} has the other byte order; convert it with astype first")
    device = devices.current()
    if device is None:
        raise DeviceError(
            "to_device: no GPU can be used here; it needs one, and CuPy: pip install cupy-cuda13x (or cupy-cuda12x). "
            "For tests without a GPU: gdcomm.testing.emulate()"
        )
    flags = source.flags
    arguments = library_of(array), source.shape, source.dtype, "F" if flags.fnc else "C"

    def fill(buffer: Buffer) -> None:
        move(buffer, source, stream, block)

    if stream is None:
        return device.build(*arguments, fill)
    with device.on(device.handle(stream)):
        return device.build(*arguments, fill)


def to_host(array: Any, *, out: Any = None, stream: Any = None) -> Any:
    """Return a device array's content in host memory, in the order (C, Fortran) of the source.

    The result of more than 64 KiB is page-locked memory from a pool, where it arrives by one DMA, without
    the page faults of new memory. It goes back to the pool when the last view of it goes.

    Args:
        array: a device array. Host memory is returned as a NumPy array without a copy.
        out: a writable host array (or tensor) to copy into instead; it is returned.
        stream: the stream that the copy is ordered on; None: the current one of the array's library.

    Raises:
        BufferSpecError: no array, or one that does not agree with `out`.
        DeviceError: device memory that can't be reached.
    """
    if out is not None:
        if isinstance(describe(out, "out", stream, True), Buffer):
            raise BufferSpecError(f"out: a {type(out).__name__} is device memory; give a host array, or use copy")
        copy(out, array, stream=stream)
        return out
    try:
        source = describe(array, "array", stream)
    except DeviceError:
        device = devices.current()
        there = device.elsewhere(array) if device is not None else None
        if there is None:
            raise
        with there:
            return to_host(array, stream=stream)
    if not isinstance(source, Buffer):
        return source
    made = _host_like(source)
    if source.nbytes:
        move(made, source, stream, None)
    return made


def move(to: Side, source: Side, stream: Any, block: bool | None) -> Copying | None:
    """Copy between two described sides that agree and are not empty; see `copy`."""
    if isinstance(to, Buffer):
        if isinstance(source, Buffer):
            _on_device(to, source)
            return _end(to.device, to.stream, block, arrays=(to, source))
        return _between(to, source, to, source, block)
    if isinstance(source, Buffer):
        return _between(to, source, source, to, block)
    device = devices.current() if stream is not None else None
    if device is not None:
        device.synchronize(device.handle(stream))
    host_copy(to, source)
    return Copying(None) if block is False else None


def _short(dst: Any, src: Any, stream: Any, block: bool | None) -> bool:
    """Copy between a short NumPy array and a device array; tell if it was done.

    The questions of `describe` and `agree` would take longer than the copy; a plain pair of arrays answers fewer.
    """
    down = type(dst) is np.ndarray
    host: Array = dst if down else src
    if type(host) is not np.ndarray or not 0 < host.nbytes <= _short_limit(block or down):
        return False
    flags, other = host.flags, src if down else dst
    if not (flags.carray if down else flags.c_contiguous):
        return False
    if stream is None and (block or down) and flags.carray:
        device = devices.current()
        if device is not None and not _crosses(host) and device.copy_short(host, other, down):
            return True
    try:
        buffer = devices.find(other, stream)
    except DeviceError:
        return False
    if buffer is None or buffer.strides is not None or (buffer.readonly and not down):
        return False
    if buffer.dtype != host.dtype or buffer.shape != host.shape:
        return False
    return _small(buffer, host, not down, block)


def _short_limit(waits: Any) -> int:
    """Bytes up to which a copy is one call of the driver, whatever memory it is, or goes through a slot."""
    return _BY_DRIVER if waits else _SMALL


def _small(buffer: Buffer, host: Array, up: bool, block: bool | None) -> bool:
    """A short contiguous copy with few calls, and without a look at the host's memory; tell if it was done."""
    device, nbytes, stream = buffer.device, buffer.nbytes, buffer.stream
    if block or not up:
        if _crosses(host):
            return False
        address = address_of(host)
        ends = (buffer.ptr, address) if up else (address, buffer.ptr)
        device.copy(*ends, nbytes, stream)  # of pageable memory, the driver has a short way too
        device.synchronize(stream)
        return True
    try:
        slot = pool_of(device).slots().take()
    except MemoryError:  # over the budget for page-locked memory; nothing is queued yet
        return False
    slot.array[:nbytes] = np.frombuffer(host, _BYTES)  # half the time of a view and copyto
    device.copy(buffer.ptr, slot.address, nbytes, stream)
    slot.event = device.record(stream)
    return True


def _between(to: Side, source: Side, buffer: Buffer, host: Array, block: bool | None) -> Copying | None:
    """Between device and host memory."""
    device, up = buffer.device, to is buffer
    plain = buffer.strides is None and host.flags.c_contiguous
    short = block is not False and host.nbytes <= _short_limit(block or not up)
    if plain and short and _small(buffer, host, up, block):
        return None
    locked = is_locked(device, host)
    coherent = device.properties().coherent
    if (locked or coherent or by_driver(host, locked)) and _direct(to, source, host, buffer):
        if not locked and (coherent or not up):
            device.synchronize(buffer.stream)
        return _end(device, buffer.stream, block, host if locked else None, (to, source))
    if up:
        upload(buffer, host)
    else:
        download(host, buffer)
    return _end(device, buffer.stream, block, arrays=(buffer,))


def by_driver(host: Array, locked: bool | None) -> bool:
    """Whether host memory of this kind (see `is_locked`) is so short that the driver's own way through it is fastest.

    The driver takes a source during the call, and a destination holds its data after it.
    """
    if locked is not False or host.nbytes > _BY_DRIVER:
        return False
    return not _crosses(host)


def _crosses(host: Array) -> bool:
    """Whether memory reaches from one registration into another, or beyond it: no copy may do that."""
    if not active():
        return False
    first, end = span_of(host)
    return len(segments(first, end - first)) > 1


def _direct(to: Side, source: Side, host: Array, buffer: Buffer) -> bool:
    """Queue the copy as DMA of contiguous bytes or rows; tell if the layouts allow that."""
    device, stream, plan = buffer.device, buffer.stream, runs(to, source)
    first, end = span_of(host)
    parts = segments(first, end - first)
    if not plan.extents:
        for address, nbytes in parts:
            offset = address - first
            device.copy(plan.dst + offset, plan.src + offset, nbytes, stream)
        return True
    steps = (*plan.dst_steps, *plan.src_steps)
    *planes, height = plan.extents
    if (
        len(parts) > 1
        or plan.width < _SHORTEST_ROW
        or plan.width > min(steps)
        or max(steps) > _LONGEST_PITCH
        or math.prod(planes) > _MOST_PLANES
    ):
        return False
    for index in np.ndindex(*planes):
        dst = plan.dst + sum(i * step for i, step in zip(index, plan.dst_steps, strict=False))
        src = plan.src + sum(i * step for i, step in zip(index, plan.src_steps, strict=False))
        device.copy_rows(dst, plan.dst_steps[-1], src, plan.src_steps[-1], plan.width, height, stream)
    return True


def _on_device(to: Buffer, source: Buffer) -> None:
    device = to.device
    if source.stream != to.stream:
        device.wait_event(to.stream, device.record(source.stream))
    ordered = source._replace(stream=to.stream)
    if not (to.ptr == source.ptr and strides_of(to) == strides_of(source)):
        if share_memory(to, source):
            ordered = device.snapshot(ordered)
        plan = runs(to, ordered)
        if plan.extents:
            device.copy_strided(to, ordered)
        else:
            device.copy(plan.dst, plan.src, plan.width, to.stream)
        if ordered.ptr != source.ptr:
            keep(device.record(to.stream), ordered)
    if source.stream != to.stream:
        device.wait_event(source.stream, device.record(to.stream))


# -- ends ------------------------------------------------------------------------------------------

_under_way: deque[Copying] = deque()  # oldest first: keeps arrays of copies that nobody waited for
_under_way_lock = threading.Lock()


def keep(event: Event, *arrays: Any) -> Copying:
    """Keep arrays until the event is done, or somebody waited for it (it is looked at by later copies)."""
    copying = Copying(event, *arrays)
    with _under_way_lock:
        while _under_way and _under_way[0].query():
            _under_way.popleft()
        _under_way.append(copying)
    return copying


def _end(
    device: Device, stream: Any, block: bool | None, host: Array | None = None, arrays: tuple[Any, ...] = ()
) -> Copying | None:
    """Wait for what was queued, or return what tells when it is done.

    Args:
        host: page-locked memory that the copy uses until it is done.
        arrays: must live until then.
    """
    if block is False:
        event = device.record(stream)
        if host is not None:
            first, end = span_of(host)
            note_use(first, end - first, event)
        return keep(event, *arrays)
    if block or host is not None:
        device.synchronize(stream)
    return None


def _host_like(buffer: Buffer) -> Array:
    """New host memory of a device array's shape, dtype and order."""
    order: Literal["C", "F"] = "C"
    if not buffer.contiguous and is_dense(buffer, range(len(buffer.shape))[::-1]):
        order = "F"
    if buffer.nbytes > _SMALL:
        try:
            return pinned_empty(buffer.shape, buffer.dtype, order=order)
        except (MemoryError, DeviceError):  # over the budget for page-locked memory, or there is no more
            pass
    return np.empty(buffer.shape, buffer.dtype, order)


def _elsewhere(device: Device, dst: Any, src: Any, stream: Any, block: bool | None) -> Copying | None:
    """A copy with an array on a GPU that is not the current one."""
    nowhere = nullcontext()
    at_dst, at_src = (device.elsewhere(obj) or nowhere for obj in (dst, src))
    with at_dst:
        if device.elsewhere(src) is None:  # on the same GPU, or host memory
            return copy(dst, src, stream=stream, block=block)
        to = describe(dst, "dst", stream, True)
    with at_src:
        if not isinstance(to, Buffer):
            return copy(dst, src, stream=stream, block=block)
        source = describe(src, "src")
        agree(to, source)
        assert isinstance(source, Buffer)
        if not to.nbytes:
            return Copying(None) if block is False else None
        near = source if source.contiguous else device.snapshot(source)
        ready = device.record(near.stream)
    with at_dst:
        device.wait_event(to.stream, ready)
        device.connect(to, near)
        packed = to if to.contiguous else device.snapshot(to)  # of the same form; its content does not matter
        device.copy(packed.ptr, near.ptr, to.nbytes, to.stream)
        if packed is not to:
            device.copy_strided(to, packed)
        done = device.record(to.stream)
        keep(done, near, packed)
    with at_src:
        device.wait_event(source.stream, done)
    with at_dst:
        return _end(device, to.stream, block, arrays=(to, near))
