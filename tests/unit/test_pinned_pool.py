"""Pinned memory is copied late; a block is used again only when nothing can use it any more."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gdcomm
from gdcomm.devices.emulated import EmulatedDevice
from gdcomm.memory.pinned import Lease, PinnedPool, size_class

KIB = 1024


class FakeEvent:
    def __init__(self) -> None:
        self.done = self.broken = False

    def query(self) -> bool:
        if self.broken:
            raise RuntimeError("device lost")
        return self.done

    def synchronize(self) -> None:
        raise AssertionError("the pool never blocks")


@pytest.fixture
def device() -> EmulatedDevice:
    return EmulatedDevice(seed=3)


@pytest.fixture
def pool(device: EmulatedDevice) -> PinnedPool:
    return PinnedPool(device)


def test_pinned_memory_is_known_until_it_is_dropped(device: EmulatedDevice) -> None:
    block = device.pinned(100)
    address, tail = block.ctypes.data, block[90:]
    assert (block.shape, block.dtype) == ((100,), np.uint8)
    assert device.is_pinned(address)
    assert device.is_pinned(tail.ctypes.data)
    assert not device.owns(address)
    assert not device.is_pinned(np.zeros(8).ctypes.data)
    del block
    assert device.is_pinned(address), "a view keeps it"
    del tail
    gc.collect()
    assert not device.is_pinned(address)
    assert device.pinned(0).nbytes == 0


def test_pinned_copies_are_late_in_both_directions(device: EmulatedDevice) -> None:
    x = device.zeros(2, "u1")
    device.synchronize(None)
    buffer = device.find(x)
    assert buffer is not None
    block = device.pinned(2)
    block[...] = 1, 2
    device.to_device(buffer, block)
    block[...] = 9  # too early: the copy has not run
    assert device.asnumpy(x).tolist() == [9, 9]
    device.to_host(block, buffer)
    device.fill(x, 7, device.Stream())
    block[...] = 4
    device.synchronize(None)
    assert block.tolist() == [9, 9]


def test_pageable_copies_behave_as_the_drivers(device: EmulatedDevice) -> None:
    x = device.zeros(2, "u1")
    buffer = device.find(x)
    assert buffer is not None
    source, target = np.array([1, 2], "u1"), np.zeros(2, "u1")
    device.to_device(buffer, source)
    source[...] = 9  # allowed: taken at the call
    device.to_host(target, buffer)
    assert target.tolist() == [1, 2], "to_host returned with the data"
    assert (device.stats["to_device"], device.stats["to_host"], device.stats["bytes"]) == (1, 1, 4)


@given(st.integers(0, 1 << 45))
def test_a_size_class_wastes_at_most_an_eighth(nbytes: int) -> None:
    size = size_class(nbytes)
    assert size >= max(nbytes, 4096)
    assert size % 256 == 0
    assert size == 4096 or size <= nbytes * 1.125
    assert size_class(size) == size


@given(st.integers(0, 1 << 45), st.integers(0, 1 << 45))
def test_size_classes_grow_with_the_request(a: int, b: int) -> None:
    assert (size_class(a) <= size_class(b)) or a > b


def test_there_are_eight_size_classes_in_an_octave() -> None:
    for octave in (4096, 1 << 20):
        assert len({size_class(n) for n in range(octave + 1, 2 * octave + 1, octave // 64)}) == 8
    assert size_class(10_000_000_000) < 11_300_000_000


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 4097, 1_000_003])
def test_a_lease_is_exactly_as_long_as_asked_and_pinned(
    pool: PinnedPool, device: EmulatedDevice, nbytes: int
) -> None:
    lease = pool.lease(nbytes)
    assert (lease.array.shape, lease.array.dtype) == ((nbytes,), np.uint8)
    assert lease.array.ctypes.data % 256 == 0
    assert device.is_pinned(lease.array.ctypes.data)
    lease.release()
    assert lease.released


def test_a_negative_length_is_refused(pool: PinnedPool) -> None:
    with pytest.raises(gdcomm.BufferSpecError):
        pool.lease(-1)
    assert pool.stats() == {"leased": 0, "idle": 0, "pending": 0, "hits": 0, "misses": 0}


def test_a_released_block_is_used_again_and_spoilt(pool: PinnedPool) -> None:
    lease = pool.lease(100)
    address = lease.array.ctypes.data
    lease.array[...] = 1
    lease.release()
    again = pool.lease(3000)
    assert again.array.ctypes.data == address
    assert (again.array > 1).all()
    assert pool.stats() == {"leased": 4096, "idle": 0, "pending": 0, "hits": 1, "misses": 1}


def test_what_a_late_copy_left_in_an_idle_block_is_spoilt_too(pool: PinnedPool) -> None:
    lease = pool.lease(64)
    array = lease.array
    lease.release()
    array[...] = 1
    assert (pool.lease(64).array != 1).all()


def test_two_live_leases_never_share_memory(pool: PinnedPool) -> None:
    leases = [pool.lease(4096) for _ in range(10)]
    for lease in leases[::2]:
        lease.release()
    leases = leases[1::2] + [pool.lease(4000) for _ in range(7)]
    assert len({lease.array.ctypes.data for lease in leases}) == 12


def test_a_block_waits_for_its_event(pool: PinnedPool) -> None:
    event, lease = FakeEvent(), pool.lease(100)
    address = lease.array.ctypes.data
    lease.release(event)
    other = pool.lease(100)
    assert other.array.ctypes.data != address
    assert pool.stats() == {"leased": 4096, "idle": 0, "pending": 4096, "hits": 0, "misses": 2}
    event.done = True
    assert pool.lease(100).array.ctypes.data == address


def test_a_queued_copy_keeps_its_block_from_reuse(pool: PinnedPool, device: EmulatedDevice) -> None:
    x = device.empty(512)
    buffer = device.find(x)
    assert buffer is not None
    lease = pool.lease(4096)
    lease.array[...] = 1
    device.to_device(buffer, lease.array)
    lease.release(device.record(None))
    pool.lease(4096).array[...] = 2
    assert (device.asnumpy(x).view("u1") == 1).all()


def test_release_without_the_event_is_visible(pool: PinnedPool, device: EmulatedDevice) -> None:
    x = device.empty(512)
    buffer = device.find(x)
    assert buffer is not None
    lease = pool.lease(4096)
    lease.array[...] = 1
    device.to_device(buffer, lease.array)
    lease.release()  # wrong: the copy has not run
    assert not (device.asnumpy(x).view("u1") == 1).any()


def test_polling_leases_get_pending_blocks_back(pool: PinnedPool, device: EmulatedDevice) -> None:
    lease = pool.lease(4096)
    device.launch(None, lambda: None)
    lease.release(device.record(None))
    for _ in range(4):
        stats = pool.stats()
    assert (stats["pending"], stats["idle"]) == (0, 4096)


def test_a_second_release_is_an_error_and_changes_nothing(pool: PinnedPool) -> None:
    lease = pool.lease(10)
    lease.release()
    before = pool.stats()
    with pytest.raises(gdcomm.ClosedError):
        lease.release(FakeEvent())
    assert pool.stats() == before


def release_together(lease: Lease) -> int:
    """Release a lease from three threads at once; tell how many were refused."""
    refused: list[int] = []
    barrier = threading.Barrier(3)

    def release() -> None:
        barrier.wait()
        try:
            lease.release()
        except gdcomm.ClosedError:
            refused.append(1)

    threads = [threading.Thread(target=release) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return len(refused)


def test_racing_releases_give_the_block_back_once(pool: PinnedPool) -> None:
    assert [release_together(pool.lease(10)) for _ in range(30)] == [2] * 30
    stats = pool.stats()
    assert (stats["leased"], stats["idle"]) == (0, 4096)


def test_a_dropped_lease_takes_its_block_out_of_the_pool(pool: PinnedPool, device: EmulatedDevice) -> None:
    lease = pool.lease(100)
    address = lease.array.ctypes.data
    kept = lease.array
    del lease
    gc.collect()
    assert pool.stats() == {"leased": 0, "idle": 0, "pending": 0, "hits": 0, "misses": 1}
    assert pool.lease(100).array.ctypes.data != address
    assert device.is_pinned(kept.ctypes.data), "memory lives while somebody holds it"


def test_the_oldest_idle_blocks_are_dropped_above_the_limit(device: EmulatedDevice) -> None:
    pool = PinnedPool(device, idle_limit=20 * KIB)
    first, *rest = [pool.lease(8 * KIB) for _ in range(3)]
    addresses = {lease.array.ctypes.data for lease in rest}
    for lease in (first, *rest):
        lease.release()
    assert pool.stats()["idle"] == 16 * KIB
    assert {pool.lease(8 * KIB).array.ctypes.data for _ in range(2)} <= addresses


def test_a_block_larger_than_the_limit_is_not_kept(device: EmulatedDevice) -> None:
    pool = PinnedPool(device, idle_limit=8 * KIB)
    pool.lease(4 * KIB).release()
    pool.lease(64 * KIB).release()
    assert pool.stats()["idle"] == 0


def test_trim_drops_idle_blocks_only(pool: PinnedPool) -> None:
    held, event = pool.lease(10), FakeEvent()
    pool.lease(10).release(event)
    pool.lease(10_000).release()
    pool.trim()
    assert pool.stats() == {"leased": 4096, "idle": 0, "pending": 4096, "hits": 0, "misses": 3}
    held.release()


def test_a_failed_allocation_leaves_the_figures_right(pool: PinnedPool, device: EmulatedDevice) -> None:
    def fail(nbytes: int) -> None:
        raise MemoryError

    device.pinned = fail  # type: ignore[method-assign, assignment]
    with pytest.raises(MemoryError):
        pool.lease(10)
    assert pool.stats()["leased"] == 0


def test_a_broken_event_loses_its_own_block_only(pool: PinnedPool) -> None:
    events = [FakeEvent() for _ in range(3)]
    for lease, event in zip([pool.lease(10) for _ in events], events, strict=True):
        lease.release(event)
    events[1].broken = True
    with pytest.raises(RuntimeError, match="device lost"):
        pool.lease(10)
    events[0].done = events[2].done = True
    assert pool.stats() == {"leased": 0, "idle": 8192, "pending": 0, "hits": 0, "misses": 3}


def test_threads_may_share_the_pool(pool: PinnedPool, device: EmulatedDevice) -> None:
    wrong: list[int] = []

    def work(mark: int) -> None:
        stream = device.Stream()
        for _ in range(100):
            lease = pool.lease(256)
            lease.array[...] = mark
            device.launch(stream, lambda: None)
            if not (lease.array == mark).all():
                wrong.append(mark)
            lease.release(device.record(stream))

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 5)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []
    assert pool.stats()["leased"] == 0
    assert pool.stats()["hits"] > 300
