"""The short way: calls on whole, contiguous device arrays, which is most calls of most programs.

Blocking ones, and nonblocking messages that are small.

The steps of `execution` without its generality, since at 8 bytes every microsecond of Python shows.
Whatever is unusual is left to `execution` before MPI is called.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from gdcomm import devices
from gdcomm.devices.base import Buffer, Event
from gdcomm.envelopes import ENVELOPE
from gdcomm.large import LIMIT
from gdcomm.memory.pinned import Lease, Slot, Slots, pool_of
from gdcomm.operations import Operation
from gdcomm.reductions import substitute
from gdcomm.requests import Pending, Request, start_request
from gdcomm.targets import Arrival, DirectTarget
from gdcomm.transports.host import datatype_of

if TYPE_CHECKING:
    from gdcomm.paths import Paths

__all__ = ["short", "short_request"]

_REQUESTS = frozenset(("Isend", "Issend", "Irsend", "Irecv"))
_MESSAGES = ("p2p", "copy")  # groups of operations that may come, or go, in an envelope
_InPlace = type(MPI.IN_PLACE)
_fromaddress = MPI.buffer.fromaddress


def short(comm: Any, paths: Paths, operation: Operation, arguments: tuple[Any, ...], stream: Any) -> bool:
    """Run the operation if it is a simple one; tell whether it was.

    Args:
        comm: the communicator or matched message.
        paths: its agreed capabilities and the path asked for.
        operation: one whose `simple` is true.
        arguments: the method's arguments, all of them.
        stream: the user's stream or None.
    """
    found: list[tuple[int, Buffer, MPI.Datatype]] = []
    in_place = False
    spare = operation.spare(comm, arguments)
    for position in operation.buffers:
        if position == spare:
            continue
        array = arguments[position]
        if type(array) is _InPlace:
            in_place = True
            continue
        buffer = None if isinstance(array, (list, tuple)) else devices.find(array, stream)
        if buffer is None or buffer.strides is not None or buffer.nbytes > LIMIT:
            return False
        datatype = datatype_of(buffer.dtype)
        if datatype is None or (buffer.readonly and operation.writes(comm, position, arguments)):
            return False
        if operation.op >= 0 and buffer.dtype.num > 16:  # not one of MPI's numbers
            return False
        found.append((position, buffer, datatype))
    if not found:  # both in place: MPI knows what to say
        return False
    direct = paths.transport(operation) == "mpi"
    if not direct and operation.group in _MESSAGES and any(b.nbytes > Slots.SIZE for _, b, _ in found):
        return False
    call = list(arguments)
    if spare >= 0:
        call[spare] = None
    if operation.op >= 0:
        op = substitute(found[-1][1].dtype, call[operation.op])
        if op is not None:
            call[operation.op] = op
    if direct:
        _direct(comm, operation, call, found)
    else:
        _staged(comm, operation, call, found, in_place)
    return True


def _direct(comm: Any, operation: Operation, call: list[Any], found: list[tuple[int, Buffer, MPI.Datatype]]) -> None:
    """MPI moves device memory, once the stream has come to it."""
    arrival: Arrival | None = None  # of a message that may come in an envelope
    for position, buffer, datatype in found:
        buffer.device.synchronize(buffer.stream)
        call[position] = [_fromaddress(buffer.ptr, buffer.nbytes), datatype]
        may_come = position != operation.send and operation.counted and buffer.nbytes >= ENVELOPE
        if may_come and comm._channel is not None:
            arrival = Arrival(comm._channel, DirectTarget(buffer, buffer.nbytes), True)
    if arrival is None:
        operation.call(comm, *call)
        return
    status = operation.receipt(call)
    operation.call(comm, *call)
    if status is not None:
        arrival.complete(status)


def _staged(
    comm: Any, operation: Operation, call: list[Any], found: list[tuple[int, Buffer, MPI.Datatype]], in_place: bool
) -> None:
    """MPI moves page-locked memory."""
    taken: list[tuple[Buffer, Slot | Lease, bool]] = []
    try:
        for position, buffer, datatype in found:
            pool = pool_of(buffer.device)
            block = pool.slots().take() if buffer.nbytes <= Slots.SIZE else pool.lease(buffer.nbytes)
            taken.append((buffer, block, operation.writes(comm, position, call)))
            call[position] = [_fromaddress(block.address, buffer.nbytes), datatype]
            if buffer.nbytes and operation.reads(comm, position, call, in_place):
                buffer.device.copy(block.address, buffer.ptr, buffer.nbytes, buffer.stream)
                buffer.device.synchronize(buffer.stream)
        status = operation.receipt(call) if operation.counted else None
        operation.call(comm, *call)
    except BaseException:
        for buffer, block, _ in taken:
            block.release(buffer.device.record(buffer.stream))  # a copy may still come
        raise
    for buffer, block, written in taken:
        nbytes = 0 if not written else buffer.nbytes if status is None else status.Get_elements(MPI.BYTE)
        if nbytes:
            buffer.device.copy(buffer.ptr, block.address, nbytes, buffer.stream)
        block.release(buffer.device.record(buffer.stream) if nbytes else None)


class _Mirror:
    """A small device array that is sent from page-locked memory, or received in it: a request's `Work`.

    Args:
        buffer: the array.
        sends: whether it is sent.
    """

    __slots__ = ("_buffer", "_event", "_lease", "sends", "spec")

    def __init__(self, buffer: Buffer, datatype: MPI.Datatype, sends: bool) -> None:
        self._buffer, self.sends = buffer, sends
        self._lease = pool_of(buffer.device).lease(buffer.nbytes)
        self._event: Event | None = None  # behind the last copy
        self.spec = [_fromaddress(self._lease.address, buffer.nbytes), datatype]

    def begin(self) -> None:
        """Copy what is sent, and wait for it."""
        buffer = self._buffer
        if self.sends and buffer.nbytes:
            device, stream = buffer.device, buffer.stream
            device.copy(self._lease.address, buffer.ptr, buffer.nbytes, stream)
            try:
                device.synchronize(stream)
            except BaseException:
                self._event = device.record(stream)
                raise

    def end(self, nbytes: int | None) -> list[Event]:
        if self.sends or not nbytes:
            return []
        buffer = self._buffer
        buffer.device.copy(buffer.ptr, self._lease.address, nbytes, buffer.stream)
        self._event = buffer.device.record(buffer.stream)
        return [self._event]

    def total(self, nbytes: int) -> int:
        return nbytes

    def close(self) -> None:
        self._lease.release(self._event)

    def here(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.sends else self._buffer.device.here()


def short_request(
    comm: Any, paths: Paths, operation: Operation, arguments: tuple[Any, ...], stream: Any
) -> Request | None:
    """Start the operation if it is a nonblocking message of a small array; None if it is not.

    Args:
        comm, paths, operation, arguments, stream: as in `short`.
    """
    array = arguments[0]
    if operation.name not in _REQUESTS or isinstance(array, (list, tuple)):
        return None
    buffer = devices.find(array, stream)
    if buffer is None or buffer.strides is not None or buffer.nbytes > Slots.SIZE:
        return None
    sends, datatype = operation.send >= 0, datatype_of(buffer.dtype)
    if datatype is None or (buffer.readonly and not sends) or paths.transport(operation) == "mpi":
        return None
    work = _Mirror(buffer, datatype, sends)
    try:
        work.begin()
        return start_request(Pending(operation.call(comm, work.spec, *arguments[1:]), work))
    except BaseException:
        work.close()
        raise
