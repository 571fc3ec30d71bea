"""What every GPU test begins with: CuPy and a GPU, or a skip that says what is missing."""

from __future__ import annotations

import pytest

__all__ = ["cupy", "slow"]

cupy = pytest.importorskip("cupy", reason="needs CuPy: pip install 'gdcomm[cuda13]'")

try:
    cupy.cuda.runtime.getDeviceCount()
except cupy.cuda.runtime.CUDARuntimeError:
    pytest.skip("needs a CUDA GPU that CuPy can use; see `gdcomm info`", allow_module_level=True)


def slow():
    """Keep the current stream busy for some milliseconds."""
    big = cupy.ones((3000, 3000), "f")
    for _ in range(8):
        big = big @ big * 1e-4
    return big
