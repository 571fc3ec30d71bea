"""Test data that differs at every place, and comparisons, by several threads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from gdcomm.memory.pages import PAGE
from gdcomm.transfer.crew import cpu_count

__all__ = ["SPOILT", "Array", "differences", "page_aligned", "pattern", "spoil"]

Array = np.ndarray[Any, Any]
SPOILT = 113  # a byte; no run of the pattern holds only this
_CHUNK = 4 << 20
_ODD = np.uint64(0x9E3779B97F4A7C15)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(8, cpu_count()), "gdcomm-bench")


def _in_chunks(nbytes: int, work: Callable[[int, int], int]) -> int:
    """Sum of `work(first, end)` over chunks of a range of bytes."""
    starts = range(0, nbytes, _CHUNK)
    if len(starts) < 2:
        return work(0, nbytes)
    return sum(_threads().map(lambda first: work(first, min(first + _CHUNK, nbytes)), starts))


def page_aligned(nbytes: int) -> Array:
    """Pageable memory as bytes, which begins at a page and fills its pages alone."""
    room = -(-nbytes // PAGE) * PAGE
    block = np.empty(room + PAGE, np.uint8)
    return block[-block.ctypes.data % PAGE :][:nbytes]


def pattern(out: Array) -> Array:
    """Fill bytes with numbers that differ from 8 bytes to 8 bytes; a shorter one begins the same. Returns `out`."""

    def work(first: int, end: int) -> int:
        words = np.arange(first // 8, -(-end // 8), dtype=np.uint64) * _ODD + np.uint64(12345)
        out[first:end] = words.view(np.uint8)[: end - first]
        return 0

    _in_chunks(out.nbytes, work)
    return out


def spoil(out: Array) -> None:
    """Fill host memory with what no correct result has."""
    flat = out.reshape(-1).view(np.uint8)

    def work(first: int, end: int) -> int:
        flat[first:end] = SPOILT
        return 0

    _in_chunks(flat.nbytes, work)


def differences(found: Array, expected: Array) -> int:
    """Bytes that differ between two C-contiguous host arrays; all, if their lengths do."""
    if found.nbytes != expected.nbytes:
        return max(found.nbytes, expected.nbytes)
    a, b = found.reshape(-1).view(np.uint8), expected.reshape(-1).view(np.uint8)
    return _in_chunks(a.nbytes, lambda first, end: int(np.count_nonzero(a[first:end] != b[first:end])))
