"""A pool of page-locked memory. A lease ends when its event is done, not when a function returns."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from typing import Any

import numpy as np

from gdcomm.devices.base import Device, Event
from gdcomm.errors import BufferSpecError, ClosedError

__all__ = ["Lease", "PinnedPool", "Slots", "pool_of", "size_class"]

_SMALLEST = 4096
_STEPS = 8  # size classes in an octave: a block is at most 12.5 % larger than asked


def size_class(nbytes: int) -> int:
    """The size of the block that serves `nbytes`: at least 4 KiB, else at most 12.5 % larger."""
    if nbytes <= _SMALLEST:
        return _SMALLEST
    step = (1 << ((nbytes - 1).bit_length() - 1)) // _STEPS
    return -(-nbytes // step) * step


class Lease:
    """Page-locked memory on loan. Release it with the event of the last copy that uses it.

    A lease that is dropped without a release takes its block out of the pool: nobody can
    know whether a copy still uses it.
    """

    __slots__ = ("_block", "_lost", "_pool", "address", "array")

    def __init__(self, pool: PinnedPool, block: np.ndarray[Any, Any], nbytes: int) -> None:
        self._pool = pool
        self._lost = pool._lost
        self._block: np.ndarray[Any, Any] | None = block
        self.array = block[:nbytes]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(block))  # type: ignore[arg-type]

    @property
    def released(self) -> bool:
        """Whether the lease has ended for its holder."""
        return self._block is None

    def release(self, event: Event | None = None) -> None:
        """Give the memory back; it is used again once `event` is done (at once if None). Never blocks.

        Raises:
            ClosedError: the lease was released before.
        """
        with self._pool._lock:
            block, self._block = self._block, None
            if block is None:
                raise ClosedError("this lease was released already; a block can be given back once")
            self._pool._take_back(block, event)

    def __del__(self) -> None:
        block = getattr(self, "_block", None)
        if block is not None:
            self._lost.append(block.nbytes)  # no lock: the collector may run inside the pool


class Slot:
    """A small pinned block for one blocking call; `event` is that of the last copy out of it."""

    __slots__ = ("address", "array", "event")

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]
        self.event: Event | None = None


class Slots:
    """One thread's ring of small pinned blocks: no lock, no search, no allocation.

    Args:
        device: allocates them.
    """

    SIZE = 64 << 10  # bytes
    COUNT = 16

    def __init__(self, device: Device) -> None:
        self._device = device
        memory = device.pinned(self.SIZE * self.COUNT)
        self._ring = [Slot(memory[i * self.SIZE : (i + 1) * self.SIZE]) for i in range(self.COUNT)]
        self._next = 0

    def take(self) -> Slot:
        """The slot that was used longest ago, once the copy out of it is done."""
        slot = self._ring[self._next]
        self._next = (self._next + 1) % self.COUNT
        if slot.event is not None:
            slot.event.synchronize()
            slot.event = None
        self._device.poison(slot.array)
        return slot


class PinnedPool:
    """Pinned blocks of one device by size class. Thread-safe.

    Args:
        device: allocates the blocks.
        idle_limit: bytes of unused blocks kept for later; beyond it the oldest are dropped.
    """

    def __init__(self, device: Device, idle_limit: int = 256 << 20) -> None:
        self._device = device
        self._idle_limit = idle_limit
        self._lock = threading.RLock()
        self._idle: deque[np.ndarray[Any, Any]] = deque()  # oldest first
        self._idle_bytes = 0
        self._pending: list[tuple[Event, np.ndarray[Any, Any]]] = []
        self._leased_bytes = 0
        self._lost: deque[int] = deque()  # sizes of blocks whose leases were dropped unreleased
        self._hits = self._misses = 0
        self._local = threading.local()

    def slots(self) -> Slots:
        """The calling thread's ring of small blocks."""
        found: Slots | None = getattr(self._local, "slots", None)
        if found is None:
            found = self._local.slots = Slots(self._device)
        return found

    def lease(self, nbytes: int) -> Lease:
        """Lend `nbytes` of page-locked memory (uninitialised); allocates if no block is free."""
        if nbytes < 0:
            raise BufferSpecError(f"nbytes: {nbytes} is negative")
        size = size_class(nbytes)
        with self._lock:
            self._sweep()
            block = self._pick(size)
            if block is None:
                self._misses += 1
            else:
                self._hits += 1
                self._leased_bytes += size
        if block is None:
            block = self._device.pinned(size)  # may take long: without the lock
            with self._lock:
                self._leased_bytes += size
        else:
            self._device.poison(block)  # a late copy may have written to it since it came back
        return Lease(self, block, nbytes)

    def stats(self) -> dict[str, int]:
        """Bytes leased, idle and pending (given back, copy not yet done), and pool hits and misses."""
        with self._lock:
            self._sweep()
            return {
                "leased": self._leased_bytes,
                "idle": self._idle_bytes,
                "pending": sum(block.nbytes for _, block in self._pending),
                "hits": self._hits,
                "misses": self._misses,
            }

    def trim(self) -> None:
        """Drop all idle blocks."""
        with self._lock:
            self._sweep()
            self._idle.clear()
            self._idle_bytes = 0

    def _pick(self, size: int) -> np.ndarray[Any, Any] | None:
        for index in range(len(self._idle) - 1, -1, -1):  # the newest is the warmest
            if self._idle[index].nbytes == size:
                block = self._idle[index]
                del self._idle[index]
                self._idle_bytes -= size
                return block
        return None

    def _take_back(self, block: np.ndarray[Any, Any], event: Event | None) -> None:
        self._leased_bytes -= block.nbytes
        if event is None:
            self._keep(block)
        else:
            self._pending.append((event, block))
        self._sweep()

    def _sweep(self) -> None:
        while self._lost:
            self._leased_bytes -= self._lost.popleft()
        pending, self._pending = self._pending, []
        while pending:
            event, block = pending.pop(0)
            try:
                done = event.query()
            except BaseException:
                # The device is in error: nobody knows about this block, so it is dropped.
                self._pending += pending
                raise
            if done:
                self._keep(block)
            else:
                self._pending.append((event, block))

    def _keep(self, block: np.ndarray[Any, Any]) -> None:
        self._device.poison(block)
        self._idle.append(block)
        self._idle_bytes += block.nbytes
        while self._idle_bytes > self._idle_limit:
            self._idle_bytes -= self._idle.popleft().nbytes


_pools: dict[int, PinnedPool] = {}


def pool_of(device: Device) -> PinnedPool:
    """The pinned pool that stages for `device`, made on first use."""
    pool = _pools.get(id(device))
    if pool is None:
        pool = _pools.setdefault(id(device), PinnedPool(device))
    return pool
