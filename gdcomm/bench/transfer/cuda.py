"""What the sections measure with on a GPU. CuPy must be there: this is imported once a GPU was found."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from gdcomm import devices
from gdcomm.bench.transfer.data import SPOILT, Array
from gdcomm.bench.transfer.kits import LCG_FACTOR, LCG_TERM, Kit

__all__ = ["CudaKit"]


class CudaKit(Kit):
    """CuPy on the current GPU."""

    name = "cuda"

    def __init__(self, sizes: list[int], seconds: float) -> None:
        self.device = devices.cuda_device()
        self._copy = cupy.ElementwiseKernel("T x", "T y", "y = x", "gdcomm_bench_copy")
        self._spin = cupy.ElementwiseKernel(
            "uint32 x, int32 steps, uint32 keep",
            "uint32 y",
            f"unsigned v = x; for (int s = 0; s < steps; ++s) v = v * {LCG_FACTOR}u + {LCG_TERM}u; y = keep * y + v",
            "gdcomm_bench_spin",
        )
        super().__init__(sizes, seconds)

    def free(self) -> None:
        super().free()
        cupy.get_default_memory_pool().free_all_blocks()
        cupy.get_default_pinned_memory_pool().free_all_blocks()

    def mark(self, stream: Any) -> Any:
        event = cupy.cuda.Event()
        cupy.cuda.runtime.eventRecord(event.ptr, stream)
        return event

    def elapsed_us(self, start: Any, end: Any) -> float:
        return float(cupy.cuda.get_elapsed_time(start, end)) * 1e3

    def empty(self, shape: Any, dtype: Any = np.uint8) -> Any:
        return cupy.empty(shape, dtype)

    def array(self, host: Array) -> Any:
        made = cupy.asarray(host)
        self.finish()  # other streams use it too
        return made

    def address(self, array: Any) -> int:
        return int(array.data.ptr)

    def fill(self, array: Any, value: int = SPOILT) -> None:
        array.fill(value)

    def differ(self, a: Any, b: Any) -> int:
        if a.nbytes % 8 == 0:
            a, b = (side.reshape(-1).view(np.uint64) for side in (a, b))
        return int(cupy.count_nonzero(a != b))

    def kernel_copy(self, dst: Any, src: Any) -> None:
        # As wide words; CuPy's own copyto of equal arrays would be the copy engine's work.
        words = np.uint64 if dst.nbytes % 8 == 0 else np.uint8
        self._copy(src.view(words), dst.view(words))

    def pick(self, out: Any, table: Any, index: Any) -> None:
        cupy.take(table, index, axis=0, out=out)

    def spin(self, out: Any, values: Any, steps: int, keep: int) -> None:
        self._spin(values, np.int32(steps), np.uint32(keep), out)
