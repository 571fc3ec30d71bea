"""After a few repetitions staged operations allocate nothing, hold a bounded amount of page-locked memory, and wait
for no stream but their own.

On the emulated device a query of an event here runs the work that it asks for, so that the number of blocks in use
does not depend on how late the device is.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
from conftest import DEVICE, completes
from mpi4py import MPI

import gdcomm
from gdcomm import collectives, envelopes
from gdcomm.arenas import SLOT, SLOTS
from gdcomm.devices import emulated
from gdcomm.envelopes import ENVELOPE, SMALLEST
from gdcomm.lanes import DEPTH
from gdcomm.memory.budget import of_process
from gdcomm.memory.pinned import PinnedPool, pool_of, size_class
from gdcomm.requests import progress
from gdcomm.transports.staged import LARGEST_PINNED

WORLD = MPI.COMM_WORLD
SIZE, RANK = WORLD.size, WORLD.rank
NEXT, LAST = (RANK + 1) % SIZE, (RANK - 1) % SIZE
pytestmark = pytest.mark.skipif(SIZE == 1, reason="between ranks: mpirun -n 2 (to 4)")
WARM_UP, REPETITIONS = 5, 20
COLLECTIVES = ["Allreduce", "Reduce", "Reduce_scatter_block", "Bcast", "Allgather", "Alltoall"]


@pytest.fixture(params=["slots", "messages"], autouse=True)
def lane(request, monkeypatch):
    """Chunks through memory that both ranks share, or as messages, as between nodes."""
    if request.param == "messages":
        monkeypatch.setattr(envelopes, "own", lambda: None)
    return request.param


@pytest.fixture(autouse=True)
def prompt(monkeypatch):
    monkeypatch.setattr(DEVICE, "record", lambda s: emulated.EmulatedEvent(DEVICE, DEVICE.stream_of(s), 0))


@pytest.fixture
def comm():
    for stream in list(DEVICE._streams.values()):  # what other tests left: also rings of their threads, and garbage
        stream.synchronize()
    gc.collect()
    for _ in range(5):  # an event may say "not yet" for some time
        pool_of(DEVICE).trim()
    return gdcomm.Communicator(path="staged")


class Counts(NamedTuple):
    """What has been allocated so far."""

    misses: int  # of the pool
    page_locked: int  # calls of the device that page-lock memory
    budget: int  # bytes page-locked now
    hits: int


class Counter:
    """Counts allocations of page-locked and of device memory.

    Attributes:
        device: bytes of each device allocation since it was cleared.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device: list[int] = []
        self._page_locked = 0
        allocate, pinned, register = emulated._Allocation.__init__, DEVICE.pinned, DEVICE.host_register

        def allocated(base, device, nbytes):
            self.device.append(nbytes)
            allocate(base, device, nbytes)

        def locked(work, *arguments, **more):
            self._page_locked += 1
            return work(*arguments, **more)

        monkeypatch.setattr(emulated._Allocation, "__init__", allocated)
        monkeypatch.setattr(DEVICE, "pinned", lambda *a, **k: locked(pinned, *a, **k))
        monkeypatch.setattr(DEVICE, "host_register", lambda *a, **k: locked(register, *a, **k))

    def counts(self) -> Counts:
        stats = pool_of(DEVICE).stats()
        return Counts(stats["misses"], self._page_locked, of_process().used, stats["hits"])


@pytest.fixture
def counter(monkeypatch):
    return Counter(monkeypatch)


@pytest.fixture
def ways(monkeypatch):
    """Envelopes sent and own algorithms run by this rank."""
    seen = []
    start, run = envelopes.Outgoing.__init__, collectives.Job.run
    monkeypatch.setattr(envelopes.Outgoing, "__init__", lambda *a: (seen.append("envelope"), start(*a))[1])
    monkeypatch.setattr(collectives.Job, "run", lambda *a: (seen.append("algorithm"), run(*a))[1])
    return seen


def values(count, rank=None):
    return ((np.arange(count) * 7 + 13 * (RANK if rank is None else rank)) % 101).astype(np.float32)


def repeat(step, counter):
    """Repeat a step that ends with its stream drained: no page-locked memory is allocated, and device memory that a
    repetition takes is given back, in equal sizes each time, so that a pool serves it.

    Returns:
        Bytes of each device allocation of one repetition, and how often the pool had a block in all of them.
    """
    for _ in range(WARM_UP):
        step()
    before, sizes, in_use = counter.counts(), [], []
    for _ in range(REPETITIONS):
        counter.device.clear()
        step()
        sizes.append(sorted(counter.device))
        progress.poll()  # lets go of requests that are complete, and of their arrays
        in_use.append(DEVICE._memory.total())
    after = counter.counts()
    assert after[:3] == before[:3], f"page-locked memory was allocated: {before} became {after}"
    assert len({*map(tuple, sizes)}) == 1, f"device allocations differ: {sizes}"
    # The least of several: gdcomm's thread may be looking at one of them just now.
    assert min(in_use[-5:]) <= min(in_use[:5]), f"device memory in use grows: {in_use}"
    return sizes[0], after.hits - before.hits


# -- nothing is allocated ------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [8, 64 << 10, 3 << 20, 20 << 20])
def test_messages_allocate_nothing(comm, counter, ways, nbytes):
    count = nbytes // 4
    x, y, z = DEVICE.array(values(count)), DEVICE.zeros(count, np.float32), DEVICE.zeros(count, np.float32)

    def step():
        receiving = comm.Irecv(y, LAST, 1)
        comm.Send(x, NEXT, 1)
        receiving.Wait()
        sending = comm.Isend(y, LAST, 2)
        comm.Recv(z, NEXT, 2)
        sending.Wait()
        DEVICE.synchronize(None)

    sizes, hits = repeat(step, counter)
    assert sizes == []
    if nbytes <= 64 << 10:  # the blocking calls go by the thread's own ring, the others take a block each
        assert hits == 2 * REPETITIONS
    else:
        assert hits >= 4 * REPETITIONS
    assert len(ways) == (2 * (WARM_UP + REPETITIONS) if nbytes >= SMALLEST else 0)
    assert np.array_equal(DEVICE.asnumpy(y), values(count, LAST))
    assert np.array_equal(DEVICE.asnumpy(z), values(count))


def collective(comm, name, nbytes):
    """A call of a collective of a message of about so many bytes, what it writes, and what must be there then."""
    count = nbytes // 4 // SIZE * SIZE
    each = count // SIZE
    own, mine = slice(RANK * each, (RANK + 1) * each), values(count)
    total = sum(values(count, rank) for rank in range(SIZE))
    root = SIZE - 1
    x, y = DEVICE.array(mine), DEVICE.zeros(count, np.float32)
    block, piece = DEVICE.array(mine[:each]), DEVICE.zeros(each, np.float32)
    cases: dict[str, Any] = {
        "Allreduce": (lambda: comm.Allreduce(x, y), y, total),
        "Reduce": (lambda: comm.Reduce(x, y if root == RANK else None, MPI.SUM, root), y, total),
        "Reduce_scatter_block": (lambda: comm.Reduce_scatter_block(x, piece), piece, total[own]),
        "Bcast": (lambda: comm.Bcast(x if root == RANK else y, root), y, values(count, root)),
        "Allgather": (lambda: comm.Allgather(block, y), y, np.concatenate([values(each, r) for r in range(SIZE)])),
        "Alltoall": (lambda: comm.Alltoall(x, y), y, np.concatenate([values(count, r)[own] for r in range(SIZE)])),
    }
    call, target, right = cases[name]
    if (name == "Bcast" and root == RANK) or (name == "Reduce" and root != RANK):
        right = np.zeros(count, np.float32)  # not written
    return call, target, right


@pytest.mark.parametrize("nbytes", [1 << 10, 4 << 20])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_allocate_nothing(comm, counter, ways, name, nbytes):
    call, target, right = collective(comm, name, nbytes)

    def step():
        call()
        DEVICE.synchronize(None)

    sizes, _ = repeat(step, counter)
    assert np.array_equal(DEVICE.asnumpy(target), right)
    assert ("algorithm" in ways) == (nbytes >= SMALLEST)
    # Scratch of own algorithms is device memory: on CUDA from CuPy's pool, which has these sizes after the first time.
    assert sum(sizes) <= (2 * nbytes if nbytes >= SMALLEST else 0)


@pytest.mark.parametrize("several", [1, 3])
@pytest.mark.parametrize("name", ["Iallreduce", "Ibcast", "Ialltoall"])
def test_nonblocking_collectives_allocate_nothing(comm, counter, ways, name, several):
    count = (4 << 20) // 4 // SIZE * SIZE
    xs = [DEVICE.array(values(count)) for _ in range(several)]
    ys = [DEVICE.zeros(count, np.float32) for _ in range(several)]

    def start(x, y):
        return comm.Ibcast(x, 0) if name == "Ibcast" else getattr(comm, name)(x, y)

    def step():
        for request in [start(x, y) for x, y in zip(xs, ys, strict=True)]:
            request.Wait()
        DEVICE.synchronize(None)

    streams = len(DEVICE._streams)
    sizes, _ = repeat(step, counter)
    assert len(DEVICE._streams) - streams <= 2 * several + 2  # borrowed, and used again
    assert ways.count("algorithm") == several * (WARM_UP + REPETITIONS)
    assert sum(sizes) <= several * 8 << 20


# -- bounded memory ------------------------------------------------------------------------------


@pytest.fixture
def peak(monkeypatch):
    """The most bytes that this rank's pool had lent or was waiting for at once."""
    most = [0]
    lend = PinnedPool._lend

    def watched(pool, *arguments):
        lend(pool, *arguments)
        most[0] = max(most[0], pool._leased_bytes + sum(block.nbytes for _, block in pool._pending))

    monkeypatch.setattr(PinnedPool, "_lend", watched)
    return most


@pytest.mark.parametrize("nbytes", [20 << 20, 80 << 20])
def test_a_pending_transfer_holds_a_few_chunks(comm, peak, lane, nbytes):
    """The sender: the envelope, and 4 chunks where they are messages. The receiver: 4 chunks where they are messages,
    and the array's mirror, which is page-locked up to 64 MiB only. Slots are page-locked once, whatever the messages.
    """
    x, y = DEVICE.array(values(nbytes // 4)), DEVICE.zeros(nbytes // 4, np.float32)
    pool, budget = pool_of(DEVICE), of_process()
    held, used = pool.stats()["leased"], budget.used
    chunk = size_class(envelopes.MESSAGES.chunk(nbytes)) if lane == "messages" else 0
    sender = size_class(ENVELOPE) + DEPTH * chunk
    receiver = DEPTH * chunk + (size_class(nbytes) if nbytes <= LARGEST_PINNED else 0)
    sending = comm.Isend(x, NEXT)
    assert pool.stats()["leased"] - held == sender
    receiving = comm.Irecv(y, LAST)
    gdcomm.Request.Waitall([sending, receiving])
    assert peak[0] - held <= sender + receiver
    assert pool.stats()["leased"] == held
    slots = 2 * SLOTS * SLOT if lane == "slots" else 0  # this rank's and its neighbour's, locked at their first use
    last = chunk  # it is shorter than the others, and has a block of its own size
    assert budget.used - used <= sender + receiver + slots + last
    assert np.array_equal(DEVICE.asnumpy(y), values(nbytes // 4, LAST))


# -- overlap -------------------------------------------------------------------------------------


@contextmanager
def busy():
    """Work on another stream, that nobody waits for meanwhile; gives what tells that it has run."""
    stream, ran = DEVICE.Stream(), []
    DEVICE.launch(stream, lambda _: ran.append(True), DEVICE.empty(1))
    yield ran
    assert not ran
    stream.synchronize()
    assert ran


@pytest.mark.parametrize("nbytes", [1 << 10, 3 << 20])
def test_a_collective_in_the_background_waits_for_no_other_stream(comm, nbytes):
    count = nbytes // 4
    with busy() as ran, DEVICE.Stream() as stream:
        x, y = DEVICE.array(values(count)), DEVICE.zeros(count, np.float32)
        if RANK == SIZE - 1:  # it takes part only once the call has returned on all others
            for rank in range(SIZE - 1):
                WORLD.recv(source=rank)
        request = comm.Iallreduce(x, y)
        if RANK < SIZE - 1:
            assert not request.Test()
            WORLD.send(None, SIZE - 1)
        assert not ran
        assert completes(request)
        request.Wait()
        assert not ran
        assert np.array_equal(DEVICE.asnumpy(y, stream), sum(values(count, rank) for rank in range(SIZE)))


@pytest.mark.parametrize("nbytes", [1 << 10, 3 << 20])
def test_messages_in_the_background_wait_for_no_other_stream(comm, nbytes):
    count = nbytes // 4
    with busy() as ran, DEVICE.Stream() as stream:
        x, y = DEVICE.array(values(count)), DEVICE.zeros(count, np.float32)
        receiving = comm.Irecv(y, LAST)
        assert not receiving.Test()
        WORLD.Barrier()  # nobody sends before all have come from Irecv
        sending = comm.Isend(x, NEXT)
        assert not ran
        assert completes(receiving)
        assert completes(sending)
        gdcomm.Request.Waitall([sending, receiving])
        assert not ran
        assert np.array_equal(DEVICE.asnumpy(y, stream), values(count, LAST))
