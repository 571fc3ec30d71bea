"""Collectives of device arrays by our own algorithms, against NumPy; where a rank can't, all go MPI's way."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import DEVICE
from mpi4py import MPI

import gdcomm
from gdcomm import collectives

WORLD = MPI.COMM_WORLD
SIZE, RANK = WORLD.size, WORLD.rank
pytestmark = pytest.mark.skipif(SIZE == 1, reason="a collective of one rank is MPI's: mpirun -n 2 (to 4)")
DTYPES = ["<f4", "<f8", "<i2", "<u8", "<c16", "?", "<f2"]
COUNTS = [1, 2, 7, 1000, 70_001]
OPS = {"SUM": np.add, "MAX": np.maximum, "BAND": np.bitwise_and, "PROD": np.multiply}


@pytest.fixture(autouse=True)
def always(monkeypatch):
    monkeypatch.setattr(collectives, "SMALLEST", 1)


@pytest.fixture
def comm():
    return gdcomm.Communicator(path="staged")


@pytest.fixture
def ran(monkeypatch):
    """Algorithms that this rank ran."""
    names = []
    run = collectives._Job.run

    def spy(self, operation, *arguments):
        names.append(operation)
        run(self, operation, *arguments)

    monkeypatch.setattr(collectives._Job, "run", spy)
    return names


def values(count, rank=None, dtype="<f8"):
    rank = RANK if rank is None else rank
    small = (np.arange(count) * 3 + rank * 5) % 11 + 1
    return (small % 2).astype(dtype) if dtype == "?" else small.astype(dtype)


def device(array):
    return DEVICE.array(array)


def read(array):
    return array if isinstance(array, np.ndarray) else DEVICE.asnumpy(array)


def reduced(count, op, dtype):
    total = values(count, 0, dtype)
    for rank in range(1, SIZE):
        total = OPS[op](total, values(count, rank, dtype))
    return total.astype(dtype)


def expected_op(op, dtype):
    """Whether MPI has a meaning for it."""
    kind = np.dtype(dtype).kind
    return not ((op == "BAND" and kind not in "iub") or (op == "MAX" and kind == "c"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("op", OPS)
def test_allreduce(comm, ran, dtype, count, op):
    if not expected_op(op, dtype):
        return
    right = reduced(count, op, dtype)
    x, y = device(values(count, dtype=dtype)), device(np.zeros(count, dtype))
    comm.Allreduce(x, y, getattr(MPI, op))
    assert np.array_equal(read(y), right)
    assert np.array_equal(read(x), values(count, dtype=dtype))
    comm.Allreduce(MPI.IN_PLACE, x, getattr(MPI, op))
    assert np.array_equal(read(x), right)
    assert ran == ["allreduce"] * 2


@pytest.mark.parametrize("dtype", ["<f4", "<i8"])
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("root", [0, SIZE - 1])
def test_reduce_and_bcast(comm, ran, dtype, count, root):
    x, y = device(values(count, dtype=dtype)), device(np.zeros(count, dtype)) if root == RANK else None
    comm.Reduce(x, y, MPI.SUM, root)
    right = reduced(count, "SUM", dtype)
    assert root != RANK or np.array_equal(read(y), right)
    assert np.array_equal(read(x), values(count, dtype=dtype)), "sendbuf is only read"
    if root == RANK:
        comm.Reduce(MPI.IN_PLACE, x, MPI.SUM, root)
        assert np.array_equal(read(x), right)
    else:
        comm.Reduce(x, None, MPI.SUM, root)
    comm.Bcast(x, root)
    assert np.array_equal(read(x), right)
    assert ran == ["reduce", "reduce", "bcast"]


@pytest.mark.parametrize("dtype", ["<f4", "<c8", "V3"])
@pytest.mark.parametrize("count", COUNTS)
def test_blocks(comm, ran, dtype, count):
    def made(rank, length):
        plain = values(length * np.dtype(dtype).itemsize, rank, "u1")
        return plain.view(dtype)

    whole = np.concatenate([made(r, count) for r in range(SIZE)])
    x, y = device(made(RANK, count)), device(np.zeros(count * SIZE, dtype))
    comm.Allgather(x, y)
    assert read(y).tobytes() == whole.tobytes()
    z = np.zeros(count * SIZE, dtype)
    z[RANK * count : (RANK + 1) * count] = made(RANK, count)
    z = device(z)
    comm.Allgather(MPI.IN_PLACE, z)
    assert read(z).tobytes() == whole.tobytes()
    x, y = device(made(RANK, count * SIZE)), device(np.zeros(count * SIZE, dtype))
    comm.Alltoall(x, y)
    swapped = np.concatenate([made(r, count * SIZE)[RANK * count : (RANK + 1) * count] for r in range(SIZE)])
    assert read(y).tobytes() == swapped.tobytes()
    assert ran == ["allgather", "allgather", "alltoall"]


@pytest.mark.parametrize("count", COUNTS)
def test_reduce_scatter_block(comm, ran, count):
    x, y = device(values(count * SIZE)), device(np.zeros(count))
    comm.Reduce_scatter_block(x, y, MPI.SUM)
    assert np.array_equal(read(y), reduced(count * SIZE, "SUM", "<f8")[RANK * count : (RANK + 1) * count])
    assert np.array_equal(read(x), values(count * SIZE))
    assert ran == ["reduce_scatter"]


@pytest.mark.parametrize("odd", ["host", "counted", "strided", "other"])
@pytest.mark.parametrize("rank", [0, SIZE - 1])
def test_one_rank_that_can_not_takes_all_along(comm, ran, odd, rank):
    """Host memory, an explicit count, a strided array or a user's operator on one rank: MPI does it."""
    count = 1000
    right = reduced(count, "SUM", "<f8")
    x, y = device(values(count)), device(np.zeros(count))
    op = MPI.SUM
    if odd == "other":
        op = MPI.Op.Create(lambda a, b, _: np.add(np.frombuffer(a), np.frombuffer(b), out=np.frombuffer(b)), True)
    elif rank == RANK:
        if odd == "host":
            x, y = values(count), np.zeros(count)
        elif odd == "counted":
            x, y = [x, count, MPI.DOUBLE], [device(np.zeros(count + 7)), count, MPI.DOUBLE]
        else:
            x = device(np.repeat(values(count), 2))[::2]
    comm.Allreduce(x, y, op)
    result = read(y[0])[:count] if isinstance(y, list) else read(y)
    assert np.array_equal(result, right)
    assert ran == []
    if odd == "host":
        y = np.zeros(count * SIZE) if rank == RANK else device(np.zeros(count * SIZE))
        comm.Allgather(x, y)
        assert np.array_equal(read(y), np.concatenate([values(count, r) for r in range(SIZE)]))
        b = x if rank == RANK else device(values(count))
        comm.Bcast(b, SIZE - 1)
        assert np.array_equal(read(b), values(count, SIZE - 1))
        assert ran == []
    if odd == "other":
        op.Free()


def test_derived_communicators_and_large_messages(comm, ran):
    """Ranks of a part of a communicator, in reverse order, and messages that go by slots."""
    part = comm.Split(RANK % 2, -RANK)
    count = 700_003
    x = device(values(count, dtype="<f4"))
    part.Allreduce(MPI.IN_PLACE, x)
    members = [r for r in range(SIZE) if r % 2 == RANK % 2]
    total = sum(values(count, r, "<f4") for r in members)
    assert np.array_equal(read(x), total)
    y = device(values(count, dtype="<f4"))
    comm.Allreduce(MPI.IN_PLACE, y)
    assert np.array_equal(read(y), reduced(count, "SUM", "<f4"))
    part.Free()


def test_results_are_the_same_to_the_last_bit_everywhere_and_again(comm):
    rng = np.random.default_rng(RANK)
    x = rng.standard_normal(50_021).astype("<f4")
    results = []
    for _ in range(2):
        y = device(np.zeros_like(x))
        comm.Allreduce(device(x), y)
        results.append(read(y).tobytes())
    assert results[0] == results[1]
    assert len(set(WORLD.allgather(results[0]))) == 1


def test_streams_order_a_collective(comm):
    stream = DEVICE.Stream()
    count = 5000
    x, y = DEVICE.array(np.zeros(count), stream), DEVICE.array(np.zeros(count), stream)
    DEVICE.fill(x, RANK + 1.0, stream)
    comm.Allreduce(x, y, stream=stream)
    DEVICE.fill(x, -1.0, stream)
    assert (DEVICE.asnumpy(y, stream) == SIZE * (SIZE + 1) / 2).all()


def test_explain_names_the_algorithm(comm):
    x = device(np.zeros(1 << 20))
    assert "over staged messages" in comm.explain("Allreduce", x)
    assert "by staged" in comm.explain("Scan", x)


def test_direct_messages_carry_collectives_that_mpi_itself_does_not_do(comm, ran, monkeypatch):
    monkeypatch.setenv("GDCOMM_MPI_DEVICE_OPS", "p2p")
    with gdcomm.Communicator(WORLD.Dup(), path="direct") as direct:
        x = device(values(1000, 0, "<f4") if RANK == 0 else np.zeros(1000, "<f4"))
        direct.Bcast(x, 0)
        assert np.array_equal(read(x), values(1000, 0, "<f4"))
        assert ran == ["bcast"]
        assert "over mpi messages" in direct.explain("Bcast", x)
        with pytest.raises(gdcomm.NoPathError, match="Scan"):
            direct.Scan(x, x)
    monkeypatch.setenv("GDCOMM_MPI_DEVICE_OPS", "p2p,move")
    with gdcomm.Communicator(WORLD.Dup()) as able:
        able.Bcast(x, 0)
        assert ran == ["bcast"]
        assert "by mpi" in able.explain("Bcast", x)
