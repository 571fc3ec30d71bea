"""Pageable memory at the speed of the link: page-locked slots, filled or emptied by several threads.

The driver's own way through its staging buffer uses one thread. Here each of several threads takes the
next piece and a free slot, copies the piece and queues its DMA, so that the copying in host memory keeps
up with the link.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from gdcomm.devices.base import Buffer, Event
from gdcomm.memory.pinned import Lease, pool_of
from gdcomm.transfer.crew import cpu_count, crew
from gdcomm.transfer.sides import Array, pieces, raw, reorder, share_memory

__all__ = ["Plan", "download", "host_copy", "plan", "upload"]


class Plan(NamedTuple):
    """How pageable memory is moved; measured, see `bench/`.

    Args:
        threads: that copy at once, the caller among them.
        smallest, largest: bytes of a piece, powers of two.
        slots: pieces on their way at once.
        lanes: streams that the DMAs are spread over; 1 is the caller's stream itself.
        cost_rate: bytes that one thread copies while the interpreter handles one piece (20 us at 8 GB/s).
    """

    threads: int = min(8, cpu_count())
    smallest: int = 256 << 10
    largest: int = 4 << 20
    slots: int = 16
    lanes: int = 2
    cost_rate: float = 160e3

    def piece(self, nbytes: int) -> int:
        """Bytes of a piece by the square-root rule: small enough to begin soon, large enough to be few."""
        best = math.sqrt(nbytes * self.cost_rate)
        return int(min(max(2 ** round(math.log2(max(best, 1))), self.smallest), self.largest))


plan = Plan()
_FOR_THREADS = 8 << 20  # bytes from which on several threads copy host memory faster than one


def upload(dst: Buffer, src: Array, how: Plan | None = None) -> None:
    """Copy host memory of any layout to a device array, in order on its stream; returns when `src` was read.

    Both sides have one shape and dtype, and are not empty.
    """
    transfer = _Transfer(dst, src, how or plan)
    transfer.run(transfer.fill)


def download(dst: Array, src: Buffer, how: Plan | None = None) -> None:
    """Copy a device array to host memory of any layout; returns when `dst` holds the data."""
    transfer = _Transfer(src, dst, how or plan)
    transfer.run(transfer.drain)


def host_copy(dst: Array, src: Array, how: Plan | None = None) -> None:
    """Copy between two host arrays that agree, by several threads where that pays."""
    how = how or plan
    if dst.nbytes < _FOR_THREADS or share_memory(dst, src):
        np.copyto(dst, src)
        return
    work = iter(list(pieces(how.piece(dst.nbytes), raw(dst), raw(src))))

    def copy() -> None:
        for _, (target, source) in work:
            np.copyto(target, source)

    crew().run(copy, how.threads - 1)


class _Transfer:
    """One array on its way through the slots."""

    def __init__(self, buffer: Buffer, host: Array, how: Plan) -> None:
        self._how = how
        self._device, self._stream = buffer.device, buffer.stream
        host, self._buffer = reorder(host, buffer)
        itemsize = buffer.dtype.itemsize
        room = -(-max(how.piece(host.nbytes), itemsize) // 64) * 64  # slots begin at whole cache lines
        work = list(pieces(room // itemsize * itemsize, host))
        self._threads = min(how.threads, len(work))
        self._work: Iterator[tuple[int, tuple[Array, ...]]] = iter(work)
        self._slots: SimpleQueue[tuple[Array, Event | None]] = SimpleQueue()
        self._lease = self._take_slots(room, min(how.slots, len(work)))
        self._lanes = self._open_lanes(min(how.lanes, len(work)))
        self._turn = iter(self._lanes * self._threads)  # each thread keeps to one lane

    def _take_slots(self, room: int, count: int) -> Lease | None:
        pool = pool_of(self._device)
        lease, memory = None, np.empty(0, np.uint8)
        while lease is None and count:
            try:
                lease = pool.lease(room * count)
                memory = lease.array
            except MemoryError:  # over the budget for page-locked memory
                count //= 2
        if lease is None:  # not even one: the driver's detour is slow, and as right
            count, memory = 1, np.empty(room, np.uint8)
        for i in range(count):
            self._slots.put((memory[i * room : (i + 1) * room], None))
        return lease

    def _open_lanes(self, count: int) -> list[Any]:
        if count == 1:
            return [self._stream]
        lanes = [self._device.borrow_stream() for _ in range(count)]
        begin = self._device.record(self._stream)
        for lane in lanes:
            self._device.wait_event(lane, begin)
        return lanes

    def run(self, step: Callable[[Any], None]) -> None:
        """Run `step(lane)` in all threads; then the caller's stream is behind all that was queued."""
        here = self._device.here()

        def work() -> None:
            with here:
                step(next(self._turn))

        try:
            crew().run(work, self._threads - 1)
        finally:
            if len(self._lanes) > 1:
                for lane in self._lanes:
                    self._device.wait_event(self._stream, self._device.record(lane))
                    self._device.return_stream(lane)
            if self._lease is not None:
                self._lease.release(self._device.record(self._stream))

    def fill(self, lane: Any) -> None:
        """One thread's part of an upload."""
        buffer = self._buffer._replace(stream=lane)
        for offset, (piece,) in self._work:
            slot, event = self._slots.get()
            try:
                if event is not None:
                    event.synchronize()
                np.copyto(_shaped(slot, piece), piece)
                self._device.to_device(buffer, slot[: piece.nbytes], offset)
                event = self._device.record(lane)
            finally:
                self._slots.put((slot, event))  # also after an error: other threads wait for slots

    def drain(self, lane: Any) -> None:
        """One thread's part of a download: the next piece is on its way while this one is copied out."""
        buffer = self._buffer._replace(stream=lane)
        under_way: deque[tuple[Array, Event, Array]] = deque()
        try:
            for offset, (piece,) in self._work:
                slot = self._slot_for(under_way)
                try:
                    self._device.to_host(slot[: piece.nbytes], buffer, offset)
                    event = self._device.record(lane)
                except BaseException:
                    self._slots.put((slot, None))
                    raise
                under_way.append((slot, event, piece))
                if len(under_way) > 1:
                    self._empty(under_way)
            while under_way:
                self._empty(under_way)
        finally:
            for slot, _, _ in under_way:
                self._slots.put((slot, None))

    def _slot_for(self, under_way: deque[tuple[Array, Event, Array]]) -> Array:
        while under_way:
            try:
                return self._slots.get_nowait()[0]
            except Empty:
                self._empty(under_way)  # whoever holds slots never waits for another
        return self._slots.get()[0]

    def _empty(self, under_way: deque[tuple[Array, Event, Array]]) -> None:
        slot, event, piece = under_way[0]
        event.synchronize()
        np.copyto(piece, _shaped(slot, piece))
        under_way.popleft()
        self._slots.put((slot, None))


def _shaped(slot: Array, piece: Array) -> Array:
    return slot[: piece.nbytes].view(piece.dtype).reshape(piece.shape)
