"""Device arrays inside Python objects, through the lower-case methods."""

from __future__ import annotations

import gc
import pickle
import threading

import numpy as np
import pytest
from mpi4py import MPI

import gdcomm
from gdcomm import devices, objects
from gdcomm.memory.pinned import pool_of
from gdcomm.testing import EmulatedArray


@pytest.fixture
def comm():
    return gdcomm.Communicator()


@pytest.fixture(autouse=True)
def nothing_stays_leased(device):
    before = pool_of(device).stats()["leased"]
    yield
    gc.collect()
    assert pool_of(device).stats()["leased"] == before


def ring(comm):
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def values(rank, n=30, dtype="d"):
    return (np.arange(n) * (rank + 3) % 11 + 100 * rank).astype(dtype)


class Holder:
    """A class of the user's, with an array in an attribute."""

    def __init__(self, array):
        self.array = array


def nested(device, rank):
    """An object with three device arrays, one of them twice."""
    twice = device.array(values(rank))
    matrix = device.array(values(rank, 12, "i4").reshape(3, 4))
    return {
        "device": [twice, (matrix, [twice])],
        "host": values(rank, 7, "f4"),
        "holder": Holder(device.array(values(rank, 5, "c16"))),
        "plain": [rank, "text", None, 2.5],
    }


ARRAYS = 3  # in `nested`


def check(device, got, rank):
    first, (matrix, (second,)) = got["device"]
    assert first is second
    assert all(type(a) is EmulatedArray for a in (first, matrix, got["holder"].array))
    np.testing.assert_array_equal(device.asnumpy(first), values(rank))
    np.testing.assert_array_equal(device.asnumpy(matrix), values(rank, 12, "i4").reshape(3, 4))
    assert matrix.dtype == "i4"
    np.testing.assert_array_equal(got["host"], values(rank, 7, "f4"))
    assert got["host"].flags.writeable
    np.testing.assert_array_equal(device.asnumpy(got["holder"].array), values(rank, 5, "c16"))
    assert got["plain"] == [rank, "text", None, 2.5]


class copies:
    """Checks how many arrays were copied to the host."""

    def __init__(self, device, arrays):
        self.device, self.arrays = device, arrays

    def __enter__(self):
        self.before = dict(self.device.stats)

    def __exit__(self, kind, *_):
        if kind is None:
            assert self.device.stats["to_host"] - self.before["to_host"] == self.arrays


@pytest.mark.parametrize("name", ["send", "ssend", "bsend", "isend", "issend", "ibsend"])
@pytest.mark.parametrize("way", ["recv", "irecv", "mprobe", "plain"])
def test_every_send_meets_every_receive(comm, device, name, way):
    right, left = ring(comm)
    if "bs" in name:
        MPI.Attach_buffer(MPI.Alloc_mem(1 << 20))
    obj = nested(device, comm.rank)
    sent = []

    def send():
        with copies(device, ARRAYS):
            sent.append(getattr(comm, name)(obj, right, 3))

    blocking = name in ("send", "ssend")
    if blocking:
        receive = comm.irecv(None, left, 3)  # posted before, so that nobody waits for ever
        send()
        got = receive.wait()
    else:
        send()
        if way == "recv":
            status = MPI.Status()
            got = comm.recv(None, left, 3, status)
            assert (status.Get_source(), status.Get_tag()) == (left, 3)
        elif way == "irecv":
            got = comm.irecv(source=left, tag=3).wait()
        elif way == "mprobe":
            got = comm.mprobe(left, 3).recv()
        else:
            got = MPI.COMM_WORLD.recv(source=left, tag=3)
    check(device, got, left)
    if sent[0] is not None:
        assert sent[0].wait() is None
    if "bs" in name:
        MPI.Detach_buffer()


def test_sendrecv(comm, device):
    right, left = ring(comm)
    status = MPI.Status()
    with copies(device, ARRAYS):
        got = comm.sendrecv(nested(device, comm.rank), right, 5, None, left, 5, status)
    check(device, got, left)
    assert status.Get_source() == left
    with copies(device, 0):
        got = comm.sendrecv(nested(device, comm.rank), dest=MPI.PROC_NULL, source=MPI.PROC_NULL)
        assert got is None
        comm.send(device.array(values(1)), MPI.PROC_NULL)


def test_bcast(comm, device):
    for root in range(comm.size):
        with copies(device, ARRAYS if comm.rank == root else 0):
            # What the others give is not looked at.
            got = comm.bcast(nested(device, root if comm.rank == root else 77), root)
        check(device, got, root)
    assert comm.bcast(None) is None


def test_gather_and_allgather(comm, device):
    for root in range(comm.size):
        with copies(device, ARRAYS):
            got = comm.gather(nested(device, comm.rank), root=root)
        assert (got is None) == (comm.rank != root)
        for rank, item in enumerate(got or []):
            check(device, item, rank)
    with copies(device, ARRAYS):
        got = comm.allgather(nested(device, comm.rank))
    for rank, item in enumerate(got):
        check(device, item, rank)


def test_scatter_and_alltoall(comm, device):
    for root in range(comm.size):
        mine = [nested(device, root + q) for q in range(comm.size)] if comm.rank == root else None
        before = device.stats["synchronize"]
        with copies(device, ARRAYS * comm.size if comm.rank == root else 0):
            got = comm.scatter(mine, root)
        assert device.stats["synchronize"] - before <= comm.size
        check(device, got, root + comm.rank)
    with copies(device, ARRAYS * comm.size):
        got = comm.alltoall(tuple(nested(device, comm.rank + q) for q in range(comm.size)))
    for rank, item in enumerate(got):
        check(device, item, rank + comm.rank)
    rows = comm.scatter(device.array(np.arange(3.0 * comm.size).reshape(-1, 3)) if comm.rank == 0 else None)
    np.testing.assert_array_equal(device.asnumpy(rows), np.arange(3.0) + 3 * comm.rank)
    assert comm.alltoall(None) == [None] * comm.size
    with pytest.raises(ValueError, match="items"):
        comm.alltoall([device.array(values(0))] * (comm.size + 1))
    with pytest.raises(TypeError):
        comm.alltoall(5)


def test_neighbours(comm, device):
    right, left = ring(comm)
    made = [comm.Create_cart([comm.size], [True]), comm.Create_dist_graph_adjacent([left], [right])]
    for topology, sources in zip(made, [[left, right], [left]], strict=True):
        with copies(device, ARRAYS):
            got = topology.neighbor_allgather(nested(device, topology.rank))
        for rank, item in zip(sources, got, strict=True):
            check(device, item, rank)
        with copies(device, ARRAYS * len(sources)):
            got = topology.neighbor_alltoall([nested(device, topology.rank) for _ in sources])
        for rank, item in zip(sources, got, strict=True):
            check(device, item, rank)
        topology.Free()


def test_between_groups(comm, device):
    if comm.size == 1:
        with pytest.raises(MPI.Exception):
            comm.Create_intercomm(0, comm, 5)
        return
    low = comm.rank < comm.size // 2
    group = comm.Split(0 if low else 1, comm.rank)
    inter = group.Create_intercomm(0, comm, comm.size // 2 if low else 0)
    for sends in (True, False):
        root = (MPI.ROOT if group.rank == 0 else MPI.PROC_NULL) if low is sends else 0
        with copies(device, ARRAYS if root == MPI.ROOT else 0):
            got = inter.bcast(nested(device, 4), root)
        if root == 0:
            check(device, got, 4)
        with copies(device, ARRAYS if root == 0 else 0):
            got = inter.gather(nested(device, group.rank), root)
        for rank, item in enumerate(got or []):
            check(device, item, rank)
        got = inter.scatter([nested(device, q) for q in range(inter.remote_size)] if root == MPI.ROOT else None, root)
        if root == 0:
            check(device, got, group.rank)
    for rank, item in enumerate(inter.allgather(nested(device, group.rank))):
        check(device, item, rank)
    for rank, item in enumerate(inter.alltoall([nested(device, group.rank)] * inter.remote_size)):
        check(device, item, rank)
    inter.Free()
    group.Free()


def test_work_before_the_send_is_seen_and_work_after_it_is_not(comm, device):
    right, left = ring(comm)
    streams = [device.Stream() for _ in range(3)]
    arrays = []
    with streams[0]:
        x = device.empty(50)
        device.launch(None, lambda a: np.copyto(a, values(comm.rank, 50)), x)
        arrays.append(x)
        before = device.stats["synchronize"]
        request = comm.isend([x, device.array(values(1)), {"again": x}], right)
        assert device.stats["synchronize"] == before + 1  # two arrays, one stream
        device.fill(x, -5.0)
        got = comm.recv(source=left)
        assert got[2]["again"] is got[0]
        y = device.empty(50)
        device.launch(None, lambda a, b: np.copyto(b, a * 2), got[0], y)  # after the receive's copy
        request.wait()
        np.testing.assert_array_equal(device.asnumpy(y), values(left, 50) * 2)
    # Received on the current stream, while others stay behind.
    kept = []
    for i, stream in enumerate(streams):
        with stream:
            kept.append(comm.sendrecv(device.array(values(comm.rank + i)), right, source=left))
    for i, stream in reversed(list(enumerate(streams))):
        np.testing.assert_array_equal(device.asnumpy(kept[i], stream), values(left + i))


def test_arrays_of_several_streams_in_one_object(comm, device):
    right, left = ring(comm)

    class Produced(EmulatedArray):
        @property
        def __cuda_array_interface__(self):
            return {**super().__cuda_array_interface__, "stream": self.stream.ptr}

    made = []
    for i in range(4):
        stream = device.Stream()
        x = device.array(values(comm.rank + i), stream)
        x = Produced(device, x._view, x._base)
        x.stream = stream
        made.append(x)
    before = device.stats["synchronize"]
    with copies(device, 4):
        request = comm.isend(made, right)
    assert device.stats["synchronize"] == before + 4
    for x in made:
        device.fill(x, -1, x.stream)
    for i, y in enumerate(comm.recv(source=left)):
        np.testing.assert_array_equal(device.asnumpy(y), values(left + i))
    request.wait()


DTYPES = ["?", "b", "u2", "i8", "e", "f", "D", "M8[s]", "S5", "bfloat16", [("a", "i4"), ("b", "f8", (2,))]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [0, 1, 1000, 70001])
def test_dtypes_and_sizes(comm, device, dtype, n):
    right, left = ring(comm)
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes: pip install ml_dtypes").bfloat16
    dtype = np.dtype(dtype)

    def content(rank):
        raw = (np.arange(n * dtype.itemsize) * 7 + rank) % (2 if dtype.kind == "b" else 113)
        return raw.astype(np.uint8).view(dtype)

    x = device.array(content(comm.rank))
    with copies(device, 1 if n else 0):
        got = comm.sendrecv({"x": x}, right, source=left)["x"]
    assert got.dtype == dtype and got.shape == (n,)
    assert device.asnumpy(got).tobytes() == content(left).tobytes()


def test_shapes_orders_and_views(comm, device):
    right, left = ring(comm)

    def views(rank):
        host = values(rank, 60).reshape(3, 4, 5)
        whole, fortran = device.array(host), device.array(host, order="F")
        return [
            (whole, host, "C"),
            (fortran, host, "F"),
            (whole.T, host.T, "F"),
            (whole[:, ::2, 1], host[:, ::2, 1], "C"),
            (whole[::-1, :, ::-2], host[::-1, :, ::-2], "C"),
            (fortran[1:], host[1:], "C"),
            (whole[1, 2, 3], host[1, 2, 3], "C"),  # 0-d
            (whole.readonly(), host, "C"),
            (whole[:, 2:2], host[:, 2:2], "C"),
            (device.array(np.zeros((0, 3, 0))), np.zeros((0, 3, 0)), "C"),
            (whole[:, :1, :1], host[:, :1, :1], "C"),
        ]

    made = views(comm.rank)
    with copies(device, len(made) - 2):
        got = comm.sendrecv([array for array, _, _ in made], right, source=left)
    for array, (_, host, order) in zip(got, views(left), strict=True):
        assert array.shape == host.shape
        np.testing.assert_array_equal(device.asnumpy(array), host)
        assert not array.__cuda_array_interface__["data"][1]
        assert array._view.flags[f"{order}_CONTIGUOUS"]


def test_large_objects_and_many_arrays(comm, device):
    right, left = ring(comm)
    many = [device.array(values(comm.rank + i, 1 + i * 37)) for i in range(60)]
    big = device.array(values(comm.rank, 400000))
    with copies(device, 61):
        got = comm.sendrecv((many, big, values(comm.rank, 300000)), right, source=left)
    for i, array in enumerate(got[0]):
        np.testing.assert_array_equal(device.asnumpy(array), values(left + i, 1 + i * 37))
    np.testing.assert_array_equal(device.asnumpy(got[1]), values(left, 400000))
    np.testing.assert_array_equal(got[2], values(left, 300000))


def test_data_is_in_the_message_once_and_out_of_the_stream(device):
    data = values(3, 100000)
    packed = objects.pack({"device": device.array(data), "host": data})
    assert type(packed) is objects.Packed
    assert len(packed._data) < 1000
    for protocol in (5, 4):
        message = pickle.dumps(packed, protocol)
        assert len(message) < 2 * data.nbytes + 2000
        got = pickle.loads(message)
        np.testing.assert_array_equal(device.asnumpy(got["device"]), data)
        np.testing.assert_array_equal(got["host"], data)
        assert got["host"].flags.writeable
    packed.release()


def test_plain_host_objects_are_not_wrapped(device, monkeypatch):
    for obj in ("text", b"bytes", 1, 2.5, True, None, values(1), np.zeros((2, 3), order="F")):
        assert objects.pack(obj) is obj
    boxed = np.empty(2, object)
    boxed[1] = device.array(values(1))
    packed = objects.pack(boxed)
    assert packed.arrays == 1
    packed.release()
    monkeypatch.setattr(devices, "_installed", [])
    monkeypatch.setattr(devices, "_LIBRARIES", ())
    nested_host = {"x": [values(1)]}
    assert objects.pack(nested_host) is nested_host


def test_host_objects_need_no_gdcomm_where_they_arrive():
    packed = objects.pack({"host": values(1), "plain": [1, 2]})
    assert b"gdcomm" not in pickle.dumps(packed)
    assert b"gdcomm" not in pickle.dumps(objects.pack([1, 2]))
    packed.release()


def test_errors_come_before_mpi_and_leave_nothing_leased(comm, device):
    x = device.array(values(1))
    lock = threading.Lock()
    for call in (lambda: comm.send([x, lock], 0), lambda: comm.alltoall([[x, lock]] * comm.size)):
        with pytest.raises(TypeError, match="pickle"):
            call()
    with pytest.raises(MPI.Exception):
        comm.send([x], comm.size)


def test_receiver_without_the_library_is_told(comm, device, monkeypatch):
    packed = objects.pack([device.array(values(1))])
    message = pickle.dumps(packed)
    packed.release()
    with monkeypatch.context() as patched:
        patched.setattr(devices, "_installed", [])
        with pytest.raises(gdcomm.DeviceError, match="emulated device"):
            pickle.loads(message)
    monkeypatch.setattr(devices, "cuda_device", lambda: None)
    for library in ("cupy", "torch"):
        with pytest.raises(gdcomm.DeviceError, match=f"{library} device array.*install CuPy"):
            objects._restore(library, (3,), np.dtype("d"), "C", bytes(24))

    class Without:
        def build(self, *_):
            raise ImportError("No module named 'torch'")

    monkeypatch.setattr(devices, "cuda_device", Without)
    with pytest.raises(gdcomm.DeviceError, match=r"no torch that works.*No module named 'torch'.*install it"):
        objects._restore("torch", (3,), np.dtype("d"), "C", bytes(24))


def test_other_picklers_of_mpi4py_keep_their_objects(comm, device):
    right, left = ring(comm)
    seen = []

    def dumps(obj, protocol=None):
        seen.append(type(obj))
        return pickle.dumps(obj, protocol)

    for protocol in (None, 4):
        MPI.pickle.__init__(dumps, pickle.loads, protocol)
        try:
            assert comm.sendrecv({"a": [1]}, right, source=left) == {"a": [1]}
            check(device, comm.sendrecv(nested(device, comm.rank), right, source=left), left)
        finally:
            MPI.pickle.__init__()
    assert seen == [dict, objects.Packed] * 2
    MPI.pickle.__init__(lambda obj: b"anything", lambda data: bytes(data))
    try:
        assert comm.sendrecv([lambda: 0], right, source=left) == b"anything"
    finally:
        MPI.pickle.__init__()


def test_reductions_of_host_objects_are_as_before(comm):
    assert comm.allreduce([comm.rank]) == list(range(comm.size))
    assert comm.scan(comm.rank + 1) == sum(range(comm.rank + 2))


def test_page_locked_memory_is_used_again(comm, device):
    requests = []

    def send():
        requests.append(comm.isend([device.array(values(1, 9000)), device.array(values(2, 90))], comm.rank))

    def fail():
        with pytest.raises(TypeError, match="pickle"):
            objects.Packed([device.array(values(1, 9000)), threading.Lock()])
        device.synchronize(None)
        for _ in range(5):  # the copy's event says "not yet" some times
            pool_of(device).stats()

    for use in (send, fail):
        use()
        before = pool_of(device).stats()["misses"]
        for _ in range(3):
            use()
        assert pool_of(device).stats()["misses"] == before
    for request in requests:
        comm.recv(source=comm.rank)
        request.wait()
