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
    block, scratch = blocks(vector, counts), link.scratch(max(counts), vector)
    for step in range(1, ranks):
        into = block[rank - step - 1]
        incoming = scratch[: len(into)]
        yield link.exchange(block[rank - step], (rank + 1) % ranks, incoming, (rank - 1) % ranks)
        link.reduce(into, lower=incoming)


def halving(link: Link, vector: Vector, counts: Sequence[int]) -> Steps:
    """Halve the blocks that each pair of ranks is to reduce: recursive halving. For commutative operators.

    Costs lg p alpha + (p-1)/p n (beta + gamma) for powers of two, and scratch of half the vector; for others, the fold
    comes to it. See Thakur, Rabenseifner and Gropp 2005.
    """
    pairs = link.size - power_below(link.size)
    edges, scratch = edges_of(counts), link.scratch(_halving_scratch(counts), vector)
    left = yield from fold(link, vector, scratch)
    if left is not None:  # a rank that was folded into has the blocks of both
        yield from halve(left, vector, [*edges[: 2 * pairs : 2], *edges[2 * pairs :]], scratch)
    odd = min(link.rank | 1, link.size - 1)
    yield from unfold(link, vector[edges[odd] : edges[odd + 1]])


def halve(link: Link, vector: Vector, edges: Sequence[int], scratch: Vector) -> Steps:
    """Do recursive halving on a power of two of ranks, over blocks with these edges."""
    first, last = 0, link.size
    while last - first > 1:
        middle = (first + last) // 2
        partner = link.rank ^ (last - middle)
        below, above = vector[edges[first] : edges[middle]], vector[edges[middle] : edges[last]]
        if partner > link.rank:
            incoming, last = scratch[: len(below)], middle
            yield link.exchange(above, partner, incoming, partner)
            link.reduce(below, higher=incoming)
        else:
            incoming, first = scratch[: len(above)], middle
            yield link.exchange(below, partner, incoming, partner)
            link.reduce(above, lower=incoming)


def _halving_scratch(counts: Sequence[int]) -> int:
    """The most elements received at once: all in a fold, else the larger half."""
    half = power_below(len(counts)) // 2
    if len(counts) > 2 * half:
        return sum(counts) if half else 0
    return max(sum(counts[:half]), sum(counts[half:]))


def circulant(link: Link, vector: Vector, counts: Sequence[int]) -> Steps:
    """Halve the blocks that each rank is to reduce, counted from its own on round the ring. For commutative operators.

    Any number of ranks does as well as a power of two: ceil(lg p) alpha + (p-1)/p n (beta + gamma), without a fold;
    scratch of half the blocks. Partners are at fixed distances instead of across a bit; a range of blocks that goes
    round travels in two pieces. See Träff 2024, "Optimal, non-pipelined reduce-scatter and allreduce algorithms".
    """
    rank, ranks = link.rank, link.size
    edges, steps = edges_of(counts), halves(ranks)
    scratch = link.scratch(max((_length(edges, rank, before - after) for before, after in steps), default=0), vector)
    for before, after in steps:
        up, down = (rank + after) % ranks, (rank - after) % ranks
        kept = around(vector, edges, rank, before - after)
        incoming = blocks(scratch, [len(piece) for piece in kept])
        yield link.transfer(
            [(piece, up) for piece in around(vector, edges, up, before - after)],
            [(piece, down) for piece in incoming],
        )
        for into, piece in zip(kept, incoming, strict=True):
            link.reduce(into, lower=piece)


def _length(edges: Sequence[int], first: int, number: int) -> int:
    return sum(len(piece) for piece in around(range(edges[-1]), edges, first, number))


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
