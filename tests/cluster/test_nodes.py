"""Ranks on several hosts: where they are, what crosses the wire, and that device arrays arrive whole.

The nodes are those of `launch/nodes`.
"""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
from conftest import DEVICE, HOSTS, PEER, RANK, SIZE, WORLD, wire_bytes
from mpi4py import MPI

import gdcomm

if "GDCOMM_SIMULATED_NODES" not in os.environ:
    pytest.skip("run: launch/nodes run 2 -n 4 python -m pytest -p no:pytest_mpi tests/cluster", allow_module_level=True)

NODES = int(os.environ["GDCOMM_SIMULATED_NODES"])
LENGTHS = [0, 1, 1000, 300_001]  # nothing, one packet, eager, rendezvous


@pytest.fixture(params=["staged", "direct"])
def comm(request):
    return gdcomm.Communicator(path=request.param)


def data(length, rank=RANK, dtype=np.float64):
    """Values that differ between elements and ranks; whole numbers, so that sums are exact in any order."""
    return ((np.arange(length) * 7919 + 104_729 * rank) % 65_521 - 32_000).astype(dtype)


def everyone(length):
    return np.array([data(length, rank) for rank in range(SIZE)])


def blank(kind, length):
    """An array to receive into, on the host or the device, with nothing of the answer in it."""
    return np.full(length, np.nan) if kind == "host" else DEVICE.array(np.full(length, np.nan))


def filled(kind, values):
    return values.copy() if kind == "host" else DEVICE.array(values)


def equal(array, values):
    np.testing.assert_array_equal(array if isinstance(array, np.ndarray) else DEVICE.asnumpy(array), values)


def counts_and_starts(length):
    """Uneven parts, the first empty, with gaps between them."""
    counts = [(rank * 37) % 101 * length for rank in range(SIZE)]
    starts = [int(start) for start in np.cumsum([0, *(count + 3 for count in counts[:-1])])]
    return counts, starts


# Where the ranks are


def test_one_shared_memory_group_per_node():
    node = gdcomm.Communicator().Split_type(MPI.COMM_TYPE_SHARED)
    assert isinstance(node, gdcomm.Communicator)
    members = WORLD.allgather(node.allgather(RANK))
    assert len(set(HOSTS)) == NODES
    assert len({tuple(group) for group in members}) == NODES
    for rank in range(SIZE):
        assert members[rank] == [other for other in range(SIZE) if HOSTS[other] == HOSTS[rank]]
    node.Free()


def test_ranks_are_spread_evenly():
    sizes = [HOSTS.count(host) for host in set(HOSTS)]
    assert max(sizes) - min(sizes) <= 1


# Between nodes


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kinds", ["device-device", "host-device", "device-host"])
def test_send_recv(comm, kinds, length):
    source, target = kinds.split("-")
    for sender, receiver in ((0, PEER), (PEER, 0)):
        if sender == RANK:
            comm.Send(filled(source, data(length)), dest=receiver, tag=5)
        elif receiver == RANK:
            array, status = blank(target, length), MPI.Status()
            comm.Recv(array, source=sender, tag=5, status=status)
            assert (status.Get_source(), status.Get_tag(), status.Get_count(MPI.DOUBLE)) == (sender, 5, length)
            equal(array, data(length, sender))


@pytest.mark.parametrize("length", LENGTHS)
def test_isend_irecv_between_all(comm, length):
    received = [blank("device", length) for _ in range(SIZE)]
    requests = [comm.Irecv(received[rank], source=rank, tag=rank) for rank in range(SIZE)]
    requests += [comm.Isend(filled("device", data(length) + rank), dest=rank, tag=RANK) for rank in range(SIZE)]
    MPI.Request.Waitall(requests)
    for rank in range(SIZE):
        equal(received[rank], data(length, rank) + RANK)


# Collectives over all nodes


@pytest.mark.parametrize("op", [MPI.SUM, MPI.MAX], ids=["sum", "max"])
@pytest.mark.parametrize("length", LENGTHS)
def test_allreduce(comm, length, op):
    array = blank("device", length)
    comm.Allreduce(filled("device", data(length)), array, op)
    equal(array, everyone(length).sum(0) if op == MPI.SUM else everyone(length).max(0))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("root", [0, PEER])
def test_bcast(comm, length, root):
    array = filled("device", data(length)) if root == RANK else blank("device", length)
    comm.Bcast(array, root)
    equal(array, data(length, root))


@pytest.mark.parametrize("length", LENGTHS)
def test_allgather(comm, length):
    array = blank("device", SIZE * length)
    comm.Allgather(filled("device", data(length)), array)
    equal(array, everyone(length).ravel())


@pytest.mark.parametrize("length", LENGTHS)
def test_alltoall(comm, length):
    array = blank("device", SIZE * length)
    comm.Alltoall(filled("device", data(SIZE * length)), array)
    equal(array, everyone(SIZE * length)[:, RANK * length : (RANK + 1) * length].ravel())


@pytest.mark.parametrize("length", LENGTHS)
def test_reduce_scatter_block(comm, length):
    array = blank("device", length)
    comm.Reduce_scatter_block(filled("device", data(SIZE * length)), array)
    equal(array, everyone(SIZE * length).sum(0)[RANK * length : (RANK + 1) * length])


@pytest.mark.parametrize("length", [1, 1000])
def test_gatherv(comm, length):
    counts, starts = counts_and_starts(length)
    total = starts[-1] + counts[-1]
    array = filled("device", np.full(total, -1.0)) if RANK == PEER else None
    message = [array, (counts, starts), MPI.DOUBLE] if RANK == PEER else None
    comm.Gatherv(filled("device", data(counts[RANK])), message, root=PEER)
    if RANK == PEER:
        expected = np.full(total, -1.0)  # the gaps keep what was there
        for rank in range(SIZE):
            expected[starts[rank] : starts[rank] + counts[rank]] = data(counts[rank], rank)
        equal(array, expected)


@pytest.mark.parametrize("length", [1, 1000])
def test_scatterv(comm, length):
    counts, starts = counts_and_starts(length)
    whole = data(starts[-1] + counts[-1], PEER)
    message = [filled("device", whole), (counts, starts), MPI.DOUBLE] if RANK == PEER else None
    array = blank("device", counts[RANK])
    comm.Scatterv(message, array, root=PEER)
    equal(array, whole[starts[RANK] : starts[RANK] + counts[RANK]])


# Within nodes, and over their leaders


@pytest.mark.parametrize("length", LENGTHS)
def test_reductions_by_node(comm, length):
    """A reduction in two levels: on each node, between its first ranks, and back to the node."""
    mine = [rank for rank in range(SIZE) if HOSTS[rank] == HOSTS[RANK]]
    node = comm.Split_type(MPI.COMM_TYPE_SHARED, key=RANK)
    leaders = comm.Split(0 if mine[0] == RANK else MPI.UNDEFINED, key=RANK)
    assert node.path == comm.path
    partial, total = blank("device", length), blank("device", length)
    node.Reduce(filled("device", data(length)), partial if mine[0] == RANK else None, MPI.SUM, root=0)
    if mine[0] == RANK:
        equal(partial, everyone(length)[mine].sum(0))
        leaders.Allreduce(partial, total, MPI.SUM)
        leaders.Free()
    node.Bcast(total, root=0)
    equal(total, everyone(length).sum(0))
    node.Allreduce(MPI.IN_PLACE, total, MPI.MAX)
    equal(total, everyone(length).sum(0))
    scan = blank("device", length)
    node.Scan(filled("device", data(length)), scan, MPI.SUM)
    equal(scan, everyone(length)[mine[: mine.index(RANK) + 1]].sum(0))
    node.Free()


# The wire


def test_a_message_crosses_the_wire_once(comm):
    """4 MiB from device to device between nodes: neither copied twice over the wire, nor around it."""
    nbytes = 4 << 20
    values = data(nbytes // 8)
    array = filled("device", values) if RANK == 0 else blank("device", values.size)
    for _ in range(2):  # the first one connects the nodes
        WORLD.Barrier()
        time.sleep(0.2)  # for the packets of the barrier; only ranks 0 and PEER talk from here on
        before = wire_bytes()
        if RANK == 0:
            comm.Send(array, dest=PEER)
            comm.Recv(np.empty(0), source=PEER)
            sent = wire_bytes() - before
        elif RANK == PEER:
            comm.Recv(array, source=0)
            comm.Send(np.empty(0), dest=0)
        time.sleep(0.2)
    if RANK == PEER:
        equal(array, data(values.size, 0))
    if RANK == 0:
        assert 1.0 * nbytes <= sent <= 1.15 * nbytes


def test_the_wire_is_as_slow_as_asked():
    """The latency of a message, and the time that 4 MiB take beyond what the shaper lets through at once."""
    rate, delay = (float(os.environ.get(f"GDCOMM_SIMULATED_{name}", "0")) for name in ("RATE", "DELAY"))
    nbytes, burst = 4 << 20, 2 * (256 << 10)
    values, times = np.zeros(nbytes, np.uint8), []
    for part in (values[:1], values) * 3:
        WORLD.Barrier()
        start = time.perf_counter()
        if RANK == 0:
            WORLD.Send(part, PEER)
            WORLD.Recv(part[:1], PEER)
        elif RANK == PEER:
            WORLD.Recv(part, 0)
            WORLD.Send(part[:1], 0)
        times.append(time.perf_counter() - start)
    if RANK == 0:
        assert min(times[::2]) >= 2 * delay
        assert min(times[1::2]) >= 2 * delay + ((nbytes - burst) * 8 / rate if rate else 0)
