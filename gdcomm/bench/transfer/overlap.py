"""Copying and computing at once: `gdcomm.prefetch` and `gdcomm.offload` beside one after the other.

The work on a batch is tuned to last as long as its copy, so that the best possible speed-up is 2. All times
are of one batch.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

import gdcomm
from gdcomm.bench.transfer.data import Array, differences, page_aligned, pattern
from gdcomm.bench.transfer.hosts import hosts
from gdcomm.bench.transfer.kits import LCG_FACTOR, LCG_TERM, Kit
from gdcomm.bench.transfer.timing import Figure, Row, Way, measure

__all__ = ["overlap"]

_DIFFERENT = 4  # batches in memory; they come again and again
_MOST_STEPS = 1 << 20
_SAMPLES = 16


def overlap(kit: Kit) -> Iterator[list[Figure]]:
    """To the device from pinned and from pageable memory, and back."""
    nbytes = kit.fit(max(kit.medium // 4, 1) * 4, locked=_DIFFERENT + 6, pageable=_DIFFERENT + 6, device=24) // 4 * 4
    if not nbytes:
        kit.notes.append("overlap: batches do not fit in memory")
        return
    for kind in ("pinned", "pageable"):
        yield _up(kit, kind, nbytes)
        kit.free()
    different = [_values(page_aligned(nbytes), i) for i in range(_DIFFERENT)]
    yield measure(kit, _Down(kit, different).row())


def _up(kit: Kit, kind: str, nbytes: int) -> list[Figure]:
    with hosts(kind, nbytes, _DIFFERENT) as memory:
        different = [_values(host.array, i) for i, host in enumerate(memory)]
        return measure(kit, _Up(kit, different, kind).row())


def _values(block: Array, number: int) -> Array:
    values = pattern(block).view(np.uint32)
    values += np.uint32(number * 7919)
    return values


def _after(values: Array, steps: int) -> Array:
    """The values after so many steps of v -> v * LCG_FACTOR + LCG_TERM, modulo 2**32."""
    factor, term = 1, 0
    for _ in range(steps):
        factor, term = factor * LCG_FACTOR % (1 << 32), (term * LCG_FACTOR + LCG_TERM) % (1 << 32)
    found: Array = values * np.uint32(factor)
    found += np.uint32(term)
    return found


def _best_us(kit: Kit, call: Callable[[], Any], batches: int) -> float:
    """The shortest time of a batch by the host's clock, over a few calls."""
    times = []
    for _ in range(4):
        kit.finish()
        start = time.perf_counter()
        call()
        kit.finish()
        times.append((time.perf_counter() - start) / batches * 1e6)
    return min(times[1:])


class _Overlap:
    """What both directions share: batches on the device, and work of a tuned length."""

    def __init__(self, kit: Kit, different: list[Array]) -> None:
        self.kit, self.batches = kit, kit.batches
        self.different = different
        self.near = [kit.array(values) for values in different]
        self.acc = kit.empty(different[0].shape, np.uint32)
        self.steps = 1

    def order(self, batches: list[Any]) -> list[Any]:
        """As many as are measured, the same ones again and again."""
        return list(itertools.islice(itertools.cycle(batches), self.batches))

    def tune(self, copies: Callable[[], Any]) -> None:
        """Make the work on a batch last as long as its copy."""
        target = _best_us(self.kit, copies, self.batches)
        fewer, least, steps = 0, 0.0, 1
        most = self._work_us(steps)
        while most < target and steps < _MOST_STEPS:  # up to some length a launch takes as long as the work
            fewer, least, steps = steps, most, 2 * steps
            most = self._work_us(steps)
        share = (target - least) / max(most - least, 1e-6)
        self.steps = int(min(max(fewer + share * (steps - fewer), 1), _MOST_STEPS))

    def _work_us(self, steps: int) -> float:
        self.steps = steps
        return _best_us(self.kit, self.compute, self.batches)

    def compute(self) -> Any:
        """The work on all batches, which are on the device already."""
        self.kit.fill(self.acc, 0)
        for batch in self.order(self.near):
            self.kit.spin(self.acc, batch, self.steps, 1)

    def wrong_sum(self, _: Any) -> int:
        """Elements of the sum over all batches' results that are wrong."""
        count = np.bincount(np.arange(self.batches) % len(self.different), minlength=len(self.different))
        total = np.zeros_like(self.different[0])
        for values, times in zip(self.different, count, strict=True):
            total += _after(values, self.steps) * np.uint32(times)
        return self.kit.differ(self.acc, self.kit.array(total))

    def last(self) -> Array:
        """The last batch."""
        found: Array = self.order(self.different)[-1]
        return found


class _Up(_Overlap):
    """To the device: `prefetch`."""

    def __init__(self, kit: Kit, different: list[Array], kind: str) -> None:
        super().__init__(kit, different)
        self.kind = kind

    def row(self) -> Row:
        """Copies alone, work alone, one after the other, and overlapped."""
        self.tune(self.copies)
        fill = partial(self.kit.fill, self.acc)
        ways: dict[str, Way | str] = {
            "copy": Way(self.copies, lambda last: self.kit.differ(last, self.kit.array(self.last()))),
            "compute": Way(self.compute, self.wrong_sum, fill),
            "serial": Way(self.serial, self.wrong_sum, fill),
            "gdcomm": Way(self.prefetched, self.wrong_sum, fill),
        }
        nbytes = self.different[0].nbytes
        return Row("overlap", f"{self.kind} H2D and work on it", nbytes, ways, batches=self.batches)

    def copies(self) -> Any:
        found = None
        for batch in self.order(self.different):
            found = gdcomm.to_device(batch)
        return found

    def serial(self) -> None:
        self.kit.fill(self.acc, 0)
        for batch in self.order(self.different):
            self.kit.spin(self.acc, gdcomm.to_device(batch), self.steps, 1)
            self.kit.finish()

    def prefetched(self) -> None:
        self.kit.fill(self.acc, 0)
        for batch in gdcomm.prefetch(self.order(self.different)):
            self.kit.spin(self.acc, batch, self.steps, 1)


class _Down(_Overlap):
    """From the device: `offload`."""

    def row(self) -> Row:
        """Copies alone, work alone, one after the other, and overlapped."""
        self.tune(self.copies)
        ways: dict[str, Way | str] = {
            "copy": Way(self.copies, partial(self.wrong_samples, 0)),
            "compute": Way(self.compute, self.wrong_sum, partial(self.kit.fill, self.acc)),
            "serial": Way(self.serial, lambda found: self.wrong_samples(self.steps, found)),
            "gdcomm": Way(self.offloaded, lambda found: self.wrong_samples(self.steps, found)),
        }
        nbytes = self.different[0].nbytes
        return Row("overlap", "work and D2H of its result", nbytes, ways, batches=self.batches)

    def results(self) -> Iterator[Any]:
        """The work's results, each in new device memory."""
        for batch in self.order(self.near):
            made = self.kit.empty(self.acc.shape, np.uint32)
            self.kit.spin(made, batch, self.steps, 0)
            yield made

    def copies(self) -> Any:
        return self._look(gdcomm.to_host(batch) for batch in self.order(self.near))

    def serial(self) -> Any:
        return self._look(gdcomm.to_host(result) for result in self.results())

    def offloaded(self) -> Any:
        return self._look(gdcomm.offload(self.results()))

    def _look(self, arrived: Iterator[Array]) -> tuple[list[list[int]], Array]:
        """Some elements of each batch, and all of the last one."""
        step = max(1, self.different[0].size // _SAMPLES)
        samples, last = [], self.different[0]
        for last in arrived:
            samples.append(last[::step].tolist())
        return samples, last

    def wrong_samples(self, steps: int, found: tuple[list[list[int]], Array]) -> int:
        """Elements that are not as after so many steps."""
        expected = self.order([_after(values, steps) for values in self.different])
        step = max(1, expected[0].size // _SAMPLES)
        samples, last = found
        wrong = sum(got != values[::step].tolist() for got, values in zip(samples, expected, strict=True))
        return wrong + differences(last, expected[-1])
