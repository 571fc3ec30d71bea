"""Device arrays as the vectors of `gdcomm.algorithms`, and their link: messages from GPU to GPU, kernels of the GPU."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from gdcomm.algorithms.link import Link
from gdcomm.algorithms.steps import Flight
from gdcomm.devices.base import Buffer, Device
from gdcomm.envelopes import Channel, Pump
from gdcomm.execution import execute
from gdcomm.express import Express
from gdcomm.memory.pinned import pool_of
from gdcomm.operations import OPERATIONS
from gdcomm.paths import Paths
from gdcomm.patience import Patience
from gdcomm.requests import Request, progress
from gdcomm.transfer.copy import keep

__all__ = ["DeviceLink", "DeviceVector", "Hidden"]

_LONG = 256 << 10  # bytes from which on a copy takes longer than its call
_FEWEST = 8  # copies whose calls take as long as that of a kernel with its table


class DeviceVector:
    """Contiguous elements in device memory.

    Args:
        buffer: contiguous.
    """

    __slots__ = ("buffer",)

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer

    def __len__(self) -> int:
        return self.buffer.nbytes // self.buffer.dtype.itemsize

    def __getitem__(self, part: slice) -> DeviceVector:
        start, stop, _ = part.indices(len(self))
        itemsize, count = self.buffer.dtype.itemsize, max(stop - start, 0)
        return DeviceVector(
            self.buffer._replace(ptr=self.buffer.ptr + start * itemsize, nbytes=count * itemsize, shape=(count,))
        )

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.buffer.dtype

    @property
    def nbytes(self) -> int:
        return self.buffer.nbytes


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


class _Side(NamedTuple):
    """A borrowed stream."""

    device: Device
    stream: Any


class _Messages(Flight):
    """Messages of one step.

    Args:
        pumps: of those that go through the boxes of an `Express`.
        requests: of the others.
        side: a stream to be given back.
    """

    def __init__(self, pumps: list[Pump], requests: list[MPI.Request], side: _Side | None) -> None:
        self._pumps, self._requests, self._side = pumps, requests, side

    def test(self) -> bool:
        self._pumps = [pump for pump in self._pumps if not pump.query()]
        if self._requests and Request.Testall(self._requests):
            self._requests = []
        if self._pumps or self._requests:
            return False
        self._close()
        return True

    def wait(self) -> None:
        patience = Patience(looks=200)
        while self._pumps:
            self._pumps = [pump for pump in self._pumps if not pump.query()]
            if self._pumps:
                patience.pause()
        Request.Waitall(self._requests)
        self._close()

    def _close(self) -> None:
        if self._side is not None:
            self._side.device.return_stream(self._side.stream)
            self._side = None

    __del__ = _close  # after an error, too

    def watched(self) -> AbstractContextManager[None]:
        return progress.driven()


class DeviceLink(Link):
    """Some ranks of a communicator, on its shadow.

    Args:
        channel: of the communicator.
        paths: the path of its point-to-point messages.
        tag: of its messages; with `LANES - 1` more for links apart, no other communicator of these ranks has it.
        ranks: of the communicator, those that the link joins.
        rank: this one's place among them.
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
        ranks: Sequence[int],
        rank: int,
        op: str = "",
        express: Express | None = None,
        comm: MPI.Intracomm | None = None,
    ) -> None:
        self._paths, self._tag, self._op, self._express = paths, tag, op, express
        if comm is None:
            self._ranks = [channel.peer(r) for r in ranks]
            whole = Channel(channel.shadow, None, [], channel.shadow.comm.Get_size(), {})
            self._comm = Hidden(channel.shadow.comm, whole, paths)
        else:
            self._ranks, self._comm = list(ranks), Hidden(comm, channel, paths)
        self.rank, self.size = rank, len(ranks)
        self._scratch: list[Buffer] = []

    def transfer(
        self, sends: Sequence[tuple[DeviceVector, int]], recvs: Sequence[tuple[DeviceVector, int]]
    ) -> Flight:
        pumps: list[Pump] = []
        requests: list[MPI.Request] = []
        side = _beside(sends, recvs)
        flight = _Messages(pumps, requests, side)
        for name, messages, stream in (("Irecv", recvs, None), ("Isend", sends, side and side.stream)):
            for rank, buffers in self._by_rank(messages, stream).items():
                pump = self._pump(name, rank, buffers)
                if pump is not None:
                    pumps.append(pump)
                else:
                    requests += [self._start(name, buffer, rank) for buffer in buffers]
        return flight

    def apart(self, lane: int) -> DeviceLink:
        if not lane:
            return self
        link = copy.copy(self)
        link._tag, link._express = self._tag + lane, None  # a box is for messages one after another
        link._landing = None
        return link

    def _by_rank(self, messages: Sequence[tuple[DeviceVector, int]], stream: Any) -> dict[int, list[Buffer]]:
        """The messages of each of the communicator's ranks, in order, on another stream if one is given."""
        found: dict[int, list[Buffer]] = {}
        for vector, rank in messages:
            if len(vector):
                buffer = vector.buffer if stream is None else vector.buffer._replace(stream=stream)
                found.setdefault(self._ranks[rank], []).append(buffer)
        return found

    def _pump(self, name: str, rank: int, buffers: Sequence[Buffer]) -> Pump | None:
        if self._express is None:
            return None
        peer = self._comm._channel.peer(rank)
        return (self._express.send if name == "Isend" else self._express.receive)(peer, buffers)

    def _start(self, name: str, buffer: Buffer, rank: int) -> MPI.Request:
        arguments = [_bytes(buffer)], rank, self._tag
        request: MPI.Request = execute(self._comm, self._paths, OPERATIONS[name], arguments, None)
        return request

    def reduce(
        self, into: DeviceVector, lower: DeviceVector | None = None, higher: DeviceVector | None = None
    ) -> None:
        if not len(into):
            return
        first = into if lower is None else lower
        second = into if higher is None else higher
        into.buffer.device.reduce(self._op, into.buffer, first.buffer, second.buffer)

    def copy(self, to: DeviceVector, origin: DeviceVector) -> None:
        if to.nbytes and to.buffer.ptr != origin.buffer.ptr:
            to.buffer.device.copy(to.buffer.ptr, origin.buffer.ptr, to.nbytes, to.buffer.stream)

    def copies(self, pairs: Sequence[tuple[DeviceVector, DeviceVector]]) -> None:
        """Make many copies, the short ones by one kernel if they are not few."""
        short = [(to.buffer, origin.buffer) for to, origin in pairs if 0 < to.nbytes < _LONG]
        if len(short) < _FEWEST:
            super().copies(pairs)
            return
        for to, origin in pairs:
            if to.nbytes >= _LONG:
                self.copy(to, origin)
        device, stream = short[0][0].device, short[0][0].stream
        lease = pool_of(device).lease(24 * len(short))
        table = lease.array.view(np.uint64).reshape(3, len(short))
        table[:] = np.array([(to.ptr, origin.ptr, to.nbytes) for to, origin in short], np.uint64).T
        try:
            device.copy_pieces(table, int(table[2].max()), stream)
        finally:
            lease.release(device.record(stream))

    def scratch(self, count: int, like: DeviceVector) -> DeviceVector:
        buffer = like.buffer
        made: list[Buffer] = []
        with buffer.device.on(buffer.stream):
            owner = buffer.device.build("cupy", (count * buffer.dtype.itemsize,), np.dtype(np.uint8), "C", made.append)
        if not made:
            return like[:0]
        found = buffer._replace(ptr=made[0].ptr, nbytes=made[0].nbytes, shape=(count,), owner=owner)
        self._scratch.append(found)
        return DeviceVector(found)

    def close(self) -> None:
        """Give scratch memory back once the work that is queued on it is done."""
        for buffer in self._scratch:
            keep(buffer.device.record(buffer.stream), buffer)
        self._scratch.clear()


def _beside(
    sends: Sequence[tuple[DeviceVector, int]], recvs: Sequence[tuple[DeviceVector, int]]
) -> _Side | None:
    """A stream on which large vectors are sent while others are received: the GPU's link carries both at once."""
    if min(sum(vector.nbytes for vector, _ in messages) for messages in (sends, recvs)) < _LONG:
        return None
    device, stream = sends[0][0].buffer.device, sends[0][0].buffer.stream
    side = _Side(device, device.borrow_stream())
    device.wait_event(side.stream, device.record(stream))
    return side


def _bytes(buffer: Buffer) -> Buffer:
    """Movement is bytes: MPI does not know every dtype."""
    return buffer._replace(dtype=np.dtype(np.uint8), shape=(buffer.nbytes,))
