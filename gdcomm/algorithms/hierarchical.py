"""Collectives of several nodes with the same number of ranks each: all ranks of a node share its way out.

Every rank has two links. `inner` joins the ranks of its node; `outer` joins the ranks that have its place in theirs,
one of each node. Ranks are numbered through the nodes: place i of node j is rank j * inner.size + i. Across nodes each
rank has to do with one share of the data only, and nothing crosses that need not. Operators are commutative.

Costs, for g ranks on each of N nodes, are those of the parts: n bytes on g ranks inside, n/g bytes on N ranks across.
Nodes of different sizes: see `leaders`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gdcomm.algorithms import allgather as _allgather
from gdcomm.algorithms import allreduce as _allreduce
from gdcomm.algorithms import bcast as _bcast
from gdcomm.algorithms import gather as _gather
from gdcomm.algorithms import reduce as _reduce
from gdcomm.algorithms import reduce_scatter as _reduce_scatter
from gdcomm.algorithms import scatter as _scatter
from gdcomm.algorithms.link import Link, Vector
from gdcomm.algorithms.parts import balanced, blocks

__all__ = ["allgather", "allreduce", "bcast", "reduce", "reduce_scatter"]


def allreduce(
    inner: Link, outer: Link, vector: Vector, across: Callable[[Link, Vector], None] = _allreduce.circulant
) -> None:
    """Reduce-scatter inside the node, allreduce each share across, allgather inside.

    Before, `vector` is this rank's contribution; after, the result, the same to the last bit on all ranks. Each node
    sends 2 (N-1)/N n, the least that is possible.

    Args:
        across: the allreduce of the shares.
    """
    counts = balanced(len(vector), inner.size)
    _reduce_scatter.circulant(inner, vector, counts)
    across(outer, blocks(vector, counts)[inner.rank])
    _allgather.bruck(inner, vector, counts)


def bcast(
    inner: Link, outer: Link, vector: Vector, root: int = 0, across: Callable[[Link, Vector, int], None] = _bcast.chain
) -> None:
    """Scatter inside the root's node, broadcast each share across, allgather inside.

    Before, the root's `vector` is the data; after, every rank's is. No node sends more than n, nor receives it twice.

    Args:
        root: its rank, numbered through the nodes.
        across: the broadcast of the shares.
    """
    node, place = divmod(root, inner.size)
    counts = balanced(len(vector), inner.size)
    if outer.rank == node:
        _scatter.in_place(inner, vector, counts, place)
    across(outer, blocks(vector, counts)[inner.rank], node)
    _allgather.bruck(inner, vector, counts)


def reduce(
    inner: Link, outer: Link, vector: Vector, root: int = 0, across: Callable[[Link, Vector, int], None] = _reduce.chain
) -> None:
    """Reduce-scatter inside the node, reduce each share across, gather inside the root's node.

    Before, `vector` is this rank's contribution; after, the result on the root, and means nothing on others. No node
    sends more than n, the root's nothing.

    Args:
        root: its rank, numbered through the nodes.
        across: the reduction of the shares.
    """
    node, place = divmod(root, inner.size)
    counts = balanced(len(vector), inner.size)
    _reduce_scatter.circulant(inner, vector, counts)
    across(outer, blocks(vector, counts)[inner.rank], node)
    if outer.rank == node:
        _gather.in_place(inner, vector, counts, place)


def allgather(inner: Link, outer: Link, vector: Vector, counts: Sequence[int]) -> None:
    """Gather the blocks of a place across, then allgather inside the node.

    Before, this rank's block is in its place in `vector`; after, every one is. `counts` are of all ranks, any 0. Each
    block is sent to each other node once. Scratch of the vector: the blocks of a place must lie side by side.
    """
    work = inner.scratch(len(vector), vector)
    pairs, shares = _by_place(work, vector, counts, inner.size)
    here, there = pairs[inner.rank * outer.size + outer.rank]
    inner.copy(here, there)
    _allgather.bruck(outer, blocks(work, shares)[inner.rank], counts[inner.rank :: inner.size])
    _allgather.bruck(inner, work, shares)
    inner.copies([(there, here) for here, there in pairs])


def reduce_scatter(inner: Link, outer: Link, vector: Vector, counts: Sequence[int]) -> None:
    """Reduce-scatter inside the node, the blocks of a place together, then those across.

    Before, `vector` is this rank's contribution; after, its block is the result, and the rest means nothing. `counts`
    are of all ranks, any 0. Each node sends (N-1)/N n. Scratch of the vector, for the reason given above.
    """
    work = inner.scratch(len(vector), vector)
    pairs, shares = _by_place(work, vector, counts, inner.size)
    inner.copies(pairs)
    _reduce_scatter.circulant(inner, work, shares)
    _reduce_scatter.circulant(outer, blocks(work, shares)[inner.rank], counts[inner.rank :: inner.size])
    here, there = pairs[inner.rank * outer.size + outer.rank]
    inner.copy(there, here)


def _by_place(
    work: Vector, vector: Vector, counts: Sequence[int], places: int
) -> tuple[list[tuple[Vector, Vector]], list[int]]:
    """Lay `vector`'s blocks out in `work` by place in the node, then by node.

    Returns:
        Of every block, in this order, where it lies in `work` and in `vector`; and the elements of each place.
    """
    order = [rank for place in range(places) for rank in range(place, len(counts), places)]
    home = blocks(vector, counts)
    pairs = zip(blocks(work, [counts[rank] for rank in order]), [home[rank] for rank in order], strict=True)
    return list(pairs), [sum(counts[place::places]) for place in range(places)]
