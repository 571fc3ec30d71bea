"""Large staged messages: an envelope, then the rest in chunks, so that copies and network overlap.

The *envelope* is an ordinary message of the communicator, so matching, order and probing stay MPI's own. It
has one fixed, unusual length; most of it is the first bytes of the data, and at its end is a header that starts
with a secret. A receive that can't hold that many bytes can't hold the message either, so MPI itself reports it
as truncated; a larger receive looks for the header where exactly so many bytes arrived. The rest follows on a
*shadow* communicator that the user never sees, under a tag of its own, through a few pinned slots at the sender.

Any send may also travel plainly (host arrays, buffered and persistent sends do): receives take both.
Everybody involved must be able to go on while the program is elsewhere, so envelopes exist only where every rank
has MPI_THREAD_MULTIPLE, and only where device arrays can exist.
"""

from __future__ import annotations

import itertools
import math
import struct
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from mpi4py import MPI

from gdcomm.arguments import ArgumentError
from gdcomm.devices.base import Buffer, Event
from gdcomm.memory.pinned import Lease, pool_of

__all__ = ["ENVELOPE", "Channel", "Header", "Incoming", "Outgoing", "Pump", "Shadow", "Target", "chunk_size"]

ENVELOPE = 1093 * 480  # bytes: whole elements of most types, and a length that few messages have
SMALLEST = 2 << 20  # bytes of the smallest message that goes this way
SLICE = 64 << 10  # bytes of the largest element: chunks hold whole ones
SLOTS = 4
_FORM = struct.Struct("<16sQQQQQ")
_HEADER = 64  # bytes at the end of the envelope
FIRST = ENVELOPE - _HEADER  # most data bytes in an envelope
_LATENCY, _BANDWIDTH = 2e-5, 8e9  # of one chunk: Python, MPI and CUDA calls (s), the slowest stage (B/s)


def chunk_size(nbytes: int) -> int:
    """Bytes of a chunk: the square-root rule for a pipeline of three stages, within 256 KiB and 8 MiB."""
    return min(max(int(math.sqrt(nbytes * _LATENCY * _BANDWIDTH / 2)), 256 << 10), 8 << 20)


class Header(NamedTuple):
    """What an envelope says: bytes in all, in the envelope and in a chunk; source and tag on the shadow."""

    total: int
    first: int
    chunk: int
    source: int
    tag: int

    def piece(self, index: int) -> tuple[int, int]:
        """Offset and bytes of a chunk."""
        offset = self.first + index * self.chunk
        return offset, min(self.chunk, self.total - offset)

    @property
    def chunks(self) -> int:
        """How many chunks follow the envelope."""
        return -(-(self.total - self.first) // self.chunk)


class Shadow:
    """The hidden communicator of a family of communicators, and the secret that marks their envelopes.

    Args:
        comm: a duplicate of the family's first communicator, which nobody else uses.
        secret: 16 bytes, the same on all ranks.
    """

    def __init__(self, comm: MPI.Intracomm, secret: bytes) -> None:
        self.comm = comm
        self.rank = comm.Get_rank()
        self._secret = secret
        limit = comm.Get_attr(MPI.TAG_UB)
        self._tags = itertools.cycle(range(1, limit if isinstance(limit, int) else 32767))

    def address(self, total: int, itemsize: int) -> Header:
        """The header of a new message; no chunk cuts an element."""
        chunk = max(chunk_size(total) // itemsize, 1) * itemsize
        return Header(total, FIRST // itemsize * itemsize, chunk, self.rank, next(self._tags))

    def write(self, envelope: Any, header: Header) -> None:
        """Put the header at the envelope's end."""
        envelope[FIRST:ENVELOPE] = np.frombuffer(_FORM.pack(self._secret, *header).ljust(_HEADER, b"\0"), np.uint8)

    def read(self, end: bytes) -> Header | None:
        """The header in the last bytes of a message of an envelope's length, if it is an envelope."""
        secret, *fields = _FORM.unpack_from(end)
        return Header(*fields) if secret == self._secret else None


class Channel(NamedTuple):
    """A communicator's way to its shadow.

    Args:
        shadow: of its family.
        ranks: the shadow's rank of each of its own ranks; None where they are the same.
        early: messages that a probe had to take out of MPI's queue (see `early`).
        size: ranks of the communicator.
    """

    shadow: Shadow
    ranks: Sequence[int] | None
    early: list[Any]
    size: int

    def peer(self, rank: int) -> int:
        """The shadow's rank of a rank of the communicator."""
        return rank if self.ranks is None else self.ranks[rank]

    def derive(self, comm: MPI.Comm) -> Channel:
        """The channel of a communicator whose ranks are all among this one's; local."""
        own, theirs = comm.Get_group(), self.shadow.comm.Get_group()
        ranks = own.Translate_ranks(None, theirs)
        own.Free()
        theirs.Free()
        return Channel(self.shadow, None if ranks == list(range(len(ranks))) else ranks, [], len(ranks))


class Pump:
    """A transfer in chunks that goes on whenever it is asked. To a request it is one more event to wait for."""

    def query(self) -> bool:
        """Do what can be done without waiting; True when all is done."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Go on until all is done."""
        while not self.query():
            self._wait()

    def _wait(self) -> None:
        time.sleep(0)


class Outgoing(Pump):
    """The sender's part: device to slot, slot to network, several slots at once. Also a `transports.base.Side`.

    Args:
        channel: the communicator's.
        buffer: the array, whose first `nbytes` content bytes are sent.
        dest: rank in the communicator.
    """

    finishes = holds = True

    def __init__(self, channel: Channel, buffer: Buffer, nbytes: int, dest: int) -> None:
        self._shadow, self._buffer, self._dest = channel.shadow, buffer, channel.peer(dest)
        self._header = channel.shadow.address(nbytes, buffer.dtype.itemsize)
        self._count = self._header.chunks
        pool = pool_of(buffer.device)
        slots = min(SLOTS, self._count)
        self._envelope: Lease = pool.lease(ENVELOPE)
        self._slots: list[Lease] = [pool.lease(self._header.chunk) for _ in range(slots)]
        self._events: list[Event | None] = [None] * slots
        self._requests: list[MPI.Request] = [MPI.REQUEST_NULL] * slots
        self._copied = self._sent = self._done = 0  # chunks
        self._sealed: Event | None = None
        self.spec = [self._envelope.array, ENVELOPE, MPI.BYTE]

    def begin(self) -> None:
        """Queue the copies of the envelope and of the first chunks."""
        envelope, first = self._envelope.array, self._header.first
        self._shadow.write(envelope, self._header)
        self._buffer.device.to_host(envelope[:first], self._buffer)
        self._sealed = self._buffer.device.record(self._buffer.stream)
        self._copy()

    def ready(self) -> None:
        """Block until the envelope is filled; the chunks may still be under way."""
        if self._sealed is not None:
            self._sealed.synchronize()

    def end(self, nbytes: int | None) -> Event | None:
        """The envelope is sent: the rest is this pump's."""
        return self

    def query(self) -> bool:
        """Send what is on the host, refill what was sent."""
        slots = len(self._slots)
        while self._done < self._sent and self._requests[self._done % slots].Test():
            self._done += 1
        self._copy()
        while self._sent < self._copied:
            slot = self._sent % slots
            event = self._events[slot]
            if event is not None and not event.query():
                break
            nbytes = self._header.piece(self._sent)[1]
            self._requests[slot] = self._shadow.comm.Isend(
                [self._slots[slot].array, nbytes, MPI.BYTE], self._dest, self._header.tag
            )
            self._sent += 1
        return self._done == self._count

    def _copy(self) -> None:
        slots = len(self._slots)
        while self._copied < min(self._count, self._done + slots):
            offset, nbytes = self._header.piece(self._copied)
            slot = self._copied % slots
            self._buffer.device.to_host(self._slots[slot].array[:nbytes], self._buffer, offset)
            self._events[slot] = self._buffer.device.record(self._buffer.stream)
            self._copied += 1

    def _wait(self) -> None:
        slots = len(self._slots)
        event = self._events[self._sent % slots] if self._sent < self._copied else None
        if event is not None:
            event.synchronize()
        elif self._done < self._sent:
            self._requests[self._done % slots].Wait()

    def close(self) -> None:
        """Give the slots back. One that MPI still reads, after an error, is lost to the pool."""
        if self._envelope.released:
            return
        self._envelope.array[FIRST:] = 0  # a header must not be found again in recycled memory
        leases, events = [self._envelope, *self._slots], [self._sealed, *self._events]
        for lease, event, request in zip(leases, events, [MPI.REQUEST_NULL, *self._requests], strict=True):
            if request == MPI.REQUEST_NULL:
                lease.release(event)


class Target(Protocol):
    """Where a receive puts the bytes of a message."""

    @property
    def capacity(self) -> int:
        """Bytes of the longest message."""

    def end_of_envelope(self) -> bytes:
        """What arrived where an envelope has its header."""

    def memory(self, offset: int, nbytes: int) -> Any:
        """The buffer argument by which MPI writes these bytes."""

    def placed(self, offset: int, nbytes: int) -> None:
        """MPI has written these bytes; queue what takes them further."""

    def finish(self, nbytes: int) -> list[Event]:
        """All bytes are written; queue what is left to do."""


class Incoming(Pump):
    """The receiver's part: network to memory, and on to the device while the next chunks come.

    Args:
        shadow: of the communicator's family.
        header: of the envelope that arrived.
        target: holds the envelope's data already.
    """

    def __init__(self, shadow: Shadow, header: Header, target: Target) -> None:
        self._comm, self.header = shadow.comm, header
        self._fits = header.total <= target.capacity
        self._target: Target = target if self._fits else _Sink()
        self._requests = [MPI.REQUEST_NULL] * min(SLOTS, header.chunks)
        self._posted = self._done = 0  # chunks
        self._events: list[Event] | None = None
        self._target.placed(0, header.first)

    def query(self) -> bool:
        """Take what arrived, post what follows."""
        if self._events is None:
            header, slots = self.header, len(self._requests)
            while True:
                while self._posted < min(header.chunks, self._done + slots):
                    memory = self._target.memory(*header.piece(self._posted))
                    self._requests[self._posted % slots] = self._comm.Irecv(memory, header.source, header.tag)
                    self._posted += 1
                if self._done == header.chunks or not self._requests[self._done % slots].Test():
                    break
                self._target.placed(*header.piece(self._done))
                self._done += 1
            if self._done < header.chunks:
                return False
            if not self._fits:
                raise ArgumentError(
                    MPI.ERR_TRUNCATE,
                    f"the message of {header.total} bytes is longer than the receive buffer; it is lost. "
                    "Give a larger buffer, or ask Probe for the size first",
                )
            self._events = self._target.finish(header.total)
        return all(event.query() for event in self._events)

    def _wait(self) -> None:
        if self._events is None:
            self._requests[self._done % len(self._requests)].Wait()
        for event in self._events or ():
            event.synchronize()

    def receive(self, status: MPI.Status | None) -> None:
        """Go on until the data is in place, or queued in order on its stream; tell the message's bytes in `status`."""
        while self._events is None and not self.query():
            if self._events is None:
                self._wait()
        if status is not None:
            status.Set_elements(MPI.BYTE, self.header.total)


class _Sink:
    """Takes the chunks of a message that does not fit."""

    capacity = 0

    def end_of_envelope(self) -> bytes:
        return b""

    def memory(self, offset: int, nbytes: int) -> Any:
        return [np.empty(nbytes, np.uint8), MPI.BYTE]

    def placed(self, offset: int, nbytes: int) -> None:
        pass

    def finish(self, nbytes: int) -> list[Event]:
        return []
