"""A pool of page-locked memory. A lease ends when its event is done, not when a function returns."""

from __future__ import annotations

import bisect
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Any

import numpy as np

from gdcomm.devices.base import Device, Event
from gdcomm.devices.memory import address_of
from gdcomm.errors import BufferSpecError, ClosedError, PinnedMemoryError
from gdcomm.memory.blocks import Block, allocate
from gdcomm.memory.budget import Budget, of_process
from gdcomm.memory.pages import in_child

__all__ = ["Hold", "Lease", "PinnedPool", "Slots", "block_at", "note_use", "pool_of", "size_class"]

_SMALLEST = 4096
_STEPS = 8  # size classes in an octave: a block is at most 12.5 % larger than asked
_MANY_USES = 16
_Array = np.ndarray[Any, Any]


def size_class(nbytes: int) -> int:
    """The size of the block that serves `nbytes`: at least 4 KiB, else at most 12.5 % larger."""
    if nbytes <= _SMALLEST:
        return _SMALLEST
    step = (1 << ((nbytes - 1).bit_length() - 1)) // _STEPS
    return -(-nbytes // step) * step


class Hold:
    """What an array over a block has as its base: the block goes back to the pool with the last view.

    Copies that `note_use` was told of are waited for before the block is used again, and so is all work that
    the current stream of the thread that drops the last view holds then.
    """

    __slots__ = ("__array_interface__", "__weakref__", "_block", "_pool")

    def __init__(self, pool: PinnedPool, block: Block) -> None:
        self._pool, self._block = pool, block
        self.__array_interface__ = block.interface

    def __del__(self) -> None:
        # No lock: the collector may run inside the pool.
        try:
            device = self._pool._device
            event = device.record(device.handle(None))
        except Exception:  # the device is in error, or Python is ending: nobody knows what still uses the block
            event = None
        self._pool._dropped.append((self._block, event))


class Lease:
    """Page-locked memory on loan. Release it with the event of the last copy that uses it.

    A lease that is dropped without a release takes its block out of the pool: nobody can
    know whether a copy still uses it.
    """

    __slots__ = ("_block", "_lost", "_pool", "address", "array")

    def __init__(self, pool: PinnedPool, block: Block, nbytes: int) -> None:
        self._pool = pool
        self._lost = pool._lost
        self._block: Block | None = block
        self.array = block.array[:nbytes]
        self.address = block.address

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
            self._pool._take_back(block, [] if event is None else [event])
            self._pool._sweep()

    def __del__(self) -> None:
        block = getattr(self, "_block", None)
        if block is not None:
            self._lost.append(block.nbytes)  # no lock: the collector may run inside the pool


class Slot:
    """A small pinned block for one blocking call; `event` is that of the last copy out of it."""

    __slots__ = ("address", "array", "event")

    def __init__(self, array: _Array) -> None:
        self.array = array
        self.address = address_of(array)
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
        idle_limit: bytes of unused blocks kept for later; beyond it the oldest are dropped. None: a quarter of
            the budget.
        budget: counts the blocks; None: that of the process.
    """

    def __init__(self, device: Device, idle_limit: int | None = None, budget: Budget | None = None) -> None:
        self._device = device
        self._budget = of_process() if budget is None else budget
        self._idle_limit = self._budget.limit // 4 if idle_limit is None else idle_limit
        self._dropped: deque[tuple[Block, Event | None]] = deque()  # blocks whose last array went
        self._lost: deque[int] = deque()  # sizes of blocks whose leases were dropped unreleased
        self._reset()
        in_child(self._reset)  # the blocks are the parent's

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._era = object()
        self._idle: dict[Hashable, deque[Block]] = {}
        self._by_age: OrderedDict[int, Block] = OrderedDict()  # idle blocks by address, oldest first
        self._idle_bytes = self._leased_bytes = 0
        self._pending: list[tuple[list[Event], Block]] = []
        self._live: dict[int, Block] = {}  # by address: blocks under arrays of the user
        self._starts: list[int] = []  # their addresses, sorted
        self._dropped.clear()
        self._lost.clear()
        self._hits = self._misses = 0
        self._local = threading.local()

    def slots(self) -> Slots:
        """The calling thread's ring of small blocks."""
        found: Slots | None = getattr(self._local, "slots", None)
        if found is None:
            size = Slots.SIZE * Slots.COUNT
            while not self._reserved(size, wait=True):
                pass
            found = self._local.slots = Slots(self._device)
            weakref.finalize(found, self._budget.releaser(), size).atexit = False
        return found

    # -- taking ------------------------------------------------------------------------------

    def lease(self, nbytes: int) -> Lease:
        """Lend `nbytes` of page-locked memory (uninitialised); allocates if no block is free.

        Where the budget leaves no room for a new block, idle blocks are dropped first, then pending ones waited for.

        Raises:
            PinnedMemoryError: the budget is held by leases and arrays.
        """
        if nbytes < 0:
            raise BufferSpecError(f"nbytes: {nbytes} is negative")
        size = size_class(nbytes)
        return Lease(self, self._take(size, size, False, None, staging=True), nbytes)

    def hold(self, nbytes: int, *, write_combined: bool = False, mapped: bool = False, node: int | None = None) -> Hold:
        """Lend page-locked memory (uninitialised) to an array: `np.asarray(hold)` has at least `nbytes`.

        Raises:
            PinnedMemoryError: the budget leaves no room, even without the idle blocks.
            DeviceError: the system has no such memory.
        """
        size = size_class(nbytes)
        key = (size, write_combined, node) if write_combined or node is not None else size
        block = self._take(key, size, write_combined, node, staging=False)
        block.mapped = mapped
        return Hold(self, block)

    def _take(self, key: Hashable, size: int, write_combined: bool, node: int | None, staging: bool) -> Block:
        while True:
            with self._lock:
                self._sweep()
                blocks = self._idle.get(key)
                if blocks:
                    block = blocks.pop()  # the newest is the warmest
                    del self._by_age[block.address]
                    self._idle_bytes -= size
                    self._hits += 1
                    self._lend(block, staging)
                    break
            if self._reserved(size, wait=staging):
                # May take long: without the lock.
                block = self._allocate(key, size, write_combined, node, staging)
                with self._lock:
                    self._misses += 1
                    self._lend(block, staging)
                return block
        self._device.poison(block.array)  # a late copy may have written to it since it came back
        return block

    def _lend(self, block: Block, staging: bool) -> None:
        self._leased_bytes += block.nbytes
        if not staging:
            self._live[block.address] = block
            bisect.insort(self._starts, block.address)

    def _allocate(self, key: Hashable, size: int, write_combined: bool, node: int | None, staging: bool) -> Block:
        try:
            array = allocate(self._device, size, write_combined, node, staging)
        except BaseException:
            self._budget.refund(size)
            raise
        # Views keep the base of an array that has one, not the array.
        owner = array if array.base is None else array.base
        weakref.finalize(owner, self._budget.releaser(), size).atexit = False
        return Block(array, key, self._era)

    def _reserved(self, size: int, wait: bool) -> bool:
        """Count new memory; False: there was no room, but something went back, so look again."""
        try:
            self._budget.reserve(size)
        except PinnedMemoryError:
            if not self._make_room(wait):
                raise
            return False
        return True

    def _make_room(self, wait: bool) -> bool:
        """Drop idle blocks of all pools, else wait for the oldest pending block; False: that gave nothing."""
        used = self._budget.used
        for pool in {self, *_pools.values()}:
            pool.trim()
        if self._budget.used < used:
            return True
        with self._lock:
            oldest = self._pending[0][0] if wait and self._pending else []
        for event in oldest:
            event.synchronize()
        return bool(oldest)

    # -- giving back -------------------------------------------------------------------------

    def note_use(self, address: int, event: Event) -> bool:
        """Note a queued copy that touches a user's array; False if the address is in none of this pool."""
        with self._lock:
            block = self._find(address)
            if block is None:
                return False
            uses = block.uses
            if len(uses) >= _MANY_USES:
                uses[:] = [use for use in uses if not use.query()]
            uses.append(event)
            return True

    def find(self, address: int) -> Block | None:
        """The block under the user's array that the address is in, if any."""
        with self._lock:
            return self._find(address)

    def _find(self, address: int) -> Block | None:
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        block = self._live[self._starts[index]]
        return block if address < block.address + block.nbytes else None

    def stats(self) -> dict[str, int]:
        """Bytes lent, idle and pending (given back, copy not yet done), and pool hits and misses."""
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
            self._by_age.clear()
            self._idle_bytes = 0

    def _take_back(self, block: Block, events: list[Event]) -> None:
        if block.era is not self._era:
            return
        self._leased_bytes -= block.nbytes
        if events:
            self._pending.append((events, block))
        else:
            self._keep(block)

    def _sweep(self) -> None:
        while self._lost:
            self._leased_bytes -= self._lost.popleft()
        while self._dropped:
            self._settle(*self._dropped.popleft())
        if self._pending:
            self._look_at_pending()

    def _look_at_pending(self) -> None:
        pending, self._pending = self._pending, []
        while pending:
            events, block = pending.pop(0)
            try:
                done = all(event.query() for event in events)
            except BaseException:
                # The device is in error: nobody knows about this block, so it is dropped.
                self._pending += pending
                raise
            if done:
                self._keep(block)
            else:
                self._pending.append((events, block))

    def _settle(self, block: Block, event: Event | None) -> None:
        """The last array over the block went."""
        if block.era is not self._era:
            return
        del self._live[block.address]
        del self._starts[bisect.bisect_left(self._starts, block.address)]
        uses, block.uses = block.uses, []
        if event is None:
            self._leased_bytes -= block.nbytes
        else:
            self._take_back(block, [*uses, event])

    def _keep(self, block: Block) -> None:
        self._device.poison(block.array)
        blocks = self._idle.get(block.key)
        if blocks is None:
            blocks = self._idle[block.key] = deque()
        blocks.append(block)
        self._by_age[block.address] = block
        self._idle_bytes += block.nbytes
        while self._idle_bytes > self._idle_limit:
            _, oldest = self._by_age.popitem(last=False)
            self._idle[oldest.key].popleft()
            self._idle_bytes -= oldest.nbytes


_pools: dict[int, PinnedPool] = {}


def pool_of(device: Device) -> PinnedPool:
    """The pinned pool that stages for `device`, made on first use."""
    pool = _pools.get(id(device))
    if pool is None:
        pool = _pools.setdefault(id(device), PinnedPool(device))
    return pool


def note_use(address: int, nbytes: int, event: Event) -> None:
    """Tell that a queued copy or kernel touches page-locked memory until `event` is done. Below a microsecond.

    Memory of `pinned_empty` and its like is then not used again before; memory registered by `gdcomm.register`
    is not unregistered before. Other memory is left to its owner.

    Args:
        address: of the lowest byte touched.
        nbytes: from there to the highest.
        event: recorded behind the work.
    """
    for pool in tuple(_pools.values()):
        if pool.note_use(address, event):
            return
    for registry in _registries:
        registry.note_use(address, nbytes, event)


def block_at(address: int) -> Block | None:
    """The block of a pool that lies under a user's array at this address, if any."""
    return next((block for pool in tuple(_pools.values()) if (block := pool.find(address)) is not None), None)


_registries: list[Any] = []  # of gdcomm.memory.registered, once it is used
