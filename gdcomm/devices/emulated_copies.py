"""Queued copies between addresses, in rows, on the device and in batches: the emulated ones."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gdcomm.devices.copies import Copies
from gdcomm.errors import BufferSpecError

if TYPE_CHECKING:
    from gdcomm.devices.base import Buffer

__all__ = ["EmulatedCopies"]

_Array = np.ndarray[Any, Any]


class EmulatedCopies(Copies):
    """As late as the rules allow: pinned memory is read when the copy runs, pageable memory at the call."""

    # The parts of EmulatedDevice that are used here.
    _lock: Any
    _memory: Any
    _random: Any
    _view: Any
    emulated_properties: Any
    is_pinned: Any
    stats: dict[str, int]
    stream_of: Any

    def copy(self, dst: int, src: int, nbytes: int, stream: Any) -> None:
        self.copy_rows(dst, nbytes, src, nbytes, nbytes, 1, stream)

    def copy_rows(
        self, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, height: int, stream: Any
    ) -> None:
        assert width <= min(dst_pitch, src_pitch), "rows do not overlap"
        if not width or not height:
            return
        with self._lock:
            queue = self.stream_of(stream)
            target, wait = self._rows(dst, dst_pitch, width, height)
            source, taken = self._rows(src, src_pitch, width, height)
            if taken:
                source = source.copy()
            locked = [a for a in (dst, src) if self.is_pinned(a)]
            self.stats["copy"] = self.stats.get("copy", 0) + 1
            queue._push(lambda: self._write(target, source, locked))
            if wait:
                queue._run_to(queue._queued)

    def copy_strided(self, dst: Buffer, src: Buffer) -> None:
        target, source = self._view(dst), self._view(src)
        dst.stream._push(lambda: np.copyto(target, source))

    def copy_pieces(self, table: _Array, largest: int, stream: Any) -> None:
        assert table.dtype == np.uint64
        assert self.is_pinned(table.ctypes.data)
        assert int(table[2].max()) == largest

        def work() -> None:
            pieces = [tuple(map(int, piece)) for piece in table.T]
            self._random.shuffle(pieces)
            for dst, src, nbytes in pieces:
                views = [self._rows(address, nbytes, nbytes, 1) for address in (dst, src)]
                if views[0][1] or views[1][1]:
                    raise BufferSpecError(f"a kernel can't reach the pageable memory of ({dst:#x}, {src:#x})")
                np.copyto(views[0][0], views[1][0])

        with self._lock:
            self.stats["batches"] = self.stats.get("batches", 0) + 1
            self.stream_of(stream)._push(work)

    def addresses(self, arrays: Sequence[Any]) -> _Array | None:
        from gdcomm.devices.emulated import EmulatedArray

        if not all(type(a) is EmulatedArray and a._view.flags.carray for a in arrays):
            return None
        return np.array([a.ptr for a in arrays], np.uint64)

    def _write(self, target: _Array, source: _Array, locked: list[int]) -> None:
        for address in locked:
            if not self.is_pinned(address):
                raise BufferSpecError(f"page-locked memory at {address:#x} was freed before a queued copy used it")
        np.copyto(target, source)

    def _rows(self, address: int, pitch: int, width: int, height: int) -> tuple[_Array, bool]:
        """The memory at an address as rows of bytes, and whether it is pageable."""
        span = (height - 1) * pitch + width
        with self._lock:
            block = self._memory.at(address)
            locked = self.is_pinned(address) and self.is_pinned(address + span - 1)
            pageable = block is None and not locked and not self.emulated_properties.coherent
        if block is None:
            raw: Any = (ctypes.c_ubyte * span).from_address(address)
        else:
            start, memory = block
            raw = memory[address - start :]
            if raw.nbytes < span:
                raise BufferSpecError(f"{span} bytes at {address:#x} reach beyond their block of device memory")
        return np.ndarray((height, width), np.uint8, raw, 0, (pitch, 1)), pageable
