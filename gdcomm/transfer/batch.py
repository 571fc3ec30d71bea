"""Many small copies in one go.

A copy costs some microseconds, however short it is. So a table of all pieces goes to the device, where one kernel
moves them; pieces in pageable memory are packed into one page-locked block first, or unpacked from it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

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
_PACKED = 6 << 10  # bytes up to which host memory is packed even if it is page-locked: an address costs as much
_WORD = 16  # bytes that a thread moves at once, where both sides are aligned alike
_MOST_BASES = 64  # blocks of host memory of which a batch finds out whether they are page-locked

_U64 = np.dtype(np.uint64)
_Numbers: TypeAlias = "np.ndarray[Any, np.dtype[np.uint64]]"
_dtype_of, _shape_of = operator.attrgetter("dtype"), operator.attrgetter("shape")


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
    """Copy, if both lists hold plain short arrays of one kind, and at least one is on the device; tell if so.

    Looking at a piece costs more than moving it, so each question is asked of a whole list.
    """
    device = devices.current()
    on_host = [set(map(type, arrays)) == {np.ndarray} for arrays in (dsts, srcs)]
    if device is None or all(on_host):
        return False
    to, origin = (
        None if host else device.addresses(arrays) for host, arrays in zip(on_host, (dsts, srcs), strict=True)
    )
    if [to is None, origin is None] != on_host:
        return False
    dtypes, shapes = list(map(_dtype_of, srcs)), list(map(_shape_of, srcs))
    if list(map(_dtype_of, dsts)) != dtypes or list(map(_shape_of, dsts)) != shapes:
        return False
    alike = dtypes.count(dtypes[0]) == shapes.count(shapes[0]) == len(srcs)
    sizes = np.full(len(srcs), srcs[0].nbytes, _U64) if alike else np.array([a.nbytes for a in srcs], _U64)
    if not 0 < sizes.min() <= sizes.max() <= _LONG:
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

    def queue(self, dsts: _Numbers, srcs: _Numbers, sizes: _Numbers) -> None:
        """Queue copies between memory that kernels reach."""
        device, stream, count = self._device, self._stream, len(sizes)
        lease = self._pool.lease(24 * count)
        table = lease.array.view(_U64).reshape(3, count)
        table[0], table[1], table[2] = dsts, srcs, sizes
        try:
            device.copy_pieces(table, int(sizes.max()), stream)
        finally:
            lease.release(device.record(stream))

    def upload(self, dsts: _Numbers, srcs: Sequence[Array], sizes: _Numbers) -> None:
        """Host to device; returns when the host's memory was read."""
        addresses = _reached(self._device, srcs, sizes)
        if addresses is not None:
            self.queue(dsts, addresses, sizes)
            self._device.synchronize(self._stream)
            return
        for part in _parts(sizes):
            with self._packed(dsts[part], sizes[part]) as block:
                block.fill(srcs[part])
                self.queue(dsts[part], block.addresses, sizes[part])

    def download(self, dsts: Sequence[Array], srcs: _Numbers, sizes: _Numbers) -> None:
        """Device to host; returns when the host's memory holds the data."""
        addresses = _reached(self._device, dsts, sizes)
        if addresses is not None:
            self.queue(addresses, srcs, sizes)
            self._device.synchronize(self._stream)
            return
        for part in _parts(sizes):
            with self._packed(srcs[part], sizes[part]) as block:
                self.queue(block.addresses, srcs[part], sizes[part])
                self._device.synchronize(self._stream)
                block.empty(dsts[part])

    @contextmanager
    def _packed(self, addresses: _Numbers, sizes: _Numbers) -> Iterator[_Packed]:
        """A page-locked block that holds the host's pieces one after the other."""
        offsets, total = _places(addresses, sizes)
        lease = self._pool.lease(total)
        try:
            yield _Packed(lease.array, offsets, lease.address + offsets)
        finally:
            lease.release(self._device.record(self._stream))


class _Packed(NamedTuple):
    """Pieces in one block of host memory: where each begins in it, and the address of that."""

    block: Array
    offsets: _Numbers
    addresses: _Numbers

    def fill(self, pieces: Sequence[Array]) -> None:
        """Copy host arrays into the block."""
        first = pieces[0]
        if self.block.nbytes == sum([a.nbytes for a in pieces]):  # no gaps
            try:
                whole = self.block.view(first.dtype).reshape(-1, *first.shape[1:])
                np.concatenate(pieces, out=whole, casting="no")  # all in one call: a fifth of the time
                return
            except (TypeError, ValueError):  # of several dtypes or shapes
                pass
        for piece, place in zip(pieces, self._places(pieces), strict=True):
            place[...] = piece

    def empty(self, pieces: Sequence[Array]) -> None:
        """Copy from the block into host arrays."""
        for piece, place in zip(pieces, self._places(pieces), strict=True):
            piece[...] = place

    def _places(self, like: Sequence[Array]) -> Iterable[Array]:
        first, count = like[0], len(like)
        shape, dtype = first.shape, first.dtype
        if (
            shape
            and self.block.nbytes == first.nbytes * count
            and all([a.shape == shape for a in like])
            and all([a.dtype == dtype for a in like])
        ):
            return self.block.view(dtype).reshape(count, *shape)
        starts = zip(self.offsets.tolist(), like, strict=True)
        return [self.block[start : start + a.nbytes].view(a.dtype).reshape(a.shape) for start, a in starts]


def _parts(sizes: _Numbers) -> Iterator[slice]:
    """Cut a batch so that what is packed at a time stays small."""
    ends = np.cumsum(sizes + _U64.type(2 * _WORD))
    start = done = 0
    while start < len(sizes):
        end = max(start + 1, int(np.searchsorted(ends, done + _BLOCK, "right")))
        yield slice(start, end)
        start, done = end, int(ends[end - 1])


def _places(addresses: _Numbers, sizes: _Numbers) -> tuple[_Numbers, int]:
    """Offsets of pieces in a block, each as far from a multiple of 16 as its other side; and the block's bytes."""
    apart = addresses % _WORD
    room = sizes if not (apart.any() or (sizes % _WORD).any()) else (sizes + apart + _WORD - 1) // _WORD * _WORD
    ends = np.cumsum(room)
    return ends - room + apart, int(ends[-1])


def _reached(device: Device, arrays: Sequence[Array], sizes: _Numbers) -> _Numbers | None:
    """Addresses of host arrays if kernels reach all of them, and asking for them takes less time than packing."""
    if sizes.mean() <= _PACKED:
        return None
    if not all(device.is_pinned(address_of(a)) for a in (arrays[0], arrays[-1])):
        return None
    if not all([a.flags.c_contiguous for a in arrays]):
        return None
    addresses = np.fromiter(map(address_of, arrays), _U64, len(arrays))
    bases, owner = np.unique([id(a if a.base is None else a.base) for a in arrays], return_inverse=True)
    if len(bases) > _MOST_BASES:
        return None
    lows, ends = np.full(len(bases), np.iinfo(_U64).max, _U64), np.zeros(len(bases), _U64)
    np.minimum.at(lows, owner, addresses)
    np.maximum.at(ends, owner, addresses + sizes)
    for low, end in zip(lows.tolist(), ends.tolist(), strict=True):
        if device.kernel_address(low, end - low) != low or len(segments(low, end - low)) > 1:
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
            batch.queue(_pointers(to), _pointers(origin), _lengths(to))
        if self.up:
            to, arrays = zip(*self.up, strict=True)
            batch.upload(_pointers(to), arrays, _lengths(to))
        if self.down:
            arrays, origin = zip(*self.down, strict=True)
            batch.download(arrays, _pointers(origin), _lengths(origin))


def _pointers(buffers: Sequence[Buffer]) -> _Numbers:
    return np.array([b.ptr for b in buffers], _U64)


def _lengths(buffers: Sequence[Buffer]) -> _Numbers:
    return np.array([b.nbytes for b in buffers], _U64)
