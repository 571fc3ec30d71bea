"""Rows of pageable memory: CPU threads gather them into pinned slots while earlier slots are copied."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

import numpy as np

from gdcomm.devices.base import Buffer, Event
from gdcomm.memory.pinned import pool_of
from gdcomm.transfer.crew import cpu_count, crew

__all__ = ["gather_by_cpu"]

_Array = np.ndarray[Any, Any]
SLOT_NBYTES = 2 << 20
FOR_ONE = 128 << 10  # bytes that one thread gathers in the time that another one needs to wake up
THREADS = min(8, cpu_count())  # beyond it the memory is the limit, not the cores


def gather_by_cpu(out: Buffer, table: _Array, index: _Array, fill: int) -> None:
    """Fill the contiguous device buffer `out` with rows `index` of a host array, on its stream.

    Args:
        out: `index.size` rows.
        table: host memory; read before this returns.
        index: 1-d, from 0 to `len(table)`, which stands for a row whose bytes are all `fill`.
        fill: a byte.
    """
    device, stream = out.device, out.stream
    row_nbytes = out.nbytes // index.size
    least = max(FOR_ONE // row_nbytes, -(-index.size // THREADS))  # a few rows are not worth a second thread
    step = max(1, min(SLOT_NBYTES // row_nbytes, least))
    room, starts = step * row_nbytes, range(0, index.size, step)
    memory, lease = _slots(out, room, min(2 * THREADS, len(starts)))
    slots: SimpleQueue[tuple[_Array, Event | None]] = SimpleQueue()
    for first in range(0, memory.size - room + 1, room):
        slots.put((memory[first : first + room], None))
    here, work = device.here(), iter(starts)

    def gather() -> None:
        with here:
            for start in work:
                slot, event = slots.get()
                try:
                    if event is not None:
                        event.synchronize()  # the copy out of the slot
                    rows = index[start : start + step]
                    filled = slot[: rows.size * row_nbytes]
                    _pack(table, rows, filled, fill)
                    device.to_device(out, filled, start * row_nbytes)
                    event = device.record(stream)
                finally:
                    slots.put((slot, event))  # also after an error: other threads wait for slots

    try:
        crew().run(gather, min(THREADS, len(starts)) - 1)
    finally:
        if lease is not None:
            lease.release(device.record(stream))


def _slots(out: Buffer, room: int, count: int) -> tuple[_Array, Any]:
    """Memory for up to `count` slots, and its lease: as many as the budget for page-locked memory allows."""
    pool = pool_of(out.device)
    while count:
        try:
            lease = pool.lease(room * count)
            return lease.array, lease
        except MemoryError:
            count //= 2
    return np.empty(room, np.uint8), None  # the driver's detour is slow, and as right


def _pack(table: _Array, index: _Array, target: _Array, fill: int) -> None:
    bad = index >= len(table)
    if bad.all():
        target[:] = fill
        return
    rows = target.view(table.dtype).reshape(index.size, *table.shape[1:])
    found = np.where(bad, 0, index) if bad.any() else index
    if table.flags.c_contiguous:
        np.take(table, found, axis=0, out=rows, mode="clip")  # without the lock of the interpreter
    else:
        rows[...] = table[found]
    if bad.any():
        target.reshape(index.size, -1)[bad] = fill
