"""Queued copies between addresses, in rows, on the device and in batches, through CUDA."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np
from cupy.cuda import runtime

from gdcomm.devices.copies import Copies
from gdcomm.devices.cuda_memory import attributes, is_contiguous
from gdcomm.devices.memory import address_of

if TYPE_CHECKING:
    from gdcomm.devices.base import Buffer

__all__ = ["CudaCopies"]

_H2D, _D2H = runtime.memcpyHostToDevice, runtime.memcpyDeviceToHost
_DEFAULT = 4  # cudaMemcpyDefault: the addresses tell which side is the host's
_PEER_ENABLED = 704  # cudaErrorPeerAccessAlreadyEnabled
_WORDS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}  # CuPy dtypes that move elements of a size
_THREADS = 256
_PASS = 16 * _THREADS  # bytes that a block moves at a time

# A block moves one piece, or its share of one: blocks of a column work on the same piece. Wide words where both
# addresses are equally far from a multiple of them, so that accesses to the host's memory fill whole packets.
_PIECES = r"""
typedef unsigned long long u64;
template <typename Word> __device__ void move(char* d, const char* s, u64 size, u64 first, u64 step) {
    u64 head = (0 - (u64)d) % sizeof(Word);
    if (head > size) head = size;
    u64 words = (size - head) / sizeof(Word), tail = head + words * sizeof(Word);
    for (u64 i = first; i < head; i += step) d[i] = s[i];
    for (u64 i = first; i < words; i += step) ((Word*)(d + head))[i] = ((const Word*)(s + head))[i];
    for (u64 i = tail + first; i < size; i += step) d[i] = s[i];
}
extern "C" __global__ void pieces(const u64* table, u64 count) {
    u64 first = blockIdx.y * blockDim.x + threadIdx.x, step = gridDim.y * blockDim.x;
    for (u64 p = blockIdx.x; p < count; p += gridDim.x) {
        char* d = (char*)table[p];
        const char* s = (const char*)table[count + p];
        u64 size = table[2 * count + p], apart = (u64)d ^ (u64)s;
        if (apart % 16 == 0) move<uint4>(d, s, size, first, step);
        else if (apart % 4 == 0) move<unsigned int>(d, s, size, first, step);
        else move<char>(d, s, size, first, step);
    }
}
"""


_pointer = operator.attrgetter("data.ptr")
_gpu_count = functools.cache(runtime.getDeviceCount)


class CudaCopies(Copies):
    """Copies on the current GPU. Streams are CUDA stream handles."""

    on: Any
    _pieces_kernel: Any = None

    def copy(self, dst: int, src: int, nbytes: int, stream: Any) -> None:
        runtime.memcpyAsync(dst, src, nbytes, _DEFAULT, stream)

    def copy_short(self, host: np.ndarray[Any, Any], array: Any, down: bool) -> bool:
        if type(array) is not cupy.ndarray or not is_contiguous(array):
            return False
        memory = array.data
        if array.dtype != host.dtype or array.shape != host.shape or memory.device_id != cupy.cuda.get_device_id():
            return False
        stream = cupy.cuda.get_current_stream().ptr
        if down:
            runtime.memcpyAsync(address_of(host), memory.ptr, host.nbytes, _D2H, stream)
        else:
            runtime.memcpyAsync(memory.ptr, address_of(host), host.nbytes, _H2D, stream)
        runtime.streamSynchronize(stream)
        return True

    def copy_rows(
        self, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, height: int, stream: Any
    ) -> None:
        runtime.memcpy2DAsync(dst, dst_pitch, src, src_pitch, width, height, _DEFAULT, stream)

    def copy_strided(self, dst: Buffer, src: Buffer) -> None:
        with self.on(dst.stream):
            _words(dst)[...] = _words(src)

    def copy_pieces(self, table: np.ndarray[Any, Any], largest: int, stream: Any) -> None:
        if self._pieces_kernel is None:
            self._pieces_kernel = cupy.RawKernel(_PIECES, "pieces", options=("-std=c++14",))
        count = table.shape[1]
        with self.on(stream):
            # On the device: thousands of blocks that read the host's memory for three numbers each are slow.
            near = cupy.empty(table.shape, np.uint64)
            runtime.memcpyAsync(near.data.ptr, table.ctypes.data, table.nbytes, _DEFAULT, stream)
            grid = min(count, 1 << 16), min(max(largest // _PASS, 1), 64)
            arguments = near, np.uint64(count)
            self._pieces_kernel(grid, (_THREADS,), arguments, stream=SimpleNamespace(ptr=stream))

    def addresses(self, arrays: Sequence[Any]) -> np.ndarray[Any, Any] | None:
        if set(map(type, arrays)) != {cupy.ndarray} or not all(map(is_contiguous, arrays)):
            return None
        if _gpu_count() > 1 and {a.data.device_id for a in arrays} != {cupy.cuda.get_device_id()}:
            return None
        return np.fromiter(map(_pointer, arrays), np.uint64, len(arrays))

    def elsewhere(self, obj: Any) -> AbstractContextManager[Any] | None:
        index = getattr(getattr(obj, "device", None), "index", None)  # PyTorch's
        if isinstance(obj, cupy.ndarray):
            index = obj.data.device_id
        elif index is None and hasattr(obj, "__cuda_array_interface__"):
            index = attributes(obj.__cuda_array_interface__["data"][0] or 0).device
        if index is None or index in (-1, cupy.cuda.get_device_id()):
            return None
        return cupy.cuda.Device(index)  # type: ignore[no-any-return]

    def connect(self, dst: Buffer, src: Buffer) -> None:
        ends = [attributes(side.ptr).device for side in (dst, src)]
        for near, far in (ends, ends[::-1]):
            with cupy.cuda.Device(near):
                if runtime.deviceCanAccessPeer(near, far):
                    try:
                        runtime.deviceEnablePeerAccess(far)
                    except runtime.CUDARuntimeError as error:
                        if error.status != _PEER_ENABLED:
                            raise


def _words(buffer: Buffer) -> Any:
    """A CuPy array over the elements, as plain words: CuPy does not know every dtype."""
    itemsize = buffer.dtype.itemsize
    shape, strides = buffer.shape, buffer.strides
    if strides is None:
        strides = tuple(itemsize * int(np.prod(shape[i + 1 :], dtype=np.int64)) for i in range(len(shape)))
    dtype = _WORDS.get(itemsize)
    if dtype is None or any(number % itemsize for number in (buffer.ptr, *strides)):
        dtype, shape, strides = "u1", (*shape, itemsize), (*strides, 1)
    spans = [(extent - 1) * step for extent, step in zip(shape, strides, strict=True)]
    low = sum(span for span in spans if span < 0)
    high = sum(span for span in spans if span > 0) + itemsize
    memory = cupy.cuda.UnownedMemory(buffer.ptr + low, high - low, buffer.owner, cupy.cuda.get_device_id())
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, -low), strides)
