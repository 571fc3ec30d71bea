"""Collectives of several nodes with the same number of ranks each: all ranks of a node share its way out.

Every rank has two links. `inner` joins the ranks of its node; `outer` joins the ranks that have its place in theirs,
one of each node. Ranks are numbered through the nodes: place i of node j is rank j * inner.size + i. Across nodes each
rank has to do with one share of the data only, and nothing crosses that need not. Operators are commutative.

Vectors are cut into sections, whose phases inside and across run at the same time (see `steps.pipeline`): `sections`
is the same on all ranks. Costs, for g ranks on each of N nodes, are those of the parts for a section, n bytes on g
ranks inside and n/g bytes on N ranks across, and of the slower one for each further section. Nodes of different sizes:
see `leaders`.
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
from gdcomm.algorithms.parts import Section, balanced, blocks, cut
from gdcomm.algorithms.steps import Steps, pipeline

__all__ = ["allgather", "allreduce", "bcast", "reduce", "reduce_scatter"]


def allreduce(
    inner: Link,
    outer: Link,
    vector: Vector,
    sections: int = 1,
    across: Callable[[Link, Vector], Steps] = _allreduce.circulant,
) -> Steps:
    """Reduce-scatter inside the node, allreduce each share across, allgather inside.

    Before, `vector` is this rank's contribution; after, the result, the same to the last bit on all ranks. Each node
    sends 2 (N-1)/N n, the least that is possible.

    Args:
        sections: into how many `vector` is cut.
        across: the allreduce of the shares.
    """
    running = []
    for lane, part in enumerate(blocks(vector, balanced(len(vector), sections))):
        inside, counts = inner.apart(lane), balanced(len(part), inner.size)
        running.append(
            [
                _reduce_scatter.circulant(inside, part, counts),
                across(outer.apart(lane), blocks(part, counts)[inner.rank]),
                _allgather.bruck(inside, part, counts),
            ]
        )
    yield from pipeline(running)


def bcast(
    inner: Link,
    outer: Link,
    vector: Vector,
    root: int = 0,
    sections: int = 1,
    across: Callable[[Link, Vector, int], Steps] = _bcast.chain,
) -> Steps:
    """Scatter inside the root's node, broadcast each share across, allgather inside.

    Before, the root's `vector` is the data; after, every rank's is. No node sends more than n, nor receives it twice.

    Args:
        root: its rank, numbered through the nodes.
        sections: into how many `vector` is cut.
        across: the broadcast of the shares.
    """
    node, place = divmod(root, inner.size)
    running = []
    for lane, part in enumerate(blocks(vector, balanced(len(vector), sections))):
        inside, counts = inner.apart(lane), balanced(len(part), inner.size)
        running.append(
            [
                _scatter.in_place(inside, part, counts, place) if outer.rank == node else iter(()),
                across(outer.apart(lane), blocks(part, counts)[inner.rank], node),
                _allgather.bruck(inside, part, counts),
            ]
        )
    yield from pipeline(running)


def reduce(
    inner: Link,
    outer: Link,
    vector: Vector,
    root: int = 0,
    sections: int = 1,
    across: Callable[[Link, Vector, int], Steps] = _reduce.chain,
) -> Steps:
    """Reduce-scatter inside the node, reduce each share across, gather inside the root's node.

    Before, `vector` is this rank's contribution; after, the result on the root, and means nothing on others. No node
    sends more than n, the root's nothing.

    Args:
        root: its rank, numbered through the nodes.
        sections: into how many `vector` is cut.
        across: the reduction of the shares.
    """
    node, place = divmod(root, inner.size)
    running = []
    for lane, part in enumerate(blocks(vector, balanced(len(vector), sections))):
        inside, counts = inner.apart(lane), balanced(len(part), inner.size)
        running.append(
            [
                _reduce_scatter.circulant(inside, part, counts),
                across(outer.apart(lane), blocks(part, counts)[inner.rank], node),
                _gather.in_place(inside, part, counts, place) if outer.rank == node else iter(()),
            ]
        )
    yield from pipeline(running)


def allgather(inner: Link, outer: Link, vector: Vector, counts: Sequence[int], sections: int = 1) -> Steps:
    """Gather the blocks of a place across, then allgather inside the node.

    Before, this rank's block is in its place in `vector`; after, every one is. `counts` are of all ranks, any 0. Each
    block is sent to each other node once. Scratch of the vector: what travels together must lie side by side.

    Args:
        sections: into how many every block is cut.
    """
    places, nodes, mine = inner.size, outer.size, inner.rank * outer.size + outer.rank

    def across(outer: Link, section: Section) -> Steps:
        here, there = section.pairs[mine]
        outer.copy(here, there)
        shares = _shares(section, places)
        theirs = section.counts[inner.rank * nodes : (inner.rank + 1) * nodes]
        yield from _allgather.bruck(outer, blocks(section.vector, shares)[inner.rank], theirs)

    def inside(inner: Link, section: Section) -> Steps:
        yield from _allgather.bruck(inner, section.vector, _shares(section, places))
        inner.copies([(there, here) for here, there in section.pairs])

    yield from pipeline(
        [
            [across(outer.apart(lane), section), inside(inner.apart(lane), section)]
            for lane, section in enumerate(cut(inner, vector, counts, sections, _by_place(places, nodes)))
        ]
    )


def reduce_scatter(inner: Link, outer: Link, vector: Vector, counts: Sequence[int], sections: int = 1) -> Steps:
    """Reduce-scatter inside the node, the blocks of a place together, then those across.

    Before, `vector` is this rank's contribution; after, its block is the result, and the rest means nothing. `counts`
    are of all ranks, any 0. Each node sends (N-1)/N n. Scratch of the vector, for the reason given above.

    Args:
        sections: into how many every block is cut.
    """
    places, nodes, mine = inner.size, outer.size, inner.rank * outer.size + outer.rank

    def inside(inner: Link, section: Section) -> Steps:
        inner.copies(section.pairs)
        yield from _reduce_scatter.circulant(inner, section.vector, _shares(section, places))

    def across(outer: Link, section: Section) -> Steps:
        shares = _shares(section, places)
        theirs = section.counts[inner.rank * nodes : (inner.rank + 1) * nodes]
        yield from _reduce_scatter.circulant(outer, blocks(section.vector, shares)[inner.rank], theirs)
        here, there = section.pairs[mine]
        outer.copy(there, here)

    yield from pipeline(
        [
            [inside(inner.apart(lane), section), across(outer.apart(lane), section)]
            for lane, section in enumerate(cut(inner, vector, counts, sections, _by_place(places, nodes)))
        ]
    )


def _by_place(places: int, nodes: int) -> list[int]:
    """The ranks by place in the node, then by node."""
    return [rank for place in range(places) for rank in range(place, places * nodes, places)]


def _shares(section: Section, places: int) -> list[int]:
    """Elements of each place."""
    nodes = len(section.counts) // places
    return [sum(section.counts[first : first + nodes]) for first in range(0, len(section.counts), nodes)]
