"""Scans: rank i gets the reduction over ranks 0 to i (inclusive), or 0 to i - 1 (exclusive), in rank order.

Both double the number of ranks that are in a partial result, so that operators need not commute. Before, `vector` is
this rank's contribution; after, its result. See Hillis and Steele 1986. Costs are of n bytes.
"""

from __future__ import annotations

from collections.abc import Generator

from gdcomm.algorithms.link import Link, Vector
from gdcomm.algorithms.steps import Flight, Steps

__all__ = ["exclusive", "inclusive"]


def inclusive(link: Link, vector: Vector) -> Steps:
    """Scan over ranks 0 to this one.

    Costs ceil(lg p) (alpha + n beta + n gamma), and scratch of the vector.
    """
    incoming = link.scratch(len(vector), vector)
    distance = 1
    while distance < link.size:
        if (yield from _shift(link, vector, incoming, distance)):
            link.reduce(vector, lower=incoming)
        distance *= 2


def exclusive(link: Link, vector: Vector) -> Steps:
    """Scan over ranks 0 to the one before this; rank 0's vector stays as it is.

    Costs ceil(lg p) (alpha + n beta + 2 n gamma), and scratch of twice the vector.
    """
    count = len(vector)
    scratch = link.scratch(2 * count, vector)
    incoming, partial = scratch[:count], scratch[count:]  # partial: this rank's contribution and those before it
    link.copy(partial, vector)
    distance = 1
    while distance < link.size:
        if (yield from _shift(link, partial, incoming, distance)):
            link.reduce(partial, lower=incoming)
            if distance == 1:
                link.copy(vector, incoming)
            else:
                link.reduce(vector, lower=incoming)
        distance *= 2


def _shift(link: Link, send: Vector, recv: Vector, distance: int) -> Generator[Flight, None, bool]:
    """Send to the rank so far up, receive from the rank so far down; tell whether there is one down."""
    up, down = link.rank + distance, link.rank - distance
    yield link.exchange(send if up < link.size else None, up, recv if down >= 0 else None, down)
    return down >= 0
