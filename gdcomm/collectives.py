"""Collectives of device arrays by our own algorithms: from GPU to GPU as point-to-point does, and reduced there.

MPI's own collectives move host memory, and reduce it by one core. Here device arrays of some size go by the
algorithms of `gdcomm.algorithms`, if *all* ranks bring such arrays: they ask each other first, by one small
Allreduce. Otherwise (host arrays on some ranks, operators or layouts that are MPI's business) the collective is MPI's.

Whether they ask is decided by the bytes of the whole message, which every rank knows. Of Alltoallv, Gatherv and
Scatterv none does: there they ask each time, however little there is to send and wherever it lies, and learn the
size from the answer. So these three cost NumPy arrays the Allreduce too, where a device message could go by an
algorithm at all: not where no rank has loaded a library of device arrays, nor where MPI moves those itself.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from gdcomm.algorithms import allgather
from gdcomm.algorithms.choose import ALGORITHMS, NODE_ALGORITHMS, Model, choose
from gdcomm.algorithms.link import LANES, Link, Sublink
from gdcomm.algorithms.parts import blocks
from gdcomm.algorithms.steps import finish
from gdcomm.arguments import REFUSED, UNSERVED, explain, unserved
from gdcomm.devices.base import Buffer
from gdcomm.envelopes import Channel
from gdcomm.errors import BufferSpecError, NoPathError
from gdcomm.execution import execute, plain
from gdcomm.express import Express
from gdcomm.links import DeviceLink
from gdcomm.operations import OPERATIONS, Operation
from gdcomm.paths import Paths
from gdcomm.reductions import name_of
from gdcomm.vectors import UNSIZED, Call, known, message

__all__ = ["NEVER", "Limits", "asks", "chosen", "collective", "limits"]

SMALLEST = 1 << 20  # bytes of the message from which on algorithms are used; smaller ones are faster by MPI


class Limits(NamedTuple):
    """Bytes of the whole message from which on the ranks of a communicator ask each other, by group of operations."""

    move: int
    reduce: int


NEVER = Limits(sys.maxsize, sys.maxsize)


def limits(channel: Channel | None, paths: Paths) -> Limits:
    """The limits of a communicator: the same on all its ranks."""
    if channel is None or channel.size == 1:
        return NEVER
    able = (_has_path(paths, OPERATIONS[name]) for name in ("Bcast", "Allreduce"))
    found = Limits(*(SMALLEST if each else sys.maxsize for each in able))
    return NEVER if found == NEVER else found


def asks(comm: Any, name: str, arguments: Sequence[Any]) -> bool:
    """Whether the ranks ask each other before they do this: all or none, whatever their buffers are."""
    if comm._limits is NEVER:
        return False
    limit = getattr(comm._limits, OPERATIONS[name].group)
    if name in UNSIZED:
        return bool(limit < sys.maxsize)
    return message(name, arguments, comm._channel.size) >= limit


def collective(comm: Any, operation: Operation, arguments: tuple[Any, ...], stream: Any) -> Any:
    """Run a blocking collective: by our own algorithm if all ranks can, else by MPI."""
    if not asks(comm, operation.name, arguments):
        return execute(comm, comm._paths, operation, arguments, stream)
    notes = comm._channel.notes
    host = operation.group == "move" and all(plain(arguments[position]) for position in operation.buffers)
    try:
        # Where this rank answered before, and then raised an error, the others wait in MPI's collective.
        answered = notes.pop("answered", "") == operation.name
        if not answered and _by_algorithm(comm, operation, arguments, stream, host):
            return None
        return _by_mpi(comm, operation, arguments, stream, host)
    except MPI.Exception as error:
        raise explain(error, comm, operation.name, arguments) from None


def _by_algorithm(
    comm: Any, operation: Operation, arguments: tuple[Any, ...], stream: Any, host: bool
) -> bool:
    """Run the collective if all ranks can; tell if it was run."""
    channel: Channel = comm._channel
    call = None if host else Call(operation, arguments, stream, channel.size, comm.Get_rank())
    way = None if call is None else _WAYS[operation.name](call)
    nbytes = _agreed(comm, call, way)
    if call is None or way is None or nbytes < getattr(comm._limits, operation.group):
        return False
    job = _job(comm, channel, call, nbytes)
    try:
        way.work(job)
        call.finish()
    except BufferSpecError:  # raised on all ranks before anything was sent
        raise
    except BaseException:
        channel.notes.pop("express", None)  # messages may be half through its boxes
        raise
    finally:
        job.link.close()
    return True


def _by_mpi(comm: Any, operation: Operation, arguments: tuple[Any, ...], stream: Any, host: bool) -> Any:
    """Run the collective after the answer that not all ranks can."""
    try:
        if host:
            try:
                return operation.call(comm, *arguments)
            except UNSERVED as error:
                unserved(error, comm, operation.name, arguments)
        return execute(comm, comm._paths, operation, arguments, stream)
    except Exception as error:
        if not isinstance(error, MPI.Exception) or error.Get_error_class() in REFUSED:  # nothing was sent
            comm._channel.notes["answered"] = operation.name
        raise


def chosen(comm: Any, operation: Operation, arguments: Sequence[Any], buffers: Sequence[Buffer]) -> str:
    """How a call goes by an algorithm, in words; "" if by MPI's collective.

    Args:
        comm: the communicator.
        operation: what is called.
        arguments: of the method, all of them; a buffer may be None where it is not known.
        buffers: the device arrays among them.
    """
    if operation.name not in _WAYS or not asks(comm, operation.name, arguments):
        return ""
    op = name_of(arguments[operation.op]) if operation.op >= 0 else ""
    if operation.op >= 0 and not all(op and buffer.device.reduces(op, buffer.dtype) for buffer in buffers):
        return ""
    condition = "if all ranks bring device arrays"
    if operation.name in UNSIZED:
        nbytes, least = known(operation, arguments, comm._channel.size), getattr(comm._limits, operation.group)
        if nbytes < least:
            nbytes, condition = least, f"{condition} and one knows of {least} bytes"
    else:
        nbytes = message(operation.name, arguments, comm._channel.size)
    algorithm, _ = _layout(comm, comm._channel).choose(_NAMES[operation.name], nbytes)
    route = comm._paths.transport(OPERATIONS["Isend"])
    return f"by {algorithm} over {route} messages, {condition}"


def _has_path(paths: Paths, operation: Operation) -> bool:
    """Whether device messages carry the collective, and MPI does not move device memory itself."""
    with contextlib.suppress(NoPathError):  # what moves over direct messages is direct, too
        if operation.group == "move" and paths.transport(operation) == "mpi":
            return False
    try:
        return paths.transport(OPERATIONS["Isend"]) == paths.transport(OPERATIONS["Irecv"])
    except NoPathError:  # the error is that of MPI's way
        return False


# -- how ranks lie, and what runs ----------------------------------------------------------------

_WHOLE = ("allreduce", "bcast", "reduce")  # operations on whole vectors: nothing lies in order of ranks


class _Layout(NamedTuple):
    """How a communicator's ranks lie on nodes.

    Args:
        sizes: ranks of each node.
        node: this rank's.
        first: where the ranks of this node begin, in order of nodes.
        order: the ranks in order of nodes; None if they are in that order.
        model: what messages cost here.
    """

    sizes: tuple[int, ...]
    node: int
    first: int
    order: tuple[int, ...] | None
    model: Model

    @property
    def even(self) -> bool:
        """Whether all nodes have as many ranks."""
        return len(set(self.sizes)) == 1

    def of(self, operation: str) -> _Layout:
        """The layout as an operation can use it: blocks that do not lie node by node are those of one node."""
        if self.order is None or operation in _WHOLE:
            return self
        return self._replace(sizes=(sum(self.sizes),), node=0, first=0, order=None)

    def choose(self, operation: str, nbytes: int) -> tuple[str, int]:
        """The algorithm of an operation on so many bytes, and its sections."""
        layout = self.of(operation)
        return choose(operation, nbytes, layout.sizes, True, layout.order is None, layout.model)


def _layout(comm: MPI.Intracomm, channel: Channel) -> _Layout:
    known: _Layout | None = channel.notes.get("layout")
    if known is None:
        rank, nodes = comm.Get_rank(), [channel.shadow.nodes[channel.peer(r)] for r in range(comm.Get_size())]
        found = list(dict.fromkeys(nodes))  # in order of their first ranks
        order = sorted(range(len(nodes)), key=lambda r: found.index(nodes[r]))
        sizes = tuple(nodes.count(node) for node in found)
        node = found.index(nodes[rank])
        in_order = order == list(range(len(nodes)))
        model = Model(ports=channel.shadow.ports)
        known = _Layout(sizes, node, sum(sizes[:node]), None if in_order else tuple(order), model)
        channel.notes["layout"] = known
    return known


class _Job(NamedTuple):
    """Runs one operation's algorithm over a link.

    Args:
        operation: a key of `ALGORITHMS`.
        nbytes: of the message.
        link: joins the ranks.
        layout: of the ranks on nodes.
        comm: the communicator.
    """

    operation: str
    nbytes: int
    link: DeviceLink
    layout: _Layout
    comm: MPI.Intracomm

    def run(self, *arguments: Any) -> None:
        """Choose an algorithm and run it."""
        operation = self.operation
        link: Link = self.link
        sizes, node, first, order, _ = layout = self.layout.of(operation)
        name, sections = layout.choose(operation, self.nbytes)
        if name in ALGORITHMS[operation]:
            finish(ALGORITHMS[operation][name].run(link, *arguments))
            return
        if order is not None:
            link, arguments = Sublink(link, order), (arguments[0], *map(order.index, arguments[1:]))  # the root, if any
        inner = Sublink(link, range(first, first + sizes[node]))
        places = range(link.rank - first, link.size, sizes[node]) if layout.even else _leaders(sizes)
        outer = Sublink(link, places) if link.rank in places else None
        more = (sizes, node) if name == "leaders" and operation != "allreduce" else ()
        finish(NODE_ALGORITHMS[operation][name].run(inner, outer, *arguments, *more, sections))


def _leaders(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:i]) for i in range(len(sizes))]


def _job(comm: Any, channel: Channel, call: Call, nbytes: int) -> _Job:
    """What runs a call's algorithm; collective."""
    tag = channel.notes.get("tag")
    if tag is None:
        tag = channel.notes["tag"] = _agree_tag(comm, channel)
    express = None
    if comm._paths.transport(OPERATIONS["Isend"]) == "staged" and call.device is not None:
        express = channel.notes.get("express")  # other wrappers of the communicator may have made it
        if express is None:
            express = channel.notes["express"] = Express(comm, channel, call.device)
    link = DeviceLink(channel, comm._paths, tag, range(call.ranks), call.rank, call.op, express)
    return _Job(_NAMES[call.operation.name], nbytes, link, _layout(comm, channel), comm)


def _agree_tag(comm: MPI.Intracomm, channel: Channel) -> int:
    """The first of `LANES` tags that no other communicator has in which two of these ranks meet.

    Also if threads agree on several at once.
    """
    shadow = channel.shadow
    while True:
        tag = _over_all(comm, shadow.tags_taken + 1, MPI.MAX)
        with shadow.lock:
            free = tag > shadow.tags_taken
            shadow.tags_taken = max(tag, shadow.tags_taken)
        if _over_all(comm, free, MPI.MIN):
            return tag % (shadow.last_tag // LANES) * LANES


def _over_all(comm: MPI.Intracomm, number: int, op: MPI.Op) -> int:
    answer = np.zeros(1, np.int64)
    MPI.Intracomm.Allreduce(comm, np.array([number], np.int64), answer, op)
    return int(answer[0])


# -- operations ----------------------------------------------------------------------------------


class _Way(NamedTuple):
    """How a rank takes part in an algorithm.

    Args:
        nbytes: of the message; of an operation in `UNSIZED`, as many as this rank knows of.
        work: what it does.
        counts: those that must be the same on all ranks, if any; None: each rank knows its own.
    """

    nbytes: int
    work: Callable[[_Job], None]
    counts: Sequence[int] | None = ()


def _agreed(comm: Any, call: Call | None, way: _Way | None) -> int:
    """Bytes of the message if all ranks take part, and in the same thing; else 0."""
    notes = comm._channel.notes
    if "asked" not in notes:
        notes["asked"] = tuple(np.zeros((2, 4), np.int64))
    mine, answer = notes["asked"]
    mine[:] = 0  # whether this rank takes part; a digest of what, twice; bytes
    if call is not None and way is not None:
        size = 0 if call.operation.name in UNSIZED else way.nbytes
        counts = None if way.counts is None else tuple(way.counts)
        digest = _digest(call.operation.name, call.dtype, call.op, call.root, size, counts)
        mine[:] = 1, digest, -digest, -way.nbytes
    MPI.Intracomm.Allreduce(comm, mine, answer, MPI.MIN)
    all_take_part, least, most, nbytes = answer.tolist()
    return -nbytes if all_take_part and least == -most else 0


@functools.lru_cache(4096)
def _digest(*what: Any) -> int:
    """A number that is the same on ranks that mean the same."""
    return zlib.crc32(repr([str(part) for part in what]).encode())


def _vectors(call: Call) -> _Way | None:
    """Allreduce, Reduce, Scan and Exscan: one vector, reduced where the result is to be."""
    send, recv = (None if found is None else found.vector for found in call.pair() or (None, None))
    vector = send if recv is None else recv
    if vector is None or not call.reducible(vector) or (send is not None and len(send) != len(vector)):
        return None
    if call.operation.name == "Exscan" and call.rank == 0 and send is not None:
        recv, send = send, None  # it is only read, and nothing is written

    def work(job: _Job) -> None:
        into = job.link.scratch(len(vector), vector) if recv is None else recv
        if send is not None:
            job.link.copy(into, send)
        job.run(into, *([] if call.root is None else [call.root]))

    return _Way(vector.nbytes, work)


def _reduce_scatter(call: Call) -> _Way | None:
    """Reduce_scatter, Reduce_scatter_block."""
    send, recv = call.pair() or (None, None)
    whole = recv if send is None else send
    if whole is None or recv is None or not call.reducible(whole.vector):
        return None
    vector, result = whole.vector, recv.vector
    by_block = call.operation.name == "Reduce_scatter_block"
    inferred = not by_block and call.arguments[2] is None and send is not None
    counts = whole.counts if by_block else call.receive_counts()
    if counts is None and not inferred:
        return None
    if counts is not None and (sum(counts) != len(vector) or (send is not None and len(result) != counts[call.rank])):
        return None

    def work(job: _Job) -> None:
        each = counts if counts is not None else MPI.Intracomm.allgather(job.comm, len(result))
        if sum(each) != len(vector):  # on every rank
            raise BufferSpecError(
                f"Reduce_scatter: sendbuf has {len(vector)} elements, and the ranks' recvbufs have {sum(each)} in all"
            )
        mine = job.link.scratch(len(vector), vector)
        job.link.copy(mine, vector)
        job.run(mine, each)
        block = blocks(mine, each)[call.rank]
        job.link.copy(result[: len(block)], block)

    return _Way(vector.nbytes, work, counts)


def _bcast(call: Call) -> _Way | None:
    vector = call.both()
    return None if vector is None else _Way(vector.nbytes, lambda job: job.run(vector, call.root))


def _allgather(call: Call) -> _Way | None:
    """Allgather, Allgatherv."""
    send, recv = call.pair() or (None, None)
    if recv is None or (send is not None and len(send.vector) != recv.counts[call.rank]):
        return None
    vector, counts, displs = recv

    def work(job: _Job) -> None:
        if send is not None:
            job.link.copy(recv.of(call.rank), send.vector)
        packed = allgather.packed(job.link, vector, counts, displs)
        job.run(packed, counts)
        allgather.unpack(job.link, packed, vector, counts, displs)

    return _Way(recv.nbytes, work, counts)


def _alltoall(call: Call) -> _Way | None:
    """Alltoall, Alltoallv."""
    send, recv = call.pair() or (None, None)
    if send is None or recv is None or send.counts[call.rank] != recv.counts[call.rank]:
        return None
    arguments = send.vector, recv.vector, send.counts, recv.counts, send.displs, recv.displs

    def work(job: _Job) -> None:
        if call.operation.name in UNSIZED:
            _compare(job.comm, call, send.counts, recv.counts)
        job.run(*arguments)

    return _Way(max(send.nbytes, recv.nbytes), work)


def _rooted(call: Call) -> _Way | None:
    """Gather, Gatherv, Scatter, Scatterv: a block of each rank, all of them on the root."""
    send, recv = call.pair() or (None, None)
    gathers = call.operation.root_side == "recv"
    mine, whole = (send, recv) if gathers else (recv, send)
    known = whole or mine
    if known is None or (mine and whole and len(mine.vector) != whole.counts[call.rank]):
        return None
    counts, displs = (whole.counts, whole.displs) if whole else (known.counts * call.ranks, None)
    ends = [None if found is None else found.vector for found in (send, recv)]
    unsized = call.operation.name in UNSIZED
    nbytes = known.nbytes if whole or unsized else known.nbytes * call.ranks

    def work(job: _Job) -> None:
        if unsized:
            with_root = [counts[call.rank] if rank == call.root else 0 for rank in range(call.ranks)]
            with_all = counts if whole else [0] * call.ranks
            _compare(job.comm, call, *((with_root, with_all) if gathers else (with_all, with_root)))
        job.run(*ends, counts, displs, call.root)

    return _Way(nbytes, work)


def _compare(comm: MPI.Intracomm, call: Call, sent: Sequence[int], expected: Sequence[int]) -> None:
    """Raise, on all ranks, unless every rank sends to every other one what that one expects.

    Args:
        comm: the communicator.
        call: of which a rank knows its own counts only.
        sent, expected: elements that this rank sends to each rank, and expects from each.
    """
    coming = np.empty(call.ranks, np.int64)
    MPI.Intracomm.Alltoall(comm, np.array(sent, np.int64), coming)
    wrong = [(rank, *pair) for rank, *pair in zip(range(call.ranks), coming.tolist(), expected, strict=True)
             if pair[0] != pair[1]]  # fmt: skip
    if not _over_all(comm, len(wrong), MPI.MAX):
        return
    which = "counts of other ranks do not match"
    if wrong:
        source, comes, wanted = wrong[0]
        which = f"rank {source} sends {comes} elements to rank {call.rank}, which expects {wanted}"
    raise BufferSpecError(f"{call.operation.name}: {which}; give both the same count")


_WAYS: dict[str, Callable[[Call], _Way | None]] = {
    "Allreduce": _vectors,
    "Reduce": _vectors,
    "Scan": _vectors,
    "Exscan": _vectors,
    "Reduce_scatter": _reduce_scatter,
    "Reduce_scatter_block": _reduce_scatter,
    "Bcast": _bcast,
    "Allgather": _allgather,
    "Allgatherv": _allgather,
    "Alltoall": _alltoall,
    "Alltoallv": _alltoall,
    "Gather": _rooted,
    "Gatherv": _rooted,
    "Scatter": _rooted,
    "Scatterv": _rooted,
}
_NAMES = {name: name.lower() for name in _WAYS} | {"Allgatherv": "allgather", "Reduce_scatter_block": "reduce_scatter"}
