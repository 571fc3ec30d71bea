"""Batches of pieces: any mixture, checked before anything moves, in stream order, and never slowly by mistake."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gdcomm
from gdcomm import devices
from gdcomm.devices.emulated import EmulatedArray, EmulatedDevice
from gdcomm.memory import pinned
from gdcomm.transfer import batch, staging
from gdcomm.transfer.staging import Plan

HOST, LOCKED, DEVICE = "host", "locked", "device"
KINDS = [HOST, LOCKED, DEVICE]


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> EmulatedDevice:
    made = EmulatedDevice(seed=9)
    monkeypatch.setattr(devices, "_installed", [made])
    monkeypatch.setattr(staging, "plan", Plan(threads=2, smallest=4096, largest=4096, slots=2))
    return made


def made(device: EmulatedDevice, kind: str, content: np.ndarray[Any, Any]) -> Any:
    if kind == DEVICE:
        return device.array(content, order="C")
    if kind == LOCKED:
        array = device.pinned(content.nbytes).view(content.dtype).reshape(content.shape)
        array[...] = content
        return array
    return content.copy()


def content(device: EmulatedDevice, array: Any, stream: Any = None) -> np.ndarray[Any, Any]:
    return device.asnumpy(array, stream) if isinstance(array, EmulatedArray) else array


@pytest.mark.parametrize("kinds", [(a, b) for a in KINDS for b in KINDS])
@pytest.mark.parametrize("shapes", [[(4,)] * 40, [()] * 9, [(3, 5)] * 7, [(1,), (7,), (16,), (333,), (2, 2), ()] * 3])
@pytest.mark.parametrize("dtype", ["u1", "<f8", "V3"])
def test_lists_of_one_kind(device: EmulatedDevice, kinds: tuple[str, str], shapes: list[Any], dtype: str) -> None:
    rng = np.random.default_rng(0)
    size = np.dtype(dtype).itemsize
    values = [rng.integers(0, 255, int(np.prod(s)) * size, "u1").view(dtype).reshape(s) for s in shapes]
    dsts = [made(device, kinds[0], np.zeros_like(v)) for v in values]
    srcs = [made(device, kinds[1], v) for v in values]
    gdcomm.copy_many(dsts, srcs)
    for dst, value in zip(dsts, values, strict=True):
        assert content(device, dst).tobytes() == value.tobytes()
    plain = DEVICE in kinds
    assert device.stats.get("batches", 0) == plain, "one batch, or none between host arrays"
    assert pinned.pool_of(device).stats()["leased"] == 0


@pytest.mark.parametrize("kinds", [(a, b) for a in KINDS for b in KINDS if DEVICE in (a, b)])
def test_rows_of_one_array_in_stream_order(device: EmulatedDevice, kinds: tuple[str, str]) -> None:
    stream = device.Stream()
    values = np.random.default_rng(0).random((50, 64))
    src, dst = made(device, kinds[1], values), made(device, kinds[0], np.zeros((50, 64)))
    device.synchronize(None)
    if kinds[1] == DEVICE:
        device.launch(stream, lambda v: v.__iadd__(1), src)
        values = values + 1
    gdcomm.copy_many([dst[i] for i in range(50)], [src[49 - i] for i in range(50)], stream=stream)
    if kinds[1] == DEVICE:
        device.fill(src, -1, stream)
    else:
        src[:] = -1
    assert (content(device, dst, stream) == values[::-1]).all()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_mixtures_agree_with_numpy(data: st.DataObject) -> None:
    device = EmulatedDevice(data.draw(st.integers(0, 99)))
    kept, devices._installed[:] = devices._installed[:], [device]
    try:
        rng, dsts, srcs, expected = np.random.default_rng(0), [], [], []
        for _ in range(data.draw(st.integers(0, 12))):
            shape = data.draw(st.sampled_from([(), (0,), (3,), (40,), (5, 6), (3000,), (40_000,)]))
            dtype = data.draw(st.sampled_from(["u1", "<f4", "<c16"]))
            step = data.draw(st.sampled_from([1, 1, -1, 2])) if shape else 1
            values = (rng.random((shape[0] * abs(step), *shape[1:]) if shape else ()) * 100).astype(dtype)
            key = np.s_[::step] if shape else ...
            to, of = data.draw(st.sampled_from(KINDS)), data.draw(st.sampled_from(KINDS))
            dsts.append(made(device, to, np.zeros(shape, dtype)))
            srcs.append(made(device, of, values)[key])
            expected.append(values[key])
        gdcomm.copy_many(dsts, iter(srcs))
        for dst, value in zip(dsts, expected, strict=True):
            assert content(device, dst).tobytes() == value.tobytes()
    finally:
        devices._installed[:] = kept


def test_long_batches_are_packed_part_by_part(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "_BLOCK", 1000)
    values = [np.random.default_rng(i).random(20) for i in range(30)]
    xs = [device.zeros(20) for _ in values]
    gdcomm.copy_many(xs, values)
    outs = [np.zeros(20) for _ in values]
    gdcomm.copy_many(outs, xs)
    assert np.array_equal(outs, values)
    assert device.stats["batches"] == 12


def test_the_streams_of_all_arrays_are_ordered(device: EmulatedDevice) -> None:
    class Foreign:
        def __init__(self, array: Any, stream: Any) -> None:
            self.__cuda_array_interface__ = {**array.__cuda_array_interface__, "stream": stream.ptr}

    streams = [device.Stream() for _ in range(4)]
    sources = [device.zeros(5, stream=s) for s in streams]
    targets = [device.zeros(5, stream=s) for s in reversed(streams)]
    for i, (x, s) in enumerate(zip(sources, streams, strict=True)):
        device.fill(x, i, s)
    pairs = list(zip(sources, targets, streams, reversed(streams), strict=True))
    gdcomm.copy_many([Foreign(y, t) for _, y, _, t in pairs], [Foreign(x, s) for x, _, s, _ in pairs])
    for x, _, s, _ in pairs:
        device.fill(x, -1, s)
        s.synchronize()
    for i, (_, y, _, t) in enumerate(pairs):
        assert (device.asnumpy(y, t) == i).all()


def test_memory_registered_in_part_is_not_left_to_a_kernel(device: EmulatedDevice) -> None:
    memory = np.zeros(1 << 20, np.uint8)
    memory[:] = np.random.default_rng(0).integers(0, 255, memory.size)
    rows = memory.reshape(1024, 1024)
    xs = [device.zeros(1024, "u1") for _ in rows]
    with gdcomm.registered(memory[: 256 << 10]), gdcomm.registered(memory[512 << 10 :]):
        gdcomm.copy_many(xs, list(rows))
        for x, row in zip(xs, rows, strict=True):
            assert (device.asnumpy(x) == row).all()


def test_all_is_checked_before_anything_is_queued(device: EmulatedDevice) -> None:
    xs, values = [device.zeros(3) for _ in range(4)], [np.ones(3) for _ in range(4)]
    for bad, text in (
        (np.ones(4), r"dsts\[3\] has shape \(3,\), srcs\[3\] has \(4,\)"),
        (np.ones(3, "f4"), r"dsts\[3\] has dtype float64, srcs\[3\] has float32"),
        ([1.0, 1.0, 1.0], r"srcs\[3\]: a builtins.list"),
    ):
        with pytest.raises(gdcomm.BufferSpecError, match=text):
            gdcomm.copy_many(xs, [*values[:3], bad])
    with pytest.raises(gdcomm.BufferSpecError, match=r"dsts\[1\] is a read-only"):
        gdcomm.copy_many([xs[0], xs[1].readonly()], values[:2])
    readonly = np.zeros(3)
    readonly.flags.writeable = False
    with pytest.raises(gdcomm.BufferSpecError, match=r"dsts\[1\]: this ndarray is read-only"):
        gdcomm.copy_many([np.zeros(3), readonly], xs[:2])
    with pytest.raises(gdcomm.BufferSpecError, match="dsts has 4 arrays, srcs has 3"):
        gdcomm.copy_many(xs, values[:3])
    assert device.stats["to_device"] == device.stats.get("copy", 0) == device.stats.get("batches", 0) == 0
    gdcomm.copy_many([], [])


def test_over_the_pinned_budget_pieces_go_one_by_one(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(nbytes: int) -> None:
        raise MemoryError

    monkeypatch.setattr(pinned.pool_of(device), "lease", none)
    values, xs = [np.full(30_000, float(i)) for i in range(4)], [device.zeros(30_000) for _ in range(4)]
    gdcomm.copy_many(xs, values)
    outs = [np.zeros(30_000) for _ in values]
    gdcomm.copy_many(outs, xs)
    assert np.array_equal(outs, values)


def test_without_a_device_host_arrays_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_installed", [])
    monkeypatch.setattr(devices, "_cuda_state", [None])
    outs = [np.zeros(3), np.zeros((2, 2), "i4")]
    gdcomm.copy_many(outs, [np.ones(3), np.full((2, 2), 5, "i4")])
    assert outs[0].sum() == 3
    assert outs[1].sum() == 20
