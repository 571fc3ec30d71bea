"""Collectives of device arrays by our own algorithms over several nodes: results against mpi4py, and bytes sent.

Ranks lie on nodes in several ways: see `LAYOUTS`.
"""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
from conftest import DEVICE, HOSTS, RANK, SIZE, WORLD, wire_bytes
from mpi4py import MPI

import gdcomm
from gdcomm import collectives
from gdcomm.algorithms.choose import ALGORITHMS, NODE_ALGORITHMS

if "GDCOMM_SIMULATED_NODES" not in os.environ:
    pytest.skip("run: launch/nodes run 2 -n 4 python -m pytest -p no:pytest_mpi tests/cluster", allow_module_level=True)

NAMES = sorted(set(HOSTS))
NODE = NAMES.index(HOSTS[RANK])
MATES = [rank for rank in range(SIZE) if HOSTS[rank] == HOSTS[RANK]]
PLACE = MATES.index(RANK)
LAYOUTS = {  # colour and key of this rank in a Split
    "nodes in order": (0, RANK),
    "nodes in reverse": (0, -RANK),
    "a rank of each node in turn": (0, PLACE * SIZE + NODE),
    "one rank on the last node": (int(PLACE > 0 and HOSTS[RANK] == NAMES[-1]), RANK),
    "one rank on each node": (PLACE, RANK),
    "one node": (NODE, RANK),
}
COUNTS = [0, 1, 3, 1001]  # elements of a vector, or of one block
REDUCTIONS = [("<f4", MPI.SUM), ("<i8", MPI.MAX), ("<c16", MPI.SUM), ("u1", MPI.BOR), ("<f8", MPI.PROD)]
LARGE = 5 << 20  # bytes: halves of halves of it still go in chunks


@pytest.fixture(autouse=True)
def always(monkeypatch):
    monkeypatch.setattr(collectives, "SMALLEST", 1)


@pytest.fixture(params=LAYOUTS)
def comm(request):
    world = gdcomm.Communicator(path="staged")
    with world.Split(*LAYOUTS[request.param]) as made:
        yield made


@pytest.fixture
def ran(monkeypatch):
    """Algorithms that this rank ran."""
    names = []
    for table in (ALGORITHMS, NODE_ALGORITHMS):
        for operation, algorithms in table.items():
            for name, algorithm in algorithms.items():

                def spy(*arguments, run=algorithm.run, name=f"{operation} {name}"):
                    names.append(name)
                    return run(*arguments)

                monkeypatch.setitem(algorithms, name, algorithm._replace(run=spy))
    return names


@pytest.fixture(params=["chosen", "by nodes"])
def by_nodes(request, monkeypatch):
    """Whether all goes by the algorithms for nodes, also where a flat one is taken to be faster."""
    if request.param == "by nodes":
        force(monkeypatch)
    return request.param == "by nodes"


def force(monkeypatch):
    choose = collectives.choose

    def forced(operation, nbytes, sizes, *arguments):
        if len(sizes) > 1 and operation in NODE_ALGORITHMS:
            return "hierarchical" if len(set(sizes)) == 1 else "leaders", 3
        return choose(operation, nbytes, sizes, *arguments)

    monkeypatch.setattr(collectives, "choose", forced)


WHOLE = ("allreduce", "bcast", "reduce")  # the order of ranks does not matter to these


def for_nodes(comm, operation=""):
    """The algorithm that large vectors go by; "" if the ranks lie so that it is one for a single node."""
    hosts = comm.allgather(HOSTS[RANK])
    names = list(dict.fromkeys(hosts))
    if len(names) == 1 or (hosts != sorted(hosts, key=names.index) and operation not in WHOLE):
        return ""
    return "hierarchical" if len({hosts.count(name) for name in names}) == 1 else "leaders"


def ranks_share_ways(comm):
    """Whether there are several nodes, and on each of them several ranks, as many as on the others."""
    return for_nodes(comm) == "hierarchical" and len(set(comm.allgather(HOSTS[RANK]))) < comm.size


def check(ran, comm, operation, by_nodes):
    """One algorithm ran, and where asked for one that knows of nodes."""
    name = for_nodes(comm, operation) if by_nodes and operation in NODE_ALGORITHMS else ""
    assert len(ran) == 1 and ran[0].startswith(f"{operation} {name}")
    ran.clear()


def values(rank, count, dtype="<f4"):
    """Values that differ between elements and ranks, and are exact in all sums and products."""
    return ((np.arange(count) * 3 + rank * 5) % 7 % 2 + 1).astype(dtype)


def compare(comm, call, send, recv):
    """Run a collective on device arrays, and by mpi4py on host arrays: the results are the same to the byte."""
    on_device = [DEVICE.array(x) if isinstance(x, np.ndarray) else x for x in (send, recv)]
    before = send.tobytes() if isinstance(send, np.ndarray) else None
    call(MPI.Intracomm(comm), send, recv)
    call(comm, *on_device)
    if recv is not None:
        assert DEVICE.asnumpy(on_device[1]).tobytes() == recv.tobytes()
    if before is not None:
        assert DEVICE.asnumpy(on_device[0]).tobytes() == before, "sendbuf is only read"


@pytest.mark.parametrize("count", COUNTS)
def test_allreduce(comm, ran, by_nodes, count):
    for dtype, op in REDUCTIONS:
        mine = values(comm.rank, count, dtype)
        for send, recv in ((mine, np.zeros_like(mine)), (MPI.IN_PLACE, mine.copy())):
            compare(comm, lambda c, x, y, op=op: c.Allreduce(x, y, op), send, recv)
            if count and comm.size > 1:
                check(ran, comm, "allreduce", by_nodes)
    assert not ran


@pytest.mark.parametrize("count", COUNTS)
def test_reduce_and_bcast(comm, ran, by_nodes, count):
    for root in range(comm.size):
        for dtype, op in REDUCTIONS[:2]:
            mine = values(comm.rank, count, dtype)
            recv = np.zeros_like(mine) if root == comm.rank else None
            compare(comm, lambda c, x, y, op=op, root=root: c.Reduce(x, y, op, root), mine, recv)
            if count and comm.size > 1:
                check(ran, comm, "reduce", by_nodes)
        data = values(comm.rank, count, "<c16") + root
        compare(comm, lambda c, _, y, root=root: c.Bcast(y, root), None, data)
        if count and comm.size > 1:
            check(ran, comm, "bcast", by_nodes)
    assert not ran


@pytest.mark.parametrize("count", COUNTS)
def test_blocks(comm, ran, by_nodes, count):
    for dtype in ("u1", "<f8"):
        mine, many = values(comm.rank, count, dtype), values(comm.rank, count * comm.size, dtype)
        cases = [
            ("allgather", lambda c, x, y: c.Allgather(x, y), mine, np.zeros_like(many)),
            ("allgather", lambda c, x, y: c.Allgather(x, y), MPI.IN_PLACE, many.copy()),
            ("alltoall", lambda c, x, y: c.Alltoall(x, y), many, np.zeros_like(many)),
            ("reduce_scatter", lambda c, x, y: c.Reduce_scatter_block(x, y), many, np.zeros_like(mine)),
        ]
        for operation, call, send, recv in cases:
            compare(comm, call, send, recv)
            if count and comm.size > 1:
                check(ran, comm, operation, by_nodes)
    assert not ran


@pytest.mark.parametrize("count", [1, 1001])
def test_scans_and_blocks_of_different_lengths(comm, ran, by_nodes, count):
    counts = [count * (rank % 3) + (rank == 0) for rank in range(comm.size)]  # a third of them, or nearly, 0
    mine, own, total, root = values(comm.rank, count), counts[comm.rank], sum(counts), comm.size - 1
    at_root, one, many = root == comm.rank, values(comm.rank, own), values(comm.rank, total)
    all_alike = values(comm.rank, count * comm.size)
    outgoing = [counts[comm.rank]] * comm.size
    cases = [
        ("scan", lambda c, x, y: c.Scan(x, y), mine, np.zeros_like(mine)),
        ("exscan", lambda c, x, y: c.Exscan(x, y), mine, np.zeros_like(mine)),
        ("reduce_scatter", lambda c, x, y: c.Reduce_scatter(x, y, counts), many, np.zeros_like(one)),
        ("allgather", lambda c, x, y: c.Allgatherv(x, [y, counts]), one, np.zeros_like(many)),
        (
            "alltoallv", lambda c, x, y: c.Alltoallv([x, outgoing], [y, counts]), values(comm.rank, own * comm.size),
            np.zeros_like(many),
        ),
        ("gather", lambda c, x, y: c.Gather(x, y, root), mine, np.zeros_like(all_alike) if at_root else None),
        ("scatter", lambda c, x, y: c.Scatter(x, y, root), all_alike if at_root else None, np.zeros_like(mine)),
        (
            "gatherv", lambda c, x, y: c.Gatherv(x, [y, counts] if at_root else None, root), one,
            np.zeros_like(many) if at_root else None,
        ),
        (
            "scatterv", lambda c, x, y: c.Scatterv([x, counts] if at_root else None, y, root),
            many if at_root else None, np.zeros_like(one),
        ),
    ]  # fmt: skip
    for operation, call, send, recv in cases:
        compare(comm, call, send, recv)
        if comm.size > 1:
            check(ran, comm, operation, by_nodes)
    assert not ran


def large_cases(comm):
    """Collectives of large vectors: of each its algorithms, the call, and the arrays."""
    count = LARGE // 4 // comm.size * comm.size
    mine, root = values(comm.rank, count), comm.size - 1
    block = mine[: count // comm.size]
    return {
        "Allreduce": ("allreduce", lambda c, x, y: c.Allreduce(x, y), mine, np.zeros_like(mine)),
        "Bcast": ("bcast", lambda c, _, y: c.Bcast(y, root), None, mine),
        "Reduce": (
            "reduce", lambda c, x, y: c.Reduce(x, y if c.rank == root else None, MPI.SUM, root), mine,
            np.zeros_like(mine),
        ),
        "Allgather": ("allgather", lambda c, x, y: c.Allgather(x, y), block, np.zeros_like(mine)),
        "Reduce_scatter_block": (
            "reduce_scatter", lambda c, x, y: c.Reduce_scatter_block(x, y), mine, np.zeros_like(block)
        ),
    }  # fmt: skip


def test_large_vectors_go_by_the_algorithm_that_explain_names(comm, ran, by_nodes):
    """Nodes of several ranks each, all the same number, have one for nodes; with others it depends."""
    even = ranks_share_ways(comm)
    for name, (operation, *case) in large_cases(comm).items():
        told = comm.explain(name, *(DEVICE.array(x) for x in case[1:] if x is not None))
        compare(comm, *case)
        if comm.size > 1:
            assert f" by {ran[0].split()[1]} over" in told
            check(ran, comm, operation, by_nodes or even)
    assert not ran


@pytest.mark.parametrize(
    "layout", ["nodes in order", "nodes in reverse", "a rank of each node in turn", "one rank on the last node"]
)
def test_no_byte_crosses_the_wire_more_often_than_it_must(monkeypatch, layout):
    """Bytes that all nodes send, with headers and MPI's own messages: the lower bound and 5 % at most."""
    color, key = LAYOUTS[layout]
    comm = gdcomm.Communicator(path="staged").Split(color, key)
    if not ranks_share_ways(comm):  # else all ranks may send at once, which saves time and no bytes
        force(monkeypatch)
    for name, (operation, call, send, recv) in large_cases(comm).items():
        if color == 0 and not for_nodes(comm, operation):
            continue  # blocks that do not lie in order of nodes
        sent = 0
        for _ in range(2):  # the first connects the ranks
            x, y = None if send is None else DEVICE.array(send), DEVICE.array(recv)
            WORLD.Barrier()
            time.sleep(0.02)  # for the packets of the barrier
            before = wire_bytes()
            WORLD.Barrier()
            if color == 0:
                call(comm, x, y)
            WORLD.Barrier()
            time.sleep(0.02)
            sent = WORLD.allreduce(0 if PLACE else wire_bytes() - before)
        least = (len(NAMES) - 1) * LARGE * (2 if operation == "allreduce" else 1)
        assert 0.99 * least <= sent <= 1.05 * least, (name, sent / least)
    comm.Free()
