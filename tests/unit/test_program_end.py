"""How programs end."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("how", ["forgotten", "pending", "after_finalize"])
def test_pain_87_programs_end_quietly(how):
    """Leases, requests and the progress thread at the end of a program, in whatever state it leaves them."""
    end = {
        "forgotten": "del request",
        "pending": "device.empty(3)",
        "after_finalize": "request.Wait(); MPI.Finalize(); del x",
    }[how]
    program = (
        "import gdcomm, gdcomm.testing\nfrom mpi4py import MPI\n"
        "device = gdcomm.testing.emulate()\ncomm = gdcomm.Communicator(MPI.COMM_SELF, path='staged')\n"
        "x, y = device.array([1.0] * 9999), device.empty(9999)\n"
        "comm.Irecv(y, 0)\nrequest = comm.Isend(x, 0)\n" + end
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
