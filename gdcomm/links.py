"""Device arrays as the vectors of `gdcomm.algorithms`, and their link: messages from GPU to GPU, kernels of the GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from mpi4py import MPI

from gdcomm.algorithms.link import Link
from gdcomm.devices.base import Buffer
from gdcomm.envelopes import Channel, Pump
from gdcomm.execution import execute
from gdcomm.express import Express
from gdcomm.memory.pinned import pool_of
from gdcomm.operations import OPERATIONS
from gdcomm.paths import Paths
from gdcomm.patience import Patience
from gdcomm.requests import Request
from gdcomm.transfer.copy import keep

__all__ = ["DeviceLink", "DeviceVector"]

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


class _Shadow(MPI.Intracomm):
    """The family's hidden communicator, as `execute` takes one."""

    _channel: Channel
    _paths: Paths


class DeviceLink(Link):
    """Some ranks of a communicator, on its shadow.

    Args:
        channel: of the communicator.
        paths: the path of its point-to-point messages.
        tag: of all messages; no other communicator of these ranks has it.
        ranks: of the communicator, those that the link joins.
        rank: this one's place among them.
        op: MPI's name of the operator, "" if nothing is reduced.
        express: for messages between ranks of a node; None: all go as others do.
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
    ) -> None:
        self._paths, self._tag, self._op, self._express = paths, tag, op, express
        self._ranks = [channel.peer(r) for r in ranks]
        self._comm = _Shadow(channel.shadow.comm)
        self._comm._channel = Channel(channel.shadow, None, [], channel.shadow.comm.Get_size(), {})
        self._comm._paths = paths
        self.rank, self.size = rank, len(ranks)
        self._scratch: list[Buffer] = []

    def transfer(
        self, sends: Sequence[tuple[DeviceVector, int]], recvs: Sequence[tuple[DeviceVector, int]]
    ) -> None:
        pumps: list[Pump] = []
        requests: list[MPI.Request] = []
        with _beside(sends, recvs) as side:
            for name, messages, stream in (("Irecv", recvs, None), ("Isend", sends, side)):
                for rank, buffers in self._by_rank(messages, stream).items():
                    pump = self._pump(name, rank, buffers)
                    if pump is not None:
                        pumps.append(pump)
                    else:
                        requests += [self._start(name, buffer, rank) for buffer in buffers]
            patience = Patience(looks=200)
            while pumps := [pump for pump in pumps if not pump.query()]:
                patience.pause()
            Request.Waitall(requests)

    def _by_rank(self, messages: Sequence[tuple[DeviceVector, int]], stream: Any) -> dict[int, list[Buffer]]:
        """The messages of each of the shadow's ranks, in order, on another stream if one is given."""
        found: dict[int, list[Buffer]] = {}
        for vector, rank in messages:
            if len(vector):
                buffer = vector.buffer if stream is None else vector.buffer._replace(stream=stream)
                found.setdefault(self._ranks[rank], []).append(buffer)
        return found

    def _pump(self, name: str, rank: int, buffers: Sequence[Buffer]) -> Pump | None:
        if self._express is None:
            return None
        return (self._express.send if name == "Isend" else self._express.receive)(rank, buffers)

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


@contextmanager
def _beside(
    sends: Sequence[tuple[DeviceVector, int]], recvs: Sequence[tuple[DeviceVector, int]]
) -> Iterator[Any]:
    """A stream on which large vectors are sent while others are received: the link carries both ways at once."""
    if min(sum(vector.nbytes for vector, _ in messages) for messages in (sends, recvs)) < _LONG:
        yield None
        return
    buffer = sends[0][0].buffer
    stream = buffer.device.borrow_stream()
    try:
        buffer.device.wait_event(stream, buffer.device.record(buffer.stream))
        yield stream
    finally:
        buffer.device.return_stream(stream)


def _bytes(buffer: Buffer) -> Buffer:
    """Movement is bytes: MPI does not know every dtype."""
    return buffer._replace(dtype=np.dtype(np.uint8), shape=(buffer.nbytes,))
