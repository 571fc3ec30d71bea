"""Gathers, scatters, waits for values and lent memory of the emulated device."""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np

from gdcomm.devices.kernels import Kernels, Loan, Rows

if TYPE_CHECKING:
    from gdcomm.devices.base import Buffer

__all__ = ["EmulatedKernels", "Stalled"]


class Stalled(Exception):
    """Queued work waits for a value that nobody has set yet; it stays queued and is tried again."""


class _Token:
    """What an emulated array over lent memory holds as its base."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory


class EmulatedKernels(Kernels):
    """Gathers, scatters and signals, queued like all other emulated work."""

    # The parts of EmulatedDevice that are used here.
    _lock: Any
    _random: Any
    _streams: dict[int, Any]
    _view: Any
    is_pinned: Any
    properties: Any
    stream_of: Any

    # -- rows --------------------------------------------------------------------------------

    def kernel_address(self, address: int, nbytes: int) -> int | None:
        reached = self.is_pinned(address) and self.is_pinned(address + max(nbytes, 1) - 1)
        return address if reached or self.properties().coherent else None

    def gather(self, out: Buffer, table: Rows, index: Buffer, mode: str, fill: int) -> None:
        rows, target, chosen, keep = _memory(table), self._view(out), self._view(index), _kept(table, index, out)
        length, nbytes = table.length, table.nbytes

        def work() -> None:
            _ = keep
            which, valid = _resolve(chosen.reshape(-1).view(index.dtype), length, mode)
            found = np.full((which.size, nbytes), fill, np.uint8)
            found[valid] = rows[which[valid]]
            target.reshape(-1).view(np.uint8)[:] = found.reshape(-1)

        out.stream._push(work)

    def scatter(self, table: Rows, index: Buffer, values: Buffer, mode: str, unique: bool) -> None:
        rows, source, chosen, keep = _memory(table), self._view(values), self._view(index), _kept(table, index, values)
        length, nbytes = table.length, table.nbytes

        def work() -> None:
            _ = keep
            which, valid = _resolve(chosen.reshape(-1).view(index.dtype), length, mode)
            new = source.reshape(-1).view(np.uint8).reshape(-1, nbytes)
            new = np.broadcast_to(new, (which.size, nbytes))
            order = np.flatnonzero(valid)
            for i in reversed(order) if unique else order:  # a promise that is broken is punished
                rows[which[i]] = new[i]

        values.stream._push(work)

    def snapshot(self, buffer: Buffer) -> Buffer:
        device: Any = self
        made = device.empty((buffer.nbytes,), np.uint8)
        source = self._view(buffer)

        def work() -> None:
            _ = buffer.owner
            made._view[:] = np.ascontiguousarray(source).reshape(-1).view(np.uint8)

        buffer.stream._push(work)
        found: Buffer = device.find(made, buffer.stream)
        return found._replace(dtype=buffer.dtype, shape=buffer.shape)

    # -- lent memory: as in CuPy's pool, what was freed on a stream is given out for that stream again -----------

    def lend(self, library: str, shape: tuple[int, ...], dtype: np.dtype[Any], stream: Any) -> Loan:
        from gdcomm.devices.emulated import EmulatedArray, _Allocation

        device: Any = self
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        with self._lock:
            size = 1 << max(nbytes - 1, 0).bit_length()
            free = self._arena(stream).get(size)
            memory = free.pop() if free else _Allocation(device, size)
        token: Any = _Token(memory)
        array = EmulatedArray(device, np.ndarray(shape, dtype, memory.memory.data), token)
        return Loan(device, array, token, memory, stream)

    def reclaim(self, memory: Any, home: Any) -> None:
        with self._lock:
            home._push(lambda: memory.memory.fill(0xDD))
            self._arena(home).setdefault(memory.memory.nbytes, []).append(memory)

    def _arena(self, stream: Any) -> dict[int, list[Any]]:
        arenas: dict[int, dict[int, list[Any]]] = self.__dict__.setdefault("_arenas", {})
        return arenas.setdefault(stream.ptr, {})

    # -- values ------------------------------------------------------------------------------

    def stream_wait_value(self, stream: Any, address: int, bits: int, value: int, equal: bool) -> None:
        word = _word(address, bits)

        def work() -> None:
            ahead = (word.value - value) % (1 << bits)
            if ahead if equal else ahead >> (bits - 1):
                raise Stalled

        self.stream_of(stream)._push(work)

    def stream_write_value(self, stream: Any, address: int, bits: int, value: int) -> None:
        word = _word(address, bits)

        def work() -> None:
            word.value = value

        self.stream_of(stream)._push(work)

    def poll(self) -> None:
        if self._random.random() < 0.3:
            self.nudge()

    def nudge(self) -> bool:
        """Run one piece of queued work that can run, of a random stream; tell whether there was one."""
        with self._lock:
            streams = [stream for stream in self._streams.values() if stream._queue]
            self._random.shuffle(streams)
            for stream in streams:
                before = stream._done
                try:
                    stream._advance(stream._done + 1)
                except Stalled:
                    pass
                if stream._done > before:
                    return True
        return False

    # -- streams -----------------------------------------------------------------------------

    def handle(self, stream: Any) -> Any:
        return self.stream_of(stream)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self.stream_of(stream)
        return context

    def borrow_stream(self) -> Any:
        device: Any = self
        with self._lock:
            spare = self.__dict__.setdefault("_spare_streams", [])
            return spare.pop() if spare else device.Stream()

    def return_stream(self, stream: Any) -> None:
        with self._lock:
            self.__dict__.setdefault("_spare_streams", []).append(stream)

    def free_bytes(self) -> int:
        return 1 << 40


def _memory(table: Rows) -> np.ndarray[Any, Any]:
    """The bytes of a table's rows, read and written when queued work runs."""
    if not table.length:
        return np.empty((0, table.nbytes), np.uint8)
    span = (table.length - 1) * table.stride
    block: Any = (ctypes.c_ubyte * (abs(span) + table.nbytes)).from_address(table.address + min(span, 0))
    return np.ndarray((table.length, table.nbytes), np.uint8, block, -min(span, 0), (table.stride, 1))


def _kept(table: Rows, *buffers: Buffer) -> list[Any]:
    """Owners of device memory, which the queue keeps as a stream-ordered pool would; of host memory it does not."""
    owners = [table.owner, *(buffer.owner for buffer in buffers)]
    return [owner for owner in owners if not isinstance(owner, np.ndarray)]


def _resolve(index: np.ndarray[Any, Any], count: int, mode: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Rows that the indices mean, and which of them exist."""
    which = index.astype(np.int64)
    if mode == "clip":
        which = np.clip(which, 0, count - 1)
    elif mode == "wrap":
        which = which % count if count else which
    else:
        which = np.where(which < 0, which + count, which)
    return which, (which >= 0) & (which < count)


def _word(address: int, bits: int) -> Any:
    return (ctypes.c_uint32 if bits == 32 else ctypes.c_uint64).from_address(address)
