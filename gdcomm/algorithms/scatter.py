"""Scatter: the root has a block for every rank. Moves only; the mirror image of gather.

`counts` are elements of each rank's block, any of them 0; `displs` is where each block begins in the root's `send`, in
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
    """Split over branches of a binomial tree: short blocks.

    Costs lg p alpha + (p-1)/p n beta, and scratch of its branch on a rank that is neither leaf nor root; on the root
    too, if blocks do not lie one after another.

    Args:
        send: only the root's is looked at.
        recv: this rank's block; None on the root if its block is to stay in `send`.
        counts: the same on every rank (`linear` needs them on the root only).
        displs: only the root's is looked at.
    """
    place = tree(link.rank, link.size, root)
    if place.parent is not None and not place.children:
        yield link.exchange(None, place.parent, recv, place.parent)
        return
    edges = edges_of(counts)
    base, packed = edges[place.first], displs is None or list(displs) == edges[:-1]
    in_send = link.rank == root and packed
    work: Vector = send if in_send else link.scratch(edges[place.last] - base, send if link.rank == root else recv)
    if link.rank == root and not packed:
        link.copies(list(zip(blocks(work, counts), blocks(send, counts, displs), strict=True)))
    shifted = [edge - base for edge in edges]
    yield from _split(link, work, shifted, place)
    if recv is not None:
        link.copy(recv, work[shifted[link.rank] : shifted[link.rank + 1]])


def in_place(link: Link, vector: Vector, counts: Sequence[int], root: int = 0) -> Steps:
    """Scatter into vectors that are as long as the whole on every rank: after, block `rank` is in its place.

    Other blocks of ranks that are not the root mean nothing. Costs as `binomial`, without copies or scratch.
    """
    yield from _split(link, vector, edges_of(counts), tree(link.rank, link.size, root))


def _split(link: Link, work: Vector, edges: Sequence[int], place: Tree) -> Steps:
    if place.parent is not None:
        yield link.exchange(None, place.parent, work[edges[place.first] : edges[place.last]], place.parent)
    largest_first = reversed(place.children)
    yield link.transfer([(work[edges[first] : edges[last]], child) for child, first, last in largest_first], [])


def linear(
    link: Link,
    send: Vector | None,
    recv: Vector | None,
    counts: Sequence[int] | None,
    displs: Sequence[int] | None = None,
    root: int = 0,
) -> Steps:
    """Send each rank its block straight from the root: long blocks, and counts that only the root knows.

    Costs (p-1) alpha + (p-1)/p n beta. Arguments as in `binomial`; `counts` is looked at on the root only.
    """
    if link.rank != root:
        yield link.exchange(None, root, recv, root)
        return
    assert counts is not None
    block = blocks(send, counts, displs)
    yield link.transfer([(block[rank], rank) for rank in range(link.size) if rank != root], [])
    if recv is not None:
        link.copy(recv, block[root])
