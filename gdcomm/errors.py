"""The error tree. Each message names the argument, what was given and what to do.

Imports nothing heavy: catching a gdcomm error needs neither MPI nor CUDA.
"""

from __future__ import annotations

__all__ = [
    "BufferSpecError",
    "ClosedError",
    "CommTimeoutError",
    "DeviceError",
    "GdcommError",
    "NoPathError",
    "PinnedMemoryError",
]


class GdcommError(Exception):
    """Base of every error that gdcomm raises on its own account."""


class BufferSpecError(GdcommError, ValueError, TypeError, BufferError):
    """A buffer argument is not usable; nothing has been sent, no buffer was touched.

    It is also a ValueError, TypeError and BufferError, since mpi4py raises one
    or another of these for the same faults.
    """


class DeviceError(GdcommError, RuntimeError):
    """A device array can't be handled here: wrong device, or no CUDA library to reach it."""


class NoPathError(GdcommError, RuntimeError):
    """The path asked for can't carry this operation; the text says why, transport by transport."""


class ClosedError(GdcommError, RuntimeError):
    """The object was used after it was closed or freed."""


class CommTimeoutError(GdcommError, TimeoutError):
    """A wait took longer than its time-out allows."""


class PinnedMemoryError(GdcommError, MemoryError):
    """The page-locked memory asked for goes beyond the budget (GDCOMM_PINNED_LIMIT) or what the system can give."""
