"""How a rank takes part in each collective's algorithm: what it brings, what must be the same on all, what it does."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from mpi4py import MPI

from gdcomm.algorithms import allgather
from gdcomm.algorithms.link import Requests
from gdcomm.algorithms.parts import blocks
from gdcomm.algorithms.steps import Steps
from gdcomm.errors import BufferSpecError
from gdcomm.vectors import UNSIZED, Call

if TYPE_CHECKING:
    from gdcomm.collectives import Job

__all__ = ["BLOCKING_FORMS", "NAMES", "WAYS", "Way", "answer", "question"]


class Way(NamedTuple):
    """How a rank takes part in an algorithm.

    Args:
        nbytes: of the message; of an operation in `UNSIZED`, as many as this rank knows of.
        work: what it does, step by step.
        counts: those that must be the same on all ranks, if any; None: each rank knows its own.
    """

    nbytes: int
    work: Callable[[Job], Steps]
    counts: Sequence[int] | None = ()


def question(call: Call | None, way: Way | None) -> tuple[int, ...]:
    """What a rank asks the others with: whether it takes part, a digest of what in, twice, and bytes.

    The answer is the least of each over the ranks.
    """
    if call is None or way is None:
        return 0, 0, 0, 0
    size = 0 if call.operation.name in UNSIZED else way.nbytes
    counts = None if way.counts is None else tuple(way.counts)
    digest = _digest(call.operation.name, call.dtype, call.op, call.root, size, counts)
    return 1, digest, -digest, -way.nbytes


def answer(all_take_part: int, least: int, most: int, nbytes: int) -> int:
    """Bytes of the message if all ranks take part, and in the same thing; else 0."""
    return -nbytes if all_take_part and least == -most else 0


@functools.lru_cache(4096)
def _digest(*what: Any) -> int:
    """A number that is the same on ranks that mean the same."""
    return zlib.crc32(repr([str(part) for part in what]).encode())


def _vectors(call: Call) -> Way | None:
    """Allreduce, Reduce, Scan and Exscan: one vector, reduced where the result is to be."""
    send, recv = (None if found is None else found.vector for found in call.pair() or (None, None))
    vector = send if recv is None else recv
    if vector is None or not call.reducible(vector) or (send is not None and len(send) != len(vector)):
        return None
    if call.operation.name == "Exscan" and call.rank == 0 and send is not None:
        recv, send = send, None  # it is only read, and nothing is written

    def work(job: Job) -> Steps:
        into = job.link.scratch(len(vector), vector) if recv is None else recv
        if send is not None:
            job.link.copy(into, send)
        yield from job.run(into, *([] if call.root is None else [call.root]))

    return Way(vector.nbytes, work)


def _reduce_scatter(call: Call) -> Way | None:
    """Reduce_scatter, Reduce_scatter_block."""
    send, recv = call.pair() or (None, None)
    whole = recv if send is None else send
    if whole is None or recv is None or not call.reducible(whole.vector):
        return None
    vector, result = whole.vector, recv.vector
    by_block = call.operation.name == "Reduce_scatter_block"
    inferred = not by_block and call.arguments[2] is None and send is not None
    counts = whole.counts if by_block else call.receive_counts()
    if counts is None and not inferred:
        return None
    if counts is not None and (sum(counts) != len(vector) or (send is not None and len(result) != counts[call.rank])):
        return None

    def work(job: Job) -> Steps:
        each = counts
        if each is None:
            length, lengths = np.array([len(result)], np.int64), np.empty(call.ranks, np.int64)
            yield Requests([MPI.Intracomm.Iallgather(job.comm, length, lengths)])
            each = lengths.tolist()
        if sum(each) != len(vector):  # on every rank
            raise BufferSpecError(
                f"{call.name}: sendbuf has {len(vector)} elements, and the ranks' recvbufs have {sum(each)} in all"
            )
        mine = job.link.scratch(len(vector), vector)
        job.link.copy(mine, vector)
        yield from job.run(mine, each)
        block = blocks(mine, each)[call.rank]
        job.link.copy(result[: len(block)], block)

    return Way(vector.nbytes, work, counts)


def _bcast(call: Call) -> Way | None:
    vector = call.both()
    return None if vector is None else Way(vector.nbytes, lambda job: job.run(vector, call.root))


def _allgather(call: Call) -> Way | None:
    """Allgather, Allgatherv."""
    send, recv = call.pair() or (None, None)
    if recv is None or (send is not None and len(send.vector) != recv.counts[call.rank]):
        return None
    vector, counts, displs = recv

    def work(job: Job) -> Steps:
        if send is not None:
            job.link.copy(recv.of(call.rank), send.vector)
        packed = allgather.packed(job.link, vector, counts, displs)
        yield from job.run(packed, counts)
        allgather.unpack(job.link, packed, vector, counts, displs)

    return Way(recv.nbytes, work, counts)


def _alltoall(call: Call) -> Way | None:
    """Alltoall, Alltoallv."""
    send, recv = call.pair() or (None, None)
    if send is None or recv is None or send.counts[call.rank] != recv.counts[call.rank]:
        return None
    arguments = send.vector, recv.vector, send.counts, recv.counts, send.displs, recv.displs

    def work(job: Job) -> Steps:
        if call.operation.name in UNSIZED:
            yield from _compare(job.comm, call, send.counts, recv.counts)
        yield from job.run(*arguments)

    return Way(max(send.nbytes, recv.nbytes), work)


def _rooted(call: Call) -> Way | None:
    """Gather, Gatherv, Scatter, Scatterv: a block of each rank, all of them on the root."""
    send, recv = call.pair() or (None, None)
    gathers = call.operation.root_side == "recv"
    mine, whole = (send, recv) if gathers else (recv, send)
    known = whole or mine
    if known is None or (mine and whole and len(mine.vector) != whole.counts[call.rank]):
        return None
    counts, displs = (whole.counts, whole.displs) if whole else (known.counts * call.ranks, None)
    ends = [None if found is None else found.vector for found in (send, recv)]
    unsized = call.operation.name in UNSIZED
    nbytes = known.nbytes if whole or unsized else known.nbytes * call.ranks

    def work(job: Job) -> Steps:
        if unsized:
            with_root = [counts[call.rank] if rank == call.root else 0 for rank in range(call.ranks)]
            with_all = counts if whole else [0] * call.ranks
            yield from _compare(job.comm, call, *((with_root, with_all) if gathers else (with_all, with_root)))
        yield from job.run(*ends, counts, displs, call.root)

    return Way(nbytes, work)


def _compare(comm: MPI.Intracomm, call: Call, sent: Sequence[int], expected: Sequence[int]) -> Steps:
    """Raise, on all ranks, unless every rank sends to every other one what that one expects.

    Args:
        comm: the communicator.
        call: of which a rank knows its own counts only.
        sent, expected: elements that this rank sends to each rank, and expects from each.
    """
    coming = np.empty(call.ranks, np.int64)
    yield Requests([MPI.Intracomm.Ialltoall(comm, np.array(sent, np.int64), coming)])
    wrong = [(rank, *pair) for rank, *pair in zip(range(call.ranks), coming.tolist(), expected, strict=True)
             if pair[0] != pair[1]]  # fmt: skip
    mine, most = np.array([len(wrong)], np.int64), np.empty(1, np.int64)  # mpi4py keeps no hold of them
    yield Requests([MPI.Intracomm.Iallreduce(comm, mine, most, MPI.MAX)])
    if not most[0]:
        return
    which = "counts of other ranks do not match"
    if wrong:
        source, comes, wanted = wrong[0]
        which = f"rank {source} sends {comes} elements to rank {call.rank}, which expects {wanted}"
    raise BufferSpecError(f"{call.name}: {which}; give both the same count")


WAYS: dict[str, Callable[[Call], Way | None]] = {
    "Allreduce": _vectors,
    "Reduce": _vectors,
    "Scan": _vectors,
    "Exscan": _vectors,
    "Reduce_scatter": _reduce_scatter,
    "Reduce_scatter_block": _reduce_scatter,
    "Bcast": _bcast,
    "Allgather": _allgather,
    "Allgatherv": _allgather,
    "Alltoall": _alltoall,
    "Alltoallv": _alltoall,
    "Gather": _rooted,
    "Gatherv": _rooted,
    "Scatter": _rooted,
    "Scatterv": _rooted,
}
NAMES = {name: name.lower() for name in WAYS} | {"Allgatherv": "allgather", "Reduce_scatter_block": "reduce_scatter"}
BLOCKING_FORMS = {f"I{name[0].lower()}{name[1:]}": name for name in WAYS}  # of nonblocking operations
