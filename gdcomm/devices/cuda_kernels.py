"""Gathers, scatters, waits for values and lent memory of CUDA devices."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import sys
import threading
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np
from cupy.cuda import runtime

from gdcomm.devices.cuda_memory import attributes
from gdcomm.devices.kernels import Kernels, Loan, Rows
from gdcomm.errors import DeviceError

if TYPE_CHECKING:
    from gdcomm.devices.base import Buffer

__all__ = ["CudaKernels"]

_HOST = 1  # cudaMemoryType
_D2D = runtime.memcpyDeviceToDevice
_MODES = {"fill": 0, "clip": 1, "wrap": 2}
_THREADS = 256
_BLOCKS = 132 * 16  # enough bytes in flight for any link; a thread walks on with this stride
_GEQ, _EQ = 0, 1  # CUstreamWaitValue_flags
_CAN_64_BIT = 122  # CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS

# WORD is the widest type that divides address, stride and length of all rows. Neighbouring threads move
# neighbouring words, also across rows, so that accesses coalesce whatever the row's length is.
_ROWS = r"""
__device__ long long resolve(const void* index, int wide, long long i, long long rows, int mode) {
    long long row = wide ? ((const long long*)index)[i] : ((const int*)index)[i];
    if (rows == 0) return -1;
    if (mode == 1) return row < 0 ? 0 : row >= rows ? rows - 1 : row;
    if (mode == 2) { row %= rows; return row < 0 ? row + rows : row; }
    if (row < 0) row += rows;
    return row < 0 || row >= rows ? -1 : row;
}
#define EACH(i, n) \
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < (n); \
         i += (long long)gridDim.x * blockDim.x)

extern "C" __global__ void gather(WORD* out, const char* table, long long rows, long long stride, const void* index,
                                  int wide, long long count, long long words, int mode, int fill) {
    WORD filling;
    for (int b = 0; b < sizeof(WORD); ++b) ((char*)&filling)[b] = fill;
    EACH(i, count * words) {
        long long row = resolve(index, wide, i / words, rows, mode);
        out[i] = row < 0 ? filling : ((const WORD*)(table + row * stride))[i % words];
    }
}

// The last position at which a row is asked for.
extern "C" __global__ void last(long long* winner, long long rows, const void* index, int wide, long long count,
                                int mode) {
    EACH(i, count) {
        long long row = resolve(index, wide, i, rows, mode);
        if (row >= 0) atomicMax(winner + row, i);
    }
}

extern "C" __global__ void scatter(char* table, long long rows, long long stride, const void* index, int wide,
                                   long long count, long long words, int mode, const WORD* values, int one,
                                   const long long* winner) {
    EACH(i, count * words) {
        long long position = i / words, row = resolve(index, wide, position, rows, mode);
        if (row < 0 || (winner && winner[row] != position)) continue;
        ((WORD*)(table + row * stride))[i % words] = values[one ? i % words : i];
    }
}
"""
_WORDS = {16: "uint4", 8: "uint2", 4: "unsigned int", 2: "unsigned short", 1: "unsigned char"}


class _Token:
    """Dies with the last array over lent memory."""


class CudaKernels(Kernels):
    """Gathers, scatters and signals on the current GPU. Streams are CUDA stream handles."""

    find: Any
    properties: Any

    # -- rows --------------------------------------------------------------------------------

    def kernel_address(self, address: int, nbytes: int) -> int | None:
        first = attributes(address)
        if first.type != _HOST or not first.devicePointer:
            return address if self.properties().coherent else None
        last = attributes(address + max(nbytes, 1) - 1)
        reached = last.type == _HOST and last.devicePointer - first.devicePointer == max(nbytes, 1) - 1
        return int(first.devicePointer) if reached else None

    def gather(self, out: Buffer, table: Rows, index: Buffer, mode: str, fill: int) -> None:
        count = index.nbytes // index.dtype.itemsize
        width = _width(out.ptr, table.address, table.nbytes, table.stride)
        words = table.nbytes // width
        arguments = (
            np.uint64(out.ptr), np.uint64(table.address), np.int64(table.length), np.int64(table.stride),
            np.uint64(index.ptr), np.int32(index.dtype.itemsize == 8), np.int64(count), np.int64(words),
            np.int32(_MODES[mode]), np.int32(fill),
        )  # fmt: skip
        _launch("gather", width, count * words, arguments, out.stream)

    def scatter(self, table: Rows, index: Buffer, values: Buffer, mode: str, unique: bool) -> None:
        count = index.nbytes // index.dtype.itemsize
        width = _width(values.ptr, table.address, table.nbytes, table.stride)
        words = table.nbytes // width
        wide, one = np.int32(index.dtype.itemsize == 8), np.int32(values.nbytes == table.nbytes)
        rows, n, how = np.int64(table.length), np.int64(count), np.int32(_MODES[mode])
        index_ptr, stream = np.uint64(index.ptr), values.stream
        with self.on(stream):
            winner, winner_ptr = None, 0
            if not unique and table.length:
                winner = cupy.empty(table.length, np.int64)
                winner_ptr = winner.data.ptr
                runtime.memsetAsync(winner_ptr, 0xFF, winner.nbytes, stream)
                _launch("last", 1, count, (np.uint64(winner_ptr), rows, index_ptr, wide, n, how), stream)
            arguments = (
                np.uint64(table.address), rows, np.int64(table.stride), index_ptr, wide, n, np.int64(words), how,
                np.uint64(values.ptr), one, np.uint64(winner_ptr),
            )  # fmt: skip
            _launch("scatter", width, count * words, arguments, stream)

    def snapshot(self, buffer: Buffer) -> Buffer:
        device: Any = self
        with self.on(buffer.stream):
            if buffer.contiguous:
                made = cupy.empty(buffer.nbytes, np.uint8)
                if buffer.nbytes:
                    runtime.memcpyAsync(made.data.ptr, buffer.ptr, buffer.nbytes, _D2D, buffer.stream)
            else:
                made = device._pieces(buffer, 0, buffer.nbytes, None)
        return buffer._replace(ptr=made.data.ptr, strides=None, readonly=False, owner=made)

    # -- lent memory -------------------------------------------------------------------------

    def lend(self, library: str, shape: tuple[int, ...], dtype: np.dtype[Any], stream: Any) -> Loan:
        device: Any = self
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        token = _Token()
        memory = device.allocate(max(nbytes, 1), stream)
        lent = cupy.cuda.UnownedMemory(memory.ptr, max(nbytes, 1), token, cupy.cuda.get_device_id())
        pointer = cupy.cuda.MemoryPointer(lent, 0)
        if library == "torch":
            # By the CUDA Array Interface: DLPack would order two streams that have nothing to do with each other.
            array = _as_torch(cupy.ndarray((nbytes,), np.uint8, pointer), shape, dtype)
        else:
            array = cupy.ndarray(shape, dtype, pointer)
        return Loan(self, array, token, memory, stream)

    # -- values ------------------------------------------------------------------------------

    def stream_wait_value(self, stream: Any, address: int, bits: int, value: int, equal: bool) -> None:
        _memory_operation(f"cuStreamWaitValue{bits}", bits, self.handle(stream), address, value, _EQ if equal else _GEQ)

    def stream_write_value(self, stream: Any, address: int, bits: int, value: int) -> None:
        _memory_operation(f"cuStreamWriteValue{bits}", bits, self.handle(stream), address, value, 0)

    # -- streams -----------------------------------------------------------------------------

    def handle(self, stream: Any) -> int:
        from gdcomm.devices.cuda import _handle

        return int(cupy.cuda.get_current_stream().ptr) if stream is None else _handle(stream)

    def current_stream(self) -> Any:
        return cupy.cuda.get_current_stream()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        from gdcomm.devices.cuda import _on

        torch: Any = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return _on(stream)  # type: ignore[no-any-return]
        stack = contextlib.ExitStack()
        stack.enter_context(_on(stream))
        stack.enter_context(torch.cuda.stream(torch.cuda.ExternalStream(stream)))
        return stack

    def borrow_stream(self) -> int:
        spare = _spare_streams.setdefault(cupy.cuda.get_device_id(), [])
        try:
            return int(spare.pop())
        except IndexError:
            # Never destroyed: memory pools know streams by their handles.
            return int(runtime.streamCreateWithPriority(_NON_BLOCKING, _FIRST))

    def return_stream(self, stream: Any) -> None:
        _spare_streams.setdefault(cupy.cuda.get_device_id(), []).append(stream)

    def wait_event(self, stream: Any, event: Any) -> None:
        runtime.streamWaitEvent(stream, event.ptr, 0)

    def free_bytes(self) -> int:
        return int(runtime.memGetInfo()[0]) + int(cupy.get_default_memory_pool().free_bytes())


_spare_streams: dict[int, list[int]] = {}  # by GPU
_NON_BLOCKING = 1
_FIRST = -100  # CUDA takes the highest priority that there is: reductions must not wait for all of a program's kernels


@functools.cache
def _kernel(name: str, width: int) -> Any:
    return cupy.RawKernel(_ROWS.replace("WORD", _WORDS[width]), name)


def _launch(name: str, width: int, work: int, arguments: tuple[Any, ...], stream: int) -> None:
    if work:
        blocks = min(-(-work // _THREADS), _BLOCKS)
        _kernel(name, width)((blocks,), (_THREADS,), arguments, stream=SimpleNamespace(ptr=stream))


def _width(*numbers: int) -> int:
    """The widest word that all addresses and lengths are multiples of."""
    together = functools.reduce(int.__or__, numbers, 16)
    return together & -together


def _as_torch(flat: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise ImportError("this PyTorch can't use a GPU")
    kind, where = getattr(torch, dtype.name), torch.device("cuda", cupy.cuda.get_device_id())
    if not flat.nbytes:
        return torch.empty(shape, dtype=kind, device=where)
    return torch.as_tensor(flat, device=where).view(kind).view(shape)


_bound = threading.local()


@functools.cache
def _libcuda() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceError(f"the CUDA driver's libcuda.so.1 can't be loaded: {error}") from error


@functools.cache
def _operation(name: str, bits: int, gpu: int) -> Any:
    """The driver's function, if this GPU can do it."""
    library = _libcuda()
    # Version 2 needs no switch of the driver; it came with CUDA 11.7.
    function = getattr(library, f"{name}_v2", None)
    if function is None:
        raise DeviceError(
            f"this CUDA driver has no {name}_v2 (stream memory operations), which signals between host and streams "
            "need: update the driver to one for CUDA 11.7 or later, or wait by events"
        )
    if bits == 64:
        able = ctypes.c_int()
        status = library.cuDeviceGetAttribute(ctypes.byref(able), _CAN_64_BIT, gpu)
        if status or not able.value:
            raise DeviceError(f"GPU {gpu} has no 64-bit stream memory operations; use Signal(bits=32)")
    word = ctypes.c_uint32 if bits == 32 else ctypes.c_uint64
    function.argtypes = (ctypes.c_void_p, ctypes.c_uint64, word, ctypes.c_uint)
    function.restype = ctypes.c_int
    return function


def _memory_operation(name: str, bits: int, stream: int, address: int, value: int, flags: int) -> None:
    gpu = cupy.cuda.get_device_id()
    if getattr(_bound, "gpu", None) != gpu:
        runtime.free(0)  # makes the GPU's context current in this thread; the driver's own calls do not
        _bound.gpu = gpu
    status = _operation(name, bits, gpu)(stream or None, address, value, flags)
    if status:
        text = ctypes.c_char_p()
        _libcuda().cuGetErrorString(status, ctypes.byref(text))
        raise DeviceError(f"{name} failed: {(text.value or b'').decode()} (CUDA error {status})")
