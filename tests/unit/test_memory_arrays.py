"""Arrays in page-locked memory: whose it is, when it is used again, and what they refuse."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gdcomm
from gdcomm import devices
from gdcomm.devices.emulated import EmulatedDevice
from gdcomm.memory import pinned
from gdcomm.memory.budget import Budget
from gdcomm.memory.pinned import PinnedPool, note_use

MIB = 1 << 20


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> EmulatedDevice:
    device = EmulatedDevice(seed=5)
    monkeypatch.setattr(devices, "_installed", [device])
    return device


@pytest.fixture
def pool(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> PinnedPool:
    pool = PinnedPool(device, budget=Budget(64 * MIB))
    monkeypatch.setitem(pinned._pools, id(device), pool)
    return pool


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_installed", [])
    monkeypatch.setattr(devices, "_cuda_state", [None])


def settled(pool: PinnedPool) -> dict[str, int]:
    """Statistics once the emulated events no longer say "not yet"."""
    for _ in range(5):
        stats = pool.stats()
    return stats


@pytest.mark.parametrize("dtype", ["u1", "f8", "c16", "M8[s]", "S5", ml_dtypes.bfloat16, [("a", "i1"), ("b", "f8")]])
@pytest.mark.parametrize("shape", [(), 0, 7, (3, 4), (2, 0, 5), [np.int64(3)], np.array(3)])
def test_pinned_empty_has_the_shape_and_dtype_asked_for(pool: PinnedPool, dtype: Any, shape: Any) -> None:
    made, expected = gdcomm.pinned_empty(shape, dtype), np.empty(shape, dtype)
    assert (made.shape, made.dtype) == (expected.shape, expected.dtype)
    assert made.flags.c_contiguous
    assert type(made) is np.ndarray
    assert made.flags.writeable
    assert made.ctypes.data % 64 == 0
    assert pool._device.is_pinned(made.ctypes.data)


@pytest.mark.parametrize("nbytes", [100, 5 * MIB, 20 * MIB])
def test_memory_is_page_locked_throughout_and_garbage(pool: PinnedPool, device: EmulatedDevice, nbytes: int) -> None:
    made = gdcomm.pinned_empty(nbytes, "u1")
    assert all(device.is_pinned(made.ctypes.data + offset) for offset in (0, nbytes // 2, nbytes - 1))
    assert made.min() > 0
    assert device.stats.get("host_register", 0) == (nbytes >= 4 * MIB), "large memory is registered pages"
    assert nbytes < 4 * MIB or made.ctypes.data % (2 * MIB) == 0


def test_zeros_like_and_array_are_as_numpys(pool: PinnedPool) -> None:
    assert not gdcomm.pinned_zeros((3, 5), "i4").any()
    assert not gdcomm.pinned_zeros(70 * 1000, "u1").any()
    assert gdcomm.pinned_zeros((2, 3), order="F").flags.f_contiguous
    values = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    like = gdcomm.pinned_like(values)
    assert (like.shape, like.dtype, like.strides) == (values.shape, values.dtype, values.strides)
    assert gdcomm.pinned_like(values, "i2", shape=4).nbytes == 8
    assert gdcomm.pinned_like([[1, 2], [3, 4]]).shape == (2, 2)
    copy = gdcomm.pinned_array(values[:, ::2], np.float32)
    assert copy.tolist() == values[:, ::2].tolist()
    assert copy.dtype == np.float32
    values[...] = -1
    assert copy.max() == 5


def test_like_takes_a_device_array_and_array_refuses_one(pool: PinnedPool, device: EmulatedDevice) -> None:
    x = device.zeros((3, 4), "f4")
    assert gdcomm.pinned_like(x).shape == (3, 4)
    with pytest.raises(gdcomm.BufferSpecError, match="to_host"):
        gdcomm.pinned_array(x)


@pytest.mark.parametrize(
    ("arguments", "options", "says"),
    [
        ((-1,), {}, "negative"),
        (((2, -3),), {}, "negative"),
        (("x",), {}, "shape"),
        ((2.5,), {}, "shape"),
        ((3, object), {}, "Python objects"),
        ((3, "nonsense"), {}, "dtype"),
        ((3,), {"order": "K"}, "order"),
        ((3,), {"numa": 7}, "no NUMA node 7"),
        ((3,), {"numa": 0, "write_combined": True}, "write_combined"),
        ((3,), {"numa": []}, "numa"),
        ((3,), {"numa": 0.0}, "numa"),
        (("",), {}, "shape"),
        ((b"ab",), {}, "shape"),
        (({2, 3},), {}, "shape"),
        (({2: 3},), {}, "shape"),
        ((float("nan"),), {}, "shape"),
        (((0, 1 << 70),), {}, "more than NumPy"),
        ((1 << 70,), {}, "more than NumPy"),
        (((1,) * 70,), {}, "more than NumPy"),
        ((3, "S"), {}, "no bytes"),
        ((3, "V0"), {}, "no bytes"),
        ((3, "f8,,"), {}, "dtype"),
        ((3, [("a", "f8"), ("a", "f8")]), {}, "dtype"),
    ],
)
def test_bad_arguments_are_named(pool: PinnedPool, arguments: Any, options: Any, says: str) -> None:
    with pytest.raises(gdcomm.BufferSpecError, match=says):
        gdcomm.pinned_empty(*arguments, **options)
    assert pool.stats()["leased"] == 0
    assert pool._budget.used == 0


def test_memory_goes_back_with_the_last_view(pool: PinnedPool) -> None:
    made = gdcomm.pinned_empty(1000, "u1")
    address = made.ctypes.data
    view = memoryview(made[10:].reshape(99, 10).T)
    del made
    gc.collect()
    assert settled(pool)["leased"] == 4096, "a view keeps it"
    assert gdcomm.pinned_empty(1000, "u1").ctypes.data != address
    del view
    gc.collect()
    stats = settled(pool)
    assert (stats["leased"], stats["idle"]) == (0, 8192)
    again = gdcomm.pinned_empty(1000, "u1")
    assert again.ctypes.data == address
    assert (again == 0xDB).all(), "spoilt in between"


def test_arrays_and_leases_share_blocks_but_kinds_do_not(pool: PinnedPool) -> None:
    lease = pool.lease(5000)
    address = lease.address
    lease.release()
    assert gdcomm.pinned_empty(5000, "u1", write_combined=True).ctypes.data != address
    assert gdcomm.pinned_empty(5000, "u1").ctypes.data == address


def test_a_noted_copy_keeps_memory_from_reuse(pool: PinnedPool, device: EmulatedDevice) -> None:
    side, target = device.Stream(), device.empty(512)
    source = gdcomm.pinned_zeros(512)
    device.copy(target.ptr, source.ctypes.data, source.nbytes, side)
    note_use(source.ctypes.data + 8, 8, device.record(side))
    del source
    gdcomm.pinned_zeros(512)[...] = 3
    gdcomm.pinned_zeros(512)[...] = 4
    assert not device.asnumpy(target, side).any()


def test_without_the_note_the_copy_reads_spoilt_memory(pool: PinnedPool, device: EmulatedDevice) -> None:
    side, target = device.Stream(), device.empty(512)
    source = gdcomm.pinned_zeros(512)
    device.copy(target.ptr, source.ctypes.data, source.nbytes, side)
    del source
    settled(pool)
    assert device.asnumpy(target, side).all()


def test_work_on_the_current_stream_need_not_be_noted(pool: PinnedPool, device: EmulatedDevice) -> None:
    target = device.empty(512)
    source = gdcomm.pinned_zeros(512)
    device.copy(target.ptr, source.ctypes.data, source.nbytes, None)
    del source
    others = [gdcomm.pinned_zeros(512) for _ in range(2)]
    for other in others:
        other[...] = 3
    assert not device.asnumpy(target).any()


def test_uses_that_are_over_are_forgotten(pool: PinnedPool, device: EmulatedDevice) -> None:
    made = gdcomm.pinned_empty(8)
    for _ in range(200):
        event = device.record(None)
        event.synchronize()
        note_use(made.ctypes.data, 8, event)
    block = pool.find(made.ctypes.data)
    assert block is not None
    assert len(block.uses) < 40
    note_use(np.zeros(3).ctypes.data, 24, event)  # memory of others is nobody's business


def test_a_use_that_is_not_over_is_never_forgotten(pool: PinnedPool, device: EmulatedDevice) -> None:
    side, target = device.Stream(), device.empty(512)
    source = gdcomm.pinned_zeros(512)
    address = source.ctypes.data
    device.copy(target.ptr, address, source.nbytes, side)
    late = device.record(side)
    late._patience = 10_000
    note_use(address, 8, late)
    for _ in range(100):
        note_use(address, 8, device.record(None))
    del source
    assert settled(pool)["pending"] == 4096
    assert gdcomm.pinned_zeros(512).ctypes.data != address


def test_an_array_dropped_while_the_device_fails_is_not_used_again(pool: PinnedPool, device: EmulatedDevice) -> None:
    made = gdcomm.pinned_empty(8)
    device.idle = None  # type: ignore[method-assign, assignment]
    del made
    assert pool.stats() == {"leased": 0, "idle": 0, "pending": 0, "hits": 0, "misses": 1}
    assert pool._budget.used == 0


def test_the_budget_is_a_memory_error_that_says_what_to_do(pool: PinnedPool, device: EmulatedDevice) -> None:
    held = gdcomm.pinned_empty(40 * MIB, "u1")
    with pytest.raises(MemoryError, match="GDCOMM_PINNED_LIMIT") as caught:
        gdcomm.pinned_empty(40 * MIB, "u1")
    assert isinstance(caught.value, gdcomm.PinnedMemoryError)
    assert pool._budget.used == 40 * MIB
    del held
    settled(pool)
    assert gdcomm.pinned_empty(48 * MIB, "u1").nbytes, "idle memory made room"
    assert device.stats["host_unregister"] == 1


def test_staging_waits_for_pending_memory_before_it_gives_up(pool: PinnedPool, device: EmulatedDevice) -> None:
    ran: list[int] = []
    for mark in range(2):
        lease = pool.lease(30 * MIB)
        device.launch(None, lambda mark=mark: ran.append(mark))
        event = device.record(None)
        event._patience = 100  # polling does not do
        lease.release(event)
    del lease
    first = pool.lease(30 * MIB)
    second = pool.lease(30 * MIB)
    assert ran == [0, 1]
    assert first.address != second.address
    with pytest.raises(gdcomm.PinnedMemoryError):
        pool.lease(30 * MIB)
    first.release()
    del first
    assert pool.lease(20 * MIB).array.nbytes == 20 * MIB, "the idle block made room"


def test_arrays_do_not_wait_for_pending_memory(pool: PinnedPool, device: EmulatedDevice) -> None:
    lease = pool.lease(60 * MIB)
    device.launch(None, lambda: None)
    lease.release(event := device.record(None))
    event._patience = 100
    waited = device.stats["synchronize"]
    with pytest.raises(gdcomm.PinnedMemoryError):
        gdcomm.pinned_empty(30 * MIB, "u1")
    assert device.stats["synchronize"] == waited


def test_what_the_device_refuses_is_not_counted(pool: PinnedPool, device: EmulatedDevice) -> None:
    device.host_limit = 10 * MIB
    with pytest.raises(gdcomm.DeviceError, match="out of memory"):
        gdcomm.pinned_empty(20 * MIB, "u1")
    assert pool._budget.used == 0
    assert pool.lease(20 * MIB).array.nbytes == 20 * MIB, "staging takes what there is"


def test_rings_of_slots_count_too(pool: PinnedPool) -> None:
    slots = pool.slots()
    assert pool._budget.used == slots.SIZE * slots.COUNT
    assert pool.slots() is slots


def test_mapped_memory_needs_a_device_that_reaches_it(pool: PinnedPool, device: EmulatedDevice) -> None:
    assert gdcomm.memory_kind(gdcomm.pinned_empty(3, mapped=True)) == "mapped"
    device.emulated_properties = device.emulated_properties._replace(can_map_host_memory=False)
    with pytest.raises(gdcomm.DeviceError, match="mapped"):
        gdcomm.pinned_empty(3, mapped=True)


def test_a_device_that_can_not_register_allocates(pool: PinnedPool, device: EmulatedDevice) -> None:
    device.emulated_properties = device.emulated_properties._replace(host_register_supported=False)
    assert gdcomm.pinned_empty(8 * MIB, "u1").nbytes == 8 * MIB
    assert device.stats.get("host_register") is None


def test_without_a_device_memory_is_ordinary(no_device: None) -> None:
    made = gdcomm.pinned_zeros((100, 3), "f4", write_combined=True)
    made[...] = 1
    assert made.ctypes.data % 4096 == 0
    assert gdcomm.memory_kind(made) == "pageable"
    assert gdcomm.pinned_array([1, 2]).tolist() == [1, 2]
    assert gdcomm.pinned_empty(0).shape == (0,)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_starts_anew(pool: PinnedPool) -> None:
    made, large = gdcomm.pinned_zeros(10), gdcomm.pinned_zeros(8 * MIB, "u1")
    read, write = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            del large  # its memory is not here: nothing may touch it
            gc.collect()
            if pool.stats()["leased"] == 0 and pool._budget.used == 0 and gdcomm.pinned_zeros(8 * MIB, "u1").max() == 0:
                code = 0
        finally:
            os.write(write, bytes([code]))
            os._exit(code)
    assert os.read(read, 1) == b"\0"
    os.waitpid(child, 0)
    os.close(read)
    os.close(write)
    assert pool.stats()["leased"] >= 8 * MIB
    assert not large.any()
    assert not made.any()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3000), st.booleans(), st.booleans()), max_size=25),
    st.integers(0, 99),
)
def test_no_copy_ever_reads_stale_memory(steps: list[tuple[int, int, bool, bool]], seed: int) -> None:
    device = EmulatedDevice(seed)
    pool = PinnedPool(device, idle_limit=16384, budget=Budget(1 << 30))
    streams = [device.Stream() for _ in range(3)]
    results: list[tuple[Any, int, Any]] = []
    for mark, (which, nbytes, as_array, settle) in enumerate(steps, 1):
        stream, target = streams[which], device.empty(nbytes, "u1")
        if as_array:
            source = np.asarray(pool.hold(nbytes))[:nbytes]
            source[...] = mark
            device.copy(target.ptr, source.ctypes.data, nbytes, stream)
            assert pool.note_use(source.ctypes.data, device.record(stream))
            del source
        else:
            lease = pool.lease(nbytes)
            lease.array[...] = mark
            device.copy(target.ptr, lease.address, nbytes, stream)
            lease.release(device.record(stream))
        if settle:
            pool.stats()
        results.append((target, mark, stream))
    for target, mark, stream in results:
        assert (device.asnumpy(target, stream) == mark).all()


def test_threads_share_the_pool_without_stale_bytes(pool: PinnedPool, device: EmulatedDevice) -> None:
    wrong: list[int] = []

    def work(mark: int) -> None:
        stream = device.Stream()
        with stream:
            for step in range(60):
                target = device.empty(300, "u1")
                source = gdcomm.pinned_empty(300, "u1", write_combined=step % 5 == 0)
                source[...] = mark
                device.copy(target.ptr, source.ctypes.data, 300, None)
                del source
                gdcomm.pinned_empty(300, "u1")[...] = 99
                if not (device.asnumpy(target, stream) == mark).all():
                    wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    stats = settled(pool)
    assert stats["leased"] == stats["pending"] == 0
    assert pool._budget.used == stats["idle"]


@pytest.mark.parametrize("shape", [1 << 70, (1 << 40, 1 << 40), (0, 1 << 70), (1,) * 70, 1 << 60])
def test_without_a_device_huge_shapes_are_refused_as_clearly(no_device: None, shape: Any) -> None:
    with pytest.raises((gdcomm.BufferSpecError, gdcomm.PinnedMemoryError)):
        gdcomm.pinned_empty(shape, "u1")


def test_values_that_make_no_array_are_named(pool: PinnedPool) -> None:
    for call in (gdcomm.pinned_array, gdcomm.pinned_like):
        with pytest.raises(gdcomm.BufferSpecError, match="makes no array"):
            call([[1], [1, 2]])
    with pytest.raises(gdcomm.BufferSpecError, match="makes no array"):
        gdcomm.pinned_array(["a"], float)
    with pytest.raises(gdcomm.BufferSpecError, match="masked"):
        gdcomm.pinned_array(np.ma.masked_array([1, 2], [0, 1]))
    assert pool._budget.used == 0


def test_a_node_that_can_not_be_chosen_is_refused(pool: PinnedPool, device: EmulatedDevice) -> None:
    device.emulated_properties = device.emulated_properties._replace(host_register_supported=False)
    with pytest.raises(gdcomm.DeviceError, match="numa"):
        gdcomm.pinned_empty(3, numa=0)
    assert pool._budget.used == 0


def test_address_space_that_ends_is_the_systems_answer(
    pool: PinnedPool, device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gdcomm.memory.pages.HUGE", -(1 << 50))  # mmap refuses
    device.host_limit = 0
    with pytest.raises(gdcomm.DeviceError):
        gdcomm.pinned_empty(20 * MIB, "u1")
    assert pool.lease(20 * MIB).array.nbytes == 20 * MIB, "staging takes what there is"


def test_the_ring_of_a_thread_outlives_it_until_its_copies_are_done(pool: PinnedPool, device: EmulatedDevice) -> None:
    target = device.zeros(10)
    device.synchronize(None)

    def work() -> None:
        gdcomm.copy(target, np.arange(10.0), stream=device.default_stream)

    for _ in range(3):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert device.asnumpy(target).tolist() == list(range(10))
    settled(pool)
    used = pool._budget.used
    for _ in range(20):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        device.synchronize(None)
        settled(pool)
    assert pool._budget.used <= used, "rings are used again"
    assert pool.stats()["leased"] == 0


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_lease_of_the_parent_is_nothing_to_a_child(pool: PinnedPool) -> None:
    lease = pool.lease(100)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            del lease
            gc.collect()
            os.write(write, str(pool.stats()["leased"]).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 20) == b"0"
    os.close(read)
    os.close(write)
    lease.release()


def test_eight_threads_one_of_which_fails_leave_nothing(pool: PinnedPool, device: EmulatedDevice) -> None:
    wrong: list[Any] = []

    def work(mark: int) -> None:
        stream = device.Stream()
        with stream:
            for step in range(25):
                target, cycle = device.empty(3000), [gdcomm.pinned_empty(3000)]
                cycle.append(cycle)  # type: ignore[arg-type]  # left to the collector
                cycle[0][...] = mark
                gdcomm.copy(target, cycle[0], block=False)
                del cycle
                with gdcomm.registered(np.full(3000, -1.0)) as array:
                    gdcomm.copy(target, array[:10], block=False) if mark == 8 and step == 5 else None
                if not (device.asnumpy(target, stream) == mark).all():
                    wrong.append(mark)

    def run(mark: int) -> None:
        try:
            work(mark)
        except gdcomm.BufferSpecError as error:
            wrong.append(str(error)[:9])

    threads = [threading.Thread(target=run, args=(mark,)) for mark in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == ["dst has s"]
    gc.collect()
    for stream in list(device._streams.values()):
        stream.synchronize()
    for _ in range(9):  # copies that nobody waited for keep their arrays until later ones look
        gdcomm.copy(device.empty(9), device.empty(9), block=False)
    stats = settled(pool)
    assert stats["leased"] == stats["pending"] == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: gdcomm.pinned_empty(5000),
        lambda: gdcomm.pinned_zeros((50, 3), order="F", write_combined=True),
        lambda: gdcomm.pinned_array([1, 2]),
        lambda: gdcomm.mapped_empty(50),
        lambda: gdcomm.Signal().set(1),
        lambda: gdcomm.memory_kind(gdcomm.pinned_like(np.zeros(3))),
    ],
)
def test_a_thousand_times_over_nothing_is_left(pool: PinnedPool, make: Any) -> None:
    make()
    settled(pool)
    used = pool._budget.used
    for _ in range(1000):
        make()
    stats = settled(pool)
    assert stats["leased"] == stats["pending"] == 0
    assert pool._budget.used <= 3 * used
