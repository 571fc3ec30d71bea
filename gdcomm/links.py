"""Device arrays as the vectors of `gdcomm.algorithms`, and their link: messages from GPU to GPU, kernels of the GPU."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from mpi4py import MPI

from gdcomm.algorithms.link import Link
from gdcomm.algorithms.steps import Flight
from gdcomm.devices.base import Buffer, Device
from gdcomm.envelopes import Channel
from gdcomm.execution import execute
from gdcomm.express import Express
from gdcomm.memory.pinned import pool_of
from gdcomm.operations import OPERATIONS
from gdcomm.paths import Paths
from gdcomm.requests import Request, progress
from gdcomm.transfer.copy import keep

__all__ = ["DeviceLink", "DeviceVector", "Hidden"]

_LONG = 256 << 10  # bytes from which on a copy takes longer than its call
_FEWEST = 8  # copies whose calls take as long as that of a kernel with its table


class DeviceVector:
    """Contiguous elements in device memory.

    Args:
        array: a contiguous array.
        ptr: address of the first element in it; None: its own.
        count: elements from there on.
    """

    __slots__ = ("array", "count", "dtype", "ptr")

    def __init__(self, array: Buffer, ptr: int | None = None, count: int = 0) -> None:
        self.array, self.dtype = array, array.dtype
        if ptr is None:
            self.ptr, self.count = array.ptr, array.nbytes // array.dtype.itemsize
        else:
            self.ptr, self.count = ptr, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, part: slice) -> DeviceVector:
        start, stop, _ = part.indices(self.count)
        return DeviceVector(self.array, self.ptr + start * self.dtype.itemsize, max(stop - start, 0))

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize

    @property
    def buffer(self) -> Buffer:
        """The elements as an array."""
        return self.array._replace(ptr=self.ptr, nbytes=self.nbytes, shape=(self.count,))


class Hidden(MPI.Intracomm):
    """A communicator that the user never sees, as `execute` takes one; the handle is shared with `comm`.

    Args:
        comm: the communicator.
        channel: the way of its ranks to the shadow.
        paths: what was agreed.
    """

    def __new__(cls, comm: MPI.Intracomm, *_: Any) -> Hidden:  # noqa: PYI034 - typing.Self needs Python 3.11
        return MPI.Intracomm.__new__(cls, comm)

    def __init__(self, comm: MPI.Intracomm, channel: Channel, paths: Paths) -> None:
        self._channel, self._paths = channel, paths


class _Messages(Flight):
    """Messages of one step.

    Args:
        express: of the collective, if it has one. Others may wait for slots, so it goes on whatever is waited for.
        waits: whether messages of this step go by it.
        requests: of the other messages.
    """

    def __init__(self, express: Express | None, waits: bool, requests: list[MPI.Request]) -> None:
        self._express, self._waits, self._requests = express, waits, requests

    def test(self) -> bool:
        if self._express is not None and not self._express.advance() and self._waits:
            return False
        if self._requests and Request.Testall(self._requests):
            self._requests = []
        return not self._requests

    def wait(self) -> None:
        if self._express is None or self._express.idle:
            Request.Waitall(self._requests)
        else:
            super().wait()

    def watched(self) -> AbstractContextManager[None]:
        return progress.driven() if self._requests else nullcontext()


class DeviceLink(Link):
    """Some ranks of a communicator, on its shadow.

    Args:
        channel: of the communicator.
        paths: the path of its point-to-point messages.
        tag: of its messages; with `LANES - 1` more for links apart, no other communicator of these ranks has it.
        rank: this one's place among the communicator's.
        op: MPI's name of the operator, "" if nothing is reduced.
        express: for messages between ranks of a node; None: all go as others do.
        comm: a communicator of these ranks that is the link's alone; None: the family's hidden one, where ranks and
            tags keep links apart.
    """

    def __init__(
        self,
        channel: Channel,
        paths: Paths,
        tag: int,
        rank: int,
        op: str = "",
        express: Express | None = None,
        comm: MPI.Intracomm | None = None,
    ) -> None:
        self._channel, self._paths, self._tag, self._op, self._given = channel, paths, tag, op, comm
        self._express, self._lane = express, 0
        self.rank, self.size = rank, channel.size
        self._scratch: list[Any] = []
        self._beside: list[tuple[Device, Any]] = []  # a borrowed stream, once it is needed
        self._hidden: Hidden | None = None

    def transfer(
        self, sends: Sequence[tuple[DeviceVector, int]], recvs: Sequence[tuple[DeviceVector, int]]
    ) -> Flight:
        requests: list[MPI.Request] = []
        express = False
        for vector, rank in recvs:
            if vector.count:
                express |= self._begin("Irecv", vector, rank, vector.array.stream, requests)
        if sends:
            stream = self._sending_stream(sends, recvs)
            for vector, rank in sends:
                if vector.count:
                    express |= self._begin("Isend", vector, rank, stream, requests)
        return _Messages(self._express, express, requests)

    def _begin(self, name: str, vector: DeviceVector, rank: int, stream: Any, requests: list[MPI.Request]) -> bool:
        """Begin a message; tell whether it goes by express."""
        if self._express is not None and not self._lane:  # a box is for messages one after another
            begin = self._express.send if name == "Isend" else self._express.receive
            if begin(self._channel.peer(rank), vector.ptr, vector.nbytes, vector.array.device, stream):
                return True
        requests.append(self._start(name, vector.buffer._replace(stream=stream), rank))
        return False

    def _start(self, name: str, buffer: Buffer, rank: int) -> MPI.Request:
        if self._hidden is None:
            self._hidden = self._hide()
        if self._given is None:
            rank = self._channel.peer(rank)
        arguments = [_bytes(buffer)], rank, self._tag
        request: MPI.Request = execute(self._hidden, self._paths, OPERATIONS[name], arguments, None)
        return request

    def _hide(self) -> Hidden:
        if self._given is not None:
            return Hidden(self._given, self._channel, self._paths)
        shadow = self._channel.shadow
        return Hidden(shadow.comm, Channel(shadow, None, [], shadow.comm.Get_size(), {}), self._paths)

    def _sending_stream(
        self, sends: Sequence[tuple[DeviceVector, int]], recvs: Sequence[tuple[DeviceVector, int]]
    ) -> Any:
        """Another stream for large vectors that are sent while others are received: the GPU's link carries both."""
        array = sends[0][0].array
        if min(sum(vector.nbytes for vector, _ in messages) for messages in (sends, recvs)) < _LONG:
            return array.stream
        if not self._beside:
            self._beside.append((array.device, array.device.borrow_stream()))
        device, stream = self._beside[0]
        device.wait_event(stream, device.record(array.stream))
        return stream

    def apart(self, lane: int) -> DeviceLink:
        if not lane:
            return self
        link = copy.copy(self)
        link._tag, link._lane = self._tag + lane, lane
        link._landing = None
        return link

    def reduce(
        self, into: DeviceVector, lower: DeviceVector | None = None, higher: DeviceVector | None = None
    ) -> None:
        if not len(into):
            return
        first = into if lower is None else lower
        second = into if higher is None else higher
        into.array.device.reduce(self._op, into.buffer, first.buffer, second.buffer)

    def copy(self, to: DeviceVector, origin: DeviceVector) -> None:
        if to.count and to.ptr != origin.ptr:
            to.array.device.copy(to.ptr, origin.ptr, to.nbytes, to.array.stream)

    def copies(self, pairs: Sequence[tuple[DeviceVector, DeviceVector]]) -> None:
        """Make many copies, the short ones by one kernel if they are not few."""
        short = [(to, origin) for to, origin in pairs if 0 < to.nbytes < _LONG]
        if len(short) < _FEWEST:
            super().copies(pairs)
            return
        for to, origin in pairs:
            if to.nbytes >= _LONG:
                self.copy(to, origin)
        device, stream = short[0][0].array.device, short[0][0].array.stream
        lease = pool_of(device).lease(24 * len(short))
        table = lease.array.view(np.uint64).reshape(3, len(short))
        table[:] = np.array([(to.ptr, origin.ptr, to.nbytes) for to, origin in short], np.uint64).T
        try:
            device.copy_pieces(table, int(table[2].max()), stream)
        finally:
            lease.release(device.record(stream))

    def scratch(self, count: int, like: DeviceVector) -> DeviceVector:
        if not count:
            return like[:0]
        array = like.array
        memory = array.device.allocate(count * array.dtype.itemsize, array.stream)
        found = array._replace(ptr=memory.ptr, nbytes=count * array.dtype.itemsize, shape=(count,), owner=memory)
        self._scratch.append(found)
        return DeviceVector(found)

    def settled(self) -> bool:
        """Whether this rank has nothing more to do for the messages of others."""
        return self._express is None or self._express.settled()

    def settle(self) -> None:
        """Wait until `settled`."""
        if self._express is not None:
            self._express.settle()

    def close(self) -> None:
        """Give scratch memory back once the work that is queued on it is done, and the stream."""
        for array in self._scratch:
            keep(array.device.record(array.stream), array)
        self._scratch.clear()
        while self._beside:
            device, stream = self._beside.pop()
            device.return_stream(stream)


def _bytes(buffer: Buffer) -> Buffer:
    """Movement is bytes: MPI does not know every dtype."""
    return buffer._replace(dtype=np.dtype(np.uint8), shape=(buffer.nbytes,))
