"""Large staged messages travel in an envelope and chunks; whoever receives or probes sees one message."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from conftest import DEVICE
from mpi4py import MPI

import gdcomm
from gdcomm import arenas, envelopes
from gdcomm.envelopes import ENVELOPE, SMALLEST
from gdcomm.memory.pinned import pool_of
from gdcomm.transports import staged

WORLD = MPI.COMM_WORLD
SIZE, RANK = WORLD.size, WORLD.rank
NEXT, LAST = (RANK + 1) % SIZE, (RANK - 1) % SIZE
pytestmark = pytest.mark.skipif(SIZE == 1, reason="envelopes go from rank to rank: mpirun -n 2 (to 4)")
COUNT = 2_500_003 // 4  # float32s: an odd number of bytes in the last chunk


def values(count=COUNT, rank=None, dtype=np.float32):
    return (np.arange(count) * 7 + 13 * (RANK if rank is None else rank)).astype(dtype)


@pytest.fixture(params=["slots", "messages"], autouse=True)
def lane(request, monkeypatch):
    """Chunks through memory that both ranks share, or as messages."""
    if request.param == "messages":
        monkeypatch.setattr(envelopes, "own", lambda: None)
    return request.param


@pytest.fixture
def comm():
    return gdcomm.Communicator(path="staged")


@pytest.fixture
def sent(monkeypatch):
    """How many envelopes this rank sent."""
    made = []
    start = envelopes.Outgoing.__init__

    def counted(self, *arguments):
        made.append(arguments)
        start(self, *arguments)

    monkeypatch.setattr(envelopes.Outgoing, "__init__", counted)
    return made


def empty(kind, count=COUNT, dtype=np.float32):
    return DEVICE.array(np.zeros(count, dtype)) if kind == "device" else np.zeros(count, dtype)


def read(array):
    return array if isinstance(array, np.ndarray) else DEVICE.asnumpy(array)


def exchange(comm, form, y):
    """Receive into y with tag 3 by a method that sends as well."""
    small = np.zeros(1)
    if "replace" in form:
        result = getattr(comm, form)(y, MPI.PROC_NULL, 1, LAST, 3)
    else:
        result = getattr(comm, form)(small, NEXT, 1, y, LAST, 3)
        comm.Recv(small, LAST, 1)
    if result is not None:
        result.Wait()


KINDS = pytest.mark.parametrize("kind", ["device", "host"])


@KINDS
@pytest.mark.parametrize("call", ["Send", "Ssend", "Isend", "Issend"])
def test_send_and_receive(comm, sent, kind, call):
    x, y, status = DEVICE.array(values()), empty(kind), MPI.Status()
    request = comm.Irecv(y, LAST, 5)
    started = getattr(comm, call)(x, NEXT, 5)
    if started is not None:
        started.Wait()
    request.Wait(status)
    assert len(sent) == 1
    assert np.array_equal(read(y), values(rank=LAST))
    assert (status.source, status.tag, status.Get_count(MPI.FLOAT)) == (LAST, 5, COUNT)


@pytest.mark.parametrize("kind", ["device", "host"])
def test_a_large_receive_takes_little_page_locked_memory(comm, monkeypatch, kind):
    """Also if the message comes whole, from host memory."""
    monkeypatch.setattr(staged, "LARGEST_PINNED", 1 << 20)
    count, pool = 5 << 20, pool_of(DEVICE)
    x, y = values(count), empty("device", count)
    before = pool.stats()["leased"]
    request = comm.Irecv(y, LAST, 5)
    assert pool.stats()["leased"] - before < y.nbytes // 4
    sending = comm.Isend(DEVICE.array(x) if kind == "device" else x, NEXT, 5)
    sending.Wait()
    request.Wait()
    assert np.array_equal(read(y), values(count, LAST))
    part = x[: count // 3]  # shorter than the buffer
    request = comm.Irecv(y, LAST, 5)
    comm.Send(DEVICE.array(part) if kind == "device" else part, NEXT, 5)
    request.Wait()
    assert np.array_equal(read(y), np.r_[values(len(part), LAST), values(count, LAST)[len(part) :]])
    DEVICE.synchronize(None)
    assert pool.stats()["leased"] == before


@KINDS
@pytest.mark.parametrize("spare", [0, 17])
def test_blocking_receive(comm, sent, kind, spare):
    x, y, status = DEVICE.array(values()), empty(kind, COUNT + spare), MPI.Status()
    request = comm.Isend(x, NEXT, 5)
    comm.Recv(y, LAST, 5, status)
    request.Wait()
    assert len(sent) == 1
    assert np.array_equal(read(y)[:COUNT], values(rank=LAST))
    assert not read(y)[COUNT:].any()
    assert (status.source, status.tag, status.Get_count(MPI.FLOAT)) == (LAST, 5, COUNT)


@pytest.mark.parametrize("path", ["staged", "direct"])
@pytest.mark.parametrize("make", [
    lambda a: a, lambda a: a[::2], lambda a: a[:-3], lambda a: a.reshape(-1, 2)[:, 1],
], ids=["whole", "strided", "shorter", "column"])  # fmt: skip
def test_layouts(comm, sent, path, make):
    x = make(DEVICE.array(values(2 * COUNT)))
    expected = make(values(2 * COUNT, LAST)).copy()
    other = gdcomm.Communicator(path=path)
    y = make(DEVICE.array(np.zeros(2 * COUNT, np.float32)))
    request = comm.Isend(x, NEXT)
    other.Recv(y, LAST)
    request.Wait()
    assert len(sent) == 1
    assert np.array_equal(read(y), expected)


@pytest.mark.parametrize("dtype", ["i1", "f2", "c16", "V3", "S7", "f8"])
def test_dtypes_of_both_ends_may_differ(comm, sent, dtype):
    data = values(6_000_000, dtype=np.uint8)  # bytes: a multiple of none of the chunks
    x = DEVICE.array(data[: 5_999_994 // np.dtype(dtype).itemsize * np.dtype(dtype).itemsize].view(dtype))
    y = DEVICE.array(np.zeros(3_000_000, "u2"))[::1]
    odd = DEVICE.array(np.zeros(6_000_000, "u2"))[::2]  # unpacked at the end: chunks cut its elements
    for target in (y, odd):
        request = comm.Isend(x, NEXT)
        comm.Recv(target, LAST)
        request.Wait()
        got = read(target).copy().view(np.uint8)[: x.nbytes]
        assert np.array_equal(got, values(6_000_000, LAST, np.uint8)[: x.nbytes])
    assert len(sent) == 2


def test_explicit_counts_and_types(comm, sent):
    x, y = DEVICE.array(values()), empty("device")
    host = np.zeros(COUNT, np.float32)
    for spec in ([y, MPI.FLOAT], [y, COUNT, MPI.FLOAT], [y, COUNT], [y, COUNT * 4, MPI.BYTE], [host, MPI.FLOAT]):
        request = comm.Isend([x, COUNT, MPI.FLOAT], NEXT)
        comm.Recv(spec, LAST)
        request.Wait()
        assert np.array_equal(read(spec[0]), values(rank=LAST))
    assert len(sent) == 5


@KINDS
def test_derived_datatype_at_the_receiver(comm, sent, kind):
    x, y = DEVICE.array(values()), empty(kind, 2 * COUNT)
    every_second = MPI.FLOAT.Create_vector(COUNT, 1, 2).Commit()
    for nonblocking in (False, True):
        request = comm.Isend(x, NEXT)
        if nonblocking:
            comm.Irecv([y, 1, every_second], LAST).Wait()
        else:
            comm.Recv([y, 1, every_second], LAST)
        request.Wait()
        assert np.array_equal(read(y)[::2], values(rank=LAST))
        assert not read(y)[1::2].any()
    every_second.Free()
    assert len(sent) == 2


@KINDS
def test_fortran_order_at_the_receiver(comm, sent, kind):
    x = DEVICE.array(values(2 * COUNT).reshape(2, COUNT))
    y = np.zeros((2, COUNT), np.float32, order="F")
    y = DEVICE.array(y, order="F") if kind == "device" else y
    request = comm.Isend(x, NEXT)
    comm.Recv(y, LAST)
    request.Wait()
    assert np.array_equal(read(y), values(2 * COUNT, LAST).reshape(2, COUNT))


@KINDS
@pytest.mark.parametrize("form", ["Sendrecv", "Isendrecv", "Sendrecv_replace", "Isendrecv_replace", "Recv_init"])
def test_every_receiving_method(comm, sent, kind, form):
    x, y = DEVICE.array(values()), empty(kind)
    sending = comm.Isend(x, NEXT, 3)
    if form == "Recv_init":
        request = comm.Recv_init(y, LAST, 3)
        for _ in range(2):
            request.Start()
            request.Wait()
            sending.Wait()
            assert np.array_equal(read(y), values(rank=LAST))
            WORLD.Barrier()
            sending = comm.Isend(x, NEXT, 3)
        request.Free()
        comm.Recv(y, LAST, 3)
        sending.Wait()
        return
    exchange(comm, form, y)
    sending.Wait()
    assert np.array_equal(read(y), values(rank=LAST))


@KINDS
@pytest.mark.parametrize("nonblocking", [False, True])
def test_probes_tell_the_true_size(comm, kind, nonblocking):
    x, y, status = DEVICE.array(values()), empty(kind), MPI.Status()
    sending = comm.Isend(x, NEXT, 9)
    if nonblocking:
        while not comm.Iprobe(LAST, 9, status):
            pass
    else:
        comm.Probe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
    assert (status.source, status.tag, status.Get_count(MPI.FLOAT)) == (LAST, 9, COUNT)
    assert comm.Iprobe(LAST, 9)  # it is still there
    assert not comm.Iprobe(LAST, 8)
    got = MPI.Status()
    if nonblocking:
        comm.Irecv(y, status.source, status.tag).Wait(got)
    else:
        comm.Recv(y, status.source, status.tag, got)
    assert (got.source, got.tag, got.Get_count(MPI.FLOAT)) == (LAST, 9, COUNT)
    assert np.array_equal(read(y), values(rank=LAST))
    assert not comm.Iprobe(LAST, 9)
    sending.Wait()


@KINDS
@pytest.mark.parametrize("probed", [False, True])
@pytest.mark.parametrize("nonblocking", [False, True])
def test_matched_probes(comm, kind, probed, nonblocking):
    x, y, status = DEVICE.array(values()), empty(kind), MPI.Status()
    sending = comm.Isend(x, NEXT, 9)
    if probed:
        comm.Probe(LAST)
    if nonblocking:
        message = None
        while message is None:
            message = comm.Improbe(LAST, 9, status)
    else:
        message = comm.Mprobe(LAST, 9, status)
    assert message
    assert message != MPI.MESSAGE_NULL
    assert (status.source, status.tag, status.Get_count(MPI.FLOAT)) == (LAST, 9, COUNT)
    got = MPI.Status()
    if nonblocking:
        message.Irecv(y).Wait(got)
    else:
        message.Recv(y, got)
    sending.Wait()
    assert (got.source, got.tag, got.Get_count(MPI.FLOAT)) == (LAST, 9, COUNT)
    assert np.array_equal(read(y), values(rank=LAST))


def test_messages_of_an_envelopes_length_stay_in_order(comm):
    """A plain message of exactly that length is kept by a probe and then received like any other."""
    plain = values(ENVELOPE, dtype=np.uint8)
    requests = [comm.Isend(plain, NEXT, 1), comm.Isend(DEVICE.array(values()), NEXT, 1), comm.Isend(plain, NEXT, 1)]
    status = MPI.Status()
    comm.Probe(LAST, 1, status)
    assert status.Get_count(MPI.BYTE) == ENVELOPE
    first, second, third = np.zeros(ENVELOPE, np.uint8), empty("device"), np.zeros(ENVELOPE, np.uint8)
    comm.Recv(first, LAST, 1)
    comm.Recv(second, LAST, 1)
    comm.Mprobe(LAST, 1).Recv(third)
    for request in requests:
        request.Wait()
    assert np.array_equal(first, values(ENVELOPE, LAST, np.uint8))
    assert np.array_equal(read(second), values(rank=LAST))
    assert np.array_equal(third, first)


@pytest.mark.parametrize("form", ["Sendrecv", "Isendrecv", "Sendrecv_replace", "Isendrecv_replace"])
def test_probed_then_received_by_an_exchange(comm, form):
    x, y = DEVICE.array(values()), empty("host")
    sending = comm.Isend(x, NEXT, 3)
    comm.Probe(LAST, 3)
    exchange(comm, form, y)
    sending.Wait()
    assert np.array_equal(y, values(rank=LAST))


def test_objects_of_an_envelopes_length(comm):
    obj = b"x" * (ENVELOPE - len(MPI.pickle.dumps(b"x" * 100_000)) + 100_000)
    assert len(MPI.pickle.dumps(obj)) == ENVELOPE
    receive = [
        lambda: comm.recv(None, LAST, 2),
        lambda: comm.mprobe(LAST, 2).recv(),
        lambda: comm.irecv(bytearray(2 * ENVELOPE), LAST, 2).wait(),
        lambda: comm.sendrecv(0, MPI.PROC_NULL, 0, None, LAST, 2),
    ]
    for probe in (False, True):
        for call in receive:
            request = comm.isend(obj, NEXT, 2)
            if probe:
                status = MPI.Status()
                comm.probe(LAST, 2, status)
                assert status.Get_count(MPI.BYTE) == ENVELOPE
            assert call() == obj
            request.wait()


@KINDS
@pytest.mark.parametrize("nonblocking", [False, True])
@pytest.mark.parametrize("count", [ENVELOPE // 4 + 5, COUNT - 1])
def test_too_small_a_buffer(comm, kind, nonblocking, count):
    """The error says so, and the next message is received as if nothing had been."""
    x, y, whole = DEVICE.array(values()), empty(kind, count), empty(kind)
    requests = [comm.Isend(x, NEXT, 4), comm.Isend(x, NEXT, 4)]
    with pytest.raises(MPI.Exception) as error:
        if nonblocking:
            comm.Irecv(y, LAST, 4).Wait()
        else:
            comm.Recv(y, LAST, 4)
    assert error.value.Get_error_class() == MPI.ERR_TRUNCATE
    comm.Recv(whole, LAST, 4)
    assert np.array_equal(read(whole), values(rank=LAST))
    for request in requests:
        request.Wait()


def test_many_at_once_both_ways(comm, sent):
    arrays = [DEVICE.array(values(COUNT + i)) for i in range(6)]
    into = [empty("device", COUNT + i) for i in range(6)]
    receives = [comm.Irecv(y, LAST, i % 3) for i, y in enumerate(into)]
    sends = [comm.Isend(x, NEXT, i % 3) for i, x in enumerate(arrays)]
    gdcomm.Request.Waitall(sends + receives)
    assert len(sent) == 6
    for i, y in enumerate(into):
        assert np.array_equal(read(y), values(COUNT + i, LAST))


def test_progress_without_anybody_waiting(comm):
    """The receiver is in a blocking receive while the sender sits in a barrier, and the other way round."""
    x, y = DEVICE.array(values()), empty("device")
    sending = comm.Isend(x, NEXT)
    comm.Recv(y, LAST)
    WORLD.Barrier()
    sending.Wait()
    receiving = comm.Irecv(y, LAST)
    comm.Send(x, NEXT)
    WORLD.Barrier()
    receiving.Wait()
    assert np.array_equal(read(y), values(rank=LAST))


def test_stream_order(comm, sent):
    x, y = DEVICE.array(values()), empty("device")
    s, t = DEVICE.Stream(), DEVICE.Stream()
    with s:
        DEVICE.fill(x, 5.0)  # queued late: the message must have it
        sending = comm.Isend(x, NEXT)
    with t:
        DEVICE.fill(y, 1.0)
        comm.Recv(y, LAST)
        seen = DEVICE.empty(COUNT, np.float32)
        DEVICE.launch(None, lambda a, b: np.copyto(a, b), seen, y)  # work queued after sees it
    sending.Wait()
    with s:
        DEVICE.fill(x, 6.0)
    assert (DEVICE.asnumpy(seen, t) == 5.0).all()


def test_derived_communicators(comm, sent):
    x, y = DEVICE.array(values()), empty("device")
    backwards = comm.Split(0, -RANK)
    peer, other = (backwards.rank + 1) % SIZE, (backwards.rank - 1) % SIZE
    source = SIZE - 1 - other
    with comm.Dup() as dup, backwards, comm.Create_cart([SIZE], [True]) as cart:
        for each, to, back, rank in (
            (dup, NEXT, LAST, LAST), (backwards, peer, other, source), (cart, NEXT, LAST, LAST)
        ):  # fmt: skip
            request = each.Irecv(y, back)
            each.Send(x, to)
            request.Wait()
            assert np.array_equal(read(y), values(rank=rank))
    assert len(sent) == 3


def test_small_messages_and_others_stay_plain(comm, sent):
    x, y = DEVICE.array(values(SMALLEST // 4 - 1)), empty("device")
    comm.Sendrecv(DEVICE.array(values()), NEXT, 0, y, LAST)
    request = comm.Isend(x, NEXT)
    comm.Recv(y, LAST)
    request.Wait()
    gdcomm.Communicator(path="direct").Sendrecv(DEVICE.array(values()), NEXT, 0, y, LAST)
    assert sent == []
    comm.Send(DEVICE.array(values()), MPI.PROC_NULL)
    assert sent == []


def test_pinned_memory_is_bounded_at_the_sender(comm):
    from gdcomm.memory.pinned import pool_of

    nbytes = 96 << 20
    x, y = DEVICE.array(np.ones(nbytes, np.uint8)), np.zeros(nbytes, np.uint8)
    receiving = comm.Irecv(y, LAST)
    before = pool_of(DEVICE).stats()["leased"]
    sending = comm.Isend(x, NEXT)
    leased = pool_of(DEVICE).stats()["leased"] - before
    sending.Wait()
    receiving.Wait()
    assert 1 <= leased < nbytes // 4
    assert pool_of(DEVICE).stats()["leased"] == before
    assert y.all()


def test_first_large_sends_of_several_threads(comm, monkeypatch):
    """The arena is made once, whoever comes first."""
    known, made = arenas.own(), []

    def make():
        arena = arenas._Own(arenas._file()[0])
        arena._free_boxes, arena.free_slots = known._free_boxes, known.free_slots  # others may be in use
        made.append(arena)
        return arena

    monkeypatch.setattr(envelopes, "own", arenas.once(make))
    threads, count = 4, COUNT
    arrays = [empty("device") for _ in range(threads)]
    receiving = [comm.Irecv(y, LAST, tag) for tag, y in enumerate(arrays)]
    sources = [DEVICE.array(values(count) + i) for i in range(threads)]
    start = threading.Barrier(threads)

    def send(i):
        start.wait()
        comm.Send(sources[i], NEXT, i)

    workers = [threading.Thread(target=send, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for request in receiving:
        request.Wait()
    for worker in workers:
        worker.join()
    for i, y in enumerate(arrays):
        assert np.array_equal(read(y), values(rank=LAST) + i)
    assert len(made) == 1


def test_a_kept_message_is_delivered_while_another_one_comes_in_a_derived_datatype(comm):
    count = 4 << 20
    kind = MPI.BYTE.Create_vector(count // 8, 4, 8).Commit()
    for _ in range(10):
        second = comm.Isend(DEVICE.array(np.full(count, 2, np.uint8)), NEXT, 2)
        first = comm.Isend(DEVICE.array(np.full(count // 2, 1, np.uint8)), NEXT, 1)
        gaps, y = np.zeros(count, np.uint8), DEVICE.array(np.zeros(count, np.uint8))
        message = comm.Mprobe(LAST, 2)
        request = comm.Irecv([gaps, 1, kind], LAST, 1)
        message.Irecv(y).Wait()
        for other in (request, first, second):
            other.Wait()
        assert (read(y) == 2).all()
        assert (gaps.reshape(-1, 8) == [1, 1, 1, 1, 0, 0, 0, 0]).all()
    kind.Free()


@KINDS
@pytest.mark.parametrize("probed", [False, True])
def test_a_message_that_does_not_fit_leaves_no_trace(comm, kind, probed):
    y = empty(kind, 50_000)
    sending = comm.Isend(DEVICE.array(values()), NEXT, 5)
    with pytest.raises(MPI.Exception) as caught:
        if probed:
            comm.Mprobe(LAST, 5).Recv(y)
        else:
            comm.Recv(y, LAST, 5)
    assert caught.value.Get_error_class() == MPI.ERR_TRUNCATE
    sending.Wait()
    short = np.full(2, 9, np.float32)
    comm.Isendrecv(short, NEXT, 6, y, LAST, 6).Wait()
    assert (read(y)[:2] == 9).all()
