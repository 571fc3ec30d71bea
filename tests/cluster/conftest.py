"""What all tests over several nodes share. Every rank runs every test in the same order."""

from __future__ import annotations

from pathlib import Path

import pytest
from mpi4py import MPI

import gdcomm.testing

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.Get_rank(), WORLD.Get_size()
HOSTS = WORLD.allgather(MPI.Get_processor_name())
PEER = next((r for r in range(SIZE) if HOSTS[r] != HOSTS[0]), 0)  # the first rank that is not on rank 0's node
DEVICE = gdcomm.testing.emulate(seed=11)


@pytest.fixture(autouse=True)
def together(request):
    """A rank whose test failed ends the job: the others would wait for it in the next collective."""
    yield
    if request.session.testsfailed:
        print(f"rank {RANK} on {HOSTS[RANK]}: {request.node.nodeid} failed", flush=True)
        WORLD.Abort(1)
    WORLD.Barrier()


def wire_bytes(directory=Path("/sys/class/net")):
    """Bytes that left this node so far. Messages within the node use `lo` or memory."""
    return sum(int((link / "statistics/tx_bytes").read_text()) for link in directory.iterdir() if link.name != "lo")
