"""What a collective algorithm is written over: vectors, and a few verbs between ranks and on memory.

A *vector* is contiguous elements of one dtype: a 1-d NumPy array, or device memory with the same slicing
(`v[a:b]`, `len`, `dtype`, `nbytes`). An algorithm neither knows which, nor how they travel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from gdcomm.algorithms.steps import Flight, Steps

__all__ = ["LANES", "HostLink", "Link", "Requests", "Sublink", "Vector"]

LANES = 16  # links of the same ranks that are apart
Vector = Any


class Link(ABC):
    """The ranks of a communicator, and one operator. All verbs are in order, each after those before it.

    Messages are only begun: an algorithm yields the flight before it goes on (see `steps`).

    Args:
        rank, size: this rank, and how many there are.
    """

    rank: int
    size: int
    _landing: Vector | None = None  # where messages arrive that are reduced then

    def exchange(self, send: Vector | None, dest: int, recv: Vector | None, source: int) -> Flight:
        """Send one vector and receive another at the same time; None or an empty one: only the other half."""
        return self.transfer([] if send is None else [(send, dest)], [] if recv is None else [(recv, source)])

    @abstractmethod
    def transfer(self, sends: Sequence[tuple[Vector, int]], recvs: Sequence[tuple[Vector, int]]) -> Flight:
        """Send and receive vectors at the same time, each to or from a rank. Empty ones do not travel.

        Between two ranks, vectors arrive in the order in which they are listed and sent.
        """

    def transfer_reduce(
        self, sends: Sequence[tuple[Vector, int]], intos: Sequence[tuple[Vector, int]], *, lower: bool
    ) -> Steps:
        """Send vectors, and reduce others with what comes from ranks at the same time.

        A vector may be sent to the rank that it is reduced with, if it is all that is sent: as it was before.

        Args:
            sends: each `(vector, dest)`.
            intos: each `(into, source)`.
            lower: whether what comes is the contribution of lower ranks: `coming op into`, else `into op coming`.
        """
        incoming, start = [], 0
        count = sum(len(into) for into, _ in intos)
        landing: Vector = self._landed(count, intos[0][0]) if intos else None
        for into, source in intos:
            incoming.append((landing[start : start + len(into)], source))
            start += len(into)
        yield self.transfer(sends, incoming)
        for (into, _), (piece, _) in zip(intos, incoming, strict=True):
            if lower:
                self.reduce(into, lower=piece)
            else:
                self.reduce(into, higher=piece)

    def _landed(self, count: int, like: Vector) -> Vector:
        """Memory for so many elements; the same one while it is long enough, since messages come one after another."""
        landing = self._landing
        if landing is None or len(landing) < count or landing.dtype != like.dtype:
            landing = self._landing = self.scratch(count, like)
        return landing

    @abstractmethod
    def apart(self, lane: int) -> Link:
        """A link of the same ranks, below `LANES`: no message of it is taken for one of another lane."""

    @abstractmethod
    def reduce(self, into: Vector, lower: Vector | None = None, higher: Vector | None = None) -> None:
        """`into = lower op into`, or `into = into op higher`: the contribution of lower ranks comes first."""

    @abstractmethod
    def copy(self, to: Vector, origin: Vector) -> None:
        """Copy between vectors of this rank that do not overlap (or are the same)."""

    def copies(self, pairs: Sequence[tuple[Vector, Vector]]) -> None:
        """Make many copies, each `(to, origin)`; a link that can make them in one go does."""
        for to, origin in pairs:
            self.copy(to, origin)

    @abstractmethod
    def scratch(self, count: int, like: Vector) -> Vector:
        """Memory for `count` elements of the dtype of `like`, uninitialised; it lives as long as the link."""


class Sublink(Link):
    """Some ranks of a link, renumbered; this rank is one of them. It has no memory and no messages of its own.

    Args:
        link: the link.
        ranks: rank i here is `ranks[i]` there.
    """

    def __init__(self, link: Link, ranks: Sequence[int]) -> None:
        self._link, self._ranks = link, ranks
        self.rank, self.size = ranks.index(link.rank), len(ranks)

    def transfer(self, sends: Sequence[tuple[Vector, int]], recvs: Sequence[tuple[Vector, int]]) -> Flight:
        ranks = self._ranks
        return self._link.transfer([(v, ranks[dest]) for v, dest in sends], [(v, ranks[source]) for v, source in recvs])

    def transfer_reduce(
        self, sends: Sequence[tuple[Vector, int]], intos: Sequence[tuple[Vector, int]], *, lower: bool
    ) -> Steps:
        ranks = self._ranks
        return self._link.transfer_reduce(
            [(v, ranks[dest]) for v, dest in sends], [(v, ranks[source]) for v, source in intos], lower=lower
        )

    def apart(self, lane: int) -> Sublink:
        return Sublink(self._link.apart(lane), self._ranks)

    def reduce(self, into: Vector, lower: Vector | None = None, higher: Vector | None = None) -> None:
        self._link.reduce(into, lower, higher)

    def copy(self, to: Vector, origin: Vector) -> None:
        self._link.copy(to, origin)

    def copies(self, pairs: Sequence[tuple[Vector, Vector]]) -> None:
        self._link.copies(pairs)

    def scratch(self, count: int, like: Vector) -> Vector:
        return self._link.scratch(count, like)


class Requests(Flight):
    """MPI's own requests.

    Args:
        requests: mpi4py's.
    """

    def __init__(self, requests: list[MPI.Request]) -> None:
        self._requests = requests

    def test(self) -> bool:
        return MPI.Request.Testall(self._requests)

    def wait(self) -> None:
        MPI.Request.Waitall(self._requests)


class HostLink(Link):
    """NumPy vectors over plain MPI messages.

    Args:
        comm: nobody else's.
        op: the operator: a NumPy function of two arrays and `out`.
        lane: the tag of its messages.
    """

    def __init__(self, comm: MPI.Intracomm, op: np.ufunc | None = None, lane: int = 0) -> None:
        self._comm, self._op, self._lane = comm, op, lane
        self.rank, self.size = comm.Get_rank(), comm.Get_size()

    def transfer(self, sends: Sequence[tuple[Vector, int]], recvs: Sequence[tuple[Vector, int]]) -> Flight:
        requests = [self._comm.Irecv([v.view(np.uint8), MPI.BYTE], source, self._lane) for v, source in recvs if len(v)]
        requests += [self._comm.Isend([v.view(np.uint8), MPI.BYTE], dest, self._lane) for v, dest in sends if len(v)]
        return Requests(requests)

    def apart(self, lane: int) -> HostLink:
        return HostLink(self._comm, self._op, lane)

    def reduce(self, into: Vector, lower: Vector | None = None, higher: Vector | None = None) -> None:
        assert self._op is not None
        if higher is None:
            self._op(lower, into, out=into)
        else:
            self._op(into, higher, out=into)

    def copy(self, to: Vector, origin: Vector) -> None:
        to[:] = origin

    def scratch(self, count: int, like: Vector) -> Vector:
        return np.empty(count, like.dtype)
