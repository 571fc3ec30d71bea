"""The staged side: device memory through page-locked host memory. Right with every MPI.

MPI only ever sees the host mirror, so host and device ends of one operation
interoperate, and everything that holds for host arrays holds here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gdcomm.devices.base import Buffer, Event
from gdcomm.memory.pinned import Lease, PinnedPool
from gdcomm.transfer.staging import upload
from gdcomm.transports.host import memory_spec

__all__ = ["LARGEST_PINNED", "StagedSide"]

LARGEST_PINNED = 64 << 20  # bytes of the largest mirror that is page-locked for a message that hardly ever comes whole


class _Pageable:
    """A mirror that takes memory only where it is written to; as `Lease`."""

    released = False

    def __init__(self, nbytes: int) -> None:
        self.array = np.empty(nbytes, np.uint8)
        self.address = self.array.ctypes.data

    def release(self, event: Event | None) -> None:
        """Give it up; what was read of it is on the device, or in the driver's hands."""
        self.array = np.empty(0, np.uint8)
        self.released = True


class StagedSide:
    """A device array mirrored in pinned memory; see `base.Side`.

    Args:
        buffer: the device array.
        rest: counts, displacements, datatype of the buffer argument, as the user gave them.
        reads: MPI reads the mirror, so it must hold the array's content.
        writes: MPI writes the mirror, so the array must receive it.
        chunked: a large message most likely comes in chunks, and leaves most of the mirror alone.
    """

    __slots__ = ("_event", "_inner", "_lease", "_queued", "_reads", "buffer", "finishes", "spec")

    holds = True

    def __init__(
        self,
        pool: PinnedPool,
        buffer: Buffer,
        rest: tuple[Any, ...],
        reads: bool,
        writes: bool,
        chunked: bool = False,
    ) -> None:
        self.buffer = buffer
        self._reads, self.finishes = reads, writes
        pageable = chunked and buffer.nbytes > LARGEST_PINNED
        self._lease: Lease | _Pageable = _Pageable(buffer.nbytes) if pageable else pool.lease(buffer.nbytes)
        self._event: Event | None = None  # the last copy out of the mirror
        self._queued = False  # a copy into the mirror that nobody waited for yet
        self.spec, self._inner = memory_spec(
            self._lease.address, buffer.nbytes, buffer.dtype, rest, reads, writes
        )

    def begin(self) -> None:
        buffer = self.buffer
        if self._reads and buffer.nbytes:
            self._queued = True
            buffer.device.to_host(self._lease.array, buffer)

    def ready(self) -> None:
        if self._queued:
            self.buffer.device.synchronize(self.buffer.stream)
            self._queued = False
        # A persistent request's last copy out of the mirror is over: it was complete before it started again.

    def end(self, nbytes: int | None) -> Event | None:
        buffer = self.buffer
        count = buffer.nbytes if nbytes is None else min(nbytes, buffer.nbytes)
        if not self.finishes or not count:
            return None
        written = self._lease.array if count == buffer.nbytes else self._lease.array[:count]
        if isinstance(self._lease, _Pageable):
            upload(buffer._replace(nbytes=count, dtype=written.dtype, shape=written.shape), written)
        else:
            buffer.device.to_device(buffer, written)
        return self.mark()

    def mark(self) -> Event:
        """The event of the copies out of the mirror queued so far."""
        self._event = self.buffer.device.record(self.buffer.stream)
        return self._event

    @property
    def mirror(self) -> np.ndarray[Any, Any]:
        """The bytes that MPI sees."""
        return self._lease.array

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()
        if not self._lease.released:
            if self._queued:  # an error came between
                self._event = self.buffer.device.record(self.buffer.stream)
            self._lease.release(self._event)
