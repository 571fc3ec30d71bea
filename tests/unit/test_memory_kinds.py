"""What kind of memory an array lies in, mapped memory, and machines whose GPU shares the host's page tables."""

from __future__ import annotations

import array as plain
import gc
import mmap
import pickle
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gdcomm
from gdcomm import devices
from gdcomm.devices.emulated import EmulatedDevice
from gdcomm.devices.memory import DeviceProperties
from gdcomm.memory import pinned
from gdcomm.memory.budget import Budget
from gdcomm.memory.kinds import MemoryKind
from gdcomm.memory.pinned import PinnedPool

COHERENT = DeviceProperties(
    name="GH200", pageable_memory_access=True, pageable_memory_access_uses_host_page_tables=True
)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> EmulatedDevice:
    device = EmulatedDevice(seed=5)
    monkeypatch.setattr(devices, "_installed", [device])
    monkeypatch.setitem(pinned._pools, id(device), PinnedPool(device, budget=Budget(64 << 20)))
    return device


def test_kinds_of_host_memory(device: EmulatedDevice, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(8192))
    for array in (
        np.zeros(10),
        np.zeros((3, 4))[::-1, ::2],
        np.float64(3),
        bytearray(10),
        b"read-only",
        plain.array("d", [1, 2]),
        np.memmap(tmp_path / "data"),
        np.zeros(0),
    ):
        assert gdcomm.memory_kind(array) == "pageable"
    with mmap.mmap(-1, 8192) as mapping:
        assert gdcomm.memory_kind(mapping) == "pageable"
    assert gdcomm.memory_kind(gdcomm.pinned_empty(10)[2:5]) == "pinned"
    assert gdcomm.memory_kind(gdcomm.pinned_empty(5 << 20, "u1")[::-2]) == "pinned"
    assert gdcomm.memory_kind(gdcomm.pinned_empty(10, write_combined=True)) == "write-combined"
    assert gdcomm.memory_kind(gdcomm.pinned_empty(10, mapped=True)) == "mapped"
    assert gdcomm.memory_kind(device.host_allocate(10)) == "pinned"
    assert gdcomm.memory_kind(device.host_allocate(10, write_combined=True)) == "write-combined"


def test_kinds_of_device_memory(device: EmulatedDevice) -> None:
    device.emulated_properties = device.emulated_properties._replace(index=2)
    for array in (device.zeros(3), device.zeros((4, 4))[::-1], device.zeros(0)):
        kind = gdcomm.memory_kind(array)
        assert (kind, kind.name, kind.device, kind.page_locked) == ("device 2", "device", 2, False)


def test_partly_page_locked_is_pageable(device: EmulatedDevice) -> None:
    whole = np.zeros(6 * 4096, np.uint8)
    half = whole[: 3 * 4096]
    gdcomm.register(half)
    assert gdcomm.memory_kind(half) == "registered"
    assert gdcomm.memory_kind(whole) == "pageable"
    gdcomm.unregister(half)


@pytest.mark.parametrize("thing", [None, 3, "text", SimpleNamespace(), [1, 2]])
def test_what_is_no_array_is_refused(device: EmulatedDevice, thing: Any) -> None:
    with pytest.raises(gdcomm.BufferSpecError, match="no array"):
        gdcomm.memory_kind(thing)


def test_a_kind_is_its_text_and_does_not_change() -> None:
    kind = MemoryKind("async-pool", 3)
    assert str(kind) == kind == "async-pool (device 3)"
    assert (kind.name, kind.device) == ("async-pool", 3)
    assert str(MemoryKind("managed", 0)) == "managed (device 0)"
    assert {MemoryKind("pinned"): 1}["pinned"] == 1
    copy = pickle.loads(pickle.dumps(kind))
    assert (copy, copy.device) == (kind, 3)
    with pytest.raises(AttributeError):
        kind.device = 4
    assert [MemoryKind(name).page_locked for name in ("pageable", "pinned", "registered", "write-combined")] == [
        False,
        True,
        True,
        True,
    ]


def test_without_a_device_all_is_pageable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_installed", [])
    monkeypatch.setattr(devices, "_cuda_state", [None])
    assert gdcomm.memory_kind(gdcomm.pinned_zeros(10)) == "pageable"
    with pytest.raises(gdcomm.DeviceError, match="CuPy"):
        gdcomm.mapped_empty(3)


def test_mapped_memory_is_one_memory(device: EmulatedDevice) -> None:
    both = gdcomm.mapped_empty((2, 3), "f4")
    assert (both.shape, both.dtype, both.nbytes) == ((2, 3), np.float32, 24)
    assert both.device.shape == both.host.shape
    both.host[...] = np.arange(6).reshape(2, 3)
    device.launch(None, lambda view: view.__imul__(2), both.device)
    assert both.host[1, 2] == 5, "the kernel has not run"
    device.synchronize(None)
    assert both.host.tolist() == [[0, 2, 4], [6, 8, 10]]
    assert gdcomm.memory_kind(both.host) == gdcomm.memory_kind(both.device) == "mapped"
    buffer = devices.find(both.device)
    assert buffer is not None
    out = device.pinned(24)
    device.to_host(out, buffer)
    device.synchronize(None)
    assert out.view("f4").tolist() == [0, 2, 4, 6, 8, 10]


def test_either_view_keeps_mapped_memory(device: EmulatedDevice) -> None:
    pool = pinned.pool_of(device)
    both = gdcomm.mapped_empty(100)
    view = both.device[10:20]
    del both
    gc.collect()
    assert pool.stats()["leased"] == 4096
    del view
    for _ in range(5):
        stats = pool.stats()
    assert (stats["leased"], stats["idle"]) == (0, 4096)


def test_kernels_on_the_current_stream_end_before_mapped_memory_is_used_again(device: EmulatedDevice) -> None:
    seen = []
    both = gdcomm.mapped_empty(100, "u1")
    both.host[...] = 7
    device.launch(None, lambda view: seen.append(bytes(view)), both.device)
    del both
    gc.collect()
    gdcomm.pinned_zeros(100, "u1")
    device.synchronize(None)
    assert seen == [b"\7" * 100]


def test_the_device_reaches_page_locked_memory_only(device: EmulatedDevice) -> None:
    with pytest.raises(gdcomm.DeviceError, match="page-locked"):
        device.device_view(np.zeros(3))
    device.emulated_properties = device.emulated_properties._replace(can_map_host_memory=False)
    with pytest.raises(gdcomm.DeviceError, match="mapped"):
        gdcomm.mapped_empty(3)


def test_coherent_machines_map_ordinary_memory(device: EmulatedDevice) -> None:
    assert COHERENT.coherent
    assert not COHERENT._replace(pageable_memory_access_uses_host_page_tables=False).coherent
    device.emulated_properties = COHERENT
    both = gdcomm.mapped_empty((2, 2))
    assert pinned.pool_of(device).stats()["leased"] == 0
    assert gdcomm.memory_kind(both.host) == "pageable"
    both.host[...] = 3
    out = device.asnumpy(both.device)
    assert out.tolist() == [[3, 3], [3, 3]]
    assert gdcomm.memory_kind(gdcomm.pinned_empty(3)) == "pinned"


@pytest.mark.parametrize("index", [np.s_[::-1], np.s_[1:, ::2], np.s_[0, 1]])
def test_views_of_mapped_memory_are_described_rightly(device: EmulatedDevice, index: Any) -> None:
    both = gdcomm.mapped_empty((4, 6), "i4")
    both.host[...] = np.arange(24).reshape(4, 6)
    buffer = devices.find(both.device[index])
    assert buffer is not None
    out = device.pinned(buffer.nbytes)
    device.to_host(out, buffer)
    device.synchronize(None)
    assert out.tobytes() == both.host[index].tobytes()


def test_on_coherent_machines_memory_lives_until_kernels_are_done(device: EmulatedDevice) -> None:
    device.emulated_properties = COHERENT
    both, side, freed = gdcomm.mapped_empty(50_000, "u1"), device.Stream(), []
    pool = pinned.pool_of(device)
    block = pool.find(both.host.ctypes.data)
    assert block is not None
    weakref.finalize(block.array, freed.append, 1)
    device.launch(side, lambda: None)
    pinned.note_use(both.host.ctypes.data, 1, device.record(side))
    del both, block
    gc.collect()
    device.synchronize(None)
    pool.trim()
    assert not freed, "a kernel may still read it"
    side.synchronize()
    for _ in range(5):
        pool.trim()
    assert freed
    assert pool.stats()["idle"] == pool._budget.used == 0


def test_the_other_byte_order_is_not_mapped(device: EmulatedDevice) -> None:
    with pytest.raises(gdcomm.BufferSpecError, match="byte order"):
        gdcomm.mapped_empty(3, ">f8")
