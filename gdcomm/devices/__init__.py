"""Devices of this process: which there are, and which one an object belongs to."""

from __future__ import annotations

import sys
from typing import Any

from gdcomm.devices.base import Buffer, Device, Event

__all__ = ["Buffer", "Device", "Event", "find", "install", "installed"]

_installed: list[Device] = []
_cuda_state: list[Device | None] = []  # empty: not looked for yet


def install(device: Device) -> None:
    """Add a device (the emulated one, say); it is asked before CUDA."""
    _installed.insert(0, device)


def installed() -> list[Device]:
    """Devices known so far; does not look for CUDA."""
    return [*_installed, *(d for d in _cuda_state if d is not None)]


def cuda_device() -> Device | None:
    """The CUDA device door, loaded on first use; None when CuPy or a GPU is missing."""
    if not _cuda_state:
        try:
            from gdcomm.devices.cuda import CudaDevice

            _cuda_state.append(CudaDevice())
        except ImportError:
            _cuda_state.append(None)
    return _cuda_state[0]


def find(obj: Any, stream: Any = None) -> Buffer | None:
    """Describe `obj` as device memory, or return None if it is host memory (or no array)."""
    for device in _installed:
        buffer = device.find(obj, stream)
        if buffer is not None:
            return buffer
    if not _looks_cuda(obj):
        return None
    cuda = cuda_device()
    return None if cuda is None else cuda.find(obj, stream)


def _looks_cuda(obj: Any) -> bool:
    # A CUDA array can exist only where some CUDA library was loaded by the user.
    if hasattr(type(obj), "__cuda_array_interface__") or hasattr(type(obj), "__dlpack_device__"):
        return any(name in sys.modules for name in ("cupy", "torch", "numba.cuda", "jaxlib", "cuda"))
    return False
