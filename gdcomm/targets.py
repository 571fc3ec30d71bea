"""Where receives put the bytes of messages that may come in an envelope: `envelopes.Target` for each kind of buffer."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from mpi4py import MPI

from gdcomm.arenas import Arena
from gdcomm.devices.base import Buffer, Event
from gdcomm.envelopes import ENVELOPE, FIRST, Channel, Header, Incoming
from gdcomm.lanes import Target
from gdcomm.memory.pinned import Lease, pool_of
from gdcomm.transports.base import Side, prefix, split_spec
from gdcomm.transports.host import HostSide
from gdcomm.transports.staged import StagedSide

__all__ = ["Arrival", "DirectTarget", "FlatTarget", "device_target", "fetch", "host_target", "to_ourselves"]

_Array = np.ndarray[Any, Any]


class FlatTarget:
    """Contiguous host memory.

    Args:
        memory: its bytes.
        side: what shows it to MPI, if it is not the user's own memory.
    """

    def __init__(self, memory: _Array, side: Side | None = None) -> None:
        self._memory, self._side = memory, side

    @property
    def capacity(self) -> int:
        return self._memory.nbytes

    def end_of_envelope(self) -> bytes:
        return self._memory[FIRST:ENVELOPE].tobytes()

    def erase(self) -> None:
        self._memory[FIRST:ENVELOPE] = 0

    def memory(self, offset: int, nbytes: int) -> Any:
        return [self._memory[offset : offset + nbytes], MPI.BYTE]

    def placed(self, offset: int, nbytes: int) -> None:
        pass

    def fetch(self, arena: Arena, memory: _Array, offset: int) -> Event | None:
        self._memory[offset : offset + memory.nbytes] = memory
        self.placed(offset, memory.nbytes)
        return None

    def finish(self, nbytes: int) -> list[Event]:
        return self._end(nbytes)

    def _end(self, nbytes: int | None) -> list[Event]:
        event = None if self._side is None else self._side.end(nbytes)
        return [] if event is None else [event]


class MirrorTarget(FlatTarget):
    """A device array and its mirror, which takes the envelope, and chunks that can't go to the device one by one."""

    def __init__(self, side: StagedSide, capacity: int) -> None:
        super().__init__(side.mirror[:capacity], side)
        self._buffer, self._whole = side.buffer, not side.buffer.contiguous
        self._leases: dict[int, Lease] = {}  # memory of the chunks that are under way, by their offsets

    def memory(self, offset: int, nbytes: int) -> Any:
        if self._whole:
            return super().memory(offset, nbytes)
        lease = self._leases[offset] = pool_of(self._buffer.device).lease(nbytes)
        return [lease.array, nbytes, MPI.BYTE]

    def placed(self, offset: int, nbytes: int) -> None:
        if self._whole:
            return
        buffer, lease = self._buffer, self._leases.pop(offset, None)
        memory = self._memory[offset : offset + nbytes] if lease is None else lease.array[:nbytes]
        buffer.device.to_device(buffer, memory, offset)
        if lease is not None:
            lease.release(buffer.device.record(buffer.stream))

    def fetch(self, arena: Arena, memory: _Array, offset: int) -> Event | None:
        if self._whole:
            return super().fetch(arena, memory, offset)
        return fetch(self._buffer, arena, memory, offset)

    def finish(self, nbytes: int) -> list[Event]:
        if self._whole:  # chunks may end within an element of it
            return super().finish(nbytes)
        assert isinstance(self._side, StagedSide)
        return [self._side.mark()]


class DirectTarget:
    """Device memory that MPI writes itself."""

    def __init__(self, buffer: Buffer, capacity: int) -> None:
        self._buffer, self.capacity = buffer, capacity

    def end_of_envelope(self) -> bytes:
        buffer = self._buffer
        slot = pool_of(buffer.device).slots().take()
        end = slot.array[: ENVELOPE - FIRST]
        buffer.device.to_host(end, buffer, FIRST)
        buffer.device.synchronize(buffer.stream)
        return end.tobytes()

    def erase(self) -> None:
        none = np.zeros(ENVELOPE - FIRST, np.uint8)  # pageable and short: the driver has read it on return
        self._buffer.device.to_device(self._buffer, none, FIRST)

    def memory(self, offset: int, nbytes: int) -> Any:
        return [MPI.buffer.fromaddress(self._buffer.ptr + offset, nbytes), MPI.BYTE]

    def placed(self, offset: int, nbytes: int) -> None:
        pass

    def fetch(self, arena: Arena, memory: _Array, offset: int) -> Event | None:
        return fetch(self._buffer, arena, memory, offset)

    def finish(self, nbytes: int) -> list[Event]:
        return []


def fetch(buffer: Buffer, arena: Arena, memory: _Array, offset: int) -> Event:
    """Queue the copy from a slot to the device; the event tells when the slot may be used again."""
    arena.lock(buffer.device)  # if that fails, the driver's detour is slow, and as right
    buffer.device.to_device(buffer, memory, offset)
    return buffer.device.record(buffer.stream)


class PackedTarget(FlatTarget):
    """Memory in a form that only MPI understands (derived datatypes): packed when an envelope came.

    Args:
        spec: the buffer argument.
        side: what shows it to MPI, if it is not the user's own memory.
    """

    def __init__(self, spec: Any, side: Side | None = None) -> None:
        self._spec, self._side = spec, side

    @functools.cached_property
    def _memory(self) -> _Array:  # type: ignore[override]
        return _pack(self._spec)

    def finish(self, nbytes: int) -> list[Event]:
        with to_ourselves() as own:
            own.Sendrecv([self._memory, nbytes, MPI.BYTE], 0, 0, self._spec, 0, 0)
        return self._end(None)


class _Own(MPI.Intracomm):
    _channel = None


_own: list[_Own] = []
_lock = threading.Lock()


@contextmanager
def to_ourselves() -> Iterator[Any]:
    """A communicator of this process alone, which nobody else uses meanwhile. After an error it is given up."""
    with _lock:  # held for no longer: whoever waits for a message may have to drive one that comes here, too
        own = _own.pop() if _own else _Own(MPI.COMM_SELF.Dup())
    yield own
    _own.append(own)


def _pack(spec: Any) -> _Array:
    """The bytes that MPI would send of a buffer argument: sent to ourselves."""
    status = MPI.Status()
    with to_ourselves() as own:
        request = own.Isend(spec, 0, 0)
        own.Probe(0, 0, status)
        packed = np.empty(status.Get_elements(MPI.BYTE), np.uint8)
        own.Recv([packed, MPI.BYTE], 0, 0)
        request.Wait()
    return packed


def device_target(side: Side, buffer: Buffer, rest: tuple[Any, ...]) -> Target | None:
    """The target of a device array shown to MPI by `side`; None if it is too small for an envelope."""
    capacity = prefix(rest, buffer.nbytes, buffer.dtype.itemsize)
    if capacity is None:
        return PackedTarget(side.spec, side if side.finishes else None) if buffer.nbytes >= ENVELOPE else None
    if capacity < ENVELOPE:
        return None
    return MirrorTarget(side, capacity) if isinstance(side, StagedSide) else DirectTarget(buffer, capacity)


def host_target(spec: Any, side: HostSide | None) -> Target | None:
    """The target of a host buffer argument; None if it is too small for an envelope."""
    array, rest = split_spec(spec)
    try:
        nbytes = memoryview(array).nbytes if side is None else side.memory.nbytes
    except (TypeError, ValueError, BufferError):  # MPI.BOTTOM, or nothing that MPI can write
        return PackedTarget(spec) if type(array) is type(MPI.BOTTOM) else None
    if nbytes < ENVELOPE:
        return None
    plain = isinstance(array, np.ndarray) and array.flags.c_contiguous and not array.dtype.hasobject
    capacity = prefix(rest, nbytes, array.itemsize) if plain or side is not None else None
    if capacity is None:
        return PackedTarget(spec if side is None else side.spec, side)
    if capacity < ENVELOPE:
        return None
    memory = array.reshape(-1).view(np.uint8) if side is None else side.memory
    return FlatTarget(memory[:capacity], side)


class Arrival:
    """What one receive looks for when MPI is done with it, and what it found.

    Args:
        channel: of the communicator.
        target: where the bytes went.
        counted: MPI's count of received bytes can be believed.
    """

    def __init__(self, channel: Channel, target: Target, counted: bool) -> None:
        self._shadow, self._target, self._counted = channel.shadow, target, counted
        self._header: Header | None = None

    def open(self, nbytes: int | None) -> Incoming | None:
        """The transfer of the rest, if an envelope came."""
        self._header = None
        if not self._counted or nbytes == ENVELOPE:
            self._header = self._shadow.read(self._target.end_of_envelope())
        return None if self._header is None else Incoming(self._shadow, self._header, self._target)

    def complete(self, status: MPI.Status) -> None:
        """Receive the rest, if an envelope came; put the bytes of the whole message in the status."""
        incoming = self.open(status.Get_elements(MPI.BYTE))
        if incoming is not None:
            incoming.receive(status)

    def total(self, nbytes: int) -> int:
        """Bytes of the message: `nbytes`, where no envelope came."""
        return nbytes if self._header is None else self._header.total
