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
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from gdcomm.arenas import SLOT, Address, Box, Peer, own
from gdcomm.arguments import ArgumentError
from gdcomm.devices.base import Buffer, Device, Event
from gdcomm.lanes import InLane, InMessages, InSlots, OutLane, OutMessages, OutSlots, Target
from gdcomm.memory.pinned import Lease, pool_of
from gdcomm.patience import moved

__all__ = [
    "ENVELOPE", "FIRST", "MESSAGES", "SLICE", "SLOTS", "SMALLEST", "Channel", "Header", "Incoming", "Outgoing", "Pump",
    "Shadow", "too_long",
]  # fmt: skip

ENVELOPE = 1093 * 96  # bytes: whole elements of most types, a length that few messages have, and more than `Slots.SIZE`
SMALLEST = 2 << 20  # bytes of the smallest message that goes this way
SLICE = 64 << 10  # bytes of the largest element: chunks hold whole ones
_FORM = struct.Struct("<16sQQQQQQ")
_HEADER = 64  # bytes at the end of the envelope
FIRST = ENVELOPE - _HEADER  # most data bytes in an envelope


class Rate(NamedTuple):
    """Of a pipeline: seconds that each chunk costs beside its bytes, bytes/s of the slowest stage, stages, limits."""

    latency: float
    bandwidth: float
    stages: int
    smallest: int
    largest: int

    def chunk(self, nbytes: int) -> int:
        """Bytes of a chunk by the square-root rule: small enough to begin soon, large enough to be few."""
        best = int(math.sqrt(nbytes * self.latency * self.bandwidth / (self.stages - 1)))
        return min(max(best, self.smallest), self.largest)


MESSAGES = Rate(2e-5, 8e9, 3, 256 << 10, 8 << 20)
SLOTS = Rate(1.5e-5, 5e10, 2, 256 << 10, SLOT)


class Header(NamedTuple):
    """What an envelope says.

    Args:
        total, first, chunk: bytes in all, in the envelope and in a chunk.
        source: rank on the shadow.
        tag: of chunks that are messages on the shadow.
        box: number of the box in the source's arena, counted from 1; 0: the chunks are messages.
    """

    total: int
    first: int
    chunk: int
    source: int
    tag: int
    box: int

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
        arenas: of each rank that shares memory with this one.
        nodes: a number for the node of each rank.
        ports: network ports of the node that has fewest.
    """

    def __init__(
        self, comm: MPI.Intracomm, secret: bytes, arenas: Sequence[Address | None], nodes: Sequence[int], ports: int
    ) -> None:
        self.comm, self.arenas, self.nodes, self.ports = comm, arenas, nodes, ports
        self.rank = comm.Get_rank()
        self._secret = secret
        limit = comm.Get_attr(MPI.TAG_UB)
        # Up to here tags are for collectives; as many after it for chunks, and the rest for making communicators.
        self.last_tag = (limit if isinstance(limit, int) else 32767) // 3
        self.tags_taken = 0  # the last one of collectives
        self.lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._tags = itertools.cycle(range(self.last_tag + 1, 2 * self.last_tag))

    def number(self) -> int:
        """A number that neither this rank nor another one has given out."""
        return next(self._numbers) * self.comm.Get_size() + self.rank

    def join(self, ranks: Sequence[int], number: int) -> tuple[bytes, MPI.Intracomm]:
        """A communicator of some ranks, and what to know it by; each of them calls this, and waits for the others.

        Args:
            ranks: of the shadow, in the order that they are to have.
            number: theirs alone; of `number`.
        """
        all_ranks = self.comm.Get_group()
        group = all_ranks.Incl(ranks)
        made = MPI.Intracomm.Create_group(self.comm, group, 2 * self.last_tag + 1 + number % (self.last_tag - 1))
        group.Free()
        all_ranks.Free()
        return self._secret + number.to_bytes(8, "little"), made

    def box(self, dest: int, device: Device) -> Box | None:
        """A box in this process's arena for a message; None if it must go through MPI."""
        arena = own() if self.arenas[dest] is not None else None
        return arena.open() if arena is not None and arena.lock(device) else None

    def address(self, total: int, itemsize: int, box: Box | None) -> Header:
        """The header of a new message; no chunk cuts an element."""
        chunk = max((MESSAGES if box is None else SLOTS).chunk(total) // itemsize, 1) * itemsize
        number = 0 if box is None else box.number + 1
        return Header(total, FIRST // itemsize * itemsize, chunk, self.rank, next(self._tags), number)

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
        notes: of the communicator's collectives (see `collectives`).
    """

    shadow: Shadow
    ranks: Sequence[int] | None
    early: list[Any]
    size: int
    notes: dict[str, Any]

    def peer(self, rank: int) -> int:
        """The shadow's rank of a rank of the communicator."""
        return rank if self.ranks is None else self.ranks[rank]

    def derive(self, comm: MPI.Comm) -> Channel:
        """The channel of a communicator whose ranks are all among this one's; local."""
        own, theirs = comm.Get_group(), self.shadow.comm.Get_group()
        ranks = own.Translate_ranks(None, theirs)
        own.Free()
        theirs.Free()
        return Channel(self.shadow, None if ranks == list(range(len(ranks))) else ranks, [], len(ranks), {})


def too_long(nbytes: int) -> ArgumentError:
    """The error of a message that does not fit."""
    return ArgumentError(
        MPI.ERR_TRUNCATE,
        f"the message of {nbytes} bytes is longer than the receive buffer; it is lost. "
        "Give a larger buffer, or ask Probe for the size first",
    )


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
        """Block until something may have changed."""
        raise NotImplementedError


class Outgoing(Pump):
    """The sender's part: device to page-locked memory, and on, several chunks at once. Also a `transports.base.Side`.

    Chunks are copied on a stream of their own: they wait for nothing that the program queues after the call, and meet
    what it receives.

    Args:
        channel: the communicator's.
        buffer: the array, whose first `nbytes` content bytes are sent.
        dest: rank in the communicator.
    """

    finishes = holds = True

    def __init__(self, channel: Channel, buffer: Buffer, nbytes: int, dest: int) -> None:
        self._shadow, self._buffer, peer = channel.shadow, buffer, channel.peer(dest)
        pool = pool_of(buffer.device)
        box = channel.shadow.box(peer, buffer.device)
        header = self._header = channel.shadow.address(nbytes, buffer.dtype.itemsize, box)
        self._lane: OutLane
        if box is not None:
            self._lane = OutSlots(box)
        else:
            self._lane = OutMessages(channel.shadow.comm, peer, header.tag, pool, header, header.chunk)
        self._envelope: Lease = pool.lease(ENVELOPE)
        self._side: Any = None  # the chunks' stream
        self._copying: deque[Event] = deque()  # chunks that are on their way to the host
        self._last: Event | None = None
        self._copied = self._sent = 0  # chunks
        self.spec = [self._envelope.array, ENVELOPE, MPI.BYTE]

    def begin(self) -> None:
        """Queue the copy of the envelope."""
        envelope, first = self._envelope.array, self._header.first
        device, stream = self._buffer.device, self._buffer.stream
        self._shadow.write(envelope, self._header)
        if first:
            device.to_host(envelope[:first], self._buffer)
        self._last = self._sealed = device.record(stream)

    def ready(self) -> None:
        """Block until the envelope is filled, and with it the array; queue the copies of the first chunks."""
        self._sealed.synchronize()
        self._side = self._buffer.device.borrow_stream()
        self._buffer = self._buffer._replace(stream=self._side)
        self._copy()

    def end(self, nbytes: int | None) -> Event | None:
        """The envelope is sent: the rest is this pump's."""
        return self

    def query(self) -> bool:
        """Send what is on the host, refill what was sent."""
        done = self._lane.done()
        self._copy()
        while self._copying and self._copying[0].query():
            self._copying.popleft()
            self._lane.send(self._header.piece(self._sent)[1])
            self._sent += 1
            moved()
        return done == self._header.chunks

    def _copy(self) -> None:
        buffer = self._buffer
        while self._copied < self._header.chunks:
            memory = self._lane.take()
            if memory is None:
                return
            offset, nbytes = self._header.piece(self._copied)
            buffer.device.to_host(memory[:nbytes], buffer, offset)
            self._last = buffer.device.record(buffer.stream)
            self._copying.append(self._last)
            self._copied += 1
            moved()

    def _wait(self) -> None:
        if self._copying:
            self._copying[0].synchronize()
        else:
            self._lane.wait()

    def close(self) -> None:
        """Give the memory back."""
        if self._envelope.released:
            return
        if self._side is not None:
            self._buffer.device.return_stream(self._side)
        self._envelope.array[FIRST:] = 0  # a header must not be found again in recycled memory
        self._envelope.release(self._last)
        begun = self._last is not None
        self._lane.close(self._last, not begun or self._lane.done() == self._header.chunks)


class Incoming(Pump):
    """The receiver's part: chunks to memory, and on to the device while the next ones come.

    Args:
        shadow: of the communicator's family.
        header: of the envelope that arrived.
        target: holds the envelope's data already.
    """

    def __init__(self, shadow: Shadow, header: Header, target: Target) -> None:
        self.header = header
        self._fits = header.total <= target.capacity
        self._target: Target = target if self._fits else _Sink()
        if not self._fits:
            target.erase()
        self._lane: InLane
        address = shadow.arenas[header.source] if header.box else None
        if address is not None:
            self._lane = InSlots(Peer(address, header.box - 1), header, self._target)
        else:
            self._lane = InMessages(shadow.comm, header.source, header.tag, header, self._target)
        self._events: list[Event] | None = None
        if header.first:
            self._target.placed(0, header.first)

    def query(self) -> bool:
        """Take what arrived."""
        if self._events is None:
            if not self._lane.advance():
                return False
            if not self._fits:
                raise too_long(self.header.total)
            self._events = self._target.finish(self.header.total)
        return all(event.query() for event in self._events)

    def _wait(self) -> None:
        if self._events is None:
            self._lane.wait()
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

    def erase(self) -> None:
        pass

    def memory(self, offset: int, nbytes: int) -> Any:
        return [np.empty(nbytes, np.uint8), MPI.BYTE]

    def placed(self, offset: int, nbytes: int) -> None:
        pass

    def fetch(self, arena: Any, memory: Any, offset: int) -> Event | None:
        return None

    def finish(self, nbytes: int) -> list[Event]:
        return []
