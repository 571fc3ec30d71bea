"""A stream of data through the GPU: one pinned buffer is filled while the other one is copied and computed on.

Run it: python cupy_pinned.py (needs a GPU and CuPy).
"""

import cupy
import numpy as np

import gdcomm

CHUNKS, LENGTH = 8, 1 << 20


def read(chunk, out):
    """Stand for a file or an instrument that writes into memory it is given."""
    out[:] = np.arange(LENGTH) % 100 + chunk


def main():
    host = [gdcomm.pinned_empty(LENGTH, np.float32) for _ in range(2)]
    device = [cupy.empty(LENGTH, np.float32) for _ in range(2)]
    copies = [None, None]
    total = cupy.zeros(LENGTH, np.float32)
    for chunk in range(CHUNKS):
        i = chunk % 2
        if copies[i] is not None:
            copies[i].synchronize()  # the copy before the last one has read this buffer: it may be overwritten
        read(chunk, host[i])  # meanwhile the GPU works on the other buffer
        copies[i] = gdcomm.copy(device[i], host[i], block=False)  # returns at once
        total += cupy.sqrt(device[i])  # queued behind the copy, on the same stream
    result = gdcomm.to_host(total)  # a NumPy array, complete

    expected = sum(np.sqrt(np.arange(LENGTH) % 100 + chunk) for chunk in range(CHUNKS))
    assert isinstance(result, np.ndarray)
    np.testing.assert_allclose(result, expected, rtol=1e-4)


if __name__ == "__main__":
    main()
