"""Matched probes, whose message handle receives into device arrays too; partitioned communication."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from mpi4py import MPI

from gdcomm import devices
from gdcomm.arguments import UNSERVED, unserved
from gdcomm.early import Early, deliver, find, irecv, kept, plain_only, pop
from gdcomm.envelopes import ENVELOPE, Channel
from gdcomm.execution import execute, plain
from gdcomm.operations import BLOCKING, REQUEST, operation
from gdcomm.partitioned import PartitionedRequest, Partitions
from gdcomm.paths import Paths
from gdcomm.requests import completed
from gdcomm.transports.base import split_spec

if TYPE_CHECKING:
    _Comm = MPI.Comm
else:  # a mixin: the communicator class brings the MPI base
    _Comm = object

__all__ = ["Matching", "Message"]

_Probe, _Iprobe = MPI.Comm.Probe, MPI.Comm.Iprobe

_RECV = operation("Message.Recv", MPI.Message.Recv, "p2p", BLOCKING, recv=0, status=1, partial=True, counted=True)
_IRECV = operation("Message.Irecv", MPI.Message.Irecv, "p2p", REQUEST, recv=0, partial=True, counted=True)


class Message(MPI.Message):
    """A message that Mprobe or Improbe took out of the queue."""

    _paths: Paths = Paths()
    _channel: Channel | None = None
    _early: Early | None = None  # the message itself, where the probe had to receive it

    def __bool__(self) -> bool:
        return self._early is not None or super().__bool__()

    def __eq__(self, other: object) -> bool:
        return self is other if self._early is not None else super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]  # as mpi4py's

    def _take(self) -> Early | None:
        early, self._early = self._early, None
        return early

    def recv(self, status: MPI.Status | None = None) -> Any:
        """Receive the object that the message holds."""
        early = self._take()
        return super().recv(status) if early is None else early.load(status)

    def irecv(self) -> MPI.Request:
        """Nonblocking recv."""
        early = self._take()
        return super().irecv() if early is None else irecv(early, bytearray(early.nbytes))

    def Recv(self, buf: Any, status: MPI.Status | None = None, *, stream: Any = None) -> None:
        """Receive the message."""
        early = self._take()
        if early is not None:
            return deliver(early, buf, status, stream)
        if plain(buf) and (self._channel is None or plain_only(self._channel, buf)):
            try:
                return super().Recv(buf, status)
            except UNSERVED as error:
                unserved(error, self, "Message.Recv", (buf, status))
        execute(self, self._paths, _RECV, (buf, status), stream)

    def Irecv(self, buf: Any, *, stream: Any = None) -> MPI.Request:
        """Nonblocking Recv."""
        early = self._take()
        if early is not None:
            deliver(early, buf, None, stream, complete=True)
            return completed(early.report)
        if plain(buf) and (self._channel is None or plain_only(self._channel, buf)):
            try:
                return super().Irecv(buf)
            except UNSERVED as error:
                unserved(error, self, "Message.Irecv", (buf,))
        return execute(self, self._paths, _IRECV, (buf,), stream)  # type: ignore[no-any-return]


class Matching(_Comm):
    """Matched probes, and partitioned communication, of a communicator."""

    _paths: Paths
    _channel: Channel | None = None

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

    def Probe(
        self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None
    ) -> Literal[True]:
        """Wait for a message."""
        self._look(_Probe, source, tag, status)
        return True

    def Iprobe(
        self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None
    ) -> bool:
        """Tell whether there is a message."""
        return self._look(_Iprobe, source, tag, status)

    def _look(self, probe: Callable[..., bool], source: int, tag: int, status: MPI.Status | None) -> bool:
        channel = self._channel
        if channel is None:
            return probe(self, source, tag, status)
        status = MPI.Status() if status is None else status
        while True:
            early = find(channel, source, tag)
            if early is not None:
                early.report(status)
                return True
            if not probe(self, source, tag, status):
                return False
            if not kept(self, channel, status):
                return True

    def Mprobe(
        self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None
    ) -> Message:
        """Wait for a message and take it out of the queue."""
        found = self._match(super().Mprobe, source, tag, status)
        assert found is not None
        return self._message(found)

    def Improbe(
        self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None
    ) -> Message | None:
        """Take a message out of the queue if there is one."""
        found = self._match(super().Improbe, source, tag, status)
        return None if found is None else self._message(found)

    def _message(self, found: MPI.Message) -> Message:
        if not isinstance(found, Message):
            found = Message(found)
            found._channel = self._channel
        found._paths = self._paths
        return found

    def _match(
        self, probe: Callable[..., MPI.Message | None], source: int, tag: int, status: MPI.Status | None
    ) -> MPI.Message | None:
        """What mpi4py's matched probe returns, or the message itself where it may be an envelope."""
        channel = self._channel
        early = pop(channel, source, tag)
        if early is None:
            status = MPI.Status() if status is None and channel is not None else status
            found = probe(source, tag, status)
            if found is None or channel is None or status is None or status.Get_elements(MPI.BYTE) != ENVELOPE:
                return found
            early = Early(channel, found, status)
        message = Message()
        message._early = early
        early.report(status)
        return message

    probe, iprobe = Probe, Iprobe

    def mprobe(  # type: ignore[override]
        self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None
    ) -> MPI.Message:
        """Wait for an object and take it out of the queue."""
        message = self._match(super().mprobe, source, tag, status)
        assert message is not None
        return message

    def improbe(  # type: ignore[override]
        self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None
    ) -> MPI.Message | None:
        """Take an object out of the queue if there is one."""
        return self._match(super().improbe, source, tag, status)


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
