"""Random sequences of every kind of local copy, on random streams: not one stale byte."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdcomm import devices
from gdcomm.memory import pinned
from gdcomm.transfer import batch, copy, crew, rows, staging

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "mutation"))

from checks import WrongError
from sequences import Sequence, StrictDevice, install

CHANGED = [(staging, "plan"), (rows, "SLOT_NBYTES"), (rows, "THREADS"), (batch, "_BLOCK")]  # by `install`


@pytest.fixture(autouse=True, scope="module")
def restored() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module, name in CHANGED:
            patch.setattr(module, name, getattr(module, name))
        patch.setattr(devices, "_installed", [])
        patch.setattr(crew, "_crews", [])
        yield
        copy._under_way.clear()


def run(device: StrictDevice, draw: Any, steps: int) -> None:
    install(device)
    sequence = Sequence(device, draw)
    sequence.run(steps)
    for stream in list(device._streams.values()):
        stream.synchronize()


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([0.0, 0.1, 0.5]), st.randoms(use_true_random=False), st.integers(0, 30))
def test_short_sequences(seed: int, early: float, draw: Random, steps: int) -> None:
    run(StrictDevice(seed, early), draw, steps)


@pytest.mark.parametrize("seed", range(20))
def test_long_sequences_leave_nothing_leased(seed: int) -> None:
    device = StrictDevice(seed, 0.1 * (seed % 3))
    run(device, Random(seed), 150)
    copy._under_way.clear()
    gc.collect()
    for _ in range(5):  # an event may say "not yet" for some time
        stats = pinned.pool_of(device).stats()
    assert stats["leased"] == stats["pending"] == 0, stats


@pytest.mark.parametrize("lost", ["synchronize", "wait_event"])
def test_the_sequences_notice_lost_waits(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tests above would prove nothing."""
    usual = getattr(StrictDevice, lost)

    def forgetful(self: StrictDevice, *arguments: Any) -> None:
        if sys._getframe(1).f_globals["__name__"].startswith("gdcomm.transfer"):
            return
        usual(self, *arguments)

    monkeypatch.setattr(StrictDevice, lost, forgetful)
    device = StrictDevice()
    with pytest.raises(WrongError):
        for seed in range(20):
            run(device, Random(seed), 60)
    for stream in device._streams.values():  # what a broken run left behind is nobody's
        stream._queue.clear()
        stream._done = stream._queued
