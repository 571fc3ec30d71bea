"""How the chunks of a large message get from one process to another: as MPI messages, or through an arena's slots."""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from gdcomm.arenas import Arena, Box, Peer
from gdcomm.devices.base import Event
from gdcomm.memory.pinned import Lease, PinnedPool
from gdcomm.patience import Patience, moved

__all__ = ["InLane", "InMessages", "InSlots", "OutLane", "OutMessages", "OutSlots", "Pieces", "Target"]

DEPTH = 4  # MPI messages of one transfer under way at once
_Array = np.ndarray[Any, Any]


class Pieces(Protocol):
    """How a message is cut."""

    @property
    def chunks(self) -> int:
        """How many there are."""

    def piece(self, index: int) -> tuple[int, int]:
        """Offset and bytes of a chunk."""


class Target(Protocol):
    """Where a receive puts the bytes of a message."""

    @property
    def capacity(self) -> int:
        """Bytes of the longest message."""

    def end_of_envelope(self) -> bytes:
        """What arrived where an envelope has its header."""

    def erase(self) -> None:
        """Clear the header: it must not be found again in the memory of a message that did not fit."""

    def memory(self, offset: int, nbytes: int) -> Any:
        """The buffer argument by which MPI writes these bytes."""

    def placed(self, offset: int, nbytes: int) -> None:
        """MPI has written these bytes; queue what takes them further."""

    def fetch(self, arena: Arena, memory: _Array, offset: int) -> Event | None:
        """Take bytes from a slot of an arena; the event tells when the slot may be used again, None: now."""

    def finish(self, nbytes: int) -> list[Event]:
        """All bytes are written; queue what is left to do."""


class OutLane(Protocol):
    """The sender's end. Chunks are taken, sent and done with in order."""

    def take(self) -> _Array | None:
        """Page-locked memory for the next chunk; None if there is none now."""

    def send(self, nbytes: int) -> None:
        """The next chunk, of so many bytes, is in its memory."""

    def done(self) -> int:
        """How many chunks need their memory no more."""

    def wait(self) -> None:
        """Block until something may have changed."""

    def close(self, event: Event | None, through: bool) -> None:
        """Give the memory back, `event` being behind the last copy to it.

        Args:
            through: all chunks are done with, or the receiver knows nothing of the message.
        """


class InLane(Protocol):
    """The receiver's end."""

    def advance(self) -> bool:
        """Do what can be done without waiting; True when all chunks are where they belong."""

    def wait(self) -> None:
        """Block until something may have changed."""


class OutMessages:
    """Chunks as MPI messages out of a few pinned blocks.

    Args:
        comm, dest, tag: of the messages.
        pool: of the blocks.
        pieces: the chunks.
        chunk: bytes of the largest.
    """

    def __init__(self, comm: MPI.Intracomm, dest: int, tag: int, pool: PinnedPool, pieces: Pieces, chunk: int) -> None:
        self._comm, self._dest, self._tag = comm, dest, tag
        self._leases: list[Lease] = [pool.lease(chunk) for _ in range(min(DEPTH, pieces.chunks))]
        self._requests = [MPI.REQUEST_NULL] * len(self._leases)
        self._taken = self._sent = self._done = 0

    def take(self) -> _Array | None:
        if self._taken == self._done + len(self._leases):
            return None
        self._taken += 1
        return self._leases[(self._taken - 1) % len(self._leases)].array

    def send(self, nbytes: int) -> None:
        slot = self._sent % len(self._leases)
        memory = self._leases[slot].array
        self._requests[slot] = self._comm.Isend([memory, nbytes, MPI.BYTE], self._dest, self._tag)
        self._sent += 1

    def done(self) -> int:
        while self._done < self._sent and self._requests[self._done % len(self._leases)].Test():
            self._done += 1
        return self._done

    def wait(self) -> None:
        if self._done < self._sent:
            self._requests[self._done % len(self._leases)].Wait()

    def close(self, event: Event | None, through: bool) -> None:
        """A block that MPI still reads, after an error, is lost to the pool."""
        for lease, request in zip(self._leases, self._requests, strict=True):
            if request == MPI.REQUEST_NULL and not lease.released:
                lease.release(event)


class InMessages:
    """Chunks as MPI messages into the target's memory.

    Args:
        comm, source, tag: of the messages.
        pieces: the chunks.
        target: where they go.
    """

    def __init__(self, comm: MPI.Intracomm, source: int, tag: int, pieces: Pieces, target: Target) -> None:
        self._comm, self._source, self._tag = comm, source, tag
        self._pieces, self._target = pieces, target
        self._requests = [MPI.REQUEST_NULL] * min(DEPTH, pieces.chunks)
        self._posted = self._done = 0

    def advance(self) -> bool:
        chunks, depth = self._pieces.chunks, len(self._requests)
        while True:
            while self._posted < min(chunks, self._done + depth):
                memory = self._target.memory(*self._pieces.piece(self._posted))
                self._requests[self._posted % depth] = self._comm.Irecv(memory, self._source, self._tag)
                self._posted += 1
            if self._done == chunks:
                return True
            if not self._requests[self._done % depth].Test():
                return False
            self._target.placed(*self._pieces.piece(self._done))
            self._done += 1
            moved()

    def wait(self) -> None:
        self._requests[self._done % len(self._requests)].Wait()


class OutSlots:
    """Chunks in slots of this process's arena.

    Args:
        box: of the message.
    """

    def __init__(self, box: Box) -> None:
        self._box, self._slots = box, box.arena.slots
        self._patience = Patience()

    def take(self) -> _Array | None:
        slot = self._box.take()
        return None if slot is None else self._slots[slot]

    def send(self, nbytes: int) -> None:
        self._box.produce()

    def done(self) -> int:
        return self._box.consumed()

    def wait(self) -> None:
        self._patience.pause()

    def close(self, event: Event | None, through: bool) -> None:
        self._box.close(through)


class InSlots:
    """Chunks out of slots of the sender's arena.

    Args:
        peer: the sender's arena and box.
        pieces: the chunks.
        target: where they go.
    """

    def __init__(self, peer: Peer, pieces: Pieces, target: Target) -> None:
        self._peer, self._pieces, self._target = peer, pieces, target
        peer.accept(pieces.chunks)
        self._fetching: deque[Event | None] = deque()
        self._taken = self._done = 0
        self._patience = Patience()

    def advance(self) -> bool:
        while self._taken < self._pieces.chunks:
            slot = self._peer.take()
            if slot is None:
                break
            offset, nbytes = self._pieces.piece(self._taken)
            self._fetching.append(self._target.fetch(self._peer.arena, self._peer.arena.slots[slot][:nbytes], offset))
            self._taken += 1
            moved()
        while self._fetching and (self._fetching[0] is None or self._fetching[0].query()):
            self._fetching.popleft()
            self._done += 1
            self._peer.consume()
            moved()
        return self._done == self._pieces.chunks

    def wait(self) -> None:
        first = self._fetching[0] if self._fetching else None
        if first is not None and self._done + len(self._fetching) == self._pieces.chunks:
            first.synchronize()
        else:
            self._patience.pause()
