"""The short way: blocking calls on whole, contiguous device arrays, which is most calls of most programs.

The steps of `execution` without its generality, since at 8 bytes every microsecond of Python shows.
Whatever is unusual is left to `execution` before MPI is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from gdcomm import devices
from gdcomm.devices.base import Buffer
from gdcomm.envelopes import ENVELOPE
from gdcomm.large import LIMIT
from gdcomm.memory.pinned import Slot, Slots, pool_of
from gdcomm.operations import Operation
from gdcomm.reductions import substitute
from gdcomm.targets import Arrival, DirectTarget
from gdcomm.transports.host import datatype_of

if TYPE_CHECKING:
    from gdcomm.paths import Paths

__all__ = ["short"]

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
    call = list(arguments)
    results: list[tuple[Buffer, Slot]] = []
    buffer, in_place = None, False
    arrival: Arrival | None = None  # of a message that may come in an envelope
    for position in operation.buffers:
        array = call[position]
        if type(array) is _InPlace:
            in_place = True
            continue
        buffer = None if isinstance(array, (list, tuple)) else devices.find(array, stream)
        if buffer is None or buffer.strides is not None:
            return False
        writes = position != operation.send
        datatype = datatype_of(buffer.dtype)
        if operation.op >= 0 and buffer.dtype.num > 16:  # not one of MPI's numbers
            return False
        if datatype is None or buffer.nbytes > LIMIT or (writes and buffer.readonly):
            return False
        if paths.transport(operation) == "mpi":
            buffer.device.synchronize(buffer.stream)
            call[position] = [_fromaddress(buffer.ptr, buffer.nbytes), datatype]
            if writes and operation.counted and buffer.nbytes >= ENVELOPE and comm._channel is not None:
                arrival = Arrival(comm._channel, DirectTarget(buffer, buffer.nbytes), True)
            continue
        if buffer.nbytes > Slots.SIZE:
            return False
        slot = pool_of(buffer.device).slots().take()
        call[position] = [_fromaddress(slot.address, buffer.nbytes), datatype]
        if writes:
            results.append((buffer, slot))
        if buffer.nbytes and operation.reads(comm, position, arguments, in_place):
            buffer.device.copy(slot.address, buffer.ptr, buffer.nbytes, buffer.stream)
            try:
                buffer.device.synchronize(buffer.stream)
            except BaseException:
                slot.event = buffer.device.record(buffer.stream)  # the copy may still come
                raise
    if buffer is None:  # both in place: MPI knows what to say
        return False
    if operation.op >= 0:
        op = substitute(buffer.dtype, call[operation.op])
        if op is not None:
            call[operation.op] = op
    if not results and arrival is None:
        operation.call(comm, *call)
        return True
    status = operation.receipt(call) if operation.counted else None
    operation.call(comm, *call)
    if arrival is not None and status is not None:
        arrival.complete(status)
    for buffer, slot in results:
        nbytes = buffer.nbytes if status is None else status.Get_elements(MPI.BYTE)
        if nbytes:
            buffer.device.copy(buffer.ptr, slot.address, nbytes, buffer.stream)
            slot.event = buffer.device.record(buffer.stream)
    return True
