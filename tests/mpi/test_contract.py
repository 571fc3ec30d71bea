"""Streams, requests, mixed ends, communicators and bad input."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from mpi4py import MPI

import gdcomm

PATHS = ["staged", "direct"]


@pytest.fixture(params=PATHS)
def dcomm(request):
    return gdcomm.Communicator(path=request.param)


def ring(comm):
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def test_pain_1_kernel_before_the_call_is_seen(dcomm, device):
    with device.Stream():
        x, y = device.empty(100), device.empty(100)
        device.fill(x, dcomm.rank + 1.0)
        dcomm.Allreduce(x, y)
        assert (device.asnumpy(y) == dcomm.size * (dcomm.size + 1) / 2).all()


def test_pain_3_the_stream_that_is_named_is_used(dcomm, device):
    stream = device.Stream()
    x, y = device.empty(10), device.empty(10)
    device.fill(x, 2.0, stream)
    dcomm.Allreduce(x, y, stream=stream)
    assert (device.asnumpy(y, stream) == 2 * dcomm.size).all()


def test_work_after_a_send_may_overwrite_and_work_after_a_receive_sees(dcomm, device):
    right, left = ring(dcomm)
    with device.Stream() as stream:
        x, y, z = device.empty(50), device.empty(50), device.empty(50)
        device.fill(x, dcomm.rank + 1.0)
        request = dcomm.Irecv(y, left)
        dcomm.Send(x, right)
        device.fill(x, -5.0)
        request.Wait()
        device.launch(stream, lambda a, b: np.copyto(b, a * 2), y, z)
        dcomm.Sendrecv_replace(y, right, 0, left, 0)
        device.launch(stream, lambda a, b: np.copyto(b, b + a), y, z)
        assert (device.asnumpy(z) == 2 * (left + 1) + (left - 1) % dcomm.size + 1).all()


def test_pain_8_staging_memory_is_not_reused_while_a_copy_is_queued(dcomm, device):
    streams = [device.Stream() for _ in range(6)]
    right, left = ring(dcomm)
    arrays = []
    for i, stream in enumerate(streams):
        y = device.empty(64)
        request = dcomm.Isend(np.full(64, 10.0 * i + dcomm.rank), right, i)
        dcomm.Recv(y, left, i, stream=stream)
        request.Wait()
        arrays.append(y)
    for i, (stream, y) in reversed(list(enumerate(zip(streams, arrays, strict=True)))):
        assert (device.asnumpy(y, stream) == 10.0 * i + left).all()


def test_requests_complete_by_every_way(dcomm, device):
    right, left = ring(dcomm)

    def start(tag):
        y = device.empty(8)
        x = device.array(np.full(8, dcomm.rank + 10.0 * tag))
        return y, [dcomm.Irecv(y, left, tag), dcomm.Isend(x, right, tag)]

    def test_loop(requests):
        while not all(request.Test() for request in requests):
            pass

    ways = [
        MPI.Request.Waitall,
        gdcomm.Request.Waitall,
        lambda requests: [request.Wait() for request in requests],
        test_loop,
        lambda requests: [MPI.Request.Waitany(requests) for _ in requests],
        lambda requests: [gdcomm.Request.Waitany(requests) for _ in requests],
    ]
    for tag, way in enumerate(ways):
        y, requests = start(tag)
        way(requests)
        assert (device.asnumpy(y) == left + 10.0 * tag).all()
        assert all(request == MPI.REQUEST_NULL for request in requests)


def test_host_and_device_ends_meet(dcomm, device):
    right, left = ring(dcomm)
    host, y = np.empty(2000), device.empty(2000)
    dcomm.Sendrecv(device.array(np.arange(2000.0) + dcomm.rank), right, 0, host, left, 0)
    np.testing.assert_array_equal(host, np.arange(2000.0) + left)
    dcomm.Sendrecv(host, left, 0, y, right, 0)
    np.testing.assert_array_equal(device.asnumpy(y), np.arange(2000.0) + dcomm.rank)
    total = np.empty(5) if dcomm.rank % 2 else device.empty(5)
    dcomm.Allreduce(np.ones(5) if dcomm.rank % 2 == 0 else device.array(np.ones(5)), total)
    total = total if isinstance(total, np.ndarray) else device.asnumpy(total)
    assert (total == dcomm.size).all()


def test_matched_probe_tells_the_size_and_receives(dcomm, device):
    right, left = ring(dcomm)
    request = dcomm.Isend(device.array(np.arange(6.0)), right, 9)
    status = MPI.Status()
    message = dcomm.Mprobe(left, 9, status)
    assert status.Get_count(MPI.DOUBLE) == 6
    y = device.empty(6)
    message.Recv(y)
    request.Wait()
    np.testing.assert_array_equal(device.asnumpy(y), np.arange(6.0))


def test_derived_communicators_are_ours_and_keep_the_path():
    comm = gdcomm.Communicator(path="staged")
    made = [comm.Dup(), comm.Clone(), comm.Split(0), comm.Split_type(MPI.COMM_TYPE_SHARED), comm.Create(comm.group)]
    idup, request = comm.Idup()
    request.Wait()
    for other in [*made, idup]:
        assert type(other) is gdcomm.Communicator
        assert other.path == "staged"
        other.Free()
    graph = comm.Create_dist_graph_adjacent([comm.rank], [comm.rank])
    assert isinstance(graph, gdcomm.DistGraphCommunicator)
    assert isinstance(graph, MPI.Distgraphcomm)
    graph.Free()
    assert isinstance(comm, MPI.Intracomm)
    assert comm == MPI.COMM_WORLD
    window = MPI.Win.Create(np.zeros(4), comm=comm) if MPI.get_vendor()[0] == "MPICH" else None
    if window is not None:
        window.Free()
    assert type(pickle.loads(pickle.dumps(comm))) is gdcomm.Communicator
    with comm.Dup() as inner:
        inner.Barrier()
    assert inner == MPI.COMM_NULL


def test_bad_input_is_told_in_words_and_leaves_buffers_alone(dcomm, device):
    x = device.array(np.arange(3.0))
    with pytest.raises(MPI.Exception, match="dest, source or root"):
        dcomm.Send(x, dcomm.size)
    with pytest.raises(gdcomm.GdcommError, match="tag"):
        dcomm.Send(x, 0, -3)
    with pytest.raises(gdcomm.BufferSpecError, match="read-only"):
        dcomm.Recv(x.readonly(), dcomm.rank)
    with pytest.raises(ValueError, match="mismatch"):
        dcomm.Allreduce(x, device.empty(4))
    with pytest.raises(ValueError, match="mismatch"):
        dcomm.Allreduce(x, device.empty(3, "f4"))
    with pytest.raises(gdcomm.BufferSpecError, match="stream"):
        dcomm.Allreduce(x, device.empty(3), stream="main")
    with pytest.raises(gdcomm.NoPathError, match="host arrays only"):
        gdcomm.Communicator(path="host").Bcast(x)
    with pytest.raises(ValueError, match="path"):
        gdcomm.Communicator(path="fast")
    freed = dcomm.Dup()
    freed.Free()
    with pytest.raises(gdcomm.GdcommError, match="freed"):
        freed.Bcast(x)
    np.testing.assert_array_equal(device.asnumpy(x), np.arange(3.0))


def test_receive_that_is_too_small_raises_on_the_receiver(device):
    if MPI.get_vendor()[0] == "Open MPI":
        comm = gdcomm.Communicator(path="staged")
        request = comm.Isend(device.array(np.arange(4.0)), comm.rank, 77)
        with pytest.raises(gdcomm.GdcommError, match="longer than the receive buffer"):
            comm.Recv(device.empty(2), comm.rank, 77)
        request.Wait()


def test_pain_21_capability_is_per_operation(monkeypatch, device):
    monkeypatch.setenv("GDCOMM_MPI_DEVICE_OPS", "p2p")
    comm = gdcomm.Communicator()
    x = device.array(np.ones(3))
    assert "by mpi" in comm.explain("Send", x)
    for name in ("Allreduce", "Bsend", "Ibsend", "Bsend_init", "Sendrecv_replace", "Iallgather", "Bcast"):
        assert "by staged" in comm.explain(name, x)
    y = device.empty(3)
    comm.Allreduce(x, y)
    assert (device.asnumpy(y) == comm.size).all()
    direct = gdcomm.Communicator(path="direct")
    with pytest.raises(gdcomm.NoPathError, match="GDCOMM_MPI_DEVICE_OPS"):
        direct.Allreduce(x, y)
    monkeypatch.setenv("GDCOMM_MPI_DEVICE_OPS", "p2q")
    with pytest.raises(ValueError, match="p2q"):
        gdcomm.Communicator()


def test_environment_goes_before_the_argument(monkeypatch):
    monkeypatch.setenv("GDCOMM_TRANSPORT", "staged")
    assert gdcomm.Communicator(path="direct").path == "staged"
