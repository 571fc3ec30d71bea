"""Messages of collectives between ranks of a node: chunks through slots, and nothing said but their counts.

Both ends know what a collective sends: order, sizes and places. So where two ranks share memory no envelope, matching
or request is needed. A pair of ranks has one box for each direction, which stays with it from the first message on,
and each message is so many chunks more. Messages that are not large gain most: what is left of their cost is that of
two copies and of waiting for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from gdcomm.arenas import Box, Peer
from gdcomm.devices.base import Buffer, Device, Event
from gdcomm.envelopes import SLOTS, Channel, Pump
from gdcomm.patience import moved
from gdcomm.targets import fetch

__all__ = ["Express", "Receiving", "Sending"]


_ALIGNED = 4096  # bytes: chunks begin at pages


class _Piece(NamedTuple):
    buffer: Buffer
    offset: int
    nbytes: int


def _cut(buffers: Sequence[Buffer]) -> list[_Piece]:
    """The chunks of messages, one message after another; the same at both ends."""
    pieces = []
    for buffer in buffers:
        chunk = SLOTS.chunk(buffer.nbytes) // _ALIGNED * _ALIGNED
        pieces += [_Piece(buffer, at, min(chunk, buffer.nbytes - at)) for at in range(0, buffer.nbytes, chunk)]
    return pieces


class Sending(Pump):
    """Messages on their way to one rank.

    Args:
        box: stays with the pair; its earlier messages are through.
        buffers: contiguous, one for each message.
    """

    def __init__(self, box: Box, buffers: Sequence[Buffer]) -> None:
        self._box, self._left = box, deque(_cut(buffers))
        self._goal = box.produced + len(self._left)
        self._copying: deque[Event] = deque()

    def query(self) -> bool:
        """Copy what there are slots for, tell of what is copied; True when the receiver has everything."""
        box = self._box
        consumed = box.consumed()
        while self._left and (memory := box.take()) is not None:
            buffer, offset, nbytes = self._left.popleft()
            buffer.device.to_host(memory[:nbytes], buffer, offset)
            self._copying.append(buffer.device.record(buffer.stream))
        while self._copying and self._copying[0].query():
            self._copying.popleft()
            box.produce()
            moved()
        return consumed == self._goal


class Receiving(Pump):
    """Messages on their way from one rank.

    Args:
        peer: stays with the pair; its earlier messages are through.
        buffers: contiguous, one for each message.
    """

    def __init__(self, peer: Peer, buffers: Sequence[Buffer]) -> None:
        self._peer, self._left = peer, deque(_cut(buffers))
        self._fetching: deque[Event] = deque()
        peer.accept(len(self._left))

    def query(self) -> bool:
        """Take the chunks that are there; True when all are in place."""
        peer = self._peer
        while self._left and (memory := peer.take()) is not None:
            buffer, offset, nbytes = self._left.popleft()
            self._fetching.append(fetch(buffer, peer.arena, memory[:nbytes], offset))
        while self._fetching and self._fetching[0].query():
            self._fetching.popleft()
            peer.consume()
            moved()
        return not (self._left or self._fetching)


class Express:
    """The boxes of one communicator's collectives: one to and one from each rank that shares memory with this one.

    Args:
        channel: the communicator's.
        device: of the first arrays.

    Attributes:
        told: a number for each rank, to be told it: all ranks make this at the same time.
    """

    def __init__(self, channel: Channel, device: Device) -> None:
        peers = [channel.peer(rank) for rank in range(channel.size)]
        shadow = channel.shadow
        self._arenas = shadow.arenas
        self._boxes = {peer: None if peer == shadow.rank else shadow.box(peer, device) for peer in peers}
        self.told = [0 if box is None else box.number + 1 for box in self._boxes.values()]
        self._peers: dict[int, Peer | None] = {}

    def hear(self, numbers: Sequence[int]) -> None:
        """Take what the ranks told this one."""
        for peer, number in zip(self._boxes, numbers, strict=True):
            address = self._arenas[peer]
            self._peers[peer] = Peer(address, number - 1) if number and address is not None else None

    def send(self, dest: int, buffers: Sequence[Buffer]) -> Sending | None:
        """Send messages to a rank of the shadow; None if they must go another way."""
        box = self._boxes[dest]
        return None if box is None else Sending(box, buffers)

    def receive(self, source: int, buffers: Sequence[Buffer]) -> Receiving | None:
        """Receive messages from a rank of the shadow; None if they come another way."""
        peer = self._peers[source]
        return None if peer is None else Receiving(peer, buffers)

    def __del__(self) -> None:
        """Give the boxes back: the communicator is gone."""
        for box in self._boxes.values():
            if box is not None:
                box.close(box.consumed() == box.produced)
