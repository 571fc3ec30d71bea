"""Host memory of its own pages, touched by several threads: far faster to page-lock than cudaHostAlloc allocates.

cudaHostAlloc lets one thread fault in 4 KiB pages. Here the memory is asked for in huge pages (2 MiB), several
threads fault them in at once, on the NUMA node wanted, and only then the device registers them.
"""

from __future__ import annotations

import functools
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from gdcomm.devices.memory import address_of
from gdcomm.errors import BufferSpecError, DeviceError, PinnedMemoryError

__all__ = ["HUGE", "PAGE", "Pages", "fill", "in_child", "node_cpus", "ordinary"]

PAGE = mmap.PAGESIZE
HUGE = 2 << 20
_PER_THREAD = 32 << 20  # bytes: less is not worth a thread
_MOST_THREADS = 8  # more gain nothing: the memory is busy
_Array = np.ndarray[Any, Any]


class Pages(mmap.mmap):
    """A mapping of zeroed memory, faulted in. The last array over it unmaps it, and calls `undo` before that.

    A forked child does not get the memory (touching it there ends the child): were it copied on write, the
    device would go on using pages that the parent no longer sees. RDMA memory is treated alike, for that reason.

    Args:
        nbytes: a multiple of the page size, over 0.
        node: the NUMA node whose CPUs touch the memory first, so that the system takes it from there.
        threads: that touch it; None chooses.
        huge: ask for huge pages.

    Raises:
        BufferSpecError: there is no such node, or this process may not use its CPUs.
        DeviceError: the system has no such memory.
    """

    address: int
    _offset: int
    _nbytes: int
    undo: Callable[[], None] | None = None  # a weak reference would tell too late, after the unmapping

    def __new__(cls, nbytes: int, node: int | None = None, *, threads: int | None = None, huge: bool = True) -> Pages:  # noqa: PYI034 - typing.Self needs Python 3.11
        cpus = None if node is None else node_cpus(node)
        try:
            self = super().__new__(cls, -1, nbytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise DeviceError(f"{nbytes} bytes of memory can't be had ({error}); free some, see `ulimit -v`") from error
        for advice in ("MADV_DONTFORK", *(("MADV_HUGEPAGE",) if huge else ())):
            if hasattr(mmap, advice):
                try:
                    self.madvise(getattr(mmap, advice))
                except OSError:  # a kernel without huge pages
                    pass
        whole = np.frombuffer(self, np.uint8)
        offset = -address_of(whole) % HUGE
        block = whole[offset : offset + nbytes]
        _in_parts(block, _touch, threads, cpus)
        self.address, self._offset, self._nbytes = address_of(block), offset, nbytes
        _mappings.add(self)
        return self

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def array(self) -> _Array:
        """The memory as uint8, aligned to huge pages."""
        return np.frombuffer(self, np.uint8, self._nbytes, self._offset)

    def __del__(self) -> None:
        if self.undo is not None:
            self.undo()


_mappings: weakref.WeakSet[Pages] = weakref.WeakSet()
_lost: list[Pages] = []


def ordinary(nbytes: int) -> _Array:
    """Page-aligned memory of at least a byte as uint8, not page-locked.

    Raises:
        PinnedMemoryError: the system has no such memory.
    """
    try:
        block = np.empty(nbytes + PAGE, np.uint8)
    except MemoryError as error:
        raise PinnedMemoryError(f"{nbytes} bytes of memory can't be had: {error}") from error
    return block[-block.ctypes.data % PAGE :][: max(nbytes, 1)]


def fill(block: _Array, value: int) -> None:
    """Set all bytes of a uint8 array, by several threads if it is large."""
    _in_parts(block, lambda part: part.fill(value), None, None)


def _touch(part: _Array) -> None:
    part[::PAGE] = 0  # one byte faults in a page; NumPy lets other threads run meanwhile


def _in_parts(block: _Array, work: Callable[[_Array], None], threads: int | None, cpus: frozenset[int] | None) -> None:
    if threads is None:
        threads = min(_MOST_THREADS, len(cpus or _allowed()), max(block.nbytes // _PER_THREAD, 1))
    if threads == 1 and cpus is None:
        work(block)
        return
    step = max(-(-block.nbytes // threads // HUGE) * HUGE, HUGE)

    errors: list[BaseException] = []

    def on_node(part: _Array) -> None:
        try:
            if cpus is not None:
                os.sched_setaffinity(0, cpus)  # of this thread, which ends here
            work(part)
        except BaseException as error:
            errors.append(error)

    # Plain threads: executors, and their import, fail once the main thread has ended.
    crew = [threading.Thread(target=on_node, args=(block[i : i + step],)) for i in range(0, block.nbytes, step)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    for error in errors:
        if not isinstance(error, OSError):
            raise error
        raise BufferSpecError(
            f"numa: this process may not use the CPUs {sorted(cpus or ())}, and only they place memory on "
            f"that node ({error}); start it with a wider CPU set, or leave numa out"
        ) from error


def _allowed() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


@functools.cache
def node_cpus(node: int, root: str = "/") -> frozenset[int] | None:
    """The CPUs of a NUMA node; None where all memory is of one node.

    Raises:
        BufferSpecError: there is no such node, or it has no CPUs.
    """
    folder = Path(root, "sys/devices/system/node")
    nodes = sorted(int(path.name[4:]) for path in folder.glob("node[0-9]*")) or [0]
    if node not in nodes:
        raise BufferSpecError(f"numa: this machine has no NUMA node {node}; its nodes are {nodes}")
    if len(nodes) == 1:
        return None
    cpus: set[int] = set()
    for part in (folder / f"node{node}/cpulist").read_text().strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    if not cpus:
        raise BufferSpecError(f"numa: node {node} has no CPUs (it is memory only), so nothing can touch memory there")
    return frozenset(cpus)


def in_child(method: Callable[[], None]) -> None:
    """Call a bound method in children that are forked while its object lives."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        found = reference()
        if found is not None:
            found()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call)


def _keep_in_child() -> None:
    # The child has holes at these addresses; unmapping them later would hit what it maps there itself.
    for mapping in _mappings:
        mapping.undo = None
        _lost.append(mapping)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_in_child)
