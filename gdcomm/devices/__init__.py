"""Devices of this process: which there are, and which one an object belongs to."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gdcomm.devices.base import Buffer, Device, Event
from gdcomm.errors import DeviceError

if TYPE_CHECKING:
    from gdcomm.devices.cuda import CudaDevice

__all__ = ["Buffer", "Device", "Event", "current", "find", "install", "installed", "possible"]

_installed: list[Device] = []
_LIBRARIES = ("cupy", "torch", "numba.cuda", "jaxlib", "cuda", "pycuda", "rmm", "warp")
# By type, of types that may be on a GPU. What is described already is as it is.
_finders: dict[type, Callable[[Any, Any], Buffer | None]] = {Buffer: lambda buffer, _stream: buffer}
_cuda_state: list[CudaDevice | None] = []  # empty: not looked for yet


def install(device: Device) -> None:
    """Add a device (the emulated one, say); it is asked before CUDA."""
    _installed.insert(0, device)


def installed() -> list[Device]:
    """Devices known so far; does not look for CUDA."""
    return [*_installed, *(d for d in _cuda_state if d is not None)]


def cuda_device() -> CudaDevice | None:
    """The CUDA device door, loaded on first use; None when CuPy or a GPU is missing."""
    if not _cuda_state:
        try:
            from gdcomm.devices.cuda import CudaDevice

            _cuda_state.append(CudaDevice())
        except ImportError:
            _cuda_state.append(None)
    return _cuda_state[0]


def current() -> Device | None:
    """The device that this process moves data to and from: the installed one, else CUDA, else None."""
    return _installed[0] if _installed else cuda_device()


def find(obj: Any, stream: Any = None) -> Buffer | None:
    """Describe `obj` as device memory, or return None if it is host memory (or no array).

    Raises:
        DeviceError: it is on a GPU, but CuPy, which gdcomm reaches GPUs with, does not work here.
    """
    for device in _installed:
        buffer = device.find(obj, stream)
        if buffer is not None:
            return buffer
    kind = type(obj)
    finder = _finders.get(kind)
    if finder is None:
        if not _looks_cuda(kind):
            return None
        cuda = cuda_device()
        if cuda is None:
            _refuse_without_cupy(obj)
            return None
        finder = _finders[kind] = cuda.finder(kind)
    return finder(obj, stream)


def _looks_cuda(kind: type) -> bool:
    # A CUDA array can exist only where some CUDA library was loaded by the user.
    if hasattr(kind, "__cuda_array_interface__") or hasattr(kind, "__dlpack_device__"):
        return _library_loaded()
    return False


def _library_loaded() -> bool:
    return any(sys.modules.get(name) is not None for name in _LIBRARIES)  # None: its import is blocked


def possible() -> bool:
    """Whether device arrays can exist here: a device was installed, or a library that makes them is loaded."""
    return bool(installed()) or _library_loaded()


def _refuse_without_cupy(obj: Any) -> None:
    """MPI would read the address as host memory, and the process would die."""
    device = getattr(obj, "__dlpack_device__", None)
    on_gpu = device()[0] in (2, 13) if device is not None else True  # kDLCUDA, kDLCUDAManaged
    if on_gpu and hasattr(obj, "__cuda_array_interface__"):
        raise DeviceError(
            f"a {type(obj).__module__}.{type(obj).__name__} is on a GPU, and gdcomm needs CuPy to reach it: "
            "pip install cupy-cuda13x (or cupy-cuda12x, as your driver is)"
        )
