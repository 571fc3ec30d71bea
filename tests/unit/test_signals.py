"""Signals order hosts and streams, in both directions, and say so when they can't."""

from __future__ import annotations

import gc
import os
import signal as os_signal
import threading
import time
from typing import Any

import numpy as np
import pytest

import gdcomm
from gdcomm import devices
from gdcomm.devices.emulated import EmulatedDevice
from gdcomm.memory.pinned import pool_of
from gdcomm.transfer import signals


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> EmulatedDevice:
    made = EmulatedDevice(seed=5)
    monkeypatch.setattr(devices, "_installed", [made])
    return made


@pytest.fixture(params=[32, 64])
def bits(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def later(action: Any, seconds: float = 0.02) -> threading.Thread:
    def run() -> None:
        time.sleep(seconds)
        action()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_the_host_waits_for_a_stream(device: EmulatedDevice, bits: int) -> None:
    signal, array, stream = gdcomm.Signal(bits=bits), device.zeros(3), device.Stream()
    device.synchronize(None)
    seen: list[float] = []
    device.launch(stream, lambda v: v.fill(7), array)
    signal.stream_set(stream, 5)
    device.launch(stream, lambda v: seen.append(1), array)
    assert signal.value == 0
    assert signal.wait(4) == 5
    assert array._view.tolist() == [7, 7, 7], "what was queued before the signal is done"
    assert seen == [], "what was queued after it need not be"


def test_a_stream_waits_for_the_host(device: EmulatedDevice, bits: int) -> None:
    signal, stream, ran = gdcomm.Signal(bits=bits), device.Stream(), []
    signal.stream_wait(stream, 3)
    device.launch(stream, lambda: ran.append(signal.value))
    event = device.record(stream)
    assert not any(event.query() for _ in range(10))
    thread = later(lambda: signal.set(3))
    stream.synchronize()
    thread.join()
    assert ran == [3]


def test_a_stream_waits_for_another_stream(device: EmulatedDevice, bits: int) -> None:
    signal, order = gdcomm.Signal(bits=bits), []
    one, two = device.Stream(), device.Stream()
    signal.stream_wait(two, 1)
    device.launch(two, lambda: order.append("two"))
    device.launch(one, lambda: order.append("one"))
    signal.stream_set(one, 1)
    two.synchronize()
    assert order == ["one", "two"]


def test_a_wait_behind_an_event_is_tried_again_in_order(device: EmulatedDevice) -> None:
    signal, order = gdcomm.Signal(), []
    one, two = device.Stream(), device.Stream()
    signal.stream_wait(one, 1)
    device.launch(one, lambda: order.append("one"))
    device.wait_event(two, device.record(one))
    device.launch(two, lambda: order.append("two"))
    assert not any(device.record(two).query() for _ in range(6))
    signal.set(1)
    two.synchronize()
    assert order == ["one", "two"]


def test_equal_is_not_at_least(device: EmulatedDevice, bits: int) -> None:
    signal, stream, ran = gdcomm.Signal(9, bits=bits), device.Stream(), []
    signal.stream_wait(stream, 4, compare="==")
    device.launch(stream, lambda: ran.append(1))
    with pytest.raises(gdcomm.CommTimeoutError):
        signal.wait(4, compare="==", timeout=0.01)
    assert signal.wait(4) == 9
    assert not any(device.record(stream).query() for _ in range(6))
    signal.set(4)
    stream.synchronize()
    assert ran == [1]
    assert signal.wait(4, compare="==") == 4


def test_comparison_is_cyclic_for_hosts_and_streams(device: EmulatedDevice, bits: int) -> None:
    top = (1 << bits) - 1
    signal, stream = gdcomm.Signal(2, bits=bits), device.Stream()
    assert signal.wait(top - 1) == 2, "the counter went over its end"
    signal.stream_wait(stream, top - 1)
    stream.synchronize()
    signal.set(top)
    with pytest.raises(gdcomm.CommTimeoutError):
        signal.wait(1, timeout=0.01)
    assert signal.value == top


def test_a_host_time_out_is_a_timeout_error_and_changes_nothing(device: EmulatedDevice) -> None:
    signal = gdcomm.Signal(1)
    with pytest.raises(TimeoutError, match=r"value is 1 after 0\.01 s, waiting for >= 2"):
        signal.wait(2, timeout=0.01)
    with pytest.raises(gdcomm.CommTimeoutError):
        signal.wait(2, timeout=0)
    assert signal.wait(1, timeout=0) == 1
    signal.set(2)
    assert signal.wait(2) == 2


def test_a_stream_time_out_releases_the_stream_and_fails_the_signal(device: EmulatedDevice, bits: int) -> None:
    signal, stream, ran = gdcomm.Signal(bits=bits), device.Stream(), []
    signal.stream_wait(stream, 1, timeout=0.02)
    device.launch(stream, lambda: ran.append(1))
    signal.stream_wait(stream, 7, compare="==", timeout=60)  # behind it; is released with it
    device.launch(stream, lambda: ran.append(2))
    stream.synchronize()
    assert ran == [1, 2]
    for call in (
        signal.check,
        lambda: signal.value,
        lambda: signal.set(1),
        lambda: signal.wait(1),
        lambda: signal.stream_wait(stream, 1),
        lambda: signal.stream_set(stream, 1),
    ):
        with pytest.raises(gdcomm.CommTimeoutError, match=r"more than 0.02 s for >= 1, the value was 0"):
            call()


def test_a_wait_that_was_met_does_not_time_out(device: EmulatedDevice) -> None:
    signal, stream = gdcomm.Signal(), device.Stream()
    signal.stream_wait(stream, 1, timeout=0.05)
    signal.set(1)
    time.sleep(0.1)
    signal.check()
    stream.synchronize()
    other = gdcomm.Signal()
    other.stream_wait(stream, 1, timeout=0.05)
    thread = later(lambda: other.set(1), 0.01)
    stream.synchronize()
    thread.join()
    time.sleep(0.08)
    assert other.value == 1


def test_a_host_waiter_learns_of_a_stream_time_out(device: EmulatedDevice) -> None:
    signal, stream = gdcomm.Signal(), device.Stream()
    signal.stream_wait(stream, 5, timeout=0.02)
    with pytest.raises(gdcomm.CommTimeoutError, match="released"):
        signal.wait(9)


def test_the_watching_thread_ends_with_the_last_wait(device: EmulatedDevice) -> None:
    signal, stream = gdcomm.Signal(), device.Stream()
    signal.stream_wait(stream, 1, timeout=30)
    assert any(t.name == "gdcomm-signals" for t in threading.enumerate())
    signal.set(1)
    deadline = time.monotonic() + 5
    while any(t.name == "gdcomm-signals" for t in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(t.name == "gdcomm-signals" for t in threading.enumerate())


def test_kernels_reach_the_value(device: EmulatedDevice, bits: int) -> None:
    signal = gdcomm.Signal(3, bits=bits)
    array = signal.device
    assert (array.shape, array.dtype) == ((1,), np.dtype(f"u{bits // 8}"))
    device.launch(None, lambda v: v.__iadd__(1), array)
    assert signal.wait(4) == 4
    del signal
    gc.collect()
    device.launch(None, lambda v: v.fill(0), array)
    device.synchronize(None)


def test_bad_arguments_say_what_is_wrong(device: EmulatedDevice) -> None:
    signal = gdcomm.Signal(bits=32)
    cases: list[tuple[Any, str]] = [
        (lambda: gdcomm.Signal(bits=16), "32 or 64"),
        (lambda: gdcomm.Signal(-1), "unsigned"),
        (lambda: signal.set(1 << 32), "32 bits"),
        (lambda: signal.wait(-1), "unsigned"),
        (lambda: signal.stream_set(None, 1 << 32), "32 bits"),
        (lambda: signal.stream_wait(None, 1, compare="<"), "compare"),
        (lambda: signal.wait(1, compare="<"), "compare"),
        (lambda: signal.stream_wait("no stream", 1), "stream"),
    ]
    for call, word in cases:
        with pytest.raises(gdcomm.BufferSpecError, match=word):
            call()
    assert signal.value == 0


def test_without_a_device_threads_still_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_installed", [])
    monkeypatch.setattr(devices, "_cuda_state", [None])
    signal = gdcomm.Signal()
    thread = later(lambda: signal.set(2))
    assert signal.wait(1) == 2
    thread.join()
    for call in (lambda: signal.device, lambda: signal.stream_wait(None, 1), lambda: signal.stream_set(None, 1)):
        with pytest.raises(gdcomm.DeviceError, match="pip install"):
            call()


@pytest.mark.parametrize("value", ["a", 1.5, float("nan"), None, [1], -1, 1 << 64])
def test_values_are_numbers_or_refused(device: EmulatedDevice, value: Any) -> None:
    signal = gdcomm.Signal()
    for call in (
        lambda: gdcomm.Signal(value),
        lambda: signal.set(value),
        lambda: signal.wait(value, timeout=0),
        lambda: signal.stream_set(None, value),
        lambda: signal.stream_wait(None, value),
    ):
        with pytest.raises(gdcomm.BufferSpecError, match="unsigned number"):
            call()
    assert signal.value == 0


def test_numpys_numbers_are_numbers(device: EmulatedDevice) -> None:
    signal = gdcomm.Signal(np.uint64(2**64 - 1), bits=np.int64(64))
    signal.set(np.int64(3))
    assert signal.wait(np.int64(3), timeout=np.float32(0)) == 3
    signal.stream_set(None, np.int32(5))
    assert signal.wait(np.uint8(5)) == 5
    with pytest.raises(gdcomm.BufferSpecError, match="32 or 64"):
        gdcomm.Signal(bits=32.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("timeout", ["1", float("nan"), [1], 1j])
def test_a_time_out_is_a_number(device: EmulatedDevice, timeout: Any) -> None:
    signal = gdcomm.Signal()
    with pytest.raises(gdcomm.BufferSpecError, match="timeout"):
        signal.wait(1, timeout=timeout)
    with pytest.raises(gdcomm.BufferSpecError, match="timeout"):
        signal.stream_wait(device.Stream(), 1, timeout=timeout)


def test_time_outs_at_both_ends(device: EmulatedDevice) -> None:
    signal, stream = gdcomm.Signal(), device.Stream()
    for timeout in (-1, 0, float("-inf")):
        with pytest.raises(gdcomm.CommTimeoutError, match="after 0 s"):
            signal.wait(1, timeout=timeout)
    signal.stream_wait(stream, 1, timeout=float("inf"))
    thread = later(lambda: signal.set(1))
    assert signal.wait(1, timeout=float("inf")) == 1
    thread.join()
    stream.synchronize()


def test_two_hosts_wait_for_one_value(device: EmulatedDevice) -> None:
    signal, found = gdcomm.Signal(), []
    threads = [threading.Thread(target=lambda: found.append(signal.wait(2, timeout=10))) for _ in range(3)]
    for thread in threads:
        thread.start()
    signal.set(1)
    signal.set(2)
    for thread in threads:
        thread.join()
    assert found == [2, 2, 2]


def test_streams_do_not_write_to_memory_that_a_dropped_signal_left(device: EmulatedDevice) -> None:
    stream = device.Stream()
    for _ in range(20):
        signal = gdcomm.Signal()
        address = signal._array.ctypes.data
        signal.stream_set(stream, 77)
        del signal
        gc.collect()
        assert device.is_pinned(address)
        device.synchronize(None)
        others = [gdcomm.pinned_zeros(1, "u8") for _ in range(3)]
        stream.synchronize()
        assert not any(other.any() for other in others)


def test_signals_count_in_the_budget(device: EmulatedDevice) -> None:
    before = pool_of(device).stats()["leased"]
    many = [gdcomm.Signal() for _ in range(10)]
    assert pool_of(device).stats()["leased"] == before + len(many) * 4096


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_watches_signals_of_its_own(device: EmulatedDevice) -> None:
    signal, stream = gdcomm.Signal(), device.Stream()
    signal.stream_wait(stream, 1, timeout=60)
    with signals._watchdog._lock:
        child = os.fork()
    if not child:
        code = 1
        try:
            os_signal.alarm(20)
            own, queue = gdcomm.Signal(), device.Stream()
            own.stream_wait(queue, 1, timeout=0.01)
            queue.synchronize()
            code = 0 if own._failed and not signals._watchdog._pending[1:] else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    signal.set(1)
    stream.synchronize()
