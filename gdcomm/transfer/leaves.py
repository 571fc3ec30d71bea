"""Host arrays in whatever form and structure they come, and their way to the device."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, MutableMapping
from typing import Any

import numpy as np

from gdcomm import devices
from gdcomm.devices.base import Buffer, Device
from gdcomm.errors import BufferSpecError, DeviceError
from gdcomm.memory.pinned import Slots
from gdcomm.transfer.copy import move
from gdcomm.transfer.sides import describe, library_of

__all__ = ["fetch", "fill_from", "host_view", "map_leaves", "moves", "need_device"]


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


def host_view(obj: Any) -> np.ndarray[Any, Any] | None:
    """A NumPy array over the memory of a host array, or None if `obj` is none.

    NumPy arrays (masked ones as they are), PyTorch CPU tensors, and objects of `mapped_empty` (which have `.host`).

    Raises:
        BufferSpecError: a tensor of a dtype that NumPy can't name.
    """
    if isinstance(obj, np.ndarray):
        return obj if isinstance(obj, np.ma.MaskedArray) else np.asarray(obj)
    if library_of(obj) == "torch" and getattr(obj, "device", None) is not None:
        if obj.device.type != "cpu" or str(obj.layout) != "torch.strided":
            return None
        view = describe(obj.detach().resolve_conj().resolve_neg(), "tensor")
        return view if isinstance(view, np.ndarray) else None
    host = getattr(obj, "host", None)
    return host if isinstance(host, np.ndarray) else None


def fill_from(source: np.ndarray[Any, Any], buffer: Buffer, read: bool = False) -> None:
    """Queue the copy of a host array to a contiguous device buffer of its shape and dtype, on the buffer's stream.

    Page-locked memory of more than 64 KiB is read when the stream gets there, other memory before this returns.

    Args:
        source: the host array.
        buffer: its device buffer.
        read: page-locked memory was read on return, too.
    """
    if source.nbytes:
        move(buffer, source, None, None if read or source.nbytes <= Slots.SIZE else False)


def fetch(buffer: Buffer) -> np.ndarray[Any, Any]:
    """The content of a device buffer as a new NumPy array; waits for its stream."""
    made: np.ndarray[Any, Any] = np.empty(buffer.shape, buffer.dtype)
    if buffer.nbytes:
        move(made, buffer, None, True)
    return made


def map_leaves(item: Any, change: Callable[[Any], Any]) -> Any:
    """`item` with each leaf changed: tuples, lists, dicts, named tuples and dataclasses are gone through and kept.

    Raises:
        BufferSpecError: a mapping that can't be copied by `copy.copy`, so that its own content would change.
    """
    if isinstance(item, tuple):
        parts = [map_leaves(part, change) for part in item]
        if all(new is old for new, old in zip(parts, item, strict=True)):
            return item
        return tuple.__new__(type(item), parts)  # subclasses have constructors of all kinds
    if isinstance(item, list):
        made = copy.copy(item)
        made[:] = [map_leaves(part, change) for part in item]
        return made
    if isinstance(item, MutableMapping):
        return _map_mapping(item, change)
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        made_data: Any = copy.copy(item)
        for field in dataclasses.fields(item):
            if hasattr(item, field.name):
                object.__setattr__(made_data, field.name, map_leaves(getattr(item, field.name), change))
        return made_data
    return change(item)


def _map_mapping(item: MutableMapping[Any, Any], change: Callable[[Any], Any]) -> Any:
    made = copy.copy(item)  # keeps the type: OrderedDict, a batch class of some library
    for key in item:
        old = item[key]
        made[key] = map_leaves(old, change)
        if not isinstance(item, dict) and made[key] is not old and item[key] is made[key]:
            item[key] = old
            raise BufferSpecError(
                f"copy.copy of a {type(item).__name__} shares its content; give it a __copy__, or give a dict"
            )
    return made


def moves(array: np.ndarray[Any, Any]) -> bool:
    """Whether a NumPy array has content that a device can hold: numbers and records of numbers, no objects or text."""
    return not array.dtype.hasobject and array.dtype.kind not in "OSUMm" and not isinstance(array, np.ma.MaskedArray)
