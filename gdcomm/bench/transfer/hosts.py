"""Host memory of every kind, for as long as a section needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np

import gdcomm
from gdcomm.bench.transfer.data import Array, page_aligned, spoil
from gdcomm.bench.transfer.kits import Kit

__all__ = ["KINDS", "LOCKED", "Host", "hosts", "wrong_in"]


class Host(NamedTuple):
    """Bytes of host memory; `view` is the kernels' view of them, where that was asked for."""

    array: Array
    view: Any = None

    def first(self, nbytes: int) -> Host:
        """Only the first bytes."""
        return Host(self.array[:nbytes], None if self.view is None else self.view[:nbytes])


def _pageable(nbytes: int, stack: ExitStack) -> Host:
    return Host(page_aligned(nbytes))


def _pinned(nbytes: int, stack: ExitStack) -> Host:
    return Host(gdcomm.pinned_empty(nbytes, np.uint8))


def _registered(nbytes: int, stack: ExitStack) -> Host:
    array = page_aligned(nbytes)
    spoil(array)  # registering is of pages that are there
    stack.enter_context(gdcomm.registered(array))
    return Host(array)


def _mapped(nbytes: int, stack: ExitStack) -> Host:
    made = gdcomm.mapped_empty(nbytes, np.uint8)
    return Host(made.host, made.device)


def _write_combined(nbytes: int, stack: ExitStack) -> Host:
    return Host(gdcomm.pinned_empty(nbytes, np.uint8, write_combined=True))


_MAKERS: dict[str, Callable[[int, ExitStack], Host]] = {
    "pageable": _pageable,
    "pinned": _pinned,
    "registered": _registered,
    "mapped": _mapped,
    "write-combined": _write_combined,
}
KINDS = tuple(_MAKERS)
LOCKED = KINDS[1:]


@contextmanager
def hosts(kind: str, nbytes: int, count: int) -> Iterator[list[Host]]:
    """So many pieces of memory of one kind; all pages are there."""
    with ExitStack() as stack:
        made = [_MAKERS[kind](nbytes, stack) for _ in range(count)]
        for host in made:
            spoil(host.array)
        yield made


def wrong_in(kit: Kit, kind: str, array: Array) -> int:
    """Bytes that are not the test data. What the CPU reads slowly is looked at on the device."""
    if kind == "write-combined" and kit.device is not None:
        there = kit.empty(array.nbytes)
        kit.device.copy(kit.address(there), array.ctypes.data, array.nbytes, kit.device.handle(None))
        return kit.wrong_there(there)
    return kit.wrong_here(array)
