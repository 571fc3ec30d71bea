"""One operation from the user's arguments to MPI and back: describe, choose, call, finish.

The only place that asks whether a buffer is on a device. Everything raised here is raised
before MPI is called, so other ranks see an erring rank as one that has not yet called.
"""

from __future__ import annotations

import sys
from array import array as stdarray
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI
from numpy import ndarray

from gdcomm import devices, large
from gdcomm.arguments import explain
from gdcomm.devices.base import Buffer, Event
from gdcomm.envelopes import SLICE, SMALLEST, Channel, Incoming, Outgoing
from gdcomm.errors import BufferSpecError
from gdcomm.lanes import Target
from gdcomm.memory.pinned import pool_of
from gdcomm.operations import BLOCKING, PERSISTENT, REQUEST, Operation
from gdcomm.reductions import check_reduction, substitute, wire_dtype
from gdcomm.requests import Pending, Prequest, Request, start_request
from gdcomm.short import short, short_request
from gdcomm.targets import Arrival, device_target, host_target
from gdcomm.transports.base import Side, derived, is_in_place, prefix, reach, split_spec
from gdcomm.transports.host import host_side
from gdcomm.transports.mpi import DirectSide
from gdcomm.transports.staged import StagedSide

if TYPE_CHECKING:
    from gdcomm.paths import Paths

__all__ = ["Plan", "execute", "plain", "prepare", "reducible", "start"]

_HOST_TYPES = frozenset(
    (ndarray, bytes, bytearray, memoryview, stdarray, type(None), type(MPI.IN_PLACE), type(MPI.BOTTOM))
)


def plain(obj: Any) -> bool:
    """Whether mpi4py can take `obj` as it is: host memory whose order in memory is its logical order.

    The methods try mpi4py first with such arguments; where it can't describe the dtype (`UNSERVED`,
    raised before anything is sent) they come to `execute`.
    """
    kind = type(obj)
    if kind is ndarray:
        return obj.ndim < 2 or obj.flags.c_contiguous
    if kind is list or kind is tuple:
        return bool(obj) and type(obj[0]) is ndarray and (obj[0].ndim < 2 or obj[0].flags.c_contiguous)
    return kind in _HOST_TYPES


def reducible(sendbuf: Any, recvbuf: Any, limit: int = sys.maxsize) -> bool:
    """Whether MPI reduces these arrays as they are: `plain`, of a number type that it knows, below `limit` bytes."""
    # Type numbers 1 to 16 are the integers, float32 to longdouble and their complex pairs; 0 is bool.
    array = sendbuf if type(sendbuf) is ndarray else recvbuf
    if not (type(array) is ndarray and 0 < array.dtype.num < 17 and (array.ndim < 2 or array.flags.c_contiguous)):
        return False
    if array is recvbuf:
        # Beside a result in place, a receive buffer does not tell how much is reduced: see `collectives.asks`.
        return (limit == sys.maxsize or (sendbuf is MPI.IN_PLACE and array.nbytes < limit)) and plain(sendbuf)
    return array.nbytes < limit and plain(recvbuf)


_ENVELOPED = frozenset(("Send", "Ssend", "Rsend", "Isend", "Issend", "Irsend"))


class Plan:
    """An operation ready to be called: MPI's arguments and the sides behind them."""

    __slots__ = ("arguments", "arrival", "counted", "dtypes", "large", "operation", "owners", "sides", "writers")

    def __init__(self, operation: Operation, arguments: tuple[Any, ...]) -> None:
        self.operation = operation
        self.arguments = list(arguments)
        self.sides: list[Side] = []
        self.writers: list[Side] = []  # sides that have work to do when MPI is done
        self.counted = operation.counted  # only as many bytes as MPI received were written
        self.dtypes: list[np.dtype[Any]] = []
        self.owners: list[Buffer] = []  # device arrays, kept alive
        self.large = False  # perhaps more elements than a C int counts
        self.arrival: Arrival | None = None  # of a message that may come in an envelope

    @property
    def sends(self) -> bool:
        """Whether it only sends."""
        return self.operation.send >= 0 > self.operation.recv

    def begin(self) -> None:
        for side in self.sides:
            side.begin()
        for side in self.sides:
            side.ready()

    def end(self, nbytes: int | None) -> list[Event]:
        if self.arrival is not None:
            incoming = self.arrival.open(nbytes)
            if incoming is not None:
                return [incoming]
        received = nbytes if self.counted else None
        events = [side.end(received) for side in self.writers]
        return [event for event in events if event is not None]

    def total(self, nbytes: int) -> int:
        """Bytes of the message that was received, when everything is in place."""
        return nbytes if self.arrival is None else self.arrival.total(nbytes)

    def close(self) -> None:
        for side in self.sides:
            if side.holds:
                side.close()

    def call(self, comm: Any) -> Any:
        """MPI's part."""
        if self.large:
            return large.call(self.operation, comm, self.arguments)
        return self.operation.call(comm, *self.arguments)

    def here(self) -> AbstractContextManager[Any]:
        """The context in which another thread may run `end`."""
        return self.owners[0].device.here() if self.owners else nullcontext()


def execute(comm: Any, paths: Paths, operation: Operation, arguments: tuple[Any, ...], stream: Any) -> Any:
    """Run an operation whose buffers may be of any kind.

    Args:
        comm: the communicator (or the matched message) whose method it is.
        paths: its agreed capabilities and the path asked for.
        operation: what to do.
        arguments: the method's arguments, all of them, in order.
        stream: the user's stream or None.

    Returns:
        What mpi4py's method returns: None, a Request or a Prequest.
    """
    try:
        if operation.simple and short(comm, paths, operation, arguments, stream):
            return None
        if operation.form == REQUEST:
            request = short_request(comm, paths, operation, arguments, stream)
            if request is not None:
                return request
    except MPI.Exception as error:
        raise explain(error, comm, operation.name, arguments) from None
    plan = Plan(operation, arguments)
    try:
        _fill(plan, comm, paths, stream)
        if operation.form == BLOCKING:
            return _block(comm, plan)
        return _start(comm, plan)
    except MPI.Exception as error:
        plan.close()
        raise explain(error, comm, operation.name, arguments) from None
    except BaseException:
        plan.close()
        raise


def prepare(comm: Any, paths: Paths, operation: Operation, arguments: tuple[Any, ...], stream: Any) -> Plan:
    """The first part of `execute`: all that comes before MPI. It raises what is wrong with the arguments."""
    plan = Plan(operation, arguments)
    with _closing(plan, comm, arguments):
        _fill(plan, comm, paths, stream)
    return plan


def start(comm: Any, plan: Plan) -> Any:
    """The second part, of a nonblocking operation. `comm` may be another communicator of the same ranks."""
    with _closing(plan, comm, tuple(plan.arguments)):
        return _start(comm, plan)


@contextmanager
def _closing(plan: Plan, comm: Any, arguments: tuple[Any, ...]) -> Iterator[None]:
    """Close the plan after an error."""
    try:
        yield
    except MPI.Exception as error:
        plan.close()
        raise explain(error, comm, plan.operation.name, arguments) from None
    except BaseException:
        plan.close()
        raise


def _block(comm: Any, plan: Plan) -> None:
    plan.begin()
    if not plan.writers and plan.arrival is None:
        plan.call(comm)
    else:
        status = plan.operation.receipt(plan.arguments) if plan.counted or plan.arrival is not None else None
        plan.call(comm)
        for event in plan.end(None if status is None else status.Get_elements(MPI.BYTE)):
            if isinstance(event, Outgoing):
                event.synchronize()
            elif isinstance(event, Incoming):
                event.receive(status)
    plan.close()


def _start(comm: Any, plan: Plan) -> Any:
    if not plan.sides and plan.arrival is None:  # host memory as mpi4py takes it
        return plan.call(comm)
    if plan.operation.form == PERSISTENT:
        return Prequest._make(plan.call(comm), plan)
    plan.begin()
    inner = plan.call(comm)
    if plan.arrival is None and not plan.writers and not any(side.holds for side in plan.sides):
        return Request._plain(inner, plan)
    return start_request(Pending(inner, plan))


def _fill(plan: Plan, comm: Any, paths: Paths, stream: Any) -> None:
    """Describe the buffers, choose their path, and put what MPI is to see in their place."""
    operation, arguments = plan.operation, plan.arguments
    in_place = operation.send >= 0 <= operation.recv and (
        is_in_place(arguments[operation.send]) or is_in_place(arguments[operation.recv])
    )
    spare = operation.spare(comm, arguments)
    if spare >= 0:
        arguments[spare] = None  # mpi4py must not look at a device array
    for position in operation.buffers:
        if position != spare:
            _add_side(plan, comm, paths, position, in_place, stream)
    if operation.op >= 0:
        _replace_op(plan)


def _add_side(plan: Plan, comm: Any, paths: Paths, position: int, in_place: bool, stream: Any) -> None:
    operation = plan.operation
    spec = plan.arguments[position]
    array, rest = split_spec(spec)
    writes = operation.writes(comm, position, plan.arguments)
    channel = comm._channel
    expects = channel is not None and writes and operation.group in ("p2p", "copy")
    buffer = None if type(array) in _HOST_TYPES else devices.find(array, stream)
    side: Side | None
    if buffer is None:
        dtype = getattr(array, "dtype", None)
        if isinstance(dtype, np.dtype):
            plan.dtypes.append(dtype)
            plan.large |= array.nbytes > large.LIMIT
        side = inner = host_side(spec, position != operation.recv or in_place or operation.partial, writes)
        if expects:
            _expect(plan, channel, host_target(spec, inner))
        if side is None:
            return
    else:
        plan.dtypes.append(buffer.dtype)
        plan.owners.append(buffer)
        plan.large |= buffer.nbytes > large.LIMIT
        if writes:
            buffer.require_writable(operation.name, "buf" if position == operation.both else "recvbuf")
        if rest:
            _check_reach(operation, position, comm, rest, buffer)
        reads = operation.reads(comm, position, plan.arguments, in_place)
        if paths.transport(operation) == "mpi" and _dense(buffer, rest):
            side = DirectSide(buffer, rest, reads, writes)
        else:
            if rest:  # a derived datatype may leave gaps that a byte count does not show
                plan.counted = plan.counted and not writes
            # Where MPI may leave gaps, the mirror must hold what is there already.
            gaps = writes and (bool(rest) or operation.partial) and not (operation.counted and not rest)
            side = None if writes else _envelope(channel, operation, buffer, rest, plan.arguments)
            if side is None:
                chunked = expects and buffer.contiguous and not (reads or gaps)
                side = StagedSide(pool_of(buffer.device), buffer, rest, reads or gaps, writes, chunked)
        if expects:
            _expect(plan, channel, device_target(side, buffer, rest))
    plan.sides.append(side)
    if side.finishes:
        plan.writers.append(side)
    plan.arguments[position] = side.spec


def _expect(plan: Plan, channel: Channel, target: Target | None) -> None:
    """A message for `target` may come in an envelope."""
    if target is not None:
        counted = not plan.operation.name.startswith("Isendrecv")  # MPICH may count the bytes sent
        plan.arrival = Arrival(channel, target, counted)


def _envelope(
    channel: Channel | None, operation: Operation, buffer: Buffer, rest: tuple[Any, ...], arguments: list[Any]
) -> Outgoing | None:
    """The large message's way to leave in chunks; None if it leaves as it is."""
    if channel is None or operation.name not in _ENVELOPED or buffer.nbytes < SMALLEST:
        return None
    nbytes, dest = prefix(rest, buffer.nbytes, buffer.dtype.itemsize), arguments[1]
    if nbytes is None or nbytes < SMALLEST or buffer.dtype.itemsize > SLICE:
        return None
    if not (isinstance(dest, int) and 0 <= dest < channel.size):  # nobody, or MPI says what is wrong
        return None
    if channel.peer(dest) == channel.shadow.rank:  # nothing to overlap with
        return None
    return Outgoing(channel, buffer, nbytes, dest)


def _dense(buffer: Buffer, rest: tuple[Any, ...]) -> bool:
    """Whether MPI sees plain consecutive elements: it packs derived datatypes with the CPU."""
    if not buffer.contiguous:
        return False
    wire = wire_dtype(buffer.dtype)
    return (wire is None or wire.itemsize == buffer.dtype.itemsize) and not any(derived(item) for item in rest)


def _check_reach(operation: Operation, position: int, comm: Any, rest: tuple[Any, ...], buffer: Buffer) -> None:
    """Refuse counts and displacements that leave the array: MPI would read and write other memory."""
    blocks = comm.Get_size() if position in large.blocks(operation.name) else 1
    end = reach(rest, buffer.dtype.itemsize, blocks)
    if end > buffer.nbytes:
        raise BufferSpecError(
            f"{operation.name}: argument {position + 1}: counts and displacements reach byte {end} of an array of "
            f"{buffer.nbytes} bytes; give smaller ones, or a larger array"
        )


def _replace_op(plan: Plan) -> None:
    """Put in the operator that reduces the dtype at hand, where MPI's own does not."""
    if plan.dtypes:
        check_reduction(plan.operation.name, plan.dtypes, plan.arguments[plan.operation.op])
        replacement = substitute(plan.dtypes[-1], plan.arguments[plan.operation.op])
        if replacement is not None:
            plan.arguments[plan.operation.op] = replacement
