"""Many short pieces: `gdcomm.copy_many` beside a loop of copies. What the program waits for, by the host's clock.

A loop of a thousand copies would fill the stream's queue, so streams are not held back here.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

import gdcomm
from gdcomm.bench.transfer.data import Array, spoil
from gdcomm.bench.transfer.hosts import hosts
from gdcomm.bench.transfer.kits import Kit
from gdcomm.bench.transfer.timing import Figure, Row, Way, measure

__all__ = ["pieces"]

_PIECE = 4096


class _Side:
    """Pieces in one kind of memory."""

    def __init__(self, kit: Kit, arrays: list[Any], on_device: bool) -> None:
        self._kit, self.arrays, self.on_device = kit, arrays, on_device
        self.addresses = [kit.address(a) if on_device else int(a.ctypes.data) for a in arrays]

    def fill(self) -> None:
        for array in self.arrays:
            self._kit.fill(array) if self.on_device else spoil(array)

    def wrong(self, _: Any) -> int:
        """Bytes that are not the test data, cut into pieces."""
        nbytes = self.arrays[0].nbytes
        whole, count = self._kit.truth(nbytes * len(self.arrays)), 0
        for i, array in enumerate(self.arrays):
            here = array
            if self.on_device:
                here = np.empty(nbytes, np.uint8)
                assert self._kit.device is not None
                handle = self._kit.device.handle(None)
                self._kit.device.copy(here.ctypes.data, self.addresses[i], nbytes, handle)
                self._kit.device.synchronize(handle)
            count += int(np.count_nonzero(here != whole[i * nbytes : (i + 1) * nbytes]))
        return count


def pieces(kit: Kit) -> Iterator[list[Figure]]:
    """Host to device and back, of pinned and of pageable pieces, and on the device."""
    count, nbytes = kit.pieces, min(_PIECE, kit.large)
    whole = kit.truth(count * nbytes)
    cut = [whole[i * nbytes : (i + 1) * nbytes] for i in range(count)]
    near = _Side(kit, [kit.array(piece) for piece in cut], True)
    end = _Side(kit, [kit.empty(nbytes) for _ in cut], True)
    if kit.fit(nbytes * count, locked=2) == nbytes * count:
        with hosts("pinned", nbytes * count, 2) as (source, target):
            np.copyto(source.array, whole)
            halves = [_Side(kit, list(_rows(block.array, count)), False) for block in (source, target)]
            yield _row(kit, "pinned H2D", end, halves[0])
            yield _row(kit, "pinned D2H", halves[1], near)
    else:
        kit.notes.append("pieces: pinned ones do not fit in page-locked memory")
    yield _row(kit, "pageable H2D", end, _Side(kit, [piece.copy() for piece in cut], False))
    yield _row(kit, "pageable D2H", _Side(kit, [np.empty(nbytes, np.uint8) for _ in cut], False), near)
    yield _row(kit, "D2D", end, near)


def _rows(block: Array, count: int) -> Array:
    return block.reshape(count, -1)


def _row(kit: Kit, what: str, to: _Side, source: _Side) -> list[Figure]:
    assert kit.device is not None
    copy, stream, nbytes = kit.device.copy, kit.device.handle(None), to.arrays[0].nbytes

    def bare() -> None:
        for dst, src in zip(to.addresses, source.addresses, strict=True):
            copy(dst, src, nbytes, stream)

    ways: dict[str, Way | str] = {
        "gdcomm": Way(partial(gdcomm.copy_many, to.arrays, source.arrays), to.wrong, to.fill),
        "bare": Way(bare, to.wrong, to.fill),
    }
    if kit.name == "cuda" and what != "D2D":
        ways["cupy"] = Way(partial(_cupy_loop, to, source), to.wrong, to.fill)
    count = len(to.arrays)
    return measure(kit, Row("pieces", f"{count} pieces, {what}", nbytes, ways, moved=count * nbytes))


def _cupy_loop(to: _Side, source: _Side) -> None:
    """By `ndarray.set` and `ndarray.get`."""
    if to.on_device:
        for end, piece in zip(to.arrays, source.arrays, strict=True):
            end.set(piece)
        return
    for target, near in zip(to.arrays, source.arrays, strict=True):
        near.get(out=target)
