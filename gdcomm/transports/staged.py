"""The staged side: device memory through page-locked host memory. Right with every MPI.

MPI only ever sees the host mirror, so host and device ends of one operation
interoperate, and everything that holds for host arrays holds here.
"""

from __future__ import annotations

from typing import Any

from gdcomm.devices.base import Buffer, Event
from gdcomm.memory.pinned import Lease, PinnedPool
from gdcomm.transports.host import host_side

__all__ = ["StagedSide"]


class StagedSide:
    """A device array mirrored in pinned memory; see `base.Side`.

    Args:
        buffer: the device array.
        rest: counts, displacements, datatype of the buffer argument, as the user gave them.
        reads: MPI reads the mirror, so it must hold the array's content.
        writes: MPI writes the mirror, so the array must receive it.
    """

    def __init__(
        self, pool: PinnedPool, buffer: Buffer, rest: tuple[Any, ...], reads: bool, writes: bool
    ) -> None:
        self._buffer = buffer
        self._reads, self._writes = reads, writes
        self._lease: Lease = pool.lease(buffer.nbytes)
        self._event: Event | None = None
        mirror = self._lease.array.view(buffer.dtype)
        spec = [mirror, *rest] if rest else mirror
        self._inner = host_side(spec, reads, writes)  # dtypes that MPI lacks
        self.spec: Any = spec if self._inner is None else self._inner.spec

    def begin(self) -> None:
        buffer = self._buffer
        if self._reads and buffer.nbytes:
            buffer.device.to_host(self._lease.array, buffer)
            self._event = buffer.device.record(buffer.stream)

    def ready(self) -> None:
        # Also when MPI only writes: a persistent request's last copy out of the mirror must be over.
        if self._event is not None:
            self._event.synchronize()

    def end(self, nbytes: int | None) -> Event | None:
        buffer = self._buffer
        count = buffer.nbytes if nbytes is None else min(nbytes, buffer.nbytes)
        if not self._writes or not count:
            return None
        buffer.device.to_device(buffer, self._lease.array[:count])
        self._event = buffer.device.record(buffer.stream)
        return self._event

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()
        if not self._lease.released:
            self._lease.release(self._event)
