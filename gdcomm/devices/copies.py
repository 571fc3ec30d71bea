"""Queued copies between addresses, in rows, on the device and in batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from gdcomm.devices.base import Buffer

__all__ = ["Copies"]


class Copies(ABC):
    """Copies in stream order. Memory is the device's or the host's, as each address tells.

    Page-locked host memory is read and written when the copy runs. Pageable memory is as the driver
    has it: a source is taken during the call, a destination holds its data when the call returns.
    """

    @abstractmethod
    def copy(self, dst: int, src: int, nbytes: int, stream: Any) -> None:
        """Queue a copy of `nbytes` from address `src` to address `dst`."""

    def copy_short(self, host: np.ndarray[Any, Any], array: Any, down: bool) -> bool:
        """Copy between a short C-contiguous host array and a plain one of the device, and wait; tell if it was done.

        On the current stream. Whatever is not plain (see `addresses`), or differs in shape or dtype, is left.
        """
        return False

    @abstractmethod
    def copy_rows(
        self, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, height: int, stream: Any
    ) -> None:
        """Queue `height` rows of `width` bytes; a pitch is the bytes from one row to the next, at least `width`."""

    @abstractmethod
    def copy_strided(self, dst: Buffer, src: Buffer) -> None:
        """Queue on `dst.stream`: the elements of one array of this device to another of any strides.

        Both have one shape and one dtype, and share no memory.
        """

    @abstractmethod
    def copy_pieces(self, table: np.ndarray[Any, Any], largest: int, stream: Any) -> None:
        """Queue many copies in one go, in any order.

        Args:
            table: uint64, (3, n): addresses of destinations, of sources, bytes. In page-locked memory; it is
                read when the stream gets there.
            largest: the most bytes of a piece.
            stream: the stream. All addresses are ones that kernels reach.
        """

    @abstractmethod
    def addresses(self, arrays: Sequence[Any]) -> np.ndarray[Any, Any] | None:
        """Addresses (uint64) of arrays if all are plain: one library's, contiguous, writable, on the current GPU."""

    def elsewhere(self, obj: Any) -> AbstractContextManager[Any] | None:
        """A context in which the GPU that holds `obj` is the current one; None where it is already."""
        return None

    def connect(self, dst: Buffer, src: Buffer) -> None:  # noqa: B027 - one device has nothing to connect
        """Let the GPUs of two arrays reach each other, so that copies need not pass through the host."""
