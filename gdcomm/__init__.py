"""gdcomm: MPI communicators for GPU arrays.

`gdcomm.Communicator()` is an mpi4py communicator whose buffer methods also take CuPy, PyTorch,
JAX and Numba arrays. Importing this package loads neither MPI nor CUDA; its names do on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gdcomm.errors import BufferSpecError, ClosedError, DeviceError, GdcommError, NoPathError

if TYPE_CHECKING:
    from gdcomm.communicator import (
        CartCommunicator,
        Communicator,
        DistGraphCommunicator,
        GraphCommunicator,
        InterCommunicator,
    )
    from gdcomm.messages import Message
    from gdcomm.requests import Prequest, Request

__version__ = "0.1.0"

__all__ = [
    "BufferSpecError",
    "CartCommunicator",
    "ClosedError",
    "Communicator",
    "DeviceError",
    "DistGraphCommunicator",
    "GdcommError",
    "GraphCommunicator",
    "InterCommunicator",
    "Message",
    "NoPathError",
    "Prequest",
    "Request",
]

_LAZY = {
    **dict.fromkeys(
        ("CartCommunicator", "Communicator", "DistGraphCommunicator", "GraphCommunicator", "InterCommunicator"),
        "gdcomm.communicator",
    ),
    "Message": "gdcomm.messages",
    "Prequest": "gdcomm.requests",
    "Request": "gdcomm.requests",
}


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'gdcomm' has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
