"""The ways of other libraries, where they are installed and can use the GPU. They are imported only here."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import numpy as np

from gdcomm.bench.transfer.data import Array
from gdcomm.bench.transfer.kits import Kit

__all__ = ["Peer", "peers"]


class Peer:
    """CuPy; the base of the others. `source` and `upload` give the library's own device arrays.

    Args:
        truth: host memory whose copy the library has on the device.
    """

    def __init__(self, truth: Array) -> None:
        self._cupy = importlib.import_module("cupy")
        self.source: Any = self.upload(truth)

    def upload(self, host: Array) -> Any:
        """Host memory as a new device array; done when it returns, or on CuPy's current stream."""
        return self._cupy.asarray(host)

    def download(self) -> Any:
        """`source` as new host memory."""
        return self._cupy.asnumpy(self.source)

    def refresh(self) -> None:
        """Forget copies of `source` that the library keeps on the host."""

    def on_device(self, array: Any) -> Any:
        """The library's device array as CuPy's."""
        return array

    def on_host(self, array: Any) -> Array:
        """What `download` gives, as NumPy's."""
        return np.asarray(array)


class _Torch(Peer):
    def __init__(self, truth: Array) -> None:
        self._torch = importlib.import_module("torch")
        if not self._torch.cuda.is_available():
            raise ImportError("it can't use a GPU")
        super().__init__(truth)

    def upload(self, host: Array) -> Any:
        made = self._torch.from_numpy(host).cuda()
        self._torch.cuda.current_stream().synchronize()
        return made

    def download(self) -> Any:
        return self.source.cpu()

    def on_device(self, array: Any) -> Any:
        return self._cupy.from_dlpack(array)

    def on_host(self, array: Any) -> Array:
        return np.asarray(array.numpy())


class _Jax(Peer):
    def __init__(self, truth: Array) -> None:
        if "jax" not in sys.modules:
            os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # of the memory that others need too
        self._jax = importlib.import_module("jax")
        self._gpu = self._jax.devices("gpu")[0]
        super().__init__(truth)
        self._first = self.source

    def upload(self, host: Array) -> Any:
        return self._jax.device_put(host, self._gpu).block_until_ready()

    def download(self) -> Any:
        return np.asarray(self.source)

    def refresh(self) -> None:
        self.source = None  # an array keeps the host copy that was made of it once
        self.source = self._jax.numpy.copy(self._first).block_until_ready()

    def on_device(self, array: Any) -> Any:
        return self._cupy.from_dlpack(array)


_CLASSES: dict[str, type[Peer]] = {"cupy": Peer, "torch": _Torch, "jax": _Jax}


def peers(kit: Kit, truth: Array) -> dict[str, Peer]:
    """The libraries that can be used here; a note of the kit says why one can't."""
    found: dict[str, Peer] = {}
    if kit.name != "cuda":
        return found
    for name, made in _CLASSES.items():
        try:
            found[name] = made(truth)
        except Exception as error:  # an import can fail in many ways, and none of them is ours
            note = f"no column {name}: {type(error).__name__}: {error}".splitlines()[0]
            if note not in kit.notes:
                kit.notes.append(note)
    return found
