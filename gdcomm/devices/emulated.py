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
from gdcomm.devices.emulated_copies import EmulatedCopies
from gdcomm.devices.emulated_kernels import EmulatedKernels, Stalled
from gdcomm.devices.emulated_memory import EmulatedHostMemory
from gdcomm.devices.emulated_reductions import EmulatedReductions
from gdcomm.errors import BufferSpecError

__all__ = ["EmulatedArray", "EmulatedDevice", "EmulatedStream"]

_Array = np.ndarray[Any, Any]
_BASIC = (int, np.integer, slice, type(None), type(...))  # indices that give views


class EmulatedStream:
    """A queue of work. Use it as a context manager to make it the thread's current stream."""

    def __init__(self, device: EmulatedDevice, number: int) -> None:
        self._device, self.ptr = device, number
        self._queue: deque[tuple[int, Callable[[], None]]] = deque()
        self._queued = self._done = 0

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.ptr)

    def __enter__(self) -> EmulatedStream:  # noqa: PYI034 - typing.Self needs Python 3.11
        self._device._stack().append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._device._stack().pop()

    def synchronize(self) -> None:
        """Run all work queued so far."""
        self._device.synchronize(self)

    def _push(self, work: Callable[[], None]) -> None:
        with self._device._lock:
            self._queued += 1
            self._queue.append((self._queued, work))
            if self._device._random.random() < self._device.early:
                try:
                    self._advance(self._queued)
                except Stalled:
                    pass

    def _advance(self, point: int) -> None:
        """Run up to the point; Stalled if that waits for a value."""
        while self._done < point:
            number, work = self._queue.popleft()
            self._done = number
            try:
                work()
            except Stalled:
                self._queue.appendleft((number, work))
                self._done = number - 1
                raise

    def _run_to(self, point: int) -> None:
        while True:
            try:
                return self._advance(point)
            except Stalled:
                if not self._device.nudge():
                    self._device._unlocked.wait(1e-3)  # lets a host thread in, which may set the value


class EmulatedEvent:
    """The end of a stream at one moment. `query` runs nothing at first, so a poller must poll again."""

    def __init__(self, device: EmulatedDevice, stream: EmulatedStream, patience: int) -> None:
        self._device, self._stream, self._point, self._patience = device, stream, stream._queued, patience

    def query(self) -> bool:
        with self._device._lock:
            if self._stream._done < self._point:
                self._patience -= 1
                if self._patience >= 0:
                    return False
                try:
                    self._stream._advance(self._point)
                except Stalled:
                    return False
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
    T = property(lambda self: self._like(self._view.T))

    @property
    def ptr(self) -> int:
        """Address of the element at index 0."""
        return self._view.ctypes.data

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
        keys = key if isinstance(key, tuple) else (key,)
        if any(type(k) is bool or not isinstance(k, _BASIC) for k in keys):
            raise TypeError(f"index {key!r} needs a copy; only integers, slices, None and ... give views")
        # The ellipsis makes an element a 0-d view; without it NumPy would copy it to the host.
        return self._like(self._view[keys if ... in keys else (*keys, ...)])

    def reshape(self, *shape: Any) -> EmulatedArray:
        """A view of another shape; ValueError where that would need a copy."""
        view = self._view.reshape(*shape)
        if view.size and not np.may_share_memory(view, self._view):
            raise ValueError(f"{self.shape} with strides {self.strides} as {shape} needs a copy")
        return self._like(view)

    def readonly(self) -> EmulatedArray:
        """A view that says it must not be written."""
        view = self._view.view()
        view.flags.writeable = False
        return self._like(view)

    def _like(self, view: _Array) -> EmulatedArray:
        return EmulatedArray(self._device, view, self._base)


class _Blocks:
    """Which block of memory an address lies in."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._blocks: dict[int, tuple[int, _Array | None]] = {}
        self._dead: deque[int] = deque()

    def add(self, start: int, nbytes: int, memory: _Array | None = None) -> None:
        self._reap()
        bisect.insort(self._starts, start)
        self._blocks[start] = (start + nbytes, memory)

    def drop(self, start: int, memory: _Array | None = None) -> None:
        """For finalizers, which may run inside `at`, and without a lock: only spoil and note the block."""
        if memory is not None:
            memory[...] = 0xDD
        self._dead.append(start)

    def at(self, address: int) -> tuple[int, _Array | None] | None:
        """Start and memory of the live block around the address."""
        self._reap()
        index = bisect.bisect_right(self._starts, address) - 1
        start = self._starts[index] if index >= 0 else 0
        end, memory = self._blocks.get(start, (0, None))
        return (start, memory) if address < end else None

    def overlaps(self, start: int, end: int) -> bool:
        """Whether a live block has bytes in the range."""
        found = self.at(start)
        index = bisect.bisect_left(self._starts, start)
        return found is not None or (index < len(self._starts) and self._starts[index] < end)

    def end(self, start: int) -> int:
        """Of the block that starts there."""
        return self._blocks[start][0]

    def total(self) -> int:
        """Bytes of all live blocks."""
        self._reap()
        return sum(end - start for start, (end, _) in self._blocks.items())

    def _reap(self) -> None:
        while self._dead:
            start = self._dead.popleft()
            del self._starts[bisect.bisect_left(self._starts, start)], self._blocks[start]


class _Allocation:
    """Owns device memory and spoils it when the last array goes; queued work does not keep it from that."""

    def __init__(self, device: EmulatedDevice, nbytes: int) -> None:
        self.memory = device._garbage(max(nbytes, 1))
        self.ptr = self.memory.ctypes.data
        with device._lock:
            device._memory.add(self.ptr, self.memory.nbytes, self.memory)
        weakref.finalize(self, device._memory.drop, self.ptr, self.memory).atexit = False


class EmulatedDevice(EmulatedHostMemory, EmulatedCopies, EmulatedKernels, EmulatedReductions, Device):
    """The emulated device of this process. See the module's text.

    Args:
        seed: of the garbage and of the number of times that a query says "not yet".
        early: probability that queued work runs at once; 0 is the longest possible delay.
    """

    kind = "emulated"

    def __init__(self, seed: int = 0, early: float = 0.0) -> None:
        self.early = early
        self._lock = threading.RLock()
        self._unlocked = threading.Condition(self._lock)
        self._random = random.Random(seed)
        self._memory, self._pinned, self._registered = _Blocks(), _Blocks(), _Blocks()
        self._numbers = itertools.count(1)
        self._streams: dict[int, EmulatedStream] = {}
        self._local = threading.local()
        self.default_stream = self.Stream()
        self.stats = dict.fromkeys(("to_host", "to_device", "pack", "unpack", "bytes", "synchronize"), 0)

    def empty(self, shape: Any, dtype: Any = np.float64, order: Any = "C") -> EmulatedArray:
        """New memory, full of garbage."""
        dtype, shape = np.dtype(dtype), tuple(shape) if np.iterable(shape) else (shape,)
        base = _Allocation(self, int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
        return EmulatedArray(self, np.ndarray(shape, dtype, base.memory.data, order=order), base)

    def array(self, values: Any, stream: Any = None, order: Any = None) -> EmulatedArray:
        """A device copy of host values, made by work queued on the stream."""
        values = np.array(values, copy=True)
        order = order or ("F" if values.ndim > 1 and values.flags.fnc else "C")
        made = self.empty(values.shape, values.dtype, order)
        self.launch(stream, lambda view: np.copyto(view, values), made)
        return made

    def zeros(self, shape: Any, dtype: Any = float, stream: Any = None, order: Any = "C") -> EmulatedArray:
        """Zeros, written by work queued on the stream."""
        made = self.empty(shape, dtype, order)
        self.fill(made, 0, stream)
        return made

    def fill(self, array: EmulatedArray, value: Any, stream: Any = None) -> None:
        """Queue a fill."""
        self.launch(stream, lambda view: view.fill(value), array)

    def launch(self, stream: Any, kernel: Callable[..., Any], *arrays: EmulatedArray) -> None:
        """Queue `kernel(*views)` on the stream."""
        views = [array._view for array in arrays]
        self.stream_of(stream)._push(lambda: kernel(*views))

    def asnumpy(self, array: EmulatedArray, stream: Any = None) -> _Array:
        """A host copy; waits for this stream and no other."""
        with self._lock:
            self.synchronize(stream)
            return array._view.copy()

    def Stream(self) -> EmulatedStream:
        """A new stream, ordered with no other."""
        stream = EmulatedStream(self, next(self._numbers))
        self._streams[stream.ptr] = stream
        return stream

    def current_stream(self) -> EmulatedStream:
        """The thread's current stream."""
        return self._stack()[-1]

    def stream_of(self, stream: Any) -> EmulatedStream:
        """The stream that `stream` means; None is the current one, 0 the default one."""
        if stream is None:
            return self.current_stream()
        handle = stream.__cuda_stream__()[1] if hasattr(stream, "__cuda_stream__") else stream
        handle = getattr(handle, "ptr", getattr(handle, "cuda_stream", handle))
        found = self._streams.get(handle or 1) if isinstance(handle, int) else None
        if found is None or (isinstance(stream, EmulatedStream) and found is not stream):
            raise BufferSpecError(f"stream: {stream!r} is no stream of this device; use its Stream()")
        return found

    def wait_event(self, stream: Any, event: EmulatedEvent) -> None:
        """Queue a wait: later work of `stream` runs after `event`."""
        self.stream_of(stream)._push(lambda: event._stream._advance(event._point))

    def _stack(self) -> list[EmulatedStream]:
        stack: list[EmulatedStream] = self._local.__dict__.setdefault("stack", [self.default_stream])
        return stack

    def find(self, obj: Any, stream: Any = None) -> Buffer | None:
        interface = getattr(obj, "__cuda_array_interface__", None)
        if not (isinstance(interface, dict) and isinstance((interface.get("data") or (None,))[0], int)):
            return None  # none, or a broken one: mpi4py says what is wrong with it
        ours = isinstance(obj, EmulatedArray) and obj._device is self  # also if it has no bytes
        if not (ours or self.owns(interface["data"][0])):
            return None
        address, readonly = interface["data"]
        dtype = np.dtype(interface["typestr"])
        own = getattr(obj, "dtype", None)
        if isinstance(own, np.dtype) and own.itemsize == dtype.itemsize:
            dtype = own  # bfloat16 and structured types have no type string
        shape = tuple(interface["shape"])
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        producer = interface.get("stream")  # the array's content is due on this stream
        order = self.stream_of(producer if stream is None else stream)
        if producer is not None and self.stream_of(producer) is not order:
            self.wait_event(order, self.record(producer))
        strides = tuple(interface.get("strides") or ()) if nbytes and shape else ()
        buffer = Buffer(address, nbytes, dtype, shape, strides or None, bool(readonly), self, order, obj)
        return buffer._replace(strides=None) if self._view(buffer).flags.c_contiguous else buffer

    def owns(self, address: int) -> bool:
        with self._lock:
            return self._memory.at(address) is not None

    def to_host(self, dst: _Array, src: Buffer, offset: int = 0) -> None:
        view, end = self._view(src), offset + dst.nbytes
        with self._lock:
            self._copy("to_host", src, lambda: np.copyto(dst, _bytes(view)[offset:end]), offset, end)
            if dst.nbytes and not self.is_pinned(dst.ctypes.data):
                src.stream._run_to(src.stream._queued)  # as the driver does with pageable memory

    def to_device(self, dst: Buffer, src: _Array, offset: int = 0) -> None:
        # The driver takes pageable memory at the call, pinned memory when the copy runs.
        source = src if self.is_pinned(src.ctypes.data) else src.copy()
        view = self._view(dst)
        self._copy("to_device", dst, lambda: _write(view, source, offset), offset, offset + src.nbytes)

    def _copy(self, name: str, buffer: Buffer, copy: Callable[[], None], start: int, end: int) -> None:
        assert buffer.contiguous or start % buffer.dtype.itemsize == 0, "strided: pieces start at elements"
        assert 0 <= start <= end <= buffer.nbytes, "a piece lies within the content"
        with self._lock:
            self.stats[name] += 1
            self.stats["bytes"] += end - start
            buffer.stream._push(copy)

    def record(self, stream: Any) -> EmulatedEvent:
        with self._lock:
            return EmulatedEvent(self, self.stream_of(stream), self._random.randrange(4))

    def idle(self, stream: Any) -> bool:
        with self._lock:
            queue = self.stream_of(stream)
            return queue._done == queue._queued

    def synchronize(self, stream: Any) -> None:
        with self._lock:
            self.stats["synchronize"] += 1
            self.stream_of(stream)._run_to(self.stream_of(stream)._queued)

    def pinned(self, nbytes: int) -> _Array:
        block = self._garbage(max(nbytes, 1))
        with self._lock:
            self._pinned.add(block.ctypes.data, block.nbytes)
        weakref.finalize(block.base, self._pinned.drop, block.ctypes.data).atexit = False
        return block[:nbytes]

    def allocate(self, nbytes: int, stream: Any) -> _Allocation:
        return _Allocation(self, nbytes)

    def build(
        self,
        library: str,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        order: str,
        fill: Callable[[Buffer], None],
    ) -> EmulatedArray:
        made = self.empty(shape, dtype, order)
        buffer = self.find(made)
        if buffer is not None and buffer.nbytes:
            fill(buffer)
        return made

    def poison(self, block: _Array) -> None:
        block[...] = 0xDB

    def _view(self, buffer: Buffer) -> _Array:
        """The elements behind a description, as raw bytes: made from its address as CUDA would."""
        raw = np.dtype(f"V{buffer.dtype.itemsize}")
        if buffer.nbytes == 0:
            return np.empty(buffer.shape, raw)
        with self._lock:
            block = self._memory.at(buffer.ptr)
        if block is None:
            host = self._host_view(buffer)
            if host is not None:
                return host
            raise BufferSpecError(f"address {buffer.ptr:#x} is no emulated device memory, or was freed")
        start, memory = block
        try:
            return np.ndarray(buffer.shape, raw, memory, buffer.ptr - start, buffer.strides)
        except (TypeError, ValueError) as error:
            raise BufferSpecError(f"array {buffer} reaches beyond its memory block: {error}") from None

    def _garbage(self, nbytes: int) -> _Array:
        """Memory as allocated: aligned as CUDA's, and never usefully zero."""
        block = np.empty(nbytes + 255, np.uint8)
        block = block[-block.ctypes.data % 256 :][:nbytes]
        block[...] = 0xA5
        with self._lock:
            block[:: self._random.randrange(3, 9)] = self._random.randrange(1, 255)
        return block


def _bytes(view: _Array) -> _Array:
    """The content in logical order, as bytes: a view where it can be one."""
    return np.ascontiguousarray(view).reshape(-1).view(np.uint8)


def _write(view: _Array, source: _Array, offset: int) -> None:
    """Write content bytes from `offset` on, and no others; a message may end within an element."""
    if view.flags.c_contiguous:
        _bytes(view)[offset : offset + source.nbytes] = source
        return
    first, whole = offset // view.itemsize, source.nbytes // view.itemsize
    rest = source[whole * view.itemsize :]
    view.flat[first : first + whole] = source[: whole * view.itemsize].view(view.dtype)
    if rest.nbytes:
        last = view[tuple(slice(i, i + 1) for i in np.unravel_index(first + whole, view.shape))]
        last.reshape(1).view(np.uint8)[: rest.nbytes] = rest
