"""Collectives of device arrays by our own algorithms: from GPU to GPU as point-to-point does, and reduced there.

MPI's own collectives move host memory, and reduce it by one core. Here device arrays of some size go by the
algorithms of `gdcomm.algorithms`, if *all* ranks bring such arrays: they ask each other first, by one small
Allreduce. Otherwise (host arrays on some ranks, operators or layouts that are MPI's business) the collective is MPI's.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from gdcomm import devices
from gdcomm.algorithms.choose import ALGORITHMS, NODE_ALGORITHMS, choose
from gdcomm.algorithms.link import Link, Sublink
from gdcomm.arguments import explain
from gdcomm.envelopes import Channel
from gdcomm.errors import NoPathError
from gdcomm.execution import execute
from gdcomm.links import DeviceLink, DeviceVector
from gdcomm.operations import OPERATIONS, Operation
from gdcomm.paths import Paths
from gdcomm.reductions import name_of
from gdcomm.transports.base import split_spec

__all__ = ["chosen", "collective", "limit", "shared"]

SMALLEST = 2 << 20  # bytes of the message from which on the ranks ask each other; smaller ones are faster by MPI
_InPlace = type(MPI.IN_PLACE)


def limit(channel: Channel | None) -> int:
    """Bytes of a host array up to which its collectives are MPI's without asking."""
    return sys.maxsize if channel is None else SMALLEST


def shared(comm: Any, *specs: Any) -> bool:
    """Whether other ranks may bring device arrays to a collective with these host buffers, so that all must ask."""
    if comm._limit == sys.maxsize:
        return False
    return any(_length(split_spec(spec)[0]) >= comm._limit for spec in specs)


def collective(comm: Any, operation: Operation, arguments: tuple[Any, ...], stream: Any) -> Any:
    """Run a blocking collective: by our own algorithm if all ranks can, else by MPI."""
    channel = comm._channel
    if channel is not None and channel.size > 1 and _message(channel.size, operation, arguments) >= comm._limit:
        try:
            if _by_algorithm(comm, channel, operation, arguments, stream):
                return None
        except MPI.Exception as error:
            raise explain(error, comm, operation.name, arguments) from None
    return execute(comm, comm._paths, operation, arguments, stream)


def _by_algorithm(
    comm: Any, channel: Channel, operation: Operation, arguments: tuple[Any, ...], stream: Any
) -> bool:
    """Run the collective if all ranks can; tell if it was run."""
    work = _WAYS[operation.name](_Call(comm, channel, operation, arguments, stream))
    if not _all(comm, work is not None) or work is None:
        return False
    job = _job(comm, channel, operation, arguments)
    try:
        work(job)
    finally:
        job.link.close()
    return True


def chosen(comm: Any, operation: Operation, nbytes: int) -> str:
    """The algorithm that device arrays of so many bytes go by; "" if it is MPI's."""
    channel = comm._channel
    if channel is None or operation.name not in _WAYS or nbytes < comm._limit or comm.Get_size() == 1:
        return ""
    if not _has_path(comm._paths, operation):
        return ""
    return _layout(comm, channel).choose(_NAMES[operation.name], nbytes)


# -- what the ranks must agree on ----------------------------------------------------------------


def _all(comm: MPI.Intracomm, mine: bool) -> bool:
    answer = np.zeros(1, np.int32)
    MPI.Intracomm.Allreduce(comm, np.array([mine], np.int32), answer, MPI.MIN)
    return bool(answer[0])


def _message(ranks: int, operation: Operation, arguments: tuple[Any, ...]) -> int:
    """Bytes of the whole message: the same on all ranks, whatever their buffers are."""
    if operation.both >= 0:
        return _nbytes(arguments[operation.both])
    send, recv = arguments[operation.send], arguments[operation.recv]
    if operation.name in ("Allreduce", "Reduce"):
        return _nbytes(recv if _in_place(send) else send)
    if operation.name == "Reduce_scatter_block":  # the received block is what all ranks have alike
        return _nbytes(recv, ranks) if _in_place(send) else _nbytes(recv) * ranks
    if _in_place(send):
        return _nbytes(recv, ranks)
    blocks = ranks if operation.name == "Alltoall" else 1
    return _nbytes(send, blocks) * (1 if operation.name == "Alltoall" else ranks)


def _nbytes(spec: Any, blocks: int = 1) -> int:
    """Bytes that a buffer argument means; an explicit count is that of one of `blocks` blocks.

    Counts and displacements of single ranks do not occur in the operations served here.
    """
    array, rest = split_spec(spec)
    datatype = next((item for item in rest if isinstance(item, (MPI.Datatype, str))), None)
    if isinstance(datatype, str):
        datatype = MPI.Datatype.fromcode(datatype)
    count = rest[0][0] if rest and isinstance(rest[0], (tuple, list)) else rest[0] if rest else None
    if datatype is None:
        unit = extent = getattr(array, "itemsize", 1)
    else:
        unit, extent = datatype.Get_size(), max(datatype.Get_extent()[1], 1)
    if isinstance(count, int):
        return count * unit * blocks
    return _length(array) // extent * unit if datatype is not None else _length(array)


def _length(array: Any) -> int:
    nbytes = getattr(array, "nbytes", None)
    if nbytes is not None:
        return int(nbytes)
    buffer = devices.find(array)
    if buffer is not None:
        return buffer.nbytes
    try:
        return memoryview(array).nbytes
    except TypeError:  # MPI.BOTTOM, None
        return 0


def _in_place(spec: Any) -> bool:
    return spec is None or (type(spec) is _InPlace and spec == MPI.IN_PLACE)


# -- operations ----------------------------------------------------------------------------------

Work = Callable[["_Job"], None]


_WHOLE = ("allreduce", "bcast", "reduce")  # operations on whole vectors: nothing lies in order of ranks


class _Layout(NamedTuple):
    """How a communicator's ranks lie on nodes.

    Args:
        sizes: ranks of each node.
        node: this rank's.
        first: where the ranks of this node begin, in order of nodes.
        order: the ranks in order of nodes; None if they are in that order.
    """

    sizes: tuple[int, ...]
    node: int
    first: int
    order: tuple[int, ...] | None

    @property
    def even(self) -> bool:
        """Whether all nodes have as many ranks."""
        return len(set(self.sizes)) == 1

    def of(self, operation: str) -> _Layout:
        """The layout as an operation can use it: blocks that do not lie node by node are those of one node."""
        if self.order is None or operation in _WHOLE:
            return self
        return _Layout((sum(self.sizes),), 0, 0, None)

    def choose(self, operation: str, nbytes: int) -> str:
        """The algorithm of an operation on so many bytes."""
        layout = self.of(operation)
        return choose(operation, nbytes, sum(layout.sizes), len(layout.sizes), True, layout.even)


def _layout(comm: MPI.Intracomm, channel: Channel) -> _Layout:
    known: _Layout | None = channel.notes.get("layout")
    if known is None:
        rank, nodes = comm.Get_rank(), [channel.shadow.nodes[channel.peer(r)] for r in range(comm.Get_size())]
        found = list(dict.fromkeys(nodes))  # in order of their first ranks
        order = sorted(range(len(nodes)), key=lambda r: found.index(nodes[r]))
        sizes = tuple(nodes.count(node) for node in found)
        node = found.index(nodes[rank])
        in_order = order == list(range(len(nodes)))
        known = _Layout(sizes, node, sum(sizes[:node]), None if in_order else tuple(order))
        channel.notes["layout"] = known
    return known


class _Job(NamedTuple):
    """Runs one algorithm over a link."""

    link: DeviceLink
    layout: _Layout

    def run(self, operation: str, nbytes: int, *arguments: Any) -> None:
        """Choose an algorithm and run it."""
        link: Link = self.link
        sizes, node, first, order = layout = self.layout.of(operation)
        name = layout.choose(operation, nbytes)
        if name in ALGORITHMS[operation]:
            ALGORITHMS[operation][name].run(link, *arguments)
            return
        if order is not None:
            link, arguments = Sublink(link, order), (arguments[0], *map(order.index, arguments[1:]))  # the root, if any
        inner = Sublink(link, range(first, first + sizes[node]))
        places = range(link.rank - first, link.size, sizes[node]) if layout.even else _leaders(sizes)
        outer = Sublink(link, places) if link.rank in places else None
        more = (sizes, node) if name == "leaders" and operation != "allreduce" else ()
        NODE_ALGORITHMS[operation][name].run(inner, outer, *arguments, *more)


def _leaders(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:i]) for i in range(len(sizes))]


class _Call:
    """One call's arguments, seen as vectors."""

    def __init__(
        self, comm: Any, channel: Channel, operation: Operation, arguments: tuple[Any, ...], stream: Any
    ) -> None:
        self.comm, self.operation, self.arguments, self.stream = comm, operation, arguments, stream
        self.ranks, self.rank = channel.size, comm.Get_rank()

    def vector(self, position: int, writes: bool = False) -> DeviceVector | None:
        """The device array at a position; None if it is not plain, or may not travel from GPU to GPU."""
        array, rest = split_spec(self.arguments[position])
        buffer = None if array is None or isinstance(array, np.ndarray) else devices.find(array, self.stream)
        if buffer is None or rest or not buffer.contiguous or not _has_path(self.comm._paths, self.operation):
            return None
        if writes:
            buffer.require_writable(self.operation.name, "buf" if position == self.operation.both else "recvbuf")
        return DeviceVector(buffer._replace(shape=(buffer.nbytes // buffer.dtype.itemsize,)))

    def pair(self) -> tuple[DeviceVector | None, DeviceVector] | None:
        """What is sent (None: in place) and where it is received, of one dtype and on one stream."""
        recv = self.vector(self.operation.recv, True)
        if recv is None:
            return None
        if _in_place(self.arguments[self.operation.send]):
            return None, recv
        send = self.vector(self.operation.send)
        return None if send is None or send.dtype != recv.dtype else (_ordered(send, recv), recv)

    def reducible(self, vector: DeviceVector) -> bool:
        """Whether the GPU has a kernel for the operator and these elements."""
        op = name_of(self.arguments[self.operation.op])
        buffer = vector.buffer
        return bool(op) and not buffer.ptr % buffer.dtype.alignment and buffer.device.reduces(op, buffer.dtype)


def _has_path(paths: Paths, operation: Operation) -> bool:
    """Whether device messages carry the collective, and MPI does not move device memory itself."""
    with contextlib.suppress(NoPathError):  # what moves over direct messages is direct, too
        if operation.group == "move" and paths.transport(operation) == "mpi":
            return False
    try:
        return paths.transport(OPERATIONS["Isend"]) == paths.transport(OPERATIONS["Irecv"])
    except NoPathError:  # the error is that of MPI's way
        return False


def _ordered(send: DeviceVector, recv: DeviceVector) -> DeviceVector:
    """The sent vector on the stream of the received one."""
    device, stream = recv.buffer.device, recv.buffer.stream
    if send.buffer.stream == stream:
        return send
    device.wait_event(stream, device.record(send.buffer.stream))
    return DeviceVector(send.buffer._replace(stream=stream))


def _allreduce(call: _Call) -> Work | None:
    pair = call.pair()
    if pair is None or not call.reducible(pair[1]) or (pair[0] is not None and len(pair[0]) != len(pair[1])):
        return None
    send, recv = pair

    def work(job: _Job) -> None:
        if send is not None:
            job.link.copy(recv, send)
        job.run("allreduce", recv.nbytes, recv)

    return work


def _reduce(call: _Call) -> Work | None:
    root = call.arguments[call.operation.root]
    if call.rank != root:
        send = call.vector(call.operation.send)
        if send is None or not call.reducible(send):
            return None

        def give(job: _Job) -> None:
            vector = job.link.scratch(len(send), send)
            job.link.copy(vector, send)
            job.run("reduce", send.nbytes, vector, root)

        return give
    pair = call.pair()
    if pair is None or not call.reducible(pair[1]) or (pair[0] is not None and len(pair[0]) != len(pair[1])):
        return None
    mine, recv = pair

    def take(job: _Job) -> None:
        if mine is not None:
            job.link.copy(recv, mine)
        job.run("reduce", recv.nbytes, recv, root)

    return take


def _bcast(call: _Call) -> Work | None:
    root = call.arguments[call.operation.root]
    vector = call.vector(call.operation.both, call.rank != root)
    return None if vector is None else lambda job: job.run("bcast", vector.nbytes, vector, root)


def _allgather(call: _Call) -> Work | None:
    pair = call.pair()
    if pair is None:
        return None
    send, recv = pair
    each, rest = divmod(len(recv), call.ranks)
    if rest or (send is not None and len(send) != each):
        return None

    def work(job: _Job) -> None:
        if send is not None:
            job.link.copy(recv[call.rank * each : (call.rank + 1) * each], send)
        job.run("allgather", recv.nbytes, recv, [each] * call.ranks)

    return work


def _alltoall(call: _Call) -> Work | None:
    send, recv = call.pair() or (None, None)
    if send is None or recv is None or len(send) != len(recv) or len(recv) % call.ranks:
        return None
    counts = [len(recv) // call.ranks] * call.ranks
    return lambda job: job.run("alltoall", recv.nbytes, send, recv, counts, counts)


def _reduce_scatter_block(call: _Call) -> Work | None:
    send, recv = call.pair() or (None, None)
    if send is None or recv is None or len(send) != len(recv) * call.ranks or not call.reducible(recv):
        return None
    each = len(recv)

    def work(job: _Job) -> None:
        vector = job.link.scratch(len(send), send)
        job.link.copy(vector, send)
        job.run("reduce_scatter", send.nbytes, vector, [each] * call.ranks)
        job.link.copy(recv, vector[call.rank * each : (call.rank + 1) * each])

    return work


_WAYS: dict[str, Callable[[_Call], Work | None]] = {
    "Allreduce": _allreduce,
    "Reduce": _reduce,
    "Bcast": _bcast,
    "Allgather": _allgather,
    "Alltoall": _alltoall,
    "Reduce_scatter_block": _reduce_scatter_block,
}
_NAMES = {name: name.removesuffix("_block").lower() for name in _WAYS}


def _job(comm: Any, channel: Channel, operation: Operation, arguments: Sequence[Any]) -> _Job:
    """What runs algorithms on a communicator; collective."""
    tag = channel.notes.get("tag")
    if tag is None:
        tag = channel.notes["tag"] = _agree_tag(comm, channel)
    ranks = range(comm.Get_size())
    op = name_of(arguments[operation.op]) if operation.op >= 0 else ""
    return _Job(DeviceLink(channel, comm._paths, tag, ranks, comm.Get_rank(), op), _layout(comm, channel))


def _agree_tag(comm: MPI.Intracomm, channel: Channel) -> int:
    """A tag that no other communicator has in which two of these ranks meet, also if threads agree on several."""
    shadow, highest = channel.shadow, np.zeros(1, np.int64)
    while True:
        MPI.Intracomm.Allreduce(comm, np.array([shadow.tags_taken + 1], np.int64), highest, MPI.MAX)
        tag = int(highest[0])
        with shadow.lock:
            free = tag > shadow.tags_taken
            shadow.tags_taken = max(tag, shadow.tags_taken)
        if _all(comm, free):
            return tag % shadow.last_tag
