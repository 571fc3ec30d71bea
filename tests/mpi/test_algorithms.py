"""The algorithms between processes, over MPI's messages, against what MPI's own collectives give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from gdcomm.algorithms import parts
from gdcomm.algorithms.choose import ALGORITHMS, NODE_ALGORITHMS
from gdcomm.algorithms.link import LANES, HostLink, Sublink
from gdcomm.algorithms.steps import finish

WORLD = MPI.COMM_WORLD
RANK, RANKS = WORLD.Get_rank(), WORLD.Get_size()
COUNTS = [0, 1, RANKS - 1, 7, 1000, 300_000]
COUNTS_PER_RANK = [[5 * (rank % 3) for rank in range(RANKS)], [3] * RANKS, [40_000 + rank for rank in range(RANKS)]]


@pytest.fixture(scope="module")
def link():
    comm = WORLD.Dup()
    yield HostLink(comm, np.add)
    comm.Free()


def ways(operation: str) -> Any:
    found = [n for n, way in ALGORITHMS[operation].items() if not way.powers or RANKS & (RANKS - 1) == 0]
    return pytest.mark.parametrize("run", [ALGORITHMS[operation][n].run for n in found], ids=found)


def data(count: int, dtype: str = "i8", rank: int = RANK) -> Any:
    return (np.arange(count) * 7 + rank * 1000).astype(dtype)


@ways("allreduce")
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", ["i8", "f4"])
def test_allreduce(link, run, count, dtype):
    vector, expected = data(count, dtype), data(count, dtype)
    finish(run(link, vector))
    WORLD.Allreduce(MPI.IN_PLACE, expected)
    np.testing.assert_allclose(vector, expected, rtol=1e-6)
    assert len(set(WORLD.allgather(vector.tobytes()))) == 1


@ways("bcast")
@pytest.mark.parametrize("count", COUNTS)
def test_bcast(link, run, count):
    for root in range(RANKS):
        vector = data(count)
        finish(run(link, vector, root))
        np.testing.assert_array_equal(vector, data(count, rank=root))


@ways("reduce")
@pytest.mark.parametrize("count", COUNTS)
def test_reduce(link, run, count):
    for root in range(RANKS):
        vector, expected = data(count), np.empty(count, "i8")
        finish(run(link, vector, root))
        WORLD.Reduce(data(count), expected, root=root)
        if root == RANK:
            np.testing.assert_array_equal(vector, expected)


@ways("reduce_scatter")
@pytest.mark.parametrize("counts", COUNTS_PER_RANK)
def test_reduce_scatter(link, run, counts):
    vector, expected = data(sum(counts)), np.empty(counts[RANK], "i8")
    finish(run(link, vector, counts))
    WORLD.Reduce_scatter(data(sum(counts)), expected, counts)
    np.testing.assert_array_equal(parts.blocks(vector, counts)[RANK], expected)


@ways("allgather")
@pytest.mark.parametrize("counts", COUNTS_PER_RANK)
def test_allgather(link, run, counts):
    displs = [sum(counts[rank + 1 :]) + rank % 2 for rank in range(RANKS)] if counts[0] == 0 else None
    vector, expected = np.full(sum(counts) + 1, -1), np.full(sum(counts) + 1, -1)
    parts.blocks(vector, counts, displs)[RANK][:] = data(counts[RANK])
    finish(run(link, vector, counts, displs))
    WORLD.Allgatherv(data(counts[RANK]), [expected, counts, displs or parts.edges_of(counts)[:-1], MPI.INT64_T])
    np.testing.assert_array_equal(vector, expected)


@ways("alltoall")
@pytest.mark.parametrize("count", [0, 1, 40_000])
def test_alltoall(link, run, count):
    send, recv, expected = data(count * RANKS), np.full(count * RANKS, -1), np.full(count * RANKS, -1)
    finish(run(link, send, recv, [count] * RANKS, [count] * RANKS))
    WORLD.Alltoall(send, expected)
    np.testing.assert_array_equal(recv, expected)


@ways("alltoallv")
def test_alltoallv(link, run):
    outgoing = [10 * ((RANK + rank) % 3) + rank for rank in range(RANKS)]
    incoming = [10 * ((RANK + rank) % 3) + RANK for rank in range(RANKS)]
    send, recv, expected = data(sum(outgoing)), np.full(sum(incoming), -1), np.full(sum(incoming), -1)
    finish(run(link, send, recv, outgoing, incoming))
    WORLD.Alltoallv([send, outgoing], [expected, incoming])
    np.testing.assert_array_equal(recv, expected)


@ways("gather")
@pytest.mark.parametrize("counts", COUNTS_PER_RANK)
def test_gather(link, run, counts):
    for root in range(RANKS):
        recv = np.full(sum(counts), -1) if root == RANK else None
        finish(run(link, data(counts[RANK]), recv, counts, None, root))
        if root == RANK:
            np.testing.assert_array_equal(recv, np.concatenate([data(n, rank=r) for r, n in enumerate(counts)]))


@ways("scatter")
@pytest.mark.parametrize("counts", COUNTS_PER_RANK)
def test_scatter(link, run, counts):
    for root in range(RANKS):
        recv = np.full(counts[RANK], -1)
        finish(run(link, data(sum(counts)) if root == RANK else None, recv, counts, None, root))
        np.testing.assert_array_equal(recv, parts.blocks(data(sum(counts), rank=root), counts)[RANK])


@ways("scan")
@pytest.mark.parametrize("count", COUNTS)
def test_scan(link, run, count):
    vector, expected = data(count), np.empty(count, "i8")
    finish(run(link, vector))
    WORLD.Scan(data(count), expected)
    np.testing.assert_array_equal(vector, expected)


@ways("exscan")
@pytest.mark.parametrize("count", COUNTS)
def test_exscan(link, run, count):
    vector, expected = data(count), data(count)
    finish(run(link, vector))
    WORLD.Exscan(data(count), expected)
    np.testing.assert_array_equal(vector, expected if RANK else data(count))


@pytest.mark.parametrize("sections", [1, 3, LANES])
@pytest.mark.parametrize("sizes", [[RANKS], [1] * RANKS, [RANKS - RANKS // 2, RANKS // 2]], ids=str)
def test_nodes(link, sizes, sections):
    """Nodes are imagined: all of the ranks, one each, or two halves, which may differ."""
    sizes = [size for size in sizes if size]
    first = parts.edges_of(sizes)
    node = next(n for n in range(len(sizes)) if first[n + 1] > RANK)
    place, even = RANK - first[node], len(set(sizes)) == 1
    inner = Sublink(link, range(first[node], first[node + 1]))
    outer = Sublink(link, [start + place for start in first[:-1]]) if even or place == 0 else None
    name, more = ("hierarchical", []) if even else ("leaders", [sizes, node])
    run = {operation: ways[name].run for operation, ways in NODE_ALGORITHMS.items()}
    for counts in COUNTS_PER_RANK:
        total, mine = sum(counts), slice(sum(counts[:RANK]), sum(counts[: RANK + 1]))
        expected = sum(data(total, rank=rank) for rank in range(RANKS))
        finish(run["allreduce"](inner, outer, summed := data(total), sections))
        np.testing.assert_array_equal(summed, expected)
        finish(run["reduce_scatter"](inner, outer, scattered := data(total), counts, *more, sections))
        np.testing.assert_array_equal(scattered[mine], expected[mine])
        gathered = np.full(total, -1)
        gathered[mine] = expected[mine]
        finish(run["allgather"](inner, outer, gathered, counts, *more, sections))
        np.testing.assert_array_equal(gathered, expected)
        for root in range(RANKS):
            finish(run["bcast"](inner, outer, vector := data(total), root, *more, sections))
            np.testing.assert_array_equal(vector, data(total, rank=root))
            finish(run["reduce"](inner, outer, vector := data(total), root, *more, sections))
            if root == RANK:
                np.testing.assert_array_equal(vector, expected)
