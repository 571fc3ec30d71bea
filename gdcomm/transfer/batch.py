"""Many small copies in one go.

A copy costs some microseconds, however short it is. So a table of all pieces goes to the device, where one kernel
moves them; pieces in pageable memory are packed into one page-locked block first, or unpacked from it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from gdcomm import devices
from gdcomm.devices.base import Buffer, Device
from gdcomm.errors import BufferSpecError, DeviceError
from gdcomm.memory.pinned import pool_of
from gdcomm.memory.registered import pieces as segments
from gdcomm.transfer.copy import copy, move
from gdcomm.transfer.sides import Array, Side, address_of, agree, describe

__all__ = ["copy_many"]

_LONG = 256 << 10  # bytes from which on a piece is a copy of its own: the link takes longer than the call
_BLOCK = 32 << 20  # bytes packed at a time
_MOST_BASES = 64  # blocks of host memory of which a batch finds out whether they are page-locked

_address = ctypes.addressof
_memory = ctypes.c_char.from_buffer


def copy_many(dsts: Iterable[Any], srcs: Iterable[Any], *, stream: Any = None) -> None:
    """Copy each of `srcs` into the array at its place in `dsts`: thousands of pieces at the cost of a few copies.

    All arguments are checked before anything is queued. Pieces may be of any sizes, layouts and kinds of
    memory, also mixed; lists of one kind (all NumPy, all CuPy) of C-contiguous arrays are looked at fastest. When
    the call returns, host destinations hold their data, host sources may be overwritten, and device
    arrays are ready in stream order.

    Pieces are copied in no particular order: what overlaps the destination of another piece has no
    defined content.

    Args:
        dsts: writable arrays, as in `copy`.
        srcs: as many arrays, each of the shape and dtype of its destination.
        stream: the stream that all is ordered on; None: the current one of the first device array's library,
            which those of other libraries are then ordered with.

    Raises:
        BufferSpecError: naming the piece that is wrong; nothing was copied.
        DeviceError: device memory that can't be reached.
    """
    dsts, srcs = list(dsts), list(srcs)
    if len(dsts) != len(srcs):
        raise BufferSpecError(f"dsts has {len(dsts)} arrays, srcs has {len(srcs)}; give a source for each destination")
    if not dsts or _plain(dsts, srcs, stream):
        return
    try:
        pairs = _described(dsts, srcs, stream)
    except DeviceError:
        device = devices.current()
        if device is None or all(device.elsewhere(array) is None for array in (*dsts, *srcs)):
            raise
        for dst, src in zip(dsts, srcs, strict=True):  # on several GPUs
            copy(dst, src, stream=stream)
        return
    _Sorted.of(pairs).run(stream)


# -- lists of one kind -------------------------------------------------------------------------------


def _plain(dsts: list[Any], srcs: list[Any], stream: Any) -> bool:
    """Copy, if both lists hold plain short arrays of one kind, and at least one is on the device; tell if so."""
    device = devices.current()
    on_host = [set(map(type, arrays)) == {np.ndarray} for arrays in (dsts, srcs)]
    if device is None or all(on_host):
        return False
    to, origin = (
        None if host else device.addresses(arrays) for host, arrays in zip(on_host, (dsts, srcs), strict=True)
    )
    if [to is None, origin is None] != on_host:
        return False
    dtypes = [a.dtype for a in srcs]
    if [a.dtype for a in dsts] != dtypes or [a.shape for a in dsts] != [a.shape for a in srcs]:
        return False
    sizes = [a.nbytes for a in srcs]
    if not 0 < min(sizes) <= max(sizes) <= _LONG:
        return False
    if to is None and not all([a.flags.carray for a in dsts]):
        return False
    if origin is None and any(dtype.hasobject for dtype in set(dtypes)):
        return False
    batch = _Batch(device, device.handle(stream))
    try:
        if to is None:
            assert origin is not None
            batch.download(dsts, origin, sizes)
        elif origin is None:
            batch.upload(to, srcs, sizes)
        else:
            batch.queue(to, origin, sizes)
    except MemoryError:  # over the budget for page-locked memory; what was copied is copied once more
        return False
    return True


class _Batch:
    """Pieces of one direction on one stream. Memory of the device is given by its addresses."""

    def __init__(self, device: Device, stream: Any) -> None:
        self._device, self._stream = device, stream
        self._pool = pool_of(device)

    def queue(self, dsts: list[int], srcs: list[int], sizes: list[int]) -> None:
        """Queue copies between memory that kernels reach."""
        device, stream, count = self._device, self._stream, len(sizes)
        lease = self._pool.lease(24 * count)
        table = lease.array.view(np.uint64).reshape(3, count)
        table[0], table[1], table[2] = dsts, srcs, sizes
        try:
            device.copy_pieces(table, max(sizes), stream)
        finally:
            lease.release(device.record(stream))

    def upload(self, dsts: list[int], srcs: Sequence[Array], sizes: list[int]) -> None:
        """Host to device; returns when the host's memory was read."""
        addresses = _reached(self._device, srcs, sizes)
        if addresses is not None:
            self.queue(dsts, addresses, sizes)
            self._device.synchronize(self._stream)
            return
        for part in _parts(sizes):
            with self._packed(dsts[part], srcs[part], sizes[part]) as (packed, views):
                for piece, view in zip(srcs[part], views, strict=True):
                    view[...] = piece
                self.queue(dsts[part], packed, sizes[part])

    def download(self, dsts: Sequence[Array], srcs: list[int], sizes: list[int]) -> None:
        """Device to host; returns when the host's memory holds the data."""
        addresses = _reached(self._device, dsts, sizes)
        if addresses is not None:
            self.queue(addresses, srcs, sizes)
            self._device.synchronize(self._stream)
            return
        for part in _parts(sizes):
            with self._packed(srcs[part], dsts[part], sizes[part]) as (packed, views):
                self.queue(packed, srcs[part], sizes[part])
                self._device.synchronize(self._stream)
                for piece, view in zip(dsts[part], views, strict=True):
                    piece[...] = view

    @contextmanager
    def _packed(
        self, addresses: list[int], host: Sequence[Array], sizes: list[int]
    ) -> Iterator[tuple[list[int], Iterable[Array]]]:
        """A page-locked block that holds the host's pieces one after the other: their addresses, and views of them."""
        offsets, total = _places(addresses, sizes)
        lease = self._pool.lease(total)
        try:
            yield [lease.address + offset for offset in offsets], _views(lease.array, offsets, host)
        finally:
            lease.release(self._device.record(self._stream))


def _parts(sizes: list[int]) -> Iterator[slice]:
    """Cut a batch so that what is packed at a time stays small."""
    start = total = 0
    for i, nbytes in enumerate(sizes):
        if total + nbytes > _BLOCK:
            yield slice(start, i)
            start, total = i, 0
        total += nbytes + 16
    yield slice(start, len(sizes))


def _places(addresses: list[int], sizes: list[int]) -> tuple[Sequence[int], int]:
    """Offsets of pieces in a block, each as far from a multiple of 16 as its other side; and the block's bytes."""
    first = sizes[0]
    if first % 16 == 0 and sizes.count(first) == len(sizes):
        return range(0, first * len(sizes), first), first * len(sizes)
    offsets, end = [], 0
    for address, nbytes in zip(addresses, sizes, strict=True):
        end += (address - end) % 16
        offsets.append(end)
        end += nbytes
    return offsets, end


def _views(block: Array, offsets: Sequence[int], like: Sequence[Array]) -> Iterable[Array]:
    """The pieces of a packed block."""
    first, count = like[0], len(like)
    shape, dtype = first.shape, first.dtype
    if isinstance(offsets, range) and all([a.shape == shape for a in like]) and {a.dtype for a in like} == {dtype}:
        rows = block[: first.nbytes * count].view(dtype).reshape(count, *shape)
        return rows if shape else [rows[i, ...] for i in range(count)]
    places = zip(offsets, like, strict=True)
    return [block[offset : offset + a.nbytes].view(a.dtype).reshape(a.shape) for offset, a in places]


def _reached(device: Device, arrays: Sequence[Array], sizes: list[int]) -> list[int] | None:
    """Addresses of host arrays if kernels reach all of them."""
    first, last = arrays[0], arrays[-1]
    if not all(device.is_pinned(address_of(a)) for a in (first, last)):
        return None
    try:
        addresses = [_address(_memory(a)) for a in arrays]  # type: ignore[arg-type]
    except (TypeError, BufferError, ValueError):  # read-only, or not contiguous
        if not all([a.flags.c_contiguous for a in arrays]):
            return None
        addresses = [address_of(a) for a in arrays]
    spans: dict[int, tuple[int, int]] = {}
    for a, start, nbytes in zip(arrays, addresses, sizes, strict=True):
        base = id(a if a.base is None else a.base)
        low, high = spans.get(base, (start, start))
        spans[base] = min(low, start), max(high, start + nbytes)
        if len(spans) > _MOST_BASES:
            return None
    for low, high in spans.values():
        if device.kernel_address(low, high - low) != low or len(segments(low, high - low)) > 1:
            return None
    return addresses


# -- mixtures ----------------------------------------------------------------------------------------


def _described(dsts: list[Any], srcs: list[Any], stream: Any) -> list[tuple[Side, Side]]:
    pairs = []
    for i, (dst, src) in enumerate(zip(dsts, srcs, strict=True)):
        names = f"dsts[{i}]", f"srcs[{i}]"
        to, source = describe(dst, names[0], stream, True), describe(src, names[1], stream)
        agree(to, source, names)
        if to.nbytes:
            pairs.append((to, source))
    return pairs


class _Sorted(NamedTuple):
    """Pairs of a mixture by how they are moved; `single` ones are strided on the device, long, or on the host."""

    up: list[tuple[Buffer, Array]]
    down: list[tuple[Array, Buffer]]
    across: list[tuple[Buffer, Buffer]]
    single: list[tuple[Side, Side]]

    @classmethod
    def of(cls, pairs: list[tuple[Side, Side]]) -> _Sorted:
        """Sort described pairs."""
        made = cls([], [], [], [])
        for to, source in pairs:
            ends = [side for side in (to, source) if isinstance(side, Buffer)]
            if not ends or to.nbytes > _LONG or not all(end.contiguous for end in ends):
                made.single.append((to, source))
            elif isinstance(to, Buffer):
                if isinstance(source, Buffer):
                    made.across.append((to, source))
                else:
                    made.up.append((to, source))
            else:
                made.down.append((to, source))  # type: ignore[arg-type]
        return made

    def run(self, stream: Any) -> None:
        """Copy; the streams of all device arrays are ordered with the first one's, on which the work is."""
        buffers = [side for group in self for pair in group for side in pair if isinstance(side, Buffer)]
        if not buffers:
            for to, source in self.single:
                move(to, source, stream, None)
            return
        device, main = buffers[0].device, buffers[0].stream
        others = {b.stream for b in buffers} - {main}
        for other in others:
            device.wait_event(main, device.record(other))
        batch = _Batch(device, main)
        try:
            self._batches(batch)
        except MemoryError:  # over the budget for page-locked memory; what was copied is copied once more
            self.single.extend([*self.up, *self.down, *self.across])
        for pair in self.single:
            to, source = (side._replace(stream=main) if isinstance(side, Buffer) else side for side in pair)
            move(to, source, stream, None)
        for other in others:
            device.wait_event(other, device.record(main))

    def _batches(self, batch: _Batch) -> None:
        if self.across:
            to, origin = zip(*self.across, strict=True)
            batch.queue([b.ptr for b in to], [b.ptr for b in origin], [b.nbytes for b in to])
        if self.up:
            to, arrays = zip(*self.up, strict=True)
            batch.upload([b.ptr for b in to], arrays, [b.nbytes for b in to])
        if self.down:
            arrays, origin = zip(*self.down, strict=True)
            batch.download(arrays, [b.ptr for b in origin], [b.nbytes for b in origin])
