"""Collectives of nodes with different numbers of ranks: the first rank of each node speaks for it.

Every rank has the link `inner` of its node; the first of each also has `outer`, which joins the leaders; others have
None. Ranks are numbered through the nodes. `sizes` are ranks of each node, `node` is this rank's. Operators are
commutative. As in `hierarchical` nothing crosses that need not, but one rank has to carry all of it: for g ranks on
each of N nodes, costs are those of the parts, with n bytes inside and n bytes across.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from gdcomm.algorithms import allgather as _allgather
from gdcomm.algorithms import allreduce as _allreduce
from gdcomm.algorithms import bcast as _bcast
from gdcomm.algorithms import gather as _gather
from gdcomm.algorithms import reduce as _reduce
from gdcomm.algorithms import reduce_scatter as _reduce_scatter
from gdcomm.algorithms import scatter as _scatter
from gdcomm.algorithms.link import Link, Vector
from gdcomm.algorithms.parts import blocks, edges_of

__all__ = ["allgather", "allreduce", "bcast", "reduce", "reduce_scatter"]


def allreduce(inner: Link, outer: Link | None, vector: Vector) -> None:
    """Reduce to the leader, allreduce across, broadcast inside.

    Before, `vector` is this rank's contribution; after, the result, the same to the last bit on all ranks.
    """
    _reduce.rabenseifner(inner, vector)
    if outer is not None:
        _allreduce.circulant(outer, vector)
    _bcast.scatter_allgather(inner, vector)


def bcast(inner: Link, outer: Link | None, vector: Vector, root: int, sizes: Sequence[int], node: int) -> None:
    """Broadcast in the root's node, across, then in the others.

    Before, the root's `vector` is the data; after, every rank's is.
    """
    of_root, place = _whereabouts(root, sizes)
    if node == of_root:
        _bcast.scatter_allgather(inner, vector, place)
    if outer is not None:
        _bcast.chain(outer, vector, of_root)
    if node != of_root:
        _bcast.scatter_allgather(inner, vector)


def reduce(inner: Link, outer: Link | None, vector: Vector, root: int, sizes: Sequence[int], node: int) -> None:
    """Reduce to the leader, across to the leader of the root's node, and pass the result on to the root.

    Before, `vector` is this rank's contribution; after, the result on the root, and means nothing on others.
    """
    of_root, place = _whereabouts(root, sizes)
    _reduce.rabenseifner(inner, vector)
    if outer is not None:
        _reduce.chain(outer, vector, of_root)
    if node == of_root and place:
        inner.transfer([(vector, place)] if inner.rank == 0 else [], [(vector, 0)] if inner.rank == place else [])


def allgather(
    inner: Link, outer: Link | None, vector: Vector, counts: Sequence[int], sizes: Sequence[int], node: int
) -> None:
    """Gather to the leader, allgather across, broadcast inside.

    Before, this rank's block is in its place in `vector`; after, every one is. `counts` are of all ranks, any 0.
    """
    of_node = _by_node(counts, sizes)
    shares = [sum(part) for part in of_node]
    _gather.in_place(inner, blocks(vector, shares)[node], of_node[node])
    if outer is not None:
        _allgather.bruck(outer, vector, shares)
    _bcast.scatter_allgather(inner, vector)


def reduce_scatter(
    inner: Link, outer: Link | None, vector: Vector, counts: Sequence[int], sizes: Sequence[int], node: int
) -> None:
    """Reduce to the leader, reduce-scatter across, scatter inside.

    Before, `vector` is this rank's contribution; after, its block is the result, and the rest means nothing. `counts`
    are of all ranks, any 0.
    """
    of_node = _by_node(counts, sizes)
    shares = [sum(part) for part in of_node]
    _reduce.rabenseifner(inner, vector)
    if outer is not None:
        _reduce_scatter.circulant(outer, vector, shares)
    _scatter.in_place(inner, blocks(vector, shares)[node], of_node[node])


def _by_node(counts: Sequence[int], sizes: Sequence[int]) -> list[Sequence[int]]:
    edges = edges_of(sizes)
    return [counts[first:last] for first, last in pairwise(edges)]


def _whereabouts(rank: int, sizes: Sequence[int]) -> tuple[int, int]:
    """A rank's node, and its place there."""
    for node, size in enumerate(sizes):
        if rank < size:
            return node, rank
        rank -= size
    raise ValueError("no such rank")
