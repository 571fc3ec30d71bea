"""Messages of collectives between ranks of a node: chunks through slots, and nothing said but their counts.

Both ends know what a collective sends: order, sizes and places. So where two ranks share memory no envelope, matching
or request is needed. A pair of ranks has one box for each direction, which stays with it from the first message on,
and each message is so many chunks more. Messages that are not large gain most: what is left of their cost is that of
two copies and of waiting for them.

Nobody waits for more than the next step needs. A message is sent when the receiver was told of its last chunk, and
received when the copy of its last chunk to the device is queued, since what comes next is queued behind it. That a slot
is free again is told when the copy out of it is done: at any later look at the messages, at the latest by `settle`.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from typing import Any

from gdcomm.arenas import Box, Peer
from gdcomm.devices.base import Device, Event
from gdcomm.envelopes import SLOTS, Channel
from gdcomm.patience import Patience, moved

__all__ = ["Express"]

_RATE = SLOTS._replace(latency=1e-5)
_ALIGNED = 4096  # bytes: chunks begin at pages


@functools.lru_cache(4096)
def _cut(nbytes: int) -> list[tuple[int, int]]:
    """Offset and bytes of the chunks of a message, which are of one size; the same at both ends."""
    number = -(-nbytes // _RATE.chunk(nbytes))
    chunk = -(-nbytes // number // _ALIGNED) * _ALIGNED
    return [(at, min(chunk, nbytes - at)) for at in range(0, nbytes, chunk)]


class _Left:
    """What is left of the messages to or from one rank, in order.

    Args:
        device, stream: of their memory.
    """

    __slots__ = ("chunks", "device", "stream")

    def __init__(self, device: Device, stream: Any) -> None:
        self.device, self.stream = device, stream
        self.chunks: deque[tuple[int, int]] = deque()  # address and bytes of each

    def add(self, address: int, nbytes: int) -> int:
        """Add a message; how many chunks it is."""
        cut = _cut(nbytes)
        for offset, size in cut:
            self.chunks.append((address + offset, size))
        return len(cut)


class Express:
    """The boxes of one communicator's collectives: one to and one from each rank that shares memory with this one.

    The messages of one step are under way at a time. All that a collective receives goes to one stream.

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
        self._sending: dict[Box, _Left] = {}
        self._coming: dict[Peer, _Left] = {}
        self._holding: list[Box] = []  # that hold slots
        self._copying: deque[tuple[Event, Box]] = deque()  # chunks on their way to slots
        self._fetching: deque[tuple[Event, Peer]] = deque()  # chunks on their way out of slots

    def hear(self, numbers: Sequence[int]) -> None:
        """Take what the ranks told this one."""
        for peer, number in zip(self._boxes, numbers, strict=True):
            address = self._arenas[peer]
            self._peers[peer] = Peer(address, number - 1) if number and address is not None else None

    def send(self, dest: int, address: int, nbytes: int, device: Device, stream: Any) -> bool:
        """Begin to send to a rank of the shadow; False if the message must go another way.

        Args:
            dest: the rank.
            address, nbytes: of the message, which is not empty.
            device, stream: of its memory.
        """
        box = self._boxes[dest]
        if box is None:
            return False
        left = self._sending.get(box)
        if left is None:
            left = self._sending[box] = _Left(device, stream)
        left.add(address, nbytes)
        return True

    def receive(self, source: int, address: int, nbytes: int, device: Device, stream: Any) -> bool:
        """Begin to receive from a rank of the shadow; arguments and result as `send` has them."""
        peer = self._peers[source]
        if peer is None:
            return False
        left = self._coming.get(peer)
        if left is None:
            left = self._coming[peer] = _Left(device, stream)
            peer.arena.lock(device)  # if that fails, the driver's detour is slow, and as right
        peer.accept(left.add(address, nbytes))
        return True

    @property
    def idle(self) -> bool:
        """Whether there is nothing to be done for any message."""
        return not (self._sending or self._coming or self._copying or self._fetching or self._holding)

    def advance(self) -> bool:
        """Go on as far as that needs no waiting; True when everything is sent and received."""
        self._reclaim()
        for box, left in tuple(self._sending.items()):
            self._fill(box, left)
            if not left.chunks:
                del self._sending[box]
        for peer, left in tuple(self._coming.items()):
            self._empty(peer, left)
            if not left.chunks:
                del self._coming[peer]
        self._tell()
        return not (self._sending or self._coming or self._copying)

    def _fill(self, box: Box, left: _Left) -> None:
        """Copy as many chunks to slots as there are slots."""
        device, stream, addresses = left.device, left.stream, box.arena.addresses
        while left.chunks and (slot := box.take()) is not None:
            if box not in self._holding:
                self._holding.append(box)
            address, nbytes = left.chunks.popleft()
            device.copy(addresses[slot], address, nbytes, stream)
            self._copying.append((device.record(stream), box))

    def _empty(self, peer: Peer, left: _Left) -> None:
        """Copy the chunks that are there out of their slots."""
        device, stream, addresses = left.device, left.stream, peer.arena.addresses
        while left.chunks and (slot := peer.take()) is not None:
            address, nbytes = left.chunks.popleft()
            device.copy(address, addresses[slot], nbytes, stream)
            self._fetching.append((device.record(stream), peer))
            moved()

    def _tell(self) -> None:
        """Tell the others of copies that are done."""
        copying, fetching = self._copying, self._fetching
        while copying and copying[0][0].query():
            copying.popleft()[1].produce()
            moved()
        while fetching and fetching[0][0].query():
            fetching.popleft()[1].consume()
            moved()

    def _reclaim(self) -> None:
        """Take slots back. Those of earlier messages, too: all boxes share the slots."""
        if self._holding:
            self._holding = [box for box in self._holding if box.reclaim()]

    def settled(self) -> bool:
        """Whether all slots are free again that this rank sent or received through; it goes on until they are."""
        self._reclaim()
        self._tell()
        return not (self._fetching or self._holding)

    def settle(self) -> None:
        """Wait until `settled`: the collective ends here, and nobody looks any more."""
        patience = Patience(looks=200)
        while not self.settled():
            patience.pause()

    def __del__(self) -> None:
        """Give the boxes back: the communicator is gone."""
        for box in self._boxes.values():
            if box is not None:
                box.close(box.consumed() == box.produced)
