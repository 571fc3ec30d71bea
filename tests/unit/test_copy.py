"""Copies between every two kinds of memory, in every layout; on a device where a missing wait shows every time."""

from __future__ import annotations

import array as plain_array
import gc
import importlib
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gdcomm
from gdcomm import devices
from gdcomm.devices.emulated import EmulatedArray, EmulatedDevice
from gdcomm.memory import pinned
from gdcomm.transfer import staging
from gdcomm.transfer.staging import Plan

KIB = 1024
HOST, LOCKED, DEVICE = "host", "locked", "device"
KINDS = [HOST, LOCKED, DEVICE]
DTYPES = ["i1", "<i4", "<f8", "<c16", "?", "<f2", ml_dtypes.bfloat16, [("a", "i1"), ("b", "<f8")], "V3"]
LAYOUTS = {
    "C": lambda a: a,
    "F": lambda a: a.T,
    "rows": lambda a: a[1::2],
    "columns": lambda a: a[:, 1::2],
    "wide rows": lambda a: a[:, :-1],
    "backwards": lambda a: a[::-1, ::-1],
    "mixed": lambda a: a.T[::-1, 1:],
}
copy_module = importlib.import_module("gdcomm.transfer.copy")
TINY = Plan(threads=3, smallest=4096, largest=4096, slots=4)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> EmulatedDevice:
    made = EmulatedDevice(seed=5)
    monkeypatch.setattr(devices, "_installed", [made])
    monkeypatch.setattr(staging, "plan", TINY)
    monkeypatch.setattr(copy_module, "_BY_DRIVER", 0)  # staging is tested by short arrays
    return made


def numbers(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray[Any, Any]:
    dtype = np.dtype(dtype)
    count = int(np.prod(shape)) * dtype.itemsize
    high = 2 if dtype.kind == "b" else 120
    return np.random.default_rng(seed).integers(0, high, count).astype(np.uint8).view(dtype).reshape(shape)


def made(device: EmulatedDevice, kind: str, content: np.ndarray[Any, Any]) -> Any:
    """A C-ordered array of a kind of memory with this content."""
    if kind == DEVICE:
        array = device.array(content, order="C")
        device.synchronize(None)
        return array
    if kind == LOCKED:
        array = device.pinned(content.nbytes).view(content.dtype).reshape(content.shape)
        array[...] = content
        return array
    return content.copy()


def content(device: EmulatedDevice, array: Any) -> np.ndarray[Any, Any]:
    return device.asnumpy(array) if isinstance(array, EmulatedArray) else array


def same(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("source", KINDS)
@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_direction_dtype_and_size(device: EmulatedDevice, target: str, source: str, dtype: Any) -> None:
    for n in (0, 1, 7, 1000, 30_001):
        values, before = numbers((n,), dtype), numbers((n,), dtype, 1)
        dst, src = made(device, target, before), made(device, source, values)
        assert gdcomm.copy(dst, src) is None
        assert same(content(device, dst), values)
        assert same(content(device, src), values)


@pytest.mark.parametrize("source", KINDS)
@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("size", [(6, 40), (60, 402)])
def test_every_layout_keeps_the_logical_content(
    device: EmulatedDevice, target: str, source: str, size: tuple[int, int]
) -> None:
    for dtype in ("<f8", "V3"):
        for to in LAYOUTS.values():
            for of in LAYOUTS.values():
                whole = numbers(size, dtype, 1)
                shape = of(whole).shape
                big = tuple(2 * n + 3 for n in (shape[::-1] if to in (LAYOUTS["F"], LAYOUTS["mixed"]) else shape))
                dst_whole, src_whole = made(device, target, numbers(big, dtype, 2)), made(device, source, whole)
                dst = to(dst_whole)[: shape[0], : shape[1]]
                expected = content(device, dst_whole).copy()
                to(expected)[: shape[0], : shape[1]] = of(whole)
                gdcomm.copy(dst, of(src_whole))
                assert same(content(device, dst_whole), expected), "nothing beside the view is written"


@pytest.mark.parametrize("kinds", [(DEVICE, HOST), (HOST, DEVICE), (DEVICE, LOCKED), (LOCKED, DEVICE)])
def test_scalars_and_axes_of_length_one(device: EmulatedDevice, kinds: tuple[str, str]) -> None:
    for shape in ((), (1,), (1, 1, 9), (3, 1, 5000)):
        values = numbers(shape, "<f8")
        dst = made(device, kinds[0], np.zeros(shape))
        gdcomm.copy(dst, made(device, kinds[1], values))
        assert same(content(device, dst), values)


@pytest.mark.parametrize("shape", [(4, 5, 400), (70, 2, 300), (3, 2, 2, 300)])
def test_rows_and_planes_go_by_the_copy_engine(device: EmulatedDevice, shape: tuple[int, ...]) -> None:
    values = numbers(shape, "<f8")
    locked, x = made(device, LOCKED, values), device.zeros(shape)
    keys = (np.s_[:, ::2, ..., 10:200], np.s_[1:, :, ..., 3:], np.s_[..., 100:])
    for key in keys:
        gdcomm.copy(x[key], locked[key])
        out = made(device, LOCKED, np.zeros(shape))
        gdcomm.copy(out[key], x[key])
        assert same(out[key], values[key])
    assert device.stats["copy"] >= 2 * len(keys)
    assert device.stats["to_device"] == 0 or len(values) > 64


def test_flat_locked_memory_is_one_copy_without_staging(device: EmulatedDevice) -> None:
    values = numbers((300, 300), "<f8")
    for order in "CF":
        x = device.empty(values.shape, order=order)
        locked = made(device, LOCKED, values.T).T if order == "F" else made(device, LOCKED, values)
        before = device.stats.get("copy", 0)
        gdcomm.copy(x, locked)
        assert (device.stats.get("copy", 0) - before, device.stats["to_device"]) == (1, 0)
        assert same(device.asnumpy(x), values)


def test_a_coherent_device_reads_pageable_memory_itself(device: EmulatedDevice) -> None:
    device.emulated_properties = device.emulated_properties._replace(
        pageable_memory_access=True, pageable_memory_access_uses_host_page_tables=True
    )
    values, out, x = numbers((30_000,), "<f8"), np.zeros(30_000), device.empty(30_000)
    gdcomm.copy(x, values)
    gdcomm.copy(out, x)
    assert same(out, values)
    assert (device.stats["to_device"], device.stats["to_host"]) == (0, 0)


@pytest.mark.parametrize("block", [None, True])
def test_short_copies_of_all_host_memory(device: EmulatedDevice, block: bool | None) -> None:
    page = np.zeros(16 * KIB, np.uint8)
    start = -page.ctypes.data % 4096 + 4096
    half = page[start : start + 100]
    across = page[start - 50 : start + 50]  # page-locked in part: no copy may reach from the one into the other
    values, x = numbers((100,), "u1"), device.zeros((100,), "u1")
    with gdcomm.registered(half):
        for host in (across, half, np.zeros(100, np.uint8), memoryview(bytearray(100))):
            array = np.asarray(host)
            array[:] = values
            device.fill(x, 0)
            gdcomm.copy(x, host, block=block)
            array[:] = 0
            assert same(device.asnumpy(x), values)
            gdcomm.copy(host, x, block=block)
            assert same(array, values)
        frozen = values.copy()
        frozen.flags.writeable = False
        device.fill(x, 0)
        gdcomm.copy(x, frozen, block=block)
        assert same(device.asnumpy(x), values)


def test_a_short_copy_to_the_device_does_not_wait_for_its_stream(device: EmulatedDevice) -> None:
    stream, signal = device.Stream(), gdcomm.Signal()
    x = device.zeros((8,), "u1")
    device.synchronize(None)
    signal.stream_wait(stream, 1, timeout=20)
    gdcomm.copy(x, np.full(8, 7, "u1"), stream=stream)  # would wait for ever
    signal.set(1)
    assert (device.asnumpy(x, stream) == 7).all()


def test_short_pageable_memory_goes_by_the_driver(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_module, "_BY_DRIVER", 8 << 20)
    values, x, out = numbers((30_000,), "<f8"), device.zeros((30_000,)), np.zeros(30_000)
    before = device.stats["to_device"], device.stats["to_host"]
    host = values.copy()
    gdcomm.copy(x, host)
    host[:] = 0  # it was taken during the call
    gdcomm.copy(out, x)
    assert same(out, values)
    assert (device.stats["to_device"], device.stats["to_host"]) == before
    memory = np.zeros(64 * KIB, np.uint8)
    memory[:] = numbers(memory.shape, "u1")
    content, y = memory.copy(), device.zeros(memory.shape, "u1")
    for part in (memory[: 32 * KIB], memory[16 * KIB : 32 * KIB]):  # page-locked at an end, or in the middle
        with gdcomm.registered(part):
            device.fill(y, 0)
            gdcomm.copy(y, memory)
            assert same(device.asnumpy(y), content)
            memory[:] = 0
            gdcomm.copy(memory, y)
            assert same(memory, content)


def test_registered_memory_is_copied_directly_across_seams(device: EmulatedDevice) -> None:
    memory = np.zeros(64 * KIB * 4, np.uint8)
    memory[:] = numbers(memory.shape, "u1")
    values, x = memory.copy(), device.zeros(memory.shape, "u1")
    with gdcomm.registered(memory[: 100 * KIB]):
        gdcomm.copy(x, memory)  # locked in part: staged
        assert same(device.asnumpy(x), values)
        with gdcomm.registered(memory):
            device.fill(x, 0)
            before = device.stats["to_device"]
            gdcomm.copy(x, memory)
            assert same(device.asnumpy(x), values)
            assert device.stats["to_device"] == before
            memory[:] = 0
            gdcomm.copy(memory, x)
            assert same(memory, values)


def test_memory_mapped_files_buffers_and_read_only_sources(device: EmulatedDevice, tmp_path: Any) -> None:
    values = numbers((20_000,), "<f8")
    values.tofile(tmp_path / "data")
    x = device.empty(values.shape)
    gdcomm.copy(x, np.memmap(tmp_path / "data", np.float64, "r"))
    assert same(device.asnumpy(x), values)
    writable = np.memmap(tmp_path / "data", np.float64, "r+")
    writable[:] = 0
    gdcomm.copy(writable, x)
    assert same(np.fromfile(tmp_path / "data"), values)
    row = np.broadcast_to(values, (2, 20_000))[0]
    for source in (plain_array.array("d", values), memoryview(values), DLPack(values), row):
        device.fill(x, 0)
        gdcomm.copy(x, source)
        assert same(device.asnumpy(x), values)
    wide = device.empty((3, 20_000))
    gdcomm.copy(wide, np.broadcast_to(values, (3, 20_000)))
    assert same(device.asnumpy(wide), np.stack([values] * 3))
    target = bytearray(8)
    gdcomm.copy(target, np.frombuffer(b"abcdefgh", np.uint8))
    assert target == b"abcdefgh"


class DLPack:
    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array

    def __dlpack__(self, **arguments: Any) -> Any:
        return self._array.__dlpack__(**arguments)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def test_overlapping_memory_is_copied_as_numpy_does(device: EmulatedDevice) -> None:
    values = numbers((5000,), "<f8")
    for kind in KINDS:
        for to, of in ((np.s_[1:], np.s_[:-1]), (np.s_[:-1], np.s_[1:]), (np.s_[::-1], np.s_[:]), (np.s_[:], np.s_[:])):
            x, expected = made(device, kind, values), values.copy()
            expected[to] = expected[of].copy()
            gdcomm.copy(x[to], x[of])
            assert same(content(device, x), expected)


# -- order ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [3, 5000, 40_000])
@pytest.mark.parametrize("kind", [HOST, LOCKED])
def test_a_copy_is_ordered_on_its_stream(device: EmulatedDevice, n: int, kind: str) -> None:
    values = numbers((n,), "<f8")
    stream, out, host = device.Stream(), made(device, kind, np.zeros(n)), made(device, kind, values)
    x = device.zeros(n, stream=stream)  # queued before: must not come after the copy
    gdcomm.copy(x, host, stream=stream)
    host[:] = -1  # allowed from now on
    device.launch(stream, lambda v: v.__iadd__(1), x)
    gdcomm.copy(out, x, stream=stream)
    device.fill(x, 9, stream)  # must not be seen
    assert same(out, values + 1)


@pytest.mark.parametrize("reader_first", [True, False])
@pytest.mark.parametrize("n", [3, 40_000])
def test_two_libraries_streams_are_ordered_on_the_device(device: EmulatedDevice, n: int, reader_first: bool) -> None:
    one, two = device.Stream(), device.Stream()

    class Foreign:  # of a library with a current stream of its own
        def __init__(self, array: Any, stream: Any) -> None:
            self.__cuda_array_interface__ = {**array.__cuda_array_interface__, "stream": stream.ptr}

    x, y = device.zeros(n, stream=one), device.zeros(n, stream=two)
    device.fill(x, 3, one)
    device.fill(y, 7, two)
    gdcomm.copy(Foreign(y, two), Foreign(x, one))
    device.fill(x, 5, one)  # after the copy read it
    if reader_first:
        one.synchronize()
    assert (device.asnumpy(y, two) == 3).all()


def test_block_says_who_waits(device: EmulatedDevice) -> None:
    values = numbers((30_000,), "<f8")
    x, y, locked = device.zeros(30_000), device.zeros(30_000), made(device, LOCKED, values)
    copying = gdcomm.copy(x, locked, block=False)
    assert copying is not None
    locked[0] = -7.0  # too early
    copying.synchronize()
    assert copying.query()
    assert device.asnumpy(x)[0] == -7
    out = made(device, LOCKED, np.zeros(30_000))
    back = gdcomm.copy(out, x, block=False)
    assert back is not None
    assert not out.any()
    while not back.query():
        pass
    assert same(out, locked)
    assert gdcomm.copy(y, x) is None
    assert not y._view.any() or y._view[0] != -7, "on the device nobody waits"
    gdcomm.copy(y, x, block=True)
    assert y._view[0] == -7
    short = device.zeros(3)
    gdcomm.copy(short, np.ones(3), block=True)
    assert short._view.all()
    assert gdcomm.copy(np.zeros(3), np.ones(3), block=False).query()  # type: ignore[union-attr]
    assert gdcomm.copy(device.empty(0), np.ones(0), block=False).query()  # type: ignore[union-attr]


def test_pageable_memory_is_done_with_at_return_also_without_blocking(device: EmulatedDevice) -> None:
    for n in (3, 30_000):
        values, x, out = numbers((n,), "<f8"), device.zeros(n), np.zeros(n)
        expected = values.copy()
        up = gdcomm.copy(x, values, block=False)
        values[:] = 0
        gdcomm.copy(out, x, block=False)
        assert same(out, expected)
        assert up is not None
        up.synchronize()


def test_many_short_copies_do_not_overwrite_each_other(device: EmulatedDevice) -> None:
    xs = [device.zeros(4) for _ in range(50)]
    for i, x in enumerate(xs):
        gdcomm.copy(x, np.full(4, float(i)))
    assert [device.asnumpy(x)[0] for x in xs] == list(range(50))


def test_memory_stays_registered_until_a_copy_under_way_is_done(device: EmulatedDevice) -> None:
    values, x = numbers((30_000,), "<f8"), device.zeros(30_000)
    with gdcomm.registered(values):
        gdcomm.copy(x, values, block=False)
    assert same(device.asnumpy(x), values)


def test_arrays_of_a_copy_under_way_live_until_it_is_done(device: EmulatedDevice) -> None:
    values, locked = numbers((30_000,), "<f8"), gdcomm.pinned_empty(30_000)
    locked[:] = values
    x = device.zeros(30_000)
    gdcomm.copy(x, locked, block=False)
    del locked
    gc.collect()
    other = gdcomm.pinned_empty(30_000)  # the same block, if it was given back too early
    other[:] = 0
    assert same(device.asnumpy(x), values)


def test_a_copy_that_was_waited_for_keeps_nothing(device: EmulatedDevice) -> None:
    locked, x = gdcomm.pinned_empty(30_000), device.zeros(30_000)
    copying = gdcomm.copy(x, locked, block=False)
    assert copying is not None
    copying.synchronize()
    before = pinned.pool_of(device).stats()["leased"]
    del locked
    gc.collect()
    assert pinned.pool_of(device).stats()["leased"] < before


def test_a_host_copy_with_a_stream_sees_what_was_queued_there(device: EmulatedDevice) -> None:
    stream, locked, out = device.Stream(), made(device, LOCKED, np.zeros(5000)), np.zeros(5000)
    x = device.array(np.ones(5000), stream)
    gdcomm.copy(locked, x, stream=stream, block=False)
    gdcomm.copy(out, locked, stream=stream)
    assert (out == 1).all()


def test_staging_leaves_nothing_leased_and_poisons_nothing_in_use(device: EmulatedDevice) -> None:
    x, values = device.zeros((100, 300)), numbers((100, 300), "<f8")
    for i in range(6):
        gdcomm.copy(x, values + i)
        out = np.zeros((300, 100))
        gdcomm.copy(out.T, x)
        assert same(out.T, values + i)
    assert pinned.pool_of(device).stats()["leased"] == 0


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10_000),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 2), st.booleans()), max_size=25),
)
def test_random_copies_on_random_streams_find_no_stale_byte(seed: int, steps: list[tuple[int, int, int, bool]]) -> None:
    """Copies and kernels in issue order, ordered by events where they share arrays, against plain NumPy."""
    device = EmulatedDevice(seed, early=0.1)
    kept, devices._installed[:] = devices._installed[:], [device]
    try:
        streams = [device.Stream() for _ in range(3)]
        n = 700
        model = [numbers((n,), "<f8", i) for i in range(6)]
        arrays = [made(device, KINDS[i % 3], values) for i, values in enumerate(model)]
        last: list[Any] = [None] * 6  # the event after which each array may be used
        for dst, src, which, wait in steps:
            stream = streams[which]
            for used in (dst, src):
                if last[used] is not None:
                    if isinstance(arrays[used], EmulatedArray):
                        device.wait_event(stream, last[used])
                    else:
                        last[used].synchronize()
            gdcomm.copy(arrays[dst], arrays[src], stream=stream, block=None if wait else False)
            model[dst] = model[src].copy()
            event = device.record(stream)
            if isinstance(arrays[dst], EmulatedArray):
                device.launch(stream, lambda v: v.__iadd__(1), arrays[dst])
                model[dst] += 1
                event = device.record(stream)
            last[dst] = last[src] = event
        for i in range(6):
            if last[i] is not None:
                last[i].synchronize()
            assert same(arrays[i]._view if isinstance(arrays[i], EmulatedArray) else arrays[i], model[i])
    finally:
        devices._installed[:] = kept


# -- new arrays ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 300])
def test_to_device_and_to_host_keep_shape_dtype_and_order(device: EmulatedDevice, n: int) -> None:
    for dtype in DTYPES:
        for values in (numbers((n, 40), dtype), numbers((40, n), dtype).T, numbers((2, n, 40), dtype)[:, :, ::3]):
            for kind in (HOST, LOCKED):
                source = made(device, kind, values) if values.flags.c_contiguous else values
                x = gdcomm.to_device(source)
                assert (x.shape, x.dtype) == (values.shape, values.dtype)
                back = gdcomm.to_host(x)
                assert same(back, values)
                assert back.dtype == values.dtype
                if n > 1 and values.flags.fnc:
                    assert (x.strides, back.strides) == (values.strides, values.strides)
    big = gdcomm.to_host(device.zeros(20_000))
    assert device.is_pinned(big.ctypes.data)
    assert not device.is_pinned(gdcomm.to_host(device.zeros(3)).ctypes.data)


def test_to_host_reads_a_strided_array_and_a_stream(device: EmulatedDevice) -> None:
    stream = device.Stream()
    x = device.zeros((200, 300), stream=stream)
    device.fill(x, 2, stream)
    assert (gdcomm.to_host(x[::-2, ::3], stream=stream) == 2).all()
    assert gdcomm.to_host(x[3, 4], stream=stream) == 2
    assert gdcomm.to_host(x[3, 4], stream=stream).shape == ()


def test_to_device_orders_new_memory_on_its_stream(device: EmulatedDevice) -> None:
    stream, values = device.Stream(), numbers((30_000,), "<f8")
    x = gdcomm.to_device(values, stream=stream)
    device.launch(stream, lambda v: v.__iadd__(1), x)
    assert same(device.asnumpy(x, stream), values + 1)
    locked = made(device, LOCKED, values)
    y = gdcomm.to_device(locked, stream=stream, block=False)
    locked[:] = 4
    assert (device.asnumpy(y, stream) == 4).all()


def test_what_is_there_already_and_out(device: EmulatedDevice) -> None:
    x, values = device.zeros(5), np.arange(5.0)
    assert gdcomm.to_device(x) is x
    assert gdcomm.to_host(values) is values
    assert gdcomm.to_device(values, out=x) is x
    out = np.zeros(5)
    assert gdcomm.to_host(x, out=out) is out
    assert same(out, values)
    with pytest.raises(gdcomm.BufferSpecError, match="out: a ndarray is host memory"):
        gdcomm.to_device(values, out=out)
    with pytest.raises(gdcomm.BufferSpecError, match="out: a EmulatedArray is device memory"):
        gdcomm.to_host(x, out=x)


def test_over_the_pinned_budget_everything_still_works(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pinned.pool_of(device)
    values, lease, asked = numbers((100, 500), "<f8"), pool.lease, []
    for limit in (3 * 4096, 4096, 0):

        def short(nbytes: int, limit: int = limit, **_: Any) -> Any:
            asked.append(nbytes)
            if nbytes > limit:
                raise MemoryError("over the budget")
            return lease(nbytes)

        monkeypatch.setattr(pool, "lease", short)
        monkeypatch.setattr(pool, "hold", short)
        monkeypatch.setattr(pool, "slots", lambda: short(1 << 20))
        few = gdcomm.to_device(values[0])
        assert same(gdcomm.to_host(few), values[0])
        x = gdcomm.to_device(values)
        assert same(gdcomm.to_host(x), values)
        out = np.zeros_like(values)
        gdcomm.copy(out[:, ::-1], x)
        assert same(out[:, ::-1], values)
    assert max(asked) > 3 * 4096


# -- errors --------------------------------------------------------------------------------------------


def test_disagreement_is_refused_with_both_sides_named(device: EmulatedDevice) -> None:
    x, values = device.zeros((3, 4)), np.zeros((3, 4))
    for dst, src, text in (
        (x, np.zeros((4, 3)), r"dst has shape \(3, 4\), src has \(4, 3\)"),
        (x, np.zeros(4), r"dst has shape \(3, 4\), src has \(4,\)"),
        (x, np.zeros((3, 4), "f4"), "dst has dtype float64, src has float32"),
        (values, device.zeros((3, 4), ">f8"), "dst has dtype float64, src has >f8"),
        (x.readonly(), values, "dst is a read-only"),
        (bytes(8), np.zeros(8, "u1"), "dst: this bytes is read-only"),
        (np.broadcast_to(1.0, (3, 4)), values, "dst: this ndarray is read-only"),
        (np.lib.stride_tricks.as_strided(np.zeros(4), (3, 4), (0, 8)), values, "dst: several elements share memory"),
        (x, [[1.0] * 4] * 3, "src: a builtins.list is no memory"),
        (None, values, "dst: a builtins.NoneType is no memory"),
        (np.zeros((3, 4), object), values, "dst: dtype object holds Python objects"),
        (x, np.ma.zeros((3, 4)), "src: a masked array has two parts"),
    ):
        with pytest.raises(gdcomm.BufferSpecError, match=text):
            gdcomm.copy(dst, src)
    with pytest.raises(gdcomm.BufferSpecError, match="stream"):
        gdcomm.copy(x, values, stream="fast")
    assert not device.asnumpy(x).any()
    assert device.stats["to_device"] == 0


def test_other_byte_order_does_not_reach_the_device(device: EmulatedDevice) -> None:
    with pytest.raises(gdcomm.BufferSpecError, match="byte order"):
        gdcomm.to_device(np.zeros(3, ">f8"))


@pytest.mark.parametrize("direction", ["to_device", "to_host"])
def test_an_error_in_a_thread_is_raised_and_leaks_nothing(
    device: EmulatedDevice, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, values = device.zeros(40_000), np.zeros(40_000)
    real, left = getattr(device, direction), [5]

    def failing(*arguments: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError("link lost")
        real(*arguments)

    monkeypatch.setattr(device, direction, failing)
    with pytest.raises(OSError, match="link lost"):
        gdcomm.copy(*((x, values) if direction == "to_device" else (values, x)))
    assert pinned.pool_of(device).stats()["leased"] == 0
    monkeypatch.undo()
    devices._installed[:] = [device]


def test_threads_may_copy_at_once(device: EmulatedDevice) -> None:
    wrong: list[Any] = []

    def work(seed: int) -> None:
        try:
            stream = device.Stream()
            for i in range(5):
                values = numbers((20_000,), "<f8", 10 * seed + i)
                x, out = gdcomm.to_device(values, stream=stream), np.empty(20_000)
                gdcomm.copy(out, x, stream=stream)
                if not same(out, values) or not same(gdcomm.to_host(x[:100], stream=stream), values[:100]):
                    wrong.append((seed, i))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_without_a_device_host_arrays_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_installed", [])
    monkeypatch.setattr(devices, "_cuda_state", [None])
    values, out = numbers((300, 500), "<f8"), np.zeros((500, 300))
    gdcomm.copy(out.T, values)
    assert same(out.T, values)
    assert gdcomm.to_host(values) is values
    with pytest.raises(gdcomm.DeviceError, match="pip install cupy"):
        gdcomm.to_device(values)


def test_a_piece_follows_the_square_root_rule() -> None:
    rule = Plan(smallest=256 * KIB, largest=8192 * KIB)
    sizes = [rule.piece(n << 20) for n in (1, 4, 16, 64, 256, 1024, 4096)]
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[-1]) == (512 * KIB, 8192 * KIB)
    assert all(size & (size - 1) == 0 for size in sizes)
