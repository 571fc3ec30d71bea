"""How a thread waits for what only looking at it shows: counters in shared memory, MPI's requests, events."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable

__all__ = ["Patience", "moved"]

_FIRST_S = 1e-6  # what a system makes of it may be 50 us
# Not time.sleep(0): from Python 3.11 on that takes 50 us, too.
_yield: Callable[[], None] = getattr(os, "sched_yield", lambda: time.sleep(0))
_moves = itertools.count(1)
_last = 0


def moved() -> None:
    """Tell all that wait in this process that a transfer went on."""
    global _last
    _last = next(_moves)


class Patience:
    """The pauses between looks: hardly any at first, then ever longer, hardly any again once something has moved.

    Whoever waits for a chunk gets it at once while data flows, and leaves the core to others, who may be the very
    ones that are waited for, when it does not.

    Args:
        looks: how many come before the first real pause; between them the core is only offered to others.
        longest: seconds of the longest pause.
    """

    def __init__(self, looks: int = 50, longest: float = 2e-4) -> None:
        self._looks, self._longest = looks, longest
        self._reset()

    def _reset(self) -> None:
        self._seen, self._left, self._pause = _last, self._looks, _FIRST_S

    @property
    def news(self) -> bool:
        """Whether something has moved since the last pause."""
        return self._seen != _last

    def pause(self) -> None:
        """Nothing is there yet."""
        if self.news:
            self._reset()
        if self._left > 0:
            self._left -= 1
            _yield()
        else:
            time.sleep(self._pause)
            self._pause = min(2 * self._pause, self._longest)
