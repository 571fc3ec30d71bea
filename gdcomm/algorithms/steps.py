"""How algorithms run: one to its end, or phases of several at the same time.

An algorithm is a generator: it starts messages, yields the `Flight` that they are, and is resumed when they have
arrived. So whoever runs it says how to wait, and the messages of several can be on their way in one thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

from gdcomm.patience import Patience

__all__ = ["Flight", "Steps", "finish", "pipeline"]


class Flight(ABC):
    """Messages under way."""

    @abstractmethod
    def test(self) -> bool:
        """Tell, without waiting, whether all are complete; it may be asked again."""

    def wait(self) -> None:
        """Wait until all are complete."""
        patience = Patience(looks=200)
        with self.watched():
            while not self.test():
                patience.pause()

    def watched(self) -> AbstractContextManager[None]:
        """The context of a thread that asks again and again."""
        return nullcontext()


Steps = Generator[Flight, None, None]


def finish(steps: Steps) -> None:
    """Run an algorithm to its end."""
    for flight in steps:
        flight.wait()


class _Any(Flight):
    """Several flights, of which one is waited for."""

    def __init__(self, flights: Sequence[Flight]) -> None:
        self._flights = flights

    def test(self) -> bool:
        return any(flight.test() for flight in self._flights)

    def watched(self) -> AbstractContextManager[None]:
        return self._flights[0].watched()


def pipeline(sections: Sequence[Sequence[Iterator[Flight]]], width: int = 2) -> Steps:
    """Run the phases of several sections: those of one in order, those of different sections at the same time.

    Sections pass through the phases in order, at most `width` of them being in the same phase. So the first is through
    the first phase before all links are busy with others, and while one waits for its last message, the next is
    on its way.

    Which of them is resumed first depends on when messages arrive, and differs between ranks. So messages of a section
    must not be taken for those of another: every section needs links with messages of their own (`Link.apart`).
    Then each is a sequential program on all ranks, as if it were alone. Nor can they wait for each other in a circle:
    a section enters a phase when it has left the one before, and an earlier section has left this one. That order of
    sections and phases is the same on all ranks, and a message that both sides have begun needs nothing else to arrive.

    Args:
        sections: of each, its phases, as many in all of them; a rank that has no part in one brings one without steps.
        width: the most sections in one phase.
    """
    phases = len(sections[0])
    place = [0] * len(sections)  # the phase that each section is in
    flights: dict[int, Flight] = {}  # what it waits for there
    while True:
        for i, section in enumerate(sections):
            while place[i] < phases and (i < width or place[i - width] > place[i]):
                if i in flights and not flights[i].test():
                    break
                flight = next(section[place[i]], None)
                if flight is not None:
                    flights[i] = flight
                else:
                    flights.pop(i, None)
                    place[i] += 1
        if not flights:
            return
        yield _Any(list(flights.values())) if len(flights) > 1 else next(iter(flights.values()))
