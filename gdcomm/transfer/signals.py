"""A value that hosts, streams and kernels set and wait for, without a GPU thread that polls."""

from __future__ import annotations

import ctypes
import math
import operator
import os
import threading
import time
from typing import Any, NamedTuple

from gdcomm import devices
from gdcomm.devices.base import Device, Event
from gdcomm.errors import BufferSpecError, CommTimeoutError, DeviceError
from gdcomm.memory.arrays import pinned_zeros
from gdcomm.memory.pinned import note_use

__all__ = ["Signal"]

_SPIN_S = 50e-6  # how long a host thread looks without pause
_LONGEST_SLEEP_S = 1e-3
_WATCH_S = 1e-3  # how often time-outs of streams are looked at
_COMPARE = (">=", "==")


class Signal:
    """An unsigned number in page-locked memory that the GPU reads and writes.

    ```python
    ready = gdcomm.Signal()
    ready.stream_wait(stream, 1)        # work queued on the stream from here on waits
    fill(host_buffer)
    ready.set(1)                        # from the host: the stream goes on
    done = gdcomm.Signal()
    done.stream_set(stream, 1)          # after all work queued so far
    done.wait(1, timeout=5.0)           # the host waits for the stream
    ```

    A kernel sets it too: `*signal = value` after `__threadfence_system()`, with `signal.device` as its argument.
    Comparison is cyclic, as CUDA's: `>=` holds from `value` on for half the range of the number, so a counter
    may overflow. Where there is no GPU the value is ordinary memory, and only host threads set it and wait for it.

    A stream that waits can't be cancelled: see `stream_wait` for what a time-out does. A signal that is dropped leaves
    its memory to the streams that it was used on until they have passed; a wait that nobody can meet any more then
    blocks its stream for ever. A forked child has no part in its parent's signals: make them after the fork.

    Args:
        value: to begin with.
        bits: 32 or 64.

    Raises:
        BufferSpecError: an argument can't be used.
        PinnedMemoryError: over the budget, see `GDCOMM_PINNED_LIMIT`.
        DeviceError: the driver gives no page-locked memory.
    """

    def __init__(self, value: int = 0, *, bits: int = 64) -> None:
        if isinstance(bits, float) or bits not in (32, 64):
            raise BufferSpecError(f"Signal: bits is {bits!r}; give 32 or 64")
        self._bits = int(bits)
        value = self._checked(value)
        self._device = devices.current()
        self._array = pinned_zeros(1, f"u{self._bits // 8}")
        word: Any = ctypes.c_uint32 if bits == 32 else ctypes.c_uint64
        self._word = word.from_address(self._array.ctypes.data)
        self._word.value = value
        self._failed: str | None = None
        self._address: int | None = None

    def __repr__(self) -> str:
        return f"Signal({self._word.value}, bits={self._bits})"

    # -- the host ----------------------------------------------------------------------------

    @property
    def value(self) -> int:
        """The value now.

        Raises:
            CommTimeoutError: a stream's wait for this signal timed out.
        """
        self.check()
        return int(self._word.value)

    def set(self, value: int) -> None:
        """Set the value from the host, at once; what this thread wrote to page-locked memory before is seen with it.

        Args:
            value: to set.

        Raises:
            BufferSpecError: it is no unsigned number of the signal's bits.
            CommTimeoutError: a stream's wait for this signal timed out; the value is set all the same.
        """
        self._word.value = self._checked(value)
        self.check()

    def wait(self, value: int, *, compare: str = ">=", timeout: float | None = None) -> int:
        """Block the calling thread until the value is reached.

        It looks without pause for 50 us, then with pauses that grow to 1 ms.

        Args:
            value: to compare with.
            compare: ">=" (cyclic) or "==".
            timeout: seconds; None (or infinity) waits for ever, and zero or less looks once.

        Returns:
            The value that ended the wait.

        Raises:
            BufferSpecError: an argument can't be used.
            CommTimeoutError: (also a TimeoutError) the time is over, or a stream's wait timed out before.
        """
        value, equal, timeout = self._checked(value), _is_equal(compare), _seconds(timeout)
        begin, pause = time.monotonic(), 0.0
        while True:
            found = int(self._word.value)
            self.check()
            if self._reached(found, value, equal):
                return found
            waited = time.monotonic() - begin
            if timeout is not None and waited >= timeout:
                raise CommTimeoutError(
                    f"Signal.wait: the value is {found} after {max(timeout, 0):g} s, waiting for {compare} {value}"
                )
            if self._device is not None:
                self._device.poll()
            if waited > _SPIN_S:
                pause = min(pause * 2 or 1e-6, _LONGEST_SLEEP_S)
                time.sleep(pause if timeout is None else min(pause, max(timeout - waited, 0)))

    def check(self) -> None:
        """Raise if a stream's wait for this signal timed out; call it before using what waited.

        Raises:
            CommTimeoutError: it did.
        """
        if self._failed is not None:
            raise CommTimeoutError(self._failed)

    # -- streams and kernels -----------------------------------------------------------------

    @property
    def device(self) -> Any:
        """A device array of one element over the value (uint32 or uint64), for kernels.

        Raises:
            DeviceError: there is no GPU.
        """
        return self._need_device("device").device_view(self._array)

    def stream_wait(self, stream: Any, value: int, *, compare: str = ">=", timeout: float | None = None) -> None:
        """Queue: work that is queued on the stream from now on waits until the value is reached. Does not block.

        CUDA can't take back a wait. When the time is over, a host thread therefore *releases* it, and marks the
        signal as failed: the work behind the wait then runs, on whatever its input holds at that moment, and each later
        call of the signal raises. So after `stream.synchronize()`, call `check()` before the results are used, and
        queue nothing behind such a wait that does harm with wrong input (an index out of range, say). Waits of this
        signal that have no time-out of their own are not released.

        While a stream waits, CUDA calls that wait for all streams do not return: freeing device memory to the system,
        and on some drivers the first launch of a kernel. Launch what you need once before.

        Args:
            stream: CuPy's, PyTorch's or Numba's stream, or a handle; None is the current one.
            value: to compare with.
            compare: ">=" (cyclic) or "==".
            timeout: seconds from this call on, until the *value* is reached; None (or infinity) waits for ever.

        Raises:
            BufferSpecError: an argument can't be used.
            DeviceError: there is no GPU, or it has no stream memory operations (of this width).
            CommTimeoutError: a wait for this signal timed out before.
        """
        self.check()
        value, equal, timeout = self._checked(value), _is_equal(compare), _seconds(timeout)
        device = self._need_device("stream_wait")
        handle = device.handle(stream)
        device.stream_wait_value(handle, self._kernel_address(device), self._bits, value, equal)
        passed = self._use(device, handle)
        if timeout is not None:
            held = (stream, device.current_stream())
            _watchdog.add(_Pending(self, value, equal, time.monotonic() + timeout, timeout, passed, held))

    def stream_set(self, stream: Any, value: int) -> None:
        """Queue: set the value once all work queued on the stream so far is done. Does not block.

        What that work wrote, to host memory too, is seen by whoever sees the value.

        Args:
            stream: as in `stream_wait`.
            value: to set.

        Raises:
            BufferSpecError: an argument can't be used.
            DeviceError: there is no GPU, or it has no stream memory operations (of this width).
            CommTimeoutError: a wait for this signal timed out before.
        """
        self.check()
        value, device = self._checked(value), self._need_device("stream_set")
        handle = device.handle(stream)
        device.stream_write_value(handle, self._kernel_address(device), self._bits, value)
        self._use(device, handle)

    # -- inside ------------------------------------------------------------------------------

    def _need_device(self, what: str) -> Device:
        if self._device is None:
            raise DeviceError(f"Signal.{what} needs a GPU and CuPy: pip install cupy-cuda13x (or cupy-cuda12x)")
        return self._device

    def _kernel_address(self, device: Device) -> int:
        if self._address is None:
            self._address = device.kernel_address(self._array.ctypes.data, self._array.nbytes)
            if self._address is None:
                raise DeviceError("Signal: kernels of this GPU can't reach page-locked memory")
        return self._address

    def _use(self, device: Device, handle: Any) -> Event:
        """An event behind what was queued; the memory is not used for other things before."""
        event = device.record(handle)
        note_use(self._array.ctypes.data, self._array.nbytes, event)
        return event

    def _checked(self, value: Any) -> int:
        try:
            number = operator.index(value)
        except TypeError:
            number = -1
        if not 0 <= number < 1 << self._bits:
            raise BufferSpecError(f"Signal: value {value!r} is no unsigned number of {self._bits} bits")
        return number

    def _reached(self, found: int, value: int, equal: bool) -> bool:
        ahead = (found - value) % (1 << self._bits)
        return ahead == 0 if equal else ahead < 1 << (self._bits - 1)


def _is_equal(compare: str) -> bool:
    if compare not in _COMPARE:
        raise BufferSpecError(f"Signal: compare {compare!r} is none of {', '.join(_COMPARE)}")
    return compare == "=="


def _seconds(timeout: Any) -> float | None:
    if timeout is None:
        return None
    try:
        seconds = math.nan if isinstance(timeout, (str, bytes, bytearray)) else float(timeout)
    except (TypeError, OverflowError):
        seconds = math.nan
    if math.isnan(seconds):
        raise BufferSpecError(f"Signal: timeout {timeout!r} is no number of seconds")
    return seconds


class _Pending(NamedTuple):
    """A stream's wait with a time-out; `passed` is behind it on the stream, which `held` keeps alive."""

    signal: Signal
    value: int
    equal: bool
    deadline: float
    timeout: float
    passed: Event
    held: Any


class _Watchdog:
    """One thread that looks after all waits of streams with a time-out; it lives while there are any."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin without any; also in a forked child, which has neither the thread nor its parent's streams."""
        self._lock = threading.Lock()
        self._pending: list[_Pending] = []
        self._thread: threading.Thread | None = None

    def add(self, pending: _Pending) -> None:
        with self._lock:
            self._pending.append(pending)
            if self._thread is None or not self._thread.is_alive():
                here = pending.signal._need_device("stream_wait").here()
                self._thread = threading.Thread(target=self._run, args=(here,), name="gdcomm-signals", daemon=True)
                self._thread.start()

    def _run(self, here: Any) -> None:
        with here:
            while True:
                time.sleep(_WATCH_S)
                with self._lock:
                    self._pending = [pending for pending in self._pending if self._look(pending)]
                    if not self._pending:
                        self._thread = None
                        return

    def _look(self, pending: _Pending) -> bool:
        """Whether the wait needs more watching."""
        signal = pending.signal
        if signal._failed is not None:
            # Until the stream is through: its wait may be far behind in the queue, and wants its own value.
            if _done(pending.passed):
                return False
            signal._word.value = pending.value
            return True
        reached = signal._reached(int(signal._word.value), pending.value, pending.equal)
        if reached or time.monotonic() < pending.deadline:
            return not reached
        if _done(pending.passed):
            return False
        compare = "==" if pending.equal else ">="
        signal._failed = (
            f"Signal: a stream waited more than {pending.timeout} s for {compare} {pending.value}, the value was "
            f"{signal._word.value}; the wait was released, and what ran behind it may have used wrong data"
        )
        signal._word.value = pending.value
        return True


def _done(event: Event) -> bool:
    try:
        return event.query()
    except Exception:  # the device is in error, and so is the stream: nothing waits any more
        return True


_watchdog = _Watchdog()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_watchdog.start)
