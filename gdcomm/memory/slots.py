"""Small page-locked blocks of one thread, for copies that take a microsecond or two."""

from __future__ import annotations

from typing import Any

import numpy as np

from gdcomm.devices.base import Device, Event
from gdcomm.devices.memory import address_of

__all__ = ["Slot", "Slots"]

_Array = np.ndarray[Any, Any]


class Slot:
    """A small pinned block for one blocking call; `event` is that of the last copy out of it."""

    __slots__ = ("address", "array", "event")

    def __init__(self, array: _Array) -> None:
        self.array = array
        self.address = address_of(array)
        self.event: Event | None = None

    def release(self, event: Event | None) -> None:
        """Give it back to the ring; it is used again once `event` is done."""
        self.event = event


class Slots:
    """One thread's ring of small pinned blocks: no lock, no search, no allocation.

    Args:
        device: of the copies.
        memory: page-locked, of `SIZE * COUNT` bytes.

    Attributes:
        ring: the slots.
    """

    SIZE = 64 << 10  # bytes
    COUNT = 16

    def __init__(self, device: Device, memory: _Array) -> None:
        self._device = device
        self.ring = [Slot(memory[i * self.SIZE : (i + 1) * self.SIZE]) for i in range(self.COUNT)]
        self._next = 0

    def take(self) -> Slot:
        """The slot that was used longest ago, once the copy out of it is done."""
        slot = self.ring[self._next]
        self._next = (self._next + 1) % self.COUNT
        if slot.event is not None:
            slot.event.synchronize()
            slot.event = None
        self._device.poison(slot.array)
        return slot
