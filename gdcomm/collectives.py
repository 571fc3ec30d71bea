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
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from gdcomm.algorithms.choose import ALGORITHMS, NODE_ALGORITHMS, Model, choose
from gdcomm.algorithms.link import LANES, Link, Sublink
from gdcomm.algorithms.steps import Steps, finish
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
from gdcomm.ways import BLOCKING_FORMS, NAMES, WAYS, Way, answer, question

__all__ = ["NEVER", "Job", "Limits", "asks", "chosen", "collective", "job", "limits"]

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
    way = None if call is None else WAYS[operation.name](call)
    nbytes = _agreed(comm, call, way)
    if call is None or way is None or nbytes < getattr(comm._limits, operation.group):
        return False
    found = _job(comm, channel, call, nbytes)
    try:
        finish(way.work(found))
        found.link.settle()
        call.finish()
    except BufferSpecError:  # raised on all ranks before anything was sent
        raise
    except BaseException:
        channel.notes.pop("express", None)  # messages may be half through its boxes
        raise
    finally:
        found.link.close()
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
    name = BLOCKING_FORMS.get(operation.name, operation.name)
    if name not in WAYS or not asks(comm, name, arguments):
        return ""
    op = name_of(arguments[operation.op]) if operation.op >= 0 else ""
    if operation.op >= 0 and not all(op and buffer.device.reduces(op, buffer.dtype) for buffer in buffers):
        return ""
    condition = "if all ranks bring device arrays"
    if name in UNSIZED:
        nbytes, least = known(OPERATIONS[name], arguments, comm._channel.size), getattr(comm._limits, operation.group)
        if nbytes < least:
            nbytes, condition = least, f"{condition} and one knows of {least} bytes"
    else:
        nbytes = message(name, arguments, comm._channel.size)
    algorithm, _ = _layout(comm, comm._channel).choose(NAMES[name], nbytes)
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


class Job(NamedTuple):
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

    def run(self, *arguments: Any) -> Steps:
        """The steps of the algorithm that is chosen."""
        operation = self.operation
        link: Link = self.link
        sizes, node, first, order, _ = layout = self.layout.of(operation)
        name, sections = layout.choose(operation, self.nbytes)
        if name in ALGORITHMS[operation]:
            return ALGORITHMS[operation][name].run(link, *arguments)
        if order is not None:
            link, arguments = Sublink(link, order), (arguments[0], *map(order.index, arguments[1:]))  # the root, if any
        inner = Sublink(link, range(first, first + sizes[node]))
        places = range(link.rank - first, link.size, sizes[node]) if layout.even else _leaders(sizes)
        outer = Sublink(link, places) if link.rank in places else None
        more = (sizes, node) if name == "leaders" and operation != "allreduce" else ()
        return NODE_ALGORITHMS[operation][name].run(inner, outer, *arguments, *more, sections)


def _leaders(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:i]) for i in range(len(sizes))]


def _job(comm: Any, channel: Channel, call: Call, nbytes: int) -> Job:
    """What runs a call's algorithm; collective."""
    tag = channel.notes.get("tag")
    if tag is None:
        tag = channel.notes["tag"] = _agree_tag(comm, channel)
    express = None
    if comm._paths.transport(OPERATIONS["Isend"]) == "staged" and call.device is not None:
        express = channel.notes.get("express")  # other wrappers of the communicator may have made it
        if express is None:
            express = channel.notes["express"] = Express(channel, call.device)
            express.hear(MPI.Intracomm.alltoall(comm, express.told))
    link = DeviceLink(channel, comm._paths, tag, call.rank, call.op, express)
    return job(comm, channel, call, nbytes, link)


def job(comm: MPI.Intracomm, channel: Channel, call: Call, nbytes: int, link: DeviceLink) -> Job:
    """What runs a call's algorithm over a link; local."""
    return Job(NAMES[call.operation.name], nbytes, link, _layout(comm, channel), comm)


def _agreed(comm: Any, call: Call | None, way: Way | None) -> int:
    """Bytes of the message if all ranks take part, and in the same thing; else 0."""
    notes = comm._channel.notes
    if "asked" not in notes:
        notes["asked"] = tuple(np.zeros((2, 4), np.int64))
    mine, least = notes["asked"]
    mine[:] = question(call, way)
    MPI.Intracomm.Allreduce(comm, mine, least, MPI.MIN)
    return answer(*least.tolist())


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
