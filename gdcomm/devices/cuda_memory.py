"""Page-locked, registered and mapped host memory of CUDA devices."""

from __future__ import annotations

import ctypes
import functools
import operator
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from gdcomm.devices.memory import DeviceProperties, HostMemory
from gdcomm.errors import DeviceError

__all__ = ["CudaHostMemory", "attributes", "is_contiguous"]

_UNREGISTERED, _HOST, _DEVICE, _MANAGED = range(4)  # cudaMemoryType
_PORTABLE, _MAPPED, _WRITE_COMBINED, _READ_ONLY = 1, 2, 4, 8  # WriteCombined is of hostAlloc, ReadOnly of hostRegister
_NOT_REGISTERED, _ALREADY_REGISTERED = 713, 712  # cudaError
_MEMPOOL_HANDLE = 17  # CUpointer_attribute
_HOST_NUMA_ID = 134  # cudaDeviceAttr, CUDA 12.2
_ATTRIBUTES = {  # cudaDeviceAttr, by number: older CuPy lacks some names
    "can_map_host_memory": 19,
    "host_register_supported": 99,
    "host_register_readonly_supported": 113,
    "can_use_host_pointer_for_registered_mem": 91,
    "pageable_memory_access": 88,
    "pageable_memory_access_uses_host_page_tables": 100,
    "host_native_atomic": 86,
    "managed": 83,
    "concurrent_managed_access": 89,
    "memory_pools": 115,
}
_ADVICE = "check free memory (`free -m`, the cgroup's limit) and `ulimit -l`"


# Whether a CuPy array is C-contiguous; CuPy's own attribute takes a fifth of the time of the flags.
is_contiguous: Callable[[Any], bool] = operator.attrgetter(
    "_c_contiguous" if hasattr(cupy.ndarray, "_c_contiguous") else "flags.c_contiguous"
)
_thread = threading.local()


def attributes(address: int) -> Any:
    """CUDA's attributes of an address.

    In a thread that has not called CUDA before there is no context, and without one the driver calls everything
    unregistered: device memory would pass for the host's.
    """
    if not getattr(_thread, "ready", False):
        runtime.setDevice(runtime.getDevice())
        _thread.ready = True
    return runtime.pointerGetAttributes(address)


class CudaHostMemory(HostMemory):
    """Page-locked host memory, through the CUDA runtime; flags and pools, which CuPy lacks, through the driver."""

    def properties(self) -> DeviceProperties:
        return _properties(cupy.cuda.get_device_id())

    def host_allocate(self, nbytes: int, *, write_combined: bool = False) -> np.ndarray[Any, Any]:
        if not nbytes:
            return np.empty(0, np.uint8)
        flags = _PORTABLE | _MAPPED | (_WRITE_COMBINED if write_combined else 0)
        try:
            pointer = runtime.hostAlloc(nbytes, flags)  # not CuPy's pool: it rounds up to powers of two
        except runtime.CUDARuntimeError as error:
            raise DeviceError(f"{nbytes} bytes can't be page-locked ({error}); {_ADVICE}") from error
        block: Any = (ctypes.c_ubyte * nbytes).from_address(pointer)
        weakref.finalize(block, _quietly, runtime.freeHost, pointer).atexit = False  # the driver frees it at exit
        return np.frombuffer(block, np.uint8)

    def pinned(self, nbytes: int) -> np.ndarray[Any, Any]:
        """As `host_allocate`, but pageable memory, with a warning, where there is no page-locked one."""
        try:
            return self.host_allocate(nbytes)
        except DeviceError as error:
            # Copies to and from pageable memory are right too, and slower; everything here waits as for pinned.
            warnings.warn(f"staging through pageable memory: {error}", RuntimeWarning, stacklevel=2)
            return np.empty(nbytes, np.uint8)

    def host_register(self, address: int, nbytes: int, *, readonly: bool = False) -> None:
        try:
            runtime.hostRegister(address, nbytes, _PORTABLE | _MAPPED | (_READ_ONLY if readonly else 0))
        except runtime.CUDARuntimeError as error:
            why = _ADVICE
            if error.status == _ALREADY_REGISTERED:
                why = "another library has registered a part of it; undo that, or give memory of its own pages"
            raise DeviceError(f"{nbytes} bytes at {address:#x} can't be registered ({error}); {why}") from error

    def host_unregister(self, address: int) -> None:
        try:
            runtime.hostUnregister(address)
        except runtime.CUDARuntimeError as error:
            why = "it is not registered" if error.status == _NOT_REGISTERED else "the device is in error"
            raise DeviceError(f"memory at {address:#x} can't be unregistered ({error}): {why}") from error

    def memory_at(self, address: int) -> tuple[str, int | None]:
        found = attributes(address)
        if found.type == _MANAGED:
            return "managed", int(found.device)
        if found.type == _DEVICE:
            return "async-pool" if _pool_handle(address) else "device", int(found.device)
        if found.type != _HOST:
            return "pageable", None
        # Registered memory has flags too: that it was registered is known only to who did it.
        return "write-combined" if _allocation_flags(address) & _WRITE_COMBINED else "pinned", None

    def is_pinned(self, address: int) -> bool:
        return bool(attributes(address).type == _HOST)

    def device_view(self, host: np.ndarray[Any, Any]) -> Any:
        pointer = host.ctypes.data
        found = attributes(pointer)
        if found.type == _HOST:
            pointer = found.devicePointer
        elif not self.properties().coherent and host.nbytes:
            raise DeviceError(f"memory at {pointer:#x} is not page-locked, and this GPU can't reach other host memory")
        memory = cupy.cuda.UnownedMemory(pointer, max(host.nbytes, 1), host, cupy.cuda.get_device_id())
        order = "C" if host.flags.c_contiguous else "F"
        return cupy.ndarray(host.shape, host.dtype, cupy.cuda.MemoryPointer(memory, 0), order=order)


@functools.cache
def _properties(gpu: int) -> DeviceProperties:
    def attribute(number: int) -> int:
        try:
            return int(runtime.deviceGetAttribute(number, gpu))
        except runtime.CUDARuntimeError:  # a driver that does not know it
            return 0

    name = runtime.getDeviceProperties(gpu)["name"]
    pci = runtime.deviceGetPCIBusId(gpu).lower()
    return DeviceProperties(
        name=name.decode() if isinstance(name, bytes) else str(name),
        index=gpu,
        pci_bus_id=pci,
        numa_node=_numa_node(pci, attribute(_HOST_NUMA_ID)),
        **{field: bool(attribute(number)) for field, number in _ATTRIBUTES.items()},
    )


def _numa_node(pci: str, told: int) -> int | None:
    try:
        node = int(Path(f"/sys/bus/pci/devices/{pci}/numa_node").read_text())
    except (OSError, ValueError):
        node = told or -1  # 0 is also what a driver that does not know the attribute says
    return node if node >= 0 else None


@functools.cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _pool_handle(address: int) -> int:
    """The memory pool that a device address was allocated from by the stream-ordered allocator, or 0."""
    handle = ctypes.c_void_p()
    get = getattr(_driver(), "cuPointerGetAttribute", None)
    if get is None or get(ctypes.byref(handle), ctypes.c_int(_MEMPOOL_HANDLE), ctypes.c_uint64(address)):
        return 0
    return handle.value or 0


def _allocation_flags(address: int) -> int:
    """The flags that page-locked memory was allocated or registered with; 0 if the driver does not tell."""
    flags = ctypes.c_uint()
    get = getattr(_driver(), "cuMemHostGetFlags", None)
    if get is None:
        return 0
    return 0 if get(ctypes.byref(flags), ctypes.c_void_p(address)) else flags.value


def _quietly(free: Any, pointer: int) -> None:
    """Free memory when the interpreter may be ending and the driver gone."""
    try:
        free(pointer)
    except runtime.CUDARuntimeError:
        pass
