"""What the algorithms share: how vectors are cut, which ranks meet when, and the fold to a power of two.

Blocks of a vector lie one after another, block i being rank i's; `edges` are where they begin, and the end.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import accumulate
from typing import NamedTuple

from gdcomm.algorithms.link import Link, Sublink, Vector
from gdcomm.algorithms.steps import Flight, Steps

__all__ = [
    "Section", "Tree", "around", "balanced", "blocks", "cut", "edges_of", "fold", "halves", "power_below",
    "rounds", "tree", "unfold",
]  # fmt: skip


def balanced(count: int, ranks: int) -> list[int]:
    """Share `count` elements out: a block for each rank, the first ones longer by one where it does not divide."""
    each, more = divmod(count, ranks)
    return [each + 1] * more + [each] * (ranks - more)


def edges_of(counts: Sequence[int]) -> list[int]:
    """Where each block begins when they lie one after another, and where the last one ends."""
    return list(accumulate(counts, initial=0))


def blocks(vector: Vector, counts: Sequence[int], displs: Sequence[int] | None = None) -> list[Vector]:
    """The blocks of a vector: `counts` elements each, from `displs` on; without it, one after another."""
    starts = edges_of(counts) if displs is None else displs
    return [vector[start : start + count] for start, count in zip(starts, counts, strict=False)]


class Section(NamedTuple):
    """A piece of every block.

    Args:
        vector: where they lie side by side.
        counts: elements of each.
        pairs: of each, where it lies in `vector`, and where in its block; none if that is the same.
    """

    vector: Vector
    counts: Sequence[int]
    pairs: list[tuple[Vector, Vector]]


def cut(
    link: Link, vector: Vector, counts: Sequence[int], sections: int, order: Sequence[int] | None = None
) -> list[Section]:
    """Cut every block into `sections` pieces: scratch of the vector, except for one section in order of ranks.

    Args:
        order: the ranks in the order in which their pieces are to lie; None: as they are numbered.
    """
    if sections == 1 and order is None:
        return [Section(vector, counts, [])]
    home = blocks(vector, counts)
    pieces = [blocks(home[rank], balanced(counts[rank], sections)) for rank in order or range(len(counts))]
    work, found, start = link.scratch(len(vector), vector), [], 0
    for section in zip(*pieces, strict=True):
        each = [len(piece) for piece in section]
        part = work[start : start + sum(each)]
        found.append(Section(part, each, list(zip(blocks(part, each), section, strict=True))))
        start += sum(each)
    return found


def around(vector: Vector, edges: Sequence[int], first: int, number: int) -> list[Vector]:
    """`number` blocks from block `first` on, going round after the last: one piece of the vector, or two."""
    ranks, last = len(edges) - 1, first + number
    if last <= ranks:
        return [vector[edges[first] : edges[last]]]
    return [vector[edges[first] : edges[ranks]], vector[: edges[last - ranks]]]


def rounds(ranks: int) -> int:
    """How often the number of ranks that know something must double until all do: lg p, rounded up."""
    return (ranks - 1).bit_length()


def power_below(ranks: int) -> int:
    """The largest power of two that is not above `ranks`."""
    return 1 << ranks.bit_length() - 1


def halves(ranks: int) -> list[tuple[int, int]]:
    """How `ranks` blocks come down to one by halving, rounded up: each `(blocks before, blocks after)`."""
    steps = []
    while ranks > 1:
        steps.append((ranks, (ranks + 1) // 2))
        ranks = (ranks + 1) // 2
    return steps


class Tree(NamedTuple):
    """A rank's place in a binomial tree whose every branch holds neighbouring ranks, `first` to `last` (excluded).

    Args:
        parent: None at the root.
        children: the branches below, each `(rank, first, last)`, in the order in which they join from the leaves
            on; with this rank, those joined so far always are neighbours.
    """

    parent: int | None
    first: int
    last: int
    children: list[tuple[int, int, int]]


def tree(rank: int, ranks: int, root: int) -> Tree:
    """Find a rank's place in the binomial tree of a root, lg p levels deep.

    At level k the ranks lie in intervals of 2^k, which meet in pairs. The interval that holds the root is headed by
    it, any other by its first rank. So ranks need not be turned to begin at the root, as is usual: their order is
    kept, whatever the root, and the blocks of a branch lie side by side.
    """
    first, last, width = rank, rank + 1, 1
    children: list[tuple[int, int, int]] = []
    while width < ranks:
        low = rank - rank % (2 * width)
        middle, high = low + width, min(low + 2 * width, ranks)
        if middle < high:  # else nobody is there to meet
            below = root if low <= root < middle else low
            above = root if middle <= root < high else middle
            parent, child = (above, below) if above == root else (below, above)
            if rank == child:
                return Tree(parent, first, last, children)
            children.append((child, low, middle) if child == below else (child, middle, high))
            first, last = low, high
        width *= 2
    return Tree(None, first, last, children)


def fold(link: Link, vector: Vector) -> Generator[Flight, None, Link | None]:
    """Reduce rank 2i + 1's vector into rank 2i's, for as many pairs from rank 0 on as leave a power of two of ranks.

    Rank order is kept. Costs alpha + n beta + n gamma where there are pairs.

    Returns:
        The ranks that are left, as a link; None on a rank that has given its vector away.
    """
    pairs = link.size - power_below(link.size)
    if not pairs:
        return link
    if link.rank < 2 * pairs:
        if link.rank % 2:
            yield link.exchange(vector, link.rank - 1, None, link.rank - 1)
            return None
        yield from link.transfer_reduce([], [(vector, link.rank + 1)], lower=False)
    return Sublink(link, [*range(0, 2 * pairs, 2), *range(2 * pairs, link.size)])


def unfold(link: Link, piece: Vector) -> Steps:
    """Give rank 2i + 1 of the folded pairs what rank 2i has in `piece`. Costs alpha + n beta."""
    if link.rank < 2 * (link.size - power_below(link.size)):
        if link.rank % 2:
            yield link.exchange(None, link.rank - 1, piece, link.rank - 1)
        else:
            yield link.exchange(piece, link.rank + 1, None, link.rank + 1)
