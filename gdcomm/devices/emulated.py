"""An emulated device: NumPy memory that behaves like CUDA's, on purpose at its worst.

Work is queued and runs as late as the stream rules allow: only when somebody waits for it, and then only
what must run. Unrelated streams stay behind. New memory is garbage, freed and recycled memory is
spoilt. So a missing wait gives wrong data every time instead of once in a thousand runs.
Arrays expose the CUDA Array Interface, so they take the same road through gdcomm as CuPy's.
"""

from __future__ import annotations

import bisect
import itertools
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from gdcomm.devices.base import Buffer, Device
from gdcomm.errors import BufferSpecError

__all__ = ["EmulatedArray", "EmulatedDevice", "EmulatedStream"]

_Array = np.ndarray[Any, Any]


class EmulatedStream:
    """A queue of work. Use it as a context manager to make it the thread's current stream."""

    def __init__(self, device: EmulatedDevice, number: int) -> None:
        self._device = device
        self.ptr = number
        self._queue: deque[tuple[int, Callable[[], None]]] = deque()
        self._queued = self._done = 0

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.ptr)

    def __enter__(self) -> EmulatedStream:
        self._device._stack().append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._device._stack().pop()

    def synchronize(self) -> None:
        """Run all work queued so far."""
        self._device.synchronize(self)

    def _push(self, work: Callable[[], None]) -> None:
        self._queued += 1
        self._queue.append((self._queued, work))

    def _run_to(self, point: int) -> None:
        while self._done < point:
            number, work = self._queue.popleft()
            self._done = number
            work()


class EmulatedEvent:
    """The end of a stream at one moment. `query` runs nothing at first, so a poller must poll again."""

    def __init__(self, device: EmulatedDevice, stream: EmulatedStream, patience: int) -> None:
        self._device, self._stream, self._point = device, stream, stream._queued
        self._patience = patience

    def query(self) -> bool:
        with self._device._lock:
            if self._stream._done >= self._point:
                return True
            self._patience -= 1
            if self._patience >= 0:
                return False
            self._stream._run_to(self._point)
            return True

    def synchronize(self) -> None:
        with self._device._lock:
            self._device.stats["synchronize"] += 1
            self._stream._run_to(self._point)


class EmulatedArray:
    """An array in emulated device memory. NumPy can't read it; `EmulatedDevice.asnumpy` can."""

    __array_ufunc__ = None

    def __init__(self, device: EmulatedDevice, view: _Array, base: _Allocation) -> None:
        self._device, self._view, self._base = device, view, base

    shape = property(lambda self: self._view.shape)
    strides = property(lambda self: self._view.strides)
    dtype = property(lambda self: self._view.dtype)
    size = property(lambda self: self._view.size)
    nbytes = property(lambda self: self._view.nbytes)
    ndim = property(lambda self: self._view.ndim)
    itemsize = property(lambda self: self._view.itemsize)

    @property
    def ptr(self) -> int:
        """Address of the first element."""
        return int(self._view.__array_interface__["data"][0])

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self._view.shape,
            "typestr": self._view.dtype.str,
            "data": (self.ptr, not self._view.flags.writeable),
            "strides": None if self._view.flags.c_contiguous else self._view.strides,
            "version": 3,
            "stream": None,
        }

    def __array__(self, *_: Any, **__: Any) -> _Array:
        raise TypeError("implicit copy of device memory; use EmulatedDevice.asnumpy(array)")

    def __len__(self) -> int:
        return len(self._view)

    def __getitem__(self, key: Any) -> EmulatedArray:
        view = self._view[key]
        if not isinstance(view, np.ndarray):  # an element: a 0-d view
            view = self._view[key if isinstance(key, tuple) else (key,)][..., None][..., 0]
        return EmulatedArray(self._device, view, self._base)

    def reshape(self, *shape: Any) -> EmulatedArray:
        """A view of another shape."""
        view = self._view.view()
        view.shape = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        return EmulatedArray(self._device, view, self._base)

    @property
    def T(self) -> EmulatedArray:
        """The transposed view."""
        return EmulatedArray(self._device, self._view.T, self._base)

    def readonly(self) -> EmulatedArray:
        """A view that says it must not be written."""
        view = self._view.view()
        view.flags.writeable = False
        return EmulatedArray(self._device, view, self._base)


class _Allocation:
    """Owns a block of device memory; spoils it when the last array on it goes."""

    def __init__(self, device: EmulatedDevice, nbytes: int) -> None:
        self.memory = device._garbage(max(nbytes, 1))
        self.start = int(self.memory.__array_interface__["data"][0])
        device._add(self.start, self.memory.nbytes)
        weakref.finalize(self, device._free, self.start, self.memory).atexit = False


class EmulatedDevice(Device):
    """The emulated device of this process. See the module's text.

    Args:
        seed: of the garbage and of the number of times that a query says "not yet".
    """

    kind = "emulated"

    def __init__(self, seed: int = 0) -> None:
        self._lock = threading.RLock()
        self._random = random.Random(seed)
        self._starts: list[int] = []
        self._sizes: dict[int, int] = {}
        self._numbers = itertools.count(1)
        self._streams: dict[int, EmulatedStream] = {}
        self._local = threading.local()
        self.default_stream = self.Stream()
        self.stats = {"to_host": 0, "to_device": 0, "synchronize": 0}

    # -- arrays, as a user has them -------------------------------------------------------

    def empty(self, shape: Any, dtype: Any = np.float64, order: Any = "C") -> EmulatedArray:
        """New memory, full of garbage."""
        dtype = np.dtype(dtype)
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        base = _Allocation(self, nbytes)
        return EmulatedArray(self, np.ndarray(shape, dtype, base.memory.data, order=order), base)

    def array(self, values: Any, stream: Any = None, order: Any = None) -> EmulatedArray:
        """A device copy of host values, made by work queued on the stream."""
        values = np.array(values, copy=True)
        order = order or ("F" if values.ndim > 1 and values.flags.fnc else "C")
        made = self.empty(values.shape, values.dtype, order)
        self.launch(stream, lambda view: np.copyto(view, values), made)
        return made

    def zeros(self, shape: Any, dtype: Any = np.float64, stream: Any = None) -> EmulatedArray:
        """Zeros, written by work queued on the stream."""
        made = self.empty(shape, dtype)
        self.fill(made, 0, stream)
        return made

    def fill(self, array: EmulatedArray, value: Any, stream: Any = None) -> None:
        """Queue a fill."""
        self.launch(stream, lambda view: view.fill(value), array)

    def launch(self, stream: Any, kernel: Callable[..., Any], *arrays: EmulatedArray) -> None:
        """Queue `kernel(*views)` on the stream."""
        views = [array._view for array in arrays]
        with self._lock:
            self.stream_of(stream)._push(lambda: kernel(*views))

    def asnumpy(self, array: EmulatedArray, stream: Any = None) -> _Array:
        """A host copy; waits for this stream and no other."""
        with self._lock:
            self.synchronize(self.stream_of(stream))
            return array._view.copy()

    # -- streams ----------------------------------------------------------------------------

    def Stream(self) -> EmulatedStream:
        """A new stream, ordered with no other."""
        stream = EmulatedStream(self, next(self._numbers))
        self._streams[stream.ptr] = stream
        return stream

    def current_stream(self) -> EmulatedStream:
        """The thread's current stream."""
        return self._stack()[-1]

    def stream_of(self, stream: Any) -> EmulatedStream:
        """The stream that `stream` means; None is the current one."""
        if stream is None:
            return self.current_stream()
        if isinstance(stream, EmulatedStream):
            return stream
        handle = stream.__cuda_stream__()[1] if hasattr(stream, "__cuda_stream__") else stream
        handle = getattr(handle, "ptr", getattr(handle, "cuda_stream", handle))
        found = self._streams.get(handle) if isinstance(handle, int) else None
        if found is None:
            raise BufferSpecError(
                f"stream: {stream!r} is no stream of the emulated device; give one of its Stream() objects"
            )
        return found

    def wait_event(self, stream: Any, event: EmulatedEvent) -> None:
        """Queue a wait: later work of `stream` runs after `event`."""
        with self._lock:
            self.stream_of(stream)._push(lambda: event._stream._run_to(event._point))

    def _stack(self) -> list[EmulatedStream]:
        if not hasattr(self._local, "stack"):
            self._local.stack = [self.default_stream]
        return self._local.stack  # type: ignore[no-any-return]

    # -- the Device interface -----------------------------------------------------------------

    def find(self, obj: Any, stream: Any = None) -> Buffer | None:
        if isinstance(obj, EmulatedArray):
            if obj._device is not self:
                return None
        elif not hasattr(obj, "__cuda_array_interface__"):
            return None
        interface = obj.__cuda_array_interface__
        address, readonly = interface["data"]
        if not isinstance(obj, EmulatedArray) and not self.owns(address):
            return None
        dtype = np.dtype(interface["typestr"])
        own = getattr(obj, "dtype", None)
        if isinstance(own, np.dtype) and own.itemsize == dtype.itemsize:
            dtype = own  # bfloat16 and structured types have no type string
        shape = tuple(interface["shape"])
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        strides = interface.get("strides")
        if strides is not None and (nbytes == 0 or _c_order(shape, strides, dtype.itemsize)):
            strides = None
        return Buffer(
            address, nbytes, dtype, shape, strides, bool(readonly), self, self.stream_of(stream), obj
        )

    def owns(self, address: int) -> bool:
        with self._lock:
            index = bisect.bisect_right(self._starts, address) - 1
            return index >= 0 and address < self._starts[index] + self._sizes[self._starts[index]]

    def to_host(self, dst: _Array, src: Buffer, offset: int = 0) -> None:
        view, dtype = self._view(src), src.dtype

        def copy() -> None:
            dst[...] = _bytes(view)[offset : offset + dst.nbytes]

        with self._lock:
            self.stats["to_host"] += 1
            src.stream._push(copy)
        assert offset % dtype.itemsize == 0

    def to_device(self, dst: Buffer, src: _Array, offset: int = 0) -> None:
        view, itemsize = self._view(dst), dst.dtype.itemsize
        first, count = offset // itemsize, src.nbytes // itemsize

        def copy() -> None:
            if dst.contiguous:
                _bytes(view)[offset : offset + src.nbytes] = src
            else:
                raw = view.view(f"V{itemsize}") if view.flags.c_contiguous else view
                raw.flat[first : first + count] = src.view(raw.dtype)

        with self._lock:
            self.stats["to_device"] += 1
            dst.stream._push(copy)

    def pack(self, src: Buffer) -> Buffer:
        packed = self.empty(src.shape, src.dtype)
        view, target = self._view(src), packed._view
        with self._lock:
            src.stream._push(lambda: np.copyto(target, view))
        found = self.find(packed, src.stream)
        assert found is not None
        return found

    def unpack(self, dst: Buffer, packed: Buffer) -> None:
        view, source = self._view(dst), self._view(packed)
        with self._lock:
            dst.stream._push(lambda: np.copyto(view, source))

    def record(self, stream: Any) -> EmulatedEvent:
        with self._lock:
            return EmulatedEvent(self, self.stream_of(stream), self._random.randrange(4))

    def synchronize(self, stream: Any) -> None:
        with self._lock:
            self.stats["synchronize"] += 1
            found = self.stream_of(stream)
            found._run_to(found._queued)

    def pinned(self, nbytes: int) -> _Array:
        return self._garbage(nbytes)

    def poison(self, block: _Array) -> None:
        block[...] = 0xDB

    # -- memory -------------------------------------------------------------------------------

    def _view(self, buffer: Buffer) -> _Array:
        """The array behind a description, made from its address as CUDA would."""
        import ctypes

        low = buffer.ptr
        high = buffer.ptr + buffer.dtype.itemsize
        if buffer.nbytes == 0:
            return np.empty(buffer.shape, buffer.dtype)
        strides = buffer.strides
        if strides is None:
            high = low + buffer.nbytes
        else:
            for extent, step in zip(buffer.shape, strides, strict=True):
                low += min(0, (extent - 1) * step)
                high += max(0, (extent - 1) * step)
        memory = (ctypes.c_char * (high - low)).from_address(low)
        view: _Array = np.ndarray(buffer.shape, buffer.dtype, memory, buffer.ptr - low, strides)
        return view

    def _garbage(self, nbytes: int) -> _Array:
        block = np.empty(nbytes, np.uint8)
        block[...] = 0xA5
        with self._lock:
            block[:: self._random.randrange(3, 9)] = self._random.randrange(1, 255)
        return block

    def _add(self, start: int, nbytes: int) -> None:
        with self._lock:
            bisect.insort(self._starts, start)
            self._sizes[start] = nbytes

    def _free(self, start: int, memory: _Array) -> None:
        with self._lock:
            memory[...] = 0xDD
            self._starts.remove(start)
            del self._sizes[start]


def _bytes(view: _Array) -> _Array:
    """The content in logical order, as bytes: a view where it can be one."""
    return np.ascontiguousarray(view).reshape(-1).view(np.uint8)


def _c_order(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    expected = itemsize
    for extent, step in zip(reversed(shape), reversed(strides), strict=True):
        if extent > 1 and step != expected:
            return False
        expected *= extent
    return True
