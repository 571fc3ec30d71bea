"""The progress thread: it brings to an end what nobody waits for, and keeps out of the way otherwise."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from conftest import DEVICE, completes
from mpi4py import MPI

import gdcomm
from gdcomm.memory.pinned import pool_of
from gdcomm.requests import progress

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
NEXT, LAST = (RANK + 1) % SIZE, (RANK - 1) % SIZE
KINDS = ["Isend", "Issend"]


@pytest.fixture
def comm():
    return gdcomm.Communicator(path="staged")


def both(comm, send, recv, kind="Isend"):
    return comm.Irecv(recv, LAST), getattr(comm, kind)(send, NEXT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [0, 1, 1000])
def test_small_messages_complete_unattended(comm, kind, count):
    send, recv = DEVICE.array(np.arange(count) + RANK), DEVICE.zeros(count, int)
    requests = both(comm, send, recv, kind)
    assert all(map(completes, requests))
    status = MPI.Status()
    requests[0].Wait(status)
    requests[1].Wait()
    assert status.Get_source() == LAST
    assert status.Get_count(MPI.INT64_T) == count
    assert np.array_equal(DEVICE.asnumpy(recv), np.arange(count) + LAST)


def test_what_is_received_short_leaves_the_rest_alone(comm):
    send, recv = DEVICE.array(np.arange(5) + RANK), DEVICE.array(np.full(9, -7))
    MPI.Request.Waitall([*both(comm, send, recv), WORLD.Ibarrier()])
    assert DEVICE.asnumpy(recv).tolist() == [*(np.arange(5) + LAST), -7, -7, -7, -7]


def test_a_message_that_is_too_long_is_an_error_and_gives_its_memory_back(comm):
    if SIZE == 1 and MPI.Get_library_version().startswith("Open MPI"):
        pytest.skip("Open MPI does not say so of a rank's message to itself: mpirun -n 2")
    pool_of(DEVICE).trim()
    before = pool_of(DEVICE).stats()["leased"]
    request, sent = both(comm, DEVICE.zeros(9), DEVICE.zeros(5))
    with pytest.raises(MPI.Exception) as caught:
        request.Wait()
    assert caught.value.Get_error_class() == MPI.ERR_TRUNCATE
    sent.Wait()
    assert pool_of(DEVICE).stats()["leased"] == before


def test_completed_requests_are_forgotten(comm):
    send, recv = DEVICE.zeros(10), DEVICE.zeros(10)
    for _ in range(20):
        for request in both(comm, send, recv):
            request.Wait()
            assert request == MPI.REQUEST_NULL
    assert not progress._pending


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the system does not count switches of a thread")
def test_without_requests_the_thread_sleeps(comm):
    for request in both(comm, DEVICE.zeros(10), DEVICE.zeros(10)):
        request.Wait()
    if progress._thread is None:
        pytest.skip("MPI without MPI_THREAD_MULTIPLE has no progress thread: see mpi4py.rc.thread_level")
    status = Path(f"/proc/self/task/{progress._thread.native_id}/status")

    def switches():
        return [line for line in status.read_text().splitlines() if line.startswith("voluntary_ctxt_switches")]

    end = time.monotonic() + 60
    while True:  # it naps for a while, longer on a busy machine
        before = switches()
        time.sleep(0.1)
        if switches() == before:
            break
        assert time.monotonic() < end, "it does not come to rest"


def test_a_dropped_small_send_arrives(comm):
    for _ in range(3):
        comm.Isend(DEVICE.array(np.full(100, RANK)), NEXT)
    recv = DEVICE.zeros(100, int)
    for _ in range(3):
        comm.Recv(recv, LAST)
        assert np.all(DEVICE.asnumpy(recv) == LAST)
