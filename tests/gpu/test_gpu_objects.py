"""Device arrays of every library inside Python objects. Run by pytest, alone or under mpirun (1-4 ranks)."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from gpu import cupy, slow
from mpi4py import MPI

import gdcomm
from gdcomm import devices, objects
from gdcomm.memory.pinned import pool_of

pytestmark = pytest.mark.gpu


@pytest.fixture
def comm():
    before = pool_of(devices.cuda_device()).stats()["leased"]
    yield gdcomm.Communicator()
    gc.collect()
    assert pool_of(devices.cuda_device()).stats()["leased"] == before
    MPI.COMM_WORLD.Barrier()


@pytest.fixture
def copies(monkeypatch):
    """Arrays that were copied to the host by gdcomm."""
    seen = []
    to_host = type(devices.cuda_device()).to_host

    def counted(self, dst, src, offset=0):
        seen.append(src.nbytes)
        return to_host(self, dst, src, offset)

    monkeypatch.setattr(type(devices.cuda_device()), "to_host", counted)
    return seen


def values(rank, shape, dtype="d"):
    return (np.arange(np.prod(shape, dtype=int)) * (rank + 3) % 11 + rank).astype(dtype).reshape(shape)


def exchange(comm, obj):
    """Send to the next rank; the object of the rank before."""
    return comm.sendrecv(obj, (comm.rank + 1) % comm.size, source=(comm.rank - 1) % comm.size)


@pytest.mark.parametrize("dtype", ["?", "i1", "u8", "e", "f", "d", "F", "D"])
@pytest.mark.parametrize("n", [0, 1, 1000, 300001])
def test_cupy_dtypes(comm, copies, dtype, n):
    got = exchange(comm, {"x": cupy.asarray(values(comm.rank, n, dtype))})["x"]
    assert type(got) is cupy.ndarray and got.dtype == dtype
    assert len(copies) == (1 if n else 0)
    np.testing.assert_array_equal(got.get(), values((comm.rank - 1) % comm.size, n, dtype))


def test_cupy_orders_and_views(comm, copies):
    def views(host, library):
        whole = library.asarray(host)
        return [whole, whole.T, whole[:, ::2, 1], whole[::-1, :, ::-2], whole[1, 2, 3:4].reshape(()), whole[:, 2:2]]

    left = (comm.rank - 1) % comm.size
    sent = views(values(comm.rank, (3, 4, 5)), cupy)
    got = exchange(comm, [sent, sent[0]])
    assert len(copies) == len(sent) - 1
    assert got[1] is got[0][0]
    for array, host in zip(got[0], views(values(left, (3, 4, 5)), np), strict=True):
        np.testing.assert_array_equal(array.get(), host)
    assert got[0][1].flags.f_contiguous and got[0][2].flags.c_contiguous


def test_every_method_moves_nested_objects(comm, copies):
    def obj(rank):
        x, y = cupy.asarray(values(rank, 50)), cupy.asarray(values(rank, 7, "i4"))
        return {"a": [x, values(rank, 5)], "b": (y, rank)}

    def check(got, rank):
        np.testing.assert_array_equal(got["a"][0].get(), values(rank, 50))
        np.testing.assert_array_equal(got["a"][1], values(rank, 5))
        np.testing.assert_array_equal(got["b"][0].get(), values(rank, 7, "i4"))
        assert got["b"][1] == rank

    size, rank = comm.size, comm.rank
    for root in range(size):
        check(comm.bcast(obj(root) if rank == root else None, root), root)
        for r, item in enumerate(comm.gather(obj(rank), root) or []):
            check(item, r)
        check(comm.scatter([obj(root + q) for q in range(size)] if rank == root else None, root), root + rank)
    for r, item in enumerate(comm.allgather(obj(rank))):
        check(item, r)
    for r, item in enumerate(comm.alltoall([obj(rank + q) for q in range(size)])):
        check(item, r + rank)
    request = comm.isend(obj(rank), (rank + 1) % size, 4)
    check(comm.mprobe((rank - 1) % size, 4).recv(), (rank - 1) % size)
    request.wait()
    request = comm.isend(obj(rank), (rank + 1) % size, 5)
    check(MPI.COMM_WORLD.recv(source=(rank - 1) % size, tag=5), (rank - 1) % size)
    request.wait()
    objs = 1 + size + size + 1 + size + 2  # bcast and scatter copy at the root only
    assert len(copies) == 2 * objs


def test_work_before_is_seen_and_work_after_is_not(comm):
    left = (comm.rank - 1) % comm.size
    for stream in (cupy.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)):
        with stream:
            x = cupy.zeros(100000)
            keep = slow()
            x += cupy.asarray(values(comm.rank, 100000))
            request = comm.isend([x], (comm.rank + 1) % comm.size)
            x *= 0
            (got,) = comm.recv(source=left)
            doubled = got * 2
            request.wait()
        stream.synchronize()
        np.testing.assert_array_equal(doubled.get(), 2 * values(left, 100000))
        del keep


def test_subclasses_travel_as_cupy_does_it(comm, copies):
    got = exchange(comm, cupy.asarray(values(comm.rank, 9)).view(Own))
    assert not copies
    np.testing.assert_array_equal(cupy.asnumpy(got), values((comm.rank - 1) % comm.size, 9))


def test_torch(comm, copies):
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    left = (comm.rank - 1) % comm.size
    for dtype in ("bool", "uint8", "int64", "float16", "float32", "complex64"):
        got = exchange(comm, [torch.as_tensor(values(comm.rank, (3, 4), dtype), device="cuda")])[0]
        assert type(got) is torch.Tensor and got.is_cuda and got.dtype is getattr(torch, dtype)
        np.testing.assert_array_equal(got.cpu().numpy(), values(left, (3, 4), dtype))
    assert len(copies) == 6
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.as_tensor(values(comm.rank, (300, 400)), device="cuda")
        got = exchange(comm, (x.t(), x[::2, 1], x.sum(), x[:0]))
        total = got[0] + 1
    stream.synchronize()
    host = values(left, (300, 400))
    assert got[0].stride() == (1, 400) and len(copies) == 9
    np.testing.assert_array_equal(total.cpu().numpy(), host.T + 1)
    np.testing.assert_array_equal(got[1].cpu().numpy(), host[::2, 1])
    assert got[2].item() == host.sum() and got[3].shape == (0, 400)
    cpu, grad = exchange(comm, (torch.ones(3) * comm.rank, torch.full((3,), 2.0, device="cuda", requires_grad=True)))
    assert (cpu == left).all() and grad.requires_grad and (grad == 2).all()  # torch's own pickling
    z = torch.as_tensor(values(comm.rank, 5, "F") * 1j, device="cuda")
    got = exchange(comm, z.conj()).resolve_conj()  # a lazy view: not in memory as it reads
    np.testing.assert_array_equal(got.cpu().numpy(), values(left, 5, "F") * -1j)


def test_torch_bfloat16_and_modules(comm, copies):
    pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes: pip install ml_dtypes")
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    left = (comm.rank - 1) % comm.size
    got = exchange(comm, torch.as_tensor(values(comm.rank, 100), device="cuda").to(torch.bfloat16))
    assert got.dtype is torch.bfloat16
    np.testing.assert_array_equal(got.float().cpu().numpy(), values(left, 100))
    layer = torch.nn.Linear(3, 2).cuda()
    with torch.no_grad():
        layer.weight.copy_(torch.as_tensor(values(comm.rank, (2, 3))))
    got = exchange(comm, layer)
    assert isinstance(got.weight, torch.nn.Parameter) and got.weight.requires_grad
    np.testing.assert_array_equal(got.weight.detach().cpu().numpy(), values(left, (2, 3)))
    state = exchange(comm, layer.state_dict())
    np.testing.assert_array_equal(state["weight"].cpu().numpy(), values(left, (2, 3)))


def test_numba(comm, copies):
    numba_cuda = pytest.importorskip("numba.cuda", reason="needs Numba")
    host = np.asfortranarray(values(comm.rank, (4, 6)))
    got = exchange(comm, [numba_cuda.to_device(host), numba_cuda.to_device(values(comm.rank, 10, "i4"))])
    left = (comm.rank - 1) % comm.size
    assert len(copies) == 2 and type(got[0]).__name__ == "DeviceNDArray"
    np.testing.assert_array_equal(got[0].copy_to_host(), values(left, (4, 6)))
    np.testing.assert_array_equal(got[1].copy_to_host(), values(left, 10, "i4"))
    assert got[0].is_f_contiguous()


def test_jax(comm, copies):
    jax = pytest.importorskip("jax", reason="needs JAX")
    left = (comm.rank - 1) % comm.size
    sent = [jax.numpy.asarray(values(comm.rank, (3, 5), dtype)) for dtype in ("f", "i4", "?")]
    got = exchange(comm, [*sent, jax.numpy.zeros((0, 2))])
    for array, dtype in zip(got, ("f", "i4", "?"), strict=False):
        assert isinstance(array, jax.Array) and array.devices() == sent[0].devices()
        np.testing.assert_array_equal(np.asarray(array + 0), values(left, (3, 5), dtype))
    assert got[3].shape == (0, 2)
    if sent[0].devices().pop().platform != "cpu":
        assert len(copies) == 3


def test_an_array_of_another_kind_keeps_its_class(comm, copies):
    got = exchange(comm, Foreign(cupy.asarray(values(comm.rank, 20))))
    assert type(got) is Foreign and len(copies) == 1
    np.testing.assert_array_equal(got.inner.get(), values((comm.rank - 1) % comm.size, 20))


class Own(cupy.ndarray):
    """An array class of the user's."""


class Foreign:
    """Shows the memory of an array that it holds."""

    def __init__(self, inner):
        self.inner = inner

    @property
    def __cuda_array_interface__(self):
        return self.inner.__cuda_array_interface__


def test_host_objects_stay_as_they_are():
    for obj in ("text", 1, None, values(1, 5)):
        assert objects.pack(obj) is obj
