"""The lower-case methods: Python objects, whose device arrays are moved by the rules of the upper-case methods.

Only what sends is here: a `Packed` restores itself where it arrives. reduce, allreduce, scan and exscan are
mpi4py's: it pickles the operands and the partial results itself, inside the operation, where nobody can pack
them; there the arrays go by their library's own pickling, which is right, but copies more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from gdcomm.early import irecv, pop
from gdcomm.envelopes import Channel
from gdcomm.objects import Packed, pack, queue

if TYPE_CHECKING:
    _Comm = MPI.Comm
    _Topocomm = MPI.Topocomm
else:  # mixins: the communicator class brings the MPI base
    _Comm = _Topocomm = object

__all__ = ["NeighborObjects", "Objects"]


def _pass(method: Callable[..., Any], comm: Any, obj: Any, *rest: Any) -> Any:
    """Call a method of mpi4py with the packed object. It pickles at the call, in nonblocking methods too."""
    packed = pack(obj)
    try:
        return method(comm, packed, *rest)
    finally:
        if packed is not obj:
            packed.release()


def _send(method: Callable[..., Any], comm: Any, obj: Any, dest: int, *rest: Any) -> Any:
    """As `_pass`, to one rank; an object for nobody is not copied."""
    return _pass(method, comm, None if dest == MPI.PROC_NULL else obj, dest, *rest)


def _pass_each(method: Callable[..., Any], comm: Any, objects: Any, *rest: Any) -> Any:
    """As `_pass`, for methods that pickle each item of a sequence by itself."""
    if objects is None:
        return method(comm, None, *rest)
    items: list[Any] = []
    try:
        for obj in objects:  # all copies are queued before the first is waited for
            items.append(queue(obj))
        for item in items:
            if type(item) is Packed:
                item.ready()
        return method(comm, items, *rest)
    finally:
        for item in items:
            if type(item) is Packed:
                item.release()


def _is_root(comm: MPI.Comm, root: int) -> bool:
    """Whether this rank's object is the one that a rooted operation sends: mpi4py ignores the others'."""
    return root == (MPI.ROOT if comm.Is_inter() else comm.Get_rank())


class Objects(_Comm):
    """Methods that move Python objects; device arrays in them are copied once, in order of their streams."""

    _channel: Channel | None = None

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object."""
        _send(MPI.Comm.send, self, obj, dest, tag)

    def bsend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object in buffered mode."""
        _send(MPI.Comm.bsend, self, obj, dest, tag)

    def ssend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object in synchronous mode."""
        _send(MPI.Comm.ssend, self, obj, dest, tag)

    def isend(self, obj: Any, dest: int, tag: int = 0) -> MPI.Request:
        """Nonblocking send of an object; what it is at the call is sent."""
        return _send(MPI.Comm.isend, self, obj, dest, tag)

    def ibsend(self, obj: Any, dest: int, tag: int = 0) -> MPI.Request:
        """Nonblocking send in buffered mode."""
        return _send(MPI.Comm.ibsend, self, obj, dest, tag)

    def issend(self, obj: Any, dest: int, tag: int = 0) -> MPI.Request:
        """Nonblocking send in synchronous mode."""
        return _send(MPI.Comm.issend, self, obj, dest, tag)

    def recv(
        self,
        buf: Any = None,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> Any:
        """Receive an object."""
        early = pop(self._channel, source, tag)
        return MPI.Comm.recv(self, buf, source, tag, status) if early is None else early.load(status)

    def irecv(self, buf: Any = None, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG) -> MPI.Request:
        """Nonblocking receive of an object."""
        early = pop(self._channel, source, tag)
        return MPI.Comm.irecv(self, buf, source, tag) if early is None else irecv(early, buf)

    def sendrecv(
        self,
        sendobj: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> Any:
        """Send an object and receive one."""
        early = pop(self._channel, source, recvtag)
        if early is not None:
            request = self.isend(sendobj, dest, sendtag)
            received = early.load(status)
            request.Wait()
            return received
        return _send(MPI.Comm.sendrecv, self, sendobj, dest, sendtag, recvbuf, source, recvtag, status)

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Broadcast the root's object."""
        return _pass(MPI.Comm.bcast, self, obj if _is_root(self, root) else None, root)

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """Gather objects at the root."""
        sends = root not in (MPI.ROOT, MPI.PROC_NULL)
        return _pass(MPI.Comm.gather, self, sendobj if sends else None, root)

    def scatter(self, sendobj: Sequence[Any] | None, root: int = 0) -> Any:
        """Scatter the items of the root's sequence."""
        return _pass_each(MPI.Comm.scatter, self, sendobj if _is_root(self, root) else None, root)

    def allgather(self, sendobj: Any) -> list[Any]:
        """Gather objects everywhere."""
        return _pass(MPI.Comm.allgather, self, sendobj)

    def alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        """Send one item to each rank."""
        return _pass_each(MPI.Comm.alltoall, self, sendobj)


class NeighborObjects(_Topocomm):
    """The same with the neighbours of a topology."""

    def neighbor_allgather(self, sendobj: Any) -> list[Any]:
        """Gather the neighbours' objects."""
        return _pass(MPI.Topocomm.neighbor_allgather, self, sendobj)

    def neighbor_alltoall(self, sendobj: list[Any]) -> list[Any]:
        """Send one item to each neighbour."""
        return _pass_each(MPI.Topocomm.neighbor_alltoall, self, sendobj)
