"""Broadcast: every rank gets the root's vector. Moves only.

All of them: before, `vector` of the root is the data; after, that of every rank is. Costs are of n bytes.
"""

from __future__ import annotations

from math import sqrt

from gdcomm.algorithms import allgather, scatter
from gdcomm.algorithms.link import Link, Vector
from gdcomm.algorithms.parts import balanced, blocks, tree
from gdcomm.algorithms.steps import Steps

__all__ = ["binomial", "chain", "scatter_allgather", "segments"]

START_NBYTES = 800_000  # what a link carries in the time it takes to begin a message: alpha / beta


def binomial(link: Link, vector: Vector, root: int = 0) -> Steps:
    """Send to ever nearer branches of a binomial tree, the largest first: short vectors.

    Costs lg p (alpha + n beta).
    """
    place = tree(link.rank, link.size, root)
    if place.parent is not None:
        yield link.exchange(None, place.parent, vector, place.parent)
    yield link.transfer([(vector, child) for child, _, _ in reversed(place.children)], [])


def scatter_allgather(link: Link, vector: Vector, root: int = 0) -> Steps:
    """Scatter the vector over the ranks, which then gather all of it: long vectors.

    Costs 2 lg p alpha + 2 (p-1)/p n beta. See Barnett et al. (van de Geijn) 1994; Thakur et al. 2005.
    """
    counts = balanced(len(vector), link.size)
    yield from scatter.in_place(link, vector, counts, root)
    yield from allgather.bruck(link, vector, counts)


def chain(link: Link, vector: Vector, root: int = 0, segment: int | None = None) -> Steps:
    """Pass segments on from rank to rank, each sending one while it receives the next: the longest vectors.

    Costs (p - 2 + k) (alpha + n/k beta) for k segments; no rank sends more than n.

    Args:
        segment: the most elements of a segment; by default as many as `segments` finds best.
    """
    rank, ranks = link.rank, link.size
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    number = segments(vector.nbytes, ranks) if segment is None else max(1, -(-len(vector) // segment))
    pieces = blocks(vector, balanced(len(vector), number))
    for coming, going in zip([*pieces, None], [None, *pieces], strict=True):
        yield link.exchange(None if after == root else going, after, None if rank == root else coming, before)


def segments(nbytes: int, ranks: int) -> int:
    """How many segments make a chain fastest: their starts then take as long as the chain takes to fill."""
    return max(1, round(sqrt(max(0, ranks - 2) * nbytes / START_NBYTES)))
