"""How threads wait."""

from __future__ import annotations

import pytest

from gdcomm import patience, requests
from gdcomm.patience import Patience, moved


@pytest.fixture
def pauses(monkeypatch):
    """Seconds of each pause; "core": the core was offered to others."""
    made = []
    monkeypatch.setattr(patience, "_yield", lambda: made.append("core"))
    monkeypatch.setattr(patience.time, "sleep", made.append)
    return made


def test_pauses_grow_and_end(pauses):
    waiting = Patience(looks=3, longest=5e-6)
    for _ in range(8):
        waiting.pause()
    assert pauses == ["core"] * 3 + [1e-6, 2e-6, 4e-6, 5e-6, 5e-6]


def test_pauses_are_short_again_after_a_move(pauses):
    waiting = Patience(looks=2)
    for _ in range(9):
        waiting.pause()
    assert not waiting.news
    moved()
    assert waiting.news
    pauses.clear()
    for _ in range(3):
        waiting.pause()
    assert pauses == ["core", "core", 1e-6]


class Pending:
    """A transfer that ends after so many looks.

    Args:
        looks: how many.
        moves: something moves between two looks.
    """

    error, done = None, False

    def __init__(self, looks, moves):
        self._left, self._moves = looks, moves

    def poll(self):
        self._left -= 1
        if self._moves:
            moved()
        return self._left <= 0


@pytest.mark.parametrize("moves", [True, False])
def test_a_long_wait_sleeps_only_while_nothing_moves(pauses, moves):
    request = requests.Request()
    request._pending = Pending(1000, moves)
    request._drive()
    assert len(pauses) == 998  # two looks come before the first
    assert (set(pauses) == {"core"}) == moves
