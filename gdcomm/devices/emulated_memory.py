"""Page-locked, registered and mapped host memory of the emulated device, with CUDA's refusals."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from gdcomm.devices.memory import DeviceProperties, HostMemory
from gdcomm.errors import DeviceError

if TYPE_CHECKING:
    from gdcomm.devices.base import Buffer

__all__ = ["EmulatedHostMemory"]

_PAGE = mmap.PAGESIZE


class EmulatedHostMemory(HostMemory):
    """Host memory that the emulated device knows.

    Attributes:
        emulated_properties: what `properties` says; set another to emulate another machine.
        host_limit: bytes that can be page-locked in all; more is refused, as CUDA does when memory is short.
        readonly_pages: addresses of pages that the process may only read (the system knows, NumPy does not).
    """

    emulated_properties = DeviceProperties(name="emulated")
    host_limit: int | None = None
    readonly_pages: frozenset[int] = frozenset()

    # The parts of EmulatedDevice that are used here.
    _lock: Any
    _pinned: Any
    _registered: Any
    _memory: Any
    stats: dict[str, int]
    pinned: Any

    def properties(self) -> DeviceProperties:
        return self.emulated_properties

    def host_allocate(self, nbytes: int, *, write_combined: bool = False) -> np.ndarray[Any, Any]:
        with self._lock:
            self._require(nbytes, "allocated")
            self._count("host_allocate")
            block: np.ndarray[Any, Any] = self.pinned(nbytes)
            if write_combined and nbytes:
                combined = self._write_combined()
                combined.add(block.ctypes.data)
                weakref.finalize(block.base, combined.discard, block.ctypes.data).atexit = False
        return block

    def host_register(self, address: int, nbytes: int, *, readonly: bool = False) -> None:
        if address % _PAGE or nbytes % _PAGE or nbytes <= 0:
            raise DeviceError(f"{nbytes} bytes at {address:#x} can't be registered: not whole pages")
        if not self.emulated_properties.host_register_supported:
            raise DeviceError("this device can't register memory (cudaErrorNotSupported)")
        if readonly and not self.emulated_properties.host_register_readonly_supported:
            raise DeviceError("this device can't register read-only memory (cudaErrorNotSupported)")
        pages = range(address, address + nbytes, _PAGE)
        if not readonly and not self.readonly_pages.isdisjoint(pages):
            raise DeviceError(f"memory at {address:#x} can't be registered: read-only pages (cudaErrorInvalidValue)")
        with self._lock:
            self._require(nbytes, "registered")
            if self._registered.overlaps(address, address + nbytes) or self._allocated(address, nbytes):
                raise DeviceError(f"{nbytes} bytes at {address:#x}: already registered, at least a part of it")
            self._registered.add(address, nbytes)
            self._count("host_register")

    def host_unregister(self, address: int) -> None:
        with self._lock:
            found = self._registered.at(address)
            if found is None or found[0] != address:
                raise DeviceError(f"memory at {address:#x} can't be unregistered: no registration begins there")
            self._registered.drop(address)
            self._count("host_unregister")

    def memory_at(self, address: int) -> tuple[str, int | None]:
        with self._lock:
            if self._memory.at(address):
                return "device", self.emulated_properties.index
            if self._registered.at(address):
                return "registered", None
            block = self._pinned.at(address)
        if block is None:
            return "pageable", None
        return "write-combined" if block[0] in self._write_combined() else "pinned", None

    def is_pinned(self, address: int) -> bool:
        with self._lock:
            return self._pinned.at(address) is not None or self._registered.at(address) is not None

    def device_view(self, host: np.ndarray[Any, Any]) -> Any:
        from gdcomm.devices.emulated import EmulatedArray

        device: Any = self
        if host.nbytes and not self.emulated_properties.coherent and not self.is_pinned(host.ctypes.data):
            raise DeviceError(f"memory at {host.ctypes.data:#x} is not page-locked, so the device can't reach it")
        return EmulatedArray(device, host, host)  # type: ignore[arg-type]

    def _host_view(self, buffer: Buffer) -> np.ndarray[Any, Any] | None:
        """The elements of a buffer in host memory, if the device reaches all of it."""
        raw = np.dtype(f"V{buffer.dtype.itemsize}")
        steps = buffer.strides or ()
        spans = [(n - 1) * step for n, step in zip(buffer.shape, steps)]  # noqa: B905 - () when contiguous
        low = buffer.ptr + sum(span for span in spans if span < 0)
        high = buffer.ptr + (sum(span for span in spans if span > 0) + raw.itemsize if steps else buffer.nbytes)
        if not self.emulated_properties.coherent and not (self.is_pinned(low) and self.is_pinned(high - 1)):
            return None
        memory: Any = (ctypes.c_ubyte * (high - low)).from_address(low)
        return np.ndarray(buffer.shape, raw, memory, buffer.ptr - low, buffer.strides)

    def _allocated(self, address: int, nbytes: int) -> bool:
        """Whether the first or last page lies in a block of `pinned` (blocks don't fill their pages here)."""
        for page in (address, address + nbytes - _PAGE):
            found = self._pinned.at(page)
            if found is not None and self._pinned.end(found[0]) >= page + _PAGE:
                return True
        return False

    def _require(self, nbytes: int, what: str) -> None:
        used = self._pinned.total() + self._registered.total()
        if self.host_limit is not None and used + nbytes > self.host_limit:
            raise DeviceError(f"{nbytes} bytes can't be {what}: out of memory (cudaErrorMemoryAllocation)")

    def _write_combined(self) -> set[int]:
        found: set[int] = self.__dict__.setdefault("_combined", set())
        return found

    def _count(self, what: str) -> None:
        self.stats[what] = self.stats.get(what, 0) + 1
