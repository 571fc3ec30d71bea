"""What kind of memory an array lies in, which decides how fast it is copied."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from gdcomm import devices
from gdcomm.errors import BufferSpecError
from gdcomm.memory.pinned import block_at
from gdcomm.memory.registered import registry_of

__all__ = ["MemoryKind", "kind_of", "memory_kind"]

_LOCKED = ("pinned", "registered", "mapped", "write-combined")
_HELP = "give an array of NumPy, CuPy, torch, JAX or Numba, or another object with the buffer protocol or DLPack"


class MemoryKind(str):
    """A kind of memory; it prints and compares as its text.

    | text | memory |
    |---|---|
    | pageable | ordinary: the driver copies it through its own pinned buffer |
    | pinned | page-locked by gdcomm or cudaHostAlloc: copied by the GPU itself |
    | registered | page-locked in place |
    | mapped | page-locked, and asked for as memory that kernels use |
    | write-combined | page-locked, and not cached by the CPU |
    | managed | unified: moves between host and GPU by itself |
    | device 0 | memory of GPU 0 |
    | async-pool (device 0) | memory of GPU 0 from a stream-ordered pool |

    Attributes:
        name: the text without the device: "device" for "device 0".
        device: index of the GPU, or None for host memory.
    """

    __slots__ = ("device", "name")

    name: str
    device: int | None

    def __new__(cls, name: str, device: int | None = None) -> MemoryKind:  # noqa: PYI034
        where = "" if device is None else f" {device}" if name == "device" else f" (device {device})"
        self = super().__new__(cls, name + where)
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "device", device)
        return self

    @property
    def page_locked(self) -> bool:
        """Host memory that the GPU copies itself."""
        return self.name in _LOCKED

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a MemoryKind does not change ({name})")

    def __reduce__(self) -> Any:
        return MemoryKind, (self.name, self.device)


def memory_kind(array: Any) -> MemoryKind:
    """Tell what kind of memory an array lies in.

    Costs some microseconds and waits for nothing (of JAX arrays: until they are computed).

    Args:
        array: of NumPy, CuPy, torch, JAX or Numba, an `mmap`, or anything with DLPack or the buffer protocol.

    Raises:
        BufferSpecError: it is no array.
    """
    buffer = devices.find(array)
    if buffer is not None:
        if not buffer.nbytes:
            return MemoryKind("device", buffer.device.properties().index)
        return kind_of(buffer.ptr, 1)
    return kind_of(*_span(array))


def kind_of(address: int, nbytes: int) -> MemoryKind:
    """What kind of memory a range of addresses is; "pageable" if some of it is."""
    device = devices.current()
    if device is None or not nbytes:
        return MemoryKind("pageable")
    block = block_at(address)
    if block is not None:
        if block.write_combined:
            return MemoryKind("write-combined")
        name = device.memory_at(address)[0]
        return MemoryKind(name if name == "pageable" else "mapped" if block.mapped else "pinned")
    first = device.memory_at(address)
    if device.memory_at(address + nbytes - 1) != first:
        return MemoryKind("pageable")
    if first[0] == "pinned" and registry_of(device).find(address):  # CUDA itself does not tell the two apart
        return MemoryKind("registered")
    return MemoryKind(*first)


def _span(array: Any) -> tuple[int, int]:
    """Lowest address and length in bytes of host memory, gaps included."""
    if not isinstance(array, np.ndarray):
        try:
            array = np.asarray(memoryview(array))
        except (TypeError, ValueError):
            array = _by_protocol(array)
    if not array.nbytes:
        return 0, 0
    spans = [(extent - 1) * step for extent, step in zip(array.shape, array.strides, strict=True)]
    low = array.ctypes.data + sum(span for span in spans if span < 0)
    return low, sum(abs(span) for span in spans) + array.itemsize


def _by_protocol(array: Any) -> np.ndarray[Any, Any]:
    if hasattr(array, "__array_interface__"):
        return np.asarray(array)
    if hasattr(array, "detach"):  # torch
        array = array.detach()
        if array.is_floating_point():  # NumPy lacks some of torch's
            array = array.view(getattr(sys.modules["torch"], f"int{8 * array.element_size()}"))
    try:
        return np.from_dlpack(array)
    except (TypeError, ValueError, AttributeError, RuntimeError, BufferError) as error:
        raise BufferSpecError(f"array: a {type(array).__name__} is no array ({error}); {_HELP}") from None
