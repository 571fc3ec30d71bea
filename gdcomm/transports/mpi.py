"""The mpi side: device memory handed to a CUDA-aware MPI. Only where `probe` says it can.

MPI knows nothing of streams, so the stream is drained before MPI looks, and what MPI
wrote is in place when it returns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from gdcomm.devices.base import Buffer
from gdcomm.transports.host import host_side

__all__ = ["DirectSide"]


class DirectSide:
    """A C-contiguous device array given to MPI by address; see `base.Side`."""

    def __init__(self, buffer: Buffer, rest: tuple[Any, ...], reads: bool, writes: bool) -> None:
        self._buffer = buffer
        # NumPy only carries address, length and dtype to mpi4py: nobody reads through it.
        memory: Any = MPI.buffer.fromaddress(buffer.ptr, buffer.nbytes)
        view = np.frombuffer(memory, buffer.dtype) if buffer.nbytes else np.empty(0, buffer.dtype)
        spec = [view, *rest] if rest else view
        self._inner = host_side(spec, reads, writes)  # dtypes that MPI lacks: another view, no copy
        self.spec: Any = spec if self._inner is None else self._inner.spec

    def begin(self) -> None:
        pass

    def ready(self) -> None:
        self._buffer.device.synchronize(self._buffer.stream)

    def end(self, nbytes: int | None) -> None:
        pass

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()
