"""The one measuring loop. It never prints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

import gdcomm
from gdcomm.bench.cases import CASES, Aware, CupyArrays, EmulatedArrays, HostArrays, Naive, Pinned
from gdcomm.errors import NoPathError
from gdcomm.reductions import wire_dtype

__all__ = ["Figure", "columns", "sweep"]


@dataclass
class Figure:
    """One measured cell. Times in microseconds, bandwidths in GB/s (1e9 bytes).

    `us` is the median over iterations of the slowest rank's time; `low_us` and `high_us` are the 10th and 90th
    percentiles. `us` is None where the path can't do it (`why`), or the data was wrong.
    """

    operation: str
    column: str
    nbytes: int
    us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    algbw: float | None = None
    busbw: float | None = None
    wrong: int = 0
    iterations: int = 0
    why: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def columns(device: str, world: MPI.Intracomm) -> dict[str, tuple[Any, Any]]:
    """The paths to compare: column name -> communicator and kind of arrays.

    Args:
        device: "none", "emulated" or "cuda".
    """
    host = HostArrays()
    found: dict[str, tuple[Any, Any]] = {
        "raw": (world, host),
        "host": (gdcomm.Communicator(world, path="auto"), host),
    }
    if device == "none":
        return found
    arrays = EmulatedArrays() if device == "emulated" else CupyArrays()
    prefix = "emu-" if device == "emulated" else ""
    direct = gdcomm.Communicator(world, path="direct")
    found[prefix + "direct"] = (direct, arrays)
    found[prefix + "staged"] = (gdcomm.Communicator(world, path="staged"), arrays)
    if device == "cuda":
        found["aware"] = (Aware(world, direct._paths), arrays)
        found["pinned"] = (Pinned(world), arrays)
        found["naive"] = (Naive(world), arrays)
    return found


def sweep(
    world: MPI.Intracomm,
    names: list[str],
    sizes: list[int],
    dtype: Any,
    device: str,
    seconds: float,
) -> Iterator[list[Figure]]:
    """Measure each operation at each size; yields a row of figures (one a column), equal on all ranks."""
    paths = columns(device, world)
    for name in names:
        for nbytes in sizes:
            yield _row(world, name, nbytes, dtype, paths, seconds)


def _row(
    world: MPI.Intracomm, name: str, nbytes: int, dtype: Any, paths: dict[str, tuple[Any, Any]], seconds: float
) -> list[Figure]:
    runs = {}
    figures = {}
    for column, (comm, arrays) in paths.items():
        case = CASES[name](comm, world, arrays, nbytes, dtype)
        figure = figures[column] = Figure(name, column, case.nbytes)
        if column in ("raw", "aware", "pinned", "naive") and wire_dtype(dtype) is not None:
            figure.why = f"mpi4py can't do {dtype}"
            continue
        if name in ("p2p", "exchange") and world.Get_size() < 2:
            figure.why = "needs 2 ranks"
            continue
        try:
            if case.expected is not None:
                arrays.spoil(case.result)
            case.call()
            arrays.finish()
        except NoPathError as error:  # the same on every rank: paths are agreed
            figure.why = str(error)
            continue
        figure.wrong = _wrong(world, case, arrays)
        if not figure.wrong:
            runs[column] = (case, arrays)
    times = _in_turns(world, runs, seconds)
    for column, (case, arrays) in runs.items():
        figure = figures[column]
        figure.wrong = _wrong(world, case, arrays)
        if not figure.wrong:
            _fill(figure, times[column] / (2 if name == "p2p" else 1), case.factor)
    return list(figures.values())


def _wrong(world: MPI.Intracomm, case: Any, arrays: Any) -> int:
    bad = 0 if case.expected is None else int((arrays.read(case.result) != case.expected).sum())
    return int(world.allreduce(bad))


def _in_turns(world: MPI.Intracomm, runs: dict[str, Any], seconds: float) -> dict[str, np.ndarray]:
    """Time all columns in turns, so that drift of the machine meets all alike."""
    once = _time(world, [(c.call, a.finish) for c, a in runs.values()])
    total = world.bcast(float(once.sum()), 0)  # rank 0 decides how often
    repeats = int(min(200, max(5, seconds * 1e6 / max(total, 1.0))))
    inner = int(min(100, max(1, 200 * len(runs) / max(total, 1.0))))  # small ones: several a timing
    calls = [(c.call, a.finish) for c, a in runs.values()]
    rounds = np.array([_time(world, calls, inner, first) for first in range(repeats)])
    slowest = np.empty_like(rounds)
    MPI.Intracomm.Allreduce(world, rounds, slowest, MPI.MAX)
    return {column: slowest[:, i] for i, column in enumerate(runs)}


def _time(
    world: MPI.Intracomm, calls: list[tuple[Callable[[], Any], Callable[[], Any]]], inner: int = 1, first: int = 0
) -> np.ndarray:
    """Time each call once, beginning with another one each time and in turning direction.

    A call that always followed the same slow one would look slower than it is.
    """
    times = np.empty(len(calls))
    for turn in range(len(calls)):
        i = (first + (turn if first // len(calls) % 2 else -turn)) % len(calls)
        call, finish = calls[i]
        MPI.Intracomm.Barrier(world)
        start = time.perf_counter()
        for _ in range(inner):
            call()
        finish()
        times[i] = (time.perf_counter() - start) / inner * 1e6
    return times


def _fill(figure: Figure, times: np.ndarray, factor: float) -> None:
    figure.us, figure.low_us, figure.high_us = (float(np.percentile(times, p)) for p in (50, 10, 90))
    figure.iterations = len(times)
    figure.algbw = figure.nbytes / max(figure.us, 1e-9) / 1e3
    figure.busbw = figure.algbw * factor
