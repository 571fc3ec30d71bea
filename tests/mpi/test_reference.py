"""Every collective and point-to-point method against NumPy, over kinds of arrays, types, ops, roots and counts."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mpi4py import MPI

import gdcomm

MOVES = ["?", "i1", "u2", "i4", "u8", "e", "f", "d", "g", "F", "D", ml_dtypes.bfloat16, "V7",
         np.dtype([("a", "i4"), ("b", "f8")]), "M8[s]"]  # fmt: skip
CHECK = settings(max_examples=12, deadline=None, derandomize=True, database=None,
                 suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip


def values(rank, shape, dtype):
    dtype = np.dtype(dtype)
    count = int(np.prod(shape))
    raw = (np.arange(count) * 7 + rank * 3) % 5 + 1
    if dtype.kind in "VM" and dtype.name != "bfloat16":
        wide = ((np.arange(count * dtype.itemsize) * 7 + rank * 3) % 251).astype("u1")
        return wide.view(dtype).reshape(shape)
    return (raw % 2 == 0).reshape(shape) if dtype.kind == "b" else raw.astype(dtype).reshape(shape)


def same(a, b):
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    if a.dtype.char == "g":  # six of its sixteen bytes mean nothing
        np.testing.assert_array_equal(a, b)
    else:
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("dtype", MOVES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 7])
def test_every_dtype_moves(kind, comm, dtype, count):
    n, rank = comm.size, comm.rank
    x, y = kind.make(values(rank, count, dtype)), kind.make(values(99, (n, count), dtype))
    every = np.stack([values(r, count, dtype) for r in range(n)])
    comm.Allgather(x, y)
    same(kind.read(y), every)
    for root in range(n):
        b = kind.make(values(root if rank == root else 50, count, dtype))
        comm.Bcast(b, root=root)
        same(kind.read(b), values(root, count, dtype))
        g = kind.make(values(99, (n, count), dtype)) if rank == root else None
        comm.Gather(x, g, root=root)
        if rank == root:
            same(kind.read(g), every)
        s = kind.make(values(99, count, dtype))
        comm.Scatter(g, s, root=root)
        same(kind.read(s), values(rank, count, dtype))
    right, left = (rank + 1) % n, (rank - 1) % n
    z = kind.make(values(99, count, dtype))
    comm.Sendrecv(x, right, 3, z, left, 3)
    same(kind.read(z), values(left, count, dtype))
    request = comm.Irecv(z, left, 4)
    comm.Isend(x, right, 4).Wait()
    request.Wait()
    same(kind.read(z), values(left, count, dtype))


OPS = {
    "SUM": np.add, "PROD": np.multiply, "MAX": np.maximum, "MIN": np.minimum, "LAND": np.logical_and,
    "LOR": np.logical_or, "LXOR": np.logical_xor, "BAND": np.bitwise_and, "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}  # fmt: skip
BOOL = {"SUM": np.logical_or, "MAX": np.logical_or, "PROD": np.logical_and, "MIN": np.logical_and}


def allowed(op, dtype):
    kind = np.dtype(dtype).kind
    if op.startswith("B"):
        return kind in "biu"
    if kind == "c":
        return op in ("SUM", "PROD")
    return not (op.startswith("L") and np.dtype(dtype).char in "fdg")


def reduced(op, dtype, arrays):
    dtype = np.dtype(dtype)
    ufunc = BOOL.get(op, OPS[op]) if dtype.kind == "b" else OPS[op]
    total = arrays[0].astype(np.float64) if dtype.itemsize == 2 and dtype.kind in "fV" else arrays[0]
    for other in arrays[1:]:
        total = ufunc(total, other.astype(total.dtype) if total.dtype.kind == "f" else other)
        total = total.astype(dtype) if total.dtype.kind == "b" else total
    return total.astype(dtype)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["?", "i1", "u8", "i4", "e", "f", "d", "D", ml_dtypes.bfloat16], ids=str)
def test_reductions_equal_numpy(kind, comm, op, dtype):
    if not allowed(op, dtype):
        return
    n, rank, mpi_op = comm.size, comm.rank, getattr(MPI, op)
    for count in (0, 1, 6):
        every = [values(r, count, dtype) for r in range(n)]
        x, y = kind.make(every[rank]), kind.make(values(99, count, dtype))
        comm.Allreduce(x, y, op=mpi_op)
        same(kind.read(y), reduced(op, dtype, every))
        comm.Iallreduce(x, y, op=mpi_op).Wait()
        same(kind.read(y), reduced(op, dtype, every))
        z = kind.make(every[rank])
        comm.Allreduce(MPI.IN_PLACE, z, op=mpi_op)
        same(kind.read(z), reduced(op, dtype, every))
        comm.Scan(x, y, op=mpi_op)
        same(kind.read(y), reduced(op, dtype, every[: rank + 1]))
        untouched = values(99, count, dtype)
        e = kind.make(untouched)
        comm.Exscan(x, e, op=mpi_op)
        same(kind.read(e), reduced(op, dtype, every[:rank]) if rank else untouched)
        for root in range(n):
            comm.Reduce(x, y if rank == root else None, op=mpi_op, root=root)
            if rank == root:
                same(kind.read(y), reduced(op, dtype, every))
        blocks = [values(r, n * count, dtype) for r in range(n)]
        w = kind.make(values(99, count, dtype))
        comm.Reduce_scatter_block(kind.make(blocks[rank]), w, op=mpi_op)
        same(kind.read(w), reduced(op, dtype, blocks)[rank * count : (rank + 1) * count])


def test_user_operator_and_maxloc(kind, comm):
    n, rank = comm.size, comm.rank

    def left(a, b, datatype):  # not commutative: the lowest rank's value stays
        np.frombuffer(b, "d")[:] = np.frombuffer(a, "d")

    op = MPI.Op.Create(left, commute=False)
    y = kind.make(np.zeros(3))
    comm.Allreduce(kind.make(np.full(3, rank + 1.0)), y, op=op)
    assert (kind.read(y) == 1).all()
    op.Free()
    pair = np.zeros(2, [("value", "f4"), ("index", "i4")])
    pair["value"], pair["index"] = [(rank * 2) % n, -rank], rank
    out = kind.make(np.zeros_like(pair))
    comm.Allreduce([kind.make(pair), MPI.FLOAT_INT], [out, MPI.FLOAT_INT], op=MPI.MAXLOC)
    every = [((r * 2) % n, -r, r) for r in range(n)]
    best = max(every, key=lambda item: (item[0], -item[2]))
    assert kind.read(out)["index"].tolist() == [best[2], 0]


@CHECK
@given(data=st.data())
def test_ragged_collectives(kind, comm, data):
    n, rank = comm.size, comm.rank
    counts = data.draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))
    gap = data.draw(st.integers(0, 2))
    displs = [sum(counts[:r]) + gap * r for r in range(n)]
    total = sum(counts) + gap * n + 1
    x, y = kind.make(values(rank, counts[rank], "i4")), kind.make(np.full(total, -1, "i4"))
    comm.Allgatherv(x, [y, (counts, displs), MPI.INT32_T])
    expected = np.full(total, -1, "i4")
    for r in range(n):
        expected[displs[r] : displs[r] + counts[r]] = values(r, counts[r], "i4")
    same(kind.read(y), expected)
    root = data.draw(st.integers(0, n - 1))
    y = kind.make(np.full(total, -1, "i4"))
    comm.Gatherv(x, [y, (counts, displs), MPI.INT32_T] if rank == root else None, root=root)
    same(kind.read(y), expected if rank == root else np.full(total, -1, "i4"))
    back = kind.make(np.full(counts[rank] + 1, -1, "i4"))
    comm.Scatterv([y, (counts, displs), MPI.INT32_T], [back, counts[rank]], root=root)
    same(kind.read(back), np.append(values(rank, counts[rank], "i4"), np.int32(-1)))
    matrix = [[(3 * a + 5 * b + gap) % 4 for b in range(n)] for a in range(n)]
    send = [values(rank * n + q, matrix[rank][q], "f") for q in range(n)]
    got = kind.make(np.full(sum(matrix[q][rank] for q in range(n)), -1, "f"))
    comm.Alltoallv([kind.make(np.concatenate(send)), matrix[rank]], [got, [matrix[q][rank] for q in range(n)]])
    same(kind.read(got), np.concatenate([values(q * n + rank, matrix[q][rank], "f") for q in range(n)]))


@CHECK
@given(shape=st.lists(st.integers(1, 4), min_size=2, max_size=3), order=st.sampled_from("CF"))
def test_pain_49_fortran_order_keeps_its_logical_content(kind, comm, shape, order):
    content = values(0, tuple(shape), "d")
    x = kind.make(content if comm.rank == 0 else np.zeros(shape), order="F" if comm.rank == 0 else order)
    comm.Bcast(x, 0)
    np.testing.assert_array_equal(kind.read(x), content)
    y = kind.make(np.zeros(shape), order=order)
    comm.Allreduce(x, y)
    np.testing.assert_array_equal(kind.read(y), content * comm.size)


def test_pain_45_strided_device_arrays_are_packed_and_host_ones_refused(kind, comm):
    whole = kind.make(np.arange(24.0).reshape(4, 6) + comm.rank)
    left = (comm.rank - 1) % comm.size
    if kind.name == "host":
        with pytest.raises((BufferError, ValueError)):
            comm.Send(whole[:, 1], comm.rank)
        return
    target = kind.make(np.full((4, 6), -1.0))
    comm.Sendrecv(whole[:, 1], (comm.rank + 1) % comm.size, 0, target[::2, ::3], left, 0)
    expected = np.full((4, 6), -1.0)
    expected[::2, ::3] = (np.arange(24.0).reshape(4, 6)[:, 1] + left).reshape(2, 2)
    np.testing.assert_array_equal(kind.read(target), expected)


def test_pain_44_axes_of_length_one_do_not_matter(kind, comm):
    x = kind.make(values(comm.rank, (1, 3, 2), "f"))
    y = kind.make(np.zeros((comm.size, 3, 2), "f"))
    comm.Allgather(x, y)
    same(kind.read(y), np.concatenate([values(r, (1, 3, 2), "f") for r in range(comm.size)]))


def test_explicit_counts_and_short_messages(kind, comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    x, y = kind.make(np.arange(10.0) + comm.rank), kind.make(np.full(10, -1.0))
    status = MPI.Status()
    comm.Sendrecv([x, 4, MPI.DOUBLE], right, 0, y, left, 0, status)
    assert status.Get_count(MPI.DOUBLE) == 4
    np.testing.assert_array_equal(kind.read(y), [*(np.arange(4.0) + left), *[-1] * 6])
    request = comm.Irecv([y, 6], left, 1)
    comm.Send([x, 2, MPI.DOUBLE], right, 1)
    request.Wait(status)
    assert status.Get_count(MPI.DOUBLE) == 2
    np.testing.assert_array_equal(kind.read(y), [left, left + 1, *(np.arange(2.0, 4) + left), *[-1] * 6])


def test_neighbours_of_a_grid_with_a_rim(kind, comm):
    cart = comm.Create_cart([comm.size], [False])
    assert isinstance(cart, gdcomm.CartCommunicator)
    y = kind.make(np.full(2, -1.0))
    cart.Neighbor_allgather(kind.make(np.array([cart.rank + 1.0])), y)
    n = comm.size
    assert kind.read(y).tolist() == [cart.rank or -1, cart.rank + 2 if cart.rank + 1 < n else -1]
    cart.Free()


def test_persistent_requests(kind, comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    x, y = kind.make(np.zeros(5)), kind.make(np.zeros(5))
    send, recv = comm.Send_init(x, right), comm.Recv_init(y, left)
    for turn in range(3):
        gdcomm.Prequest.Startall([recv, send])
        MPI.Request.Waitall([recv, send])
        comm.Bcast(x, 0) if turn == 0 else None
    send.Free()
    recv.Free()
    assert (kind.read(y) == 0).all()


@pytest.mark.parametrize("dtype", ["d", "e", "V3", "M8[s]", [("a", "i2"), ("b", "d")]])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("form", ["counts", "counts and displacements"])
def test_explicit_counts_hide_neither_order_nor_dtype(kind, comm, dtype, order, form):
    """Rank r gets r + 1 elements of a two-dimensional array, in logical order."""
    counts = [rank + 1 for rank in range(comm.size)]
    starts = [sum(counts[:rank]) for rank in range(comm.size)]
    total = sum(counts)
    values = (np.arange(2 * total) % 100 + 1).astype("u1").astype("d")
    values = values.astype(dtype) if dtype != "V3" else np.arange(6 * total, dtype="u1").view("V3")
    values = values.reshape(2, total)
    mine = kind.make(np.zeros(counts[comm.rank], values.dtype))
    rest = [counts] if form == "counts" else [(counts, starts)]
    comm.Scatterv([kind.make(values, order), *rest] if comm.rank == 0 else None, mine, 0)
    start = starts[comm.rank]
    assert kind.read(mine).tobytes() == values.ravel()[start : start + counts[comm.rank]].tobytes()
    back = kind.make(np.zeros((2, total), values.dtype), order)
    comm.Gatherv(mine, [back, *rest] if comm.rank == 0 else None, 0)
    if comm.rank == 0:
        result = kind.read(back)
        assert result.ravel()[:total].tobytes() == values.ravel()[:total].tobytes()
        assert not any(result.ravel()[total:].tobytes())
