"""A small program on the emulated device whose results are wrong if any wait is missing.

    mpirun -n 2 python tests/mutation/program.py staged|direct [multiple|serialized] [apart]

Nothing here synchronises, except where a final result is read. Streams other than the reader's stay
behind, so every case that says "another stream" shows that gdcomm itself has waited. With `serialized`
gdcomm has no progress thread, which could hide a missing drive. Exits nonzero on a wrong value, an
exception, a lease or a block that never comes back, and on a hang. With `apart` the ranks share no memory, as
on two nodes.
"""

# ruff: noqa: E402 - the watchdog and mpi4py's settings go before the imports

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import sys

import mpi4py

faulthandler.dump_traceback_later(float(os.environ.get("GDCOMM_WATCHDOG", "20")), exit=True)
mpi4py.rc.thread_level = sys.argv[2] if len(sys.argv) > 2 else "multiple"

import numpy as np
from checks import Produced, WrongError, check, queued, ramp, require, run
from mpi4py import MPI

import gdcomm
import gdcomm.testing
from gdcomm import channels, links
from gdcomm import collectives as own_collectives
from gdcomm.devices.emulated import EmulatedDevice, EmulatedEvent
from gdcomm.memory.pinned import PinnedPool, Slots

DEVICE = gdcomm.testing.emulate(seed=11)
THREAD = MPI.Query_thread() == MPI.THREAD_MULTIPLE
SIZES = [1, 3, 512, 4097, 8192, 131_072 + 5, 786_432 + 3]  # float64: 8 B to 6 MiB, round and not
TOKEN = np.zeros(1)
STREAMS = []
own_collectives.SMALLEST = 256 << 10  # two of the sizes go by our own algorithms, one after the other
links._FEWEST, links._LONG = 1, 2 << 20  # few and long blocks are copied by a kernel, too


def stream():
    STREAMS.append(DEVICE.Stream())
    return STREAMS[-1]


def blocking_both_ways(comm, peer):
    """Kernels before a call are seen, kernels after it may overwrite (send) or read (receive)."""
    for size in SIZES:
        s = stream()
        with s:
            x, y, z = queued(ramp(size, 10.0 * comm.rank), s), DEVICE.empty(size), DEVICE.empty(size)
            DEVICE.fill(y, -2.0, s)
            old = DEVICE.empty(size)
            DEVICE.launch(s, lambda a, b: np.copyto(b, a), y, old)  # reads what Recv will overwrite
            if comm.rank:
                comm.Recv(y, peer)
            comm.Send(x, peer)
            DEVICE.fill(x, -3.0, s)
            if not comm.rank:
                comm.Recv(y, peer)
            DEVICE.launch(s, lambda a, b: np.copyto(b, 2 * a), y, z)
            check(f"Recv {size}", z, 2 * ramp(size, 10.0 * peer), s)
            check(f"before Recv {size}", old, -2.0, s)


def sendrecv(comm, peer):
    for size in SIZES:
        s = stream()
        x, y = queued(ramp(size, 7.0 + comm.rank), s), DEVICE.empty(size)
        DEVICE.fill(y, -4.0, s)
        comm.Sendrecv(x, peer, 1, y, peer, 1, stream=s)
        DEVICE.fill(x, -5.0, s)
        comm.Sendrecv_replace(y, peer, 2, peer, 2, stream=s)
        check(f"Sendrecv {size}", y, ramp(size, 7.0 + comm.rank), s)


def two_streams(comm, peer):
    """The two ends of one call on two streams: each is waited for."""
    for size in SIZES:
        a, b = stream(), stream()
        x, y = queued(ramp(size, 30.0 + comm.rank), a), DEVICE.empty(size)
        DEVICE.fill(y, -6.0, b)
        comm.Sendrecv(Produced(x, a), peer, 1, Produced(y, b), peer, 1)
        DEVICE.fill(x, -7.0, a)
        check(f"two streams {size}", y, ramp(size, 30.0 + peer), b)
        total = DEVICE.empty(size)
        DEVICE.fill(total, -8.0, b)
        x = queued(ramp(size, comm.rank), a)
        comm.Allreduce(Produced(x, a), Produced(total, b))
        check(f"two streams Allreduce {size}", total, 2 * ramp(size, 0.5), b)


def nonblocking(comm, peer):
    """After Wait the data is there for every stream, and blocks go round while copies are queued."""
    for size in SIZES:
        s, other = stream(), stream()
        with s:
            xs = [queued(ramp(size, 100.0 * i + comm.rank), s) for i in range(3)]
            ys = [DEVICE.empty(size) for _ in xs]
            for y in ys:
                DEVICE.fill(y, -9.0, s)
            requests = [comm.Irecv(y, peer, i) for i, y in enumerate(ys)]
            requests += [comm.Isend(x, peer, i) for i, x in enumerate(xs)]
            (MPI.Request.Waitall if THREAD else gdcomm.Request.Waitall)(requests)
            require("a request that was waited for is null", all(r == MPI.REQUEST_NULL for r in requests))
            for i, y in enumerate(ys):
                check(f"Irecv {size}, another stream", y, ramp(size, 100.0 * i + peer), other)
            for x, y in zip(xs, ys, strict=True):
                DEVICE.fill(x, -10.0, s)
                DEVICE.launch(s, lambda a: np.negative(a, a), y)
            for i, y in enumerate(ys):
                check(f"work after Irecv {size}", y, -ramp(size, 100.0 * i + peer), s)


def completion(comm, peer):
    """Every way to complete a request: not before the message is sent, and then with the data in place."""

    def test_each(requests):
        return all([request.Test() for request in requests])

    def get_status(requests):
        return all([request.Get_status() for request in requests])

    def some(requests):
        return (gdcomm.Request.Testsome(requests) is None) or all(r == MPI.REQUEST_NULL for r in requests)

    def any_of(requests):
        gdcomm.Request.Testany(requests)
        return all(r == MPI.REQUEST_NULL for r in requests)

    def waits(requests):
        for request in requests:
            request.Wait()
        return True

    def waitany(requests):
        for _ in requests:
            gdcomm.Request.Waitany(requests)
        return True

    def waitsome(requests):
        while gdcomm.Request.Waitsome(requests):
            pass
        return True

    def waitall(requests):
        gdcomm.Request.Waitall(requests)
        return True

    polls = [test_each, get_status, gdcomm.Request.Testall, some, any_of]
    for size in (5, 140_000):
        for number, way in enumerate([*polls, waits, waitany, waitsome, waitall]):
            s, other = stream(), stream()
            with s:
                ys = [DEVICE.empty(size), DEVICE.empty(size)]
                for y in ys:
                    DEVICE.fill(y, -11.0, s)
                requests = [comm.Irecv(y, peer, 20 + i) for i, y in enumerate(ys)]
                if way in polls:  # of one request, too: `all` must not hide it
                    early = any(way([request]) for request in requests for _ in range(9))
                    require(f"{way.__name__}: no message was sent yet", not early)
                MPI.COMM_WORLD.Sendrecv(TOKEN, peer, 99, TOKEN.copy(), peer, 99)
                for i in range(2):
                    comm.Send(queued(ramp(size, 10.0 * number + i + comm.rank), s), peer, 20 + i)
                while not way(requests):
                    pass
                for i, y in enumerate(ys):
                    check(f"{way.__name__} {size}", y, ramp(size, 10.0 * number + i + peer), other)
                if way is get_status:
                    waits(requests)
                require(f"{way.__name__}: null after completion", all(r == MPI.REQUEST_NULL for r in requests))


def persistent(comm, peer):
    """Three starts, with kernels queued in between that refill and read the buffers."""
    for size in SIZES:
        s, other = stream(), stream()
        with s:
            x, y, z = DEVICE.empty(size), DEVICE.empty(size), DEVICE.zeros(size, stream=s)
            send, receive = comm.Send_init(x, peer, 3), comm.Recv_init(y, peer, 3)
            for turn in range(3):
                values = ramp(size, 1000.0 * turn + comm.rank)
                DEVICE.launch(s, lambda a, values=values: np.copyto(a, values), x)
                DEVICE.fill(y, -12.0, s)
                if turn == 1:
                    gdcomm.Prequest.Startall([receive, send])
                else:
                    receive.Start()
                    send.Start()
                if turn == 0:
                    (MPI.Request.Waitall if THREAD else gdcomm.Request.Waitall)([receive, send])
                elif turn == 1:
                    receive.Wait()
                    send.Wait()
                else:
                    while not gdcomm.Request.Testall([send, receive]):
                        pass
                check(f"Recv_init {size}, another stream", y, ramp(size, 1000.0 * turn + peer), other)
                DEVICE.fill(x, -13.0, s)
                DEVICE.launch(s, lambda a, b: np.add(a, b, b), y, z)
            check(f"Recv_init {size}, three starts", z, 3 * ramp(size, 1000.0 + peer), s)
            DEVICE.fill(x, 77.0 + comm.rank, s)
            send.Start()
            receive.Start()
            receive.Free()  # waits first
            send.Free()
            require("null after Free", receive == send == MPI.REQUEST_NULL)
            check(f"Free {size}", y, 77.0 + peer, other)


def collectives(comm, peer):
    for size in SIZES:
        s, other = stream(), stream()
        with s:
            x, y, z = queued(ramp(size, comm.rank), s), DEVICE.empty(size), DEVICE.empty(size)
            DEVICE.fill(y, -14.0, s)
            comm.Allreduce(x, y)
            DEVICE.fill(x, -15.0, s)
            DEVICE.launch(s, lambda a, b: np.copyto(b, a), y, z)
            comm.Allreduce(MPI.IN_PLACE, y)
            check(f"Allreduce {size}", z, 2 * ramp(size, 0.5), s)
            check(f"Allreduce in place {size}", y, 4 * ramp(size, 0.5), s)
            for root in range(2):
                b = queued(ramp(size, 40.0 + comm.rank), s)
                comm.Bcast(b, root)
                DEVICE.launch(s, lambda a: np.negative(a, a), b)
                check(f"Bcast {size}", b, -ramp(size, 40.0 + root), s)
            x, y = queued(ramp(size, comm.rank), s), DEVICE.empty(size)
            DEVICE.fill(y, -16.0, s)
            comm.Iallreduce(x, y).Wait()
            DEVICE.fill(x, -17.0, s)
            check(f"Iallreduce {size}, another stream", y, 2 * ramp(size, 0.5), other)
            request = comm.Allreduce_init(x, y)
            DEVICE.fill(z, 0.0, s)
            for turn in range(3):
                values = ramp(size, 10.0 * turn + comm.rank)
                DEVICE.launch(s, lambda a, values=values: np.copyto(a, values), x)
                DEVICE.fill(y, -18.0, s)
                request.Start()
                request.Wait()
                check(f"Allreduce_init {size}, another stream", y, 2 * ramp(size, 10.0 * turn + 0.5), other)
                DEVICE.launch(s, lambda a, b: np.add(a, b, b), y, z)
            request.Free()
            check(f"Allreduce_init {size}, three starts", z, 6 * ramp(size, 10.5), s)
    in_sections(comm)


def nonblocking_collectives(comm, peer):
    """Several under way; what is queued on the stream after the call touches other arrays. Rank 0 has a host array."""
    for size in SIZES:
        s, other = stream(), stream()
        with s:
            xs = [queued(ramp(size, 20.0 * i + comm.rank), s) for i in range(3)]
            ys, z = [DEVICE.empty(size) for _ in xs], DEVICE.empty(size)
            for y in ys:
                DEVICE.fill(y, -21.0, s)
            mixed = ramp(size, 40.0) if comm.rank == 0 else xs[2]
            requests = [comm.Iallreduce(xs[0], ys[0]), comm.Ibcast(xs[1], 1), comm.Iallreduce(mixed, ys[2])]
            DEVICE.fill(z, -22.0, s)
            for i in (1, 0, 2):
                requests[i].Wait()
                if i != 1:
                    DEVICE.fill(xs[i], -23.0, s)
                    check(f"Iallreduce {size} among others, another stream", ys[i], 2 * ramp(size, 20 * i + 0.5), other)
            check(f"Ibcast {size} among others, another stream", xs[1], ramp(size, 21.0), other)
            check(f"work after nonblocking collectives {size}", z, np.full(size, -22.0), s)


def in_sections(comm):
    """As on two nodes: messages of several sections are on their way at the same time."""
    choose, layout = own_collectives.choose, own_collectives._layout
    own_collectives.choose = lambda *_: ("hierarchical", 3)
    own_collectives._layout = lambda *each: layout(*each)._replace(sizes=(1, 1), node=comm.rank, first=comm.rank)
    for size in SIZES[-2:]:
        s = stream()
        with s:
            x, y = queued(ramp(size, comm.rank), s), DEVICE.empty(size)
            DEVICE.fill(y, -19.0, s)
            comm.Allreduce(x, y)
            DEVICE.fill(x, -20.0, s)
            check(f"Allreduce in sections {size}", y, 2 * ramp(size, 0.5), s)
    own_collectives.choose, own_collectives._layout = choose, layout


def blocks(comm, peer):
    """Blocks of two lengths with gaps between them; sent from one stream and received on another, many in a row."""
    for size in (3, 131_072 + 5):
        counts, displs, room = [size, size + 1], [size + 3, 1], 2 * size + 5
        mine, total = counts[comm.rank], sum(counts)

        def spread(array, counts=counts, displs=displs):
            return [array, counts, displs, MPI.DOUBLE]

        def pair(array, mine=mine):
            return [array, [mine, mine], [0, mine + 2], MPI.DOUBLE]

        cases = {  # the call, elements sent and received
            "Gatherv": (lambda c, x, y, spread=spread: c.Gatherv(x, spread(y), 1), mine, room),
            "Scatterv": (lambda c, x, y, spread=spread: c.Scatterv(spread(x), y, 1), room, mine),
            "Allgatherv": (lambda c, x, y, spread=spread: c.Allgatherv(x, spread(y)), mine, room),
            "Alltoallv": (
                lambda c, x, y, pair=pair, spread=spread: c.Alltoallv(pair(x), spread(y)), 2 * mine + 2, room
            ),
            "Gather": (lambda c, x, y: c.Gather(x, y, 0), size, 2 * size),
            "Scatter": (lambda c, x, y: c.Scatter(x, y, 0), 2 * size, size),
            "Reduce_scatter": (lambda c, x, y, counts=counts: c.Reduce_scatter(x, y, counts), total, mine),
            "Scan": (lambda c, x, y: c.Scan(x, y), size, size),
            "Exscan": (lambda c, x, y: c.Exscan(x, y), size, size),
        }  # fmt: skip
        arrived = []
        for turn in range(2):
            for name, (call, sent, received) in cases.items():
                s, out = stream(), stream()
                values, expected = ramp(sent, 600.0 * turn + comm.rank), ramp(received, -600.0)
                x, y = queued(values, out), queued(expected, s)
                call(MPI.COMM_WORLD, values, expected)
                call(comm, Produced(x, out), Produced(y, s))
                DEVICE.fill(x, -33.0, out)
                if turn:
                    out.synchronize()  # what was sent is overwritten before anything else runs
                arrived.append((name, s, x, y, expected))  # x: `out` still works on it
        for name, s, _, y, expected in reversed(arrived):
            check(f"{name} {size}", y, expected, s)


def layouts(comm, peer):
    """Strided and Fortran-ordered ends; what lies between the elements stays."""
    for size in (6, 700, 400_000):
        for ask in ("strided", "fortran"):
            s, other = stream(), stream()
            with s:
                values = ramp(2 * size, 50.0 + comm.rank).reshape(2, size)
                expected = ramp(2 * size, 50.0 + peer).reshape(2, size)
                wide = DEVICE.empty((2, 2 * size))
                DEVICE.fill(wide, -19.0, s)
                x = wide[:, ::2] if ask == "strided" else DEVICE.empty((2, size), order="F")
                DEVICE.launch(s, lambda a, values=values: np.copyto(a, values), x)
                whole = DEVICE.empty((2, 2 * size))
                DEVICE.fill(whole, -20.0, s)
                y = whole[:, ::2] if ask == "strided" else DEVICE.empty((2, size), order="F")
                comm.Sendrecv(x, peer, 5, y, peer, 5)
                DEVICE.fill(x, -21.0, s)
                check(f"{ask} {size}", y, expected, s)
                check("between the elements", whole[:, 1::2], -20.0, s)
                DEVICE.launch(s, lambda a, values=values: np.copyto(a, values), x)
                DEVICE.fill(whole, -20.0, s)
                requests = [comm.Irecv(y, peer, 6), comm.Isend(x, peer, 6)]
                gdcomm.Request.Waitall(requests)
                check(f"{ask} {size}, another stream", y, expected, other)
                comm.Sendrecv([x, size, MPI.DOUBLE], peer, 7, [y, size, MPI.DOUBLE], peer, 7)  # a part
                check(f"{ask} {size}, a part", y, expected, s)


def mixed_ends(comm, peer):
    """One end in host memory, the other on the device."""
    for size in SIZES:
        s, other = stream(), stream()
        with s:
            host, y = np.full(size, -22.0), DEVICE.empty(size)
            DEVICE.fill(y, -23.0, s)
            if comm.rank:
                x = queued(ramp(size, 60.0), s)
                comm.Send(x, peer)
                DEVICE.fill(x, -24.0, s)
                comm.Recv(y, peer)
                check(f"device end {size}", y, ramp(size, 61.0), s)
                comm.Irecv(y, peer).Wait()
                check(f"device end {size}, another stream", y, ramp(size, 62.0), other)
            else:
                comm.Recv(host, peer)
                check(f"host end {size}", host, ramp(size, 60.0), s)
                comm.Send(ramp(size, 61.0), peer)
                comm.Isend(ramp(size, 62.0), peer).Wait()
            x = queued(ramp(size, 63.0 + comm.rank), s)
            comm.Sendrecv(x, peer, 1, host, peer, 1)
            check(f"host receives {size}", host, ramp(size, 63.0 + peer), s)
            comm.Sendrecv(host, peer, 1, y, peer, 1)
            check(f"device receives {size}", y, ramp(size, 63.0 + comm.rank), s)


def many_in_a_row(comm, peer):
    """More messages than any ring of blocks is long, whose copies all stay queued; read in the opposite order."""
    for size in (100, 70_001):
        streams, out = [stream() for _ in range(4)], stream()
        arrived = []
        for i in range(48):
            s = streams[i % 4]
            x, y = queued(ramp(size, 200.0 * i + comm.rank), out), DEVICE.empty(size)
            DEVICE.fill(y, -25.0, s)
            if i % 3 == 0:
                comm.Sendrecv(Produced(x, out), peer, i, Produced(y, s), peer, i)
            elif i % 3 == 1:
                request = comm.Isend(x, peer, i, stream=out)
                comm.Recv(y, peer, i, stream=s)
                request.Wait()
            else:
                comm.Reduce_scatter_block(Produced(queued(ramp(2 * size, i), out), out), Produced(y, s))
            DEVICE.fill(x, -26.0, out)
            arrived.append((s, y, i))
        for s, y, i in reversed(arrived):
            expected = ramp(size, 200.0 * i + peer) if i % 3 < 2 else 2 * ramp(size, i + comm.rank * size)
            check(f"message {i} of many, {size}", y, expected, s)


def large_in_a_row(comm, peer):
    """Memory that the chunks of large messages pass through is used again only when they are on the device."""
    for number in range(2):
        arrived = []
        for i in range(3):
            s, out, size = stream(), stream(), 2_000_000 + i  # the sender's chunks bring only their stream on
            x, y = queued(ramp(size, 700.0 * i + comm.rank), out), DEVICE.empty(size)
            DEVICE.fill(y, -31.0, s)
            if number:
                comm.Sendrecv(Produced(x, out), peer, i, Produced(y, s), peer, i)
            else:
                request = comm.Isend(x, peer, i, stream=out)
                comm.Recv(y, peer, i, stream=s)
                request.Wait()
            DEVICE.fill(x, -32.0, out)
            arrived.append((i, s, y, size))
        for i, s, y, size in reversed(arrived):
            check(f"large message {i} of many", y, ramp(size, 700.0 * i + peer), s)


def broadcasts_in_a_row(comm, peer):
    """A slot is filled again only when the copy out of it is over: the receiver does not wait for its streams."""
    received = []
    for i in range(4):
        s = stream()
        x = queued(ramp(131077, 30.0 * i + comm.rank), s)
        with s:
            comm.Bcast(x, 0)
        received.append((x, s))
    for i, (x, s) in enumerate(received):
        check(f"broadcast {i} in a row", x, ramp(131077, 30.0 * i), s)


def in_objects(comm, peer):
    """Device arrays in Python objects: the same promises."""
    for size in SIZES:
        s = stream()
        with s:
            x = queued(ramp(size, 300.0 + comm.rank), s)
            a = comm.sendrecv({"array": [x, "text"]}, peer, 1, None, peer, 1)["array"][0]
            request = comm.isend(x, peer, 2)
            b = comm.recv(None, peer, 2)
            request.wait()
            DEVICE.fill(x, -27.0, s)
            c = comm.alltoall([queued(ramp(size, 310.0 + 2 * comm.rank + i), s) for i in range(2)])
            d = comm.bcast(queued(ramp(size, 320.0), s) if comm.rank else None, 1)
            DEVICE.launch(s, lambda view: np.negative(view, view), a)
            for i, array in enumerate(c):
                check(f"alltoall {size}", array, ramp(size, 310.0 + 2 * i + comm.rank), s)
            check(f"sendrecv {size}", a, -ramp(size, 300.0 + peer), s)
            check(f"recv {size}", b, ramp(size, 300.0 + peer), s)
            check(f"bcast {size}", d, ramp(size, 320.0), s)


def other_ends_of_envelopes(comm, peer):
    """A large strided array is staged on every path; what receives it may be direct, derived or probed before."""
    size = 400_000
    every_second = MPI.DOUBLE.Create_vector(size, 1, 2).Commit()
    for turn, receive in enumerate((
        lambda y, s: comm.Recv(y, peer, stream=s),
        lambda y, s: comm.Irecv([y, 1, every_second], peer, stream=s).Wait(),
        lambda y, s: comm.Recv([y, 1, every_second], peer, stream=s),
        lambda y, s: (comm.Probe(peer), comm.Irecv(y, peer, stream=s).Wait()),
    )):  # fmt: skip
        s, t = stream(), stream()
        values = ramp(size, 400.0 * turn + comm.rank)
        x = DEVICE.empty((size, 2))[:, 0]
        DEVICE.launch(s, lambda a, values=values: np.copyto(a, values), x)
        wide = turn in (1, 2)
        y = DEVICE.empty(2 * size if wide else size)
        DEVICE.fill(y, -28.0, t)
        request = comm.Isend(x, peer, stream=s)
        receive(y, t)
        request.Wait()
        expected = ramp(size, 400.0 * turn + peer)
        if wide:
            expected = np.column_stack([expected, np.full(size, -28.0)]).ravel()
        check(f"envelope, other end {turn}", y, expected, t if turn in (0, 2) else stream())
    every_second.Free()


def exchanges_after_a_probe(comm, peer):
    """What an exchange sends may be overwritten after it, also where it receives what a probe has kept."""
    size = 400_000
    for replace in (False, True):
        s = stream()
        large = queued(ramp(size, 5.0 * comm.rank), s)
        request = comm.Isend(large, peer, 1, stream=s)
        comm.Probe(peer, 1)
        x, y, z = ramp(size, 6.0 + comm.rank), np.empty(size), np.empty(size)
        receiving = comm.Irecv(z, peer, 2)
        if replace:
            y = x
            comm.Sendrecv_replace(y, peer, 2, peer, 1)
        else:
            comm.Sendrecv(x, peer, 2, y, peer, 1)
            x[:] = -29.0
        receiving.Wait()
        request.Wait()
        check(f"exchange after a probe, received, {replace}", y, ramp(size, 5.0 * peer), s)
        check(f"exchange after a probe, sent, {replace}", z, ramp(size, 6.0 + peer), s)


def error_before_an_envelope(comm, peer):
    """The blocks of a large send that failed are used again only when the late copies into them are over."""
    size = 400_000
    s, t = stream(), stream()
    x = queued(ramp(size, 1.0), s)
    strided = DEVICE.empty((size, 2))[:, 0]
    DEVICE.launch(t, lambda a: np.copyto(a, ramp(size, 500.0 + comm.rank)), strided)
    with broken_device():
        comm.Send(DEVICE.empty((size, 2))[:, 0], peer, stream=s)
    y = np.empty(size)
    request = comm.Isend(strided, peer, stream=t)
    t.synchronize()  # the first chunks are in their blocks
    s.synchronize()  # the late copies run, before the envelope is received
    comm.Barrier()
    comm.Recv(y, peer)
    request.Wait()
    check("envelope after an error", y, ramp(size, 500.0 + peer), t)
    check("its input", x, ramp(size, 1.0), s)


@contextlib.contextmanager
def broken_device():
    """Every wait fails; the caller's block must fail with it. Asking for its events later brings nothing on."""

    def fail(*_):
        raise RuntimeError("the device is in error")

    def record(order):
        event = EmulatedDevice.record(DEVICE, order)
        event._patience = 1_000_000
        return event

    working = EmulatedEvent.synchronize
    DEVICE.synchronize = EmulatedEvent.synchronize = fail
    DEVICE.record = record
    try:
        yield
        raise WrongError("the device's error is lost")
    except RuntimeError:
        pass
    finally:
        del DEVICE.synchronize, DEVICE.record
        EmulatedEvent.synchronize = working


def error_between(comm, peer):
    """A send that fails while its copy to the host is queued: nobody else gets that block before."""

    def send_object(array, dest, stream):
        with stream:
            comm.send([array], dest)

    for size in (6, 700, 400_000):
        for send in (comm.Send, send_object):
            s, t = stream(), stream()
            # Strided: such arrays are staged on every path, in blocks of the pool whatever their size.
            x, y = DEVICE.empty((size, 2))[:, 0], DEVICE.empty((size, 2))[:, 0]
            values = ramp(size, 80.0 + comm.rank)
            DEVICE.launch(s, lambda a, values=values: np.copyto(a, values), x)
            with broken_device():
                send(x, peer, stream=s)
            request = comm.Isend(ramp(size, 90.0 + comm.rank), peer)
            comm.Recv(y, peer, stream=t)
            request.Wait()
            check(f"after an error, input {size}", x, values, s)  # the late copy runs
            check(f"after an error {size}", y, ramp(size, 90.0 + peer), t)


def error_in_a_short_request(comm, peer):
    """The same for small nonblocking sends, which lease a block."""
    s, t = stream(), stream()
    x = DEVICE.empty(100)
    DEVICE.launch(s, lambda a: a.fill(5.0), x)
    with broken_device():
        comm.Isend(x, peer, stream=s)
    received = [DEVICE.empty(100) for _ in range(8)]
    for i, y in enumerate(received):
        requests = [comm.Irecv(y, peer, stream=t), comm.Isend(ramp(100, 90.0 + i), peer)]
        comm.Barrier()  # the messages are there
        s.synchronize()  # the late copy runs
        for request in requests:
            request.Wait()
    for i, y in enumerate(received):
        check(f"short requests after an error, {i}", y, ramp(100, 90.0 + i), t)


def error_in_a_slot(comm, peer):
    """The same for the ring of small slots: its next rounds get that slot only when the late copy is over."""

    s, t = stream(), stream()
    x = DEVICE.empty(100)
    DEVICE.launch(s, lambda a: a.fill(5.0), x)
    with broken_device():
        comm.Send(x, peer, stream=s)
    received = [DEVICE.empty(100) for _ in range(2 * Slots.COUNT)]
    for i, y in enumerate(received):
        request = comm.Isend(ramp(100, 90.0 + i), peer)
        comm.Recv(y, peer, stream=t)
        request.Wait()
    s.synchronize()  # the late copy runs
    for i, y in enumerate(received):
        check(f"slots after an error, {i}", y, ramp(100, 90.0 + i), t)


def nothing_is_left():
    """Every lease is back and every block free once all streams are done."""
    for s in [*STREAMS, DEVICE.default_stream]:
        s.synchronize()
    gc.collect()
    pools = [thing for thing in gc.get_objects() if isinstance(thing, PinnedPool)]
    for pool in pools:
        stats = pool.stats()
        require(f"leases are left: {stats}", stats["leased"] == stats["pending"] == 0)
    return sum(pool.stats()["hits"] for pool in pools)


def main():
    if "apart" in sys.argv:
        channels.here = lambda *_: None
    comm = gdcomm.Communicator(path=sys.argv[1])
    require("this needs two ranks", comm.size == 2)
    peer = 1 - comm.rank
    for case in (
        blocking_both_ways, sendrecv, two_streams, collectives, nonblocking_collectives, blocks, layouts, mixed_ends,
        many_in_a_row, large_in_a_row, broadcasts_in_a_row, nonblocking, completion, persistent, in_objects,
        other_ends_of_envelopes, exchanges_after_a_probe, error_between, error_in_a_slot,
        error_in_a_short_request, error_before_an_envelope,
    ):  # fmt: skip
        case(comm, peer)
    hits = nothing_is_left()
    require("blocks were used again", hits > 100 or sys.argv[1] == "direct")
    comm.Barrier()


if __name__ == "__main__":
    run(main, lambda: MPI.COMM_WORLD.Abort(1))
