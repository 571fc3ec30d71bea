"""Cases that a newcomer broke once."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

import gdcomm
from gdcomm.errors import BufferSpecError
from gdcomm.operations import BLOCKING, OPERATIONS


@pytest.mark.parametrize("size", [3, 20_000])
@pytest.mark.parametrize("name", ["Bcast", "Ibcast", "Bcast_init"])
def test_a_rank_beside_the_root_keeps_its_array(kind, comm, size, name):
    """Intercommunicator: ranks of the root's group that pass PROC_NULL take no part."""
    if comm.size < 3:
        pytest.skip("run on 3 ranks: two of them in the root's group")
    local = comm.Split(0 if comm.rank else 1, comm.rank)
    inter = local.Create_intercomm(0, comm, 0 if comm.rank else 1, 7)
    x = kind.make(np.full(size, 10.0 + comm.rank))
    root = {0: 0, 1: MPI.ROOT}.get(comm.rank, MPI.PROC_NULL)
    request = getattr(inter, name)(x, root)
    if name == "Bcast_init":
        request.Start()
    if request is not None:
        request.Wait()
    assert (kind.read(x) == (11.0 if comm.rank == 0 else 10.0 + comm.rank)).all()
    if name == "Bcast_init":
        request.Free()
    inter.Free()
    local.Free()


def test_alltoallw_with_mpis_own_types_goes_in_logical_order(kind, comm):
    n = comm.size
    x = kind.make(np.arange(6.0 * n).reshape(2 * n, 3), "F")
    y = kind.make(np.zeros(6 * n))
    spec = ([6] * n, [48 * rank for rank in range(n)])
    request = comm.Ialltoallw([x, spec, [MPI.DOUBLE] * n], [y, spec, [MPI.DOUBLE] * n])
    request.Wait()
    mine = np.arange(6.0 * n)[6 * comm.rank : 6 * comm.rank + 6]
    assert (kind.read(y) == np.tile(mine, n)).all()


@pytest.mark.parametrize(("send", "receive"), [("e", "H"), ("H", "e"), ("M8[s]", "q")])
def test_reductions_between_dtypes_are_refused(kind, comm, send, receive):
    x, y = kind.make(np.ones(2).astype(send)), kind.make(np.zeros(2, receive))
    with pytest.raises(ValueError, match=r"differ|mismatch|cannot map|DLPack"):
        comm.Allreduce(x, y)
    assert not any(kind.read(y).tobytes())


@pytest.mark.parametrize(("dtype", "op"), [("e", MPI.BAND), ("M8[s]", MPI.SUM), ("V3", MPI.SUM), ("S4", MPI.MAX)])
def test_operators_without_a_meaning_are_refused(kind, comm, dtype, op):
    x = kind.make(np.arange(24, dtype="u1").view(dtype))
    with pytest.raises(BufferSpecError, match="has no meaning"):
        comm.Allreduce(MPI.IN_PLACE, x, op)
    assert kind.read(x).tobytes() == bytes(range(24))


@pytest.mark.parametrize("path", ["staged", "direct"])
@pytest.mark.parametrize(
    "rest", [[5], [5, MPI.DOUBLE], [9, MPI.FLOAT], [3, 2, MPI.DOUBLE], [([5],), MPI.DOUBLE], [([2], [3])]]
)
def test_counts_beyond_a_device_array_are_refused(device, path, rest):
    comm = gdcomm.Communicator(MPI.COMM_SELF, path=path)
    x = device.array(np.arange(4.0))
    with pytest.raises((BufferSpecError, ValueError)):
        comm.Alltoallv([x, *rest], [device.zeros(4), *rest])
    if len(rest) < 3 and not isinstance(rest[0], tuple):
        with pytest.raises(BufferSpecError, match="reach byte"):
            comm.Send([x, *rest], 0)
        with pytest.raises(BufferSpecError, match="reach byte"):
            comm.Irecv([x, *rest], 0)


@pytest.mark.parametrize("path", ["staged", "direct"])
def test_an_active_request_is_not_started_again(device, path):
    comm = gdcomm.Communicator(MPI.COMM_SELF, path=path)
    y = device.empty(10)
    request = comm.Recv_init(y, 0)
    for value in (1.0, 2.0):
        request.Start()
        with pytest.raises(MPI.Exception, match="active"):
            request.Start()
        comm.Send(np.full(10, value), 0)
        MPI.Request.Waitall([request])
        assert (device.asnumpy(y) == value).all()
    request.Free()


@pytest.mark.parametrize("dtype", ["e", "M8[s]", "V3", [("a", "i1"), ("b", "f4")]])
@pytest.mark.parametrize("how", ["Recv", "Irecv"])
def test_matched_messages_take_every_dtype(kind, comm, dtype, how):
    values = np.arange(4 * np.dtype(dtype).itemsize, dtype="u1").view(dtype)
    request = comm.Isend(kind.make(values), comm.rank, 5)
    y = kind.make(np.zeros(4, dtype))
    message = comm.Mprobe(comm.rank, 5)
    if how == "Recv":
        message.Recv(y)
    else:
        message.Irecv(y).Wait()
    request.Wait()
    assert kind.read(y).tobytes() == values.tobytes()


def every_form(name):
    """The blocking, nonblocking and persistent method, as far as this mpi4py has them."""
    return [form for form in (name, "I" + name[0].lower() + name[1:], name + "_init") if form in OPERATIONS]


@pytest.mark.parametrize(
    "name", [name for name, found in OPERATIONS.items() if found.group in ("move", "reduce") and found.form == BLOCKING]
)
def test_a_freed_communicator_is_told_as_such(kind, comm, name):
    """Open MPI's allgathers go on with it, as if nothing were wrong, or crash."""
    if name.startswith("Neighbor"):
        comm = comm.Create_cart([comm.size])
    n, found = comm.size, OPERATIONS[name]
    one, many = kind.make(np.arange(4.0)), kind.make(np.arange(4.0 * n))
    for freed in (comm.Dup(), gdcomm.Communicator(MPI.COMM_WORLD.Dup())):
        if name.startswith("Neighbor") and type(freed) is gdcomm.Communicator:
            continue
        freed.Free()
        given = found.complete([])
        for position in found.buffers:
            given[position] = many
        if found.op >= 0:
            given[found.recv] = kind.make(np.zeros(4 * n))
        if name in ("Gather", "Gatherv", "Allgather", "Allgatherv"):
            given[found.send] = one
        elif name in ("Scatter", "Scatterv") or name.startswith("Reduce_scatter"):
            given[found.recv] = one
        elif name.endswith("w"):
            given = [[many, [4] * n, [32 * rank for rank in range(n)], [MPI.DOUBLE] * n]] * 2
        for form in every_form(name):
            with pytest.raises(MPI.Exception, match=f"{form}: the communicator is null"):
                getattr(freed, form)(*given)


def test_structured_elements_with_counts_and_no_datatype(comm):
    kind, size = np.dtype([("a", "i4"), ("b", "f8")]), comm.Get_size()
    x, y = np.zeros(2, kind), np.zeros(2 * size, kind)
    x["a"] = comm.Get_rank()
    comm.Allgatherv(x, [y, [2] * size, [2 * i for i in range(size)], None])
    assert y["a"].tolist() == [rank for rank in range(size) for _ in range(2)]
