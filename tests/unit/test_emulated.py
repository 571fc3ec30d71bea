"""The emulated device is as late, as unforgiving and as exact as the stream rules allow."""

from __future__ import annotations

import gc
import threading
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gdcomm
from gdcomm import devices, testing
from gdcomm.devices.base import Buffer
from gdcomm.devices.emulated import EmulatedDevice

DTYPES = ["i1", "<i4", "<f8", "<c16", "?", "<f2", ml_dtypes.bfloat16, [("a", "i1"), ("b", "<f8")]]


@pytest.fixture
def device() -> EmulatedDevice:
    return EmulatedDevice(seed=7)


class Foreign:
    """An array of some other library over this memory."""

    def __init__(self, array: Any, **changes: Any) -> None:
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, **changes}


def described(device: EmulatedDevice, obj: Any, stream: Any = None) -> Buffer:
    buffer = device.find(obj, stream)
    assert buffer is not None
    return buffer


def pinned(device: EmulatedDevice, content: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    block = device.pinned(content.nbytes)
    block[...] = np.ascontiguousarray(content).reshape(-1).view(np.uint8)
    return block


def test_work_does_not_run_until_something_waits(device: EmulatedDevice) -> None:
    ran: list[int] = []
    device.launch(None, lambda: ran.append(1))
    device.record(None)
    assert ran == []
    device.synchronize(None)
    assert ran == [1]
    eager = EmulatedDevice(0, early=1.0)
    eager.launch(None, lambda: ran.append(2))
    assert ran == [1, 2]


def test_synchronize_leaves_other_streams_behind(device: EmulatedDevice) -> None:
    ran: list[str] = []
    one, two = device.Stream(), device.Stream()
    device.launch(one, lambda: ran.append("one"))
    device.launch(two, lambda: ran.append("two"))
    two.synchronize()
    device.asnumpy(device.zeros(3))
    assert ran == ["two"], "asnumpy waits for its own stream only"


def test_an_event_runs_only_what_was_queued_before_it(device: EmulatedDevice) -> None:
    ran: list[int] = []
    device.launch(None, lambda: ran.append(1))
    event = device.record(None)
    device.launch(None, lambda: ran.append(2))
    event.synchronize()
    assert ran == [1]


def test_wait_event_pulls_in_dependencies_and_nothing_else(device: EmulatedDevice) -> None:
    ran: list[str] = []
    a, b, c = device.Stream(), device.Stream(), device.Stream()
    device.launch(a, lambda: ran.append("a1"))
    device.wait_event(b, device.record(a))
    device.launch(a, lambda: ran.append("a2"))
    device.launch(b, lambda: ran.append("b1"))
    device.wait_event(c, device.record(b))
    device.launch(b, lambda: ran.append("b2"))
    device.launch(c, lambda: ran.append("c1"))
    c.synchronize()
    assert ran == ["a1", "b1", "c1"]


def test_a_long_ping_pong_of_streams_needs_no_deep_recursion(device: EmulatedDevice) -> None:
    a, b = device.Stream(), device.Stream()
    x = device.zeros((), np.int64, a)
    for _ in range(1500):
        device.wait_event(b, device.record(a))
        device.launch(b, lambda v: v.__iadd__(1), x)
        device.wait_event(a, device.record(b))
    assert int(device.asnumpy(x, a)) == 1500


def test_polling_ends_after_zero_to_three_refusals(device: EmulatedDevice) -> None:
    refusals = set()
    for _ in range(50):
        device.launch(None, lambda: None)
        event = device.record(None)
        refusals.add([event.query() for _ in range(4)].index(True))
    assert refusals == {0, 1, 2, 3}
    assert device.record(None).query(), "an event without work before it is done"


def test_current_stream_is_scoped_and_thread_local(device: EmulatedDevice) -> None:
    stream, seen = device.Stream(), []
    with stream:
        assert device.current_stream() is stream
        thread = threading.Thread(target=lambda: seen.append(device.current_stream()))
        thread.start()
        thread.join()
    assert seen == [device.default_stream]
    assert device.current_stream() is device.default_stream


def test_streams_are_understood_in_every_form(device: EmulatedDevice) -> None:
    s = device.Stream()
    torch, protocol = SimpleNamespace(cuda_stream=s.ptr), SimpleNamespace(__cuda_stream__=lambda: (0, s.ptr))
    for form in (s, s.ptr, SimpleNamespace(ptr=s.ptr), torch, protocol):
        assert device.stream_of(form) is s
    assert device.stream_of(0) is device.default_stream
    for wrong in (987654, "x", EmulatedDevice().Stream()):
        with pytest.raises(gdcomm.BufferSpecError):
            device.stream_of(wrong)


def test_a_failing_kernel_raises_at_the_wait_and_later_work_still_runs(device: EmulatedDevice) -> None:
    ran: list[int] = []
    device.launch(None, lambda: 1 / 0)
    device.launch(None, lambda: ran.append(1))
    with pytest.raises(ZeroDivisionError):
        device.synchronize(None)
    device.synchronize(None)
    assert ran == [1]


def test_threads_may_share_the_device(device: EmulatedDevice) -> None:
    x, streams = device.zeros(1, np.int64), [device.Stream() for _ in range(4)]
    device.synchronize(None)

    def work(stream: Any) -> None:
        for _ in range(100):
            device.empty(10)
            device.launch(stream, lambda v: v.__iadd__(1), x)
            while not device.record(stream).query():
                pass

    threads = [threading.Thread(target=work, args=(s,)) for s in streams]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert device.asnumpy(x).tolist() == [400]


def test_new_memory_is_garbage_and_aligned(device: EmulatedDevice) -> None:
    for nbytes in (1, 8, 1000):
        x = device.empty(nbytes, "u1")
        assert x.ptr % 256 == 0
        assert min(device.asnumpy(x).min(), device.pinned(nbytes).min()) > 0
    first = [EmulatedDevice(seed).pinned(64).tobytes() for seed in (0, 0, 1)]
    assert first[0] == first[1] != first[2], "the seed decides"


def test_freed_memory_is_spoilt_even_under_queued_work(device: EmulatedDevice) -> None:
    seen: list[np.ndarray[Any, Any]] = []
    x = device.array(np.arange(100.0))
    device.synchronize(None)
    device.launch(None, lambda v: seen.append(v.copy()), x)
    del x
    gc.collect()
    device.synchronize(None)
    assert (seen[0].view("u1") == 0xDD).all()


def test_a_buffer_keeps_the_memory(device: EmulatedDevice) -> None:
    buffer = described(device, device.array(np.arange(10.0))[4:])
    gc.collect()
    out = device.pinned(buffer.nbytes)
    device.to_host(out, buffer)
    device.synchronize(None)
    assert out.view("f8").tolist() == [4, 5, 6, 7, 8, 9]


def test_a_queued_copy_survives_its_array(device: EmulatedDevice) -> None:
    x = device.array(np.arange(500_000.0))
    device.synchronize(None)
    out = device.pinned(x.nbytes)
    buffer = described(device, x)
    device.to_host(out, buffer)
    del x, buffer
    gc.collect()
    device.synchronize(None)
    assert (out == 0xDD).all()


def test_freed_memory_is_no_longer_ours(device: EmulatedDevice) -> None:
    x = device.empty(1000)
    foreign = Foreign(x)
    buffer = described(device, foreign)
    del x
    gc.collect()
    assert device.find(foreign) is None
    with pytest.raises(gdcomm.BufferSpecError, match="freed"):
        device.to_host(device.pinned(8), buffer)


def test_many_allocations_are_found_by_any_address_in_them(device: EmulatedDevice) -> None:
    kept = [device.empty(n, "u1") for n in range(1, 200)]
    del kept[::3]
    gc.collect()
    for x in kept:
        assert all(device.owns(address) for address in (x.ptr, x.ptr + x.nbytes - 1))
    assert not any(device.owns(address) for address in (0, np.zeros(4).ctypes.data))


def test_find_takes_the_same_road_for_foreign_arrays(device: EmulatedDevice) -> None:
    x = device.array(np.arange(12.0).reshape(3, 4))[::-1, ::2]
    ours, foreign = described(device, x), described(device, Foreign(x))
    assert (ours.ptr, ours.shape, ours.strides) == (foreign.ptr, foreign.shape, foreign.strides)
    assert (ours.strides, ours.nbytes, ours.contiguous) == ((-32, 16), 48, False)


def test_find_refuses_what_is_not_ours(device: EmulatedDevice) -> None:
    host = np.zeros(4)
    interface = {"data": (host.ctypes.data, False)}
    for other in (host, 3, None, EmulatedDevice().empty(3), Foreign(device.empty(4), **interface)):
        assert device.find(other) is None
    assert device.find(Foreign(device.empty(0), shape=(0,), data=(0, False))) is None


def test_find_refuses_an_array_beyond_its_block(device: EmulatedDevice) -> None:
    x = device.empty(4)
    for changes in ({"shape": (5,)}, {"strides": (16,)}, {"strides": (-8,)}):
        with pytest.raises(gdcomm.BufferSpecError, match="beyond"):
            device.find(Foreign(x, **changes))


def test_find_knows_empty_scalar_readonly_length_one_and_dtype(device: EmulatedDevice) -> None:
    empty, scalar = described(device, device.empty((0, 3))), described(device, device.empty(()))
    assert (empty.nbytes, empty.contiguous) == (0, True)
    assert (scalar.shape, scalar.nbytes, scalar.contiguous) == ((), 8, True)
    assert described(device, device.empty(3).readonly()).readonly
    for dtype in DTYPES:
        assert described(device, device.empty(3, dtype)).dtype == np.dtype(dtype)
    thin = device.empty((1, 4))
    assert described(device, Foreign(thin, strides=(999, 8))).contiguous


def test_find_orders_on_the_given_or_current_or_producing_stream(device: EmulatedDevice) -> None:
    one, two = device.Stream(), device.Stream()
    x = device.empty(3)

    def stream(obj: Any, given: Any = None) -> Any:
        return described(device, obj, given).stream

    assert stream(x) is device.default_stream
    assert stream(x, one) is one
    with two:
        assert stream(x) is two
        assert stream(Foreign(x, stream=one.ptr)) is one
    device.fill(x, 3, one)
    assert stream(Foreign(x, stream=one.ptr), two) is two
    assert device.asnumpy(x, two).tolist() == [3, 3, 3], "the given stream waits for the producer"


def test_indexing_gives_views_down_to_elements(device: EmulatedDevice) -> None:
    values = np.arange(24.0).reshape(2, 3, 4)
    x = device.array(values)
    device.synchronize(None)
    for key in (
        1,
        (1, 2, 3),
        np.s_[..., 1],
        np.s_[::-1, 1:, ::2],
        None,
        (0, None, slice(1)),
        np.int64(1),
        ...,
    ):
        part = x[key]
        assert device.owns(part.ptr)
        assert np.array_equal(device.asnumpy(part), values[key])
    device.fill(x[0, 1, 2], -1)
    assert device.asnumpy(x)[0, 1, 2] == -1
    for copying in ([0, 1], np.array([True, False]), True):
        with pytest.raises(TypeError):
            x[copying]


def test_reshape_and_transpose_are_views_that_numpy_can_not_read(device: EmulatedDevice) -> None:
    x = device.array(np.arange(6))
    y = x.reshape(2, -1)
    assert (y.ptr, y.shape, x.reshape((3, 2)).shape) == (x.ptr, (2, 3), (3, 2))
    assert (y.T.ptr, y.T.strides) == (x.ptr, (8, 24))
    with pytest.raises(ValueError):
        y.T.reshape(6)
    for use in (np.asarray, lambda v: v + 1, lambda v: np.ones(6) + v):
        with pytest.raises(TypeError):
            use(x)


def test_array_keeps_or_takes_an_order_and_a_snapshot(device: EmulatedDevice) -> None:
    values = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    assert device.array(values).strides == (8, 16)
    assert device.array(values, order="C").strides == (24, 8)
    assert device.zeros((2, 3), order="F").strides == (8, 16)
    x = device.array(values)
    values[...] = -1
    assert device.asnumpy(x).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_piece_lies_within_and_starts_at_an_element_of_a_strided_array(device: EmulatedDevice) -> None:
    whole, strided = described(device, device.zeros(4)), described(device, device.zeros(8)[::2])
    for buffer, nbytes, offset in ((strided, 8, 3), (whole, 40, 0), (whole, 8, 32), (whole, 8, -8)):
        with pytest.raises(AssertionError):
            device.to_host(device.pinned(nbytes), buffer, offset)
        with pytest.raises(AssertionError):
            device.to_device(buffer, device.pinned(nbytes), offset)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Any, np.ndarray[Any, Any], Any, str]:
    """A dtype, host values, an index into them and an order."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    steps = st.sampled_from([1, 2, 3, -1, -2])
    starts = st.sampled_from([None, 0, 1, -1])
    index = tuple(slice(draw(starts), None, draw(steps)) for _ in shape)
    raw = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 2, int(np.prod(shape)) * dtype.itemsize)
    return dtype, raw.astype(np.uint8).view(dtype).reshape(shape), index, draw(st.sampled_from("CF"))


@settings(max_examples=150, deadline=None)
@given(layouts(), st.data())
def test_strided_pieces_agree_with_numpy(layout: Any, data: st.DataObject) -> None:
    dtype, values, index, order = layout
    device = EmulatedDevice(1)
    x = device.array(values, order=order)
    view, expected = x[index], values[index]
    buffer = described(device, view)
    assert (buffer.shape, buffer.nbytes) == (expected.shape, expected.nbytes)
    assert buffer.contiguous == expected.flags.c_contiguous or order == "F"

    first = data.draw(st.integers(0, expected.size), label="first")
    start = first * dtype.itemsize
    end = data.draw(st.integers(start, expected.nbytes), label="end")  # may cut an element
    out = device.pinned(end - start)
    device.to_host(out, buffer, start)
    device.synchronize(None)
    assert out.tobytes() == expected.tobytes()[start:end]

    new = np.frombuffer(bytes(1 - b for b in expected.tobytes()[start:end]), np.uint8)
    device.to_device(buffer, pinned(device, new), start)
    after = values.copy()
    flat = bytearray(expected.tobytes())
    flat[start:end] = new.tobytes()
    after[index] = np.frombuffer(bytes(flat), f"V{dtype.itemsize}").view(dtype).reshape(expected.shape)
    assert device.asnumpy(x).tobytes() == after.tobytes()


def test_emulate_installs_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_installed", [])
    monkeypatch.delenv("GDCOMM_DEVICE", raising=False)
    assert testing.emulate_if_asked() is None
    assert devices.installed() == []
    monkeypatch.setenv("GDCOMM_DEVICE", "emulated")
    device = testing.emulate_if_asked()
    assert device is testing.emulate(5)
    assert devices.installed()[0] is device
    x = testing.emulate().empty(3)
    assert isinstance(x, testing.EmulatedArray)
    assert getattr(devices.find(x), "device", None) is device
