"""The mpi side: device memory handed to a CUDA-aware MPI. Only where `capabilities` says it can.

MPI knows nothing of streams, so the stream is drained before MPI looks, and what MPI
wrote is in place when it returns.
"""

from __future__ import annotations

from typing import Any

from gdcomm.devices.base import Buffer
from gdcomm.transports.host import memory_spec

__all__ = ["DirectSide"]


class DirectSide:
    """A C-contiguous device array given to MPI by address; see `base.Side`."""

    __slots__ = ("_buffer", "_inner", "holds", "spec")

    finishes = False

    def __init__(self, buffer: Buffer, rest: tuple[Any, ...], reads: bool, writes: bool) -> None:
        self._buffer = buffer
        self.spec, self._inner = memory_spec(buffer.ptr, buffer.nbytes, buffer.dtype, rest, reads, writes)
        self.holds = self._inner is not None

    def begin(self) -> None:
        pass

    def ready(self) -> None:
        self._buffer.device.synchronize(self._buffer.stream)

    def end(self, nbytes: int | None) -> None:
        pass

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()
