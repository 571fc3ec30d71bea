"""Page-locking memory that exists: `with gdcomm.registered(array): ...`."""

from __future__ import annotations

import bisect
import itertools
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from gdcomm import devices
from gdcomm.devices.base import Device, Event
from gdcomm.errors import BufferSpecError, DeviceError
from gdcomm.memory import pinned
from gdcomm.memory.budget import Budget, of_process
from gdcomm.memory.pages import PAGE, in_child

__all__ = ["Registry", "active", "pieces", "register", "registered", "registry_of", "unregister"]


def register(array: Any) -> None:
    """Page-lock the memory of an array in place, so that the GPU copies it at the speed of the link.

    The pages that hold the array are locked until `unregister` was called as often as `register`, or the
    owner of a NumPy array's memory is freed. Nested, overlapping and repeated registrations are counted.
    Registering costs time (some 30 ms per GiB, more where the pages are not in memory yet), so it
    pays for memory that is used more than once. On coherent machines nothing needs to be locked.

    A forked child does not inherit the registration; on kernels before 5.9 do not fork while memory is
    registered, since a page that the parent writes after that is no longer the one that the GPU sees.

    Args:
        array: a contiguous NumPy array (also read-only, memory-mapped, or page-locked already), or
            another object with the buffer protocol such as an mmap, which is kept alive.

    Raises:
        BufferSpecError: it has no contiguous host memory.
        PinnedMemoryError: over the budget, see `GDCOMM_PINNED_LIMIT`.
        DeviceError: there is no GPU, or the driver refuses, for example read-only pages where the GPU can't take
            them, or pages of which another library has registered a part.
    """
    host, keep = _host(array)
    _registry("register").add(host, keep)


def unregister(array: Any) -> None:
    """Undo one `register` of this memory, once gdcomm's copies that use it are done (blocks until then).

    Args:
        array: the same array, or one over exactly the same bytes.

    Raises:
        BufferSpecError: this memory is not registered.
        DeviceError: it was registered in the parent of this process.
    """
    _registry("unregister").remove(_host(array)[0])


@contextmanager
def registered(array: Any) -> Iterator[Any]:
    """Page-lock the memory of an array within a `with` block; see `register`. Gives the array."""
    host, keep = _host(array)
    registry, process = _registry("registered"), os.getpid()
    registry.add(host, keep)
    try:
        yield array
    finally:
        if os.getpid() == process:  # a forked child has no registration to undo
            registry.remove(host, gone_is_right=True)


def active() -> bool:
    """Whether any memory is registered."""
    return any([registry._starts for registry in _registries.values()])


def pieces(address: int, nbytes: int) -> list[tuple[int, int]]:
    """Cut host memory where registrations meet or end: no copy may cross such a seam.

    Returns:
        Address and length of each piece, in order. One piece, in less than a microsecond, where nothing is registered.
    """
    if not active():
        return [(address, nbytes)]
    seams = {seam for registry in _registries.values() for seam in registry.seams(address, address + nbytes)}
    if not seams:
        return [(address, nbytes)]
    edges = [address, *sorted(seams), address + nbytes]
    return [(start, end - start) for start, end in itertools.pairwise(edges)]


_MANY_USES = 16


class _Segment:
    """One registration of the driver, and how many of ours use it."""

    __slots__ = ("count", "end", "readonly", "start", "uses")

    def __init__(self, start: int, end: int, readonly: bool) -> None:
        self.start, self.end, self.readonly = start, end, readonly
        self.count = 1
        self.uses: list[Event] = []


class _Registration:
    """One `register` that has not been undone."""

    __slots__ = ("finalizer", "keep", "segments")

    def __init__(self, segments: list[_Segment], keep: Any) -> None:
        self.segments, self.keep = segments, keep
        self.finalizer: weakref.finalize[Any, Any] | None = None


class Registry:
    """Registrations of a device: which pages are locked by which segment, and who uses each. Thread-safe.

    The driver refuses to register a page twice, so a registration takes what others have locked already and
    registers the rest; a segment ends with the last registration that uses it.

    Args:
        device: registers.
        budget: counts the bytes; None: that of the process.
    """

    def __init__(self, device: Device, budget: Budget | None = None) -> None:
        self._device = device
        self._budget = of_process() if budget is None else budget
        self._start()
        self._inherited: set[tuple[int, int]] = set()
        in_child(self._forget)
        pinned._registries.append(self)

    def _start(self) -> None:
        self._lock = threading.RLock()
        self._segments: dict[int, _Segment] = {}  # by start
        self._starts: list[int] = []  # sorted; replaced, never changed, and segments of it may be gone
        self._registrations: dict[tuple[int, int], list[_Registration]] = {}  # by address and length

    def _forget(self) -> None:
        """In a forked child, where nothing is registered."""
        self._inherited.update(self._registrations)
        for registration in (each for found in self._registrations.values() for each in found):
            if registration.finalizer is not None:
                registration.finalizer.detach()
        self._start()

    def add(self, host: np.ndarray[Any, Any], keep: Any = None) -> None:
        """Register; see `register`."""
        address, nbytes = host.ctypes.data, host.nbytes
        with self._lock:
            needless = not nbytes or self._device.properties().coherent
            segments = [] if needless else self._lock_pages(address, address + nbytes, host)
            registration = _Registration(segments, keep)
            self._registrations.setdefault((address, nbytes), []).append(registration)
            self._inherited.discard((address, nbytes))
            if keep is None:
                finalizer = weakref.finalize(_root(host), self._owner_died, (address, nbytes), registration)
                finalizer.atexit = False
                registration.finalizer = finalizer

    def remove(self, host: np.ndarray[Any, Any], gone_is_right: bool = False) -> None:
        """Unregister; see `unregister`."""
        key = (host.ctypes.data, host.nbytes)
        with self._lock:
            found = self._registrations.get(key)
            if not found:
                if gone_is_right:
                    return
                if key in self._inherited:
                    raise DeviceError(
                        f"{key[1]} bytes at {key[0]:#x} were registered in the parent of this process; a forked child "
                        "does not inherit that, so there is nothing to undo. Start workers by spawn"
                    )
                raise BufferSpecError(
                    f"array: {key[1]} bytes at {key[0]:#x} are not registered (or were unregistered, or freed); "
                    "give the array that gdcomm.register was given, once for each time"
                )
            registration = found.pop()
            if not found:
                self._registrations.pop(key, None)
        if registration.finalizer is not None:
            registration.finalizer.detach()
        self._release(registration.segments)

    def note_use(self, address: int, nbytes: int, event: Event) -> None:
        """Note queued work that touches registered memory."""
        if not self._starts:
            return
        with self._lock:
            for segment in self._within(address, address + nbytes):
                if len(segment.uses) >= _MANY_USES:
                    segment.uses[:] = [use for use in segment.uses if not use.query()]
                segment.uses.append(event)

    def seams(self, start: int, end: int) -> list[int]:
        """Where segments begin and end strictly within the range."""
        if not self._starts:
            return []
        with self._lock:
            return [
                edge
                for segment in self._within(start, end)
                for edge in (segment.start, segment.end)
                if start < edge < end
            ]

    def find(self, address: int) -> bool:
        """Whether a registration of ours has locked the page."""
        with self._lock:
            return bool(self._within(address, address + 1))

    # -- pages -------------------------------------------------------------------------------

    # The collector may run anywhere in here, find an owner dead and unregister its memory, in this thread and with the
    # lock held. A segment that is counted stays.

    def _lock_pages(self, low: int, high: int, host: np.ndarray[Any, Any]) -> list[_Segment]:
        """The segments that cover the bytes, counted; new ones where no page-locked memory is."""
        start, end = low // PAGE * PAGE, -(-high // PAGE) * PAGE
        found = self._within(start, end)
        for segment in found:
            segment.count += 1
        covering = [segment for segment in found if self._segments.get(segment.start) is segment]
        made: list[_Segment] = []
        try:
            if host.flags.writeable and any(segment.readonly for segment in covering):
                raise DeviceError(
                    "array: a part of this memory is registered read-only (through a read-only array); unregister "
                    "that first, or register the writable array before it"
                )
            for gap_start, gap_end in _gaps(start, end, covering):
                if not self._pinned_by_others(max(gap_start, low), min(gap_end, high)):
                    made.append(self._lock_gap(gap_start, gap_end, not host.flags.writeable))
        except BaseException:
            self._release(covering + made)
            raise
        return covering + made

    def _pinned_by_others(self, low: int, high: int) -> bool:
        return self._device.is_pinned(low) and self._device.is_pinned(high - 1)

    def _lock_gap(self, start: int, end: int, readonly: bool) -> _Segment:
        device, nbytes = self._device, end - start
        if not device.properties().host_register_supported:
            raise DeviceError("this GPU can't register memory that exists; use gdcomm.pinned_array(array), a copy")
        self._budget.reserve(nbytes, new=False)
        try:
            try:
                device.host_register(start, nbytes)
                readonly = False  # the pages may be written, even if the array may not
            except DeviceError as error:
                if not readonly:
                    raise
                if not device.properties().host_register_readonly_supported:
                    raise DeviceError(
                        f"array: this GPU can't register read-only memory ({error}); use gdcomm.pinned_array(array), "
                        'a copy, or map the file by mode="c"'
                    ) from error
                device.host_register(start, nbytes, readonly=True)
        except BaseException:
            self._budget.refund(nbytes)
            raise
        segment = self._segments[start] = _Segment(start, end, readonly)
        self._starts = sorted(self._segments)
        return segment

    def _unlock(self, segment: _Segment) -> None:
        del self._segments[segment.start]
        self._starts = sorted(self._segments)
        self._budget.refund(segment.end - segment.start)
        self._device.host_unregister(segment.start)

    def _release(self, segments: list[_Segment]) -> None:
        """Let go of segments, after the copies that use them."""
        for segment in segments:
            while events := self._let_go(segment):
                for event in events:
                    event.synchronize()

    def _let_go(self, segment: _Segment) -> list[Event]:
        """Count one user less, and unlock the pages after the last; or tell what that must wait for."""
        with self._lock:
            if segment.count == 1 and segment.uses:
                events, segment.uses = segment.uses, []
                return events
            segment.count -= 1
            if not segment.count:
                self._unlock(segment)
            return []

    def _owner_died(self, key: tuple[int, int], registration: _Registration) -> None:
        with self._lock:
            found = self._registrations.get(key, [])
            if registration not in found:
                return
            found.remove(registration)
            if not found:
                self._registrations.pop(key, None)
        self._release(registration.segments)

    def _within(self, start: int, end: int) -> list[_Segment]:
        starts = self._starts
        index = max(bisect.bisect_right(starts, start) - 1, 0)
        found = map(self._segments.get, starts[index : bisect.bisect_left(starts, end)])
        return [segment for segment in found if segment is not None and segment.end > start]


_registries: dict[int, Registry] = {}


def registry_of(device: Device) -> Registry:
    """The registrations of a device."""
    registry = _registries.get(id(device))
    if registry is None:
        registry = _registries.setdefault(id(device), Registry(device))
    return registry


def _registry(call: str) -> Registry:
    device = devices.current()
    if device is None:
        raise DeviceError(
            f"{call}: no GPU is reached here, so there is nothing to register memory with; install CuPy "
            "(pip install cupy-cuda13x, or cupy-cuda12x, as your driver is), or leave the call out"
        )
    return registry_of(device)


def _host(array: Any) -> tuple[np.ndarray[Any, Any], Any]:
    """The host memory of an object, and what keeps that alive if the registration must."""
    if isinstance(array, np.ndarray):
        if not (array.flags.c_contiguous or array.flags.f_contiguous):
            raise BufferSpecError(
                f"array: shape {array.shape} with strides {array.strides} has gaps; give the array that it is a view of"
            )
        if array.dtype.hasobject:
            raise BufferSpecError(f"array: dtype {array.dtype} holds Python objects, which a GPU can't read")
        return array, None
    try:
        host = np.frombuffer(array, np.uint8)
        return host, host  # while it lives, an mmap can't be closed
    except (TypeError, ValueError, BufferError) as error:
        raise BufferSpecError(
            f"array: a {type(array).__name__} has no contiguous host memory ({error}); "
            "give a NumPy array (of a tensor: tensor.numpy()) or an mmap"
        ) from None


def _root(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array that all views of this memory keep alive, and with it the memory."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _gaps(start: int, end: int, covering: list[_Segment]) -> Iterator[tuple[int, int]]:
    for segment in covering:
        if start < segment.start:
            yield start, segment.start
        start = max(start, segment.end)
    if start < end:
        yield start, end
