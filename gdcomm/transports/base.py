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

from gdcomm.devices.base import Event

__all__ = ["Side", "split_spec"]


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
