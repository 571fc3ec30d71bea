"""Nonblocking collectives by our own algorithms, against NumPy: many under way, in any order."""

from __future__ import annotations

import gc
import time
import weakref

import ml_dtypes
import numpy as np
import pytest
from conftest import DEVICE, completes
from mpi4py import MPI

import gdcomm
from gdcomm import arenas, channels, collectives, envelopes, nonblocking

WORLD = MPI.COMM_WORLD
SIZE, RANK = WORLD.size, WORLD.rank
pytestmark = pytest.mark.skipif(SIZE == 1, reason="a collective of one rank is MPI's: mpirun -n 2 (to 5)")
NEXT, LAST = (RANK + 1) % SIZE, (RANK - 1) % SIZE
KINDS = ["<f4", "<f8", "<i2", "<i8", "<c16", "<f2", ml_dtypes.bfloat16]
OPS = {"SUM": np.add, "MAX": np.maximum, "PROD": np.multiply}
NAMES = ["Iallreduce", "Ireduce", "Ibcast", "Iallgather", "Iallgatherv", "Ialltoall", "Ialltoallv", "Ireduce_scatter",
         "Ireduce_scatter_block", "Iscan", "Iexscan", "Igather", "Igatherv", "Iscatter", "Iscatterv"]  # fmt: skip
REDUCED = {"Iallreduce", "Ireduce", "Ireduce_scatter", "Ireduce_scatter_block", "Iscan", "Iexscan"}


@pytest.fixture(autouse=True)
def always(monkeypatch):
    monkeypatch.setattr(collectives, "SMALLEST", 1)


@pytest.fixture(params=["slots", "messages"])
def lane(request, monkeypatch):
    if request.param == "messages":
        monkeypatch.setattr(envelopes, "own", lambda: None)
    return request.param


@pytest.fixture
def comm():
    return gdcomm.Communicator(path="staged")


@pytest.fixture
def ran(monkeypatch):
    """Algorithms that this rank ran, and collectives that it left to MPI."""
    names = []
    run, by_mpi = collectives.Job.run, nonblocking._Collective._by_mpi
    monkeypatch.setattr(collectives.Job, "run", lambda job, *a: (names.append(job.operation), run(job, *a))[1])
    monkeypatch.setattr(nonblocking._Collective, "_by_mpi", lambda work: (names.append("MPI"), by_mpi(work))[1])
    return names


def values(count, rank=RANK, dtype="<i8", salt=0):
    return ((np.arange(count) * 3 + rank * 5 + salt) % 4 + 1).astype(dtype)


def read(array):
    """A device array's content, seen from a stream that nobody else uses."""
    return DEVICE.asnumpy(array, DEVICE.Stream()) if not isinstance(array, np.ndarray) else array


def reduced(op, count, dtype, salt, ranks=range(SIZE)):
    """In order of ranks; these numbers are small: any order gives the same."""
    total = values(count, ranks[0], dtype, salt)
    for rank in ranks[1:]:
        total = OPS[op](total, values(count, rank, dtype, salt))
    return total


def cut(array, counts, rank):
    start = sum(counts[:rank])
    return array[start : start + counts[rank]]


class Case:
    """One call: its arguments, and what must be where afterwards.

    Args:
        name: of the method.
        rng: the same on all ranks.
        host: whether this rank's arrays are NumPy's.
        dtypes: to draw one from.
    """

    def __init__(self, name, rng, host=False, dtypes=KINDS):
        self.name, self.host = name, host
        self.dtype = np.dtype(dtypes[int(rng.integers(len(dtypes)))])
        count, salt = int(rng.choice([1, 5, 1000, 20_000, 70_001])), int(rng.integers(100))
        self.root, op = int(rng.integers(SIZE)), list(OPS)[int(rng.integers(2 if self.dtype.kind != "c" else 1))]
        if self.dtype.kind == "c":
            op = "SUM"
        in_place = bool(rng.integers(2)) and name in REDUCED - {"Ireduce_scatter", "Ireduce_scatter_block"}
        counts = [int(c) for c in rng.integers(0, count + 1, SIZE)]
        table = rng.integers(0, count + 1, (SIZE, SIZE))
        own, at_root = values(count, RANK, self.dtype, salt), self.root == RANK
        everyone = [values(count, rank, self.dtype, salt) for rank in range(SIZE)]
        self.target, self.expected, self.more = None, None, []
        send, recv = own, np.full(count, 77, self.dtype)
        short = name[1:].capitalize()
        if name in ("Iallreduce", "Ireduce", "Iscan", "Iexscan"):
            ranks = {"Iscan": range(RANK + 1), "Iexscan": range(RANK)}.get(name, range(SIZE))
            self.expected = reduced(op, count, self.dtype, salt, ranks) if len(ranks) else recv
            self.more = [getattr(MPI, op)] + ([self.root] if name == "Ireduce" else [])
            if name == "Ireduce" and not at_root:
                self.expected = recv
                in_place = False
            if in_place:
                send, recv = MPI.IN_PLACE, own
                if name == "Iexscan" and RANK == 0:
                    self.expected = own
        elif name == "Ibcast":
            send, recv, self.more, self.expected = None, own, [self.root], everyone[self.root]
        elif name == "Iallgather":
            recv, self.expected = np.full(count * SIZE, 77, self.dtype), np.concatenate(everyone)
        elif name == "Iallgatherv":
            send, recv = own[: counts[RANK]], np.full(sum(counts), 77, self.dtype)
            self.expected = np.concatenate([each[:n] for each, n in zip(everyone, counts, strict=True)])
            recv = (recv, counts)
        elif name == "Ialltoall":
            whole = [values(count * SIZE, rank, self.dtype, salt) for rank in range(SIZE)]
            send, recv = whole[RANK], np.full(count * SIZE, 77, self.dtype)
            self.expected = np.concatenate([each[RANK * count : (RANK + 1) * count] for each in whole])
        elif name == "Ialltoallv":
            whole = [values(table[rank].sum(), rank, self.dtype, salt) for rank in range(SIZE)]
            send, recv = (whole[RANK], table[RANK].tolist()), (
                np.full(table[:, RANK].sum(), 77, self.dtype), table[:, RANK].tolist())  # fmt: skip
            self.expected = np.concatenate([cut(whole[r], table[r].tolist(), RANK) for r in range(SIZE)])
        elif name in ("Ireduce_scatter", "Ireduce_scatter_block"):
            counts = counts if name == "Ireduce_scatter" else [count] * SIZE
            total = sum(counts)
            send, recv = values(total, RANK, self.dtype, salt), np.full(counts[RANK], 77, self.dtype)
            self.expected = cut(reduced(op, total, self.dtype, salt), counts, RANK)
            inferred = bool(rng.integers(2))
            self.more = [None if inferred else counts] * (name == "Ireduce_scatter") + [getattr(MPI, op)]
        elif name in ("Igather", "Igatherv"):
            counts = counts if name == "Igatherv" else [count] * SIZE
            send, recv = own[: counts[RANK]], np.full(sum(counts), 77, self.dtype)
            self.expected = np.concatenate([each[:n] for each, n in zip(everyone, counts, strict=True)])
            recv = (recv, counts) if name == "Igatherv" else recv
            if not at_root:
                recv = self.expected = None
            self.more = [self.root]
        else:
            assert short in ("Scatter", "Scatterv")
            counts = counts if name == "Iscatterv" else [count] * SIZE
            whole = values(sum(counts), self.root, self.dtype, salt)
            self.expected, recv = cut(whole, counts, RANK), np.full(counts[RANK], 77, self.dtype)
            send = None if not at_root else (whole, counts) if name == "Iscatterv" else whole
            self.more = [self.root]
        self.send, self.recv = self._on(send), self._on(recv)
        self.target = self.recv[0] if isinstance(self.recv, list) else self.recv

    def _on(self, spec):
        if isinstance(spec, tuple):
            return [self._on(spec[0]), spec[1]]
        if not isinstance(spec, np.ndarray):
            return spec
        return spec.copy() if self.host else DEVICE.array(spec)

    def start(self, comm):
        buffers = [self.recv] if self.name == "Ibcast" else [self.send, self.recv]
        return getattr(comm, self.name)(*buffers, *self.more)

    def block(self, comm):
        buffers = [self.recv] if self.name == "Ibcast" else [self.send, self.recv]
        getattr(comm, self.name[1:].capitalize())(*buffers, *self.more)
        if not self.host:
            DEVICE.synchronize(None)

    def check(self):
        if self.expected is not None:
            np.testing.assert_array_equal(read(self.target), self.expected, err_msg=self.name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(4))
def test_each(comm, ran, lane, name, seed):
    case = Case(name, np.random.default_rng([seed, NAMES.index(name)]))
    case.start(comm).Wait()
    case.check()
    assert "MPI" not in ran or case.target is None or 0 in read(case.target).shape


@pytest.mark.parametrize("seed", range(12))
def test_random_programs(comm, lane, seed):
    """Nonblocking ones, blocking ones and messages on one communicator; some ranks with host arrays, some calls all."""
    rng, mine = np.random.default_rng(seed), np.random.default_rng([seed, RANK])
    comms = [comm, comm.Dup(), comm.Split(0, -RANK)]
    under_way, cases = [], []
    for step in range(14):
        name, which, kind = str(rng.choice(NAMES)), comms[rng.integers(3)], rng.integers(6)
        hosts = rng.integers(0, 2, SIZE) * (rng.integers(3) == 0)
        blocking, reverse = kind == 0, which is comms[2]
        if reverse and (name not in ("Iallreduce",) or hosts.any()):
            which = comms[0]
        case = Case(name, rng, bool(hosts[RANK]), KINDS[:5] if hosts.any() else KINDS)
        cases.append(case)
        if blocking:
            case.block(which)
        else:
            under_way.append(case.start(which))
        if kind == 1:
            x, y = DEVICE.array(values(600_000, salt=step)), DEVICE.zeros(600_000, np.int64)
            sending = comm.Isend(x, NEXT, step)
            comm.Recv(y, LAST, step)
            under_way.append(sending)
            assert np.array_equal(DEVICE.asnumpy(y), values(600_000, LAST, salt=step))
        while under_way and mine.integers(3) == 0:
            under_way.pop(mine.integers(len(under_way))).Wait()
        if under_way and mine.integers(3) == 0:
            under_way[0].Test()
    order = mine.permutation(len(under_way))
    if seed % 3 == 0:
        # Raw: the thread does the work. MPICH can't have requests among them that are complete already.
        MPI.Request.Waitall([under_way[i] for i in order if under_way[i] != MPI.REQUEST_NULL])
    else:
        gdcomm.Request.Waitall([under_way[i] for i in order])
    for case in cases:
        case.check()
    for made in comms[1:]:
        made.Free()


@pytest.mark.parametrize("hosts", [[], [0], list(range(SIZE))], ids=["devices", "rank 0 host", "hosts"])
def test_a_call_waits_for_nobody(comm, hosts):
    """Also the first of a communicator, which has more to do."""
    made = comm.Dup()
    for _ in range(2):
        case = Case("Iallreduce", np.random.default_rng(3), RANK in hosts)
        if RANK == 0:
            request = case.start(made)
            for rank in range(1, SIZE):
                made.Send(np.arange(3), rank)
        else:
            made.Recv(np.empty(3, int), 0)
            request = case.start(made)
        request.Wait()
        case.check()
    made.Free()


def test_results_are_the_same_on_all_ranks(comm, ran):
    x = np.random.default_rng(RANK).standard_normal(100_003).astype(np.float32)
    y = DEVICE.zeros(len(x), np.float32)
    comm.Iallreduce(DEVICE.array(x), y).Wait()
    assert ran == ["allreduce"]
    assert len(set(WORLD.allgather(read(y).tobytes()))) == 1
    np.testing.assert_allclose(read(y), sum(WORLD.allgather(x.astype(float))), rtol=1e-4, atol=1e-5)


def test_completion_in_another_order_than_the_calls(comm):
    cases = [Case(name, np.random.default_rng(9)) for name in ("Iallreduce", "Ibcast", "Iallgather")]
    requests = [case.start(comm) for case in cases]
    for i in np.random.default_rng(RANK).permutation(3):
        requests[i].Wait()
        cases[i].check()


# -- streams ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Iallreduce", "Ibcast", "Ialltoall"])
@pytest.mark.parametrize("host", [False, True], ids=["devices", "a host rank"])
def test_work_queued_after_the_call_does_not_delay_it(comm, name, host):
    unrelated, seen = DEVICE.zeros(1000), []
    case = Case(name, np.random.default_rng(5), host and RANK == 0)
    request = case.start(comm)
    DEVICE.launch(None, lambda view: (view.fill(7), seen.append(True)), unrelated)
    assert completes(request)
    request.Wait()
    assert not seen
    case.check()
    assert not seen
    assert (DEVICE.asnumpy(unrelated) == 7).all()


def test_what_is_queued_on_different_streams_is_seen(comm):
    """Each array's own stream counts: here they are imagined to be of two libraries."""
    count, streams = 70_001, [DEVICE.Stream(), DEVICE.Stream()]
    with streams[0]:
        x = DEVICE.array(values(count))
    with streams[1]:
        y = DEVICE.zeros(count, np.int64)
    found = {x.ptr: streams[0], y.ptr: streams[1]}
    find, DEVICE.find = DEVICE.find, lambda obj, stream=None: find(obj, stream or found.get(getattr(obj, "ptr", 0)))
    try:
        request = comm.Iallreduce(x, y)
    finally:
        del DEVICE.find
    request.Wait()
    assert np.array_equal(read(y), reduced("SUM", count, "<i8", 0))


# -- errors ------------------------------------------------------------------------------------------


def test_what_is_wrong_is_said_at_the_call(comm):
    x, y = DEVICE.array(values(1000)), DEVICE.zeros(1000, np.int64)
    with pytest.raises(gdcomm.BufferSpecError, match="Iallreduce: recvbuf"):
        comm.Iallreduce(x, y.readonly())
    with pytest.raises(MPI.Exception, match="root"):
        comm.Ibcast(x, SIZE)
    with pytest.raises(gdcomm.BufferSpecError, match="Iallgather"):
        comm.Iallgather(x, [y, 2000, MPI.INT64_T])
    comm.Iallreduce(x, y).Wait()  # the others have not begun either
    assert np.array_equal(read(y), reduced("SUM", 1000, "<i8", 0))


def test_counts_that_do_not_match_are_an_error_on_all_ranks(comm):
    count, odd = 1000, SIZE - 1
    x, y = DEVICE.array(np.ones(SIZE * count)), DEVICE.zeros(SIZE * 2 * count)
    wrong = [count] * odd + [500] if RANK == 0 else [count] * SIZE
    before = comm.Ibcast(x, 0)
    request = comm.Ialltoallv([x, [count] * SIZE], [y, wrong])
    after = comm.Ialltoallv([x, [count] * SIZE], [y, [count] * SIZE])
    with pytest.raises(gdcomm.BufferSpecError, match=r"Ialltoallv: .*give both the same count"):
        request.Wait()
    gdcomm.Request.Waitall([before, after])
    assert read(y).sum() == SIZE * count


def test_an_error_in_the_middle_comes_out_of_wait(comm, monkeypatch):
    made = comm.Dup()
    x, y = DEVICE.array(values(1000)), DEVICE.zeros(1000, np.int64)
    free = len(DEVICE.__dict__.setdefault("_spare_streams", []))

    def broken(*_):
        raise RuntimeError("in the middle")
        yield

    with monkeypatch.context() as patch:
        patch.setattr(collectives.Job, "run", broken)
        request = made.Iallreduce(x, y)
        with pytest.raises(RuntimeError, match="in the middle"):
            request.Wait()
    assert len(DEVICE._spare_streams) >= free
    again = made.Iallreduce(x, y)  # the queue goes on
    again.Wait()
    assert np.array_equal(read(y), reduced("SUM", 1000, "<i8", 0))
    made.Free()


# -- lifetime ----------------------------------------------------------------------------------------


def test_arrays_live_as_long_as_the_request_and_no_longer(comm):
    x, y = DEVICE.array(values(70_001)), DEVICE.zeros(70_001, np.int64)
    comm.Iallreduce(x, y).Wait()
    WORLD.Barrier()
    gone = weakref.ref(x)
    gc.disable()
    try:
        request = comm.Iallreduce(x, y)
        del x
        request.Wait()
        end = time.monotonic() + 30
        while gone() is not None and time.monotonic() < end:  # the thread may be looking at it just now
            time.sleep(1e-3)
        assert gone() is None
    finally:
        gc.enable()
    assert np.array_equal(read(y), reduced("SUM", 70_001, "<i8", 0))


def test_hidden_communicators_and_boxes_go_with_their_communicators(comm):
    def used():
        gc.collect()
        WORLD.Barrier()
        channels.free_unused(WORLD)
        own = arenas.own()
        return len(channels._unused), len(own._free_boxes) if own else 0

    family = gdcomm.Communicator(WORLD.Dup(), path="staged")
    before = used()
    for turn in range(60):
        made = family.Dup()
        case = Case("Iallreduce", np.random.default_rng(turn))
        request = case.start(made)
        early = turn % 2 and "Open MPI" not in MPI.Get_library_version()  # which crashes, as with its own collectives
        if early:
            made.Free()
        request.Wait()
        case.check()
        if not early:
            made.Free()
        del made, request
    assert used() == before
    family.Free()
