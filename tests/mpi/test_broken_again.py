"""Faults found by a tester: read-only roots and forks at a bad moment."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest
from conftest import DEVICE
from mpi4py import MPI

import gdcomm
from gdcomm import collectives
from gdcomm.requests import progress

WORLD = MPI.COMM_WORLD
RANK = WORLD.rank


@pytest.mark.parametrize("count", [10, 100_000])
@pytest.mark.parametrize("strided", [False, True])
def test_the_root_of_a_bcast_may_be_read_only(count, strided):
    comm = gdcomm.Communicator(path="staged")
    step = 2 if strided else 1
    x = DEVICE.array(np.arange(count * step) + RANK)[::step]
    comm.Bcast(x.readonly() if RANK == 0 else x, 0)
    assert np.array_equal(DEVICE.asnumpy(x), np.arange(count * step)[::step])
    comm.Ibcast(x.readonly() if RANK == 0 else x, 0).Wait()


def test_the_root_of_a_bcast_is_not_written():
    comm, other = gdcomm.Communicator(path="staged"), DEVICE.Stream()
    x = DEVICE.zeros(1000)
    comm.Bcast(x, 0)
    if RANK == 0:
        DEVICE.fill(x, 7.0, other)
        other.synchronize()
        assert np.all(DEVICE.asnumpy(x) == 7.0)


def test_a_child_ends_although_the_lock_was_held_at_the_fork():
    gdcomm.Communicator(path="staged").Irecv(DEVICE.zeros(10), MPI.PROC_NULL).Wait()  # handlers are there
    held, go = threading.Event(), threading.Event()

    def hold():
        with progress._wake:
            held.set()
            go.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        progress.stop()
        os._exit(0)
    go.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(WORLD.size == 1, reason="between ranks: mpirun -n 2 (to 4)")
@pytest.mark.parametrize("name", ["Alltoallv", "Gatherv", "Scatterv"])
@pytest.mark.parametrize("expected", [0, 500, 2000])
def test_counts_that_do_not_match_are_an_error_on_all_ranks(monkeypatch, name, expected):
    monkeypatch.setattr(collectives, "SMALLEST", 1)
    comm, size = gdcomm.Communicator(path="staged"), WORLD.size
    count, root, odd = 1000, 0, size - 1
    right, wrong = [count] * size, [count] * odd + [expected]
    x, y = DEVICE.array(np.ones(size * count)), DEVICE.zeros(size * 2 * count)
    at_root = root == RANK

    def call(counts):
        if name == "Alltoallv":
            comm.Alltoallv([x, right], [y, counts if at_root else right])
        elif name == "Gatherv":
            comm.Gatherv(x[:count], [y, counts] if at_root else None, root)
        else:
            comm.Scatterv([x, right] if at_root else None, y[: counts[RANK]], root)

    with pytest.raises(gdcomm.BufferSpecError, match=f"{name}: .*give both the same count"):
        call(wrong)
    assert not DEVICE.asnumpy(y).any()
    call(right)
    received = 1 if name == "Scatterv" else size if name == "Alltoallv" or at_root else 0
    assert DEVICE.asnumpy(y).sum() == received * count


@pytest.mark.skipif(WORLD.size == 1, reason="between ranks: mpirun -n 2 (to 4)")
def test_a_direct_communicator_does_not_stage_because_a_staged_one_has_the_same_handle(monkeypatch):
    monkeypatch.setattr(collectives, "SMALLEST", 1)
    monkeypatch.setenv("GDCOMM_MPI_DEVICE_OPS", "p2p")
    staged, direct = (gdcomm.Communicator(WORLD, path=path) for path in ("staged", "direct"))
    x, y = DEVICE.array(np.arange(1000.0)), DEVICE.zeros(1000)
    staged.Allreduce(x, y)
    before = DEVICE.stats["to_host"]
    direct.Allreduce(x, y)
    assert DEVICE.stats["to_host"] == before
    assert np.array_equal(DEVICE.asnumpy(y), np.arange(1000.0) * WORLD.size)
