"""What runs on the device beside plain copies: rows gathered and scattered, waits for values, lent memory."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from gdcomm.devices.base import Buffer

__all__ = ["Kernels", "Loan", "Rows"]


class Rows(NamedTuple):
    """Rows of a table in memory that kernels reach.

    Args:
        address: of row 0, as kernels see it.
        length: rows in the table.
        nbytes: bytes of a row, without gaps.
        stride: bytes from one row to the next.
        owner: keeps the memory alive.
    """

    address: int
    length: int
    nbytes: int
    stride: int
    owner: Any


class Loan:
    """A new array whose memory is written on one stream (its home) and then used on another.

    When the last array over the memory goes, the home stream waits for what the user's stream holds at
    that moment, and only then may the memory be given out again for work on the home stream. So a consumer
    drops arrays as freely as if everything ran on one stream, and no host thread waits.

    Args:
        device: of the memory.
        array: over the memory; it keeps `token` alive as long as any view of it lives.
        token: dies with the last view.
        memory: what `Kernels.reclaim` takes back.
        home: the stream that the memory was allocated for.
    """

    def __init__(self, device: Any, array: Any, token: Any, memory: Any, home: Any) -> None:
        self.array = array
        self._user: list[Any] = []  # the stream that uses the array, and objects that keep the stream alive
        arguments = (device, device.here(), memory, home, self._user)
        weakref.finalize(token, _give_back, *arguments).atexit = False

    def use_on(self, stream: Any, *keep: Any) -> None:
        """Note that work of `stream` uses the array from now on; `keep` keeps the stream itself alive."""
        self._user[:] = [stream, *keep]


def _give_back(device: Any, here: AbstractContextManager[Any], memory: Any, home: Any, user: list[Any]) -> None:
    with here:
        if user and user[0] != home:
            device.wait_event(home, device.record(user[0]))
        device.reclaim(memory, home)


class Kernels(ABC):
    """Gathers, scatters and signals that run on the device. All are queued on a stream and do not block."""

    @abstractmethod
    def kernel_address(self, address: int, nbytes: int) -> int | None:
        """The address by which kernels reach this host memory, or None if any of it is not page-locked."""

    @abstractmethod
    def gather(self, out: Buffer, table: Rows, index: Buffer, mode: str, fill: int) -> None:
        """Queue on `out.stream`: row i of `out` becomes row `index[i]` of the table.

        Args:
            out: contiguous; `index` elements times `table.nbytes`.
            table: in device or page-locked memory; read when the stream gets there.
            index: contiguous int32 or int64 on the device, ordered on the same stream.
            mode: "fill" (negative ones count from the end; rows out of range get the byte `fill`), "clip" or
                "wrap". No index makes a kernel touch other memory.
            fill: a byte.
        """

    @abstractmethod
    def scatter(self, table: Rows, index: Buffer, values: Buffer, mode: str, unique: bool) -> None:
        """Queue on `values.stream`: row `index[i]` of the table becomes row i of `values`.

        Out-of-range rows are left out in mode "fill". Of an index that occurs twice the last one wins, as in
        NumPy; `unique` is the caller's word that none does, and saves finding out. `values` holds one
        row for each index, or one row for all.
        """

    @abstractmethod
    def snapshot(self, buffer: Buffer) -> Buffer:
        """Queue a copy of the content to new device memory, contiguous in logical order, on the buffer's stream."""

    @abstractmethod
    def lend(self, library: str, shape: tuple[int, ...], dtype: np.dtype[Any], stream: Any) -> Loan:
        """New (uninitialised) memory for work on `stream`, as an array of `library` ("cupy" or "torch").

        Raises:
            ImportError: the library is not here, or can't use this device.
        """

    def reclaim(self, memory: Any, home: Any) -> None:  # noqa: B027 - dropping it suffices where pools go by streams
        """Take back lent memory for later work on `home`."""

    @abstractmethod
    def stream_wait_value(self, stream: Any, address: int, bits: int, value: int, equal: bool) -> None:
        """Queue: later work of the stream waits until the word is `value` (or, unless `equal`, cyclically beyond).

        Raises:
            DeviceError: this GPU or driver can't.
        """

    @abstractmethod
    def stream_write_value(self, stream: Any, address: int, bits: int, value: int) -> None:
        """Queue: write the word once all earlier work of the stream is done and visible to the host.

        Raises:
            DeviceError: this GPU or driver can't.
        """

    def poll(self) -> None:  # noqa: B027 - a GPU goes on by itself
        """Called by a host thread that looks at memory again and again (the emulated device works on then)."""

    @abstractmethod
    def handle(self, stream: Any) -> Any:
        """The device's handle of whatever means a stream; of None, the handle of the current one."""

    @abstractmethod
    def current_stream(self) -> Any:
        """The object of this thread's current stream; holding it keeps the stream from being destroyed."""

    @abstractmethod
    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """A context in which the stream is the current one, also for memory that libraries allocate."""

    @abstractmethod
    def borrow_stream(self) -> Any:
        """A stream of its own for copies beside the program's work; give it back by `return_stream`."""

    @abstractmethod
    def return_stream(self, stream: Any) -> None:
        """Let others borrow the stream; what is queued on it still runs. It is never destroyed."""

    @abstractmethod
    def wait_event(self, stream: Any, event: Any) -> None:
        """Queue a wait: later work of `stream` runs after `event`."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Device memory that can be allocated now."""
