"""Collectives of nodes with different numbers of ranks: the first rank of each node speaks for it.

Every rank has the link `inner` of its node; the first of each also has `outer`, which joins the leaders; others have
None. Ranks are numbered through the nodes. `sizes` are ranks of each node, `node` is this rank's. Operators are
commutative. As in `hierarchical` nothing crosses that need not, and phases of sections run at the same time, but one
rank has to carry all of it: for g ranks on each of N nodes, costs are those of the parts for a section, with n bytes
inside and n bytes across, and of the slower one for each further section.
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
from gdcomm.algorithms.parts import Section, balanced, blocks, cut, edges_of
from gdcomm.algorithms.steps import Steps, pipeline

__all__ = ["allgather", "allreduce", "bcast", "reduce", "reduce_scatter"]


def allreduce(inner: Link, outer: Link | None, vector: Vector, sections: int = 1) -> Steps:
    """Reduce to the leader, allreduce across, broadcast inside.

    Before, `vector` is this rank's contribution; after, the result, the same to the last bit on all ranks.

    Args:
        sections: into how many `vector` is cut.
    """
    yield from pipeline(
        [
            [
                _reduce.rabenseifner(inner.apart(lane), part),
                _allreduce.circulant(outer.apart(lane), part) if outer else iter(()),
                _bcast.scatter_allgather(inner.apart(lane), part),
            ]
            for lane, part in enumerate(blocks(vector, balanced(len(vector), sections)))
        ]
    )


def bcast(
    inner: Link, outer: Link | None, vector: Vector, root: int, sizes: Sequence[int], node: int, sections: int = 1
) -> Steps:
    """Broadcast in the root's node, across, then in the others.

    Before, the root's `vector` is the data; after, every rank's is.

    Args:
        sections: into how many `vector` is cut.
    """
    of_root, place = _whereabouts(root, sizes)
    yield from pipeline(
        [
            [
                _bcast.scatter_allgather(inner.apart(lane), part, place) if node == of_root else iter(()),
                _bcast.chain(outer.apart(lane), part, of_root) if outer else iter(()),
                _bcast.scatter_allgather(inner.apart(lane), part) if node != of_root else iter(()),
            ]
            for lane, part in enumerate(blocks(vector, balanced(len(vector), sections)))
        ]
    )


def reduce(
    inner: Link, outer: Link | None, vector: Vector, root: int, sizes: Sequence[int], node: int, sections: int = 1
) -> Steps:
    """Reduce to the leader, across to the leader of the root's node, and pass the result on to the root.

    Before, `vector` is this rank's contribution; after, the result on the root, and means nothing on others.

    Args:
        sections: into how many `vector` is cut.
    """
    of_root, place = _whereabouts(root, sizes)

    def pass_on(inner: Link, part: Vector) -> Steps:
        yield inner.transfer([(part, place)] if inner.rank == 0 else [], [(part, 0)] if inner.rank == place else [])

    yield from pipeline(
        [
            [
                _reduce.rabenseifner(inner.apart(lane), part),
                _reduce.chain(outer.apart(lane), part, of_root) if outer else iter(()),
                pass_on(inner.apart(lane), part) if node == of_root and place else iter(()),
            ]
            for lane, part in enumerate(blocks(vector, balanced(len(vector), sections)))
        ]
    )


def allgather(
    inner: Link,
    outer: Link | None,
    vector: Vector,
    counts: Sequence[int],
    sizes: Sequence[int],
    node: int,
    sections: int = 1,
) -> Steps:
    """Gather to the leader, allgather across, broadcast inside.

    Before, this rank's block is in its place in `vector`; after, every one is. `counts` are of all ranks, any 0.
    Scratch of the vector if there are several sections.

    Args:
        sections: into how many every block is cut.
    """
    mine = edges_of(sizes)[node] + inner.rank

    def to_leader(inner: Link, section: Section) -> Steps:
        for here, there in section.pairs[mine : mine + 1]:
            inner.copy(here, there)
        of_node = _by_node(section.counts, sizes)
        yield from _gather.in_place(inner, blocks(section.vector, _sums(of_node))[node], of_node[node])

    def from_leader(inner: Link, section: Section) -> Steps:
        yield from _bcast.scatter_allgather(inner, section.vector)
        inner.copies([(there, here) for here, there in section.pairs])

    yield from pipeline(
        [
            [
                to_leader(inner.apart(lane), section),
                _allgather.bruck(outer.apart(lane), section.vector, _sums(_by_node(section.counts, sizes)))
                if outer
                else iter(()),
                from_leader(inner.apart(lane), section),
            ]
            for lane, section in enumerate(cut(inner, vector, counts, sections))
        ]
    )


def reduce_scatter(
    inner: Link,
    outer: Link | None,
    vector: Vector,
    counts: Sequence[int],
    sizes: Sequence[int],
    node: int,
    sections: int = 1,
) -> Steps:
    """Reduce to the leader, reduce-scatter across, scatter inside.

    Before, `vector` is this rank's contribution; after, its block is the result, and the rest means nothing. `counts`
    are of all ranks, any 0. Scratch of the vector more if there are several sections.

    Args:
        sections: into how many every block is cut.
    """
    mine = edges_of(sizes)[node] + inner.rank

    def to_leader(inner: Link, section: Section) -> Steps:
        inner.copies(section.pairs)
        yield from _reduce.rabenseifner(inner, section.vector)

    def from_leader(inner: Link, section: Section) -> Steps:
        of_node = _by_node(section.counts, sizes)
        yield from _scatter.in_place(inner, blocks(section.vector, _sums(of_node))[node], of_node[node])
        for here, there in section.pairs[mine : mine + 1]:
            inner.copy(there, here)

    yield from pipeline(
        [
            [
                to_leader(inner.apart(lane), section),
                _reduce_scatter.circulant(outer.apart(lane), section.vector, _sums(_by_node(section.counts, sizes)))
                if outer
                else iter(()),
                from_leader(inner.apart(lane), section),
            ]
            for lane, section in enumerate(cut(inner, vector, counts, sections))
        ]
    )


def _sums(parts: Sequence[Sequence[int]]) -> list[int]:
    return [sum(part) for part in parts]


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
