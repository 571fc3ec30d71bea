"""The staged side: device memory through page-locked host memory. Right with every MPI.

MPI only ever sees the host mirror, so host and device ends of one operation
interoperate, and everything that holds for host arrays holds here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gdcomm.devices.base import Buffer, Event
from gdcomm.memory.pinned import Lease, PinnedPool
from gdcomm.transports.host import memory_spec

__all__ = ["StagedSide"]


class StagedSide:
    """A device array mirrored in pinned memory; see `base.Side`.

    Args:
        buffer: the device array.
        rest: counts, displacements, datatype of the buffer argument, as the user gave them.
        reads: MPI reads the mirror, so it must hold the array's content.
        writes: MPI writes the mirror, so the array must receive it.
    """

    __slots__ = ("_event", "_inner", "_lease", "_queued", "_reads", "buffer", "finishes", "spec")

    holds = True

    def __init__(
        self, pool: PinnedPool, buffer: Buffer, rest: tuple[Any, ...], reads: bool, writes: bool
    ) -> None:
        self.buffer = buffer
        self._reads, self.finishes = reads, writes
        self._lease: Lease = pool.lease(buffer.nbytes)
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
        whole = count == buffer.nbytes
        buffer.device.to_device(buffer, self._lease.array if whole else self._lease.array[:count])
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
