"""Allreduce: every rank has a contribution, and gets the result.

All of them: before, `vector` is this rank's contribution; after, it is the result, which is the same to the last bit
on all ranks and from run to run, although floating-point sums depend on their order: either every element is reduced on
one rank and then copied, or (doubling) all ranks do the same operations on the same operands. Costs are of n bytes.
"""

from __future__ import annotations

from gdcomm.algorithms import allgather, reduce_scatter
from gdcomm.algorithms.link import Link, Vector
from gdcomm.algorithms.parts import balanced, edges_of, fold, power_below, unfold
from gdcomm.algorithms.steps import Steps

__all__ = ["circulant", "doubling", "rabenseifner", "ring"]


def doubling(link: Link, vector: Vector) -> Steps:
    """Exchange whole vectors between pairs, pairs of pairs, and so on: recursive doubling. Keeps rank order.

    For short vectors, and operators that do not commute. Costs lg p (alpha + n beta + n gamma) for powers of two, and
    scratch of the vector; for others, the fold comes to it: 2 alpha + 2 n beta + n gamma. In a pair both compute
    `lower op higher`, of the same two vectors. See Thakur, Rabenseifner and Gropp 2005.
    """
    left = yield from fold(link, vector)
    distance = 1
    while left is not None and distance < left.size:
        partner = left.rank ^ distance
        yield from left.transfer_reduce([(vector, partner)], [(vector, partner)], lower=partner < left.rank)
        distance *= 2
    yield from unfold(link, vector)


def rabenseifner(link: Link, vector: Vector) -> Steps:
    """Reduce-scatter by halving, then allgather by doubling. For commutative operators.

    Costs 2 lg p alpha + 2 (p-1)/p n beta + (p-1)/p n gamma for powers of two, and scratch of half the vector; for
    others, the fold comes to it: 2 alpha + 2 n beta + n gamma, and scratch of the vector. See Rabenseifner 2004.
    """
    counts = balanced(len(vector), power_below(link.size))
    left = yield from fold(link, vector)
    if left is not None:
        yield from reduce_scatter.halve(left, vector, edges_of(counts))
        yield from allgather.doubling(left, vector, counts)
    yield from unfold(link, vector)


def circulant(link: Link, vector: Vector) -> Steps:
    """Reduce-scatter and allgather round the ring at halved distances. For commutative operators.

    Any number of ranks does as well as a power of two: 2 ceil(lg p) alpha + 2 (p-1)/p n beta + (p-1)/p n gamma, without
    a fold; scratch of half the vector. See Träff 2024.
    """
    counts = balanced(len(vector), link.size)
    yield from reduce_scatter.circulant(link, vector, counts)
    yield from allgather.bruck(link, vector, counts)


def ring(link: Link, vector: Vector) -> Steps:
    """Pass partial results round the ring, then the results. Meets neighbours only. For commutative operators.

    Costs 2 (p-1) alpha + 2 (p-1)/p n beta + (p-1)/p n gamma, and scratch of n/p. See Patarasuk and Yuan 2009.
    """
    counts = balanced(len(vector), link.size)
    yield from reduce_scatter.ring(link, vector, counts)
    yield from allgather.ring(link, vector, counts)
