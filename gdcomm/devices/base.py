"""The device interface: the only door to GPU memory.

A `Device` recognises arrays that live in its memory, and copies between them and
page-locked host memory *in stream order*. Two implementations exist: `cuda` (CuPy)
and `emulated` (NumPy memory with adversarial streams, for machines without a GPU).

A *stream* is an opaque handle of the device (an integer for CUDA). All copies are
asynchronous: they are queued on a stream and may run at any later time; only
`Event.synchronize`, `Event.query() is True` and `Device.synchronize` tell that they ran.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import numpy as np

from gdcomm.devices.copies import Copies
from gdcomm.devices.kernels import Kernels
from gdcomm.devices.memory import HostMemory
from gdcomm.devices.reductions import Reductions
from gdcomm.errors import BufferSpecError

__all__ = ["Buffer", "Device", "Event"]


class Event(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Tell whether all work before the point is done, without waiting."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until all work before the point is done."""
        ...


class Buffer(NamedTuple):
    """Immutable description of one device array; it never copies.

    Args:
        ptr: address of the element at index 0, as in the CUDA Array Interface; with negative
            strides it is not the lowest address.
        nbytes: bytes of the logical content (`size * itemsize`).
        dtype: NumPy dtype (ml_dtypes for bfloat16).
        shape: extent of each axis.
        strides: byte step of each axis, or None when C-contiguous (steps of axes of
            length 1 do not count).
        readonly: whether the owner forbids writing.
        device: the Device that the memory belongs to.
        stream: the stream that transfers of this buffer are ordered on.
        owner: the user's object; holding the Buffer keeps the memory alive.
    """

    ptr: int
    nbytes: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    readonly: bool
    device: Device
    stream: Any
    owner: Any

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie in C order without gaps."""
        return self.strides is None

    def require_writable(self, operation: str, argument: str) -> None:
        """Raise if the owner forbids writing.

        Raises:
            BufferSpecError: naming the operation and its argument.
        """
        if self.readonly:
            raise BufferSpecError(
                f"{operation}: {argument} is a read-only device array ({type(self.owner).__name__}); "
                "give a writable one, for example a copy"
            )


class Device(HostMemory, Copies, Kernels, Reductions, ABC):
    """One kind of device in this process. Methods never block unless they say so."""

    kind: str = ""

    @abstractmethod
    def find(self, obj: Any, stream: Any = None) -> Buffer | None:
        """Describe `obj` if its memory is this device's, else return None.

        Memory is classified by its address, not by the presence of
        `__cuda_array_interface__`: an array whose interface points to host memory
        is not ours. `stream` (anything with `__cuda_stream__`, `.ptr` or `.cuda_stream`, or
        a raw handle) is the stream to order on; None means the current stream of the
        array's own library.
        """

    @abstractmethod
    def owns(self, address: int) -> bool:
        """Tell whether `address` is memory of this device."""

    @abstractmethod
    def to_host(self, dst: np.ndarray, src: Buffer, offset: int = 0) -> None:
        """Queue on `src.stream`: bytes [offset, offset + dst.nbytes) of the content to `dst`.

        Content is the array in logical C order: a strided source is packed on the
        device first, and `offset` is at an element. `dst` is uint8, contiguous, page-locked.
        """

    @abstractmethod
    def to_device(self, dst: Buffer, src: np.ndarray, offset: int = 0) -> None:
        """Queue on `dst.stream`: `src` (uint8, page-locked) to content bytes from `offset` on.

        Bytes outside [offset, offset + src.nbytes) are not touched, also in strided arrays.
        """

    @abstractmethod
    def record(self, stream: Any) -> Event:
        """Return an event at the present end of `stream`."""

    @abstractmethod
    def idle(self, stream: Any) -> bool:
        """Tell whether all work queued on `stream` is done, without waiting."""

    @abstractmethod
    def synchronize(self, stream: Any) -> None:
        """Block until all work queued on `stream` is done. Never the whole device."""

    @abstractmethod
    def pinned(self, nbytes: int) -> np.ndarray:
        """Allocate page-locked host memory as a uint8 array (uninitialised; blocks)."""

    @abstractmethod
    def allocate(self, nbytes: int, stream: Any) -> Any:
        """Return device memory (`ptr` is its address) for work on the stream; it lives as long as the object."""

    @abstractmethod
    def build(
        self, library: str, shape: tuple[int, ...], dtype: np.dtype, order: str, fill: Callable[[Buffer], None]
    ) -> Any:
        """Return a new array of `library`, in memory of that library, on its current stream.

        `fill` is called once with the description of the (uninitialised) array, unless that is empty, and
        queues the writing of its content. `order` is "C" or "F".

        Raises:
            ImportError: the library is not here, or can't use this device.
        """

    def here(self) -> AbstractContextManager[Any]:
        """A context in which another thread works on the GPU that is current now in this one."""
        return nullcontext()

    def poison(self, block: np.ndarray) -> None:
        """Spoil memory that nobody may read any more (emulated device only)."""
