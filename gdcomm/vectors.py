"""What the buffer arguments of collectives mean: bytes of the whole message, and device arrays as blocks for ranks.

Forms of arguments are mpi4py's, one reading of them for all operations. What is wrong with an argument is not said
here: such a call is left to MPI's way, where the checks are.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from gdcomm import devices
from gdcomm.algorithms import parts
from gdcomm.devices.base import Buffer, Device
from gdcomm.links import DeviceVector
from gdcomm.operations import Operation
from gdcomm.reductions import name_of
from gdcomm.transports.base import is_in_place, split_spec

__all__ = ["UNSIZED", "Blocks", "Call", "known", "message"]

# Operations of which a rank knows the counts that are its own, and not the size of the whole message.
UNSIZED = frozenset({"Alltoallv", "Gatherv", "Scatterv"})
# Buffers that hold a block for each rank; other ones hold one vector.
_SHARED = {
    "Allgather": ("recv",),
    "Alltoall": ("send", "recv"),
    "Gather": ("recv",),
    "Scatter": ("send",),
    "Reduce_scatter_block": ("send",),
}
_NOBODY = -1  # a root that is no rank
# What reading a bad argument may raise.
_ODD = (TypeError, ValueError, KeyError, BufferError, OverflowError, MPI.Exception)


@functools.cache
def _shared(operation: str, side: str, in_place: bool) -> bool:
    """Whether the buffer holds a block for each rank, and counts are those of a block."""
    if operation == "Reduce_scatter_block" and in_place:
        return True
    return side in _SHARED.get(operation.removesuffix("v"), ())


# -- bytes ---------------------------------------------------------------------------------------


def message(name: str, arguments: Sequence[Any], ranks: int) -> int:
    """Bytes of the whole message, the same on all ranks whatever their buffers are. 0 if the arguments are wrong.

    Args:
        name: of the operation, not of one that is `UNSIZED`.
        arguments: of the method, all of them.
        ranks: of the communicator.
    """
    try:
        return _MESSAGES[name](ranks, *arguments)
    except _ODD:
        return 0


def known(operation: Operation, arguments: Sequence[Any], ranks: int) -> int:
    """Bytes that a rank knows of, of the message of an operation that is `UNSIZED`; 0 if the arguments are wrong."""
    try:
        return max(
            _nbytes(arguments[getattr(operation, side)], ranks if shared else 1, shared)
            for side in ("send", "recv")
            for shared in [_shared(operation.name, side, False)]
        )
    except _ODD:
        return 0


def _nbytes(spec: Any, blocks: int = 1, vector: bool = False) -> int:
    """Bytes that a buffer argument means; a single count is that of one of `blocks` blocks."""
    if type(spec) is np.ndarray:
        return spec.nbytes
    array, rest = split_spec(spec)
    length, unit = _measure(array)
    if not rest:
        return length
    counts, displs, datatype = _parts(rest, vector)
    extent = unit
    if datatype is not None:
        unit, extent = datatype.Get_size(), max(datatype.Get_extent()[1], 1)
    if counts is None:
        skipped = 0 if vector or displs is None else operator.index(displs)
        return (length // extent - skipped) * unit
    if _several(counts):
        return sum(map(operator.index, counts)) * unit
    return operator.index(counts) * blocks * unit


def _vector(ranks: int, send: Any, recv: Any, *_: Any) -> int:
    return _nbytes(recv if is_in_place(send) else send)


def _gathered(ranks: int, send: Any, recv: Any, *_: Any) -> int:
    return _nbytes(recv, ranks) if is_in_place(send) else _nbytes(send) * ranks


def _scattered(ranks: int, send: Any, recv: Any, *_: Any) -> int:
    return _nbytes(send, ranks) if is_in_place(recv) else _nbytes(recv) * ranks


# What a rank has that is as large on all others, be it the whole message or its own block.
_MESSAGES: dict[str, Callable[..., int]] = {
    "Allreduce": _vector,
    "Reduce": _vector,
    "Scan": _vector,
    "Exscan": _vector,
    "Reduce_scatter": _vector,
    "Reduce_scatter_block": lambda n, send, recv, *_: (_gathered if is_in_place(send) else _scattered)(n, send, recv),
    "Bcast": lambda n, buf, *_: _nbytes(buf),
    "Gather": _gathered,
    "Scatter": _scattered,
    "Allgather": _gathered,
    "Allgatherv": lambda n, send, recv: _nbytes(send) * n if recv is None else _nbytes(recv, n, vector=True),
    "Alltoall": lambda n, send, recv: _nbytes(recv if is_in_place(send) else send, n),
}


def _parts(rest: tuple[Any, ...], vector: bool) -> tuple[Any, Any, MPI.Datatype | None]:
    """Counts, displacements and datatype of a buffer argument, as mpi4py reads it; None where it does not say.

    Args:
        rest: what follows the array, not empty.
        vector: whether there may be one count for each rank.
    """
    if len(rest) > 3:
        raise ValueError("more than an array, counts, displacements and a datatype")
    counts, displs, datatype = rest if len(rest) == 3 else (rest[0], None, rest[1] if len(rest) == 2 else None)
    if len(rest) == 1 and isinstance(counts, (MPI.Datatype, str)):
        counts, datatype = None, counts
    elif len(rest) < 3 and isinstance(counts, tuple if vector else (tuple, list)):
        counts, displs = counts
    if isinstance(datatype, str):
        datatype = MPI.Datatype.fromcode(datatype)
    return counts, displs, datatype


def _measure(array: Any) -> tuple[int, int]:
    """Bytes of an array, and of an element."""
    nbytes, itemsize = getattr(array, "nbytes", None), getattr(array, "itemsize", None)
    if nbytes is not None and itemsize is not None:
        return int(nbytes), int(itemsize)
    if array is None or type(array) is type(MPI.BOTTOM):
        return 0, 1
    buffer = devices.find(array)
    if buffer is not None:
        return buffer.nbytes, buffer.dtype.itemsize
    memory = MPI.buffer.frombuffer(array, readonly=True)  # whatever mpi4py takes
    return memory.nbytes, memory.itemsize


# -- blocks --------------------------------------------------------------------------------------


class Blocks(NamedTuple):
    """A device array as blocks, one for each rank, or as a single one.

    Args:
        vector: holds them.
        counts: elements of each.
        displs: where each begins; None if they lie one after another, from the vector's start to its end.
    """

    vector: DeviceVector
    counts: list[int]
    displs: list[int] | None = None

    def of(self, rank: int) -> DeviceVector:
        """A rank's block."""
        start = sum(self.counts[:rank]) if self.displs is None else self.displs[rank]
        return self.vector[start : start + self.counts[rank]]

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(self.counts) * self.vector.dtype.itemsize


class Call:
    """One call of a collective, its device arrays seen as blocks.

    Args:
        operation: what is called.
        arguments: of the method, all of them.
        stream: the user's stream or None.
        ranks, rank: of the communicator.
        name: of the method; None: the operation's.
    """

    def __init__(
        self,
        operation: Operation,
        arguments: tuple[Any, ...],
        stream: Any,
        ranks: int,
        rank: int,
        name: str | None = None,
    ) -> None:
        self.name = operation.name if name is None else name
        self.operation, self.arguments, self.ranks, self.rank = operation, arguments, ranks, rank
        self.root = _rank(arguments[operation.root], ranks) if operation.root >= 0 else None
        self.op = name_of(arguments[operation.op]) if operation.op >= 0 else ""
        self.dtype: np.dtype[Any] | None = None  # of the arrays that were found
        self.device: Device | None = None
        self._stream = stream
        self._pair: tuple[Buffer, Buffer] | None = None  # sent and received, if on different streams

    def both(self) -> DeviceVector | None:
        """The array that the root sends and the others receive."""
        blocks = self._find("both", self.rank != self.root)
        return None if blocks is None else blocks.vector

    def pair(self) -> tuple[Blocks | None, Blocks | None] | None:
        """What is sent and where it is received: of one dtype, on one stream, in memory that they do not share.

        Returns:
            Either is None where it is in place, or the root's alone. None if they are not arrays that go by algorithms.
        """
        root_side = self.operation.root_side
        absent = root_side if self.rank != self.root else ""
        replaceable = "" if absent else "recv" if root_side == "send" else "send"
        in_place = bool(replaceable) and is_in_place(self._argument(replaceable))
        missing = replaceable if in_place else absent
        send = None if missing == "send" else self._find("send", False, in_place)
        if send is None and missing != "send":
            return None
        recv = None if missing == "recv" else self._find("recv", True, in_place)
        if recv is None and missing != "recv":
            return None
        if send is not None and recv is not None:
            mine, other = send.vector, recv.vector
            if mine.dtype != other.dtype or self._mixed(mine, other):
                return None
            if mine.array.stream != other.array.stream:
                send = send._replace(vector=self._ordered(mine, other))
        return send, recv

    def receive_counts(self) -> list[int] | None:
        """The argument of Reduce_scatter, if it is as many numbers as there are ranks."""
        try:
            counts = _numbers(self.arguments[2], self.ranks)
        except _ODD:
            return None
        return counts if min(counts) >= 0 else None

    def reducible(self, vector: DeviceVector) -> bool:
        """Whether the GPU has a kernel for the operator and these elements."""
        aligned = not vector.ptr % vector.dtype.alignment
        return aligned and bool(self.op) and vector.array.device.reduces(self.op, vector.dtype)

    def finish(self) -> None:
        """Let later work on the sent array's stream wait for the collective."""
        if self._pair is not None:
            send, recv = self._pair
            send.device.wait_event(send.stream, recv.device.record(recv.stream))

    def _argument(self, side: str) -> Any:
        return self.arguments[getattr(self.operation, side)]

    def _find(self, side: str, writes: bool, in_place: bool = False) -> Blocks | None:
        """The device array of an argument; None if it is none, has gaps, or is not to be cut as the argument says."""
        array, rest = split_spec(self._argument(side))
        buffer = None if array is None or isinstance(array, np.ndarray) else devices.find(array, self._stream)
        if buffer is None or buffer.strides is not None or not buffer.dtype.itemsize or self.root == _NOBODY:
            return None
        if writes:
            buffer.require_writable(self.name, "buf" if side == "both" else "recvbuf")
        self.dtype, self.device = buffer.dtype, buffer.device
        vector = DeviceVector(buffer)
        shared = _shared(self.operation.name, side, in_place)
        number = self.ranks if shared else 1
        if not rest and vector.count % number == 0:
            return Blocks(vector, [vector.count // number] * number)
        varying = shared and self.operation.name.endswith("v")
        try:
            return _cut(vector, rest, number, varying, writes)
        except _ODD:
            return None

    def _mixed(self, send: DeviceVector, recv: DeviceVector) -> bool:
        """Whether the arrays share memory in a way that matters. Reductions are in place where they begin alike."""
        if self.operation.group == "reduce" and send.ptr == recv.ptr:
            return False
        return send.ptr < recv.ptr + recv.nbytes and recv.ptr < send.ptr + send.nbytes

    def _ordered(self, send: DeviceVector, recv: DeviceVector) -> DeviceVector:
        """The sent vector on the stream of the received one."""
        mine, other = self._pair = send.array, recv.array
        other.device.wait_event(other.stream, mine.device.record(mine.stream))
        return DeviceVector(mine._replace(stream=other.stream), send.ptr, send.count)


def _rank(given: Any, ranks: int) -> int:
    try:
        return range(ranks)[operator.index(given)] if operator.index(given) >= 0 else _NOBODY
    except (TypeError, IndexError):
        return _NOBODY


def _cut(vector: DeviceVector, rest: tuple[Any, ...], number: int, varying: bool, writes: bool) -> Blocks | None:
    """Cut an array as what follows it says; None if that does not fit, or names another datatype than the array's."""
    counts, displs, datatype = _parts(rest, varying) if rest else (None, None, None)
    if datatype is not None and np.dtype(datatype.typestr) != vector.dtype:
        return None
    if varying:
        counts = parts.balanced(len(vector), number) if counts is None else _each(counts, number)
        displs = parts.edges_of(counts)[:-1] if displs is None else _each(displs, number, stride=True)
    else:
        first = 0 if displs is None else operator.index(displs)
        each, left = (operator.index(counts), 0) if counts is not None else divmod(len(vector) - first, number)
        if left:
            return None
        counts, displs = [each] * number, [first + i * each for i in range(number)]
    spans = [(start, start + count) for start, count in zip(displs, counts, strict=True) if count]
    if any(count < 0 for count in counts) or any(start < 0 or end > len(vector) for start, end in spans):
        return None
    if all(end == start for (_, end), (start, _) in pairwise(spans)):
        return Blocks(vector[spans[0][0] : spans[-1][1]] if spans else vector[:0], counts)
    if writes and any(end > start for (_, end), (start, _) in pairwise(sorted(spans))):
        return None
    return Blocks(vector, counts, displs)


def _each(given: Any, ranks: int, stride: bool = False) -> list[int]:
    """A number for each rank; where a single one is given, that or its multiples."""
    if _several(given):
        return _numbers(given, ranks)
    number = operator.index(given)
    return [number * i for i in range(ranks)] if stride else [number] * ranks


def _several(given: Any) -> bool:
    return isinstance(given, (list, tuple)) or np.ndim(given) > 0


def _numbers(given: Any, ranks: int) -> list[int]:
    made = [operator.index(number) for number in given]
    if len(made) != ranks:
        raise ValueError(f"{len(made)} numbers for {ranks} ranks")
    return made
