"""Alltoall: every rank has a block for every rank. Moves only; `send` is not changed.

Before, block j of `send` is for rank j; after, block j of `recv` is from rank j. Counts and displacements are in
elements; without displacements, blocks lie one after another. Costs are of n bytes that each rank sends in all, its
own block included.
"""

from __future__ import annotations

from collections.abc import Sequence

from gdcomm.algorithms.link import Link, Vector
from gdcomm.algorithms.parts import blocks, rounds
from gdcomm.algorithms.steps import Steps

__all__ = ["bruck", "pairwise"]


def pairwise(
    link: Link,
    send: Vector,
    recv: Vector,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    send_displs: Sequence[int] | None = None,
    recv_displs: Sequence[int] | None = None,
) -> Steps:
    """Exchange a block with one rank up and one rank down, ever further away: long blocks, of any counts, also 0.

    Costs (p-1) alpha + (p-1)/p n beta. See Thakur, Rabenseifner and Gropp 2005.
    """
    rank, ranks = link.rank, link.size
    outgoing, incoming = blocks(send, send_counts, send_displs), blocks(recv, recv_counts, recv_displs)
    link.copy(incoming[rank], outgoing[rank])
    for distance in range(1, ranks):
        up, down = (rank + distance) % ranks, (rank - distance) % ranks
        yield link.exchange(outgoing[up], up, incoming[down], down)


def bruck(
    link: Link,
    send: Vector,
    recv: Vector,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    send_displs: Sequence[int] | None = None,
    recv_displs: Sequence[int] | None = None,
) -> Steps:
    """Let blocks travel by the bits of their distance, many in a message: short blocks, all counts the same.

    Costs lg p alpha + lg p n/2 beta, and scratch of (lg p + 1) n/2. Blocks are neither turned at the start nor sorted
    between rounds: they stay where they arrived until they are packed again, one copy each time. See Bruck et al. 1997;
    Träff, Rougier and Hunold 2014.
    """
    rank, ranks, block = link.rank, link.size, send_counts[0]
    outgoing, incoming = blocks(send, send_counts, send_displs), blocks(recv, recv_counts, recv_displs)
    room = block * (ranks // 2)
    packed, *arrivals = blocks(link.scratch((rounds(ranks) + 1) * room, send), [room] * (rounds(ranks) + 1))
    where = [outgoing[(rank + distance) % ranks] for distance in range(ranks)]  # now, of the block going that far
    for bit, arrived in enumerate(arrivals):
        step = 1 << bit
        going = [distance for distance in range(ranks) if distance & step]
        out, into = packed[: block * len(going)], arrived[: block * len(going)]
        counts = [block] * len(going)
        link.copies(list(zip(blocks(out, counts), [where[distance] for distance in going], strict=True)))
        yield link.exchange(out, (rank + step) % ranks, into, (rank - step) % ranks)
        for distance, piece in zip(going, blocks(into, counts), strict=True):
            where[distance] = piece
    link.copies([(incoming[(rank - distance) % ranks], piece) for distance, piece in enumerate(where)])
