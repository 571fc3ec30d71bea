"""Collectives of device arrays by our own algorithms, against NumPy; where a rank can't, all go MPI's way."""

from __future__ import annotations

import time
from array import array as array_of_python

import ml_dtypes
import numpy as np
import pytest
from conftest import DEVICE
from mpi4py import MPI

import gdcomm
from gdcomm import collectives, devices, links
from gdcomm.collectives import NEVER, asks
from gdcomm.operations import OPERATIONS as TABLE
from gdcomm.vectors import Call, known, message
from gdcomm.ways import WAYS

WORLD = MPI.COMM_WORLD
SIZE, RANK = WORLD.size, WORLD.rank
pytestmark = pytest.mark.skipif(SIZE == 1, reason="a collective of one rank is MPI's: mpirun -n 2 (to 4)")
DTYPES = ["<f4", "<f8", "<i2", "<u8", "<c16", "?", "<f2"]
COUNTS = [1, 2, 7, 1000, 70_001]
KINDS = ["<f4", "<i8", "<c16", "<f2", ml_dtypes.bfloat16, "?"]
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
    run = collectives.Job.run

    def spy(self, *arguments):
        names.append(self.operation)
        return run(self, *arguments)

    monkeypatch.setattr(collectives.Job, "run", spy)
    return names


def values(count, rank=None, dtype="<f8"):
    rank = RANK if rank is None else rank
    small = (np.arange(count) * 3 + rank * 5) % 11 + 1
    return (small % 2).astype(dtype) if dtype == "?" else small.astype(dtype)


def device(array):
    return DEVICE.array(array)


class OnStream:
    """A device array whose own stream is another than the current one."""

    def __init__(self, array, stream):
        self.array, self.stream = array, stream
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, "stream": stream.ptr}


def bare(array):
    """A device array that has no more than an interface."""
    return OnStream(DEVICE.array(array, DEVICE.default_stream), DEVICE.default_stream)


def read(array):
    return array if isinstance(array, np.ndarray) else DEVICE.asnumpy(getattr(array, "array", array))


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


@pytest.mark.parametrize("odd", ["host", "strided", "other"])
@pytest.mark.parametrize("rank", [0, SIZE - 1])
def test_one_rank_that_can_not_takes_all_along(comm, ran, odd, rank):
    """Host memory or a strided array on one rank, or a user's operator: MPI does it."""
    count = 1000
    right = reduced(count, "SUM", "<f8")
    x, y = device(values(count)), device(np.zeros(count))
    op = MPI.SUM
    if odd == "other":
        op = MPI.Op.Create(lambda a, b, _: np.add(np.frombuffer(a), np.frombuffer(b), out=np.frombuffer(b)), True)
    elif rank == RANK:
        if odd == "host":
            x, y = values(count), np.zeros(count)
        else:
            x = device(np.repeat(values(count), 2))[::2]
    comm.Allreduce(x, y, op)
    assert np.array_equal(read(y), right)
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
    for name in ("Allreduce", "Scan", "Exscan", "Reduce_scatter", "Gather", "Gatherv", "Alltoallv", "Allgatherv"):
        assert "over staged messages" in comm.explain(name, x)
    assert " by pairwise over" in comm.explain("Alltoallv", x)
    assert " by linear over" in comm.explain("Scatterv", x)
    assert "by staged" in comm.explain("Alltoallw", x)
    assert " by pairwise over" in comm.explain("Ialltoallv", x)
    assert "by staged" in comm.explain("Alltoallv_init", x)


def explained(name):
    """A call, its message of 16 elements times the ranks, and arguments of ranks that know less than that."""
    whole, own, n, root = filled(16 * SIZE), filled(16), SIZE, SIZE - 1
    at_root, counts = root == RANK, [16] * SIZE
    return {
        "Bcast": [(whole, root), ([filled(99 * n), 16 * n], root)],
        "Reduce": [(whole, None, MPI.SUM, root), (whole,)],
        "Allreduce": [(whole, whole), (MPI.IN_PLACE, whole, MPI.MAX), (whole,)],
        "Scan": [(whole, whole), (MPI.IN_PLACE, whole), (whole,)],
        "Exscan": [(whole, whole), (MPI.IN_PLACE, whole), (whole,)],
        "Reduce_scatter": [(whole, own, counts), (whole,), (MPI.IN_PLACE, whole, counts)],
        "Reduce_scatter_block": [(whole, own), (whole,), (MPI.IN_PLACE, whole)],
        "Allgather": [(own, whole), (own,), ([filled(20), 16],), (MPI.IN_PLACE, whole)],
        "Allgatherv": [(own, [whole, counts]), (own,), (MPI.IN_PLACE, [filled(99 * n), counts])],
        "Alltoall": [(whole, whole), (whole,), (MPI.IN_PLACE, whole)],
        "Gather": [(own, whole if at_root else None, root), (own,), (own, filled(3) if not at_root else whole, root)],
        "Scatter": [(whole if at_root else None, own, root), (whole,) if RANK == 0 else (None, own)],
    }[name]


@pytest.mark.parametrize(
    "name",
    ["Bcast", "Reduce", "Allreduce", "Scan", "Exscan", "Reduce_scatter", "Reduce_scatter_block", "Allgather",
     "Allgatherv", "Alltoall", "Gather", "Scatter"],
)  # fmt: skip
def test_explain_goes_by_the_size_of_the_whole_message(monkeypatch, name):
    for limit in (8 * 16 * SIZE, 8 * 16 * SIZE + 1):
        monkeypatch.setattr(collectives, "SMALLEST", limit)
        comm = gdcomm.Communicator(path="staged")
        for arguments in explained(name):
            told = comm.explain(name, *(on(device, argument) for argument in arguments))
            assert ("over staged messages, if all ranks bring device arrays" in told) == (limit % 8 == 0), arguments
            told = comm.explain(name, *arguments)
            assert told.startswith(f"{name}: host (host memory goes to MPI as it is")
            assert ("asked" in told) == (limit % 8 == 0)


def test_explain_tells_where_a_rank_does_not_know_the_size(monkeypatch):
    monkeypatch.setattr(collectives, "SMALLEST", 80)
    comm = gdcomm.Communicator(path="staged")
    for name in ("Gatherv", "Scatterv", "Alltoallv"):
        for count in (9, 10):
            x = device(filled(count))
            both = (None, x) if name == "Scatterv" else (x, None)
            told = comm.explain(name, *both, *([] if name == "Alltoallv" else [SIZE - 1]))
            assert "over staged messages, if all ranks bring device arrays" in told
            assert ("and one knows of 80 bytes" in told) == (count == 9)
            assert "asked" in comm.explain(name, filled(count), filled(count))
        assert "and one knows of 80 bytes" in comm.explain(name)


def test_explain_sees_what_keeps_a_call_from_the_algorithms(comm):
    x, y = device(filled(8)), device(filled(8))
    assert "over staged" in comm.explain("Allreduce", x, y)
    op = MPI.Op.Create(lambda *_: None, True)
    for told in (
        comm.explain("Allreduce", x, y, op),
        comm.explain("Allreduce", x, strided(filled(8))),
        comm.explain("Allreduce", x, filled(8)),
        comm.explain("Allreduce", device(filled(8, "<c16")), None, MPI.MAX),
        comm.explain("Send", x),
        comm.explain("Alltoallw", x),
    ):
        assert "by staged (asked for)" in told
    op.Free()
    assert "by staged" in comm.explain("Bcast")
    assert "by staged" in comm.explain("Bcast", None)


def test_direct_messages_carry_collectives_that_mpi_itself_does_not_do(comm, ran, monkeypatch):
    monkeypatch.setenv("GDCOMM_MPI_DEVICE_OPS", "p2p")
    with gdcomm.Communicator(WORLD.Dup(), path="direct") as direct:
        x = device(values(1000, 0, "<f4") if RANK == 0 else np.zeros(1000, "<f4"))
        direct.Bcast(x, 0)
        assert np.array_equal(read(x), values(1000, 0, "<f4"))
        assert ran == ["bcast"]
        assert "over mpi messages" in direct.explain("Bcast", x)
        direct.Ibcast(x, 0).Wait()
        assert ran == ["bcast", "bcast"]
        ran.pop()
        with pytest.raises(gdcomm.NoPathError, match="Bcast_init"):
            direct.Bcast_init(x, 0)
    monkeypatch.setenv("GDCOMM_MPI_DEVICE_OPS", "p2p,move")
    with gdcomm.Communicator(WORLD.Dup()) as able:
        able.Bcast(x, 0)
        assert ran == ["bcast"]
        assert "by mpi" in able.explain("Bcast", x)


# -- against mpi4py ------------------------------------------------------------------------------


def halves(dtype):
    return np.dtype(dtype).itemsize == 2 and np.dtype(dtype).kind != "i"


def reducible(array):
    """The array as numbers that MPI reduces: whole ones, exact in either type."""
    return array.astype("<f4") if halves(array.dtype) or array.dtype == bool else array


def on(make, spec):
    """A buffer argument with its array made by `make`."""
    if isinstance(spec, list):
        return [make(spec[0]), *spec[1:]]
    return make(spec) if isinstance(spec, np.ndarray) else spec


def bytes_of(spec):
    array = spec[0] if isinstance(spec, list) else spec
    return None if array is None or array is MPI.IN_PLACE else read(array).tobytes()


def compare(comm, call, send, recv, make=device):
    """Run a collective that moves on device arrays, and by mpi4py on host arrays: the same to the byte, gaps too."""
    plain = [on(lambda x: x.view("u2") if halves(x.dtype) else x.copy(), spec) for spec in (send, recv)]
    mine = [on(make, spec) for spec in (send, recv)]
    before = bytes_of(send)
    call(comm, *mine)
    call(WORLD, *plain)
    assert bytes_of(mine[1]) == bytes_of(plain[1])
    if recv is not MPI.IN_PLACE:
        assert bytes_of(mine[0]) == before, "sendbuf is only read"


def some_counts(seed, largest=9):
    """Counts of all ranks, some of them 0 and one not; the same on all ranks."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, largest, SIZE) * rng.integers(0, 2, SIZE)
    counts[rng.integers(SIZE)] += 1
    return counts.tolist()


def spread(counts, seed):
    """Displacements in any order and with gaps, and the elements that they need; they differ between ranks."""
    rng = np.random.default_rng([seed, RANK])
    displs, end = [0] * len(counts), 0
    for place in rng.permutation(len(counts)):
        displs[place] = end + int(rng.integers(0, 3))
        end = displs[place] + counts[place]
    return displs, end + int(rng.integers(0, 3))


def filled(count, dtype="<f8"):
    """What is there before anything is received."""
    return np.full(count, 77).astype(dtype)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_scans(comm, ran, dtype, count):
    for op in ("SUM", "MAX", "PROD"):
        if not expected_op(op, dtype) or (op == "PROD" and halves(dtype)):  # products round
            continue
        mine = values(count, dtype=dtype)
        for name in ("Scan", "Exscan"):
            right = reducible(filled(count, dtype))
            getattr(WORLD, name)(reducible(mine), right, getattr(MPI, op))
            x, y = device(mine), device(filled(count, dtype))
            getattr(comm, name)(x, y, getattr(MPI, op))
            assert np.array_equal(read(y), right.astype(dtype))
            assert np.array_equal(read(x), mine), "sendbuf is only read"
            getattr(comm, name)(MPI.IN_PLACE, x, getattr(MPI, op))
            assert np.array_equal(read(x), mine if name == "Exscan" and RANK == 0 else right.astype(dtype))
            assert ran == [name.lower()] * 2
            ran.clear()


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_reduce_scatter(comm, ran, dtype, seed):
    counts = some_counts(seed, 9 if seed else 40_000)
    total, mine = sum(counts), counts[RANK]
    data = values(total, dtype=dtype)
    right = reducible(filled(mine, dtype))
    WORLD.Reduce_scatter(reducible(data), right, counts)
    x, y = device(data), device(filled(mine, dtype))
    for given in (counts, tuple(counts), np.array(counts), None):
        comm.Reduce_scatter(x, y, given)
        assert np.array_equal(read(y), right.astype(dtype))
        assert np.array_equal(read(x), data), "sendbuf is only read"
    comm.Reduce_scatter(MPI.IN_PLACE, x, counts)
    assert np.array_equal(read(x)[:mine], right.astype(dtype))
    assert ran == ["reduce_scatter"] * 5


def test_reduce_scatter_block_in_place(comm, ran):
    x = device(values(5 * SIZE))
    comm.Reduce_scatter_block(MPI.IN_PLACE, x)
    assert np.array_equal(read(x)[:5], reduced(5 * SIZE, "SUM", "<f8")[RANK * 5 : RANK * 5 + 5])
    assert ran == ["reduce_scatter"]


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_allgatherv(comm, ran, dtype, seed):
    counts = some_counts(seed, 9 if seed else 40_000)
    own = values(counts[RANK], dtype=dtype)
    displs, room = spread(counts, seed)
    for spec in ([filled(sum(counts), dtype), counts], [filled(room, dtype), (counts, displs)]):
        compare(comm, lambda c, x, y: c.Allgatherv(x, y), own, spec)
        place = spec[0][displs[RANK] if len(spec[0]) == room and isinstance(spec[1], tuple) else sum(counts[:RANK]) :]
        place[: counts[RANK]] = own
        compare(comm, lambda c, x, y: c.Allgatherv(x, y), MPI.IN_PLACE, spec)
    assert ran == ["allgather"] * 4


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_alltoallv(comm, ran, dtype, seed):
    rng = np.random.default_rng(seed)
    table = rng.integers(0, 9 if seed else 30_000, (SIZE, SIZE)) * rng.integers(0, 2, (SIZE, SIZE))  # from, to
    table[seed % SIZE, 0] += 1
    outgoing, incoming = table[RANK].tolist(), table[:, RANK].tolist()
    compare(
        comm, lambda c, x, y: c.Alltoallv(x, y),
        [values(sum(outgoing), dtype=dtype), outgoing], [filled(sum(incoming), dtype), np.array(incoming)],
    )  # fmt: skip
    (sent, length), (received, room) = spread(outgoing, seed), spread(incoming, seed + 100)
    compare(
        comm, lambda c, x, y: c.Alltoallv(x, y),
        [values(length, dtype=dtype), (outgoing, sent)], [filled(room, dtype), (incoming, np.array(received))],
    )  # fmt: skip
    assert ran == ["alltoallv"] * 2


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_gather_and_scatter(comm, ran, dtype, count):
    one, many = values(count, dtype=dtype), values(count * SIZE, dtype=dtype)
    for root in range(SIZE):
        at_root = root == RANK
        gather, scatter = (lambda c, x, y, n=n, root=root: getattr(c, n)(x, y, root) for n in ("Gather", "Scatter"))
        compare(comm, gather, one, filled(count * SIZE, dtype) if at_root else None)
        compare(comm, gather, MPI.IN_PLACE if at_root else one, many if at_root else None)
        compare(comm, scatter, many if at_root else None, filled(count, dtype))
        compare(comm, scatter, many if at_root else None, MPI.IN_PLACE if at_root else filled(count, dtype))
        assert ran == ["gather", "gather", "scatter", "scatter"]
        ran.clear()


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_gatherv_and_scatterv(comm, ran, dtype, seed):
    counts = some_counts(seed, 9 if seed else 40_000)
    displs, room = spread(counts, seed)
    one = values(counts[RANK], dtype=dtype)
    for root in range(SIZE):
        at_root = root == RANK
        gather, scatter = (lambda c, x, y, n=n, root=root: getattr(c, n)(x, y, root) for n in ("Gatherv", "Scatterv"))
        for many in (
            [values(room, dtype=dtype), (counts, displs)],
            [values(sum(counts), dtype=dtype), counts],
        ):
            whole = many if at_root else None
            compare(comm, gather, one, whole)
            compare(comm, gather, MPI.IN_PLACE if at_root else one, whole)
            compare(comm, scatter, whole, filled(counts[RANK], dtype))
            compare(comm, scatter, whole, MPI.IN_PLACE if at_root else filled(counts[RANK], dtype))
        assert ran == ["gatherv", "gatherv", "scatterv", "scatterv"] * 2
        ran.clear()


def test_forms_of_arguments(comm, ran):
    """Whatever mpi4py takes as counts and displacements of elements of the array's own type."""
    counts, each = [2 * rank + 1 for rank in range(SIZE)], SIZE + 1
    displs, total = [rank * rank for rank in range(SIZE)], SIZE * SIZE
    x, y = values(2 * total), filled(each * SIZE + 3)
    shared = [
        [y[:total], counts], [y[:total], counts, MPI.DOUBLE], [y[:total], counts, None, MPI.DOUBLE],
        [y, counts, displs, MPI.DOUBLE], [y, counts, displs, "d"], [y, (counts, displs)], [y, (counts, displs), "d"],
        [y[:total], (counts, None)], [y, [np.int64(n) for n in counts], np.array(displs), None],
    ]  # fmt: skip
    for spec in shared:
        compare(comm, lambda c, x, y: c.Allgatherv(x, y), [x, counts[RANK]], spec)
    for spec in ([y, each], [y, (each, each)], [y, each, each, MPI.DOUBLE], [y, each, None, "d"]):
        compare(comm, lambda c, x, y: c.Allgatherv(x, y), [x, each], spec)
    uneven = len(x) // SIZE + (len(x) % SIZE > RANK)
    compare(comm, lambda c, x, y: c.Allgatherv(x, y), x[:uneven], values(len(x)))
    compare(comm, lambda c, x, y: c.Allgatherv(x, y), x[:uneven], [values(len(x)), MPI.DOUBLE])
    assert ran == ["allgather"] * 15
    for spec in ([x, 3], [x, 3, MPI.DOUBLE], [x, (3, 2)], [x, [3, 2], "d"], [x, 3, 2, "d"], [x[:3], "d"]):
        compare(comm, lambda c, x, y: c.Allgather(x, y), spec, [y, 3])
        compare(comm, lambda c, x, y: c.Scan(x, y), spec, [y, 3, 1, MPI.DOUBLE])
        compare(comm, lambda c, x, y: c.Reduce_scatter_block(x, y), [x, 1], [y, (1, 2)])
    assert ran[15:] == ["allgather", "scan", "reduce_scatter"] * 6


# -- where a rank can't, all go MPI's way --------------------------------------------------------

OPERATIONS = [
    "Scan", "Exscan", "Reduce_scatter", "Allgather", "Allgatherv", "Alltoall", "Alltoallv", "Gather", "Gatherv",
    "Scatter", "Scatterv",
]  # fmt: skip


def example(name, root):
    """A collective: the call, and its buffer arguments on the host."""
    counts = [3 + rank % 2 for rank in range(SIZE)]
    one, block, many = values(counts[RANK]), values(4), values(4 * SIZE)
    outgoing, incoming = [counts[RANK]] * SIZE, counts
    shared = [filled(sum(counts)), counts]
    at_root = root == RANK
    return {
        "Scan": (lambda c, x, y: c.Scan(x, y), many, filled(len(many))),
        "Exscan": (lambda c, x, y: c.Exscan(x, y), many, filled(len(many))),
        "Reduce_scatter": (lambda c, x, y: c.Reduce_scatter(x, y, counts), values(sum(counts)), filled(counts[RANK])),
        "Allgather": (lambda c, x, y: c.Allgather(x, y), block, filled(len(many))),
        "Allgatherv": (lambda c, x, y: c.Allgatherv(x, y), one, shared),
        "Alltoall": (lambda c, x, y: c.Alltoall(x, y), many, filled(len(many))),
        "Alltoallv": (lambda c, x, y: c.Alltoallv(x, y), [values(sum(outgoing)), outgoing], [shared[0], incoming]),
        "Gather": (lambda c, x, y: c.Gather(x, y, root), block, filled(len(many)) if at_root else None),
        "Gatherv": (lambda c, x, y: c.Gatherv(x, y, root), one, shared if at_root else None),
        "Scatter": (lambda c, x, y: c.Scatter(x, y, root), many if at_root else None, filled(4)),
        "Scatterv": (lambda c, x, y: c.Scatterv(x, y, root), shared if at_root else None, filled(counts[RANK])),
    }[name]


def strided(array):
    return device(np.repeat(array, 2))[::2]


REDUCING = ("Scan", "Exscan", "Reduce_scatter")
ODD = [(name, odd) for name in OPERATIONS for odd in ("host", "strided", "nobody")]
ODD += [(name, "other type") for name in OPERATIONS if name not in REDUCING]  # in a reduction MPI refuses it


@pytest.mark.parametrize(("name", "odd"), ODD)
def test_one_odd_rank(comm, ran, name, odd):
    """Each rank is odd once, for each root; `nobody` shows that the others are not."""
    for rank in range(SIZE):
        for root in range(SIZE):
            call, send, recv = example(name, root)
            right = on(np.copy, recv)
            call(WORLD, send, right)
            make = {"host": np.copy, "strided": strided}.get(odd, device) if rank == RANK else device
            x, y = on(make, send), on(make, recv)
            if odd == "other type" and rank == RANK:
                x, y = (z if z is None else [*(z if isinstance(z, list) else [z]), MPI.INT64_T] for z in (x, y))
            call(comm, x, y)
            assert bytes_of(y) == bytes_of(right)
            assert len(ran) == (odd == "nobody")
            ran.clear()


def test_arrays_of_different_types_are_not_cut_alike(comm, ran):
    """13 bytes in all ranks' arrays, as elements of 13 bytes on one and of 1 byte on others."""
    dtype = "V13" if RANK == 0 else "u1"
    x = device(np.arange(13, dtype="u1").view(dtype) if RANK == SIZE - 1 else np.zeros(13, "u1").view(dtype))
    comm.Bcast(x, SIZE - 1)
    assert read(x).tobytes() == bytes(range(13))
    assert ran == []


def test_buffers_that_share_memory(comm, ran):
    """MPI forbids it in moves; they are staged apart, as before. Reductions in place may be written so."""
    x = device(values(2 * SIZE))
    comm.Alltoallv([x, 2], [x, 2])
    right = filled(2 * SIZE)
    WORLD.Alltoallv([values(2 * SIZE), 2], [right, 2])
    assert np.array_equal(read(x), right)
    assert ran == []
    x = device(values(3))
    comm.Scan(x, x)
    right = filled(3)
    WORLD.Scan(values(3), right)
    assert np.array_equal(read(x), right)
    assert ran == ["scan"]


@pytest.mark.parametrize("name", ["Allgather", "Allgatherv", "Gather", "Gatherv", "Scatter", "Scatterv", "Alltoallv"])
def test_blocks_of_a_rank_for_itself_that_do_not_fit(name):
    """MPI raises an error, or moves what fits: a rank with such a block takes no part in an algorithm."""
    operation, root = TABLE[name], [RANK] if name[0] in "GS" else []

    def way(own):
        one, whole = values(own), values(4 * SIZE)
        if name == "Alltoallv":
            one = [values(4 * SIZE), [4] * RANK + [own] + [4] * (SIZE - RANK - 1)]
            whole = [whole, [4] * SIZE]
        send, recv = (whole, one) if name.startswith("Scatter") else (one, whole)
        return WAYS[name](Call(operation, (on(device, send), on(device, recv), *root), None, SIZE, RANK))

    assert way(4) is not None
    assert way(3) is None


def test_blocks_that_overlap_where_they_are_received(comm, ran):
    x, y = device(values(4)), device(filled(4 * SIZE))
    comm.Allgatherv(x, [y, [4] * SIZE, [rank * 3 for rank in range(SIZE)], MPI.DOUBLE])
    assert (read(y)[3 * SIZE + 1 :] == 77).all()
    assert ran == []


def drawn(seed):
    """A random collective: how it is called, and this rank's buffer arguments."""
    shared, root, at_root = np.random.default_rng(seed), seed % SIZE, seed % SIZE == RANK
    name = str(shared.choice(sorted(WAYS)))
    count = int(shared.choice([1, 2, 9, 300, 5000]))
    counts = some_counts(seed, count + 1)
    table = shared.integers(0, count + 1, (SIZE, SIZE)) * shared.integers(0, 2, (SIZE, SIZE))  # from, to
    op = [MPI.SUM, MPI.MAX][shared.integers(2)]

    def spec(counts, more=0):
        displs, room = spread(counts, seed + more)
        return [values(room), (counts, displs)]

    one, many, own = values(count), values(count * SIZE), values(counts[RANK])
    send, recv = {
        "Bcast": (None, one),
        "Reduce": (one, filled(count) if at_root else None),
        "Reduce_scatter": (values(sum(counts)), own),
        "Reduce_scatter_block": (many, one),
        "Allgather": (one, many),
        "Allgatherv": (own, spec(counts)),
        "Alltoall": (many, filled(len(many))),
        "Alltoallv": (spec(table[RANK].tolist()), spec(table[:, RANK].tolist(), 1)),
        "Gather": (one, many if at_root else None),
        "Gatherv": (own, spec(counts) if at_root else None),
        "Scatter": (many if at_root else None, one),
        "Scatterv": (spec(counts) if at_root else None, own),
    }.get(name, (one, filled(count)))
    if shared.integers(3) == 0 and name not in ("Alltoallv", "Reduce_scatter", "Reduce_scatter_block"):
        if name.startswith("Scatter"):
            recv = MPI.IN_PLACE if at_root else recv
        elif name != "Bcast" and (at_root or not name.startswith(("Gather", "Reduce"))):
            send = MPI.IN_PLACE
    more = {"Reduce": [op, root], "Reduce_scatter": [counts, op]}.get(name, [])
    more = more or ([root] if TABLE[name].root >= 0 else [op] if TABLE[name].op >= 0 else [])
    buffers = slice(1, 2) if name == "Bcast" else slice(2)
    return lambda c, x, y: getattr(c, name)(*(x, y)[buffers], *more), send, recv


@pytest.mark.parametrize("limit", [1, 300, 20_000])
@pytest.mark.parametrize("mixed", [False, True])
def test_random_calls(monkeypatch, limit, mixed):
    """Sizes on both sides of the limit; with `mixed`, a kind of array of its own on each rank."""
    monkeypatch.setattr(collectives, "SMALLEST", limit)
    comm = gdcomm.Communicator(path="staged")
    for seed in range(60):
        call, send, recv = drawn(seed)
        kind = np.random.default_rng([seed, RANK]).integers(4) if mixed else 0
        make = (device, device, np.copy, bare)[kind]
        compare(comm, call, send, recv, make)


# -- whether they ask ----------------------------------------------------------------------------


ALSO = ["Reduce_scatter_block", "Reduce_scatter_block in place", "Reduce", "Allreduce", "Bcast"]


@pytest.mark.parametrize("case", [*OPERATIONS, *ALSO])
def test_all_ranks_or_none_ask(monkeypatch, case):
    """The size of one message, written in different ways on different ranks, is the limit or below it."""
    count = 4
    n, root = count * SIZE, SIZE - 1
    typed = RANK % 2 == 0

    def spec(array, counts, *more):
        return [array, counts, *more, MPI.DOUBLE] if typed else array

    one, many, big = spec(values(count), np.int64(count)), spec(values(n), np.int64(count)), spec(values(n), n)
    later = [values(n + 2), (None, 2)] if typed else values(n)
    small = spec(filled(count), count)
    shared = [[filled(n + 9), [count] * SIZE, None, "d"], [filled(n + 9), count], filled(n)]
    arguments, message = {
        "Scan": ((later, filled(n)), n),
        "Exscan": ((MPI.IN_PLACE, big) if RANK else (big, filled(n)), n),
        "Allreduce": ((big, filled(n)), n),
        "Reduce": ((MPI.IN_PLACE, big, MPI.SUM, root) if root == RANK else (big, filled(1), MPI.SUM, root), n),
        "Reduce_scatter": ((big, filled(count), [count] * SIZE), n),
        "Reduce_scatter_block": (([values(n), MPI.DOUBLE] if typed else values(n), small), n),
        "Reduce_scatter_block in place": ((MPI.IN_PLACE, many), n),
        "Bcast": ((big, root), n),
        "Allgather": ((one, many), n) if RANK else ((MPI.IN_PLACE, many), n),
        "Allgatherv": ((one, shared[RANK % 3]), n),
        "Alltoall": ((many, filled(n)), n),
        "Alltoallv": ((many, filled(n)), n),
        "Gather": ((MPI.IN_PLACE, many, root) if root == RANK else (one, filled(999), root), n),
        "Gatherv": ((one, many if root == RANK else None, root), n),
        "Scatter": ((many, MPI.IN_PLACE, root) if root == RANK else (filled(999), one, root), n),
        "Scatterv": ((many if root == RANK else None, small, root), n),
    }[case]
    name = case.partition(" ")[0]
    for limit in (8 * message, 8 * message + 1):
        monkeypatch.setattr(collectives, "SMALLEST", limit)
        comm = gdcomm.Communicator(path="staged")
        always = name in ("Alltoallv", "Gatherv", "Scatterv")
        assert asks(comm, name, arguments) == (always or limit == 8 * message)
        getattr(comm, name)(*arguments)  # it ends


def test_arrays_that_tell_little_of_themselves_are_as_long_as_others(comm):
    """Whether they have an itemsize or only an interface."""
    x = values(4 * SIZE)
    for array in (x, device(x), bare(x), memoryview(x), array_of_python("d", x), [x][0][:, None]):
        for name, arguments in {
            "Allgatherv": (None, [array, [4] * SIZE]),
            "Allgather": (None, [array, 4]),
            "Bcast": ([array, (4 * SIZE, 0)], 0),
            "Scan": (array, None),
        }.items():
            assert message(name, arguments, SIZE) == x.nbytes
        assert known(TABLE["Gatherv"], (None, [array, [4] * SIZE]), SIZE) == x.nbytes
    y = filled(4 * SIZE)
    comm.Allgatherv(x[:4], [[y, bare(y), device(y)][RANK % 3], [4] * SIZE])  # it ends


def test_programs_of_the_host_do_not_ask(comm, monkeypatch):
    """Nor those whose MPI moves device memory itself, or that have no path for it; nor does a single rank."""
    alone = gdcomm.Communicator(MPI.COMM_SELF)
    assert alone._channel is not None
    assert alone._limits is NEVER
    every = {name: (values(4), values(4 * SIZE)) for name in ("Alltoallv", "Gatherv", "Allgather")}
    assert all(asks(comm, name, arguments) for name, arguments in every.items())
    monkeypatch.setenv("GDCOMM_MPI_DEVICE_OPS", "p2p,move")
    with gdcomm.Communicator(WORLD.Dup()) as able:
        assert not any(asks(able, name, arguments) for name, arguments in every.items())
        assert asks(able, "Scan", every["Allgather"])
    with gdcomm.Communicator(WORLD.Dup(), path="host") as host:
        assert host._limits is NEVER
    monkeypatch.setattr(devices, "possible", lambda: False)
    with gdcomm.Communicator(WORLD.Dup()) as host:
        assert host._limits is NEVER
        assert not any(asks(host, name, arguments) for name, arguments in every.items())


def test_small_messages_of_unknown_size_are_left_to_mpi(monkeypatch, ran):
    """The most bytes that any rank knows of decide."""
    monkeypatch.setattr(collectives, "SMALLEST", 8 * 10)
    comm = gdcomm.Communicator(path="staged")
    for count in (9, 10):
        counts, none = [0] * (SIZE - 1) + [count], [0] * SIZE
        all_of_it = [filled(count), counts] if RANK == 0 else None
        compare(comm, lambda c, x, y: c.Gatherv(x, y), values(counts[RANK]), all_of_it)
        compare(comm, lambda c, x, y: c.Scatterv(x, y), all_of_it, filled(counts[RANK]))
        outgoing, incoming = counts if RANK == 0 else none, counts[::-1] if RANK == SIZE - 1 else none
        compare(comm, lambda c, x, y: c.Alltoallv(x, y), [values(sum(outgoing)), outgoing], [filled(count), incoming])
        assert ran == ([] if count == 9 else ["gatherv", "scatterv", "alltoallv"])


# -- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["recv", "send"])
def test_counts_that_leave_the_array(comm, ran, where):
    """Every rank raises, no buffer is touched, and what comes next is in order."""
    counts = [4] * SIZE
    x, y = device(values(4 * SIZE - (where == "send"))), device(filled(4 * SIZE - (where == "recv")))
    for call in (
        lambda: comm.Alltoallv([x, counts], [y, counts]),
        lambda: comm.Allgatherv([x, 4 if where == "recv" else 4 * SIZE], [y, counts]),
    ):
        with pytest.raises(gdcomm.BufferSpecError, match="reach byte"):
            call()
    assert (read(y) == 77).all()
    assert ran == []
    for _ in range(2):
        compare(comm, lambda c, x, y: c.Allgatherv(x, y), values(4), [filled(4 * SIZE), counts])
    assert ran[-1:] == ["allgather"]


@pytest.mark.parametrize("name", ["Alltoallv", "Allgatherv", "Gatherv"])
@pytest.mark.parametrize("fault", ["readonly", "reach", "counts", "negative"])
def test_a_rank_may_repeat_what_it_got_wrong(comm, ran, name, fault):
    """Other ranks wait: for its answer where the fault is seen before, in MPI's collective where it is seen after.

    MPI itself refuses a negative count before it sends anything.
    """
    if fault == "negative" and name == "Allgatherv":
        pytest.skip("Open MPI's Allgatherv finds it out, and goes on")
    counts, root = [4] * SIZE, [SIZE - 1] if name == "Gatherv" else []
    x, y = device(values(4 * SIZE)), device(filled(4 * SIZE))
    send, recv = [x, counts if name == "Alltoallv" else 4], [y, counts]
    if RANK == SIZE - 1:
        wrong = {
            "readonly": [y.readonly(), counts],
            "reach": [device(filled(4 * SIZE - 1)), counts],
            "counts": [y, counts[1:]],
            "negative": [y, [-1, *counts[1:]]],
        }[fault]
        with pytest.raises(MPI.Exception if fault == "negative" else ValueError):
            getattr(comm, name)(send, wrong, *root)
        assert (read(y) == 77).all()
    getattr(comm, name)(send, recv, *root)
    right = filled(4 * SIZE)
    getattr(WORLD, name)([values(4 * SIZE), send[1]], [right, counts], *root)
    assert np.array_equal(read(y), right)
    assert len(ran) == (fault == "readonly")
    getattr(comm, name)(send, recv, *root)
    assert len(ran) == 1 + (fault == "readonly")


def test_receive_counts_that_do_not_add_up(comm, ran):
    x, y = device(values(4 * SIZE + 1)), device(filled(4))
    with pytest.raises(ValueError, match=f"recvbufs have {4 * SIZE} in all"):
        comm.Reduce_scatter(x, y)
    with pytest.raises(ValueError, match=f"sum.counts. {4 * SIZE}"):  # mpi4py's
        comm.Reduce_scatter(x, y, [4] * SIZE)
    with pytest.raises((ValueError, TypeError)):
        comm.Reduce_scatter(x, y, 4)
    assert (read(y) == 77).all()
    comm.Bcast(x)
    assert ran == ["bcast"]


@pytest.mark.parametrize("root", [SIZE, -1])
def test_a_root_that_is_no_rank(comm, ran, root):
    x, y = device(values(4)), device(filled(4 * SIZE))
    for call in (lambda: comm.Bcast(x, root), lambda: comm.Gather(x, y, root), lambda: comm.Scatterv([y, 4], x, root)):
        with pytest.raises(MPI.Exception):
            call()
    assert ran == []
    comm.Scan(x, x)
    assert ran == ["scan"]


# -- the device ----------------------------------------------------------------------------------


@pytest.mark.parametrize("overwritten", [False, True])
@pytest.mark.parametrize("name", OPERATIONS)
def test_two_streams_are_in_order(comm, ran, name, overwritten):
    """What is queued on the sent array's stream before the call is sent; what is queued there after it is not."""
    call, send, recv = example(name, 0)
    right = on(np.copy, recv)
    call(WORLD, send, right)
    sending, receiving = DEVICE.Stream(), DEVICE.Stream()

    def late(data):
        array = OnStream(DEVICE.array(filled(len(data)), sending), sending)
        DEVICE.launch(sending, lambda view: np.copyto(view, data), array.array)
        return array

    x, y = on(late, send), on(lambda data: OnStream(DEVICE.array(data, receiving), receiving), recv)
    call(comm, x, y)
    assert len(ran) == 1
    if overwritten and x is not None and y is not None:  # else there is no other stream to wait for
        array = (x[0] if isinstance(x, list) else x).array
        DEVICE.launch(sending, lambda view: view.fill(-1), array)
        sending.synchronize()
    if y is not None:
        array = (y[0] if isinstance(y, list) else y).array
        assert np.array_equal(DEVICE.asnumpy(array, receiving), right[0] if isinstance(right, list) else right)


@pytest.mark.parametrize("fewest", [1, 100])
def test_many_short_copies_are_one_kernel(comm, ran, monkeypatch, fewest):
    monkeypatch.setattr(links, "_FEWEST", fewest)
    monkeypatch.setattr(links, "_LONG", 9 * 8)
    counts = [2 + 9 * (rank % 2) for rank in range(SIZE)]  # of these, the long ones are copied one by one
    displs = [12 * (SIZE - rank) for rank in range(SIZE)]
    batches = DEVICE.stats.get("batches", 0)
    spec = [filled(12 * SIZE + 12), counts, displs, MPI.DOUBLE]
    compare(comm, lambda c, x, y: c.Allgatherv(x, y), values(counts[RANK]), spec)
    assert ran == ["allgather"]
    assert (DEVICE.stats.get("batches", 0) > batches) == (fewest == 1)


def test_what_is_reduced_into_has_been_sent_before(comm):
    """Each rank sends the vector that it reduces into: no chunk may be written before it has left."""
    count = (5 << 20) // 8 + 3  # chunks on a stream of their own
    for _ in range(4):
        for delay in range(SIZE):
            x, y = device(values(count)), DEVICE.empty(count, "<f8")
            if delay == RANK:
                time.sleep(0.02)  # what the others send is there first
            comm.Allreduce(x, y)
            np.testing.assert_array_equal(DEVICE.asnumpy(y), sum(values(count, rank) for rank in range(SIZE)))
