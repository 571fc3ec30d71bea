"""The CUDA device, through CuPy: the only file that imports it."""

from __future__ import annotations

import ctypes
import sys
import weakref
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from gdcomm.devices.base import Buffer, Device, Event
from gdcomm.errors import BufferSpecError, DeviceError

__all__ = ["CudaDevice"]

_Array = np.ndarray[Any, Any]
_DEVICE, _MANAGED = 2, 3  # cudaMemoryType
_H2D, _D2H = runtime.memcpyHostToDevice, runtime.memcpyDeviceToHost
_LIBRARIES = ("cupy", "torch", "numba", "jaxlib", "jax")
_TORCH_ONLY = {"torch.bfloat16": "bfloat16"}  # no CUDA Array Interface type string

# Elements first..first+n of a strided array, in logical order, to or from a packed one.
_STRIDED = r"""
extern "C" __global__ void strided(char* array, char* packed, const long long* layout, int ndim,
                                   long long first, long long count, int itemsize, int unpack) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= count) return;
    long long rest = first + i, offset = 0;
    for (int d = ndim - 1; d >= 0; --d) {
        long long extent = layout[d];
        offset += (rest % extent) * layout[ndim + d];
        rest /= extent;
    }
    char* a = array + offset;
    char* p = packed + i * itemsize;
    if (unpack) for (int b = 0; b < itemsize; ++b) a[b] = p[b];
    else for (int b = 0; b < itemsize; ++b) p[b] = a[b];
}
"""


class CudaDevice(Device):
    """Memory of the GPUs that CuPy sees. Streams are CUDA stream handles (integers).

    Raises:
        ImportError: no GPU answers (so that the caller treats it as a missing CuPy).
    """

    kind = "cuda"

    def __init__(self) -> None:
        try:
            count = runtime.getDeviceCount()
        except runtime.CUDARuntimeError as error:
            raise ImportError(f"CuPy finds no usable GPU: {error}") from error
        if not count:
            raise ImportError("CuPy finds no GPU")
        self._strided = cupy.RawKernel(_STRIDED, "strided")

    # -- recognition -------------------------------------------------------------------------

    def find(self, obj: Any, stream: Any = None) -> Buffer | None:
        if isinstance(obj, cupy.ndarray):
            return self._cupy(obj, stream, obj)
        library = type(obj).__module__.partition(".")[0]
        if library == "torch":
            return self._torch(obj, stream)
        if library in ("jaxlib", "jax"):
            return self._jax(obj, stream)
        try:
            interface = obj.__cuda_array_interface__
        except AttributeError:
            return self._dlpack(obj, stream)
        return self._interface(obj, interface, library, stream)

    def _cupy(self, array: Any, stream: Any, owner: Any, readonly: bool = False) -> Buffer:
        if array.nbytes and array.data.device_id != cupy.cuda.get_device_id():
            _wrong_device(array.data.device_id)
        handle = cupy.cuda.get_current_stream().ptr if stream is None else _handle(stream)
        strides = None if array.flags.c_contiguous else array.strides
        return Buffer(
            array.data.ptr, array.nbytes, array.dtype, array.shape, strides, readonly, self, handle, owner
        )

    def _torch(self, tensor: Any, stream: Any) -> Buffer | None:
        if not getattr(tensor, "is_cuda", False):
            return None
        if tensor.requires_grad:
            raise BufferSpecError("the tensor requires grad: communication is not recorded; give tensor.detach()")
        if tensor.device.index != cupy.cuda.get_device_id():
            _wrong_device(tensor.device.index)
        name = str(tensor.dtype)
        if name in _TORCH_ONLY:
            import ml_dtypes

            dtype = np.dtype(getattr(ml_dtypes, _TORCH_ONLY[name]))
        else:
            dtype = np.dtype(name.removeprefix("torch."))
        shape = tuple(tensor.shape)
        strides = None if tensor.is_contiguous() else tuple(s * dtype.itemsize for s in tensor.stride())
        if stream is None:
            handle = sys.modules["torch"].cuda.current_stream(tensor.device).cuda_stream
        else:
            handle = _handle(stream)
        return Buffer(
            tensor.data_ptr(), tensor.numel() * dtype.itemsize, dtype, shape, strides, False, self, handle, tensor
        )

    def _jax(self, array: Any, stream: Any) -> Buffer | None:
        if all(device.platform == "cpu" for device in array.devices()):
            return None
        array.block_until_ready()  # JAX orders by its own streams, which it does not show
        return self._cupy(cupy.from_dlpack(array), stream, array, readonly=True)

    def _dlpack(self, obj: Any, stream: Any) -> Buffer | None:
        if not hasattr(obj, "__dlpack_device__") or obj.__dlpack_device__()[0] not in (2, 13):
            return None
        return self._cupy(cupy.from_dlpack(obj), stream, obj)

    def _interface(self, obj: Any, interface: Any, library: str, stream: Any) -> Buffer | None:
        try:
            address, readonly = interface["data"]
            dtype = np.dtype(interface["typestr"])
            shape = tuple(int(extent) for extent in interface["shape"])
            address = int(address or 0)
        except (TypeError, ValueError, KeyError):
            return None  # a broken interface: mpi4py says what is wrong with it
        own = getattr(obj, "dtype", None)
        if isinstance(own, np.dtype) and own.itemsize == dtype.itemsize:
            dtype = own
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if not (self.owns(address) if nbytes else library in _LIBRARIES):
            return None
        if interface.get("mask") is not None:
            raise BufferSpecError(f"{type(obj).__name__} has a mask, which MPI can't send; give a plain array")
        strides = interface.get("strides")
        if strides is not None and (not nbytes or _c_order(shape, strides, dtype.itemsize)):
            strides = None
        produced_on = interface.get("stream")
        handle = _handle(stream) if stream is not None else int(produced_on or 0)
        if produced_on is not None and int(produced_on) != handle:
            self._wait(handle, self.record(int(produced_on)))
        return Buffer(address, nbytes, dtype, shape, strides, bool(readonly), self, handle, obj)

    def owns(self, address: int) -> bool:
        if not address:
            return False
        attributes = runtime.pointerGetAttributes(address)
        return attributes.type in (_DEVICE, _MANAGED)

    # -- copies ------------------------------------------------------------------------------

    def to_host(self, dst: _Array, src: Buffer, offset: int = 0) -> None:
        address, handle = dst.ctypes.data, src.stream
        if src.contiguous:
            runtime.memcpyAsync(address, src.ptr + offset, dst.nbytes, _D2H, handle)
            return
        with _on(handle):
            packed = self._pieces(src, offset, dst.nbytes, None)
            runtime.memcpyAsync(address, packed.data.ptr, dst.nbytes, _D2H, handle)

    def to_device(self, dst: Buffer, src: _Array, offset: int = 0) -> None:
        address, handle = src.ctypes.data, dst.stream
        if dst.contiguous:
            runtime.memcpyAsync(dst.ptr + offset, address, src.nbytes, _H2D, handle)
            return
        with _on(handle):
            packed = cupy.empty(src.nbytes, cupy.uint8)
            runtime.memcpyAsync(packed.data.ptr, address, src.nbytes, _H2D, handle)
            self._pieces(dst, offset, src.nbytes, packed)

    def _pieces(self, buffer: Buffer, offset: int, nbytes: int, packed: Any) -> Any:
        """Pack content bytes into new memory (`packed` None), or unpack `packed` into the content."""
        itemsize, ndim = buffer.dtype.itemsize, len(buffer.shape)
        unpack = packed is not None
        if packed is None:
            packed = cupy.empty(nbytes, cupy.uint8)
        count = nbytes // itemsize
        layout = cupy.asarray(np.array([*buffer.shape, *(buffer.strides or ())], np.int64))
        arguments = (
            np.uint64(buffer.ptr), packed, layout, np.int32(ndim), np.int64(offset // itemsize),
            np.int64(count), np.int32(itemsize), np.int32(unpack),
        )  # fmt: skip
        if count:
            self._strided((-(-count // 256),), (256,), arguments)
        return packed

    def pack(self, src: Buffer) -> Buffer:
        with _on(src.stream):
            packed = self._pieces(src, 0, src.nbytes, None)
        return Buffer(
            packed.data.ptr, src.nbytes, src.dtype, src.shape, None, False, self, src.stream, packed
        )

    def unpack(self, dst: Buffer, packed: Buffer) -> None:
        memory = cupy.cuda.UnownedMemory(packed.ptr, packed.nbytes, packed.owner)
        array = cupy.ndarray(packed.nbytes, cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))
        with _on(dst.stream):
            self._pieces(dst, 0, dst.nbytes, array)

    # -- streams -----------------------------------------------------------------------------

    def record(self, stream: Any) -> Event:
        return _CudaEvent(stream)

    def _wait(self, stream: int, event: Any) -> None:
        runtime.streamWaitEvent(stream, event.event.ptr, 0)

    def synchronize(self, stream: Any) -> None:
        runtime.streamSynchronize(stream)

    def pinned(self, nbytes: int) -> _Array:
        if not nbytes:
            return np.empty(0, np.uint8)
        pointer = runtime.hostAlloc(nbytes, 0)  # not CuPy's pool: it rounds up to powers of two
        block: Any = (ctypes.c_ubyte * nbytes).from_address(pointer)
        weakref.finalize(block, runtime.freeHost, pointer).atexit = False  # the driver frees it at exit
        return np.frombuffer(block, np.uint8)


class _CudaEvent:
    __slots__ = ("event",)

    def __init__(self, stream: int) -> None:
        self.event = cupy.cuda.Event(disable_timing=True)
        runtime.eventRecord(self.event.ptr, stream)

    def query(self) -> bool:
        return bool(self.event.done)

    def synchronize(self) -> None:
        runtime.eventSynchronize(self.event.ptr)


class _Handle:
    """A CUDA stream handle, as CuPy takes one."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._handle)


def _on(handle: int) -> Any:
    """CuPy's stream object of a handle, to make it current: temporaries then belong to that stream."""
    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(_Handle(handle))
    return cupy.cuda.ExternalStream(handle)  # CuPy 13


def _handle(stream: Any) -> int:
    """The CUDA handle of whatever means a stream."""
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    for name in ("ptr", "cuda_stream"):
        if hasattr(stream, name):
            return int(getattr(stream, name))
    handle = getattr(stream, "handle", stream)  # Numba's
    handle = getattr(handle, "value", handle)
    if isinstance(handle, int):
        return handle
    raise BufferSpecError(
        f"stream: {stream!r} is no CUDA stream; give an object with __cuda_stream__, .ptr or .cuda_stream"
    )


def _wrong_device(index: int) -> None:
    current = cupy.cuda.get_device_id()
    raise DeviceError(
        f"the array is on GPU {index}, this rank's current device is GPU {current}; "
        f"select it first (cupy.cuda.Device({index}).use()) or give an array of GPU {current}"
    )


def _c_order(shape: tuple[int, ...], strides: Any, itemsize: int) -> bool:
    expected = itemsize
    for extent, step in zip(reversed(shape), reversed(tuple(strides)), strict=True):
        if extent > 1 and step != expected:
            return False
        expected *= extent
    return True
