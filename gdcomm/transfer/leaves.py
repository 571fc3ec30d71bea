"""Host arrays in whatever form and structure they come, and their way to the device."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, MutableMapping
from typing import Any

import numpy as np

from gdcomm import devices
from gdcomm.devices.base import Buffer, Device
from gdcomm.errors import DeviceError
from gdcomm.memory.pinned import Slots, note_use
from gdcomm.memory.registered import pieces as segments
from gdcomm.transfer.copy import move
from gdcomm.transfer.sides import is_locked, span_of
from gdcomm.transfer.staging import upload

__all__ = ["fetch", "fill_from", "host_view", "library_of", "map_leaves", "moves", "need_device"]


def need_device(operation: str) -> Device:
    """The device of this process.

    Raises:
        DeviceError: there is none.
    """
    device = devices.current()
    if device is None:
        raise DeviceError(
            f"{operation} needs a GPU and CuPy: pip install cupy-cuda13x (or cupy-cuda12x, as your driver is); "
            "without a GPU, gdcomm.testing.emulate() stands in for one"
        )
    return device


def library_of(obj: Any) -> str:
    """ "torch" for tensors, else "cupy"."""
    return "torch" if type(obj).__module__.partition(".")[0] == "torch" else "cupy"


def host_view(obj: Any) -> np.ndarray[Any, Any] | None:
    """A NumPy array over the memory of a host array, or None if `obj` is none.

    NumPy arrays, PyTorch CPU tensors, and objects of `mapped_empty` (which have `.host`).
    """
    if isinstance(obj, np.ndarray):
        return obj
    if library_of(obj) == "torch" and getattr(obj, "device", None) is not None:
        dense = obj.device.type == "cpu" and str(obj.layout) == "torch.strided"
        return _torch_view(obj) if dense else None
    host = getattr(obj, "host", None)
    return host if isinstance(host, np.ndarray) else None


def _torch_view(tensor: Any) -> np.ndarray[Any, Any]:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if str(tensor.dtype) != "torch.bfloat16":
        return tensor.numpy()  # type: ignore[no-any-return]
    import ml_dtypes
    import torch

    return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)  # type: ignore[no-any-return]


def fill_from(source: np.ndarray[Any, Any], buffer: Buffer) -> None:
    """Queue the copy of a host array to a contiguous device buffer of its shape and dtype, on the buffer's stream.

    Page-locked memory of more than 64 KiB is read when the stream gets there, other memory before this returns.
    """
    if not source.nbytes:
        return
    device, stream = buffer.device, buffer.stream
    if source.nbytes <= Slots.SIZE and source.flags.c_contiguous:
        move(buffer, source, None, None)
    elif source.flags.c_contiguous and is_locked(device, source):
        first, end = span_of(source)
        for address, nbytes in segments(first, end - first):
            device.copy(buffer.ptr + address - first, address, nbytes, stream)
        note_use(first, end - first, device.record(stream))
    else:
        upload(buffer, source)


def fetch(buffer: Buffer) -> np.ndarray[Any, Any]:
    """The content of a device buffer as a new NumPy array; waits for its stream."""
    made: np.ndarray[Any, Any] = np.empty(buffer.shape, buffer.dtype)
    if buffer.nbytes:
        move(made, buffer, None, True)
    return made


def map_leaves(item: Any, change: Callable[[Any], Any]) -> Any:
    """`item` with each leaf changed: tuples, lists, dicts, named tuples and dataclasses are gone through and kept."""
    made: Any
    if isinstance(item, tuple):
        parts = [map_leaves(part, change) for part in item]
        return type(item)(*parts) if hasattr(item, "_fields") else type(item)(parts)
    if type(item) is list:
        return [map_leaves(part, change) for part in item]
    if isinstance(item, MutableMapping):
        made = copy.copy(item)  # keeps the type: OrderedDict, a batch class of some library
        for key in item:
            made[key] = map_leaves(item[key], change)
        return made
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        made = copy.copy(item)
        for field in dataclasses.fields(item):
            object.__setattr__(made, field.name, map_leaves(getattr(item, field.name), change))
        return made
    return change(item)


def moves(array: np.ndarray[Any, Any]) -> bool:
    """Whether a NumPy array has content that a device can hold: numbers and records of numbers, no objects or text."""
    return not array.dtype.hasobject and array.dtype.kind not in "OSUMm" and not isinstance(array, np.ma.MaskedArray)
