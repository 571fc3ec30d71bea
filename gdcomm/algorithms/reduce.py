"""Reduce: every rank has a contribution, and the root gets the result.

All of them: before, `vector` is this rank's contribution; after, it is the result on the root, and means nothing on
others. Every element is reduced in one order, on one rank. Costs are of n bytes.
"""

from __future__ import annotations

from gdcomm.algorithms import gather, reduce_scatter
from gdcomm.algorithms.bcast import segments
from gdcomm.algorithms.link import Link, Vector
from gdcomm.algorithms.parts import balanced, blocks, tree
from gdcomm.algorithms.steps import Steps

__all__ = ["binomial", "chain", "rabenseifner"]


def binomial(link: Link, vector: Vector, root: int = 0) -> Steps:
    """Reduce whole vectors up a binomial tree: short vectors, operators that need not commute.

    Branches of the tree are neighbouring ranks, whatever the root, so that rank order is kept without another
    message. Costs lg p (alpha + n beta + n gamma), and scratch of the vector except on leaves.
    """
    place = tree(link.rank, link.size, root)
    for child, _, _ in place.children:
        yield from link.transfer_reduce([], [(vector, child)], lower=child < link.rank)
    if place.parent is not None:
        yield link.exchange(vector, place.parent, None, place.parent)


def rabenseifner(link: Link, vector: Vector, root: int = 0) -> Steps:
    """Reduce-scatter, then gather the blocks at the root: long vectors. For commutative operators.

    Costs 2 lg p alpha + 2 (p-1)/p n beta + (p-1)/p n gamma, and scratch of half the vector. See Rabenseifner 2004;
    where ranks are no power of two, a circulant reduce-scatter saves his fold.
    """
    counts = balanced(len(vector), link.size)
    scatter = reduce_scatter.circulant if link.size & (link.size - 1) else reduce_scatter.halving
    yield from scatter(link, vector, counts)
    yield from gather.in_place(link, vector, counts, root)


def chain(link: Link, vector: Vector, root: int = 0) -> Steps:
    """Pass segments on from rank to rank, down to the root, each adding its own: the longest vectors.

    `bcast.chain` turned round, for commutative operators. Costs (p - 2 + k) (alpha + n/k beta + n/k gamma) for k
    segments, and scratch of one; no rank sends more than n.
    """
    rank, ranks = link.rank, link.size
    before, after = (rank - 1) % ranks, (rank + 1) % ranks
    pieces = blocks(vector, balanced(len(vector), segments(vector.nbytes, ranks)))
    for coming, going in zip([*pieces, None], [None, *pieces], strict=True):
        yield from link.transfer_reduce(
            [] if going is None or rank == root else [(going, before)],
            [] if coming is None or after == root else [(coming, after)],
            lower=False,
        )
