"""The CUDA device, through CuPy: the only file that imports it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from gdcomm.devices.base import Buffer, Device, Event
from gdcomm.devices.cuda_copies import CudaCopies
from gdcomm.devices.cuda_kernels import CudaKernels
from gdcomm.devices.cuda_memory import CudaHostMemory, attributes, is_contiguous
from gdcomm.devices.cuda_reductions import CudaReductions
from gdcomm.devices.memory import address_of
from gdcomm.errors import BufferSpecError, DeviceError

__all__ = ["CudaDevice"]

_Array = np.ndarray[Any, Any]
_DEVICE, _MANAGED = 2, 3  # cudaMemoryType
_H2D, _D2H = runtime.memcpyHostToDevice, runtime.memcpyDeviceToHost
_current_gpu = cupy.cuda.get_device_id
_current_stream = cupy.cuda.get_current_stream
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


class CudaDevice(CudaHostMemory, CudaCopies, CudaKernels, CudaReductions, Device):
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
        return self.finder(type(obj))(obj, stream)

    def finder(self, kind: type) -> Callable[[Any, Any], Buffer | None]:
        """What `find` does with objects of this type."""
        if issubclass(kind, cupy.ndarray):
            return self._cupy
        library = kind.__module__.partition(".")[0]
        if library == "torch":
            return self._torch
        if library in ("jaxlib", "jax"):
            return self._jax
        return self._interface

    def _cupy(self, array: Any, stream: Any, owner: Any = None, readonly: bool = False) -> Buffer:
        nbytes, memory = array.nbytes, array.data
        if nbytes and memory.device_id != _current_gpu():
            _wrong_device(memory.device_id)
        handle = _current_stream().ptr if stream is None else _handle(stream)
        strides = None if is_contiguous(array) else array.strides
        owner = array if owner is None else owner
        return Buffer(memory.ptr, nbytes, array.dtype, array.shape, strides, readonly, self, handle, owner)

    def _torch(self, tensor: Any, stream: Any) -> Buffer | None:
        if not getattr(tensor, "is_cuda", False):
            return None
        if tensor.requires_grad:
            raise BufferSpecError("the tensor requires grad: communication is not recorded; give tensor.detach()")
        if tensor.is_conj() or tensor.is_neg():
            raise BufferSpecError(
                "the tensor is a lazy conjugate or negative: its memory holds other values; "
                "give tensor.resolve_conj().resolve_neg()"
            )
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

    def _interface(self, obj: Any, stream: Any) -> Buffer | None:
        try:
            interface = obj.__cuda_array_interface__
        except AttributeError:
            return self._dlpack(obj, stream)
        library = type(obj).__module__.partition(".")[0]
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
        return attributes(address).type in (_DEVICE, _MANAGED)

    # -- copies ------------------------------------------------------------------------------

    def to_host(self, dst: _Array, src: Buffer, offset: int = 0) -> None:
        address, handle = address_of(dst), src.stream
        if src.contiguous:
            runtime.memcpyAsync(address, src.ptr + offset, dst.nbytes, _D2H, handle)
            return
        with _on(handle):
            packed = self._pieces(src, offset, dst.nbytes, None)
            runtime.memcpyAsync(address, packed.data.ptr, dst.nbytes, _D2H, handle)

    def to_device(self, dst: Buffer, src: _Array, offset: int = 0) -> None:
        address, handle = address_of(src), dst.stream
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

    # -- new arrays --------------------------------------------------------------------------

    def allocate(self, nbytes: int, stream: Any) -> Any:
        if stream == _current_stream().ptr:
            return cupy.cuda.alloc(nbytes)
        with self.on(stream):
            return cupy.cuda.alloc(nbytes)

    def build(
        self, library: str, shape: tuple[int, ...], dtype: np.dtype, order: str, fill: Callable[[Buffer], None]
    ) -> Any:
        if library == "jax":
            return self._build_jax(shape, dtype, fill)
        if library == "torch":
            made = _torch_empty(shape, dtype, order)
        elif library == "numba":
            made = importlib.import_module("numba.cuda").device_array(shape, dtype, order=order)
        else:
            made = cupy.ndarray(shape, dtype, order=order)
        buffer = self.find(made)
        if buffer is not None and buffer.nbytes:
            fill(buffer)
        return made

    def _build_jax(self, shape: tuple[int, ...], dtype: np.dtype, fill: Callable[[Buffer], None]) -> Any:
        # JAX arrays can't be written, so the memory is CuPy's and JAX takes it over, through DLPack. What CuPy
        # and DLPack can't name (bfloat16 and smaller floats) goes as integers of the same size.
        jax = importlib.import_module("jax")
        if 0 in shape:
            return jax.numpy.zeros(shape, dtype)
        known = dtype.isbuiltin == 1
        made = cupy.ndarray(shape, dtype if known else np.dtype(f"u{dtype.itemsize}"))
        fill(self._cupy(made, None, made))
        cupy.cuda.get_current_stream().synchronize()  # JAX orders by its own streams, which it does not show
        array = importlib.import_module("jax.dlpack").from_dlpack(made)
        return array if known else array.view(dtype)

    # -- streams -----------------------------------------------------------------------------

    def record(self, stream: Any) -> Event:
        return _CudaEvent(stream)

    def _wait(self, stream: int, event: Any) -> None:
        runtime.streamWaitEvent(stream, event.ptr, 0)

    def idle(self, stream: Any) -> bool:
        return not runtime.streamQuery(stream)

    def synchronize(self, stream: Any) -> None:
        runtime.streamSynchronize(stream)

    def here(self) -> AbstractContextManager[Any]:
        return cupy.cuda.Device()  # type: ignore[no-any-return]


_events: dict[int, list[Any]] = {}  # by GPU: made once, used again


class _CudaEvent:
    __slots__ = ("_free", "event", "ptr")

    def __init__(self, stream: int) -> None:
        self._free = _events.setdefault(_current_gpu(), [])
        try:
            self.event = self._free.pop()
        except IndexError:
            self.event = cupy.cuda.Event(disable_timing=True)
        self.ptr: int = self.event.ptr
        runtime.eventRecord(self.ptr, stream)

    def __del__(self) -> None:
        if hasattr(self, "ptr"):
            self._free.append(self.event)  # recording it again does not disturb who waited before

    def query(self) -> bool:
        return bool(self.event.done)

    def synchronize(self) -> None:
        runtime.eventSynchronize(self.ptr)


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


def _torch_empty(shape: tuple[int, ...], dtype: np.dtype, order: str) -> Any:
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise ImportError("this PyTorch can't use a GPU")
    axes = tuple(range(len(shape)))
    made = torch.empty(
        shape if order == "C" else shape[::-1],
        dtype=getattr(torch, dtype.name),
        device=torch.device("cuda", cupy.cuda.get_device_id()),
    )
    return made if order == "C" else made.permute(axes[::-1])


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
