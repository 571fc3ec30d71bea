"""Memory that the CPU and kernels use at the same time, without copies."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gdcomm import devices
from gdcomm.errors import BufferSpecError, DeviceError
from gdcomm.memory.arrays import Shape, checked, pinned_empty
from gdcomm.memory.pinned import pool_of

__all__ = ["Mapped", "mapped_empty"]


class Mapped:
    """One piece of memory as two arrays.

    Attributes:
        host: NumPy array.
        device: array of the device's library (CuPy). Kernels that use it read and write host memory over the
            link: right for what is touched once or sparsely.
    """

    __slots__ = ("device", "host")

    def __init__(self, host: np.ndarray[Any, Any], device: Any) -> None:
        self.host, self.device = host, device

    @property
    def shape(self) -> tuple[int, ...]:
        """Of both arrays."""
        return self.host.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of both arrays."""
        return self.host.dtype

    @property
    def nbytes(self) -> int:
        """Of either array."""
        return self.host.nbytes

    def __repr__(self) -> str:
        return f"Mapped(shape={self.shape}, dtype={self.dtype}, address={self.host.ctypes.data:#x})"


def mapped_empty(
    shape: Shape, dtype: npt.DTypeLike = float, *, write_combined: bool = False, numa: int | None = None
) -> Mapped:
    """Return uninitialised memory that both the host and kernels use, zero-copy.

    What a kernel writes is seen by the host once the kernel's stream (or an event after it) was waited for; what
    the host writes is seen by kernels launched after it. The memory lives as long as either array or a view; see
    `pinned_empty` for when it is used again, and for what is raised. On coherent machines (Grace Hopper) it is
    ordinary memory, which kernels reach as fast.

    Args:
        shape: an int or ints.
        dtype: one that the device's library has, in the native byte order.
        write_combined: see `pinned_empty`.
        numa: see `pinned_empty`.

    Raises:
        PinnedMemoryError: over the budget, see `GDCOMM_PINNED_LIMIT`. (It is a MemoryError.)
        BufferSpecError: an argument can't be used.
        DeviceError: there is no GPU, or it can't reach host memory.
    """
    device = devices.current()
    if device is None:
        raise DeviceError(
            "mapped_empty: no GPU is reached here; install CuPy (pip install cupy-cuda13x, or cupy-cuda12x, as your "
            "driver is), or use NumPy arrays"
        )
    extents, kind, nbytes = checked(shape, dtype)
    if not kind.isnative:
        raise BufferSpecError(f"dtype: {kind} has the other byte order, which GPUs don't know; give the native one")
    if device.properties().coherent and numa is None and not write_combined:
        memory: Any = pool_of(device).hold_ordinary(nbytes)
        host: np.ndarray[Any, Any] = np.ndarray(extents, kind, memory)
    else:
        host = pinned_empty(extents, kind, write_combined=write_combined, mapped=True, numa=numa)
    try:
        return Mapped(host, device.device_view(host))
    except (TypeError, ValueError) as error:
        raise BufferSpecError(f"dtype: {host.dtype} is no dtype of the device's library ({error})") from error
