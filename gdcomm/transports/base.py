"""Sides: how one buffer argument of an operation is shown to MPI.

The contract, true of every transport: **when a call returns, the operation is ordered
on its stream**. Work queued there before is seen by it; work queued after it sees the
result and may overwrite its input. For host buffers the stream is the calling thread.
A request gives the same promise when Wait or Test says that it is complete.

An operation handles each side in four steps, in this order:

1. `begin()`  queue what MPI must find in memory (packing, copy to the host);
2. `ready()`  block until that has happened: after it MPI may read and write `spec`;
3. MPI does its part with `spec`, a plain mpi4py buffer argument;
4. `end(nbytes)`, where `finishes`: queue what the user must find in the array; returns an event,
   or None when the data is already in place.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from gdcomm.devices.base import Event

__all__ = ["Side", "derived", "is_in_place", "prefix", "reach", "split_spec", "type_per_rank"]


class Side(Protocol):
    """One buffer argument on its way through MPI; usable again after `end` (persistent requests)."""

    spec: Any
    finishes: bool  # `end` has work to do
    holds: bool  # `close` has something to give back

    def begin(self) -> None:
        """Queue the preparation of what MPI reads."""

    def ready(self) -> None:
        """Block until MPI may use `spec`."""

    def end(self, nbytes: int | None) -> Event | None:
        """Queue the result: the first `nbytes` received bytes, or everything (None)."""

    def close(self) -> None:
        """Give resources back; idempotent. No `begin` after it."""


def split_spec(spec: Any) -> tuple[Any, tuple[Any, ...]]:
    """Split a buffer argument into the array and the rest (counts, displacements, datatype)."""
    if isinstance(spec, (list, tuple)) and spec:
        return spec[0], tuple(spec[1:])
    return spec, ()


def is_in_place(spec: Any) -> bool:
    """Whether a buffer argument says "in place"; None does too (where it does not mean "not the root")."""
    return spec is None or (type(spec) is type(MPI.IN_PLACE) and spec == MPI.IN_PLACE)


def type_per_rank(item: Any) -> bool:
    """Whether a part of a buffer argument holds one datatype for each rank (Alltoallw)."""
    return isinstance(item, (list, tuple)) and any(isinstance(part, MPI.Datatype) for part in item)


def derived(item: Any) -> bool:
    """Whether a part of a buffer argument is a derived datatype, or holds one: such a type addresses memory."""
    if isinstance(item, MPI.Datatype):
        return not item.is_predefined
    return isinstance(item, (list, tuple)) and any(derived(part) for part in item)


def prefix(rest: tuple[Any, ...], nbytes: int, itemsize: int) -> int | None:
    """How many of an array's `nbytes` bytes a buffer argument covers, from the first one on and without gaps.

    None if it is of another form: with displacements, or of a derived datatype.
    """
    count = None
    for item in rest:
        if isinstance(item, str):
            item = MPI.Datatype.fromcode(item)
        if isinstance(item, MPI.Datatype) and item.is_predefined:
            itemsize = item.Get_size()
        elif isinstance(item, int) and count is None:
            count = item
        elif item is not None:
            return None
    return nbytes if count is None else min(count * itemsize, nbytes)


def reach(rest: tuple[Any, ...], itemsize: int, blocks: int = 1) -> int:
    """The byte of the array where explicit counts and displacements end; 0 if there are none.

    Args:
        rest: what follows the array in the buffer argument, in any of mpi4py's forms.
        itemsize: bytes of an element where no datatype is given.
        blocks: blocks of a single count (one a rank).
    """
    parts = [*rest]
    unit: Any = itemsize
    step: Any = None  # of displacements: elements, but bytes where there is one datatype for each rank
    if parts and isinstance(parts[-1], MPI.Datatype):
        unit = parts.pop().Get_extent()[1]
    elif parts and type_per_rank(parts[-1]):
        unit, step = np.array([t.Get_extent()[1] for t in parts.pop()]), 1
    elif parts and isinstance(parts[-1], str):
        unit = MPI.Datatype.fromcode(parts.pop()).Get_extent()[1]
    if not parts or parts[0] is None:
        return 0
    counts, displs = parts[0], parts[1] if len(parts) > 1 else None
    if displs is None and isinstance(counts, tuple) and len(counts) == 2 and not isinstance(counts[0], int):
        counts, displs = counts
    if counts is None:
        return 0
    if np.ndim(counts) == 0:
        return int(counts) * int(np.max(unit)) * blocks + int(displs or 0) * int(np.max(unit))
    ends = np.asarray(counts, np.int64) * unit
    starts = np.cumsum(ends) - ends if displs is None else np.asarray(displs, np.int64) * (step or unit)
    return int(np.max(np.where(ends > 0, starts + ends, 0), initial=0))
