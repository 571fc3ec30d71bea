"""How blocks of the pool are lent: to leases of this package, and to arrays of the user."""

from __future__ import annotations

import ctypes
import functools
from collections import deque
from typing import TYPE_CHECKING, Any, TypeAlias

from gdcomm.devices.base import Event
from gdcomm.errors import ClosedError
from gdcomm.memory.blocks import Block

if TYPE_CHECKING:
    from gdcomm.memory.pinned import PinnedPool

__all__ = ["Dropped", "Hold", "Lease", "hold_of"]

# Blocks that came back without a lock, since the collector may run inside the pool, and what to wait for (None: nobody
# knows).
Dropped: TypeAlias = "deque[tuple[Block, list[Event] | None]]"


class Hold:
    """What an array over a block has as its base: the block goes back to the pool with the last view.

    Copies that `note_use` was told of are waited for before the block is used again, and so is all work that
    the current stream of the thread that drops the last view holds then.
    """

    pool: PinnedPool
    block: Block

    def __del__(self) -> None:
        pool, block = self.pool, self.block
        try:
            device = pool._device
            stream = device.handle(None)
            if not device.idle(stream):
                block.uses.append(device.record(stream))
        except Exception:  # the device is in error, or Python is ending: nobody knows what still uses the block
            pool._dropped.append((block, None))
        else:
            pool._dropped.append((block, block.uses))


def hold_of(pool: PinnedPool, block: Block) -> Hold:
    """Lend a block to an array: what has the result as its buffer keeps it."""
    hold: Hold = _hold_type(block.nbytes).from_address(block.address)
    hold.pool, hold.block = pool, block
    return hold


@functools.cache
def _hold_type(nbytes: int) -> Any:
    """The type of holds of a size: a ctypes array, whose memory NumPy takes in half the time of other objects'."""
    base: Any = ctypes.Array
    return type(base)("Hold", (Hold, base), {"_type_": ctypes.c_ubyte, "_length_": nbytes})


class Lease:
    """Page-locked memory on loan. Release it with the event of the last copy that uses it.

    A lease that is dropped without a release takes its block out of the pool: nobody can
    know whether a copy still uses it.
    """

    __slots__ = ("_block", "_dropped", "_pool", "address", "array")

    def __init__(self, pool: PinnedPool, block: Block, nbytes: int) -> None:
        self._pool = pool
        self._dropped = pool._dropped
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
            self._dropped.append((block, None))
