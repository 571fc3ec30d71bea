"""Messages of collectives through slots: how they are cut, that slots come back, that nobody waits in a circle."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import DEVICE
from mpi4py import MPI

import gdcomm
from gdcomm import collectives, devices
from gdcomm.arenas import PER_MESSAGE, SLOT, SLOTS, own
from gdcomm.devices import emulated
from gdcomm.express import Express, _cut
from gdcomm.links import DeviceLink, DeviceVector
from gdcomm.patience import Patience

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
LATE = 200  # times that an event says "not yet"


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 300_001, 1 << 20, (1 << 20) + 1, 5 << 20, 123_456_789])
def test_chunks_are_all_bytes_once_and_of_one_size(nbytes):
    chunks = _cut(nbytes)
    assert [offset for offset, _ in chunks] == [sum(size for _, size in chunks[:i]) for i in range(len(chunks))]
    assert sum(size for _, size in chunks) == nbytes
    assert all(0 < size <= SLOT for _, size in chunks)
    assert all(size == chunks[0][1] and size % 4096 == 0 for _, size in chunks[:-1])
    assert chunks[0][1] - chunks[-1][1] < 4096 * len(chunks)


@pytest.fixture
def late(monkeypatch):
    """Events that say "not yet" for long."""
    monkeypatch.setattr(DEVICE, "record", lambda s: emulated.EmulatedEvent(DEVICE, DEVICE.stream_of(s), LATE))


@pytest.fixture
def link(monkeypatch):
    """Joins the ranks, by express."""
    monkeypatch.setattr(collectives, "SMALLEST", 1)
    comm = gdcomm.Communicator(path="staged")
    comm.Bcast(DEVICE.zeros(10), 0)
    notes = comm._channel.notes
    assert isinstance(notes["express"], Express)
    return DeviceLink(comm._channel, comm._paths, notes["tag"], RANK, "SUM", notes["express"])


def vector(values):
    return DeviceVector(devices.find(DEVICE.array(np.asarray(values, np.float32))))


def content(vector):
    return DEVICE.asnumpy(vector.array.owner)


@pytest.mark.skipif(SIZE == 1, reason="between ranks: mpirun -n 2 (to 4)")
@pytest.mark.parametrize("name", ["Allreduce", "Bcast", "Allgather", "Alltoall", "Reduce", "Gather", "Scan"])
def test_all_slots_are_free_after_a_collective(link, late, name):
    comm, count = gdcomm.Communicator(path="staged"), (PER_MESSAGE + 1) * SLOT // 4 // SIZE * SIZE
    sent, received = DEVICE.zeros(count), DEVICE.zeros(count * (SIZE if name in ("Allgather", "Gather") else 1))
    free = len(own().free_slots)
    getattr(comm, name)(*([sent, 0] if name == "Bcast" else [sent, received]))
    assert len(own().free_slots) == free == SLOTS


@pytest.mark.skipif(SIZE == 1, reason="between ranks: mpirun -n 2 (to 4)")
def test_several_messages_to_one_rank_come_in_order(link, late):
    after, before = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    counts = [3, 700_000, 0, 1, 3 * PER_MESSAGE * SLOT // 4, 5]
    sends = [vector(np.arange(count) % 1000 + 1000 * i + RANK) for i, count in enumerate(counts)]
    recvs = [vector(np.zeros(count)) for count in counts]
    link.transfer([(piece, after) for piece in sends], [(piece, before) for piece in recvs]).wait()
    link.settle()
    for i, (count, piece) in enumerate(zip(counts, recvs, strict=True)):
        assert np.array_equal(content(piece), (np.arange(count) % 1000 + 1000 * i + before).astype(np.float32))
    link.close()


@pytest.mark.skipif(SIZE == 1, reason="between ranks: mpirun -n 2 (to 4)")
def test_a_rank_that_waits_for_other_messages_still_gives_slots_back(link, late):
    """Rank 0 sends its second message only when the slots of the first are free again."""
    apart, piece = link.apart(1), vector(np.full(1000, RANK))
    if RANK == 0:
        link.transfer([(piece, 1)], []).wait()
        patience = Patience()
        while not link.settled():
            patience.pause()
        apart.transfer([(piece, 1)], []).wait()
    elif RANK == 1:
        link.transfer([], [(piece, 0)]).wait()
        assert not link._express.idle, "the copy out of the slot is still under way"
        apart.transfer([], [(piece, 0)]).wait()
        assert np.all(content(piece) == 0)
    link.settle()
    link.close()
