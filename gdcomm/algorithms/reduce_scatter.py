"""Reduce-scatter: every rank has a contribution to the whole vector, and gets its block of the result.

All of them: before, `vector` is this rank's contribution; after, block `rank` of it is the result, and the rest means
nothing. `counts` are elements of each rank's block, one after another, the same on all ranks; any may be 0. Every
element is reduced in one order, on one rank, so that results do not differ from run to run. Costs are of n bytes
in all.
"""

from __future__ import annotations

from collections.abc import Sequence

from gdcomm.algorithms import reduce, scatter
from gdcomm.algorithms.link import Link, Vector
from gdcomm.algorithms.parts import around, blocks, edges_of, fold, halves, power_below, unfold
from gdcomm.algorithms.steps import Steps

__all__ = ["circulant", "halving", "pairwise", "ring", "tree"]


def ring(link: Link, vector: Vector, counts: Sequence[int]) -> Steps:
    """Pass partial results on to the next rank. It meets neighbours only. For commutative operators.

    Costs (p-1) alpha + (p-1)/p n (beta + gamma), and scratch of one block. See Patarasuk and Yuan 2009.
    """
    rank, ranks = link.rank, link.size
    block, after, before = blocks(vector, counts), (rank + 1) % ranks, (rank - 1) % ranks
    for step in range(1, ranks):
        yield from link.transfer_reduce([(block[rank - step], after)], [(block[rank - step - 1], before)], lower=True)


def halving(link: Link, vector: Vector, counts: Sequence[int]) -> Steps:
    """Halve the blocks that each pair of ranks is to reduce: recursive halving. For commutative operators.

    Costs lg p alpha + (p-1)/p n (beta + gamma) for powers of two, and scratch of half the vector; for others, the fold
    comes to it. See Thakur, Rabenseifner and Gropp 2005.
    """
    pairs = link.size - power_below(link.size)
    edges = edges_of(counts)
    left = yield from fold(link, vector)
    if left is not None:  # a rank that was folded into has the blocks of both
        yield from halve(left, vector, [*edges[: 2 * pairs : 2], *edges[2 * pairs :]])
    odd = min(link.rank | 1, link.size - 1)
    yield from unfold(link, vector[edges[odd] : edges[odd + 1]])


def halve(link: Link, vector: Vector, edges: Sequence[int]) -> Steps:
    """Do recursive halving on a power of two of ranks, over blocks with these edges."""
    first, last = 0, link.size
    while last - first > 1:
        middle = (first + last) // 2
        partner = link.rank ^ (last - middle)
        below, above = vector[edges[first] : edges[middle]], vector[edges[middle] : edges[last]]
        if partner > link.rank:
            last = middle
            yield from link.transfer_reduce([(above, partner)], [(below, partner)], lower=False)
        else:
            first = middle
            yield from link.transfer_reduce([(below, partner)], [(above, partner)], lower=True)


def circulant(link: Link, vector: Vector, counts: Sequence[int]) -> Steps:
    """Halve the blocks that each rank is to reduce, counted from its own on round the ring. For commutative operators.

    Any number of ranks does as well as a power of two: ceil(lg p) alpha + (p-1)/p n (beta + gamma), without a fold;
    scratch of half the blocks. Partners are at fixed distances instead of across a bit; a range of blocks that goes
    round travels in two pieces. See Träff 2024, "Optimal, non-pipelined reduce-scatter and allreduce algorithms".
    """
    rank, ranks = link.rank, link.size
    edges, steps = edges_of(counts), halves(ranks)
    for before, after in steps:
        up, down = (rank + after) % ranks, (rank - after) % ranks
        yield from link.transfer_reduce(
            [(piece, up) for piece in around(vector, edges, up, before - after)],
            [(piece, down) for piece in around(vector, edges, rank, before - after)],
            lower=True,
        )


def pairwise(link: Link, vector: Vector, counts: Sequence[int]) -> Steps:
    """Send every rank its block, and reduce what came in rank order: for operators that do not commute.

    Costs (p-1) alpha + (p-1)/p n beta + (p-1)/p n gamma, and scratch of p blocks of this rank's count.
    """
    rank, ranks = link.rank, link.size
    block, mine = blocks(vector, counts), counts[rank]
    incoming = blocks(link.scratch(mine * ranks, vector), [mine] * ranks)
    for step in range(1, ranks):
        up, down = (rank + step) % ranks, (rank - step) % ranks
        yield link.exchange(block[up], up, incoming[down], down)
    for lower in reversed(range(rank)):
        link.reduce(block[rank], lower=incoming[lower])
    for higher in range(rank + 1, ranks):
        link.reduce(block[rank], higher=incoming[higher])


def tree(link: Link, vector: Vector, counts: Sequence[int]) -> Steps:
    """Reduce to rank 0 and scatter, both binomial: short vectors, operators that need not commute.

    Costs 2 lg p alpha + lg p n (beta + gamma) + (p-1)/p n beta, and scratch of the vector.
    """
    yield from reduce.binomial(link, vector, 0)
    yield from scatter.in_place(link, vector, counts, 0)
