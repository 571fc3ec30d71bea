"""Signals order hosts and streams, in both directions, and say so when they can't."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import numpy as np
import pytest

import gdcomm
from gdcomm import devices
from gdcomm.devices.emulated import EmulatedDevice


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
