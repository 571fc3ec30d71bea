"""Collectives over simulated nodes: bytes on each node's cable, and how much of its rate is reached. Verified, JSON.

    launch/nodes run 2 --rate 10gbit -n 4 python bench/wire.py --json out.json

`gdcomm` is arrays of the emulated device, path staged, own algorithms; `raw` is mpi4py on host arrays; both in turns.
Seconds: the slowest rank of each repetition; `s` is the median over repetitions, `best_s` the shortest. Bytes: counted
on each node's interface, sent and received, with all that crosses it (headers, acknowledgements, MPI's own messages,
the barriers between repetitions); median. TCP leaves it to the interface to cut large segments: the counter sees one
header for each of them, a network card would add one for each frame.

`least` is the fewest bytes that must cross the busiest cable in one direction, `wire_s` the time that they take at
the rate, of which IP and TCP headers leave `payload`. `reached` is wire_s / s. On the emulated device the
processors do what a GPU would do, so much of the time may go to other things than the wire:
`across_s` is the part of gdcomm's seconds in which messages between nodes are on their way, `across` is
wire_s / across_s.
`exchange` is MPI's Sendrecv of host arrays between nodes, all ranks at once, as many bytes each way as Allreduce must
send: what the processors and MPI make of the wire without a collective. `copied` is the same in 1 MiB pieces with a
copy before each is sent and after it is received: what they make of it with staging.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

import gdcomm
import gdcomm.testing
from gdcomm.algorithms.steps import Flight
from gdcomm.links import DeviceLink

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
RATE = float(os.environ.get("GDCOMM_SIMULATED_RATE", "nan")) / 8  # bytes/s
FRAME, HEADERS = 14, 52  # bytes of a frame beside its MTU, and of IP and TCP within that
PIECE, DEPTH = 1 << 20, 4


class Cable:
    """This rank's node and its interface."""

    def __init__(self) -> None:
        hosts = WORLD.allgather(MPI.Get_processor_name())
        self.nodes = len(set(hosts))
        self.first = hosts.index(hosts[RANK]) == RANK
        mine, others = ([r for r in range(SIZE) if (hosts[r] == hosts[RANK]) is same] for same in (True, False))
        self.peer = others[mine.index(RANK)] if self.nodes == 2 and len(mine) == len(others) else None
        self.links = [link for link in Path("/sys/class/net").iterdir() if link.name != "lo"]
        self.mtu = min((int((link / "mtu").read_text()) for link in self.links), default=0)
        self.far = [host != hosts[RANK] for host in hosts]
        self.across = self.since = 0.0  # seconds in messages between nodes; since when there are some
        self.crossing = 0  # how many flights

    def count(self) -> np.ndarray:
        """Bytes that the interfaces sent and received so far."""
        files = [[link / "statistics" / f"{way}_bytes" for link in self.links] for way in ("tx", "rx")]
        return np.array([sum(int(file.read_text()) for file in way) for way in files])

    def watch(self) -> None:
        """Have gdcomm's collectives add up `across`."""
        transfer = DeviceLink.transfer

        def watched(link, sends, recvs):
            leave = any(self.far[rank] for vector, rank in [*sends, *recvs] if len(vector))
            flight = transfer(link, sends, recvs)
            return Crossing(self, flight) if leave else flight

        DeviceLink.transfer = watched


class Crossing(Flight):
    """A flight between nodes. Time in which there are several counts once."""

    def __init__(self, cable: Cable, flight: Flight) -> None:
        self.cable, self.flight, self.over = cable, flight, False
        if not cable.crossing:
            cable.since = time.perf_counter()
        cable.crossing += 1

    def test(self) -> bool:
        if not self.over and self.flight.test():
            self._land()
        return self.over

    def wait(self) -> None:
        self.flight.wait()
        self._land()

    def watched(self):
        return self.flight.watched()

    def _land(self) -> None:
        self.over = True
        self.cable.crossing -= 1
        if not self.cable.crossing:
            self.cable.across += time.perf_counter() - self.cable.since


def measure(cable, ways, repeats):
    """Run all ways in turns.

    Returns:
        Of each: its seconds, those in messages between nodes, and bytes sent and received by each node; the seconds
        are of all repetitions, the others are medians.
    """
    times, counts = np.zeros((repeats + 1, len(ways), 2)), [[] for _ in ways]
    for turn in range(repeats + 1):  # the first connects the nodes and fills pools
        for i in range(len(ways))[:: 1 if turn % 2 else -1]:
            WORLD.Barrier()
            before, cable.across, start = cable.count(), 0.0, time.perf_counter()
            list(ways.values())[i]()
            times[turn, i] = time.perf_counter() - start, cable.across
            WORLD.Barrier()
            all_counts = WORLD.allgather(cable.count() - before if cable.first else None)
            counts[i].append([count for count in all_counts if count is not None])
    worst = np.empty_like(times)
    WORLD.Allreduce(times, worst, MPI.MAX)
    return {
        name: (worst[1:, i, 0], np.median(worst[1:, i, 1]), np.median(counts[i][1:], axis=0))
        for i, name in enumerate(ways)
    }


def exchange(cable, nbytes):
    """Host arrays between nodes at once, and in pieces that are copied on both sides."""
    out, back, end = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    pieces = [slice(start, start + PIECE) for start in range(0, nbytes, PIECE)]
    room = np.empty((DEPTH, PIECE), np.uint8)

    def whole():
        WORLD.Sendrecv(out, cable.peer, 0, back, cable.peer, 0)

    def copied():
        recvs = [WORLD.Irecv(back[piece], cable.peer) for piece in pieces]
        sends = []
        for i, piece in enumerate(pieces):
            if i >= DEPTH:
                sends[i - DEPTH].Wait()
            data = room[i % DEPTH][: len(out[piece])]
            data[:] = out[piece]
            sends.append(WORLD.Isend(data, cable.peer))
            if i >= DEPTH:
                recvs[i - DEPTH].Wait()
                end[pieces[i - DEPTH]] = back[pieces[i - DEPTH]]
        for i in range(max(0, len(pieces) - DEPTH), len(pieces)):
            sends[i].Wait()
            recvs[i].Wait()
            end[pieces[i]] = back[pieces[i]]

    return {"exchange": whole, "copied": copied}


def cases(cable, nbytes):
    """Of each operation: the fewest bytes on the busiest cable, this rank's arrays, the call, and what it leaves."""
    share, whole = (cable.nodes - 1) / cable.nodes, (np.arange(nbytes // 4) % 1021).astype("<f4")
    block, last = whole[: whole.size // SIZE], SIZE - 1
    blocks = np.concatenate([block + rank for rank in range(SIZE)])
    return {
        "Allreduce": (2 * share * nbytes, whole + RANK, np.zeros_like(whole), whole * SIZE + SIZE * last // 2),
        "Allgather": (share * blocks.nbytes, block + RANK, np.zeros_like(blocks), blocks),
        "Bcast": (float(nbytes), None, whole + last if last == RANK else np.zeros_like(whole), whole + last),
    }


def call(comm, operation, x, y):
    if operation == "Bcast":
        comm.Bcast(y, SIZE - 1)
    else:
        getattr(comm, operation)(x, y)


def row(cable, comm, device, operation, nbytes, case, repeats):
    """Measure one operation at one size."""
    least, x, y, right = case
    dx, dy = None if x is None else device.array(x), device.array(y)

    def ours():
        call(comm, operation, dx, dy)
        device.synchronize(device.current_stream())

    ways = {"gdcomm": ours, "raw": lambda: call(WORLD, operation, x, y)}
    if operation == "Allreduce" and cable.peer is not None:
        ways |= exchange(cable, nbytes * cable.nodes // SIZE)
    figures = measure(cable, ways, repeats)
    wrong = WORLD.allreduce(int((device.asnumpy(dy) != right).sum() + (y != right).sum()))
    found = {"operation": operation, "nbytes": nbytes, "way": comm.explain(operation, dy if dx is None else dx)}
    found |= {"least": least, "wire_s": None if np.isnan(RATE) else least / RATE, "wrong": wrong}
    for name, (seconds, across, counts) in figures.items():
        middle = float(np.median(seconds))
        found[name] = {"s": middle, "best_s": float(seconds.min())}
        found[name] |= {"sent": counts[:, 0].tolist(), "received": counts[:, 1].tolist()}
        found[name] |= {"bytes_to_least": counts.max() / least}
        if found["wire_s"]:
            found[name]["reached"] = found["wire_s"] / middle
        if name == "gdcomm":
            found[name]["across_s"] = float(across)
            if found["wire_s"]:
                found[name]["across"] = found["wire_s"] / across
    return found


def show(found) -> None:
    """A line for each way."""
    for name, cell in found.items():
        if isinstance(cell, dict):
            text = f"{found['operation']:10}{found['nbytes'] >> 20:4} MiB  {name:9}{cell['s'] * 1e3:8.1f} ms"
            text += f" (best {cell['best_s'] * 1e3:.1f})"
            text += f"  bytes {cell['bytes_to_least']:.3f} of the least"
            text += f"  {cell['reached']:6.1%} of the rate" if "reached" in cell else ""
            text += f"  ({cell['across']:.1%} while between nodes)" if "across" in cell else ""
            print(text, f" wrong {found['wrong']}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    parser.add_argument("--note", default="")
    parser.add_argument("--mib", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    device, cable = gdcomm.testing.emulate(), Cable()
    if cable.nodes < 2:
        print(f"one node only: {__doc__.splitlines()[2].strip()}", file=sys.stderr)
        return 1
    device.early = 1.0  # its work is done as soon as it is queued
    cable.watch()
    comm = gdcomm.Communicator(path="staged")
    rows = []
    for nbytes in (mib << 20 for mib in options.mib):
        for operation, case in cases(cable, nbytes).items():
            rows.append(row(cable, comm, device, operation, nbytes, case, options.repeats))
            if RANK == 0:
                show(rows[-1])
    if RANK == 0 and options.json:
        delay = os.environ.get("GDCOMM_SIMULATED_DELAY")
        result = {
            "command": " ".join(["python bench/wire.py", *sys.argv[1:]]), "nodes": cable.nodes, "ranks": SIZE,
            "bits_per_s": None if np.isnan(RATE) else RATE * 8, "delay_s": delay and float(delay), "mtu": cable.mtu,
            "payload": (cable.mtu - HEADERS) / (cable.mtu + FRAME), "repeats": options.repeats,
            "date": datetime.date.today().isoformat(), "machine": f"{platform.machine()}, {os.cpu_count()} processors",
            "mpi": " ".join(MPI.Get_library_version().split("\n")[0].split(",")[0].strip("\0 ").split()),
            "note": options.note, "rows": rows,
        }  # fmt: skip
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    return 1 if any(found["wrong"] for found in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
