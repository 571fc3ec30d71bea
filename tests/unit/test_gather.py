"""take and put agree with NumPy, read no foreign memory, and are ordered on their stream."""

from __future__ import annotations

import gc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gdcomm
from gdcomm import devices
from gdcomm.devices.emulated import EmulatedArray, EmulatedDevice
from gdcomm.memory.pinned import pool_of
from gdcomm.transfer import gather
from gdcomm.transfer import rows as by_cpu
from gdcomm.transfer.gather import crossover

RECORD = np.dtype([("a", "i1"), ("b", "<f8"), ("c", "S3")])
DTYPES = ["?", "i1", "<i4", "<f8", "<c16", "<f2", ml_dtypes.bfloat16, RECORD]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> EmulatedDevice:
    made = EmulatedDevice(seed=11)
    monkeypatch.setattr(devices, "_installed", [made])
    return made


def pinned(device: EmulatedDevice, values: Any) -> np.ndarray[Any, Any]:
    values = np.asarray(values)
    block = device.pinned(values.nbytes)[: values.nbytes].view(values.dtype).reshape(values.shape)
    block[...] = values
    return block


def content(dtype: Any, shape: Any, seed: int = 0) -> np.ndarray[Any, Any]:
    dtype = np.dtype(dtype)
    raw = np.random.default_rng(seed).integers(0, 2 if dtype.kind == "b" else 100, (*shape, dtype.itemsize), np.uint8)
    return np.ascontiguousarray(raw).view(dtype).reshape(shape)


def placed(device: EmulatedDevice, values: np.ndarray[Any, Any], place: str) -> Any:
    return {"pinned": lambda: pinned(device, values), "pageable": values.copy, "device": lambda: device.array(values)}[
        place
    ]()


def same(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


PLACES = st.sampled_from(["pinned", "pageable", "device"])


@st.composite
def tables(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    shape = (draw(st.integers(1, 9)), *draw(st.lists(st.integers(1, 4), max_size=2)))
    return content(draw(st.sampled_from(DTYPES)), shape, draw(st.integers(0, 99)))


def index_arrays(length: int, outside: bool) -> Any:
    reach = 3 * length if outside else length
    shape = st.lists(st.integers(0, 4), max_size=2)
    return st.tuples(shape, st.integers(0, 999), st.sampled_from(["<i4", "<i8"])).map(
        lambda s: np.random.default_rng(s[1]).integers(-reach, reach, s[0]).astype(s[2])
    )


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_take_agrees_with_numpy(device: EmulatedDevice, data: st.DataObject) -> None:
    values = data.draw(tables())
    mode = data.draw(st.sampled_from(["raise", "clip", "wrap"]))
    index = data.draw(index_arrays(len(values), mode != "raise"))
    table = placed(device, values, data.draw(PLACES))
    on_device = data.draw(st.booleans())
    method = data.draw(st.sampled_from(["auto", "gather", "copy"]))
    stream = data.draw(st.sampled_from([None, device.Stream()]))
    device.synchronize(None)
    given = device.array(index, stream) if on_device else index
    made = gdcomm.take(table, given, mode=mode, method=method, stream=stream)
    assert same(device.asnumpy(made, stream), np.take(values, index, axis=0, mode=mode))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_put_agrees_with_numpy_down_to_the_winner_of_duplicates(device: EmulatedDevice, data: st.DataObject) -> None:
    expected = data.draw(tables())
    mode = data.draw(st.sampled_from(["raise", "clip", "wrap"]))
    index = data.draw(index_arrays(len(expected), mode != "raise"))
    table = placed(device, expected, data.draw(PLACES))
    row = data.draw(st.booleans())
    values = content(expected.dtype, expected.shape[1:] if row else index.shape + expected.shape[1:], 7)
    device.synchronize(None)
    given = device.array(index) if data.draw(st.booleans()) else index
    new = device.array(values) if data.draw(st.booleans()) else values
    gdcomm.put(table, given, new, mode=mode)
    which = {"raise": index, "clip": np.clip(index, 0, len(expected) - 1), "wrap": index % len(expected)}[mode]
    expected[which] = values
    assert same(device.asnumpy(table) if isinstance(table, EmulatedArray) else table, expected)


@pytest.mark.parametrize("place", ["pinned", "pageable", "device"])
def test_rows_out_of_range_are_filled_or_left_out(device: EmulatedDevice, place: str) -> None:
    values = np.arange(12.0).reshape(4, 3)
    table = placed(device, values, place)
    device.synchronize(None)
    index = np.array([0, 4, -5, -1, 2**31 - 1, -(2**31)])
    for chosen in (device.array(index), device.array(index.astype("i4"))):
        found = device.asnumpy(gdcomm.take(table, chosen))
        assert np.isnan(found[[1, 2, 4, 5]]).all()
        assert np.array_equal(found[[0, 3]], values[[0, 3]])
    assert np.isnan(device.asnumpy(gdcomm.take(table, index, mode="fill"))[1]).all()
    gdcomm.put(table, device.array(index), device.array(-np.ones((6, 3))))
    found = device.asnumpy(table) if place == "device" else table
    assert np.array_equal(found[:, 0], [-1, 3, 6, -1])
    whole = placed(device, np.arange(4), place)
    device.synchronize(None)
    assert device.asnumpy(gdcomm.take(whole, device.array(np.array([9, 1])))).tolist() == [0, 1]


def test_host_indices_out_of_range_raise_and_touch_nothing(device: EmulatedDevice) -> None:
    table, out = pinned(device, np.arange(4.0)), device.zeros(2)
    for index in ([0, 4], [-5, 0], np.array([2**64 - 1, 0], "u8"), [2**40, 0]):
        with pytest.raises(IndexError, match="out of range"):
            gdcomm.take(table, index, out=out)
        with pytest.raises(IndexError):
            gdcomm.put(table, index, device.zeros(2))
    with pytest.raises(IndexError):
        gdcomm.take(table, device.array(np.array([0, 4])), out=out, mode="raise")
    assert device.asnumpy(out).tolist() == [0, 0]
    assert table.tolist() == [0, 1, 2, 3]


def test_nothing_waits_for_the_gpu_unless_it_must(device: EmulatedDevice) -> None:
    table, index = pinned(device, np.arange(40.0).reshape(10, 4)), device.array(np.array([1, 2]))
    before = device.stats["synchronize"]
    gdcomm.take(table, index)
    gdcomm.take(table, [3])
    gdcomm.put(table, index, device.zeros((2, 4)), block=False)
    assert device.stats["synchronize"] == before
    gdcomm.take(table, index, mode="raise")
    assert device.stats["synchronize"] > before


def test_the_call_is_ordered_on_its_stream(device: EmulatedDevice) -> None:
    table = pinned(device, np.arange(100.0))
    stream = device.Stream()
    index = device.zeros(3, np.int64)
    device.synchronize(None)
    device.launch(stream, lambda v: np.copyto(v, [5, 6, 7]), index)  # must be seen
    made = gdcomm.take(table, index, stream=stream)
    device.launch(stream, lambda v: v.fill(0), index)  # must not be seen
    doubled = device.zeros(3, stream=stream)
    device.launch(stream, lambda v, w: np.multiply(w, 2, out=v), doubled, made)
    assert device.asnumpy(doubled, stream).tolist() == [10, 12, 14]
    with stream:
        assert device.asnumpy(gdcomm.take(table, [9]), stream).tolist() == [9]


def test_host_indices_and_pinned_slots_are_not_used_again_too_early(device: EmulatedDevice) -> None:
    table = pinned(device, np.arange(1000.0))
    index = np.arange(50)
    made = [gdcomm.take(table, index + i) for i in range(20)]
    index[:] = 0  # read at the call
    device.synchronize(None)
    for i, array in enumerate(made):
        assert np.array_equal(device.asnumpy(array), np.arange(50.0) + i)


def test_temporary_memory_lives_until_the_kernel_ran(device: EmulatedDevice) -> None:
    index = device.array(np.arange(60)[::2])
    table = pinned(device, np.arange(1000.0))
    made = gdcomm.take(table, device.array(np.arange(60))[::2])
    copied = gdcomm.take(np.array(table), index, method="copy")
    gc.collect()
    expected = np.arange(0.0, 60, 2)
    assert np.array_equal(device.asnumpy(made), expected)
    assert np.array_equal(device.asnumpy(copied), expected)


def test_many_slots_of_pageable_rows(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_cpu, "SLOT_NBYTES", 64)
    values = np.arange(3000.0).reshape(1000, 3)
    index = np.random.default_rng(0).integers(-1000, 1000, 5000)
    for table in (values, np.asfortranarray(values), values[::-1]):
        made = gdcomm.take(table, index, method="gather")
        assert np.array_equal(device.asnumpy(made), table[index])
        assert np.array_equal(device.asnumpy(gdcomm.take(table, index, method="copy")), table[index])


def test_a_memory_mapped_file_is_a_table(device: EmulatedDevice, tmp_path: Any) -> None:
    np.save(tmp_path / "rows.npy", np.arange(60.0).reshape(20, 3))
    table = np.load(tmp_path / "rows.npy", mmap_mode="r+")
    assert device.asnumpy(gdcomm.take(table, [19, 0])).tolist() == [[57, 58, 59], [0, 1, 2]]
    gdcomm.put(table, [3], device.zeros((1, 3)))
    assert np.load(tmp_path / "rows.npy")[3].tolist() == [0, 0, 0]


def test_rows_with_steps_between_them(device: EmulatedDevice) -> None:
    block = pinned(device, np.arange(80.0).reshape(10, 8))
    for table in (block[:, 2:5], block[::-1, 1:], block[::3], block[:, ::2], block.T, block[:, 3]):
        expected = np.array(table)
        assert np.array_equal(device.asnumpy(gdcomm.take(table, [0, -1, 1])), expected[[0, -1, 1]])
    before = np.array(block)
    gdcomm.put(block[::-2, 1:3], [0, 1], device.zeros((2, 2)))
    before[[9, 7], 1:3] = 0
    assert np.array_equal(block, before)


def test_put_waits_for_the_host_table_and_sees_earlier_work(device: EmulatedDevice) -> None:
    table, values = pinned(device, np.zeros(10)), device.zeros(2)
    device.fill(values, 3)
    gdcomm.put(table, [1, 2], values)
    assert table[:4].tolist() == [0, 3, 3, 0]
    gdcomm.put(table, [5], device.array([8.0]), block=False)
    assert table[5] == 0, "nothing ran yet"
    device.synchronize(None)
    assert table[5] == 8
    pageable = np.zeros(10)
    device.fill(values, 4)
    gdcomm.put(pageable, [1, 1], values)
    assert pageable[1] == 4


@pytest.mark.parametrize("block", [True, False])
def test_host_values_may_be_overwritten_after_the_call(device: EmulatedDevice, block: bool) -> None:
    count = 20_000
    for values in (pinned(device, np.arange(float(count))), np.arange(float(count))):
        table = device.zeros(count)
        gdcomm.put(table, np.arange(count), values, block=block)
        values[:] = -1
        assert np.array_equal(device.asnumpy(table), np.arange(count))


def test_only_a_promise_of_unique_indices_gives_up_the_order(device: EmulatedDevice) -> None:
    table = pinned(device, np.zeros(3))
    values, index = device.array([1.0, 2.0, 3.0]), device.array(np.array([1, 1, 1]))
    gdcomm.put(table, index, values)
    assert table[1] == 3
    gdcomm.put(table, index, values, unique_indices=True)
    assert table[1] == 1, "the emulated device punishes a broken promise"


def test_out_is_filled_and_returned(device: EmulatedDevice) -> None:
    table, out = pinned(device, np.arange(12.0).reshape(4, 3)), device.zeros((5, 2, 3))
    assert gdcomm.take(table, [[3, 2]], out=out[1:2]).ptr == out[1:2].ptr
    found = device.asnumpy(out)
    assert found[1].tolist() == [[9, 10, 11], [6, 7, 8]]
    assert not found[[0, 2, 3, 4]].any()


@pytest.mark.parametrize("place", ["pinned", "pageable", "device"])
def test_empty_things(device: EmulatedDevice, place: str) -> None:
    table = placed(device, np.zeros((4, 3)), place)
    none = placed(device, np.zeros((0, 3)), place)
    assert gdcomm.take(table, []).shape == (0, 3)
    assert gdcomm.take(table, device.empty((0, 2), np.int32)).shape == (0, 2, 3)
    assert gdcomm.take(placed(device, np.zeros((4, 0)), place), [1, 2]).shape == (2, 0)
    assert np.isnan(device.asnumpy(gdcomm.take(none, device.array(np.array([0, -1]))))).all()
    with pytest.raises(IndexError):
        gdcomm.take(none, [0])
    gdcomm.put(table, [], np.zeros((0, 3)))
    gdcomm.put(none, device.array(np.array([0])), device.zeros((1, 3)))
    gdcomm.put(none, device.empty(0, np.int64), np.zeros((0, 3)))


def test_bad_arguments_say_what_is_wrong(device: EmulatedDevice) -> None:
    table, index = pinned(device, np.zeros((4, 3))), device.array(np.array([1]))
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    cases: list[tuple[Any, str]] = [
        (lambda: gdcomm.take("rows", [0]), "table"),
        (lambda: gdcomm.take(np.zeros(()), [0]), "axis"),
        (lambda: gdcomm.take(np.array([object()]), [0]), "objects"),
        (lambda: gdcomm.take(table, [0.5]), "integers"),
        (lambda: gdcomm.take(table, [True, False]), "flatnonzero"),
        (lambda: gdcomm.take(table, device.array(np.array([1], "u4"))), "int32 or int64"),
        (lambda: gdcomm.take(table, [0], mode="drop"), "mode"),
        (lambda: gdcomm.put(table, [0], 1.0, mode="fill"), "mode"),
        (lambda: gdcomm.take(table, [0], method="guess"), "method"),
        (lambda: gdcomm.take(table, [0], out=np.zeros((1, 3))), "host"),
        (lambda: gdcomm.take(table, [0], out=device.zeros((2, 3))), "shape"),
        (lambda: gdcomm.take(table, [0], out=device.zeros((1, 3), "f4")), "dtype"),
        (lambda: gdcomm.take(table, [0, 1], out=device.zeros((2, 6))[:, ::2]), "contiguous"),
        (lambda: gdcomm.take(table, [0], out=device.zeros((1, 3)).readonly()), "read-only"),
        (lambda: gdcomm.take(device.zeros((4, 6))[:, ::2], index), "gaps"),
        (lambda: gdcomm.put(frozen, [0], 1.0), "read-only"),
        (lambda: gdcomm.put(device.zeros(3).readonly(), [0], 1.0), "read-only"),
        (lambda: gdcomm.put(table, index, device.zeros((2, 3))), "values"),
        (lambda: gdcomm.put(table, index, device.zeros((1, 3), "f4")), "values"),
        (lambda: gdcomm.put(table, [0], np.zeros((2, 3))), "values"),
        (lambda: gdcomm.put(table, [0], "text"), "values"),
    ]
    for call, word in cases:
        with pytest.raises(gdcomm.BufferSpecError, match=word):
            call()
    device.synchronize(None)
    assert not table.any()


def test_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_installed", [])
    monkeypatch.setattr(devices, "_cuda_state", [None])
    table = np.zeros((4, 2))
    gdcomm.put(table, [1, -1], [[1, 2], [3, 4]])
    assert table.tolist() == [[0, 0], [1, 2], [0, 0], [3, 4]]
    with pytest.raises(gdcomm.DeviceError, match="pip install"):
        gdcomm.take(table, [0])


def test_crossover_is_sane() -> None:
    gib = 1 << 30
    few, most = crossover(512, gib // 512 // 100, gib), crossover(512, gib // 512, gib)
    assert (few.method, most.method) == ("gather", "copy")
    for row_nbytes in (16, 64, 512, 4096):
        for page_locked in (True, False):
            meet = crossover(row_nbytes, 1, gib, page_locked=page_locked).rows
            assert meet > 0
            assert crossover(row_nbytes, meet - 1, gib, page_locked=page_locked).method == "gather"
            assert crossover(row_nbytes, meet + 1, gib, page_locked=page_locked).method == "copy"
    assert crossover(16, 1, gib).rows * 16 < crossover(4096, 1, gib).rows * 4096, "small rows are dearer"
    assert crossover(8, 0, 8).method == "gather"


def test_auto_does_as_the_crossover_says_within_the_memory(device: EmulatedDevice, monkeypatch: Any) -> None:
    table = pinned(device, np.zeros((1000, 64)))
    every = device.array(np.arange(1000).repeat(30))
    copied: list[int] = []
    plain = gather.fill_from
    monkeypatch.setattr(
        gather, "fill_from", lambda source, *more: (copied.append(source.nbytes), plain(source, *more))
    )
    gdcomm.take(table, every[:10])
    assert copied == []
    gdcomm.take(table, every)
    gdcomm.take(table, every[:10], method="copy")
    assert copied == [table.nbytes, table.nbytes]
    monkeypatch.setattr(device, "free_bytes", lambda: 1000)
    gdcomm.take(table, every)
    assert len(copied) == 2


def test_pinned_memory_is_not_used_again_under_a_kernel(device: EmulatedDevice) -> None:
    side = device.Stream()
    table = gdcomm.pinned_zeros(1000)
    table[:] = np.arange(1000)
    made = gdcomm.take(table, [7, 8], stream=side)
    large = gdcomm.pinned_zeros(20_000)
    large[:] = np.arange(20_000)
    copied = gdcomm.take(large, [9, 10], stream=side, method="copy")
    target = gdcomm.pinned_empty(1000)
    gdcomm.put(target, [0, 1], device.array([1.0, 2.0], side), stream=side, block=False)
    stored, values = device.zeros(20_000, stream=side), gdcomm.pinned_zeros(20_000)
    values[:] = 3
    gdcomm.put(stored, np.arange(20_000), values, stream=side)
    del table, target, large, values
    gc.collect()
    device.synchronize(None)
    for _ in range(5):
        pool_of(device).stats()  # the pool gets what no event holds back
    others = [gdcomm.pinned_zeros(n) for n in (1000, 1000, 1000, 20_000, 20_000)]
    assert device.asnumpy(made, side).tolist() == [7, 8]
    assert device.asnumpy(copied, side).tolist() == [9, 10]
    assert (device.asnumpy(stored, side) == 3).all()
    assert not any(array.any() for array in others)


def test_masks_are_not_dropped_silently(device: EmulatedDevice) -> None:
    table, masked = pinned(device, np.zeros((4, 3))), np.ma.masked_array([0, 1], [0, 1])
    for call in (
        lambda: gdcomm.take(np.ma.masked_array(np.zeros((4, 3))), [0]),
        lambda: gdcomm.take(table, masked),
        lambda: gdcomm.put(table, masked, 1.0),
        lambda: gdcomm.put(np.ma.masked_array(np.zeros((4, 3))), [0], 1.0),
        lambda: gdcomm.put(table, [0], np.ma.masked_array([1.0, 2, 3], [1, 0, 0])),
    ):
        with pytest.raises(gdcomm.BufferSpecError, match="masked"):
            call()
    assert not table.any()


@pytest.mark.parametrize("mode", ["", 0, False, [], "RAISE"])
def test_a_mode_that_is_none_is_refused(device: EmulatedDevice, mode: Any) -> None:
    table = np.zeros((4, 3))
    with pytest.raises(gdcomm.BufferSpecError, match="mode"):
        gdcomm.take(table, [0], mode=mode)
    with pytest.raises(gdcomm.BufferSpecError, match="mode"):
        gdcomm.put(table, [0], 1.0, mode=mode)


def test_more_bad_arguments(device: EmulatedDevice) -> None:
    for index in ([[1], [1, 2]], None, {}, "a", [2**70], [None]):
        with pytest.raises(gdcomm.BufferSpecError, match="indices"):
            gdcomm.take(np.zeros((4, 3)), index)
    with pytest.raises(gdcomm.BufferSpecError, match="byte order"):
        gdcomm.take(np.zeros((4, 3), ">f8"), [0])
    table = np.zeros((4, 3), ">f8")
    gdcomm.put(table, [1], [1.0, 2, 3])
    assert table[1].tolist() == [1, 2, 3]


def test_out_may_be_the_indices_but_not_the_table(device: EmulatedDevice) -> None:
    table, index = device.array(np.arange(10)[::-1].copy()), device.array(np.array([3, 0, 1, 2]))
    gdcomm.take(table, index[::-1], out=index)
    assert device.asnumpy(index).tolist() == [7, 8, 9, 6]
    with pytest.raises(gdcomm.BufferSpecError, match="shares memory"):
        gdcomm.take(table, index, out=table[3:7], mode="clip")
    both = gdcomm.mapped_empty(8, np.int64)
    with pytest.raises(gdcomm.BufferSpecError, match="shares memory"):
        gdcomm.take(both.host, [1, 2], out=both.device[:2])


def test_put_reads_what_it_overwrites_first(device: EmulatedDevice) -> None:
    expected = np.array([2, 0, 1, 7, 8, 9, 5, 5])
    table = device.array(expected)
    snapshots: list[int] = []
    copied, device.snapshot = device.snapshot, lambda b: snapshots.append(b.nbytes) or copied(b)  # type: ignore[method-assign, func-returns-value, assignment]
    gdcomm.put(table, table[:3], table[1:4])
    expected[expected[:3].copy()] = expected[1:4].copy()
    assert device.asnumpy(table).tolist() == expected.tolist()
    assert snapshots == [24, 24], "kernels read and write in any order"


def test_a_kernel_does_not_read_across_a_gap_between_registrations(device: EmulatedDevice) -> None:
    whole = np.arange(10 * 4096, dtype=np.uint8)
    table = whole[-whole.ctypes.data % 4096 :][: 8 * 4096].reshape(-1, 64)
    with gdcomm.registered(table[:64]), gdcomm.registered(table[-64:]):
        source = gather._table("take", device, table, None)
        assert source.rows is None
        assert np.array_equal(device.asnumpy(gdcomm.take(table, [100, 5])), table[[100, 5]])
        with gdcomm.registered(table[64:-64]):
            assert gather._table("take", device, table, None).rows is not None


@pytest.mark.parametrize(
    "numbers", [(-1, 1, 1), (float("nan"), 1, 1), (8, -5, 100), (8, 1, -1), ("a", 1, 1), (8, None, 1)]
)
def test_the_crossover_of_no_sizes_is_refused(numbers: Any) -> None:
    with pytest.raises(gdcomm.BufferSpecError, match="crossover"):
        crossover(*numbers)


def test_a_hundred_takes_leave_nothing(device: EmulatedDevice) -> None:
    table, locked = np.zeros((1000, 30)), gdcomm.pinned_zeros((1000, 30))

    def use() -> None:
        for _ in range(100):
            gdcomm.take(table, np.arange(500))
            gdcomm.take(locked, [1, 2])
            gdcomm.put(locked, [1, 2], device.zeros((2, 30)))
            with pytest.raises(IndexError):
                gdcomm.take(locked, [1000])

    def state() -> tuple[int, int]:
        gc.collect()
        device.synchronize(None)
        for _ in range(5):
            stats = pool_of(device).stats()
        return stats["leased"], stats["pending"]

    use()
    before = state()
    use()
    assert state() == before
