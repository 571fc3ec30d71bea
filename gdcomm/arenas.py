"""Memory that the processes of a node share, page-locked by each: large staged messages pass without a host copy.

Every process has one *arena*: an anonymous file that its neighbours open through /proc. In it are *slots* for data
and *boxes*. A box belongs to one message at a time: the sender says in it how many chunks are there and in which
slots, the receiver how many it wants and how many it is done with. The sender's GPU writes a slot, the receiver's GPU
reads it.

Boxes have no locks: what makes their numbers and the slots agree is the order of stores (see `fences`).

A message gets slots only once its receiver has accepted it. From then on the receiver takes chunks whatever its
program does, so slots always come back, and no message waits for another one's receiver. A box may also stay with two
processes and serve one message after another: then its counts go on.
"""

from __future__ import annotations

import functools
import mmap
import os
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from gdcomm.devices.base import Device
from gdcomm.devices.memory import address_of
from gdcomm.errors import DeviceError
from gdcomm.fences import Fence, open_fence
from gdcomm.memory.registered import registry_of

__all__ = ["SLOT", "Address", "Arena", "Box", "Peer", "here", "once", "own", "visible"]

SLOT = 4 << 20  # bytes of a slot: the most of a chunk
SLOTS = 8
PER_MESSAGE = 4  # slots that one message uses at a time
BOXES = 448  # messages at a time; more go through MPI
_CONTROL = 64 << 10  # bytes before the slots
_NBYTES = _CONTROL + SLOTS * SLOT
_FIRST_BOX = 4096
_WORDS = 16  # of a box, in two cache lines: one that the receiver writes, one that the sender writes
_ACCEPTED, _CONSUMED, _PRODUCED, _RING = 0, 1, 8, 9
_T = TypeVar("_T")


def once(function: Callable[..., _T]) -> Callable[..., _T]:
    """`functools.cache` for what must be made once, also if threads ask for it at the same time."""
    cached, lock = functools.cache(function), threading.RLock()

    @functools.wraps(function)
    def locked(*arguments: Any) -> _T:
        with lock:
            return cached(*arguments)

    locked.cache_clear = cached.cache_clear  # type: ignore[attr-defined]
    return locked


class Address(NamedTuple):
    """Where other processes find an arena: on which node, in which file of which process, and how it begins."""

    node: str
    pid: int
    fd: int
    token: bytes


class Arena:
    """The shared memory of one process, mapped into this one.

    Args:
        fd: of the file.
    """

    def __init__(self, fd: int) -> None:
        fence = _fence()
        assert fence is not None  # else no process has an address
        self.fence: Fence = fence
        memory = np.frombuffer(mmap.mmap(fd, _NBYTES), np.uint8)
        boxes = memory[_FIRST_BOX : _FIRST_BOX + BOXES * _WORDS * 8]
        self._boxes = boxes.view(np.uint64).reshape(BOXES, _WORDS)
        self._data = memory[_CONTROL:]
        self.slots = self._data.reshape(SLOTS, SLOT)
        self.addresses = [address_of(slot) for slot in self.slots]
        self._locked: dict[int, bool] = {}  # by device
        self._lock = threading.Lock()

    def lock(self, device: Device) -> bool:
        """Page-lock the slots for a device, once; False if that can't be done."""
        key = id(device)
        with self._lock:
            if key not in self._locked:
                try:
                    registry_of(device).add(self._data)
                    self._locked[key] = True
                except (MemoryError, DeviceError):  # over the budget, or the driver refuses
                    self._locked[key] = False
            return self._locked[key]

    def words(self, box: int) -> memoryview:
        """A box's numbers. Not as an array: one of its elements takes three times as long to read."""
        return memoryview(self._boxes[box])


class _Own(Arena):
    """This process's arena: hands out boxes and slots. Thread-safe: lists are only pushed and popped."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        os.posix_fallocate(fd, 0, _NBYTES)  # an error now instead of a signal at the first touch
        self._free_boxes = list(range(BOXES))
        self.free_slots = list(range(SLOTS))
        self.lost = 0  # slots of messages that were broken off: a GPU may still be at them

    def open(self) -> Box | None:
        """A box for a message; None if all are in use, or no slots are left."""
        if self.lost == SLOTS:
            return None
        try:
            return Box(self, self._free_boxes.pop())
        except IndexError:
            return None

    def give_back(self, box: int) -> None:
        """The message of a box is through."""
        self._free_boxes.append(box)


class Box:
    """The sender's side of one message, or of one after another.

    Args:
        arena: this process's.
        number: of the box.

    Attributes:
        produced: chunks that the receiver was told of.
    """

    def __init__(self, arena: _Own, number: int) -> None:
        self.arena, self.number = arena, number
        self._words = arena.words(number)
        for word in range(_WORDS):
            self._words[word] = 0
        self._fence = arena.fence
        self._held: list[int] = []  # slots of chunks that are not consumed, in order
        self.produced = self._consumed = 0

    def take(self) -> int | None:
        """A slot of the arena for the next chunk; None if there is none now."""
        if len(self._held) == PER_MESSAGE or self._consumed + len(self._held) == self._words[_ACCEPTED]:
            return None
        try:
            slot = self.arena.free_slots.pop()
        except IndexError:
            if self.arena.lost == SLOTS:
                raise DeviceError(
                    "all slots of this process are lost to messages that were broken off; start it again"
                ) from None
            return None
        self._held.append(slot)
        return slot

    def produce(self) -> None:
        """The oldest chunk that was not told yet is in its slot."""
        self._words[_RING + self.produced % PER_MESSAGE] = self._held[self.produced - self._consumed]
        self.produced += 1
        self._fence()  # the data and the slot's number come first
        self._words[_PRODUCED] = self.produced

    def consumed(self) -> int:
        """How many chunks the receiver is done with."""
        count = self._words[_CONSUMED]
        if count != self._consumed:
            self._fence()  # nothing goes to a slot before
            for _ in range(count - self._consumed):
                self.arena.free_slots.append(self._held.pop(0))
            self._consumed = count
        return count

    def reclaim(self) -> bool:
        """Take slots back that the receiver is done with; tell whether the box holds others."""
        self.consumed()
        return bool(self._held)

    def close(self, through: bool) -> None:
        """Give the box back.

        Args:
            through: all chunks are consumed, or nobody knows of the box; otherwise, after an error, it is lost, with
                its slots: the receiver may still use it.
        """
        if through and not self._held:
            self.arena.give_back(self.number)
        else:
            self.arena.lost += len(self._held)


class Peer:
    """The receiver's side of one message, or of one after another.

    Args:
        address: of the sender's arena.
        box: number of the box.
    """

    def __init__(self, address: Address, box: int) -> None:
        self.arena = _opened(address)
        self._words = self.arena.words(box)
        self._fence = self.arena.fence
        self._accepted = self._taken = self._consumed = 0

    def accept(self, chunks: int) -> None:
        """Let so many chunks more come. They are then to be taken without delay."""
        self._accepted += chunks
        self._words[_ACCEPTED] = self._accepted

    def take(self) -> int | None:
        """The slot of the sender's arena that holds the next chunk; None if it is not there yet."""
        if self._taken == self._words[_PRODUCED]:
            return None
        self._fence()  # the slot's number and its data are read after
        slot = self._words[_RING + self._taken % PER_MESSAGE]
        self._taken += 1
        return slot

    def consume(self) -> None:
        """The oldest chunk that was not told yet is out of its slot."""
        self._consumed += 1
        self._fence()  # the slot has been read
        self._words[_CONSUMED] = self._consumed


# -- finding one another -------------------------------------------------------------------------


@once
def _fence() -> Fence | None:
    return open_fence()


@once
def _file() -> tuple[int, bytes] | None:
    """The file of this process's arena and its token; None where there are no such files."""
    if not hasattr(os, "memfd_create"):
        return None
    token = os.urandom(16)
    try:
        fd = os.memfd_create("gdcomm")
        os.ftruncate(fd, _NBYTES)  # takes no memory yet
        os.pwrite(fd, token, 0)
    except OSError:
        return None
    return fd, token


def here() -> Address | None:
    """The address of this process's arena; None if it can have none."""
    file = _file()
    if file is None or _fence() is None:
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    return Address(f"{boot} {socket.gethostname()}", os.getpid(), *file)


@once
def own() -> _Own | None:
    """This process's arena; None if there is none, or no memory for it."""
    file = _file()
    try:
        return None if file is None else _Own(file[0])
    except (OSError, ValueError):
        return None


def visible(addresses: Sequence[Address | None]) -> list[bool]:
    """Which of these arenas this process can open: tried, since containers differ in what they let through."""
    mine = here()
    return [a is not None and mine is not None and a.node == mine.node and _token(a) == a.token for a in addresses]


def _token(address: Address) -> bytes:
    try:
        with open(_path(address), "r+b", buffering=0) as file:
            return file.read(16)
    except OSError:
        return b""


def _path(address: Address) -> str:
    return f"/proc/{address.pid}/fd/{address.fd}"


@once
def _opened(address: Address) -> Arena:
    with open(_path(address), "r+b", buffering=0) as file:
        return Arena(file.fileno())
