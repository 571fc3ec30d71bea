"""Partitioned communication (MPI 4) of device arrays: each partition is staged when it is ready, or has arrived."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from mpi4py import MPI

from gdcomm.devices.base import Buffer, Event
from gdcomm.errors import BufferSpecError, NoPathError
from gdcomm.memory.pinned import pool_of
from gdcomm.requests import Prequest
from gdcomm.transports.base import split_spec
from gdcomm.transports.host import memory_spec

__all__ = ["PartitionedRequest", "Partitions"]


class Partitions:
    """A device array in equal parts and its pinned mirror; the `Work` of a request.

    Args:
        name: method name, for errors.
        spec: the user's buffer argument: an array, or an array with a count and a predefined datatype.
        buffer: the array's description.
        partitions: how many parts.
        receives: the array is written.

    Raises:
        NoPathError: derived datatypes, displacements.
        BufferSpecError: the array is too small, or read-only where it is to be written.
    """

    def __init__(self, name: str, spec: Any, buffer: Buffer, partitions: int, receives: bool) -> None:
        _, rest = split_spec(spec)
        counts = [item for item in rest if isinstance(item, int)]
        types = [item for item in rest if isinstance(item, MPI.Datatype)]
        if len(counts) + len(types) < len(rest) or not all(item.is_predefined for item in types):
            raise NoPathError(f"{name}: device arrays go with a count and a predefined datatype only; got {rest}")
        if receives:
            buffer.require_writable(name, "buf")
        itemsize = types[0].Get_size() if types else buffer.dtype.itemsize
        count = counts[0] if counts else buffer.nbytes // itemsize // max(partitions, 1)
        if count * itemsize * partitions > buffer.nbytes:
            raise BufferSpecError(
                f"{name}: {partitions} partitions of {count} elements need {count * itemsize * partitions} bytes; "
                f"buf has {buffer.nbytes}"
            )
        self._buffer, self._receives, self.sends = buffer, receives, not receives
        self._size = count * itemsize
        self._all = range(partitions)
        self._moved: set[int] = set()
        self._event: Event | None = None
        self._lease = pool_of(buffer.device).lease(buffer.nbytes)
        self.spec, _ = memory_spec(self._lease.address, buffer.nbytes, buffer.dtype, rest, not receives, receives)

    def begin(self) -> None:
        """A new round: no partition has moved."""
        self._moved.clear()

    def ready(self, partitions: Sequence[int]) -> None:
        """Fill the mirror with these partitions; blocks until that is done."""
        for partition in partitions:
            self._buffer.device.to_host(self._piece(partition), self._buffer, partition * self._size)
        self._event = self._buffer.device.record(self._buffer.stream)  # kept: an error may come between
        self._event.synchronize()

    def arrived(self, partition: int) -> None:
        """Queue this partition's copy to the device, once in a round."""
        if self._size and partition not in self._moved:
            self._moved.add(partition)
            self._buffer.device.to_device(self._buffer, self._piece(partition), partition * self._size)
            self._event = self._buffer.device.record(self._buffer.stream)

    def _piece(self, partition: int) -> Any:
        return self._lease.array[partition * self._size : (partition + 1) * self._size]

    def end(self, nbytes: int | None) -> list[Event]:
        """Queue the copies of partitions that nobody asked for."""
        if self._receives:
            for partition in self._all:
                self.arrived(partition)
        return [] if self._event is None else [self._event]

    def total(self, nbytes: int) -> int:
        """All that was received."""
        return nbytes

    def close(self) -> None:
        """Give the mirror back."""
        if not self._lease.released:
            self._lease.release(self._event)

    def here(self) -> AbstractContextManager[Any]:
        """The context in which another thread may run `end`."""
        return self._buffer.device.here()


class PartitionedRequest(Prequest):
    """The request of a partitioned operation on a device array."""

    @property
    def _parts(self) -> tuple[MPI.Prequest, Any]:
        if self._plan is None:
            raise BufferSpecError("the partitioned request was freed")
        return self._plan

    def Pready(self, partition: int) -> None:
        """Mark a partition as ready to be sent: what is queued on the stream so far is in it."""
        self._ready([partition])

    def Pready_range(self, partition_low: int, partition_high: int) -> None:
        """Mark partitions low to high, both included, as ready to be sent."""
        self._ready(range(partition_low, partition_high + 1))

    def Pready_list(self, partitions: Sequence[int]) -> None:
        """Mark these partitions as ready to be sent."""
        self._ready(partitions)

    def _ready(self, partitions: Sequence[int]) -> None:
        inner, work = self._parts
        work.ready(partitions)
        inner.Pready_list(list(partitions))

    def Parrived(self, partition: int) -> bool:
        """Tell whether a partition has arrived: if so, work queued on the stream from now on sees it."""
        inner, work = self._parts
        if self._pending is None or self._pending.done:  # complete: everything is in place
            return True
        if not inner.Parrived(partition):
            return False
        work.arrived(partition)
        return True
