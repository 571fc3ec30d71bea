"""Gather: every rank has a block, and the root gets all of them. Moves only.

`counts` are elements of each rank's block, any of them 0; `displs` is where each block begins in the root's `recv`, in
elements: without it, one after another. Costs are of n bytes in all.
"""

from __future__ import annotations

from collections.abc import Sequence

from gdcomm.algorithms.link import Link, Vector
from gdcomm.algorithms.parts import Tree, blocks, edges_of, tree
from gdcomm.algorithms.steps import Steps

__all__ = ["binomial", "in_place", "linear"]


def binomial(
    link: Link,
    send: Vector | None,
    recv: Vector | None,
    counts: Sequence[int],
    displs: Sequence[int] | None = None,
    root: int = 0,
) -> Steps:
    """Join branches of a binomial tree: short blocks.

    Costs lg p alpha + (p-1)/p n beta, and scratch of its branch on a rank that is neither leaf nor root; on the root
    too, if blocks do not lie one after another.

    Args:
        send: this rank's block; None on the root if it is in its place in `recv`.
        recv: only the root's is looked at.
        counts: the same on every rank (`linear` needs them on the root only).
        displs: only the root's is looked at.
    """
    place = tree(link.rank, link.size, root)
    if place.parent is not None and not place.children:
        yield link.exchange(send, place.parent, None, place.parent)
        return
    if link.rank == root and send is None:
        send = blocks(recv, counts, displs)[root]
    edges = edges_of(counts)
    base, packed = edges[place.first], displs is None or list(displs) == edges[:-1]
    in_recv = link.rank == root and packed
    work: Vector = recv if in_recv else link.scratch(edges[place.last] - base, send)
    shifted = [edge - base for edge in edges]
    link.copy(work[shifted[link.rank] : shifted[link.rank + 1]], send)
    yield from _join(link, work, shifted, place)
    if link.rank == root and not packed:
        link.copies(list(zip(blocks(recv, counts, displs), blocks(work, counts), strict=True)))


def in_place(link: Link, vector: Vector, counts: Sequence[int], root: int = 0) -> Steps:
    """Gather blocks of vectors that are as long as the whole on every rank: before, block `rank` is in its place.

    After, all blocks are in place on the root, and some on others. Costs as `binomial`, without copies or scratch.
    """
    yield from _join(link, vector, edges_of(counts), tree(link.rank, link.size, root))


def _join(link: Link, work: Vector, edges: Sequence[int], place: Tree) -> Steps:
    yield link.transfer([], [(work[edges[first] : edges[last]], child) for child, first, last in place.children])
    if place.parent is not None:
        yield link.exchange(work[edges[place.first] : edges[place.last]], place.parent, None, place.parent)


def linear(
    link: Link,
    send: Vector | None,
    recv: Vector | None,
    counts: Sequence[int] | None,
    displs: Sequence[int] | None = None,
    root: int = 0,
) -> Steps:
    """Send each block straight to the root: long blocks, and counts that only the root knows.

    Costs (p-1) alpha + (p-1)/p n beta. Arguments as in `binomial`; `counts` is looked at on the root only.
    """
    if link.rank != root:
        yield link.exchange(send, root, None, root)
        return
    assert counts is not None
    block = blocks(recv, counts, displs)
    yield link.transfer([], [(block[rank], rank) for rank in range(link.size) if rank != root])
    if send is not None:
        link.copy(block[root], send)
