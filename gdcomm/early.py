"""Messages that a probe had to take out of MPI's queue to see how long they are: receives look here first.

A message of an envelope's length may be one. Only its end tells, so a probe that meets such a message receives it
and keeps it here, in order. Whoever receives it then is served as by MPI, from memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from gdcomm import devices
from gdcomm.arguments import explain
from gdcomm.envelopes import ENVELOPE, Channel, Header, Incoming, too_long
from gdcomm.execution import execute
from gdcomm.operations import OPERATIONS, REQUEST
from gdcomm.paths import Paths
from gdcomm.requests import completed
from gdcomm.targets import Arrival, FlatTarget, to_ourselves
from gdcomm.transports.base import split_spec

__all__ = ["Early", "deliver", "find", "irecv", "kept", "plain_only", "pop", "receive"]

class Early:
    """A message in memory, or an envelope whose rest waits at its sender."""

    def __init__(self, channel: Channel, found: MPI.Message, status: MPI.Status) -> None:
        self.source, self.tag = status.source, status.tag
        self._data = np.empty(status.Get_elements(MPI.BYTE), np.uint8)
        found.Recv([self._data, MPI.BYTE])
        self._shadow = channel.shadow
        self._header: Header | None = None
        if self._data.nbytes == ENVELOPE:
            self._header = self._shadow.read(FlatTarget(self._data).end_of_envelope())

    @property
    def nbytes(self) -> int:
        """Bytes of the whole message."""
        return self._data.nbytes if self._header is None else self._header.total

    def data(self) -> np.ndarray[Any, Any]:
        """The whole message; waits until it is here."""
        if self._header is not None:
            whole = np.empty(self._header.total, np.uint8)
            whole[: self._header.first] = self._data[: self._header.first]
            Incoming(self._shadow, self._header, FlatTarget(whole)).receive(None)
            self._data, self._header = whole, None
        return self._data

    def report(self, status: MPI.Status | None) -> None:
        """Fill in a status as a probe or a receive of this message does."""
        if status is not None:
            status.source, status.tag, status.error = self.source, self.tag, MPI.SUCCESS
            status.Set_elements(MPI.BYTE, self.nbytes)
            status.Set_cancelled(False)

    def load(self, status: MPI.Status | None = None) -> Any:
        """The Python object that the message holds."""
        data = self.data()
        self.report(status)
        return MPI.pickle.loads(data)


def _matches(item: Early, source: int, tag: int) -> bool:
    return source in (item.source, MPI.ANY_SOURCE) and tag in (item.tag, MPI.ANY_TAG)


def find(channel: Channel, source: int, tag: int) -> Early | None:
    """The first kept message that matches."""
    return next((item for item in list(channel.early) if _matches(item, source, tag)), None)


def pop(channel: Channel | None, source: int, tag: int) -> Early | None:
    """The first kept message that matches, taken out."""
    if channel is None or not channel.early:
        return None
    item = find(channel, source, tag)
    if item is not None:
        try:
            channel.early.remove(item)
        except ValueError:  # another thread was faster
            return pop(channel, source, tag)
    return item


def kept(comm: MPI.Comm, channel: Channel, status: MPI.Status) -> bool:
    """Keep the message that a probe reports if it may be an envelope; tell whether to probe again."""
    if status.Get_elements(MPI.BYTE) != ENVELOPE:
        return False
    own = MPI.Status()
    found = MPI.Comm.Improbe(comm, status.source, status.tag, own)
    if found is not None:  # else another thread received it
        channel.early.append(Early(channel, found, own))
    return True


def plain_only(channel: Channel, recvbuf: Any) -> bool:
    """Whether MPI alone can serve a receive into `recvbuf`: no message is kept, none can come in an envelope."""
    return type(recvbuf) is np.ndarray and recvbuf.nbytes < ENVELOPE and not channel.early


def receive(comm: Any, name: str, arguments: tuple[Any, ...], stream: Any) -> Any:
    """Run a receiving method: from a kept message, if one matches, else from MPI."""
    operation = OPERATIONS[name]
    replaces = operation.both >= 0
    place = operation.both if replaces else operation.recv
    source = place + (3 if replaces else 1)  # before the tag
    item = pop(comm._channel, arguments[source], arguments[source + 1])
    if item is None:
        buf = arguments[0]
        if name == "Recv" and type(buf) is np.ndarray and buf.flags.c_contiguous and 0 < buf.dtype.num < 17:
            return _receive_host(comm, arguments)
        return execute(comm, comm._paths, operation, arguments, stream)
    sent = None
    if replaces or operation.send >= 0:
        sent = comm.Isend(*arguments[:3], stream=stream)
        if replaces:
            sent.Wait()
    requested = operation.form == REQUEST
    status = arguments[operation.status] if operation.status >= 0 else None
    deliver(item, arguments[place], status, stream, requested)
    if requested:
        return completed(item.report) if sent is None else sent
    if sent is not None:
        sent.Wait()


def _receive_host(comm: Any, arguments: tuple[Any, ...]) -> None:
    """A blocking receive into an array of numbers as MPI knows them: little more than MPI's own."""
    buf, source, tag, status = arguments
    status = MPI.Status() if status is None else status
    try:
        MPI.Comm.Recv(comm, buf, source, tag, status)
    except MPI.Exception as error:
        raise explain(error, comm, "Recv", arguments) from None
    if status.Get_elements(MPI.BYTE) == ENVELOPE:
        Arrival(comm._channel, FlatTarget(buf.reshape(-1).view(np.uint8)), True).complete(status)


def deliver(item: Early, recvbuf: Any, status: MPI.Status | None, stream: Any, complete: bool = False) -> None:
    """Receive a kept message into any buffer: it is sent to ourselves.

    Args:
        item: the message.
        recvbuf: buffer argument.
        status: to be filled in.
        stream: the user's stream or None.
        complete: the data must be in place for every stream, as for a request.
    """
    data = item.data()
    array, rest = split_spec(recvbuf)
    capacity = None if rest or array is None else getattr(devices.find(array, stream) or array, "nbytes", None)
    if capacity is not None and capacity < len(data):  # Open MPI may crash when it truncates what it sends to itself
        raise too_long(len(data))
    with to_ourselves() as own:
        sent = own.Isend([data, MPI.BYTE], 0, 0)
        try:
            if complete:
                execute(own, Paths(), OPERATIONS["Irecv"], (recvbuf, 0, 0), stream).Wait(status)
            else:
                execute(own, Paths(), OPERATIONS["Recv"], (recvbuf, 0, 0, status), stream)
        finally:
            sent.Wait()
    if status is not None:
        status.source, status.tag = item.source, item.tag


def irecv(item: Early, buf: Any) -> MPI.Request:
    """mpi4py's request, whose `wait` returns the object that the message holds."""
    data = item.data()
    with to_ourselves() as own:
        request = own.irecv(buf, 0, 0)
        own.Send([data, MPI.BYTE], 0, 0)
    return request
