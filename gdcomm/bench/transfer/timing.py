"""The one measuring loop of local transfers: verification, two clocks, turns. It never prints.

Clocks:
- "events": what a stream takes, as nvbandwidth measures it. The stream waits for a value that the host sets once
  everything is queued, so that the time of queueing does not show: event, N calls, event; the time is elapsed / N.
- "host": what the calling thread waits, `time.perf_counter` around N calls and a synchronisation of the stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gdcomm.errors import CommTimeoutError, DeviceError
from gdcomm.transfer.signals import Signal

if TYPE_CHECKING:
    from gdcomm.bench.transfer.kits import Kit

__all__ = ["PEERS", "Figure", "Row", "Way", "measure"]

PEERS = ("cupy", "torch", "jax")
_FEWEST, _MOST = 3, 200  # repetitions of a row
_QUEUED_US, _MOST_QUEUED = 5000.0, 32  # one timing by events; more calls could fill the stream's queue
_HOST_US, _MOST_CALLS = 200.0, 100  # one timing by the host's clock
_GATE_S = 20.0  # after which a stream is released whatever happens


@dataclass
class Figure:
    """One measured cell. Times in microseconds, bandwidths in GB/s (1e9 bytes).

    Attributes:
        section, what, column: its place; `what` states the direction.
        nbytes: bytes of one array (one piece of `count`, one batch).
        us, low_us, high_us: of one call (of one batch where a call moves several): median, 10th and 90th
            percentile over `iterations` timings. None where it can't be done, or the data was wrong.
        gbps: bytes moved, in all directions, over the median.
        clock: "events" or "host", see the module's text.
        wrong: bytes that were not as they must be.
        why: why there is no figure.
        note: what differs from what was asked for.
        share: of a table's rows, in per cent, in the sweep of `rows`.
    """

    section: str
    what: str
    column: str
    nbytes: int
    us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    gbps: float | None = None
    clock: str = ""
    iterations: int = 0
    wrong: int = 0
    why: str = ""
    note: str = ""
    share: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON; with the time of a GiB where memory is allocated or registered."""
        found = asdict(self)
        if self.section == "alloc":
            found["ms_per_gib"] = self.ms_per_gib
        return found

    @property
    def ms_per_gib(self) -> float | None:
        """Milliseconds for 1 GiB at this size's rate."""
        return None if self.us is None else self.us / 1e3 * (1 << 30) / self.nbytes


def _nothing() -> None:
    pass


@dataclass
class Way:
    """One way to do what a row measures.

    Attributes:
        call: does it once. Its result lives until the next timing.
        wrong: counts wrong bytes, given the result of the last call.
        spoil: makes the destination wrong.
        before: run ahead of each timing, outside of it; such calls are timed one by one.
    """

    call: Callable[[], Any]
    wrong: Callable[[Any], int]
    spoil: Callable[[], None] = _nothing
    before: Callable[[], None] | None = None


@dataclass
class Row:
    """Ways that are compared.

    Attributes:
        ways: by column; a text says why a column is empty.
        queued: all ways queue and do not block: they are timed by events.
        beside: streams that the ways use beside the kit's own.
        moved: bytes that count for the bandwidth; None is `nbytes`.
        batches: that one call moves; times are of one.
    """

    section: str
    what: str
    nbytes: int
    ways: dict[str, Way | str]
    queued: bool = False
    beside: tuple[Any, ...] = ()
    moved: int | None = None
    batches: int = 1
    note: str = ""
    share: float | None = None


def measure(kit: Kit, row: Row) -> list[Figure]:
    """Verify all ways, time them in turns, verify again. A figure whose data was wrong has no time."""
    figures = {column: _figure(kit, row, column) for column in row.ways}
    clock = _Events(kit, row) if row.queued and kit.device is not None else _Host(kit)
    with clock.context():
        ready = {}
        for column, way in row.ways.items():
            figure = figures[column]
            if isinstance(way, str):
                figure.why = way
                continue
            try:
                figure.wrong = _verify(kit, way, row.beside)
            except _expected(column) as error:
                figure.why = _text(error)
            else:
                if not figure.wrong:
                    ready[column] = way
        turns = _Turns(ready, clock, kit.seconds)
        turns.run()
        for column, way in ready.items():
            figure = figures[column]
            figure.why = turns.failures.get(column, "")
            if not figure.why:
                figure.wrong = way.wrong(turns.results.pop(column))
            if not (figure.why or figure.wrong):
                _fill(figure, np.array(turns.times[column]) / row.batches, row, clock.name)
    return list(figures.values())


def _figure(kit: Kit, row: Row, column: str) -> Figure:
    name = column if column in PEERS else kit.prefix + column
    return Figure(row.section, row.what, name, row.nbytes, note=row.note, share=row.share)


def _expected(column: str) -> tuple[type[Exception], ...]:
    """What makes an empty cell, and not an end of the benchmark."""
    return (MemoryError, DeviceError, CommTimeoutError, *((RuntimeError,) if column in PEERS else ()))


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def _verify(kit: Kit, way: Way, beside: tuple[Any, ...]) -> int:
    way.spoil()
    if way.before is not None:
        way.before()
    kit.finish()
    result = way.call()
    kit.finish()
    for stream in beside:
        assert kit.device is not None
        kit.device.synchronize(stream)
    return way.wrong(result)


def _fill(figure: Figure, times: np.ndarray[Any, Any], row: Row, clock: str) -> None:
    figure.us, figure.low_us, figure.high_us = (float(np.percentile(times, p)) for p in (50, 10, 90))
    moved = row.nbytes if row.moved is None else row.moved
    figure.gbps = moved / max(figure.us, 1e-9) / 1e3
    figure.iterations, figure.clock = len(times), clock


class _Turns:
    """Times all ways in turns, so that drift of the machine meets all alike."""

    def __init__(self, ways: dict[str, Way], clock: _Host, seconds: float) -> None:
        self._ways, self._clock, self._seconds = dict(ways), clock, seconds
        self._calls = dict.fromkeys(ways, 1)
        self.times: dict[str, list[float]] = {column: [] for column in ways}
        self.results: dict[str, Any] = dict.fromkeys(ways)
        self.failures: dict[str, str] = {}

    def run(self) -> None:
        """A first turn to know how long calls take, then at least three, and more while there is time."""
        self._turn(0)
        for column in self._ways:
            (once,) = self.times[column]
            self.times[column].clear()
            self._calls[column] = 1 if self._ways[column].before else self._clock.calls(once)
        begin, turn = time.perf_counter(), 0
        while self._ways and turn < _MOST and (turn < _FEWEST or time.perf_counter() - begin < self._seconds):
            self._turn(turn)
            turn += 1

    def _turn(self, number: int) -> None:
        """Each way once, beginning with another one each time and in turning direction."""
        columns = list(self._ways)
        count = len(columns)
        for i in range(count):
            column = columns[(number + (i if number // count % 2 else -i)) % count]
            way = self._ways[column]
            self.results[column] = None  # the memory of the last result is free when it is timed
            try:
                if way.before is not None:
                    way.before()
                us, self.results[column] = self._clock.time(way, self._calls[column])
            except _expected(column) as error:
                self.failures[column] = _text(error)
                del self._ways[column]
            else:
                self.times[column].append(us)


class _Host:
    """The calling thread's clock."""

    name = "host"

    def __init__(self, kit: Kit) -> None:
        self._kit = kit

    def context(self) -> Any:
        """In which all ways run."""
        return nullcontext()

    def calls(self, once_us: float) -> int:
        """How many calls make one timing."""
        return int(min(_MOST_CALLS, max(1, _HOST_US / max(once_us, 1e-3))))

    def time(self, way: Way, calls: int) -> tuple[float, Any]:
        """Microseconds of one call, and the last call's result."""
        kit, call = self._kit, way.call
        result = None
        kit.finish()
        start = time.perf_counter()
        for _ in range(calls):
            result = call()
        kit.finish()
        return (time.perf_counter() - start) / calls * 1e6, result


class _Events(_Host):
    """The stream's clock, on the kit's own stream, which is current in the context."""

    def __init__(self, kit: Kit, row: Row) -> None:
        super().__init__(kit)
        assert kit.device is not None
        self.name = "events" if kit.gates else "events, not held back"
        self._device, self._stream, self._beside = kit.device, kit.stream, row.beside

    def context(self) -> Any:
        return self._device.on(self._stream)

    def calls(self, once_us: float) -> int:
        return int(min(_MOST_QUEUED, max(1, _QUEUED_US / max(once_us, 1e-3))))

    def time(self, way: Way, calls: int) -> tuple[float, Any]:
        device, stream, kit, call = self._device, self._stream, self._kit, way.call
        result = None
        kit.finish()
        gate, value = kit.gate()
        try:
            if kit.gates:
                gate.stream_wait(stream, value, timeout=_GATE_S)
            start = kit.mark(stream)
            for other in self._beside:
                device.wait_event(other, device.record(stream))
            for _ in range(calls):
                result = call()
            for other in self._beside:
                device.wait_event(stream, device.record(other))
            end = kit.mark(stream)
        finally:
            _open(gate, value)
        device.synchronize(stream)
        gate.check()
        return kit.elapsed_us(start, end) / calls, result


def _open(gate: Signal, value: int) -> None:
    try:
        gate.set(value)
    except CommTimeoutError:
        pass  # it is set all the same; `check` tells
