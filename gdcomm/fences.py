"""Order of stores and loads in memory that processes share without locks.

What this package assumes: a store that comes before another one in the program is seen before it by other processes,
and a load is not made before one that precedes it. x86-64 gives that by itself. Other machines may change the order,
so there `fence` has to stand between the two. Python has no such instruction; MPI has: on a window,
`MPI_Win_sync` is a full barrier of the processor (MPI 4.1, section 12.7). It takes 0.1 us.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable

from mpi4py import MPI

__all__ = ["Fence", "open_fence"]

Fence = Callable[[], None]


def _ordered() -> None:
    """Nothing has to be done."""


def open_fence() -> Fence | None:
    """What puts all stores and loads before it before all those after it; None if there is no such thing here."""
    if platform.machine().lower() in ("x86_64", "amd64"):
        return _ordered
    with contextlib.suppress(MPI.Exception, NotImplementedError):
        window = MPI.Win.Allocate_shared(8, 8, comm=MPI.COMM_SELF)
        window.Lock_all(MPI.MODE_NOCHECK)  # MPI_Win_sync is for windows that are locked
        window.Sync()
        return window.Sync
    return None
