"""Local copies and page-locked memory on the emulated device, with results that are wrong if any wait is missing.

    python tests/mutation/transfer_program.py

Cases first, each about one promise, then random sequences. As in `program.py` nothing here synchronises
except where a final result is read, and streams other than the reader's stay behind. Exits nonzero on a wrong
value, an exception, a lease that never comes back, and on a hang.
"""

# ruff: noqa: E402 - the watchdog goes before the imports

from __future__ import annotations

import faulthandler
import functools
import gc
import itertools
import os
import random
import sys
import threading
import time

faulthandler.dump_traceback_later(float(os.environ.get("GDCOMM_WATCHDOG", "60")), exit=True)

import numpy as np
from checks import Produced, WrongError, check, queued, ramp, require, run
from sequences import Sequence, StrictDevice, install, locked, on_own_pages

import gdcomm
from gdcomm import devices
from gdcomm.errors import DeviceError
from gdcomm.memory import pinned
from gdcomm.memory.budget import Budget
from gdcomm.transfer.crew import Crew

SEEDS = range(3)
SEQUENCES = 8  # of each seed
SIZES = (300, 20_000)  # float64: below and above what goes through a thread's own slot
DEVICE: StrictDevice


def read_later(array, order):
    """What a kernel on `order` sees that is queued now."""
    seen = DEVICE.empty(array.shape)
    DEVICE.launch(order, lambda a, b: np.copyto(b, a), array, seen)
    return seen


def behind(case):
    """The case on a GPU that is far behind: who only asks whether something is done does not bring it on."""

    @functools.wraps(case)
    def run():
        DEVICE.patience = 1000
        try:
            case()
        finally:
            DEVICE.patience = None

    return run


def in_pool(values):
    made = gdcomm.pinned_empty(values.shape, values.dtype)
    made[...] = values
    return made


def in_place(values):
    made = on_own_pages(values)
    gdcomm.register(made)
    return made


def apart(values):
    """Every second element of pageable memory."""
    made = np.full((*values.shape, 2), -2.0)[..., 0]
    made[...] = values
    return made


HOSTS = {"pageable": np.array, "pinned": in_pool, "registered": in_place, "strided": apart}


# -- copy ----------------------------------------------------------------------------------------------


def to_the_device():
    """Earlier kernels see the old data, later ones the new, and the host may overwrite its own."""
    for size in SIZES:
        for kind, put in HOSTS.items():
            for block in (None, True):
                s = DEVICE.Stream()
                x = queued(ramp(size, 5.0), s)
                old = read_later(x, s)
                host = put(ramp(size, 10.0))
                gdcomm.copy(x, host, stream=s, block=block)
                host[...] = -3.0
                if block:
                    check(f"{kind} {size}, block=True, another stream", x, ramp(size, 10.0), DEVICE.Stream())
                new = read_later(x, s)
                DEVICE.fill(x, -4.0, s)
                check(f"{kind} {size} to the device", new, ramp(size, 10.0), s)
                check(f"{kind} {size} to the device, before", old, ramp(size, 5.0), s)


def to_the_host():
    """Earlier kernels are seen, and the data is there on return."""
    for size in SIZES:
        for kind, put in HOSTS.items():
            for block in (None, True):
                s = DEVICE.Stream()
                x, host = queued(ramp(size, 20.0), s), put(np.full(size, -5.0))
                gdcomm.copy(host, x, stream=s, block=block)
                check(f"{kind} {size} to the host", host, ramp(size, 20.0))
                DEVICE.fill(x, -6.0, s)
                gdcomm.copy(host, x, stream=s, block=block)
                check(f"{kind} {size} to the host again", host, -6.0)
        s = DEVICE.Stream()
        check(f"to_host {size}", gdcomm.to_host(queued(ramp(size, 22.0), s), stream=s), ramp(size, 22.0))
        y = gdcomm.to_device(ramp(size, 23.0), stream=s)
        check(f"to_device {size}", read_later(y, s), ramp(size, 23.0), s)


def many_in_a_row():
    """Slots and leased blocks go round while all copies are queued, read in the opposite order."""
    for size in (40, *SIZES):
        for put in (np.array, apart):
            arrived = []
            for i in range(40 if size < 1000 else 6):
                s = DEVICE.Stream()
                x, host = DEVICE.empty(size), put(ramp(size, 100.0 * i))
                gdcomm.copy(x, host, stream=s)
                host[...] = -7.0
                arrived.append((i, x, s))
            for i, x, s in reversed(arrived):
                check(f"copy {i} of many, {size}", x, ramp(size, 100.0 * i), s)


def not_blocking():
    """A host array of a copy that says it is done may be used; one that goes before is kept."""
    for size in SIZES:
        for kind in ("pinned", "registered"):
            for turn in range(4):
                s = DEVICE.Stream()
                x, y = DEVICE.empty(size), queued(ramp(size, 31.0), s)
                up, down = HOSTS[kind](ramp(size, 30.0)), HOSTS[kind](np.full(size, -8.0))
                there = gdcomm.copy(x, up, stream=s, block=False)
                if turn % 2:
                    while not there.query():
                        pass
                else:
                    there.synchronize()
                up[:] = -9.0
                back = gdcomm.copy(down, y, stream=s, block=False)
                if turn > 1:
                    while not back.query():
                        pass
                else:
                    back.synchronize()
                check(f"{kind} {size}, block=False to the host", down, ramp(size, 31.0))
                check(f"{kind} {size}, block=False to the device", x, ramp(size, 30.0), s)
        for kind in ("pageable", "strided"):
            s = DEVICE.Stream()
            x, up, down = DEVICE.empty(size), HOSTS[kind](ramp(size, 32.0)), HOSTS[kind](np.zeros(size))
            gdcomm.copy(x, up, stream=s, block=False)
            up[...] = -10.0
            there = gdcomm.copy(down, x, stream=s, block=False)
            check(f"{kind} {size}, block=False there and back", down, ramp(size, 32.0))
            there.synchronize()


def dropped_under_way():
    """Nobody holds the arrays, nor what the calls returned."""
    for size in SIZES:
        arrived = []
        for i in range(5):
            s, x, down = DEVICE.Stream(), DEVICE.empty(size), locked(DEVICE, np.zeros(size))
            y = queued(ramp(size, 40.0 + i), s)
            z = queued(ramp(size, 50.0 + i), s)
            gdcomm.copy(x, locked(DEVICE, ramp(size, 60.0 + i)), stream=s, block=False)
            gdcomm.copy(down, y, stream=s, block=False)
            held = DEVICE.empty(size)
            gdcomm.copy(held, z, stream=s, block=False)
            del y, z
            arrived.append((i, s, x, down, held))
        for i, s, x, down, held in reversed(arrived):
            check(f"dropped source {size}, {i}", held, ramp(size, 50.0 + i), s)
            check(f"dropped host source {size}, {i}", x, ramp(size, 60.0 + i), s)
            check(f"dropped device source {size}, {i}", down, ramp(size, 40.0 + i))


def on_the_device():
    """Two streams are ordered with each other, and overlapping memory goes by a copy that lives long enough."""
    for size in SIZES:
        a, b = DEVICE.Stream(), DEVICE.Stream()
        x, y = queued(ramp(size, 70.0), a), queued(ramp(size, 71.0), b)
        old = read_later(y, b)
        gdcomm.copy(Produced(y, b), Produced(x, a))
        DEVICE.fill(x, -11.0, a)
        a.synchronize()
        check(f"two streams {size}", y, ramp(size, 70.0), b)
        check(f"two streams {size}, before", old, ramp(size, 71.0), b)
        a, b = DEVICE.Stream(), DEVICE.Stream()
        x, y = queued(ramp(size, 72.0), a), queued(ramp(size, 73.0), b)
        old = read_later(y, b)
        gdcomm.copy(Produced(y, b), Produced(x, a))
        check(f"two streams {size}, the reader first", y, ramp(size, 72.0), b)
        arrived = []
        for i in range(4):
            s = DEVICE.Stream()
            x = queued(ramp(size, 80.0 + i), s)
            gdcomm.copy(x[7:], x[:-7], stream=s)
            arrived.append((i, s, x))
        for i, s, x in reversed(arrived):
            expected = np.concatenate([ramp(size, 80.0 + i)[:7], ramp(size, 80.0 + i)[:-7]])
            check(f"overlapping {size}, {i}", x, expected, s)
        s = DEVICE.Stream()
        x, y = queued(ramp(size, 90.0), s), DEVICE.empty(size)
        gdcomm.copy(y, x, stream=s, block=True)
        check(f"on the device {size}, block=True", y, ramp(size, 90.0), DEVICE.Stream())


def on_the_host():
    """A copy between host arrays that is ordered on a stream sees what is queued there."""
    s = DEVICE.Stream()
    x, there, dst = queued(ramp(5000, 95.0), s), locked(DEVICE, np.zeros(5000)), np.zeros(5000)
    DEVICE.copy(there.ctypes.data, x.ptr, there.nbytes, s)
    gdcomm.copy(dst, there, stream=s)
    check("host to host", dst, ramp(5000, 95.0))
    large = np.zeros(400_000)
    gdcomm.copy(large, ramp(400_000, 96.0))
    check("host to host, by several threads", large, ramp(400_000, 96.0))


def coherent():
    """The device reads and writes pageable memory itself, when it gets there."""
    usual = DEVICE.emulated_properties
    DEVICE.emulated_properties = usual._replace(
        pageable_memory_access=True, pageable_memory_access_uses_host_page_tables=True
    )
    try:
        for block in (None, False):
            s = DEVICE.Stream()
            x, up, down = DEVICE.empty(20_000), ramp(20_000, 97.0), np.zeros(20_000)
            gdcomm.copy(x, up, stream=s, block=block)
            up[:] = -12.0
            y = queued(ramp(20_000, 98.0), s)
            gdcomm.copy(down, y, stream=s, block=block)
            check("coherent, to the host", down, ramp(20_000, 98.0))
            check("coherent, to the device", x, ramp(20_000, 97.0), s)
    finally:
        DEVICE.emulated_properties = usual


class TwoGPUs(StrictDevice):
    """Two GPUs that reach each other; only arrays of the thread's current one are found."""

    def __init__(self, seed):
        self._at = [0]
        super().__init__(seed)
        self._defaults = [self.default_stream, self.Stream()]

    def empty(self, *arguments, **more):
        made = super().empty(*arguments, **more)
        made._base.gpu = self._at[-1]
        return made

    def find(self, obj, stream=None):
        if self.elsewhere(obj) is not None:
            raise DeviceError("this array is on the other GPU")
        return super().find(obj, stream)

    def elsewhere(self, obj):
        base = getattr(obj, "_base", None)
        return None if base is None or base.gpu == self._at[-1] else self.gpu(base.gpu)

    def gpu(self, number):
        return _Current(self, number)


class _Current:
    def __init__(self, device, number):
        self._device, self._number = device, number

    def __enter__(self):
        self._device._at.append(self._number)
        self._device._stack().append(self._device._defaults[self._number])

    def __exit__(self, *_):
        self._device._at.pop()
        self._device._stack().pop()


def two_gpus():
    """Copies between GPUs are ordered with the streams of both."""
    device = TwoGPUs(7)
    install(device)
    try:
        for turn in range(12):
            size = SIZES[turn % 2]
            far, near = device._defaults[1], device.Stream()
            shape = (size, 2) if turn % 3 else (size,)
            view = (lambda a: a[:, 0]) if turn % 3 else (lambda a: a)
            with device.gpu(1):
                source = view(device.empty(shape))
            target = view(device.empty(shape))
            device.fill(target, -13.0, near)
            old = device.empty(size)
            device.launch(near, lambda a, b: np.copyto(b, a), target, old)
            device.launch(far, lambda v, size=size, turn=turn: np.copyto(v, ramp(size, 100.0 * turn)), source)
            done = gdcomm.copy(target, source, stream=near, block=(None, False)[turn % 2])
            device.fill(source, -14.0, far)
            if turn % 4 > 1:
                far.synchronize()
            del source, done
            if turn % 4 != 1:
                check(f"between GPUs, {turn}", device.asnumpy(target, near), ramp(size, 100.0 * turn))
                check(f"between GPUs, {turn}, before", device.asnumpy(old, near), -13.0)
        arrived = []
        for turn in range(4):
            near = device.Stream()
            with device.gpu(1):
                source = device.empty((500, 2))[:, 0]
            target = device.empty((500, 2))[:, 0]
            device.launch(device._defaults[1], lambda v, turn=turn: np.copyto(v, ramp(500, 10.0 * turn)), source)
            gdcomm.copy(target, source, stream=near)
            arrived.append((turn, near, source, target))
        for turn, near, _, target in arrived[::-1]:
            check(f"between GPUs in a row, {turn}", device.asnumpy(target, near), ramp(500, 10.0 * turn))
    finally:
        install(DEVICE)


# -- copy_many -----------------------------------------------------------------------------------------


def batches():
    """Many pieces: the promises of copy for each of them."""
    shapes = [(40,)] * 30, [(1000,)] * 12, [(1,), (700,), (3, 5), (333,)] * 5
    for sizes in shapes:
        for kind in ("pageable", "pinned", "strided"):
            arrived = []
            for turn in range(4):
                s = DEVICE.Stream()
                values = [ramp(np.prod(n), 1000.0 * turn + i).reshape(n) for i, n in enumerate(sizes)]
                hosts = [HOSTS[kind](v) for v in values]
                if kind == "pinned":  # of one block, as kernels want it
                    block = locked(DEVICE, np.concatenate([v.ravel() for v in values]))
                    ends = np.cumsum([v.size for v in values])
                    hosts = [block[end - v.size : end].reshape(v.shape) for end, v in zip(ends, values, strict=True)]
                xs = [DEVICE.empty(n) for n in sizes]
                for x in xs:
                    DEVICE.fill(x, -15.0, s)
                gdcomm.copy_many(xs, hosts, stream=s)
                for host in hosts:
                    host[...] = -16.0
                ys = [DEVICE.empty(n) for n in sizes]
                gdcomm.copy_many(ys, xs, stream=s)
                for x in xs:
                    DEVICE.fill(x, -17.0, s)
                arrived.append((s, ys, values, hosts, xs))
            for s, ys, values, hosts, _ in reversed(arrived):
                gdcomm.copy_many(hosts, ys, stream=s)
                for host, v in zip(hosts, values, strict=True):
                    check(f"{kind} pieces there and back", host, v)


def batches_in_a_row():
    """Tables and packed blocks are used again only after their copies."""
    for kind in ("pageable", "strided"):
        arrived = []
        for turn in range(6):
            s = DEVICE.Stream()
            values = [ramp(64, 100.0 * turn + i) for i in range(40)]
            xs = [DEVICE.empty(64) for _ in values]
            gdcomm.copy_many(xs, [HOSTS[kind](v) for v in values], stream=s)
            arrived.append((s, xs, values))
        for s, xs, values in reversed(arrived):
            for x, v in zip(xs, values, strict=True):
                check(f"{kind} pieces in a row", x, v, s)
    arrived = []
    for turn in range(6):
        s = DEVICE.Stream()
        values = [ramp(64, 100.0 * turn + i) for i in range(40)]
        ys = [queued(v, s) for v in values]
        xs = [DEVICE.empty(64) for _ in values]
        gdcomm.copy_many(xs, ys, stream=s)
        arrived.append((s, xs, ys, values))
    for s, xs, _, values in reversed(arrived):
        for x, v in zip(xs, values, strict=True):
            check("pieces on the device in a row", x, v, s)


@behind
def mixtures():
    """Pieces of all kinds, arrays of several streams: all are ordered with the first one's."""
    for to_host in (True, False):
        streams = [DEVICE.Stream() for _ in range(3)]
        xs = [queued(ramp(50, 10.0 * i), s) for i, s in enumerate(streams)]
        ys = [queued(np.full(50, -18.0), s) for s in reversed(streams)]
        olds = [read_later(y, s) for y, s in zip(ys, reversed(streams), strict=True)]
        down, up, more = np.zeros(50), ramp(50, 300.0), DEVICE.empty(50)
        dsts = [Produced(y, s) for y, s in zip(ys, reversed(streams), strict=True)]
        srcs = [Produced(x, s) for x, s in zip(xs, streams, strict=True)]
        z = queued(ramp(50, 77.0), streams[2])
        if to_host:
            dsts.append(down)
            srcs.append(Produced(z, streams[2]))
        gdcomm.copy_many([*dsts, Produced(more, streams[1])], [*srcs, up])
        up[:] = -19.0
        check("of a mixture, to the host", down, ramp(50, 77.0) if to_host else 0.0)
        for x, s in zip(xs, streams, strict=True):
            DEVICE.fill(x, -20.0, s)
        # The first one's stream last: its end would be the end of all.
        for i, (y, old, s) in reversed(list(enumerate(zip(ys, olds, reversed(streams), strict=True)))):
            check(f"of a mixture, {i}", y, ramp(50, 10.0 * i), s)
            check(f"of a mixture, {i}, before", old, -18.0, s)
        check("of a mixture, to the device", more, ramp(50, 300.0), streams[1])


# -- page-locked memory --------------------------------------------------------------------------------


def dropped_arrays():
    """Pool memory of an array that went is not used again before queued copies are done with it."""
    for turn in range(7):
        s, t = DEVICE.Stream(), DEVICE.Stream()
        table = in_pool(ramp(3000, 5.0 * turn))
        address = table.ctypes.data
        if turn == 0:  # by gdcomm, on a stream that is not the current one
            x = gdcomm.take(table, np.arange(3000), stream=s, method="gather")
        elif turn == 1:  # too many uses to note each
            for _ in range(16):
                gdcomm.take(table, np.arange(10), stream=t, method="gather")
            x = gdcomm.take(table, np.arange(3000), stream=s, method="gather")
            for _ in range(20):
                gdcomm.take(table, np.arange(10), stream=t, method="gather")
        elif turn == 2:  # by another library on the current stream
            x = DEVICE.empty(3000)
            DEVICE.copy(x.ptr, address, table.nbytes, s)
        elif turn == 3:  # not kept by anybody
            table = in_pool(ramp(30_000, 5.0 * turn))
            x = gdcomm.take(table, np.arange(3000), stream=s, method="copy")
        elif turn == 4:
            mapped = gdcomm.mapped_empty(3000)
            mapped.host[:] = ramp(3000, 5.0 * turn)
            x = DEVICE.empty(3000)
            DEVICE.launch(s, lambda a, b: np.copyto(b, a), mapped.device, x)
            table = mapped.host
            del mapped
        elif turn == 5:
            table = in_pool(ramp(30_000, 5.0 * turn).reshape(10, 3000))
            rows = DEVICE.empty((10, 3000))
            DEVICE.fill(rows, 0.0, s)
            gdcomm.put(rows, np.arange(10), table, stream=s)
            x = rows.reshape(-1)
        else:  # written, not read
            values = queued(ramp(3000, 6.0), s)
            gdcomm.put(table, np.arange(3000), values, stream=s, block=False)
            x = queued(ramp(3000, 5.0 * turn), s)
        with s if turn in (2, 4) else DEVICE.Stream():
            del table
        gc.collect()
        t.synchronize()
        for _ in range(5):  # what no event holds back is free now
            pinned.pool_of(DEVICE).stats()
        others = [gdcomm.pinned_empty(size) for size in (3000, 30_000) for _ in range(4)]
        for other in others:
            other[:] = -21.0
        check(f"of an array that went, {turn}", x, ramp(x.size, 5.0 * turn), s)
        for other in others:
            check(f"memory after the array that went, {turn}", other, -21.0)


def unregistered():
    """Memory stays registered until the copies that use it are done."""
    for turn in range(5):
        s, t = DEVICE.Stream(), DEVICE.Stream()
        host = in_place(ramp(20_000, 8.0 * turn))
        x = DEVICE.empty(20_000)
        if turn == 0:
            gdcomm.copy(x, host, stream=s, block=False)
        elif turn == 1:
            x = gdcomm.take(host, np.arange(20_000), stream=s, method="gather")
        elif turn == 2:
            x = gdcomm.take(host, np.arange(20_000), stream=s, method="gather")
            for _ in range(20):
                gdcomm.take(host, np.arange(10), stream=t, method="gather")
        elif turn == 3:
            gdcomm.put(host, np.arange(20_000), queued(ramp(20_000, 9.0), s), stream=s, block=False)
            x = queued(ramp(20_000, 8.0 * turn), s)
        else:
            x = gdcomm.take(host, np.arange(20_000), stream=s, method="gather")
            for _ in range(40):
                gdcomm.take(host, np.arange(10), stream=s, method="gather")
        if turn == 4:
            del host  # its end unregisters it
            gc.collect()
        else:
            gdcomm.unregister(host)
            check(f"registered, as it was, {turn}", host, ramp(20_000, 9.0 if turn == 3 else 8.0 * turn))
            host[:] = -22.0
        check(f"of memory that was registered, {turn}", x, ramp(20_000, 8.0 * turn), s)
        t.synchronize()


class CountingBudget(Budget):
    asked = 0

    def reserve(self, nbytes, *, new=True):
        self.asked += 1
        super().reserve(nbytes, new=new)


@behind
def over_the_budget():
    """A lease waits for blocks on their way back where there is no room for another."""
    budget = CountingBudget(3 * 4096)
    pool = pinned.PinnedPool(DEVICE, budget=budget)
    streams, arrived = [DEVICE.Stream() for _ in range(3)], []
    for i in range(9):
        s, x, lease = streams[i % 3], DEVICE.empty(512), pool.lease(4096)
        lease.array.view(float)[:] = ramp(512, 10.0 * i)
        DEVICE.copy(x.ptr, lease.address, 4096, s)
        lease.release(DEVICE.record(s))
        arrived.append((i, x, s))
    require("waiting is no endless asking", budget.asked < 100)
    for i, x, s in reversed(arrived):
        check(f"lease {i}", x, ramp(512, 10.0 * i), s)
    require("all leases came back", pool.stats()["leased"] == 0)


def ended_threads():
    """The slots of a thread that has ended are not used again before the copies out of them are done."""
    s, arrived = DEVICE.Stream(), []

    def work():
        for i in range(5):
            x = DEVICE.empty(300)
            gdcomm.copy(x, ramp(300, 10.0 * i), stream=s)
            arrived.append(x)

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    others = [gdcomm.pinned_empty(pinned.Slots.SIZE * pinned.Slots.COUNT, "u1") for _ in range(3)]
    for other in others:
        other[:] = 7
    for i, x in enumerate(arrived):
        check(f"of a thread that has ended, {i}", x, ramp(300, 10.0 * (i % 5)), s)


def helpers():
    """Work is over in all threads when `run` returns."""
    crew, done, inside = Crew(2), [], threading.Event()
    caller = threading.current_thread()

    def work():
        if threading.current_thread() is caller:
            inside.wait(5)
            return
        inside.set()
        time.sleep(0.03)
        done.append(1)

    crew.run(work, 1)
    require("a helper is waited for", done == [1])


# -- take and put --------------------------------------------------------------------------------------


def rows():
    """Gathered rows are those of the moment, and host memory is free when it should be."""
    for place in ("pageable", "pinned", "device"):
        for method in ("gather", "copy", "auto"):
            arrived = []
            for turn in range(4):
                s = DEVICE.Stream()
                values = ramp(6000, 1000.0 * turn).reshape(2000, 3)
                table = queued(values, s) if place == "device" else HOSTS[place](values)
                wide = DEVICE.empty((1500, 2), np.int64)
                index = np.random.default_rng(turn).integers(0, 2000, 1500)
                DEVICE.fill(wide, 3, s)
                DEVICE.launch(s, lambda v, index=index: np.copyto(v, index[:, None]), wide)
                near = index.copy()
                x = gdcomm.take(table, near, stream=s, method=method)
                near[:] = 0
                y = gdcomm.take(table, wide[:, 1], stream=s, method=method, mode="clip")
                DEVICE.fill(wide, 5, s)
                if place == "pageable":
                    table[:] = -23.0
                elif place == "device":
                    DEVICE.fill(table, -23.0, s)
                arrived.append((s, x, y, values[index], table, wide))
            for s, x, y, expected, _, _ in reversed(arrived):
                check(f"rows of a {place} table, {method}", x, expected, s)
                check(f"rows of a {place} table, {method}, by device indices", y, expected, s)


def rows_back():
    """A host table has its rows when the call returns."""
    for place in ("pageable", "pinned", "registered"):
        for wide in (False, True):
            s = DEVICE.Stream()
            table = HOSTS[place](np.zeros((500, 3)))
            new = DEVICE.empty((200, 6))[:, ::2] if wide else DEVICE.empty((200, 3))
            index = np.random.default_rng(3).permutation(500)[:200]
            DEVICE.fill(new, -24.0, s)
            DEVICE.launch(s, lambda v: np.copyto(v, ramp(600, 3.0).reshape(200, 3)), new)
            expected = np.zeros((500, 3))
            expected[index] = ramp(600, 3.0).reshape(200, 3)
            gdcomm.put(table, index, new, stream=s)
            DEVICE.fill(new, -25.0, s)
            check(f"rows put into a {place} table", table, expected)
    s = DEVICE.Stream()
    target = queued(np.zeros((500, 3)), s)
    values = ramp(600, 4.0).reshape(200, 3)
    gdcomm.put(target, index, values, stream=s)
    values[:] = -26.0
    expected[index] = ramp(600, 4.0).reshape(200, 3)
    check("rows put into a device table", target, expected, s)


def rows_of_itself():
    """Values and indices may lie in the memory that is written."""
    s = DEVICE.Stream()
    values = ramp(600, 8.0).reshape(200, 3)
    x = queued(values, s)
    order = np.random.default_rng(4).permutation(100)
    expected = values.copy()
    expected[order] = values[50:150]
    gdcomm.put(x, order, x[50:150], stream=s)
    check("rows put into their own table", x, expected, s)
    for write in (False, True):
        index = np.random.default_rng(5).permutation(200)
        chosen = DEVICE.empty(200, np.int64)
        DEVICE.launch(s, lambda v, index=index: np.copyto(v, index), chosen)
        if write:
            gdcomm.put(chosen, chosen, DEVICE.array(index + 1000, s), stream=s)
            expected = np.empty(200, np.int64)
            expected[index] = index + 1000
        else:
            gdcomm.take(DEVICE.array(np.arange(200) + 500, s), chosen, out=chosen, stream=s)
            expected = index + 500
        check(f"indices that are written, {write}", chosen, expected, s)


# -- batches of a program ------------------------------------------------------------------------------


class Loader:
    """Batches in page-locked or device memory, new ones each time, which only whoever takes them holds."""

    def __init__(self, count, size, place=None):
        self._count, self._size, self._place = count, size, place

    def __len__(self):
        return self._count

    def __getitem__(self, i):
        if i >= self._count:
            raise IndexError
        values = ramp(self._size, 100.0 * i)
        if self._place is None:
            return locked(DEVICE, values)
        made = queued(values, None)
        DEVICE.synchronize(None)  # else the kernel would write its values after the memory's end
        return made


Loader.__module__ = "torch.utils.data.dataloader"  # its batches last


def prefetched():
    """Batches arrive in order on the consumer's stream, which may drop them with work queued on them."""
    for size in SIZES:
        block = locked(DEVICE, np.zeros(size))

        def reused(size=size, block=block):
            for i in range(7):
                block[:] = ramp(size, 100.0 * i)
                yield block

        pooled = [in_pool(ramp(size, 100.0 * i)) for i in range(7)]
        for name, source in (
            ("reused", reused()),
            ("new", Loader(7, size)),
            ("a list's", pooled),
            ("device", Loader(7, size, "device")),
        ):
            for named in (False, True):
                if name == "reused" and named:
                    source = reused()
                s, totals = DEVICE.Stream(), []
                with DEVICE.default_stream if named else s:
                    for x in gdcomm.prefetch(source, stream=s if named else None):
                        totals.append(read_later(x, s))
                        DEVICE.fill(x, -27.0, s)
                        del x
                require("all batches", len(totals) == 7)
                for i, total in reversed(list(enumerate(totals))):
                    check(f"{name} batch {i}, {size}", total, ramp(size, 100.0 * i), s)


@behind
def at_once():
    """A batch that is used when it comes has waited for its copies, of which the next ones may be queued."""
    for size in SIZES:
        s = DEVICE.Stream()
        for place in (None, "device"):
            for i, x in enumerate(gdcomm.prefetch(Loader(9, size, place), stream=s)):
                check(f"batch {i}, used at once, {size}, {place}", x, ramp(size, 100.0 * i), s)


def given_up():
    """The memory of batches that nobody takes lives until their copies are done."""
    for _ in range(3):
        iterator = gdcomm.prefetch(Loader(9, 20_000), depth=5)
        first = next(iterator)
        deadline = time.monotonic() + 5
        while len(iterator._pipe.ready) < 5 and time.monotonic() < deadline:
            time.sleep(0.001)
        iterator.close()
        gc.collect()
        for s in list(DEVICE._streams.values()):
            s.synchronize()
        check("the batch that was taken", first, ramp(20_000, 0.0))


def passed_through():
    """Device arrays of the source are ordered with the consumer's stream."""

    def source():
        for i in range(4):
            s = DEVICE.current_stream()
            yield {"x": queued(ramp(500, 10.0 * i), s), "y": ramp(500, 11.0 * i), "n": i}

    s = DEVICE.Stream()
    with s:
        got = [(b["n"], read_later(b["x"], s), read_later(b["y"], s), b) for b in gdcomm.prefetch(source(), depth=1)]
    for i, x, y, _ in reversed(got):
        check(f"passed through, {i}", x, ramp(500, 10.0 * i), s)
        check(f"beside it, {i}", y, ramp(500, 11.0 * i), s)


def offloaded():
    """Batches are complete when they come, whatever the source does to its arrays meanwhile."""
    for size in SIZES:
        for snapshot, strided in itertools.product((True, False), (True, False)):
            s = DEVICE.Stream()

            def source(size=size, snapshot=snapshot, strided=strided, s=s):
                for i in range(6):
                    if i == 0 or not snapshot:
                        x = DEVICE.empty((size, 2))[:, 0] if strided else DEVICE.empty(size)
                    DEVICE.launch(s, lambda v, i=i: np.copyto(v, ramp(size, 10.0 * i)), x)
                    yield Produced(x, s) if i % 2 else x
                    if snapshot:
                        DEVICE.fill(x, -28.0, s)

            with s:
                for i, got in enumerate(gdcomm.offload(source(), snapshot=snapshot)):
                    check(f"offloaded {i}, {size}", got, ramp(size, 10.0 * i))
                iterator = gdcomm.offload(source(), depth=3, snapshot=snapshot)
                check("the first of many", next(iterator), ramp(size, 0.0))
                iterator.close()
                gc.collect()
                others = [gdcomm.pinned_empty(size) for _ in range(6)]
                for other in others:
                    other[:] = -29.0
                for stream in list(DEVICE._streams.values()):
                    stream.synchronize()
                for other in others:
                    check("memory after an offload that was given up", other, -29.0)


# -- signals -------------------------------------------------------------------------------------------


def signals():
    """Streams and hosts wait for values; a stream whose time is over goes on."""
    s, t, ready, over = DEVICE.Stream(), DEVICE.Stream(), gdcomm.Signal(), gdcomm.Signal(bits=32)
    host, x = locked(DEVICE, np.zeros(1000)), DEVICE.empty(1000)
    ready.stream_wait(s, 1)
    DEVICE.copy(x.ptr, host.ctypes.data, host.nbytes, s)
    over.stream_set(s, 3)
    host[:] = ramp(1000, 7.0)
    ready.set(1)
    over.wait(3, timeout=3.0)
    check("after a signal", x, ramp(1000, 7.0), t)
    for _ in range(3):  # the memory of one that went is the streams' until they have passed
        gone = gdcomm.Signal()
        gone.stream_set(s, 3)
        del gone
    others = [gdcomm.pinned_empty(1) for _ in range(6)]
    for other in others:
        other[:] = -30.0
    s.synchronize()
    for other in others:
        check("memory after a signal that went", other, -30.0)
    late = gdcomm.Signal()
    late.stream_wait(s, 5, timeout=0.01)
    behind = DEVICE.record(s)
    late.stream_wait(t, 9, timeout=0.01)
    also = DEVICE.record(t)
    deadline = time.monotonic() + 3
    while not (behind.query() and also.query()):
        require("a stream whose time is over goes on", time.monotonic() < deadline)
        time.sleep(0.001)
    try:
        late.check()
    except gdcomm.CommTimeoutError:
        pass
    else:
        raise WrongError("a signal says when a stream's time was over")


# -- all -----------------------------------------------------------------------------------------------


def sequences(seed):
    for number in range(SEQUENCES):
        DEVICE.early = 0.1 * (number % 2)
        sequence = Sequence(DEVICE, random.Random(1000 * seed + number))
        sequence.run(60)
        for stream in sequence.streams:  # before the arrays that the caller's own work uses go
            stream.synchronize()
    DEVICE.early = 0.0


def nothing_is_left():
    """Every lease is back and every block free once all streams are done."""
    for s in list(DEVICE._streams.values()):
        s.synchronize()
    gc.collect()
    gdcomm.copy(DEVICE.empty(1), np.zeros(1), block=False).synchronize()  # lets go of arrays of copies that are done
    while any(not copying.query() for copying in list(gdcomm.transfer.copy._under_way)):
        pass
    gdcomm.transfer.copy._under_way.clear()
    gc.collect()
    for _ in range(5):  # an event may say "not yet" for some time
        stats = pinned.pool_of(DEVICE).stats()
    require(f"leases are left: {stats}", stats["leased"] == stats["pending"] == 0)
    require("blocks were used again", stats["hits"] > 30)


CASES = (
    to_the_device, to_the_host, many_in_a_row, not_blocking, dropped_under_way, on_the_device, on_the_host, coherent,
    two_gpus, batches, batches_in_a_row, mixtures, dropped_arrays, unregistered, over_the_budget, ended_threads,
    helpers, rows, rows_back, rows_of_itself, prefetched, at_once, given_up, passed_through, offloaded, signals,
)  # fmt: skip


def main():
    global DEVICE
    for seed in SEEDS:
        DEVICE = StrictDevice(seed)
        install(DEVICE)
        for case in CASES:
            begin = time.monotonic()
            case()
            if "-v" in sys.argv:
                print(f"{case.__name__:20}{time.monotonic() - begin:8.3f} s", flush=True)
        begin = time.monotonic()
        sequences(seed)
        if "-v" in sys.argv:
            print(f"{'sequences':20}{time.monotonic() - begin:8.3f} s", flush=True)
        nothing_is_left()
    devices._installed.clear()


if __name__ == "__main__":
    run(main, lambda: os._exit(1))
