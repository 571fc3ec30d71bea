"""Collectives of device arrays over imagined nodes, in sections whose phases overlap, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import DEVICE
from mpi4py import MPI

import gdcomm
from gdcomm import collectives
from gdcomm.algorithms.link import LANES
from gdcomm.algorithms.parts import edges_of

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.Get_rank(), WORLD.Get_size()
pytestmark = pytest.mark.skipif(SIZE == 1, reason="nodes are of several ranks: mpirun -n 2 (to 4)")
LAYOUTS = [[1] * SIZE, [SIZE], [SIZE - SIZE // 2, SIZE // 2], [1, SIZE - 1]]


@pytest.fixture(params=[1, 3, LANES])
def sections(request):
    return request.param


@pytest.fixture(params=[sizes for i, sizes in enumerate(LAYOUTS) if sizes not in LAYOUTS[:i]], ids=str)
def comm(request, sections, monkeypatch):
    """A communicator over nodes of so many ranks, which goes by the algorithms for nodes in so many sections."""
    sizes = tuple(request.param)
    name = "hierarchical" if len(set(sizes)) == 1 else "leaders"
    monkeypatch.setattr(collectives, "SMALLEST", 1)
    monkeypatch.setattr(collectives, "choose", lambda *_: (name, sections))
    made = gdcomm.Communicator(path="staged").Split(0, RANK)
    edges = edges_of(sizes)
    node = next(node for node in range(len(sizes)) if edges[node + 1] > RANK)
    layout = collectives._layout(made, made._channel)._replace(sizes=sizes, node=node, first=edges[node], order=None)
    made._channel.notes["layout"] = layout
    yield made
    made.Free()


def values(count, rank=RANK):
    """Floats whose sum depends on the order."""
    generator = np.random.default_rng([count, rank])
    return generator.standard_normal(count) * 10.0 ** generator.integers(-3, 4, count)


def spread(total):
    """Counts of all ranks that differ much."""
    generator = np.random.default_rng(total)
    return generator.multinomial(total, generator.dirichlet([0.5] * SIZE)).tolist()


def near(result, expected, total):
    bound = 32 * np.finfo("f8").eps * sum(np.abs(values(total, rank)) for rank in range(SIZE))
    assert np.all(np.abs(result - expected) <= bound[: len(result)].max(initial=0))


def allreduced(comm, total):
    result = DEVICE.zeros(total)
    comm.Allreduce(DEVICE.array(values(total)), result)
    return DEVICE.asnumpy(result)


@pytest.mark.parametrize("total", [1, 17, 40_003])
def test_all_operations(comm, total):
    expected = sum(values(total, rank) for rank in range(SIZE))
    counts = spread(total)
    edges = edges_of(counts)
    mine = slice(edges[RANK], edges[RANK + 1])
    gathered, piece = DEVICE.zeros(total), DEVICE.zeros(counts[RANK])
    comm.Allgatherv(DEVICE.array(values(total)[mine]), [gathered, counts, edges[:-1], MPI.DOUBLE])
    blocks = [values(total, rank)[edges[rank] : edges[rank + 1]] for rank in range(SIZE)]
    assert DEVICE.asnumpy(gathered).tobytes() == np.concatenate(blocks).tobytes()
    comm.Reduce_scatter(DEVICE.array(values(total)), piece, counts)
    near(DEVICE.asnumpy(piece), expected[mine], total)
    for root in range(SIZE):
        vector = DEVICE.array(values(total))
        comm.Bcast(vector, root)
        assert DEVICE.asnumpy(vector).tobytes() == values(total, root).tobytes()
        result = DEVICE.zeros(total)
        comm.Reduce(DEVICE.array(values(total)), result if root == RANK else None, root=root)
        if root == RANK:
            near(DEVICE.asnumpy(result), expected, total)
    result = allreduced(comm, total)
    near(result, expected, total)
    assert len({*WORLD.allgather(result.tobytes()), allreduced(comm, total).tobytes()}) == 1, "the same to the last bit"


def test_large_messages(comm, sections):
    """Messages of several sections go in chunks at the same time."""
    if sections > 3:
        pytest.skip("their messages are short")
    total = (16 << 20) // 8
    result = allreduced(comm, total)
    near(result[:1000], sum(values(total, rank)[:1000] for rank in range(SIZE)), total)
    assert len({*WORLD.allgather(result.tobytes())}) == 1
