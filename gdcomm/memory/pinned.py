"""A pool of page-locked memory. A lease ends when its event is done, not when a function returns."""

from __future__ import annotations

import bisect
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Any

from gdcomm.devices.base import Device, Event
from gdcomm.errors import BufferSpecError, PinnedMemoryError
from gdcomm.memory.blocks import Block, allocate, size_class
from gdcomm.memory.budget import Budget, of_process
from gdcomm.memory.loans import Dropped, Hold, Lease, hold_of
from gdcomm.memory.pages import in_child, ordinary
from gdcomm.memory.slots import Slot, Slots

__all__ = ["Hold", "Lease", "PinnedPool", "Slot", "Slots", "block_at", "note_use", "pool_of", "size_class"]

_MANY_USES = 16


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
        self._reset()
        in_child(self._reset)  # the blocks are the parent's

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._era = object()
        self._dropped: Dropped = deque()
        self._idle: dict[Hashable, deque[Block]] = {}
        self._by_age: OrderedDict[int, Block] = OrderedDict()  # idle blocks by address, oldest first
        self._idle_bytes = self._leased_bytes = 0
        self._pending: list[tuple[list[Event], Block]] = []
        self._live: dict[int, Block] = {}  # by address: blocks under arrays of the user
        self._starts: list[int] = []  # their addresses, sorted
        self._hits = self._misses = 0
        self._local = threading.local()

    def slots(self) -> Slots:
        """The calling thread's ring of small blocks. Its memory goes back to the pool with the thread."""
        found: Slots | None = getattr(self._local, "slots", None)
        if found is None:
            size = Slots.SIZE * Slots.COUNT
            block = self._take(size, size, False, None, staging=True)
            with self._lock:
                block.counted = False
                self._leased_bytes -= block.nbytes
            found = self._local.slots = Slots(self._device, block.array)
            weakref.finalize(found, _retire, self._dropped, block, found.ring).atexit = False
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
        """Lend page-locked memory (uninitialised) to an array: what has the result as its buffer keeps it.

        Returns:
            An object with the buffer protocol over at least `nbytes`.

        Raises:
            PinnedMemoryError: the budget leaves no room, even without the idle blocks.
            BufferSpecError: there is no such node.
            DeviceError: the system has no such memory.
        """
        size = size_class(nbytes)
        key = (size, write_combined, node) if write_combined or node is not None else size
        block = self._take(key, size, write_combined, node, False)
        block.mapped = mapped
        return hold_of(self, block)

    def hold_ordinary(self, nbytes: int) -> Hold:
        """Lend memory that is not page-locked, for kernels of coherent machines: it lives until they are done.

        Raises:
            MemoryError: the system has no such memory.
        """
        size = size_class(nbytes)
        block = Block(ordinary(size), None, self._era)
        with self._lock:
            self._sweep()
            self._show(block, block.address)
        return hold_of(self, block)

    def _take(self, key: Hashable, size: int, write_combined: bool, node: int | None, staging: bool) -> Block:
        while True:
            with self._lock:
                if self._dropped or self._pending:
                    self._sweep()
                blocks = self._idle.get(key)
                if blocks:
                    block = blocks.pop()  # the newest is the warmest
                    address = block.address
                    del self._by_age[address]
                    self._idle_bytes -= size
                    self._hits += 1
                    self._lend(block, address, size, staging)
                    break
            if self._reserved(size, wait=staging):
                # May take long: without the lock.
                block = self._allocate(key, size, write_combined, node, staging)
                with self._lock:
                    self._misses += 1
                    self._lend(block, block.address, size, staging)
                return block
        self._device.poison(block.array)  # a late copy may have written to it since it came back
        return block

    def _lend(self, block: Block, address: int, size: int, staging: bool) -> None:
        block.counted = True
        self._leased_bytes += size
        if not staging:
            self._show(block, address)

    def _show(self, block: Block, address: int) -> None:
        """Let `note_use` find the block: it lies under an array of the user."""
        self._live[address] = block
        bisect.insort(self._starts, address)

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
        """Bytes lent, idle and pending (given back, copy not yet done), and pool hits and misses.

        The small rings of threads that copy are in none of the figures; the budget counts them.
        """
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

    def _sweep(self) -> None:
        dropped = self._dropped
        while dropped:
            block, events = dropped.popleft()
            if block.era is not self._era:
                continue
            if self._live.pop(block.address, None) is not None:
                starts = self._starts
                del starts[bisect.bisect_left(starts, block.address)]
            block.uses = []
            self._take_back(block, events)
        if self._pending:
            self._look_at_pending()

    def _take_back(self, block: Block, events: list[Event] | None) -> None:
        """Use the block again after the events; never if that is None, since nobody knows when."""
        if block.era is not self._era:
            return
        if block.counted:
            self._leased_bytes -= block.nbytes
        if events:
            self._pending.append((events, block))
        elif events is not None:
            self._keep(block)

    def _look_at_pending(self) -> None:
        pending, self._pending = self._pending, []
        for position, (events, block) in enumerate(pending):
            try:
                for event in events:
                    if not event.query():
                        self._pending.append((events, block))
                        break
                else:
                    self._keep(block)
            except BaseException:
                # The device is in error: nobody knows about this block, so it is dropped.
                self._pending += pending[position + 1 :]
                raise

    def _keep(self, block: Block) -> None:
        if block.key is None:
            return
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


def _retire(dropped: Dropped, block: Block, ring: list[Slot]) -> None:
    """A thread has ended: copies may still use its ring."""
    dropped.append((block, [slot.event for slot in ring if slot.event is not None]))


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
