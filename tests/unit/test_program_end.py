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


@pytest.mark.parametrize(
    "forgotten",
    [
        "it = gdcomm.offload(device.zeros(50_000) for _ in range(9)); next(it)",
        "it = gdcomm.prefetch(gdcomm.prefetch(np.zeros(50_000) for _ in range(10**9))); next(it)",
        "s = gdcomm.Signal(); s.stream_wait(device.Stream(), 1, timeout=60)",
        "s = gdcomm.Signal(); s.stream_set(device.Stream(), 1); del s",
        "x = np.zeros(10**6); gdcomm.register(x)",
        "x = [gdcomm.pinned_zeros(10**6)]; x.append(x); gdcomm.copy(device.zeros(10**6), x[0], block=False)",
        "both = gdcomm.mapped_empty(10**6); device.launch(None, lambda v: v.fill(1), both.device)",
        "gdcomm.put(gdcomm.pinned_zeros((9, 9)), [1], device.zeros((1, 9)), block=False)",
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), gdcomm.pinned_zeros(9))).start()",
    ],
)
def test_programs_end_quietly_with_local_transfers_under_way(forgotten):
    begin = "import gdcomm, gdcomm.testing, numpy as np\ndevice = gdcomm.testing.emulate()\n"
    program = f"{begin}{forgotten}\nprint('end')"
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
