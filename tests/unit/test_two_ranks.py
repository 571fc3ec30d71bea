"""Programs of two ranks that need processes of their own: how they end, and on what machine they run."""

from __future__ import annotations

import subprocess
import time

import pytest

from gdcomm import launch

BEGIN = """
import sys, time
import gdcomm, gdcomm.testing
import numpy as np
from mpi4py import MPI
from gdcomm import channels, envelopes, requests
device, world = gdcomm.testing.emulate(), MPI.COMM_WORLD
comm, rank, count = gdcomm.Communicator(path="staged"), world.rank, int(sys.argv[2])
if sys.argv[1] == "messages":
    envelopes.own = lambda: None
x, y = device.array(np.arange(count, dtype="f4")), device.zeros(count, np.float32)
"""


def run(program, *arguments, first=""):
    """Run it on two ranks, `first` before gdcomm is loaded: how it ended, what it said, and how long it took."""
    mpirun = launch.find_mpirun()
    assert mpirun is not None
    command = launch.command(mpirun, 2, ["-c", first + BEGIN + program, *map(str, arguments)])
    start = time.monotonic()
    done = subprocess.run(command, env=launch.environment(), capture_output=True, text=True, timeout=60)
    return done, time.monotonic() - start


CHUNKS, WHOLE = 9 << 20, 50_000  # float32s


@pytest.mark.parametrize(
    ("end", "lane", "count"),
    [
        ("sent.Free()", "slots", CHUNKS),
        ("sent.Free()", "messages", CHUNKS),
        ("sent.Free()", "messages", WHOLE),
        ("del sent", "slots", CHUNKS),
        ("sent.Free(); MPI.Finalize()", "messages", CHUNKS),
    ],
)
def test_a_freed_send_is_completed_when_the_program_ends(end, lane, count):
    program = f"""
if rank == 0:
    sent = comm.Isend(x, 1)
    {end}
else:
    time.sleep(1)  # the sender has come to its end
    comm.Recv(y, 0)
    print("right" if np.array_equal(device.asnumpy(y), device.asnumpy(x)) else "wrong")
"""
    done, _ = run(program, lane, count)
    assert (done.returncode, done.stdout, done.stderr) == (0, "right\n", "")


def test_a_receive_that_nobody_waits_for_ends_with_the_program():
    done, seconds = run("comm.Irecv(y, 1 - rank)", "slots", CHUNKS)
    assert done.returncode == 0  # MPICH complains that it is pending, as it does without gdcomm
    assert seconds < 30


def test_a_send_that_nobody_receives_does_not_keep_the_program():
    program = """
requests.QUIET_AT_END_S = 0.5
if rank == 0:
    comm.Isend(x, 1)
"""
    done, seconds = run(program, "slots", CHUNKS)
    assert done.returncode == 0
    assert "1 sends were not received for 0.5 s" in done.stderr
    assert seconds < 30


def test_after_an_error_nothing_is_waited_for():
    program = """
if rank == 0:
    comm.Isend(x, 1)
    1 / 0
"""
    done, seconds = run(program, "slots", CHUNKS)
    assert "ZeroDivisionError" in done.stderr
    assert "not received" not in done.stderr
    assert seconds < 30


@pytest.mark.parametrize(
    ("machine", "barrier", "slots"), [("x86_64", False, True), ("aarch64", True, True), ("aarch64", False, False)]
)
def test_slots_are_used_where_stores_can_be_ordered(machine, barrier, slots):
    first = f"""
import platform
platform.machine = lambda: "{machine}"
from mpi4py import MPI
from gdcomm import fences
allowed, syncs, allocate = {barrier}, [], MPI.Win.Allocate_shared
class Window:
    def __init__(self, window):
        self.Lock_all, self._sync = window.Lock_all, window.Sync
    def Sync(self):
        syncs.append(True)
        self._sync()
def Allocate_shared(*arguments, **more):
    if not allowed:
        raise MPI.Exception(MPI.ERR_OTHER)
    return Window(allocate(*arguments, **more))
fences.MPI = type("Faked", (), dict(vars(MPI), Win=type("Win", (), dict(Allocate_shared=Allocate_shared))))
"""
    program = """
sent = comm.Isend(x, 1 - rank)
comm.Recv(y, 1 - rank)
sent.Wait()
assert np.array_equal(device.asnumpy(y), device.asnumpy(x))
shared = comm._channel.shadow.arenas[1 - rank] is not None
if rank == 0:
    print(shared, len(syncs))
"""
    done, _ = run(program, "slots", CHUNKS, first=first)
    assert done.returncode == 0  # Open MPI may say something of UCX when a window is made
    shared, syncs = done.stdout.split()
    assert shared == str(slots)
    # Nine chunks each way: each is produced, found and consumed, and up to four are found to be given back at a time.
    assert int(syncs) >= 3 * 9 + 3 if barrier else int(syncs) == 0


def test_messages_go_on_after_collectives_were_broken_off():
    """Each breaks off with slots in use: those are lost, and nobody waits for them."""
    program = """
import threading
from gdcomm import patience
pause = patience.Patience.pause
def interrupted(self):
    if threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt
    pause(self)
for _ in range(3):
    broken = comm.Dup()
    patience.Patience.pause = interrupted
    try:
        broken.Allreduce(x, y)
        print("not broken off")
    except KeyboardInterrupt:
        pass
    patience.Patience.pause = pause
    world.Barrier()
other = comm.Dup()
for _ in range(2):
    sent = other.Isend(x, 1 - rank)
    other.Recv(y, 1 - rank)
    sent.Wait()
    other.Allreduce(x, y)
    if not np.array_equal(device.asnumpy(y), 2 * device.asnumpy(x)):
        print("wrong")
"""
    done, _ = run(program, "slots", CHUNKS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
