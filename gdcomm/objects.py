"""Python objects with device arrays in them, pickled for MPI.

The data of each device array is copied once, in order of its stream, to page-locked memory and stays out of
the pickle stream. What mpi4py is given is a `Packed`, whose own pickle restores the object where it arrives:
recv, irecv, a matched message and even a plain mpi4py communicator need to know nothing.
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
from typing import Any

import numpy as np
from mpi4py import MPI

from gdcomm import devices
from gdcomm.devices.base import Buffer
from gdcomm.errors import DeviceError, GdcommError
from gdcomm.memory.pinned import Lease, pool_of

__all__ = ["Packed", "pack", "queue"]

_PLAIN = frozenset((str, bytes, int, float, bool, type(None)))

# Exactly these classes: what a subclass adds is known to its own pickling only. The same holds for classes that
# merely show a CUDA Array Interface; the arrays that such objects are made of come here by themselves.
_CLASSES = {
    ("cupy", "ndarray"): "cupy",
    ("torch", "Tensor"): "torch",
    ("jaxlib", "ArrayImpl"): "jax",
    ("jax", "ArrayImpl"): "jax",
    ("numba", "DeviceNDArray"): "numba",
}
_SELF_PICKLING = ("cupy", "torch", "jax")


class Packed:
    """A pickled object, with its device arrays on the way to page-locked memory.

    The order of calls is: make, `ready`, pickle (any number of times), `release`.
    """

    __slots__ = ("_buffers", "_data", "_held", "_ready", "arrays")

    def __init__(self, obj: Any) -> None:
        self._buffers: list[pickle.PickleBuffer] = []  # NumPy's too: the inner pickle does not copy them then
        self._held: list[tuple[Lease, Buffer]] = []
        self._ready = False
        self.arrays = 0  # how many device arrays are in the object
        file = io.BytesIO()
        try:
            _Pickler(self, file).dump(obj)
        except BaseException:
            self.release()
            raise
        self._data = file.getvalue()

    def ready(self) -> None:
        """Wait for the copies: once for each stream."""
        streams = {(id(buffer.device), buffer.stream): buffer for _, buffer in self._held}
        for buffer in streams.values():
            buffer.device.synchronize(buffer.stream)
        self._ready = True

    def release(self) -> None:
        """Give the page-locked memory back; no pickling after this."""
        self._buffers.clear()
        while self._held:
            lease, buffer = self._held.pop()
            lease.release(None if self._ready else buffer.device.record(buffer.stream))

    def hold(self, buffer: Buffer) -> pickle.PickleBuffer:
        """Queue the copy of an array's content; return the memory that it goes to."""
        self.arrays += 1
        if not buffer.nbytes:
            return pickle.PickleBuffer(b"")
        lease = pool_of(buffer.device).lease(buffer.nbytes)
        self._held.append((lease, buffer))
        buffer.device.to_host(lease.array, buffer)
        return pickle.PickleBuffer(lease.array)  # type: ignore[arg-type]  # NumPy's arrays are buffers

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # Only the standard library: an object without device arrays needs no gdcomm where it arrives.
        if not self._buffers:
            return pickle.loads, (self._data,)
        buffers: list[Any] = self._buffers
        if protocol < 5:  # asked for by MPI4PY_PICKLE_PROTOCOL or by another pickler
            views = [buffer.raw() for buffer in buffers]
            buffers = [bytes(view) if view.readonly else bytearray(view) for view in views]
        return functools.partial(pickle.loads, buffers=buffers), (self._data,)


class _Pickler(pickle.Pickler):
    def __init__(self, packed: Packed, file: io.BytesIO) -> None:
        super().__init__(file, 5, buffer_callback=packed._buffers.append)
        self._packed = packed

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is np.ndarray or not (
            hasattr(kind, "__cuda_array_interface__") or hasattr(kind, "__dlpack_device__")
        ):
            return NotImplemented
        library = _library(kind)
        buffer = None if library is None else _find(obj, library)
        if buffer is None:
            return NotImplemented
        order = "F" if library != "jax" and _fortran(buffer) else "C"  # JAX's have no order
        data = self._packed.hold(_transposed(buffer) if order == "F" else buffer)
        return _restore, (library, buffer.shape, buffer.dtype, order, data)


def _library(kind: type) -> str | None:
    found = _CLASSES.get((kind.__module__.partition(".")[0], kind.__name__))
    if found is None and any(base.__name__ == "EmulatedArray" for base in kind.__mro__):
        return "emulated"
    return found


def _find(obj: Any, library: str) -> Buffer | None:
    """Describe a device array; None where the library's own pickling is to have it."""
    if library == "torch":
        torch = sys.modules["torch"]
        plain = obj.is_cuda and obj.layout is torch.strided and not obj.is_quantized
        # Lazy conjugates and the like are not in memory as they read; attributes travel with torch's pickling.
        if not plain or obj.is_conj() or obj.is_neg() or obj.requires_grad or obj.__dict__:
            return None
    elif library == "jax" and (len(obj.devices()) != 1 or getattr(obj, "weak_type", False)):
        return None
    try:
        return devices.find(obj)
    except Exception:
        # On another GPU, of a dtype without a name here, no CuPy: what was right without gdcomm stays so.
        if library in _SELF_PICKLING:
            return None
        raise


def _fortran(buffer: Buffer) -> bool:
    """Whether the elements lie in Fortran order without gaps (and not in C order)."""
    if buffer.strides is None:
        return False
    expected = buffer.dtype.itemsize
    for extent, step in zip(buffer.shape, buffer.strides, strict=True):
        if extent > 1 and step != expected:
            return False
        expected *= extent
    return True


def _transposed(buffer: Buffer) -> Buffer:
    """A Fortran-ordered array seen so that its order in memory is the logical one: no packing then."""
    return buffer._replace(shape=buffer.shape[::-1], strides=None)


def _restore(library: str, shape: tuple[int, ...], dtype: np.dtype[Any], order: str, data: Any) -> Any:
    """Make the array again, in the process that received it."""

    def fill(buffer: Buffer) -> None:
        if order == "F" and not buffer.contiguous:
            buffer = _transposed(buffer)
        lease = pool_of(buffer.device).lease(buffer.nbytes)
        try:
            lease.array[...] = np.frombuffer(data, np.uint8)
            buffer.device.to_device(buffer, lease.array)
        finally:
            lease.release(buffer.device.record(buffer.stream))

    if library == "emulated":
        device = next((d for d in devices.installed() if d.kind == "emulated"), None)
        missing = "no emulated device: call gdcomm.testing.emulate() first"
    else:
        device = devices.cuda_device()
        missing = "no GPU that CuPy can use: install CuPy (pip install cupy-cuda13x or cupy-cuda12x) and give it one"
    if device is not None:
        try:
            return device.build(library, shape, dtype, order, fill)
        except ImportError as error:
            missing = f"no {library} that works on its GPU ({error}): install it here too"
    raise DeviceError(
        f"the message holds a {library} device array, and the process that received it has {missing}, "
        "or send a host copy of the array"
    )


def pack(obj: Any) -> Any:
    """Make `obj` ready for mpi4py: a `Packed` (to be released), or `obj` itself where nothing is to be done."""
    queued = queue(obj)
    if queued is not obj:
        try:
            queued.ready()
        except BaseException:
            queued.release()
            raise
    return queued


def queue(obj: Any) -> Any:
    """As `pack`, but does not wait for the copies."""
    kind = type(obj)
    if kind in _PLAIN or (kind is np.ndarray and not obj.dtype.hasobject) or not devices.possible():
        return obj
    try:
        packed = Packed(obj)
    except GdcommError:
        raise
    except (pickle.PicklingError, TypeError, AttributeError):
        return obj  # the pickler that mpi4py was given (dill, say) may know it; else the error is mpi4py's
    if not packed.arrays and MPI.pickle.PROTOCOL != pickle.HIGHEST_PROTOCOL:
        return obj  # perhaps another pickler (marshal, json), which need not know Packed
    return packed
