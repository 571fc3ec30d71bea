"""What gdcomm keeps for communicators goes with them, and not before nobody needs it."""

from __future__ import annotations

import gc
import os
import time
import weakref

import numpy as np
import pytest
from conftest import DEVICE
from mpi4py import MPI

import gdcomm
from gdcomm import arenas, channels, envelopes
from gdcomm.memory.budget import of_process

WORLD = MPI.COMM_WORLD
SIZE, RANK = WORLD.size, WORLD.rank
NEXT, LAST = (RANK + 1) % SIZE, (RANK - 1) % SIZE
pytestmark = pytest.mark.skipif(SIZE == 1, reason="between ranks: mpirun -n 2 (to 4)")
COUNT = 3 << 18  # float32s: 3 MiB


@pytest.fixture(params=["slots", "messages"], autouse=True)
def lane(request, monkeypatch):
    """Chunks through memory that both ranks share, or as messages on the hidden communicator."""
    if request.param == "messages":
        monkeypatch.setattr(envelopes, "own", lambda: None)
    return request.param


def family():
    """A communicator with a hidden one of its own."""
    return gdcomm.Communicator(WORLD.Dup(), path="staged")


def values(rank=None):
    return (np.arange(COUNT) * 7 + 13 * (RANK if rank is None else rank)).astype(np.float32)


def exchange(comm):
    """Send a large message round, and look at it."""
    rank, size = comm.Get_rank(), comm.Get_size()
    y = DEVICE.zeros(COUNT, np.float32)
    sending = comm.Isend(DEVICE.array(values(rank)), (rank + 1) % size)
    comm.Recv(y, (rank - 1) % size)
    sending.Wait()
    assert np.array_equal(DEVICE.asnumpy(y), values((rank - 1) % size))


@pytest.fixture
def hidden(monkeypatch):
    """Tells how many hidden communicators this rank has beside those that it had, after ranks came together."""

    def count():
        gc.collect()
        WORLD.Barrier()
        channels.free_unused(WORLD)
        return sum(comm() is not None for comm in made)

    made = []
    start = channels.Shadow.__init__

    def noted(shadow, comm, *rest):
        made.append(weakref.ref(comm))  # lives until it is freed
        start(shadow, comm, *rest)

    count()
    monkeypatch.setattr(channels.Shadow, "__init__", noted)
    return count


def test_thousands_of_families_come_and_go(lane):
    """MPICH has 2048 communicators, and says so when they are used up."""
    count = 2100 if SIZE == 2 and lane == "slots" else 200

    def held():
        number = WORLD.Dup()
        handle = number.py2f() if "Open MPI" in MPI.Get_library_version() else 0  # the lowest that is free
        number.Free()
        shared = [name for name in os.listdir("/dev/shm") if str(os.getpid()) in name]
        return of_process().used, (handle, len(os.listdir("/proc/self/fd")), len(shared), len(channels._unused))

    for turn in range(count):
        comm = family()
        child = comm.Dup()
        if turn % 100 in (0, 1):
            exchange(comm)
            exchange(child)
        comm.Free()
        child.Free()
        if turn == 10:
            locked_before, before = held()
    locked, now = held()
    assert now == before
    assert locked - locked_before <= 1 << 20  # how many chunks are under way at once depends on the time


def test_a_family_ends_with_its_last_member(hidden):
    comm = family()
    child = comm.Dup()
    part = comm.Split(0 if RANK < SIZE - 1 else MPI.UNDEFINED)  # the last rank has none
    grid = comm.Create_cart([SIZE])
    comm.Free()
    exchange(grid)
    assert hidden() == 1
    grid.Free()
    assert hidden() == 1
    exchange(child)
    child.Free()
    assert hidden() == 1  # the last rank is done with it, but others are not
    if part != MPI.COMM_NULL:
        grandchild = part.Clone()
        part.Free()
        if grandchild.size > 1:
            exchange(grandchild)
        grandchild.Disconnect()
    assert hidden() == 0


def test_intercommunicators(hidden):
    comm = family()
    half = comm.Split(RANK % 2)
    between = half.Create_intercomm(0, comm, 1 - RANK % 2)
    comm.Free()
    both = between.Merge()
    half.Free()
    assert hidden() == 0
    x, y = DEVICE.array(values()), DEVICE.zeros(COUNT, np.float32)
    if between.Get_remote_size() > RANK // 2:
        request = between.Isend(x, RANK // 2)
        between.Recv(y, RANK // 2)
        request.Wait()
        assert np.array_equal(DEVICE.asnumpy(y), values(RANK ^ 1))
    between.Free()
    with pytest.raises(MPI.Exception):
        between.Free()
    both.Free()
    assert hidden() == 0


@pytest.mark.parametrize("free", ["Free", "Disconnect"])
def test_freed_twice_is_mpis_error(free):
    comm = family()
    getattr(comm, free)()
    with pytest.raises(MPI.Exception) as caught:
        getattr(comm, free)()
    assert caught.value.Get_error_class() == MPI.ERR_COMM
    with pytest.raises(MPI.Exception):
        comm.Send(DEVICE.array(values()), 0)


def test_freed_by_plain_mpi4py(hidden):
    plain = WORLD.Dup()
    comm = gdcomm.Communicator(plain, path="staged")
    exchange(comm)
    plain.Free()
    del comm
    assert hidden() == 0


def test_messages_outlive_their_communicator(hidden):
    comm = family()
    y = DEVICE.zeros(COUNT, np.float32)
    if RANK == 0:  # its communicator is freed long before anybody sends
        receiving = comm.Irecv(y, SIZE - 1)
        comm.Free()
        WORLD.Barrier()
    else:
        WORLD.Barrier()
        receiving = comm.Irecv(y, LAST)
    if RANK:
        sending = comm.Isend(DEVICE.array(values()), NEXT)
        comm.Free()
        others = family()  # here unused ones are freed
    else:
        others = family()
        sending = None
    assert hidden() == 2
    exchange(others)
    others.Free()
    if RANK == 1:
        receiving.Cancel()  # rank 0 could not send any more
    if sending is not None:
        sending.Wait()
    receiving.Wait()
    if RANK != 1:
        assert np.array_equal(DEVICE.asnumpy(y), values(LAST))
    del receiving, sending
    assert hidden() == 0


def test_a_matched_message_outlives_its_communicator(hidden):
    comm = family()
    sending = comm.Isend(DEVICE.array(values()), NEXT)
    message = comm.Mprobe(LAST)
    comm.Free()
    family().Free()
    assert hidden() == 1
    y = DEVICE.zeros(COUNT, np.float32)
    message.Recv(y)
    sending.Wait()
    assert np.array_equal(DEVICE.asnumpy(y), values(LAST))
    del message, sending
    assert hidden() == 0


def test_a_dropped_request_outlives_its_communicator(hidden):
    comm = family()
    y = DEVICE.zeros(COUNT, np.float32)
    comm.Isend(DEVICE.array(values()), NEXT).Free()
    receiving = comm.Irecv(y, LAST)
    comm.Free()
    del comm
    family().Free()
    receiving.Wait()
    assert np.array_equal(DEVICE.asnumpy(y), values(LAST))
    del receiving
    end = time.monotonic() + 30
    while WORLD.allreduce(hidden()):  # nobody tells when the send is done
        assert time.monotonic() < end
        time.sleep(1e-3)


def test_attributes_of_the_program_stay_its_own():
    copied = []
    key = MPI.Comm.Create_keyval(copy_fn=lambda *a: copied.append(a))
    plain = WORLD.Dup()
    plain.Set_attr(key, "mine")
    comm = gdcomm.Communicator(plain, path="staged")
    assert copied == []
    comm.Free()
    MPI.Comm.Free_keyval(key)


def test_boxes_of_collectives_go_with_their_communicators(lane):
    world, free = family(), len(arenas.own()._free_boxes)
    for _ in range(5):
        comms = [world.Dup() for _ in range(3)]
        for comm in comms:
            y = DEVICE.zeros(COUNT, np.float32)
            comm.Allreduce(DEVICE.array(values(0)), y)
            assert np.array_equal(DEVICE.asnumpy(y), values(0) * SIZE)
        used = free - len(arenas.own()._free_boxes)
        assert used == (len(comms) * (SIZE - 1) if lane == "slots" else 0)
        for comm in comms:
            comm.Free()
        del comm
        gc.collect()
        assert len(arenas.own()._free_boxes) == free
    world.Free()
