"""What is measured: buffers, call, expected values and bus-bandwidth factor of each operation.

Sizes follow nccl-tests: the bytes of the larger of a rank's two buffers, and the factor turns algorithm
bandwidth into the bandwidth that the busiest link must carry (its doc/PERFORMANCE.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from gdcomm.operations import OPERATIONS

if TYPE_CHECKING:
    from gdcomm.paths import Paths

__all__ = ["CASES", "Aware", "Case", "CupyArrays", "EmulatedArrays", "HostArrays", "Naive", "Pinned"]


class HostArrays:
    """NumPy arrays; the device kinds have the same four methods."""

    def make(self, values: np.ndarray) -> Any:
        """An array with these values."""
        return values.copy()

    def read(self, array: Any) -> np.ndarray:
        """Its values, as NumPy."""
        return np.asarray(array)

    def spoil(self, array: Any) -> None:
        """Fill with a value that no correct result has."""
        array.fill(_spoilt(array.dtype))

    def finish(self) -> None:
        """Wait for work queued on the current stream."""


class EmulatedArrays(HostArrays):
    """The emulated device's."""

    def __init__(self) -> None:
        import gdcomm.testing

        self._device = gdcomm.testing.emulate()

    def make(self, values: np.ndarray) -> Any:
        return self._device.array(values)

    def read(self, array: Any) -> np.ndarray:
        return self._device.asnumpy(array)

    def spoil(self, array: Any) -> None:
        self._device.fill(array, _spoilt(array.dtype))

    def finish(self) -> None:
        self._device.synchronize(self._device.current_stream())


class CupyArrays(HostArrays):
    """CuPy's."""

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy

    def make(self, values: np.ndarray) -> Any:
        return self._cupy.asarray(values)

    def read(self, array: Any) -> np.ndarray:
        return self._cupy.asnumpy(array)  # type: ignore[no-any-return]

    def finish(self) -> None:
        self._cupy.cuda.get_current_stream().synchronize()


class ByHand:
    """A communicator of device arrays as people write it by hand: whole copies, MPI's own call, whole copies back."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        operation, method, rank = OPERATIONS[name], getattr(self._comm, name), self._comm.Get_rank()

        def call(*arguments: Any) -> None:
            at_root = rank == (arguments[operation.root] if 0 <= operation.root < len(arguments) else 0)
            held, written = list(arguments), []
            for position in operation.buffers:
                array = arguments[position]
                if operation.root_side and not at_root and position == getattr(operation, operation.root_side):
                    held[position] = None
                elif operation.reads(self._comm, position, arguments, False):
                    held[position] = self.to_host(array)
                else:
                    held[position] = self.host_like(array)
                    written.append(position)
            method(*held)
            for position in written:
                self.to_device(arguments[position], held[position])

        return call


class Naive(ByHand):
    """Through new pageable memory."""

    def to_host(self, array: Any) -> Any:
        import cupy

        return cupy.asnumpy(array)

    def host_like(self, array: Any) -> Any:
        return np.empty(array.shape, array.dtype)

    def to_device(self, array: Any, host: Any) -> None:
        array.set(host)


class Pinned(ByHand):
    """Through page-locked memory that is kept, by the CUDA runtime's own calls: the shortest code there is."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        super().__init__(comm)
        self._kept: dict[tuple[int, int], Any] = {}

    def host_like(self, array: Any) -> Any:
        import cupyx

        key = array.data.ptr, array.nbytes
        host = self._kept.get(key)
        if host is None or host.dtype != array.dtype:
            if len(self._kept) > 3:  # of sizes that are over
                self._kept.clear()
            host = self._kept[key] = cupyx.empty_like_pinned(array)
        return host

    def to_host(self, array: Any) -> Any:
        host = self.host_like(array)
        _copy(host.ctypes.data, array.data.ptr, array.nbytes, "memcpyDeviceToHost")
        return host

    def to_device(self, array: Any, host: Any) -> None:
        _copy(array.data.ptr, host.ctypes.data, array.nbytes, "memcpyHostToDevice")


def _copy(to: int, origin: int, nbytes: int, kind: str) -> None:
    from cupy import cuda

    stream = cuda.get_current_stream().ptr
    cuda.runtime.memcpyAsync(to, origin, nbytes, getattr(cuda.runtime, kind), stream)
    cuda.runtime.streamSynchronize(stream)


class Aware:
    """mpi4py handed the device arrays, where MPI is known to take them for this operation.

    Args:
        comm: mpi4py's.
        paths: of a communicator that is direct.
    """

    def __init__(self, comm: MPI.Intracomm, paths: Paths) -> None:
        self._comm, self._paths, self._finish = comm, paths, CupyArrays().finish

    def __getattr__(self, name: str) -> Any:
        method, operation = getattr(self._comm, name), OPERATIONS[name]

        def call(*arguments: Any) -> None:
            self._paths.transport(operation)  # raises where it is not known
            self._finish()
            method(*arguments)

        return call


def _spoilt(dtype: Any) -> Any:
    return np.dtype(dtype).type(113)


@dataclass
class Case:
    """One operation at one size on one communicator."""

    call: Callable[[], Any]
    result: Any  # the array to check, or None where this rank gets nothing
    expected: np.ndarray | None
    nbytes: int
    factor: float


_PERIOD = 11


def _values(rank: int, count: int, dtype: Any) -> np.ndarray:
    """Values that differ by place and rank and stay small, so that sums are exact; they repeat after `_PERIOD`."""
    return np.resize(((np.arange(_PERIOD) * 3 + rank * 5) % _PERIOD + 1).astype(dtype), count)


def _reduced(size: int, count: int, dtype: Any, upto: int | None = None) -> np.ndarray:
    total = sum(_values(rank, _PERIOD, np.float64) for rank in range(size if upto is None else upto + 1))
    return np.resize(np.asarray(total).astype(dtype), count)


def _simple(name: str, rooted: bool = False) -> Callable[..., Case]:
    """Reductions of whole arrays."""

    def build(comm: Any, plain: Any, arrays: Any, nbytes: int, dtype: Any) -> Case:
        n, rank = plain.Get_size(), plain.Get_rank()
        count = max(1, nbytes // np.dtype(dtype).itemsize)
        x, y = arrays.make(_values(rank, count, dtype)), arrays.make(np.zeros(count, dtype))
        method = getattr(comm, name)
        call = (lambda: method(x, y, MPI.SUM, 0)) if rooted else (lambda: method(x, y, MPI.SUM))
        mine = not rooted or rank == 0
        expected = _reduced(n, count, dtype, rank if name == "Scan" else None) if mine else None
        factor = 2 * (n - 1) / n if name == "Allreduce" else 1.0
        return Case(call, y, expected, count * np.dtype(dtype).itemsize, factor)

    return build


def _bcast(comm: Any, plain: Any, arrays: Any, nbytes: int, dtype: Any) -> Case:
    count = max(1, nbytes // np.dtype(dtype).itemsize)
    rank = plain.Get_rank()
    x = arrays.make(_values(0, count, dtype))
    expected = _values(0, count, dtype) if rank else None
    return Case(lambda: comm.Bcast(x, 0), x, expected, count * np.dtype(dtype).itemsize, 1.0)


def _blocks(name: str) -> Callable[..., Case]:
    """Operations on one block a rank."""

    def build(comm: Any, plain: Any, arrays: Any, nbytes: int, dtype: Any) -> Case:
        n, rank = plain.Get_size(), plain.Get_rank()
        block = max(1, nbytes // np.dtype(dtype).itemsize // n)
        whole = block * n
        gathered = np.concatenate([_values(r, block, dtype) for r in range(n)])
        total = _reduced(n, whole, dtype)
        swapped = np.concatenate([_values(r, whole, dtype)[rank * block : (rank + 1) * block] for r in range(n)])
        scattered = _values(0, whole, dtype)[rank * block : (rank + 1) * block]
        send, receive, expected = {
            "Allgather": (block, whole, gathered),
            "Gather": (block, whole, gathered if rank == 0 else None),
            "Scatter": (whole, block, scattered),
            "Alltoall": (whole, whole, swapped),
            "Reduce_scatter_block": (whole, block, total[rank * block : (rank + 1) * block]),
        }[name]
        x, y = arrays.make(_values(rank, send, dtype)), arrays.make(np.zeros(receive, dtype))
        method = getattr(comm, name)
        return Case(lambda: method(x, y), y, expected, whole * np.dtype(dtype).itemsize, (n - 1) / n)

    return build


def _p2p(comm: Any, plain: Any, arrays: Any, nbytes: int, dtype: Any) -> Case:
    """Ping-pong of the first and the last rank, which are on two nodes if any are; one way: half a round trip."""
    count = max(1, nbytes // np.dtype(dtype).itemsize)
    rank, last = plain.Get_rank(), plain.Get_size() - 1
    x, y = arrays.make(_values(rank, count, dtype)), arrays.make(np.zeros(count, dtype))

    def call() -> None:
        if rank == 0:
            comm.Send(x, last)
            comm.Recv(y, last)
        elif rank == last:
            comm.Recv(y, 0)
            comm.Send(x, 0)

    expected = _values(last - rank, count, dtype) if rank in (0, last) else None
    return Case(call, y, expected, count * np.dtype(dtype).itemsize, 1.0)


def _exchange(comm: Any, plain: Any, arrays: Any, nbytes: int, dtype: Any) -> Case:
    """The first and the last rank send to each other at the same time; the bandwidth is that of both ways together."""
    count = max(1, nbytes // np.dtype(dtype).itemsize)
    rank, last = plain.Get_rank(), plain.Get_size() - 1
    x, y = arrays.make(_values(rank, count, dtype)), arrays.make(np.zeros(count, dtype))
    peer = last - rank

    def call() -> None:
        if rank not in (0, last):
            return
        if isinstance(comm, MPI.Comm):
            receiving = comm.Irecv(y, peer)
            comm.Isend(x, peer).Wait()
            receiving.Wait()
        else:  # by hand, which is blocking
            comm.Sendrecv(x, peer, 0, y, peer, 0)

    expected = _values(peer, count, dtype) if rank in (0, last) else None
    return Case(call, y, expected, count * np.dtype(dtype).itemsize, 2.0)


CASES: dict[str, Callable[..., Case]] = {
    "p2p": _p2p,
    "exchange": _exchange,
    "bcast": _bcast,
    "reduce": _simple("Reduce", rooted=True),
    "allreduce": _simple("Allreduce"),
    "scan": _simple("Scan"),
    "allgather": _blocks("Allgather"),
    "gather": _blocks("Gather"),
    "scatter": _blocks("Scatter"),
    "alltoall": _blocks("Alltoall"),
    "reduce_scatter": _blocks("Reduce_scatter_block"),
}
