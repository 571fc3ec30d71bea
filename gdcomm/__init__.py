"""gdcomm: MPI communicators for GPU arrays.

`gdcomm.Communicator()` is an mpi4py communicator whose buffer methods also take CuPy, PyTorch,
JAX and Numba arrays. Importing this package loads neither MPI nor CUDA; its names do on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gdcomm.errors import (
    BufferSpecError,
    ClosedError,
    CommTimeoutError,
    DeviceError,
    GdcommError,
    NoPathError,
    PinnedMemoryError,
)

if TYPE_CHECKING:
    from gdcomm.communicator import (
        CartCommunicator,
        Communicator,
        DistGraphCommunicator,
        GraphCommunicator,
        InterCommunicator,
    )
    from gdcomm.memory.arrays import pinned_array, pinned_empty, pinned_like, pinned_zeros
    from gdcomm.memory.kinds import memory_kind
    from gdcomm.memory.mapped import mapped_empty
    from gdcomm.memory.registered import register, registered, unregister
    from gdcomm.messages import Message
    from gdcomm.requests import Prequest, Request
    from gdcomm.transfer.batch import copy_many
    from gdcomm.transfer.copy import copy, to_device, to_host
    from gdcomm.transfer.gather import put, take
    from gdcomm.transfer.prefetch import offload, prefetch
    from gdcomm.transfer.signals import Signal

__version__ = "0.1.0"

__all__ = [
    "BufferSpecError",
    "CartCommunicator",
    "ClosedError",
    "CommTimeoutError",
    "Communicator",
    "DeviceError",
    "DistGraphCommunicator",
    "GdcommError",
    "GraphCommunicator",
    "InterCommunicator",
    "Message",
    "NoPathError",
    "PinnedMemoryError",
    "Prequest",
    "Request",
    "Signal",
    "copy",
    "copy_many",
    "mapped_empty",
    "memory_kind",
    "offload",
    "pinned_array",
    "pinned_empty",
    "pinned_like",
    "pinned_zeros",
    "prefetch",
    "put",
    "register",
    "registered",
    "take",
    "to_device",
    "to_host",
    "unregister",
]

_MODULES = {
    "communicator": "CartCommunicator Communicator DistGraphCommunicator GraphCommunicator InterCommunicator",
    "messages": "Message",
    "requests": "Prequest Request",
    "memory.arrays": "pinned_array pinned_empty pinned_like pinned_zeros",
    "memory.kinds": "memory_kind",
    "memory.mapped": "mapped_empty",
    "memory.registered": "register registered unregister",
    "transfer.batch": "copy_many",
    "transfer.copy": "copy to_device to_host",
    "transfer.gather": "put take",
    "transfer.prefetch": "offload prefetch",
    "transfer.signals": "Signal",
}
_LAZY = {name: f"gdcomm.{module}" for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'gdcomm' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(module), name)  # the next look-up is Python's own
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
