"""Sections whose phases overlap: ranks as generators under a clock of their own, so that time is what the test says.

Every message takes the time of a cost model on the ports of its two ends, inside a node or across; with a seed it takes
any time at all. All ranks run in one thread: what waits for ever is seen at once.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdcomm.algorithms import parts
from gdcomm.algorithms.choose import NODE_ALGORITHMS, Model
from gdcomm.algorithms.link import LANES, Link, Sublink
from gdcomm.algorithms.steps import Flight, Steps, pipeline

CHECK = settings(max_examples=30, deadline=None, derandomize=True, database=None)
POISON = 0x7F


class Message:
    def __init__(self, vector: Any, starts: bool) -> None:
        self.vector, self.starts = vector, starts  # all pieces between two ranks in a round have one start
        self.end: float | None = None  # None: the other side is not there yet


class Simulation:
    """Ranks on nodes, and what they send.

    Args:
        sizes: ranks of each node.
        seed: of messages that take any time; None: as the model says.
    """

    def __init__(self, sizes: list[int], model: Model = Model(), seed: int | None = None) -> None:  # noqa: B008
        self.sizes, self.model, self.random = sizes, model, None if seed is None else random.Random(seed)
        self.node = np.repeat(np.arange(len(sizes)), sizes).tolist()
        self.now, self.log, self.landing = 0.0, [], []
        self.bytes = np.zeros((len(self.node), len(self.node)), np.int64)
        self.posted: Any = defaultdict(lambda: (deque(), deque()))  # sends and receives between two ranks on a lane
        self.busy: dict[Any, float] = defaultdict(float)  # until when each port is
        self.scratched = [0] * len(self.node)

    def run(self, work: Callable[[Link, Link | None], Steps]) -> None:
        """Run what `work` makes of the two links of every rank."""
        steps = [work(*self.links(rank)) for rank in range(len(self.node))]
        waiting: dict[int, Flight | None] = dict.fromkeys(range(len(steps)))
        while waiting:
            ready = [rank for rank, flight in waiting.items() if flight is None or flight.test()]
            if self.random:
                self.random.shuffle(ready)
            for rank in ready:
                waiting[rank] = next(steps[rank], None)
                if waiting[rank] is None:
                    del waiting[rank]
            if waiting and not ready:
                assert self.landing, f"ranks {sorted(waiting)} wait for ever"
                self.landing.sort(key=lambda item: item[0])
                self.now, send, recv = self.landing.pop(0)
                recv.vector[:] = send.vector
                send.end = recv.end = self.now
        assert not any(queue for pair in self.posted.values() for queue in pair), "messages that nobody received"

    def links(self, rank: int) -> tuple[Link, Link | None]:
        link, sizes, node = SimulatedLink(self, rank), self.sizes, self.node[rank]
        first = parts.edges_of(sizes)
        place = rank - first[node]
        inner = Sublink(link, range(first[node], first[node + 1]))
        if len(set(sizes)) > 1 and place:
            return inner, None
        return inner, Sublink(link, [start + place for start in first[:-1]])

    def match(self, source: int, dest: int, lane: int) -> None:
        """Begin what both sides are there for."""
        sends, recvs = self.posted[source, dest, lane]
        while sends and recvs:
            send, recv = sends.popleft(), recvs.popleft()
            assert (len(send.vector), send.vector.dtype) == (len(recv.vector), recv.vector.dtype), "not the same"
            across = self.node[source] != self.node[dest]
            ports, nbytes = [(source, "out", across), (dest, "in", across)], send.vector.nbytes
            model = self.model.across(1) if across else self.model
            begin = max(self.now, *(self.busy[port] for port in ports))
            end = begin + model.alpha * send.starts + nbytes / model.bandwidth
            if self.random:
                begin, end = self.now, self.now + self.random.expovariate(1)
            for port in ports:
                self.busy[port] = end
            self.landing.append((end, send, recv))
            self.log.append((begin, end, across, lane))
            self.bytes[source, dest] += nbytes


class SimulatedFlight(Flight):
    def __init__(self, messages: list[Message]) -> None:
        self.messages = messages

    def test(self) -> bool:
        return all(message.end is not None for message in self.messages)

    def wait(self) -> None:
        raise AssertionError("the simulation waits")


class SimulatedLink(Link):
    def __init__(self, world: Simulation, rank: int, lane: int = 0) -> None:
        self.world, self.rank, self.size, self.lane = world, rank, len(world.node), lane

    def transfer(self, sends: Any, recvs: Any) -> Flight:
        messages, met = [], set()
        for vector, other, direction in [(v, r, 1) for v, r in recvs] + [(v, r, 0) for v, r in sends]:
            if len(vector):
                ends = (other, self.rank) if direction else (self.rank, other)
                messages.append(Message(vector, ends not in met))
                met.add(ends)
                self.world.posted[(*ends, self.lane)][direction].append(messages[-1])
                if direction:
                    vector.view(np.uint8).fill(POISON)
                self.world.match(*ends, self.lane)
        return SimulatedFlight(messages)

    def apart(self, lane: int) -> Link:
        assert lane < LANES
        return SimulatedLink(self.world, self.rank, lane)

    def reduce(self, into: Any, lower: Any = None, higher: Any = None) -> None:
        assert not np.may_share_memory(into, lower if higher is None else higher)
        np.add(*((into, higher) if lower is None else (lower, into)), out=into)

    def copy(self, to: Any, origin: Any) -> None:
        to[:] = origin

    def scratch(self, count: int, like: Any) -> Any:
        self.world.scratched[self.rank] += count * like.itemsize
        return np.full(count * like.itemsize, POISON, np.uint8).view(like.dtype)


def steps_of(
    operation: str, sizes: list[int], inner: Link, outer: Link | None, vector: Any, arguments: Any, sections: int
) -> Steps:
    """The algorithm of these nodes on one rank."""
    even = len(set(sizes)) == 1
    more: list[Any] = []
    if not even and operation != "allreduce":
        more = [sizes, next(node for node in range(len(sizes)) if parts.edges_of(sizes)[node + 1] > rank_of(inner))]
    run = NODE_ALGORITHMS[operation]["hierarchical" if even else "leaders"].run
    return run(inner, outer, vector, *arguments, *more, sections)


def rank_of(link: Any) -> int:
    return link._link.rank


def everything(sizes: list[int], counts: list[int], root: int, sections: int, seed: int | None) -> dict[str, Any]:
    """Run every operation on real numbers, check the results, and give them."""
    ranks, total = sum(sizes), sum(counts)
    edges = parts.edges_of(counts)
    generator = np.random.default_rng(total)
    inputs = [(generator.standard_normal(total) * 10.0 ** generator.integers(-3, 4, total)) for _ in range(ranks)]
    right, bound = sum(inputs), sum(np.abs(vector) for vector in inputs) * 32 * np.finfo("f8").eps
    found = {}
    for operation in NODE_ALGORITHMS:
        vectors = [vector.copy() for vector in inputs]
        if operation == "allgather":
            for rank, vector in enumerate(vectors):
                vector[: edges[rank]] = vector[edges[rank + 1] :] = -1
        arguments = {"allreduce": [], "bcast": [root], "reduce": [root]}.get(operation, [counts])
        world = Simulation(sizes, seed=seed)
        world.run(
            lambda inner, outer, operation=operation, vectors=vectors, arguments=arguments: steps_of(
                operation, sizes, inner, outer, vectors[rank_of(inner)], arguments, sections
            )
        )
        for rank, vector in enumerate(vectors):
            mine = slice(edges[rank], edges[rank + 1])
            if operation == "allreduce" or (operation == "reduce" and rank == root):
                assert np.all(np.abs(vector - right) <= bound)
                assert operation == "reduce" or vector.tobytes() == vectors[0].tobytes()
            elif operation == "reduce_scatter":
                assert np.all(np.abs(vector - right)[mine] <= bound[mine])
            elif operation == "bcast":
                assert vector.tobytes() == inputs[root].tobytes()
            elif operation == "allgather":
                blocks = [inputs[r][edges[r] : edges[r + 1]] for r in range(ranks)]
                assert vector.tobytes() == np.concatenate(blocks).tobytes()
        found[operation] = (
            vectors[root].tobytes() if operation == "reduce"
            else [v[edges[r] : edges[r + 1]].tobytes() for r, v in enumerate(vectors)]
        )  # fmt: skip
    return found


sizes_of = st.one_of(
    st.tuples(st.integers(1, 4), st.integers(1, 5)).map(lambda pair: [pair[0]] * pair[1]),
    st.lists(st.integers(1, 4), min_size=2, max_size=4),
)


@CHECK
@given(sizes=sizes_of, sections=st.integers(1, LANES), seed=st.integers(0, 999), draw=st.data())
def test_sections_in_any_order(sizes: list[int], sections: int, seed: int, draw: Any) -> None:
    """Right results, the same to the last bit in whatever order messages arrive."""
    ranks = sum(sizes)
    counts = draw.draw(st.lists(st.one_of(st.sampled_from([0, 1]), st.integers(0, 40)), min_size=ranks, max_size=ranks))
    root = draw.draw(st.integers(0, ranks - 1))
    once, again = (everything(sizes, counts, root, sections, each) for each in (seed, None))
    assert once == again


COUNT = 5040 * 64
N = COUNT * 8


def measured(operation: str, sizes: list[int], sections: int, model: Model = Model()) -> Simulation:  # noqa: B008
    world, counts = Simulation(sizes, model), parts.balanced(COUNT, sum(sizes))
    arguments = {"allreduce": [], "bcast": [0], "reduce": [0]}.get(operation, [counts])
    world.run(lambda inner, outer: steps_of(operation, sizes, inner, outer, np.ones(COUNT), arguments, sections))
    return world


SLOW = Model(alpha=1e-6, alpha_across=1e-6, bandwidth=4e9, bandwidth_across=1e9)  # the wire takes about as long


@pytest.mark.parametrize("sizes", [[2, 2], [4, 4], [4, 4, 4, 4], [3, 3, 3], [2, 1], [4, 3, 4]], ids=str)
@pytest.mark.parametrize("operation", NODE_ALGORITHMS)
def test_phases_overlap(operation: str, sizes: list[int]) -> None:
    """The first section is between nodes while the last one is not yet through its first phase."""
    world = measured(operation, sizes, 6, SLOW)
    first_across = min(begin for begin, _, across, lane in world.log if across and lane == 0)
    assert first_across < max(end for _, end, across, lane in world.log if not across and lane == 5)
    inside = [(begin, end) for begin, end, across, _ in world.log if not across]
    outside = [(begin, end) for begin, end, across, _ in world.log if across]
    both = sum(
        max(0.0, min(end, last) - max(begin, first)) for begin, end in union(inside) for first, last in union(outside)
    )
    alone = min(sum(end - begin for begin, end in union(kind)) for kind in (inside, outside))
    assert both > 0.5 * alone
    assert world.now < 0.9 * measured(operation, sizes, 1, SLOW).now


def union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The spans of time in which something is on its way."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


@pytest.mark.parametrize("sizes", [[2, 2], [4, 4], [4, 4, 4, 4], [8, 8]], ids=str)
@pytest.mark.parametrize("operation", NODE_ALGORITHMS)
@pytest.mark.parametrize("model", [Model(), SLOW, SLOW._replace(bandwidth_across=1e8)], ids=["fast", "slow", "slower"])
def test_time_of_sections_is_what_the_model_predicts(operation: str, sizes: list[int], model: Model) -> None:
    algorithm = NODE_ALGORITHMS[operation]["hierarchical"]
    for sections in (1, 3, 8):
        predicted = algorithm.seconds(model._replace(gamma=float("inf")), N, sizes[0], len(sizes), sections)
        assert 0.7 * predicted < measured(operation, sizes, sections, model).now < 1.25 * predicted, sections


@pytest.mark.parametrize("sizes", [[2, 2], [3, 3, 3], [4, 1, 1, 3]], ids=str)
@pytest.mark.parametrize("operation", NODE_ALGORITHMS)
def test_sections_send_and_hold_no_more(operation: str, sizes: list[int]) -> None:
    whole, cut = measured(operation, sizes, 1), measured(operation, sizes, LANES)
    assert np.all(np.abs(cut.bytes - whole.bytes) <= 0.01 * N)
    # Of uneven nodes, blocks are copied to lie in sections; a chain needs a segment for each of them.
    more = N if operation in ("allgather", "reduce_scatter", "reduce") and len(set(sizes)) > 1 else 0
    assert all(b <= 1.01 * a + more for a, b in zip(whole.scratched, cut.scratched, strict=True))
    assert max(cut.scratched) <= 2.2 * N


def test_a_pipeline_keeps_the_order_of_sections() -> None:
    """At most two sections in a phase, each entered in turn; one that has nothing to do does not stop others."""
    log: list[Any] = []

    class Never(Flight):
        over = False

        def test(self) -> bool:
            return self.over

        def wait(self) -> None:
            raise AssertionError

    flights = [[Never() for _ in range(3)] for _ in range(4)]

    def phase(section: int, number: int) -> Steps:
        log.append((section, number))
        if number != 1 or section != 1:
            yield flights[section][number]

    running = pipeline([[phase(section, number) for number in range(3)] for section in range(4)])
    next(running)
    assert log == [(0, 0), (1, 0)]
    flights[1][0].over = True  # section 1 overtakes section 0 as far as it may
    next(running)
    assert log[2:] == [(1, 1), (1, 2), (3, 0)]
    flights[0][0].over = True
    next(running)
    assert log[5:] == [(0, 1), (2, 0)]
    for section in flights:
        for flight in section:
            flight.over = True
    assert list(running) == []
    assert sorted(log) == [(section, number) for section in range(4) for number in range(3)]
