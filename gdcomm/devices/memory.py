"""Page-locked, registered and mapped host memory of a device, and what kind of memory an address is."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np

__all__ = ["DeviceProperties", "HostMemory", "address_of"]


def address_of(block: np.ndarray[Any, Any]) -> int:
    """The address of a writable, contiguous array that is not empty, in a third of the time of `.ctypes.data`."""
    memory: Any = block
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class DeviceProperties(NamedTuple):
    """What decides how memory is moved between the host and this GPU. Names are those of CUDA's attributes.

    Args:
        name: of the GPU.
        index: of the GPU in this process.
        pci_bus_id: as in /sys/bus/pci/devices, or "".
        numa_node: the host memory node that the GPU is attached to; None where the system does not tell.
        can_map_host_memory: kernels reach page-locked host memory.
        host_register_supported: memory that exists can be page-locked in place.
        host_register_readonly_supported: so can memory that the process may only read.
        can_use_host_pointer_for_registered_mem: kernels reach registered memory by its host address.
        pageable_memory_access: kernels reach all host memory.
        pageable_memory_access_uses_host_page_tables: they do so in hardware, as fast as page-locked memory.
        host_native_atomic: atomic operations of kernels on host memory are atomic for the CPU too.
        managed: there is managed (unified) memory.
        concurrent_managed_access: CPU and GPU may use it at the same time.
        memory_pools: there is stream-ordered allocation.
    """

    name: str = ""
    index: int = 0  # type: ignore[assignment]  # tuples have a method of that name
    pci_bus_id: str = ""
    numa_node: int | None = None
    can_map_host_memory: bool = True
    host_register_supported: bool = True
    host_register_readonly_supported: bool = True
    can_use_host_pointer_for_registered_mem: bool = True
    pageable_memory_access: bool = False
    pageable_memory_access_uses_host_page_tables: bool = False
    host_native_atomic: bool = False
    managed: bool = True
    concurrent_managed_access: bool = True
    memory_pools: bool = True

    @property
    def coherent(self) -> bool:
        """Whether ordinary host memory is as good as mapped memory (Grace Hopper and its like)."""
        return self.pageable_memory_access and self.pageable_memory_access_uses_host_page_tables


class HostMemory(ABC):
    """Page-locked memory of a device. CUDA's rules hold for all devices:

    - A page is registered once; registering it again is refused, and so is unregistering an address at
      which no registration begins.
    - A copy that touches host memory of which one part is page-locked and another is not is refused: see
      `gdcomm.memory.registered.pieces`.
    """

    @abstractmethod
    def properties(self) -> DeviceProperties:
        """Of the current GPU. The answer is cached; a call takes less than a microsecond."""

    @abstractmethod
    def host_allocate(self, nbytes: int, *, write_combined: bool = False) -> np.ndarray[Any, Any]:
        """Allocate page-locked memory as a uint8 array (uninitialised; blocks).

        The last view that goes frees it. `pinned` is the same, but falls back to pageable memory.

        Raises:
            DeviceError: the system does not give that much.
        """

    @abstractmethod
    def host_register(self, address: int, nbytes: int, *, readonly: bool = False) -> None:
        """Page-lock memory that exists (blocks); kernels and copies reach it until `host_unregister`.

        Args:
            address: page-aligned.
            nbytes: a multiple of the page size.
            readonly: the process may only read the memory, and so may the device.

        Raises:
            DeviceError: some of it is registered already, is no memory, or can't be page-locked.
        """

    @abstractmethod
    def host_unregister(self, address: int) -> None:
        """Undo the `host_register` of this address; copies that use the memory must be done.

        Raises:
            DeviceError: no registration begins there.
        """

    @abstractmethod
    def memory_at(self, address: int) -> tuple[str, int | None]:
        """What the driver knows of an address.

        Returns:
            "pageable", "pinned", "registered", "write-combined", "managed", "device" or "async-pool", and for
            the last three the index of the GPU.
        """

    @abstractmethod
    def is_pinned(self, address: int) -> bool:
        """Tell whether `address` is page-locked host memory."""

    @abstractmethod
    def device_view(self, host: np.ndarray[Any, Any]) -> Any:
        """An array of the device's library over the memory of a host array, which it keeps alive.

        Args:
            host: contiguous; page-locked, except on coherent machines.
        """
