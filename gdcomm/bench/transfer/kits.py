"""What the sections measure with: arrays, streams, events and small kernels. `cuda` has them of CuPy."""

from __future__ import annotations

import gc
import time
from typing import Any

import numpy as np

from gdcomm.bench.transfer.data import SPOILT, Array, differences, page_aligned, pattern
from gdcomm.devices.base import Device
from gdcomm.errors import DeviceError
from gdcomm.memory.budget import available, of_process
from gdcomm.memory.pinned import pool_of, size_class
from gdcomm.transfer.signals import Signal

__all__ = ["EmulatedKit", "Kit", "kit_of"]

_RESERVE = 0.8  # of the free memory that the benchmark takes at most
LCG_FACTOR, LCG_TERM = 1664525, 1013904223  # one step of the work that stands for a program's computing


class Kit:
    """Without a device; the base of the two kits that have one. Current stream: CuPy's (or the emulated device's).

    Args:
        sizes: bytes of the sweep; the largest is that of the large arrays.
        seconds: time for each row.

    Attributes:
        device: None without one.
        prefix: of columns.
        stream: a stream of its own, for what is timed by events.
        gates: whether streams can be held back until all is queued.
        medium, large: bytes of the arrays of the sections that are no sweep.
        notes: what was left out, and why.
    """

    name = "none"
    prefix = ""
    pieces = 1000
    batches = 32
    device: Device | None = None
    gates = False

    def __init__(self, sizes: list[int], seconds: float) -> None:
        self.sizes, self.seconds = sizes, seconds
        self.large = max(sizes)
        self.medium = max(1, self.large // 16)
        self.notes: list[str] = []
        self.stream: Any = None
        self._truth = np.empty(0, np.uint8)
        self._near: Any = None
        self._gate: tuple[Signal, int] | None = None
        if self.device is not None:
            self.stream = self.device.borrow_stream()
            self._probe_gate()

    # -- data --------------------------------------------------------------------------------

    def truth(self, nbytes: int) -> Array:
        """The test data in pageable memory: not to be written to."""
        if self._truth.nbytes < nbytes:
            self._truth = pattern(page_aligned(nbytes))
        return self._truth[:nbytes]

    def near(self, nbytes: int) -> Any:
        """The test data in device memory: not to be written to."""
        if self._near is None or self._near.nbytes < nbytes:
            self._near = None
            self._near = self.array(self.truth(nbytes))
        return self._near[:nbytes]

    def wrong_here(self, array: Array) -> int:
        """Bytes of host memory that are not the test data."""
        return differences(array, self.truth(array.nbytes))

    def wrong_there(self, array: Any) -> int:
        """Bytes of device memory (as uint8) that are not the test data."""
        return self.differ(array, self.near(array.nbytes))

    # -- room --------------------------------------------------------------------------------

    def fit(self, asked: int, *, locked: float = 0, pageable: float = 0, device: float = 0) -> int:
        """The largest of `asked`, `asked / 2`, ... bytes of which that many arrays fit in each kind of memory.

        0 if none does. Locked arrays count as host memory too.
        """
        free, budget = available(), of_process()
        room = (1 << 60) if free is None else int(free * _RESERVE)
        there = (1 << 60) if self.device is None else int(self.device.free_bytes() * _RESERVE)
        nbytes = asked
        while nbytes and (
            size_class(nbytes) * locked > budget.limit - budget.used
            or nbytes * (locked + pageable) > room
            or nbytes * device > there
        ):
            nbytes //= 2
        return nbytes

    def free(self) -> None:
        """Give back what a section used and pools kept."""
        gc.collect()
        if self.device is not None:
            self.finish()
            self.device.synchronize(self.stream)  # what is still used is not trimmed
            pool_of(self.device).trim()

    # -- streams -----------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait for the current stream."""
        if self.device is not None:
            self.device.synchronize(self.device.handle(None))

    def gate(self) -> tuple[Signal, int]:
        """A signal and the value that it does not have yet."""
        signal, value = self._gate or (Signal(bits=32), 0)
        try:
            signal.check()
        except TimeoutError:
            signal, value = Signal(bits=32), 0
        self._gate = signal, value + 1
        return self._gate

    def _probe_gate(self) -> None:
        assert self.device is not None
        signal = Signal(bits=32)
        try:
            signal.stream_wait(self.stream, 0)
            self.device.synchronize(self.stream)
        except DeviceError as error:
            self.notes.append(f"streams can't be held back until all is queued, so queueing may show: {error}")
        else:
            self.gates = True

    def mark(self, stream: Any) -> Any:
        """A point in a stream whose time is taken."""
        raise NotImplementedError

    def elapsed_us(self, start: Any, end: Any) -> float:
        """Microseconds between two marks that were passed."""
        raise NotImplementedError

    # -- device arrays -----------------------------------------------------------------------

    def empty(self, shape: Any, dtype: Any = np.uint8) -> Any:
        """A new device array."""
        raise NotImplementedError

    def array(self, host: Array) -> Any:
        """A device copy of host memory, made by the library's own means."""
        raise NotImplementedError

    def address(self, array: Any) -> int:
        """Of a device array."""
        raise NotImplementedError

    def fill(self, array: Any, value: int = SPOILT) -> None:
        """Queue a fill."""
        raise NotImplementedError

    def differ(self, a: Any, b: Any) -> int:
        """Elements that differ between two device arrays of one shape; waits."""
        raise NotImplementedError

    def kernel_copy(self, dst: Any, src: Any) -> None:
        """Queue a copy of bytes by a kernel."""
        raise NotImplementedError

    def pick(self, out: Any, table: Any, index: Any) -> None:
        """Queue `out[i] = table[index[i]]`, all on the device."""
        raise NotImplementedError

    def spin(self, out: Any, values: Any, steps: int, keep: int) -> None:
        """Queue work: `out = keep * out + v`, where v are the values (uint32) after so many steps of a recurrence."""
        raise NotImplementedError


class EmulatedKit(Kit):
    """The emulated device: shows that the paths work, not how fast a GPU is."""

    name, prefix = "emulated", "emu-"
    pieces = 100
    batches = 4

    def __init__(self, sizes: list[int], seconds: float) -> None:
        import gdcomm.testing

        self.device = self._device = gdcomm.testing.emulate()
        super().__init__(sizes, seconds)

    def mark(self, stream: Any) -> Any:
        passed: list[float] = []
        self._device.launch(stream, lambda: passed.append(time.perf_counter()))
        return passed

    def elapsed_us(self, start: Any, end: Any) -> float:
        return float(end[0] - start[0]) * 1e6

    def empty(self, shape: Any, dtype: Any = np.uint8) -> Any:
        return self._device.empty(shape, dtype)

    def array(self, host: Array) -> Any:
        made = self._device.array(host)
        self.finish()
        return made

    def address(self, array: Any) -> int:
        return int(array.ptr)

    def fill(self, array: Any, value: int = SPOILT) -> None:
        self._device.fill(array, value)

    def differ(self, a: Any, b: Any) -> int:
        return int(np.count_nonzero(self._device.asnumpy(a) != self._device.asnumpy(b)))

    def kernel_copy(self, dst: Any, src: Any) -> None:
        self._device.launch(None, np.copyto, dst, src)

    def pick(self, out: Any, table: Any, index: Any) -> None:
        self._device.launch(None, lambda o, t, i: np.copyto(o, t[i]), out, table, index)

    def spin(self, out: Any, values: Any, steps: int, keep: int) -> None:
        def work(target: Array, source: Array) -> None:
            found = source.copy()
            for _ in range(steps):
                found *= np.uint32(LCG_FACTOR)
                found += np.uint32(LCG_TERM)
            target *= np.uint32(keep)
            target += found

        self._device.launch(None, work, out, values)


def kit_of(name: str, sizes: list[int], seconds: float) -> Kit:
    """The kit of a kind of device: "none", "emulated" or "cuda"."""
    if name == "cuda":
        from gdcomm.bench.transfer.cuda import CudaKit

        return CudaKit(sizes, seconds)
    return (EmulatedKit if name == "emulated" else Kit)(sizes, seconds)
