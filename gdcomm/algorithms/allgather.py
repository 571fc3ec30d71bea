"""Allgather: every rank has a block, and gets those of all. Moves only.

All of them: before, block `rank` of `vector` is in place; after, every block is. `counts` are the same on all
ranks, and any may be 0. `displs` is where each block begins, in elements, and may differ from rank to rank; without
it blocks lie one after another. Costs are of n bytes in all.
"""

from __future__ import annotations

from collections.abc import Sequence

from gdcomm.algorithms.link import Link, Vector
from gdcomm.algorithms.parts import around, blocks, edges_of, halves
from gdcomm.algorithms.steps import Steps

__all__ = ["bruck", "doubling", "packed", "ring", "unpack"]


def ring(link: Link, vector: Vector, counts: Sequence[int], displs: Sequence[int] | None = None) -> Steps:
    """Pass blocks on to the next rank. It meets neighbours only.

    Costs (p-1) alpha + (p-1)/p n beta. See Thakur, Rabenseifner and Gropp 2005.
    """
    rank, ranks = link.rank, link.size
    block = blocks(vector, counts, displs)
    for step in range(ranks - 1):
        yield link.exchange(block[rank - step], (rank + 1) % ranks, block[rank - step - 1], (rank - 1) % ranks)


def doubling(link: Link, vector: Vector, counts: Sequence[int], displs: Sequence[int] | None = None) -> Steps:
    """Double the blocks that each pair of ranks has: recursive doubling, for powers of two of ranks only.

    Costs lg p alpha + (p-1)/p n beta. See Thakur, Rabenseifner and Gropp 2005.
    """
    rank, ranks = link.rank, link.size
    assert ranks & (ranks - 1) == 0, "a power of two of ranks"
    edges, work = edges_of(counts), packed(link, vector, counts, displs)
    distance = 1
    while distance < ranks:
        mine = rank - rank % distance
        other = mine ^ distance
        yield link.exchange(
            work[edges[mine] : edges[mine + distance]], rank ^ distance,
            work[edges[other] : edges[other + distance]], rank ^ distance,
        )  # fmt: skip
        distance *= 2
    unpack(link, work, vector, counts, displs)


def bruck(link: Link, vector: Vector, counts: Sequence[int], displs: Sequence[int] | None = None) -> Steps:
    """Double the blocks that each rank has, from itself on round the ring; for any number of ranks.

    Blocks are received where they belong, so that nothing is turned at the end: a range of blocks that goes round
    travels in two pieces. Costs lg p alpha + (p-1)/p n beta. See Bruck et al. 1997; the distances, which need not
    be powers of two, are those of Träff 2024 (arXiv 2410.14234): this is `reduce_scatter.circulant` in a mirror.
    """
    rank, ranks = link.rank, link.size
    edges, work = edges_of(counts), packed(link, vector, counts, displs)
    for after, before in reversed(halves(ranks)):
        down, up = (rank - before) % ranks, (rank + before) % ranks
        yield link.transfer(
            [(piece, down) for piece in around(work, edges, rank, after - before)],
            [(piece, up) for piece in around(work, edges, up, after - before)],
        )
    unpack(link, work, vector, counts, displs)


def packed(link: Link, vector: Vector, counts: Sequence[int], displs: Sequence[int] | None) -> Vector:
    """The vector itself if its blocks lie one after another, else scratch where they do, with this rank's block."""
    if displs is None or list(displs) == edges_of(counts)[:-1]:
        return vector
    work = link.scratch(sum(counts), vector)
    link.copy(blocks(work, counts)[link.rank], blocks(vector, counts, displs)[link.rank])
    return work


def unpack(link: Link, work: Vector, vector: Vector, counts: Sequence[int], displs: Sequence[int] | None) -> None:
    """Put the blocks of what `packed` gave where they belong."""
    if work is not vector:
        link.copies(list(zip(blocks(vector, counts, displs), blocks(work, counts), strict=True)))
