"""Device arrays of every library through a Communicator. Run by pytest, alone or under mpirun (1-4 ranks)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from gpu import cupy, slow
from mpi4py import MPI

import gdcomm

pytestmark = pytest.mark.gpu

PATHS = ["staged", "auto"]
DTYPES = ["?", "i1", "u2", "i4", "u8", "e", "f", "d", "F", "D"]


@pytest.fixture(params=PATHS)
def comm(request):
    made = gdcomm.Communicator(path=request.param)
    yield made
    MPI.COMM_WORLD.Barrier()


def values(rank, n, dtype):
    base = np.arange(n) * (rank + 1) % 7 + rank
    return (base % 2 == 0) if np.dtype(dtype) == bool else base.astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 5, 1000, 300001])
def test_allreduce_and_moves(comm, dtype, n):
    size, rank = comm.size, comm.rank
    x, y = cupy.asarray(values(rank, n, dtype)), cupy.empty(n, dtype)
    comm.Allreduce(x, y)
    everyone = [values(r, n, dtype) for r in range(size)]
    expected = np.any(everyone, axis=0) if dtype == "?" else np.sum(everyone, axis=0, dtype=dtype)
    np.testing.assert_allclose(y.get(), expected, rtol=1e-2 if dtype == "e" else 1e-5)
    z = cupy.empty((size, n), dtype)
    comm.Allgather(x, z)
    np.testing.assert_array_equal(z.get(), np.array(everyone).reshape(size, n))
    for root in range(size):
        b = cupy.asarray(values(root, n, dtype)) if rank == root else cupy.empty(n, dtype)
        comm.Bcast(b, root)
        np.testing.assert_array_equal(b.get(), values(root, n, dtype))
    a, w = cupy.asarray(np.stack([values(rank + q, n, dtype) for q in range(size)])), cupy.empty((size, n), dtype)
    comm.Alltoall(a, w)
    np.testing.assert_array_equal(w.get(), np.stack([values(q + rank, n, dtype) for q in range(size)]))
    g = comm.Iallreduce(MPI.IN_PLACE, x) if dtype != "?" else MPI.REQUEST_NULL
    MPI.Request.Waitall([g])
    if dtype != "?":
        np.testing.assert_allclose(x.get(), expected, rtol=1e-2 if dtype == "e" else 1e-5)


def test_kernel_before_the_call_is_seen_and_after_it_sees(comm):
    peer, origin = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for stream in (cupy.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)):
        with stream:
            x, y = cupy.zeros(100000), cupy.full(100000, -1.0)
            slow()
            x += comm.rank + 1
            request = comm.Irecv(y, origin)
            comm.Send(x, peer)
            x *= 0  # queued after the send: must not reach the receiver
            request.Wait()
            total = y * 2
        stream.synchronize()
        assert (total.get() == 2 * (origin + 1)).all()


def test_named_stream_is_used(comm):
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x = cupy.zeros(1000)
        slow()
        x += 3
    y = cupy.empty(1000)
    cupy.cuda.get_current_stream().synchronize()
    comm.Allreduce(x, y, stream=stream)
    stream.synchronize()
    assert (y.get() == 3 * comm.size).all()


def test_strided_and_fortran_arrays_keep_their_logical_content(comm):
    host = np.arange(60.0).reshape(3, 4, 5) + comm.rank
    whole = cupy.asarray(host)
    for view, expected in (
        (whole[:, ::2, 1], host[:, ::2, 1]),
        (whole[::-1, :, ::-2], host[::-1, :, ::-2]),
        (cupy.asfortranarray(whole), host),
        (whole.T, host.T),
    ):
        got = cupy.zeros(view.shape)
        comm.Sendrecv(view, comm.rank, 0, got, comm.rank, 0)
        np.testing.assert_array_equal(got.get(), expected)
        target = cupy.full((3, 4, 5), -1.0)
        comm.Sendrecv(cupy.ascontiguousarray(target[:, ::2, 1] * 0 + 7), comm.rank, 0, target[:, ::2, 1], comm.rank, 0)
        check = np.full((3, 4, 5), -1.0)
        check[:, ::2, 1] = 7
        np.testing.assert_array_equal(target.get(), check)


def test_short_message_leaves_the_rest_alone(comm):
    y = cupy.full(10, -1.0)
    status = MPI.Status()
    comm.Sendrecv(cupy.arange(4.0), comm.rank, 5, y, comm.rank, 5, status)
    assert status.Get_count(MPI.DOUBLE) == 4
    np.testing.assert_array_equal(y.get(), [0, 1, 2, 3, -1, -1, -1, -1, -1, -1])


def test_host_and_device_ends_meet(comm):
    x = cupy.arange(50000.0) + comm.rank
    host = np.empty(50000)
    comm.Sendrecv(x, (comm.rank + 1) % comm.size, 0, host, (comm.rank - 1) % comm.size, 0)
    np.testing.assert_array_equal(host, np.arange(50000.0) + (comm.rank - 1) % comm.size)
    back = cupy.empty(50000)
    comm.Sendrecv(host, (comm.rank - 1) % comm.size, 0, back, (comm.rank + 1) % comm.size, 0)
    np.testing.assert_array_equal(back.get(), np.arange(50000.0) + comm.rank)


def test_bfloat16(comm):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes: pip install ml_dtypes")
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    x = torch.ones(1000, dtype=torch.bfloat16, device="cuda") * (comm.rank + 1)
    y = torch.empty_like(x)
    comm.Allreduce(x, y)
    assert (y.float().cpu().numpy() == comm.size * (comm.size + 1) / 2).all()
    del ml_dtypes


def test_torch(comm):
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.full((300, 400), float(comm.rank + 1), device="cuda")
        y = torch.empty(400, 300, device="cuda").t()
        comm.Allreduce(x, y)
        z = y + 1
    stream.synchronize()
    assert (z.cpu().numpy() == comm.size * (comm.size + 1) / 2 + 1).all()
    with pytest.raises(gdcomm.BufferSpecError, match="detach"):
        comm.Bcast(torch.ones(3, device="cuda", requires_grad=True))
    cpu = torch.ones(5)
    comm.Allreduce(MPI.IN_PLACE, cpu)
    assert (cpu == comm.size).all()


def test_jax_sends_and_refuses_to_be_written(comm):
    jax = pytest.importorskip("jax", reason="needs JAX")
    x = jax.numpy.arange(100.0) + comm.rank
    y = cupy.empty(100, x.dtype)
    comm.Allreduce(x, y)
    np.testing.assert_allclose(y.get(), sum(np.arange(100.0) + r for r in range(comm.size)))
    with pytest.raises(gdcomm.BufferSpecError, match="read-only"):
        comm.Recv(x, comm.rank)


def test_numba(comm):
    numba_cuda = pytest.importorskip("numba.cuda", reason="needs Numba")
    x = numba_cuda.to_device(np.arange(10.0) + comm.rank)
    y = numba_cuda.device_array(10)
    comm.Allreduce(x, y)
    np.testing.assert_allclose(y.copy_to_host(), sum(np.arange(10.0) + r for r in range(comm.size)))


def test_managed_memory(comm):
    with cupy.cuda.using_allocator(cupy.cuda.malloc_managed):
        x = cupy.arange(100.0)
        y = cupy.empty(100)
    comm.Allreduce(x, y)
    np.testing.assert_array_equal(y.get(), np.arange(100.0) * comm.size)


def test_persistent_and_matched(comm):
    x, y = cupy.zeros(1000), cupy.zeros(1000)
    send, recv = comm.Send_init(x, (comm.rank + 1) % comm.size), comm.Recv_init(y, (comm.rank - 1) % comm.size)
    for turn in range(3):
        x += 1
        gdcomm.Prequest.Startall([recv, send])
        MPI.Request.Waitall([recv, send])
        assert (y.get() == turn + 1).all()
    send.Free()
    recv.Free()
    request = comm.Isend(x, (comm.rank + 1) % comm.size, 4)
    message = comm.Mprobe((comm.rank - 1) % comm.size, 4)
    y *= 0
    message.Recv(y)
    request.Wait()
    assert (y.get() == 3).all()


def test_forced_direct_says_why_it_can_not(monkeypatch):
    monkeypatch.setenv("GDCOMM_MPI_DEVICE_OPS", "none")
    comm = gdcomm.Communicator(path="direct")
    with pytest.raises(gdcomm.NoPathError, match="GDCOMM_MPI_DEVICE_OPS"):
        comm.Allreduce(cupy.ones(3), cupy.ones(3))


def test_a_thread_that_has_not_called_cuda_knows_device_memory():
    from gdcomm import devices

    x = cupy.arange(5)
    cuda = devices.cuda_device()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(cuda.owns, x.data.ptr).result()
        assert not pool.submit(cuda.owns, np.arange(5).ctypes.data).result()


def test_memory_that_cannot_be_page_locked_is_staged_all_the_same(monkeypatch):
    from cupy.cuda import runtime

    from gdcomm import devices
    from gdcomm.memory.pinned import pool_of

    def refuse(*_):
        raise runtime.CUDARuntimeError(2)  # cudaErrorMemoryAllocation

    n = 200_003  # goes by MPI's collective, through a mirror
    pool_of(devices.cuda_device()).trim()  # no other test's block fits
    comm = gdcomm.Communicator(path="staged")
    x, y = cupy.arange(n, dtype="f4"), cupy.empty(n, "f4")
    monkeypatch.setattr(runtime, "hostAlloc", refuse)
    monkeypatch.setattr(runtime, "hostRegister", refuse)
    with pytest.warns(RuntimeWarning, match="page-locked"):
        comm.Allreduce(x, y, MPI.MAX)
    assert bool((y == x).all())
