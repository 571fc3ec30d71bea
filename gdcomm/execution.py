"""One operation from the user's arguments to MPI and back: describe, choose, call, finish.

The only place that asks whether a buffer is on a device. Everything raised here is raised
before MPI is called, so other ranks see an erring rank as one that has not yet called.
"""

from __future__ import annotations

from array import array as stdarray
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI
from numpy import ndarray

from gdcomm import devices, large
from gdcomm.arguments import explain
from gdcomm.devices.base import Buffer, Event
from gdcomm.errors import BufferSpecError, NoPathError
from gdcomm.memory.pinned import PinnedPool
from gdcomm.operations import BLOCKING, PERSISTENT, Operation
from gdcomm.paths import choose
from gdcomm.reductions import substitute, wire_dtype
from gdcomm.requests import Pending, Prequest, start_request
from gdcomm.transports.base import Side, split_spec
from gdcomm.transports.host import host_side
from gdcomm.transports.mpi import DirectSide
from gdcomm.transports.staged import StagedSide

if TYPE_CHECKING:
    from gdcomm.paths import Paths

__all__ = ["execute", "plain", "reducible", "refuse_device"]

_HOST_TYPES = frozenset(
    (ndarray, bytes, bytearray, memoryview, stdarray, type(None), type(MPI.IN_PLACE), type(MPI.BOTTOM))
)
_pools: dict[int, PinnedPool] = {}


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


def reducible(sendbuf: Any, recvbuf: Any) -> bool:
    """Whether MPI reduces these arrays as they are: `plain`, and of a number type that it knows."""
    # Type numbers 1 to 16 are the integers, float32 to longdouble and their complex pairs; 0 is bool.
    array = sendbuf if type(sendbuf) is ndarray else recvbuf
    if not (type(array) is ndarray and 0 < array.dtype.num < 17 and (array.ndim < 2 or array.flags.c_contiguous)):
        return False
    return plain(sendbuf if array is recvbuf else recvbuf)


def refuse_device(name: str, spec: Any) -> None:
    """Raise if a buffer argument is device memory, which `name` can't carry.

    Raises:
        NoPathError: always for device memory.
    """
    array, _ = split_spec(spec)
    if type(array) not in _HOST_TYPES and devices.find(array) is not None:
        raise NoPathError(f"{name}: buf is a device array, and there is no path for it; give a host array")


def pool_of(device: devices.Device) -> PinnedPool:
    """The pinned pool that stages for `device`, made on first use."""
    pool = _pools.get(id(device))
    if pool is None:
        pool = _pools.setdefault(id(device), PinnedPool(device))
    return pool


@dataclass(slots=True)
class Plan:
    """An operation ready to be called: MPI's arguments and the sides behind them."""

    operation: Operation
    arguments: list[Any]
    sides: list[Side] = field(default_factory=list)
    writers: list[Side] = field(default_factory=list)  # sides that MPI writes
    counted: bool = False  # only as many bytes as MPI received were written
    keep: Any = None

    def begin(self) -> None:
        for side in self.sides:
            side.begin()
        for side in self.sides:
            side.ready()

    def end(self, nbytes: int | None) -> list[Event]:
        received = nbytes if self.counted else None
        events = [side.end(received) for side in self.writers]
        return [event for event in events if event is not None]

    def close(self) -> None:
        for side in self.sides:
            side.close()


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
    plan = Plan(operation, list(arguments), counted=operation.counted)
    try:
        _fill(plan, comm, paths, stream)
        return _call(comm, plan)
    except MPI.Exception as error:
        plan.close()
        raise explain(error, comm, operation.name, arguments) from None
    except BaseException:
        plan.close()
        raise


def _call(comm: Any, plan: Plan) -> Any:
    operation = plan.operation
    if not plan.sides:
        return large.call(operation, comm, plan.arguments)
    if operation.form == PERSISTENT:
        inner = large.call(operation, comm, plan.arguments)
        return Prequest._make(inner, plan.begin, plan.end, plan.close)
    plan.begin()
    if operation.form == BLOCKING:
        status = _status(plan)
        large.call(operation, comm, plan.arguments)
        plan.end(None if status is None else status.Get_elements(MPI.BYTE))
        plan.close()
        return None
    inner = large.call(operation, comm, plan.arguments)
    return start_request(Pending(inner, plan.end, plan.close, plan.keep))


def _status(plan: Plan) -> MPI.Status | None:
    """The status that tells how much was received; ours if the user gave none."""
    position = plan.operation.status
    if position < 0:
        return None
    if plan.arguments[position] is None:
        plan.arguments[position] = MPI.Status()
    status: MPI.Status = plan.arguments[position]
    return status


def _fill(plan: Plan, comm: Any, paths: Paths, stream: Any) -> None:
    """Describe the buffers, choose their path, and put what MPI is to see in their place."""
    operation, arguments = plan.operation, plan.arguments
    in_place = any(
        position >= 0 and _is_in_place(arguments[position]) for position in (operation.send, operation.recv)
    )
    buffers: list[Buffer] = []
    dtypes: list[np.dtype[Any]] = []
    for position in (operation.send, operation.recv, operation.both):
        if position >= 0 and not _insignificant(comm, operation, position, arguments):
            _add_side(plan, paths, position, in_place, stream, buffers, dtypes, comm)
    if operation.op >= 0:
        _replace_op(plan, dtypes)
    plan.keep = (tuple(arguments), buffers)


def _insignificant(comm: Any, operation: Operation, position: int, arguments: list[Any]) -> bool:
    """Drop a device buffer that only the root would use: mpi4py must not look at it."""
    side = {"send": operation.send, "recv": operation.recv}.get(operation.root_side, -1)
    if position != side or comm.Get_rank() == arguments[operation.root] or comm.Is_inter():
        return False
    array, _ = split_spec(arguments[position])
    if array is not None and type(array) not in _HOST_TYPES:
        arguments[position] = None
    return True


def _add_side(
    plan: Plan,
    paths: Paths,
    position: int,
    in_place: bool,
    stream: Any,
    buffers: list[Buffer],
    dtypes: list[np.dtype[Any]],
    comm: Any,
) -> None:
    operation = plan.operation
    spec = plan.arguments[position]
    array, rest = split_spec(spec)
    writes = position in (operation.recv, operation.both)
    reads = position in (operation.send, operation.both) or in_place
    buffer = None if type(array) in _HOST_TYPES else devices.find(array, stream)
    dtype = _dtype_of(array) if buffer is None else buffer.dtype
    if dtype is not None:
        dtypes.append(dtype)
    side: Side | None
    if buffer is None:
        side = host_side(spec, reads or operation.partial, writes)
    else:
        buffers.append(buffer)
        _check(operation, position, buffer, writes)
        transport, _ = choose(paths.path, operation.group, operation.form, operation.name, paths.can)
        if operation.both >= 0 and operation.root >= 0:  # Bcast: only the root's content is read
            root = plan.arguments[operation.root]
            reads = root == (MPI.ROOT if comm.Is_inter() else comm.Get_rank())
        if transport == "mpi" and _dense(buffer, rest):
            side = DirectSide(buffer, rest, reads, writes)
        else:
            if rest:  # a derived datatype may leave gaps that a byte count does not show
                plan.counted = plan.counted and not writes
            # Where MPI may leave gaps, the mirror must hold what is there already.
            gaps = writes and (bool(rest) or operation.partial) and not (operation.counted and not rest)
            side = StagedSide(pool_of(buffer.device), buffer, rest, reads or gaps, writes)
    if side is not None:
        plan.sides.append(side)
        if writes:
            plan.writers.append(side)
        plan.arguments[position] = side.spec


def _dense(buffer: Buffer, rest: tuple[Any, ...]) -> bool:
    """Whether MPI sees plain consecutive elements: it packs derived datatypes with the CPU."""
    wire = wire_dtype(buffer.dtype)
    return (
        buffer.contiguous
        and (wire is None or wire.itemsize == buffer.dtype.itemsize)
        and all(_plain_item(item) for item in rest)
    )


def _plain_item(item: Any) -> bool:
    if isinstance(item, MPI.Datatype):
        return bool(item.is_predefined)
    if isinstance(item, (list, tuple)):
        return all(_plain_item(part) for part in item)
    return True


def _check(operation: Operation, position: int, buffer: Buffer, writes: bool) -> None:
    if writes and buffer.readonly:
        name = "buf" if position == operation.both else "recvbuf"
        raise BufferSpecError(
            f"{operation.name}: {name} is a read-only device array ({type(buffer.owner).__name__}); "
            "give a writable one, for example a copy"
        )


def _is_in_place(spec: Any) -> bool:
    """None means in place too (where it does not mean "not the root")."""
    return spec is None or (type(spec) is type(MPI.IN_PLACE) and spec == MPI.IN_PLACE)


def _replace_op(plan: Plan, dtypes: list[np.dtype[Any]]) -> None:
    """Put in the operator that reduces the dtype at hand, where MPI's own does not."""
    if dtypes:
        replacement = substitute(dtypes[-1], plan.arguments[plan.operation.op])
        if replacement is not None:
            plan.arguments[plan.operation.op] = replacement


def _dtype_of(array: Any) -> np.dtype[Any] | None:
    dtype = getattr(array, "dtype", None)
    return dtype if isinstance(dtype, np.dtype) else None
