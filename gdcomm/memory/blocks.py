"""Blocks of page-locked memory: their sizes, and how they are allocated."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from gdcomm.devices.base import Device, Event
from gdcomm.devices.memory import address_of
from gdcomm.errors import BufferSpecError, DeviceError
from gdcomm.memory.pages import Pages

__all__ = ["Block", "allocate", "size_class"]

_SMALLEST = 4096
_STEPS = 8  # size classes in an octave: a block is at most 12.5 % larger than asked
_OWN_PAGES = 4 << 20  # bytes: from here on, pages touched by several threads and registered beat cudaHostAlloc
_Array = np.ndarray[Any, Any]


def size_class(nbytes: int) -> int:
    """The size of the block that serves `nbytes`: at least 4 KiB, else at most 12.5 % larger."""
    if nbytes <= _SMALLEST:
        return _SMALLEST
    step = (1 << ((nbytes - 1).bit_length() - 1)) // _STEPS
    return -(-nbytes // step) * step


class Block:
    """A piece of page-locked memory of the pool.

    Attributes:
        key: blocks of equal keys are alike: bytes, or (bytes, write-combined, NUMA node asked for).
            None: it is not used again.
        era: of the pool; a forked child begins a new one, and blocks of the old one are not its own.
        uses: events of copies that touch it, noted while an array lies over it.
        mapped: whether that array was asked for as mapped memory.
        counted: whether it is lent to a lease or an array of the user.
    """

    __slots__ = ("address", "array", "counted", "era", "key", "mapped", "nbytes", "uses")

    def __init__(self, array: _Array, key: Hashable, era: object) -> None:
        self.array, self.key, self.era = array, key, era
        self.address, self.nbytes = address_of(array), array.nbytes
        self.uses: list[Event] = []
        self.mapped = self.counted = False

    @property
    def write_combined(self) -> bool:
        """Whether the CPU should only write it."""
        return isinstance(self.key, tuple) and self.key[1]


def allocate(device: Device, nbytes: int, write_combined: bool, node: int | None, staging: bool) -> _Array:
    """New page-locked memory as uint8 (blocks); the last view that goes frees it.

    Args:
        device: page-locks it.
        nbytes: a multiple of the page size.
        write_combined: not cached by the CPU.
        node: the NUMA node wanted; None: the device's, for large blocks, where that is known.
        staging: take pageable memory, with a warning, where there is no other.

    Raises:
        BufferSpecError: there is no such node.
        DeviceError: the system has no such memory, or the device can't take it from a node.
    """
    properties = device.properties()
    if node is not None and not properties.host_register_supported:
        raise DeviceError("numa: this GPU can't register memory that exists, so no node can be chosen; leave numa out")
    own_pages = properties.host_register_supported and (nbytes >= _OWN_PAGES or node is not None)
    if own_pages and not write_combined:
        try:
            return _registered_pages(device, nbytes, node, properties.numa_node)
        except DeviceError:
            if node is not None:
                raise
    if staging:
        return device.pinned(nbytes)
    return device.host_allocate(nbytes, write_combined=write_combined)


def _registered_pages(device: Device, nbytes: int, node: int | None, nearest: int | None) -> _Array:
    try:
        pages = Pages(nbytes, nearest if node is None else node)
    except BufferSpecError:
        if node is not None:
            raise
        pages = Pages(nbytes)  # the node next to the GPU is not ours to use
    address = pages.address
    device.host_register(address, nbytes)
    pages.undo = lambda: _unregister(device, address)
    array = pages.array()
    device.poison(array)
    return array


def _unregister(device: Device, address: int) -> None:
    try:
        device.host_unregister(address)
    except Exception:  # the interpreter or the device has ended: so has the registration
        pass
