"""Device arrays between ranks: staged, handed to MPI, and as users stage by hand. Verified, medians, JSON.

    mpirun -n 2 python bench/gpu_paths.py --json out.json

Columns: `staged` and `auto` are gdcomm; `naive` is cupy.asnumpy, mpi4py, .set; `raw` is mpi4py handed the CuPy
array after a stream synchronise (only where this MPI's capability allows). Times in microseconds: the
slowest rank of each repetition, median over repetitions, all columns in turns. p2p is half a round trip.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import time

import cupy
import numpy as np
from mpi4py import MPI

import gdcomm
from gdcomm.capabilities import local_capabilities

WORLD = MPI.COMM_WORLD


def measure(ways, seconds: float = 0.6) -> dict[str, float]:
    """Time all ways in turns, in both directions: medians over repetitions of the slowest rank's time, in us."""
    names = list(ways)
    for name in names:
        for _ in range(3):
            ways[name]()
    start = time.perf_counter()
    for name in names:
        ways[name]()
    once = WORLD.allreduce(time.perf_counter() - start, MPI.MAX)
    times = np.empty((max(9, min(1000, int(seconds / once))), len(names)))
    for i, row in enumerate(times):
        order = np.roll(np.arange(len(names)), i)[:: 1 if i % 2 else -1]
        for column in order:
            WORLD.Barrier()
            start = time.perf_counter()
            ways[names[column]]()
            row[column] = time.perf_counter() - start
    worst = np.empty_like(times)
    WORLD.Allreduce(times, worst, MPI.MAX)
    return dict(zip(names, np.median(worst, axis=0) * 1e6, strict=True))


def wrong(ways, y, expected) -> int:
    """Elements of `y` that differ from what each way must leave there, over all ranks."""
    count = 0
    for call in ways.values():
        y.fill(-1)
        call()
        count += 0 if expected is None else int((y != expected).sum())
    return WORLD.allreduce(count)


def p2p(comm, x, y, send, recv):
    peer = 1 - comm.rank

    def call():
        if comm.rank == 0:
            send(x, peer)
            recv(y, peer)
        elif comm.rank == 1:
            recv(y, peer)
            send(x, peer)
        cupy.cuda.get_current_stream().synchronize()

    return call


def in_turns(auto, call, repeats: int) -> dict[str, float]:
    """Time of `call` on raw mpi4py and on gdcomm, both in turns: the medians, in us."""
    turns = {"raw": [], "host": []}
    for _ in range(15):
        for name, comm in (("raw", WORLD), ("host", auto)):
            WORLD.Barrier()
            start = time.perf_counter()
            for _ in range(repeats):
                call(comm)
            turns[name].append((time.perf_counter() - start) / repeats * 1e6)
    return {name: float(np.median(times)) for name, times in turns.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    parser.add_argument("--note", default="")
    options = parser.parse_args()
    staged, auto = gdcomm.Communicator(path="staged"), gdcomm.Communicator(path="auto")
    can = local_capabilities()
    sync = cupy.cuda.get_current_stream().synchronize
    rows = []
    for nbytes in (8, 4096, 65536, 1 << 20, 16 << 20, 128 << 20):
        n = nbytes // 8
        x = cupy.arange(n, dtype="d") + WORLD.rank
        y = cupy.empty(n, "d")

        def naive_send(a, peer):
            WORLD.Send(cupy.asnumpy(a), peer)

        def naive_recv(a, peer, n=n):
            host = np.empty(n)
            WORLD.Recv(host, peer)
            a.set(host)

        def raw_send(a, peer):
            sync()
            WORLD.Send(a, peer)

        ways = {
            "staged": p2p(WORLD, x, y, staged.Send, staged.Recv),
            "naive": p2p(WORLD, x, y, naive_send, naive_recv),
        }
        if "p2p" in can.groups:
            ways["auto"] = p2p(WORLD, x, y, auto.Send, auto.Recv)
            ways["raw"] = p2p(WORLD, x, y, raw_send, WORLD.Recv)
        row = {"operation": "p2p", "nbytes": nbytes}
        expected = cupy.arange(n, dtype="d") + (1 - WORLD.rank)
        row["wrong"] = wrong(ways, y, expected if WORLD.rank < 2 else None)
        row |= {name: us / 2 for name, us in measure(ways).items()}
        rows.append(row)

        def naive_allreduce(a=x, b=y, n=n):
            host = np.empty(n)
            WORLD.Allreduce(cupy.asnumpy(a), host)
            b.set(host)
            sync()

        def staged_allreduce(a=x, b=y):
            staged.Allreduce(a, b)
            sync()

        ways = {"staged": staged_allreduce, "naive": naive_allreduce}
        row = {"operation": "allreduce", "nbytes": nbytes}
        expected = cupy.arange(n, dtype="d") * WORLD.size + WORLD.size * (WORLD.size - 1) / 2
        row["wrong"] = wrong(ways, y, expected)
        rows.append(row | measure(ways))
    host_rows = []
    for nbytes in (8, 65536, 1 << 20):
        a, b = np.arange(nbytes // 8, dtype="d"), np.empty(nbytes // 8)
        repeats = 500 if nbytes == 8 else 50

        def allreduce(c, a=a, b=b):
            c.Allreduce(a, b)

        def round_trip(c, a=a, b=b):
            if WORLD.rank == 0:
                c.Send(a, 1)
                c.Recv(b, 1)
            elif WORLD.rank == 1:
                c.Recv(b, 0)
                c.Send(a, 0)

        pingpong = {name: us / 2 for name, us in in_turns(auto, round_trip, repeats).items()}
        host_rows.append({"nbytes": nbytes, "allreduce": in_turns(auto, allreduce, repeats), "p2p": pingpong})
    if WORLD.rank == 0:
        for row in rows:
            print({k: round(v, 1) if isinstance(v, float) else v for k, v in row.items()})
        for row in host_rows:
            print(row)
        properties = cupy.cuda.runtime.getDeviceProperties(0)
        result = {
            "command": " ".join(sys.argv), "ranks": WORLD.size, "note": options.note, "unit": "us",
            "date": datetime.date.today().isoformat(), "gpu": properties["name"].decode(),
            "machine": f"{platform.machine()}, {platform.processor() or 'cpu'}",
            "mpi": MPI.Get_library_version().split(",")[0].strip("\0"), "cupy": cupy.__version__,
            "capabilities": [sorted(can.groups), can.reason], "device_arrays": rows, "host_arrays": host_rows,
        }  # fmt: skip
        if options.json:
            with open(options.json, "w") as file:
                json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
