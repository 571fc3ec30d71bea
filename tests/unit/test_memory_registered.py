"""Registrations are counted by page; the device never sees a page registered twice, and none is left behind."""

from __future__ import annotations

import gc
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gdcomm
from gdcomm import devices
from gdcomm.devices.emulated import EmulatedDevice
from gdcomm.memory import pinned, registered
from gdcomm.memory.budget import Budget
from gdcomm.memory.pinned import PinnedPool, note_use
from gdcomm.memory.registered import Registry, pieces

PAGE = mmap.PAGESIZE
MIB = 1 << 20


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> EmulatedDevice:
    device = EmulatedDevice(seed=5)
    monkeypatch.setattr(devices, "_installed", [device])
    monkeypatch.setattr(pinned, "_registries", [])
    monkeypatch.setattr(registered, "_registries", {})
    monkeypatch.setitem(pinned._pools, id(device), PinnedPool(device, budget=Budget(64 * MIB)))
    return device


@pytest.fixture
def registry(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> Registry:
    registry = Registry(device, Budget(64 * MIB))
    monkeypatch.setitem(registered._registries, id(device), registry)
    return registry


def memory(nbytes: int) -> np.ndarray[Any, Any]:
    """Whole pages of their own."""
    block = np.zeros(nbytes + 2 * PAGE, np.uint8)
    return block[-block.ctypes.data % PAGE :][:nbytes]


def is_pinned(device: EmulatedDevice, array: np.ndarray[Any, Any]) -> bool:
    return device.is_pinned(array.ctypes.data) and device.is_pinned(array.ctypes.data + array.nbytes - 1)


def test_memory_is_page_locked_within_the_block(registry: Registry, device: EmulatedDevice) -> None:
    array = np.zeros(10_000)
    with gdcomm.registered(array) as same:
        assert same is array
        assert is_pinned(device, array)
        assert gdcomm.memory_kind(array[5:9]) == "registered"
        assert registry._budget.used >= array.nbytes
    assert not is_pinned(device, array)
    assert registry._budget.used == 0
    assert device.stats["host_register"] == device.stats["host_unregister"] == 1


def test_the_block_ends_the_registration_after_an_error_too(registry: Registry, device: EmulatedDevice) -> None:
    array = np.zeros(1000)
    with pytest.raises(ZeroDivisionError), gdcomm.registered(array):
        1 / 0  # noqa: B018
    assert not is_pinned(device, array)


def test_nested_and_repeated_registrations_are_counted(registry: Registry, device: EmulatedDevice) -> None:
    array = np.zeros(10_000)
    gdcomm.register(array)
    with gdcomm.registered(array[100:200]), gdcomm.registered(array):
        gdcomm.unregister(array)
        assert is_pinned(device, array)
    assert not is_pinned(device, array)
    assert device.stats["host_register"] == 1
    with pytest.raises(gdcomm.BufferSpecError, match="not registered"):
        gdcomm.unregister(array)


def test_overlapping_registrations_lock_each_page_once(registry: Registry, device: EmulatedDevice) -> None:
    whole = memory(10 * PAGE)
    middle, ends = whole[4 * PAGE : 6 * PAGE], whole[2 * PAGE : 9 * PAGE]
    gdcomm.register(middle)
    gdcomm.register(ends)
    assert device.stats["host_register"] == 3, "the missing parts"
    assert registry._budget.used == 7 * PAGE
    gdcomm.unregister(middle)
    assert is_pinned(device, middle), "the larger one needs it"
    gdcomm.unregister(ends)
    assert registry._budget.used == 0
    assert not device.is_pinned(middle.ctypes.data)


def test_arrays_that_share_a_page_share_its_registration(registry: Registry, device: EmulatedDevice) -> None:
    whole = memory(3 * PAGE)
    left, right = whole[10 : PAGE + 10], whole[PAGE + 20 : 2 * PAGE + 20]
    with gdcomm.registered(left):
        gdcomm.register(right)
    assert is_pinned(device, right)
    gdcomm.unregister(right)
    assert not is_pinned(device, whole)


def test_copies_are_cut_where_registrations_meet(registry: Registry) -> None:
    whole = memory(8 * PAGE)
    start = whole.ctypes.data
    assert pieces(start, whole.nbytes) == [(start, 8 * PAGE)]
    gdcomm.register(whole[PAGE : 3 * PAGE])
    gdcomm.register(whole[3 * PAGE : 5 * PAGE])
    assert pieces(start, whole.nbytes) == [
        (start, PAGE),
        (start + PAGE, 2 * PAGE),
        (start + 3 * PAGE, 2 * PAGE),
        (start + 5 * PAGE, 3 * PAGE),
    ]
    inside = start + PAGE + 7
    assert pieces(inside, 100) == [(inside, 100)]


def test_page_locked_memory_is_left_as_it_is(registry: Registry, device: EmulatedDevice) -> None:
    for array in (gdcomm.pinned_zeros(1000), gdcomm.pinned_zeros(5 * MIB, "u1")):
        before = device.stats.get("host_register", 0)
        with gdcomm.registered(array):
            assert gdcomm.memory_kind(array) == "pinned"
        assert device.stats.get("host_register", 0) == before
        assert gdcomm.memory_kind(array) == "pinned"
        with pytest.raises(gdcomm.BufferSpecError):
            gdcomm.unregister(array)


def test_memory_freed_while_registered_is_unregistered_first(registry: Registry, device: EmulatedDevice) -> None:
    array = np.zeros((100, 100))
    gdcomm.register(array[1:].view())
    gdcomm.register(array)
    del array
    gc.collect()
    assert device.stats["host_unregister"] == device.stats["host_register"]
    assert registry._budget.used == 0
    assert not registry._registrations


def test_the_owner_that_dies_first_ends_its_own_registrations_only(registry: Registry, device: EmulatedDevice) -> None:
    one, two = np.zeros(5000), np.zeros(5000)
    gdcomm.register(one)
    gdcomm.register(two)
    del one
    assert is_pinned(device, two)
    gdcomm.unregister(two)
    assert registry._budget.used == 0


def test_an_mmap_stays_open_while_it_is_registered(registry: Registry, device: EmulatedDevice) -> None:
    with mmap.mmap(-1, 4 * PAGE) as mapping:
        gdcomm.register(mapping)
        with pytest.raises(BufferError):
            mapping.close()
        gdcomm.unregister(mapping)
    assert device.stats["host_unregister"] == 1


def test_a_memory_mapped_file(registry: Registry, device: EmulatedDevice, tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(range(256)) * 64)
    array = np.memmap(path, np.uint8, "r")
    device.readonly_pages = frozenset(range(array.ctypes.data, array.ctypes.data + array.nbytes, PAGE))
    with gdcomm.registered(array[100:]):
        assert is_pinned(device, array)
    device.emulated_properties = device.emulated_properties._replace(host_register_readonly_supported=False)
    with pytest.raises(gdcomm.DeviceError, match="read-only"), gdcomm.registered(array):
        pass
    assert registry._budget.used == 0
    device.readonly_pages = frozenset()
    gdcomm.register(array[10:])
    del array
    gc.collect()
    assert device.stats["host_unregister"] == device.stats["host_register"] == 2


def test_a_writable_array_does_not_share_read_only_pages(registry: Registry, device: EmulatedDevice) -> None:
    writable = memory(4 * PAGE)
    readonly = writable[:]
    readonly.flags.writeable = False
    with gdcomm.registered(readonly), gdcomm.registered(writable):
        pass  # the pages may be written, so nothing was locked read-only
    device.readonly_pages = frozenset([writable.ctypes.data])
    gdcomm.register(readonly)
    with pytest.raises(gdcomm.DeviceError, match="read-only"):
        gdcomm.register(writable)
    gdcomm.unregister(readonly)


def test_a_refused_registration_leaves_nothing(registry: Registry, device: EmulatedDevice) -> None:
    whole = memory(9 * PAGE)
    start = whole.ctypes.data
    gdcomm.register(whole[4 * PAGE : 5 * PAGE])
    used = registry._budget.used
    device.readonly_pages = frozenset([start + 7 * PAGE])
    with pytest.raises(gdcomm.DeviceError):
        gdcomm.register(whole)
    device.readonly_pages = frozenset()
    assert registry._budget.used == used
    assert not device.is_pinned(start)
    gdcomm.register(whole)
    assert device.is_pinned(start)


def test_pages_that_others_registered_are_refused_clearly(registry: Registry, device: EmulatedDevice) -> None:
    whole = memory(9 * PAGE)
    device.host_register(whole.ctypes.data + 2 * PAGE, PAGE)
    with pytest.raises(gdcomm.DeviceError, match="already registered"):
        gdcomm.register(whole)
    gdcomm.register(whole[2 * PAGE : 3 * PAGE])  # wholly theirs: nothing to do
    gdcomm.unregister(whole[2 * PAGE : 3 * PAGE])
    assert device.is_pinned(whole.ctypes.data + 2 * PAGE)


def test_the_budget_and_the_system_have_the_last_word(registry: Registry, device: EmulatedDevice) -> None:
    large = np.zeros(80 * MIB, np.uint8)
    with pytest.raises(gdcomm.PinnedMemoryError, match="GDCOMM_PINNED_LIMIT"):
        gdcomm.register(large)
    device.host_limit = MIB
    with pytest.raises(gdcomm.DeviceError, match="out of memory"):
        gdcomm.register(large[: 2 * MIB])
    assert registry._budget.used == 0


def test_unregistering_waits_for_the_copies_it_was_told_of(registry: Registry, device: EmulatedDevice) -> None:
    array, target, side = np.arange(1000.0), device.empty(1000), device.Stream()
    with gdcomm.registered(array):
        device.copy(target.ptr, array.ctypes.data, array.nbytes, side)
        note_use(array.ctypes.data, array.nbytes, device.record(side))
    array[...] = -1
    assert device.asnumpy(target, side)[5] == 5


def test_without_the_note_a_copy_meets_memory_that_is_gone(registry: Registry, device: EmulatedDevice) -> None:
    array, target, side = np.arange(1000.0), device.empty(1000), device.Stream()
    with gdcomm.registered(array):
        device.copy(target.ptr, array.ctypes.data, array.nbytes, side)
    with pytest.raises(gdcomm.BufferSpecError, match="freed"):
        device.synchronize(side)


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (np.zeros((4, 4))[:, ::2], "gaps"),
        (np.array([object()]), "Python objects"),
        ([1, 2, 3], "list"),
        ("text", "str"),
        (None, "NoneType"),
    ],
)
def test_what_has_no_plain_memory_is_refused(registry: Registry, array: Any, says: str) -> None:
    for call in (gdcomm.register, gdcomm.unregister):
        with pytest.raises(gdcomm.BufferSpecError, match=says):
            call(array)


def test_empty_arrays_have_nothing_to_lock(registry: Registry, device: EmulatedDevice) -> None:
    with gdcomm.registered(np.zeros((0, 3))):
        assert "host_register" not in device.stats


def test_on_coherent_machines_nothing_is_locked(registry: Registry, device: EmulatedDevice) -> None:
    device.emulated_properties = device.emulated_properties._replace(
        pageable_memory_access=True, pageable_memory_access_uses_host_page_tables=True
    )
    array = np.zeros(1000)
    with gdcomm.registered(array):
        assert "host_register" not in device.stats
    with pytest.raises(gdcomm.BufferSpecError):
        gdcomm.unregister(array)


def test_a_device_that_can_not_register_says_what_to_do(registry: Registry, device: EmulatedDevice) -> None:
    device.emulated_properties = device.emulated_properties._replace(host_register_supported=False)
    with pytest.raises(gdcomm.DeviceError, match="pinned_array"):
        gdcomm.register(np.zeros(10))


def test_without_a_device_there_is_nothing_to_register_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_installed", [])
    monkeypatch.setattr(devices, "_cuda_state", [None])
    with pytest.raises(gdcomm.DeviceError, match="CuPy"), gdcomm.registered(np.zeros(3)):
        pass


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_has_no_registrations(registry: Registry, device: EmulatedDevice) -> None:
    array, other = np.zeros(1000), np.zeros(1000)
    gdcomm.register(array)
    read, write = os.pipe()
    inherited = gdcomm.registered(other)
    inherited.__enter__()
    child = os.fork()
    if not child:
        said = "nothing"
        try:
            inherited.__exit__(None, None, None)
            gdcomm.unregister(array)
        except gdcomm.DeviceError as error:
            said = str(error)
        finally:
            os.write(write, said.encode())
            os._exit(0)
    os.waitpid(child, 0)
    assert "parent of this process" in os.read(read, 1000).decode()
    os.close(read)
    os.close(write)
    inherited.__exit__(None, None, None)
    gdcomm.unregister(array)


spans = st.tuples(st.integers(0, 12 * PAGE - 1), st.integers(1, 5 * PAGE))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.booleans(), spans), max_size=30))
def test_random_registrations_agree_with_a_counter_of_pages(steps: list[tuple[bool, tuple[int, int]]]) -> None:
    device = EmulatedDevice(1)
    registry = Registry(device, Budget(64 * MIB))
    pinned._registries.remove(registry)
    whole = memory(17 * PAGE)
    start = whole.ctypes.data
    counts, open_spans = [0] * 17, []
    for add, (offset, nbytes) in steps:
        if add or not open_spans:
            registry.add(whole[offset : offset + nbytes])
            open_spans.append((offset, nbytes))
        else:
            offset, nbytes = open_spans.pop(offset % len(open_spans))
            registry.remove(whole[offset : offset + nbytes])
        counts = [0] * 17
        for first, length in open_spans:
            for page in range(first // PAGE, -(-(first + length) // PAGE)):
                counts[page] += 1
        for page, count in enumerate(counts):
            assert device.is_pinned(start + page * PAGE) or not count
        segments = [range(s.start, s.end) for s in registry._segments.values()]
        assert registry._budget.used == sum(map(len, segments))
        for segment in segments:
            used = [counts[(address - start) // PAGE] for address in range(segment.start, segment.stop, PAGE)]
            assert any(used), "a registration that nobody uses has ended"
    for offset, nbytes in open_spans:
        registry.remove(whole[offset : offset + nbytes])
    assert not any(device.is_pinned(start + page * PAGE) for page in range(17))
    assert registry._budget.used == 0
    assert device.stats.get("host_register") == device.stats.get("host_unregister")


def test_the_collector_may_unregister_while_memory_is_registered(
    registry: Registry, device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = memory(6 * PAGE)
    owner = whole[PAGE : 3 * PAGE]
    within, victims = registry._within, [np.zeros(0)]

    def interrupted(start: int, end: int) -> Any:
        found = within(start, end)
        if victims:  # the owner of a part dies now
            victims.clear()
            key, registrations = next(iter(registry._registrations.items()))
            registry._owner_died(key, registrations[0])
        return found

    gdcomm.register(owner)
    monkeypatch.setattr(registry, "_within", interrupted)
    gdcomm.register(whole)
    assert not victims
    assert all(device.is_pinned(whole.ctypes.data + page * PAGE) for page in range(6))
    gdcomm.unregister(whole)
    assert registry._budget.used == 0
    assert not any(device.is_pinned(whole.ctypes.data + page * PAGE) for page in range(6))


def test_a_refused_registration_ends_segments_whose_owner_died_meanwhile(
    registry: Registry, device: EmulatedDevice
) -> None:
    whole = memory(6 * PAGE)
    gdcomm.register(whole[: 2 * PAGE])
    key, registrations = next(iter(registry._registrations.items()))
    refuse = device.host_register

    def register(*arguments: Any, **options: Any) -> None:
        registry._owner_died(key, registrations[0])
        device.host_limit = 0
        refuse(*arguments, **options)

    device.host_register = register  # type: ignore[method-assign]
    with pytest.raises(gdcomm.DeviceError):
        gdcomm.register(whole)
    assert registry._budget.used == 0
    assert not registry._segments


def test_a_thousand_registrations_leave_nothing(registry: Registry, device: EmulatedDevice) -> None:
    for step in range(1000):
        array = np.zeros(3000)
        gdcomm.register(array)
        if step % 2:
            gdcomm.unregister(array)
        del array
    assert registry._budget.used == 0
    assert not registry._segments
    assert not registry._registrations
