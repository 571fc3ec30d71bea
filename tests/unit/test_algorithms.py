"""Collective algorithms over ranks that are threads: results, order, bytes, rounds and memory against the textbook."""

from __future__ import annotations

import functools
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdcomm.algorithms import allgather, allreduce, bcast, gather, hierarchical, leaders, parts, scatter
from gdcomm.algorithms.choose import ALGORITHMS, NODE_ALGORITHMS, Model, choose, costs
from gdcomm.algorithms.link import Link, Sublink
from gdcomm.algorithms.steps import Flight, finish

SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 9, 16]
POISON = 0x7F  # large in every type: a sum or maximum that saw it is wrong
HANG = 10.0
CHECK = settings(max_examples=40, deadline=None, derandomize=True, database=None)


class World:
    """Ranks as threads, and what they did.

    Messages are rendezvous: the sender's memory is read when the receiver is there, and the sender waits for it. So
    what relies on buffers hangs, what hangs fails, and what overwrites memory on its way is found out. Each rank has a
    clock, which runs by a cost model: one port each way, one start for all pieces between two ranks in a round.
    """

    threads = ThreadPoolExecutor(16)

    def __init__(self, ranks: int, op: Any = np.add, seed: int | None = None, model: Model | None = None) -> None:
        self.ranks, self.op, self.seed, self.model = ranks, op, seed, model or Model()
        self.mail: Any = {(a, b): SimpleQueue() for a in range(ranks) for b in range(ranks)}
        self.bytes = np.zeros((ranks, ranks), np.int64)  # from, to
        self.links = [ThreadLink(self, rank) for rank in range(ranks)]

    def run(self, work: Any) -> list[Any]:
        """Do `work(link)` on every rank."""
        futures = [self.threads.submit(self._guard, work, link) for link in self.links]
        errors = [error for error in (future.exception() for future in futures) if error is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, OtherRankFailed)), errors[0])
        assert all(queue.empty() for queue in self.mail.values()), "messages that nobody received"
        return [future.result() for future in futures]

    def _guard(self, work: Any, link: ThreadLink) -> Any:
        try:
            return work(link)
        except BaseException:
            for queue in self.mail.values():
                queue.put(None)
            raise

    @property
    def seconds(self) -> float:
        return max(link.clock for link in self.links)


class OtherRankFailed(Exception):
    pass


class ThreadLink(Link):
    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.size = world, rank, world.ranks
        self.random = random.Random(None if world.seed is None else world.seed * 100 + rank)
        self.clock = 0.0
        self.rounds = self.messages = self.reduced = self.scratches = self.scratched = 0

    def transfer(self, sends: Any, recvs: Any) -> Flight:
        sends = [(v, rank) for v, rank in sends if len(v)]
        recvs = [(v, rank) for v, rank in recvs if len(v)]
        for i, (vector, _) in enumerate(recvs):
            others = [v for v, _ in sends] + [v for v, _ in recvs[:i]]
            assert not any(np.may_share_memory(vector, other) for other in others), "received over what is in use"
            vector.view(np.uint8).fill(POISON)
        self.delay()
        self.rounds += bool(sends or recvs)
        alpha, bandwidth = self.world.model.alpha, self.world.model.bandwidth
        sending, receipts = self.clock, []
        for i, (vector, rank) in enumerate(sends):
            sending += (0 if rank in [r for _, r in sends[:i]] else alpha) + vector.nbytes / bandwidth
            receipts.append(SimpleQueue[bool]())
            self.world.mail[self.rank, rank].put((vector, sending, receipts[-1]))
            self.world.bytes[self.rank, rank] += vector.nbytes
            self.messages += 1
        return Messages(self, recvs, receipts, self.clock, sending)

    def apart(self, lane: int) -> Link:
        return self  # of sections that run at the same time see test_overlap.py

    def get(self, queue: Any) -> Any:
        try:
            item = queue.get(timeout=HANG)
        except Empty:
            raise TimeoutError(f"rank {self.rank} hangs") from None
        if item is None:
            raise OtherRankFailed
        return item

    def delay(self) -> None:
        if self.world.seed is not None and self.random.random() < 0.2:
            time.sleep(self.random.random() * 3e-4)

    def reduce(self, into: Any, lower: Any = None, higher: Any = None) -> None:
        assert (lower is None) != (higher is None)
        other = higher if lower is None else lower
        assert len(other) == len(into)
        assert not np.may_share_memory(other, into)
        self.world.op(*((into, higher) if lower is None else (lower, into)), out=into)
        self.reduced += into.nbytes
        self.clock += into.nbytes / self.world.model.gamma

    def copy(self, to: Any, origin: Any) -> None:
        same = to.ctypes.data == origin.ctypes.data
        assert len(to) == len(origin)
        assert same or not np.may_share_memory(to, origin)
        to[:] = origin
        self.clock += 0 if same else to.nbytes / self.world.model.gamma

    def scratch(self, count: int, like: Any) -> Any:
        self.scratches += 1
        self.scratched += count * like.itemsize
        return np.full(count * like.itemsize, POISON, np.uint8).view(like.dtype)


class Messages(Flight):
    def __init__(self, link: ThreadLink, recvs: Any, receipts: Any, start: float, sent: float) -> None:
        self.link, self.recvs, self.receipts, self.port, self.sent = link, recvs, receipts, start, sent
        self.over = False

    def test(self) -> bool:
        return self.over

    def wait(self) -> None:
        link = self.link
        for i, (vector, rank) in enumerate(self.recvs):
            there, arrival, receipt = link.get(link.world.mail[rank, link.rank])
            assert (len(there), there.dtype) == (len(vector), vector.dtype), "sent and received vectors differ"
            link.delay()
            vector[:] = there
            receipt.put(True)
            again = rank in [r for _, r in self.recvs[:i]]
            self.port += (0 if again else link.world.model.alpha) + vector.nbytes / link.world.model.bandwidth
            self.port = max(self.port, arrival)
        for receipt in self.receipts:
            link.get(receipt)
        link.clock = max(self.sent, self.port)
        self.over = True


# -- operators and data --------------------------------------------------------------------------

MATRIX = np.dtype([(name, "u8") for name in "abcd"])


def compose(f: Any, g: Any, out: Any) -> None:
    """First f, then g, both x -> ax + b modulo 2^16, in one integer: does not commute."""
    a, b = (f >> 16) * (g >> 16), (g >> 16) * (f & 0xFFFF) + (g & 0xFFFF)
    out[:] = (a & 0xFFFF) << 16 | (b & 0xFFFF)


def matmul(x: Any, y: Any, out: Any) -> None:
    """Product of 2 x 2 matrices modulo 2^64: does not commute."""
    values = {
        "a": x["a"] * y["a"] + x["b"] * y["c"],
        "b": x["a"] * y["b"] + x["b"] * y["d"],
        "c": x["c"] * y["a"] + x["d"] * y["c"],
        "d": x["c"] * y["b"] + x["d"] * y["d"],
    }
    for name, value in values.items():
        out[name] = value


COMMUTATIVE = [(np.add, np.dtype("i8")), (np.add, np.dtype("f4")), (np.add, np.dtype("f8")),
               (np.maximum, np.dtype("f4")), (np.maximum, np.dtype("i8"))]  # fmt: skip
ORDERED = [(compose, np.dtype("i8")), (matmul, MATRIX)]


def data(rank: int, count: int, dtype: np.dtype, seed: int = 0) -> Any:
    """Values that differ everywhere; the sum of floats depends on the order."""
    return _data(rank, count, dtype, seed).copy()


@functools.lru_cache(maxsize=4096)
def _data(rank: int, count: int, dtype: np.dtype, seed: int) -> Any:
    generator = np.random.default_rng([rank, count, seed])
    if dtype.kind == "f":
        return (generator.standard_normal(count) * 10.0 ** generator.integers(-3, 4, count)).astype(dtype)
    return generator.integers(1, 1 << 32, count * dtype.itemsize // 8).view(dtype)


def reduced(op: Any, vectors: list[Any]) -> Any:
    """What op makes of the vectors, in order; sums of floats in double precision."""
    wide = [v.astype("f8") if v.dtype.kind == "f" else v.copy() for v in vectors]
    return functools.reduce(lambda a, b: [op(a, b, out=a), a][1], wide)


def assert_equal(result: Any, expected: Any, scale: Any = None) -> None:
    """Equal, or for floats as near as rounding lets them be."""
    if result.dtype.kind == "f" and scale is not None:
        assert np.all(np.abs(result - expected) <= 32 * np.finfo(result.dtype).eps * scale)
    else:
        np.testing.assert_array_equal(result, expected)


def scale(vectors: list[Any]) -> Any:
    return sum(np.abs(v) for v in vectors) if vectors[0].dtype.kind == "f" else None


def names(*operations: str) -> Any:
    """Every algorithm of some operations, on every number of ranks that it is for."""
    found = [
        pytest.param(operation, name, ranks, id=f"{operation}-{name}-{ranks}")
        for operation in operations
        for name, algorithm in ALGORITHMS[operation].items()
        for ranks in SIZES
        if not algorithm.powers or ranks & (ranks - 1) == 0
    ]
    return pytest.mark.parametrize(("operation", "name", "ranks"), found)


def lengths(ranks: int) -> list[int]:
    return sorted({0, 1, 2, ranks - 1, ranks, 2 * ranks + 1, 61})


def roots(ranks: int) -> list[int]:
    return list(range(ranks)) if ranks < 6 else [0, 3, ranks - 2, ranks - 1]


def operators(operation: str, name: str, ranks: int = 1) -> list[Any]:
    """Those that an algorithm is for; on many ranks the most telling ones only."""
    found = COMMUTATIVE if ALGORITHMS[operation][name].commutative else COMMUTATIVE + ORDERED
    return found if ranks < 6 else [found[1], found[-1]]


# -- results -------------------------------------------------------------------------------------


@names("allreduce")
def test_allreduce(operation: str, name: str, ranks: int) -> None:
    run = ALGORITHMS[operation][name].run
    for op, dtype in operators(operation, name, ranks):
        results = []
        for seed in (None, 1):  # with and without delays: the same to the last bit
            world = World(ranks, op, seed if ranks < 9 else None)

            def work(link: Link, dtype: Any = dtype) -> list[Any]:
                vectors = [data(link.rank, count, dtype) for count in lengths(ranks)]
                for vector in vectors:
                    finish(run(link, vector))
                return vectors

            results += world.run(work)
        for vectors, count in zip(zip(*results, strict=True), lengths(ranks), strict=True):
            inputs = [data(rank, count, dtype) for rank in range(ranks)]
            assert {v.tobytes() for v in vectors} == {vectors[0].tobytes()}
            assert_equal(vectors[0], reduced(op, inputs), scale(inputs))


@names("reduce", "bcast")
def test_with_a_root(operation: str, name: str, ranks: int) -> None:
    run = ALGORITHMS[operation][name].run
    cases = [(count, root) for count in lengths(ranks) for root in roots(ranks)]
    for op, dtype in operators(operation, name, ranks) if operation == "reduce" else [(None, np.dtype("u8"))]:

        def work(link: Link, dtype: Any = dtype) -> list[Any]:
            vectors = [data(link.rank, count, dtype) for count, _ in cases]
            for vector, (_, root) in zip(vectors, cases, strict=True):
                finish(run(link, vector, root))
            return vectors

        results = zip(*World(ranks, op, 1 if ranks in (5, 8) else None).run(work), strict=True)
        for vectors, (count, root) in zip(results, cases, strict=True):
            inputs = [data(rank, count, dtype) for rank in range(ranks)]
            if operation == "reduce":
                assert_equal(vectors[root], reduced(op, inputs), scale(inputs))
            else:
                assert {v.tobytes() for v in vectors} == {inputs[root].tobytes()}


@names("scan", "exscan")
def test_scans(operation: str, name: str, ranks: int) -> None:
    for op, dtype in COMMUTATIVE + ORDERED:

        def work(link: Link, dtype: Any = dtype) -> list[Any]:
            vectors = [data(link.rank, count, dtype) for count in (0, 1, 7)]
            for vector in vectors:
                finish(ALGORITHMS[operation][name].run(link, vector))
            return vectors

        for vectors, count in zip(zip(*World(ranks, op, 1).run(work), strict=True), (0, 1, 7), strict=True):
            inputs = [data(rank, count, dtype) for rank in range(ranks)]
            for rank, vector in enumerate(vectors):
                through = inputs[: rank + (operation == "scan")] or inputs[:1]  # rank 0's is left alone
                assert_equal(vector, reduced(op, through), scale(through))


def test_a_chain_with_any_segment() -> None:
    def work(link: Link) -> list[Any]:
        vectors = [data(link.rank, 10, np.dtype("i8")) for _ in range(12)]
        for segment, vector in enumerate(vectors, 1):
            finish(bcast.chain(link, vector, segment % link.size, segment))
        return vectors

    for ranks in (1, 2, 5):
        for vectors in World(ranks, seed=1).run(work):
            for segment, vector in enumerate(vectors, 1):
                assert_equal(vector, data(segment % ranks, 10, np.dtype("i8")))


counts_of = st.integers(1, 9).flatmap(lambda ranks: st.lists(st.integers(0, 9), min_size=ranks, max_size=ranks))


@CHECK
@given(counts=counts_of, seed=st.integers(0, 99))
@pytest.mark.parametrize("name", ALGORITHMS["reduce_scatter"])
def test_reduce_scatter(name: str, counts: list[int], seed: int) -> None:
    algorithm, ranks = ALGORITHMS["reduce_scatter"][name], len(counts)
    op, dtype = operators("reduce_scatter", name)[seed % len(operators("reduce_scatter", name))]
    edges, inputs = parts.edges_of(counts), [data(rank, sum(counts), dtype, seed) for rank in range(ranks)]

    def work(link: Link) -> Any:
        vector = inputs[link.rank].copy()
        finish(algorithm.run(link, vector, counts))
        return parts.blocks(vector, counts)[link.rank]

    runs = [World(ranks, op, delays).run(work) for delays in (None, seed)]
    for rank, (result, again) in enumerate(zip(*runs, strict=True)):
        block = slice(edges[rank], edges[rank + 1])
        assert result.tobytes() == again.tobytes()
        assert_equal(result, reduced(op, inputs)[block], scale([v[block] for v in inputs]))


@CHECK
@given(counts=counts_of, gaps=st.none() | st.integers(0, 3), seed=st.integers(0, 99))
@pytest.mark.parametrize("name", ALGORITHMS["allgather"])
def test_allgather(name: str, counts: list[int], gaps: int | None, seed: int) -> None:
    algorithm = ALGORITHMS["allgather"][name]
    counts = counts[: parts.power_below(len(counts))] if algorithm.powers else counts
    ranks, inputs = len(counts), [data(rank, count, np.dtype("i8")) for rank, count in enumerate(counts)]

    def work(link: Link) -> Any:
        displs, total = layout(counts, gaps, seed + link.rank)  # not the same on all ranks
        vector = np.full(total, -1)
        parts.blocks(vector, counts, displs)[link.rank][:] = inputs[link.rank]
        finish(algorithm.run(link, vector, counts, displs))
        expected = np.full(total, -1)
        for block, values in zip(parts.blocks(expected, counts, displs), inputs, strict=True):
            block[:] = values
        assert_equal(vector, expected)

    World(ranks, None, seed).run(work)


@pytest.mark.parametrize("name", ALGORITHMS["allgather"])
def test_allgather_of_equal_blocks_in_another_order(name: str) -> None:
    def work(link: Link) -> list[int]:
        displs, vector = [6, 2, 0, 4], np.full(8, -1)
        vector[displs[link.rank] :][:2] = link.rank
        finish(ALGORITHMS["allgather"][name].run(link, vector, [2] * 4, displs))
        return vector.tolist()

    assert World(4).run(work) == [[2, 2, 1, 1, 3, 3, 0, 0]] * 4


def layout(counts: list[int], gaps: int | None, seed: int) -> tuple[list[int] | None, int]:
    """Displacements of blocks in any order, with gaps, and the elements they need; None: one after another."""
    if gaps is None:
        return None, sum(counts)
    order = list(range(len(counts)))
    random.Random(seed).shuffle(order)
    displs, end = [0] * len(counts), 0
    for block in order:
        displs[block] = end
        end += counts[block] + gaps
    return displs, end


@CHECK
@given(ranks=st.integers(1, 9), gaps=st.none() | st.integers(0, 3), count=st.integers(-9, 9), seed=st.integers(0, 99))
@pytest.mark.parametrize("name", ["alltoall-pairwise", "alltoall-bruck", "alltoallv-pairwise"])
def test_alltoall(name: str, ranks: int, gaps: int | None, count: int, seed: int) -> None:
    operation, name = name.split("-")
    count = max(0, count)
    counts = np.full((ranks, ranks), count)
    if operation == "alltoallv":
        counts = np.random.default_rng(seed).integers(0, count + 1, (ranks, ranks))

    def work(link: Link) -> None:
        mine, theirs = counts[link.rank].tolist(), counts[:, link.rank].tolist()
        (from_, sent), (to, received) = layout(mine, gaps, seed + link.rank), layout(theirs, gaps, seed - link.rank)
        send, recv, expected = data(link.rank, sent, np.dtype("i8")), np.full(received, -1), np.full(received, -1)
        before = send.copy()
        finish(ALGORITHMS[operation][name].run(link, send, recv, mine, theirs, from_, to))
        for rank, block in enumerate(parts.blocks(expected, theirs, to)):
            displs, total = layout(counts[rank].tolist(), gaps, seed + rank)
            block[:] = parts.blocks(data(rank, total, send.dtype), counts[rank].tolist(), displs)[link.rank]
        assert_equal(recv, expected)
        assert_equal(send, before)

    World(ranks, None, seed).run(work)


@CHECK
@given(counts=counts_of, gaps=st.none() | st.integers(0, 3), in_place=st.booleans(), seed=st.integers(0, 99))
@pytest.mark.parametrize("name", ["gather-binomial", "gather-linear", "scatter-binomial", "scatter-linear"])
def test_gather_and_scatter(name: str, counts: list[int], gaps: int | None, in_place: bool, seed: int) -> None:
    operation, name = name.split("-")
    run, ranks = ALGORITHMS[operation][name].run, len(counts)
    root, (displs, total) = seed % ranks, layout(counts, gaps, seed)
    full = np.full(total, -1)
    for rank, block in enumerate(parts.blocks(full, counts, displs)):
        block[:] = data(rank, counts[rank], np.dtype("i8"))

    def work(link: Link) -> None:
        at_root, known = link.rank == root, counts if link.rank == root or name == "binomial" else None
        mine = data(link.rank, counts[link.rank], np.dtype("i8"))
        block = None if in_place and at_root else mine if operation == "gather" else np.full(len(mine), -1)
        whole = None
        if at_root and operation == "scatter":
            whole = full.copy()
        elif at_root:
            whole = np.full(total, -1)
            if in_place:
                parts.blocks(whole, counts, displs)[root][:] = mine
        send, recv = (block, whole) if operation == "gather" else (whole, block)
        finish(run(link, send, recv, known, displs if at_root else None, root))
        if at_root:
            assert_equal(whole, full)
        if block is not None:
            assert_equal(block, mine)

    World(ranks, None, seed).run(work)


# -- bytes, rounds, time and memory ----------------------------------------------------------------

COUNT = 5040 * 16  # every number of ranks divides it
N = COUNT * 8


def call(operation: str, name: str, ranks: int, count: int = COUNT) -> World:
    """Run an algorithm once on `count` elements in all."""
    world, run, counts = World(ranks), ALGORITHMS[operation][name].run, parts.balanced(count, ranks)

    def work(link: Link) -> None:
        vector = np.ones(count)
        if operation.startswith("alltoall"):
            finish(run(link, vector, np.empty(count), counts, counts))
        elif operation.startswith("gather"):
            finish(run(link, vector[: counts[link.rank]], np.empty(count) if link.rank == 0 else None, counts))
        elif operation.startswith("scatter"):
            finish(run(link, vector if link.rank == 0 else None, np.empty(counts[link.rank]), counts))
        else:
            finish(run(link, vector, *([counts] if operation in ("allgather", "reduce_scatter") else [])))

    world.run(work)
    return world


def lg(ranks: int) -> int:
    return (ranks - 1).bit_length()


@pytest.mark.parametrize("ranks", SIZES[1:])
def test_bytes_that_each_rank_sends(ranks: int) -> None:
    share, power = N * (ranks - 1) // ranks, ranks & (ranks - 1) == 0
    sent = lambda operation, name: call(operation, name, ranks).bytes.sum(1)  # noqa: E731
    for name in ("ring", "circulant", *(["rabenseifner"] if power else [])):
        assert set(sent("allreduce", name)) == {2 * share}
    for operation, name in [("allgather", "ring"), ("allgather", "bruck"), ("reduce_scatter", "ring"),
                            ("reduce_scatter", "circulant"), ("reduce_scatter", "pairwise"),
                            ("alltoall", "pairwise")]:  # fmt: skip
        assert set(sent(operation, name)) == {share}
    distances = sum(bin(distance).count("1") for distance in range(ranks))
    assert set(sent("alltoall", "bruck")) == {N * distances // ranks}
    if power:
        assert set(sent("allreduce", "doubling")) == {lg(ranks) * N}
        assert set(sent("allgather", "doubling")) == set(sent("reduce_scatter", "halving")) == {share}
    else:  # the fold: one vector, to and fro
        assert sent("allreduce", "doubling").max() == (lg(ranks) - 1) * N + N
        assert sent("allreduce", "rabenseifner").max() < 3 * N
    assert sent("bcast", "binomial").sum() == sent("bcast", "chain").sum() == (ranks - 1) * N
    assert sent("bcast", "chain").max() == N
    assert sent("bcast", "scatter_allgather").max() == 2 * share
    assert sent("reduce", "binomial").max() == N
    assert sent("reduce", "rabenseifner").max() <= 2 * share
    assert sent("reduce", "chain").sum() == (ranks - 1) * N
    assert sent("reduce", "chain").max() == N
    assert sent("scan", "inclusive").sum() == N * sum(ranks - (1 << k) for k in range(lg(ranks)))
    assert sent("gather", "linear").sum() == sent("scatter", "linear").sum() == share


@names(*ALGORITHMS)
def test_time_is_what_the_model_predicts(operation: str, name: str, ranks: int) -> None:
    algorithm = ALGORITHMS[operation][name]
    for count in (5040 * 2, COUNT):
        predicted, taken = algorithm.seconds(Model(), count * 8, ranks), call(operation, name, ranks, count).seconds
        copies = 2 * count * 8 / Model().gamma  # of a rank's own block
        assert taken <= 1.001 * predicted + copies
        if ranks & (ranks - 1) == 0:  # of others, a fold or an incomplete tree may take less than is said
            assert taken >= 0.999 * predicted - copies


@pytest.mark.parametrize("ranks", SIZES)
def test_rounds_messages_and_memory(ranks: int) -> None:
    odd = ranks & (ranks - 1)
    bounds = {  # rounds, and scratch as parts of n
        ("allreduce", "doubling"): (lg(ranks) + bool(odd), 1),
        ("allreduce", "rabenseifner"): (2 * lg(ranks), 1 if odd else 1 / 2),
        ("allreduce", "circulant"): (2 * lg(ranks), 1 / 2),
        ("allreduce", "ring"): (2 * (ranks - 1), 1 / ranks),
        ("reduce_scatter", "halving"): (lg(ranks) + bool(odd), 1 if odd else 1 / 2),
        ("reduce_scatter", "circulant"): (lg(ranks), 1 / 2),
        ("reduce_scatter", "ring"): (ranks - 1, 1 / ranks),
        ("allgather", "bruck"): (lg(ranks), 0),
        ("bcast", "binomial"): (2, 0),
        ("bcast", "scatter_allgather"): (2 + lg(ranks), 0),
        ("reduce", "rabenseifner"): (2 + lg(ranks), 1 / 2),
        ("gather", "binomial"): (2, 1 / 2),
        ("scatter", "binomial"): (2, 1 / 2),
        ("alltoall", "bruck"): (lg(ranks), (lg(ranks) + 1) / 2),
    }
    for (operation, name), (rounds, scratch) in bounds.items():
        for link in call(operation, name, ranks).links:
            assert link.rounds <= rounds, (operation, name)
            assert link.messages <= 2 * rounds + lg(ranks), (operation, name)
            grows = 2 if name == "ring" and N % ranks else 1  # from a shorter block to a longer one
            assert link.scratched <= grows * scratch * N + grows * 8, (operation, name)
            assert link.scratches <= grows, (operation, name)


@pytest.mark.parametrize("ranks", SIZES)
def test_reductions_are_shared_out(ranks: int) -> None:
    for operation, name in [("allreduce", "circulant"), ("allreduce", "ring"), ("reduce_scatter", "circulant")]:
        assert {link.reduced for link in call(operation, name, ranks).links} == {N * (ranks - 1) // ranks}


# -- several nodes -----------------------------------------------------------------------------------


def nodes_of(sizes: list[int]) -> np.ndarray:
    return np.repeat(np.arange(len(sizes)), sizes)


def links_of(link: Link, sizes: list[int]) -> tuple[Link, Link | None]:
    """The link inside the node, and that across: of the ranks of this place, or of the leaders."""
    node = nodes_of(sizes)
    first = np.cumsum([0, *sizes])
    inside = np.flatnonzero(node == node[link.rank]).tolist()
    place = inside.index(link.rank)
    if len(set(sizes)) > 1 and place:
        return Sublink(link, inside), None
    return Sublink(link, inside), Sublink(link, (first[:-1] + place).tolist())


def node_call(operation: str, link: Link, sizes: list[int], vector: Any, *arguments: Any) -> None:
    inner, outer = links_of(link, sizes)
    even = len(set(sizes)) == 1
    run = NODE_ALGORITHMS[operation]["hierarchical" if even else "leaders"].run
    more = [] if even or operation == "allreduce" else [sizes, int(nodes_of(sizes)[link.rank])]
    finish(run(inner, outer, vector, *arguments, *more))


def crossing(world: World, sizes: list[int]) -> np.ndarray:
    """Bytes that leave each node."""
    node = nodes_of(sizes)
    out = world.bytes * (node[:, None] != node[None, :])
    return np.array([out[node == n].sum() for n in range(len(sizes))])


NODES = [[1, 1], [3], [2, 2], [3, 3], [2, 2, 2], [4, 4, 4, 4], [1, 2], [3, 1, 2], [4, 1, 1, 3]]


@pytest.mark.parametrize("sizes", NODES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 5, 64, 101])
def test_nodes(sizes: list[int], count: int) -> None:
    ranks, dtype = sum(sizes), np.dtype("f4")
    counts = np.random.default_rng(count).multinomial(count, np.ones(ranks) / ranks).tolist()
    inputs = [data(rank, count, dtype) for rank in range(ranks)]
    total, bound = reduced(np.add, inputs), scale(inputs)

    def work(link: Link) -> Any:
        node_call("allreduce", link, sizes, summed := inputs[link.rank].copy())
        node_call("reduce_scatter", link, sizes, scattered := inputs[link.rank].copy(), counts)
        gathered = np.full(count, -1, dtype)
        mine = slice(sum(counts[: link.rank]), sum(counts[: link.rank + 1]))
        gathered[mine] = inputs[0][mine]
        node_call("allgather", link, sizes, gathered, counts)
        assert_equal(gathered, inputs[0])
        assert_equal(scattered[mine], total[mine], None if bound is None else bound[mine])
        for root in roots(ranks):
            vector = inputs[link.rank].copy()
            node_call("bcast", link, sizes, vector, root)
            assert_equal(vector, inputs[root])
            node_call("reduce", link, sizes, vector := inputs[link.rank].copy(), root)
            if link.rank == root:
                assert_equal(vector, total, bound)
        return summed

    runs = [World(ranks, np.add, seed).run(work) for seed in (None, 3)]
    assert len({vector.tobytes() for results in runs for vector in results}) == 1
    assert_equal(runs[0][0], total, bound)


@pytest.mark.parametrize("sizes", NODES, ids=str)
@pytest.mark.parametrize("operation", NODE_ALGORITHMS)
def test_bytes_between_nodes(operation: str, sizes: list[int]) -> None:
    ranks, nodes = sum(sizes), len(sizes)
    counts = parts.balanced(COUNT, ranks)
    arguments = {"allreduce": [], "bcast": [0], "reduce": [0]}.get(operation, [counts])
    world = World(ranks)
    world.run(lambda link: node_call(operation, link, sizes, np.ones(COUNT), *arguments))
    left = crossing(world, sizes)
    least = (2 if operation == "allreduce" else 1) * (nodes - 1) * N
    assert left.sum() <= 1.05 * least
    inside = world.bytes.sum() - left.sum()
    assert inside <= 2 * sum((size - 1 + lg(size) / 2) * N for size in sizes), "two passes at most"
    if operation == "bcast":
        assert inside <= sum((size - 1 + lg(size) / 2) * N for size in sizes), "one pass"
    if len(set(sizes)) == 1:  # all nodes, and all ranks of a node, have an equal part in it
        each = N if operation in ("bcast", "reduce") and nodes > 1 else least / nodes
        assert left.max() <= 1.05 * each
        node = nodes_of(sizes)
        out = (world.bytes * (node[:, None] != node[None, :])).sum(1)
        assert out.max() <= 1.05 * each / sizes[0]


@pytest.mark.parametrize("sizes", [[2, 2], [4, 4, 4, 4], [8, 8]], ids=str)
@pytest.mark.parametrize("operation", NODE_ALGORITHMS)
def test_time_over_nodes_is_what_the_model_predicts(operation: str, sizes: list[int]) -> None:
    model = Model(alpha_across=Model().alpha, bandwidth_across=Model().bandwidth)
    ranks, nodes = sum(sizes), len(sizes)
    arguments = {"allreduce": [], "bcast": [0], "reduce": [0]}.get(operation, [parts.balanced(COUNT, ranks)])
    world = World(ranks, model=model)
    world.run(lambda link: node_call(operation, link, sizes, np.ones(COUNT), *arguments))
    predicted = NODE_ALGORITHMS[operation]["hierarchical"].seconds(model, N, sizes[0], nodes, 1)
    assert world.seconds <= 1.05 * predicted + 4 * N / model.gamma


# -- parts, links and the choice -----------------------------------------------------------------------


@given(st.integers(0, 1000), st.integers(1, 40))
def test_balanced_blocks(count: int, ranks: int) -> None:
    counts = parts.balanced(count, ranks)
    assert sum(counts) == count
    assert len(counts) == ranks
    assert max(counts) - min(counts) <= 1


@given(st.integers(1, 70), st.data())
def test_trees(ranks: int, draw: Any) -> None:
    root = draw.draw(st.integers(0, ranks - 1))
    trees = [parts.tree(rank, ranks, root) for rank in range(ranks)]
    assert trees[root][:3] == (None, 0, ranks)
    parents = Counter(tree.parent for tree in trees)
    assert parents[None] == 1
    for rank, tree in enumerate(trees):
        assert parents[rank] == len(tree.children) <= lg(ranks)
        held = {rank}
        for child, first, last in tree.children:
            assert trees[child].parent == rank
            assert trees[child][1:3] == (first, last)
            assert first - 1 in held or last in held, "a branch joins its neighbours"
            held |= set(range(first, last))
        assert held == set(range(tree.first, tree.last))


@pytest.mark.parametrize("ranks", range(1, 70))
def test_small_parts(ranks: int) -> None:
    assert parts.rounds(ranks) == lg(ranks) == len(parts.halves(ranks))
    assert parts.power_below(ranks) <= ranks < 2 * parts.power_below(ranks)
    edges = parts.edges_of([rank % 3 for rank in range(ranks)])
    vector = np.arange(edges[-1])
    for first in {0, ranks // 3, ranks - 1}:
        for number in (0, 1, ranks // 2, ranks):
            pieces = parts.around(vector, edges, first, number)
            wanted = [vector[edges[b % ranks] : edges[b % ranks + 1]] for b in range(first, first + number)]
            np.testing.assert_array_equal(np.concatenate(pieces), np.concatenate([vector[:0], *wanted]))
            assert len(pieces) <= 2


def test_a_hang_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "HANG", 0.05)

    def one_after_another(link: Link) -> None:
        link.exchange(np.ones(1), 1 - link.rank, None, 0).wait()
        link.exchange(None, 0, np.ones(1), 1 - link.rank).wait()

    with pytest.raises((TimeoutError, OtherRankFailed)):
        World(2).run(one_after_another)


def test_doubling_wants_a_power_of_two() -> None:
    with pytest.raises(AssertionError, match="power of two"):
        World(3).run(lambda link: finish(allgather.doubling(link, np.ones(3), [1, 1, 1])))


def test_in_place_gather_and_scatter_of_whole_vectors() -> None:
    counts = [2, 0, 3, 1, 1]

    def work(link: Link) -> None:
        for root in range(5):
            vector = np.arange(7) if link.rank == root else np.full(7, -1)
            finish(scatter.in_place(link, vector, counts, root))
            assert_equal(parts.blocks(vector, counts)[link.rank], parts.blocks(np.arange(7), counts)[link.rank])
            finish(gather.in_place(link, vector, counts, root))
            assert_equal(vector, np.arange(7)) if link.rank == root else None

    World(5, seed=2).run(work)


def test_other_ways_across_nodes() -> None:
    def work(link: Link) -> Any:
        inner, outer = links_of(link, [2, 2, 2])
        vector = np.full(5, link.rank)
        finish(hierarchical.allreduce(inner, outer, vector, across=allreduce.doubling))
        finish(hierarchical.bcast(inner, outer, other := np.full(5, link.rank), 3, across=bcast.binomial))
        return vector.tolist(), other.tolist()

    assert World(6).run(work) == [([15] * 5, [3] * 5)] * 6


def test_there_is_no_such_root() -> None:
    with pytest.raises(ValueError, match="no such rank"):
        World(1).run(lambda link: finish(leaders.bcast(link, link, np.ones(1), 1, [1], 0)))


def chosen(operation: str, nbytes: int, *sizes: int, **more: Any) -> str:
    return choose(operation, nbytes, sizes, **more)[0]


def test_the_choice() -> None:
    assert chosen("allreduce", 8, 8) == chosen("allreduce", 8, 6) == "doubling"
    assert chosen("allreduce", 1 << 30, 8) == "rabenseifner"
    assert chosen("allreduce", 1 << 30, 6) == "circulant", "no fold"
    assert chosen("allreduce", 1 << 30, 6, commutative=False) == "doubling", "keeps rank order"
    assert chosen("reduce_scatter", 1 << 10, 8, commutative=False) == "tree"
    assert chosen("reduce_scatter", 1 << 30, 8, commutative=False) == "pairwise"
    assert chosen("allgather", 1 << 20, 8) == "doubling"
    assert chosen("allgather", 1 << 20, 6) == "bruck"
    assert chosen("bcast", 8, 8) == "binomial"
    assert chosen("bcast", 1 << 30, 8) == "chain"
    assert chosen("alltoall", 8, 8) == "bruck"
    assert chosen("alltoall", 1 << 30, 8) == "pairwise"
    assert chosen("alltoallv", 8, 8) == "pairwise"
    assert chosen("allreduce", 1 << 28, 8, 8, 8, 8) == "hierarchical"
    assert chosen("allreduce", 8, 8, 8, 8, 8) == "doubling"
    assert chosen("allreduce", 1 << 28, 8, 8, 8, 8, commutative=False) == "doubling"
    assert "leaders" in costs("bcast", 1 << 28, (8, 8, 8, 7))
    for operation, algorithms in ALGORITHMS.items():
        assert chosen(operation, 1 << 20, 1) in algorithms


@pytest.mark.parametrize("operation", NODE_ALGORITHMS)
def test_leaders_where_ranks_of_uneven_nodes_share_a_port(operation: str) -> None:
    slow = Model(bandwidth_across=1.25e9, ports=1)  # 10 Gbit/s
    for sizes in [(2, 1), (4, 3), (8, 8, 7), (1, 8)]:
        assert chosen(operation, 1 << 26, *sizes, ordered=False, model=slow) == "leaders"
        assert chosen(operation, 8, *sizes, model=slow) != "leaders", "more messages, one after another"
        fast = slow._replace(ports=8, bandwidth_across=40e9)
        assert chosen(operation, 1 << 26, *sizes, model=fast) != "leaders", "one port carries all, others nothing"
    assert chosen("allreduce", 1 << 26, 4, 3, model=slow) == "leaders", "the ring has more bytes to send across"
    fast = slow._replace(bandwidth_across=24e9)
    assert chosen("bcast", 1 << 26, 4, 3, model=fast) == "chain", "one rank of a node sends across"


def test_sections() -> None:
    """Few for little data, more where phases inside and across take equally long, none where there is one phase."""
    assert choose("allreduce", 1 << 28, (8,)) == ("rabenseifner", 1)
    for operation in NODE_ALGORITHMS:
        found = [NODE_ALGORITHMS[operation]["hierarchical"].best(Model(), 1 << k, 4, 2)[1] for k in range(10, 31)]
        assert found == sorted(found)
        assert found[0] == 1
        assert found[-1] > 4
        assert NODE_ALGORITHMS[operation]["hierarchical"].best(Model(), 1 << 28, 1, 2)[1] == 1, "nothing inside"


def test_predicted_times() -> None:
    model = Model(alpha=3.5e-6, bandwidth=48e9, gamma=float("inf"))
    found = {name: seconds for name, (seconds, _) in costs("allreduce", 1 << 20, (64,), model=model).items()}
    assert found["rabenseifner"] == pytest.approx(85e-6, rel=0.01)
    assert found["doubling"] == pytest.approx(152e-6, rel=0.01)
    assert found["ring"] == pytest.approx(484e-6, rel=0.01)
    assert found["circulant"] == found["rabenseifner"]
    assert set(costs("allgather", 8, (6,))) == {"bruck", "ring"}
