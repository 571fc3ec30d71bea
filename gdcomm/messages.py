"""Matched probes, whose message handle receives into device arrays too; partitioned communication."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from gdcomm import devices
from gdcomm.arguments import UNSERVED, unserved
from gdcomm.execution import execute, plain
from gdcomm.operations import BLOCKING, REQUEST, operation
from gdcomm.partitioned import PartitionedRequest, Partitions
from gdcomm.paths import Paths
from gdcomm.transports.base import split_spec

if TYPE_CHECKING:
    _Comm = MPI.Comm
else:  # a mixin: the communicator class brings the MPI base
    _Comm = object

__all__ = ["Matching", "Message"]

_RECV = operation("Message.Recv", MPI.Message.Recv, "p2p", BLOCKING, recv=0, status=1, partial=True, counted=True)
_IRECV = operation("Message.Irecv", MPI.Message.Irecv, "p2p", REQUEST, recv=0, partial=True, counted=True)


class Message(MPI.Message):
    """A message that Mprobe or Improbe took out of the queue."""

    _paths: Paths = Paths()

    def Recv(self, buf: Any, status: MPI.Status | None = None, *, stream: Any = None) -> None:
        """Receive the message."""
        if plain(buf):
            try:
                return super().Recv(buf, status)
            except UNSERVED as error:
                unserved(error, self, "Message.Recv", (buf, status))
        execute(self, self._paths, _RECV, (buf, status), stream)

    def Irecv(self, buf: Any, *, stream: Any = None) -> MPI.Request:
        """Nonblocking Recv."""
        if plain(buf):
            try:
                return super().Irecv(buf)
            except UNSERVED as error:
                unserved(error, self, "Message.Irecv", (buf,))
        return execute(self, self._paths, _IRECV, (buf,), stream)  # type: ignore[no-any-return]


class Matching(_Comm):
    """Matched probes, and partitioned communication, of a communicator."""

    _paths: Paths

    def Psend_init(
        self,
        buf: Any,
        partitions: int,
        dest: int,
        tag: int = 0,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        stream: Any = None,
    ) -> MPI.Prequest:
        """Persistent send whose partitions are marked one by one as ready; device arrays are staged."""
        return _partitioned(super().Psend_init, False, stream, buf, partitions, dest, tag, info)

    def Precv_init(
        self,
        buf: Any,
        partitions: int,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        stream: Any = None,
    ) -> MPI.Prequest:
        """Persistent receive whose partitions can be asked for one by one; device arrays are staged."""
        return _partitioned(super().Precv_init, True, stream, buf, partitions, source, tag, info)

    def _message(self, found: MPI.Message) -> Message:
        message = Message(found)
        message._paths = self._paths
        return message

    def Mprobe(
        self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None
    ) -> Message:
        """Wait for a message and take it out of the queue."""
        return self._message(super().Mprobe(source, tag, status))

    def Improbe(
        self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None
    ) -> Message | None:
        """Take a message out of the queue if there is one."""
        found = super().Improbe(source, tag, status)
        return None if found is None else self._message(found)


def _partitioned(
    call: Callable[..., MPI.Prequest], receives: bool, stream: Any, buf: Any, partitions: int, *rest: Any
) -> MPI.Prequest:
    """mpi4py's method on a host buffer, or on the mirror of a device array."""
    array, _ = split_spec(buf)
    buffer = None if plain(array) else devices.find(array, stream)
    if buffer is None:
        return call(buf, partitions, *rest)
    work = Partitions(call.__name__, buf, buffer, partitions, receives)
    try:
        return PartitionedRequest._make(call(work.spec, partitions, *rest), work)
    except BaseException:
        work.close()
        raise
