"""Element-wise reductions of the emulated device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gdcomm.devices.reductions import BOOL, HALVES, Reductions, element, require_reducible
from gdcomm.errors import BufferSpecError

if TYPE_CHECKING:
    from gdcomm.devices.base import Buffer

__all__ = ["EmulatedReductions"]

_Array = np.ndarray[Any, Any]
_UFUNCS: dict[str, np.ufunc] = {
    "SUM": np.add,
    "PROD": np.multiply,
    "MAX": np.maximum,
    "MIN": np.minimum,
    "LAND": np.logical_and,
    "LOR": np.logical_or,
    "LXOR": np.logical_xor,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}


class EmulatedReductions(Reductions):
    """NumPy's operators, run as late as all other emulated work."""

    # The parts of EmulatedDevice that are used here.
    _lock: Any
    _memory: Any
    _view: Any
    emulated_properties: Any
    is_pinned: Any
    stats: dict[str, int]

    def reduce(self, op: str, out: Buffer, lower: Buffer, higher: Buffer) -> None:
        require_reducible(op, out, lower, higher)
        if not out.nbytes:
            return
        buffers = (out, lower, higher)
        with self._lock:
            ours = [self._memory.at(buffer.ptr) is not None for buffer in buffers]
            host = [(buffer.ptr, buffer.nbytes) for buffer, our in zip(buffers, ours, strict=True) if not our]
            self._require_reached(host)
            target, first, second = (self._view(buffer).reshape(-1).view(out.dtype) for buffer in buffers)
            # The queue keeps device memory as a stream-ordered pool would; memory of the host it does not.
            keep = [buffer.owner for buffer, our in zip(buffers, ours, strict=True) if our]

            def work() -> None:
                _ = keep
                self._require_reached(host)
                target[...] = _combine(op, first, second)

            self.stats["reduce"] = self.stats.get("reduce", 0) + 1
            out.stream._push(work)

    def _require_reached(self, host: list[tuple[int, int]]) -> None:
        for address, nbytes in host:
            locked = self.is_pinned(address) and self.is_pinned(address + nbytes - 1)
            if not locked and not self.emulated_properties.coherent:
                raise BufferSpecError(
                    f"a kernel can't reach the {nbytes} bytes at {address:#x}: pageable memory, or freed"
                )


def _combine(op: str, first: _Array, second: _Array) -> _Array:
    name, dtype = element(first.dtype), first.dtype
    if name == "bool":
        op, first, second = BOOL[op], first.view(np.uint8), second.view(np.uint8)
    elif name in HALVES:
        first, second = first.astype(np.float32), second.astype(np.float32)
    with np.errstate(all="ignore"):
        result: _Array = _UFUNCS[op](first, second).astype(dtype)
    return result
