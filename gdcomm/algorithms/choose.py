"""Which algorithm, by a cost model: pure functions of what is equal on all ranks, so that all ranks choose alike.

A message of m bytes takes alpha + m / bandwidth, to and fro at the same time; reducing it takes m / gamma. Inside a
node nobody stands in anybody's way: without contention a ring never wins there, which on real machines it may.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple

from gdcomm.algorithms import (
    allgather,
    allreduce,
    alltoall,
    bcast,
    gather,
    hierarchical,
    leaders,
    reduce,
    reduce_scatter,
    scan,
    scatter,
)
from gdcomm.algorithms.link import LANES
from gdcomm.algorithms.parts import power_below, rounds
from gdcomm.algorithms.steps import Steps

__all__ = ["ALGORITHMS", "NODE_ALGORITHMS", "Algorithm", "Model", "NodeAlgorithm", "choose", "costs"]


class Model(NamedTuple):
    """What messages and reductions cost. The defaults are for staged slots between GPUs of one node.

    Args:
        alpha: seconds to begin a message.
        bandwidth: bytes/s of a rank's messages, each way.
        gamma: bytes/s that a GPU reduces.
        alpha_across, bandwidth_across: the same between nodes, for a rank that has a network port to itself. Not
            measured: ports of 200 Gbit/s are assumed.
        ports: of each node, shared by all ranks that send at once; 0: one for each rank.
    """

    alpha: float = 20e-6
    bandwidth: float = 40e9
    gamma: float = 1e12
    alpha_across: float = 20e-6
    bandwidth_across: float = 24e9
    ports: int = 0

    def across(self, senders: int) -> Model:
        """The model where every message leaves its node, which so many ranks of it send at once."""
        shared = self.bandwidth_across * min(1.0, (self.ports or senders) / senders)
        return self._replace(alpha=self.alpha_across, bandwidth=shared)

    def steps(self, number: float, nbytes: float, reduced: float = 0) -> float:
        """Seconds of so many messages one after another, of so many bytes in all, and bytes reduced."""
        return number * self.alpha + nbytes / self.bandwidth + reduced / self.gamma


Cost = Callable[[Model, float, int], float]


class Algorithm(NamedTuple):
    """A collective algorithm.

    Args:
        run: the function; those of an operation take the same arguments.
        seconds: its time by a model, for n bytes on p ranks.
        commutative: whether the operator must commute.
        powers: whether it is for powers of two of ranks only.
        neighbours: whether ranks send to the next one only, so that in order of nodes one of each sends to another.
    """

    run: Callable[..., Steps]
    seconds: Cost
    commutative: bool = False
    powers: bool = False
    neighbours: bool = False


class NodeAlgorithm(NamedTuple):
    """A collective algorithm for several nodes, with links inside and across, whose phases overlap.

    Args:
        run: the function; it takes the two links instead of one, and last the number of sections.
        inside: the time of its phases inside a node by a model, for n bytes on the ranks of a node.
        across: the same of those across, for n bytes on as many ranks as nodes.
        commutative: whether the operator must commute.
        shares: whether each rank of a node carries a share of the data across, else one carries all.
        again: `across` of each further section, if that is less.
    """

    run: Callable[..., Steps]
    inside: Cost
    across: Cost
    commutative: bool = False
    shares: bool = True
    again: Cost | None = None

    def seconds(self, m: Model, n: float, g: int, nodes: int, sections: int) -> float:
        """Its time for n bytes on g ranks on each node: one section, and of others what takes longest."""
        wire, part = (m.across(g), n / sections / g) if self.shares else (m.across(1), n / sections)
        inside, further = self.inside(m, n / sections, g), (self.again or self.across)(wire, part, nodes)
        return inside + self.across(wire, part, nodes) + (sections - 1) * max(inside, further)

    def best(self, m: Model, n: float, g: int, nodes: int) -> tuple[float, int]:
        """The least time, and the fewest sections that take it."""
        return min((self.seconds(m, n, g, nodes, sections), sections) for sections in range(1, LANES + 1))


def _fold(m: Model, n: float, p: int) -> float:
    return 0.0 if p == power_below(p) else m.steps(2, 2 * n, n)


def _once(m: Model, n: float, p: int) -> float:
    """Every block to or from somewhere, in lg p messages: half of a reduce-scatter and allgather, without reduction."""
    return m.steps(rounds(p), (p - 1) / p * n)


def _linear(m: Model, n: float, p: int) -> float:
    return m.steps(p - 1, (p - 1) / p * n)


def _twice_linear(m: Model, n: float, p: int) -> float:
    return 2 * _linear(m, n, p)


def _tree(m: Model, n: float, p: int) -> float:
    return rounds(p) * m.steps(1, n)


def _reducing_tree(m: Model, n: float, p: int) -> float:
    return rounds(p) * m.steps(1, n, n)


def _twice(m: Model, n: float, p: int) -> float:
    return 2 * _once(m, n, p)


def _reducing(cost: Cost) -> Cost:
    """The cost with every byte reduced that a reduce-scatter reduces."""
    return lambda m, n, p: cost(m, n, p) + (p - 1) / p * n / m.gamma


def _chain(m: Model, n: float, p: int) -> float:
    segments = bcast.segments(int(n), p)
    return 0.0 if p == 1 else (p - 2 + segments) * m.steps(1, n / segments)


def _passing(m: Model, n: float, p: int) -> float:
    """What comes through a chain after something else."""
    segments = bcast.segments(int(n), p)
    return 0.0 if p == 1 else m.steps(segments, n)


def _reducing_chain(m: Model, n: float, p: int) -> float:
    segments = bcast.segments(int(n), p)
    return 0.0 if p == 1 else (p - 2 + segments) * m.steps(1, n / segments, n / segments)


def _reduced_passing(m: Model, n: float, p: int) -> float:
    return _passing(m, n, p) + (n / m.gamma if p > 1 else 0.0)


def _exclusive(m: Model, n: float, p: int) -> float:
    return rounds(p) * m.steps(1, n, 2 * n)


def _alltoall_bruck(m: Model, n: float, p: int) -> float:
    return rounds(p) * m.steps(1, n / 2, n) + n / m.gamma  # packing costs what reducing does


def _folded(cost: Cost) -> Cost:
    """The cost of an algorithm for powers of two, with the fold that other numbers need."""
    return lambda m, n, p: cost(m, n, power_below(p)) + _fold(m, n, p)


# The first of equals is chosen.
ALGORITHMS: Mapping[str, Mapping[str, Algorithm]] = {
    "allreduce": {
        "doubling": Algorithm(allreduce.doubling, _folded(_reducing_tree)),
        "rabenseifner": Algorithm(allreduce.rabenseifner, _folded(_reducing(_twice)), commutative=True),
        "circulant": Algorithm(allreduce.circulant, _reducing(_twice), commutative=True),
        "ring": Algorithm(allreduce.ring, _reducing(_twice_linear), commutative=True, neighbours=True),
    },
    "reduce_scatter": {
        "halving": Algorithm(reduce_scatter.halving, _folded(_reducing(_once)), commutative=True),
        "circulant": Algorithm(reduce_scatter.circulant, _reducing(_once), commutative=True),
        "ring": Algorithm(reduce_scatter.ring, _reducing(_linear), commutative=True, neighbours=True),
        "tree": Algorithm(reduce_scatter.tree, lambda m, n, p: _reducing_tree(m, n, p) + _once(m, n, p)),
        "pairwise": Algorithm(reduce_scatter.pairwise, _reducing(_linear)),
    },
    "allgather": {
        "doubling": Algorithm(allgather.doubling, _once, powers=True),
        "bruck": Algorithm(allgather.bruck, _once),
        "ring": Algorithm(allgather.ring, _linear, neighbours=True),
    },
    "bcast": {
        "binomial": Algorithm(bcast.binomial, _tree),
        "scatter_allgather": Algorithm(bcast.scatter_allgather, _twice),
        "chain": Algorithm(bcast.chain, _chain, neighbours=True),
    },
    "reduce": {
        "binomial": Algorithm(reduce.binomial, _reducing_tree),
        "rabenseifner": Algorithm(reduce.rabenseifner, _reducing(_twice), commutative=True),
        "chain": Algorithm(reduce.chain, _reducing_chain, commutative=True, neighbours=True),
    },
    "alltoall": {
        "pairwise": Algorithm(alltoall.pairwise, _linear),
        "bruck": Algorithm(alltoall.bruck, _alltoall_bruck),
    },
    "alltoallv": {"pairwise": Algorithm(alltoall.pairwise, _linear)},
    "gather": {"binomial": Algorithm(gather.binomial, _once), "linear": Algorithm(gather.linear, _linear)},
    "gatherv": {"linear": Algorithm(gather.linear, _linear)},  # only the root knows the counts
    "scatter": {"binomial": Algorithm(scatter.binomial, _once), "linear": Algorithm(scatter.linear, _linear)},
    "scatterv": {"linear": Algorithm(scatter.linear, _linear)},
    "scan": {"inclusive": Algorithm(scan.inclusive, _reducing_tree)},
    "exscan": {"exclusive": Algorithm(scan.exclusive, _exclusive)},
}


def _four_times(m: Model, n: float, p: int) -> float:
    return 2 * _twice(m, n, p)


def _thrice(m: Model, n: float, p: int) -> float:
    return 3 * _once(m, n, p)


def _reduced_and_passed_on(m: Model, n: float, p: int) -> float:
    return _reducing(_twice)(m, n, p) + (m.steps(1, n) if p > 1 else 0.0)


NODE_ALGORITHMS: Mapping[str, Mapping[str, NodeAlgorithm]] = {
    "allreduce": {
        "hierarchical": NodeAlgorithm(hierarchical.allreduce, _reducing(_twice), _reducing(_twice), True),
        "leaders": NodeAlgorithm(leaders.allreduce, _reducing(_four_times), _reducing(_twice), True, False),
    },
    "reduce_scatter": {
        "hierarchical": NodeAlgorithm(hierarchical.reduce_scatter, _reducing(_once), _reducing(_once), True),
        "leaders": NodeAlgorithm(leaders.reduce_scatter, _reducing(_thrice), _reducing(_once), True, False),
    },
    "allgather": {
        "hierarchical": NodeAlgorithm(hierarchical.allgather, _once, _once),
        "leaders": NodeAlgorithm(leaders.allgather, _thrice, _once, shares=False),
    },
    "bcast": {
        "hierarchical": NodeAlgorithm(hierarchical.bcast, _twice, _chain, again=_passing),
        "leaders": NodeAlgorithm(leaders.bcast, _four_times, _chain, shares=False, again=_passing),
    },
    "reduce": {
        "hierarchical": NodeAlgorithm(
            hierarchical.reduce, _reducing(_twice), _reducing_chain, True, again=_reduced_passing
        ),
        "leaders": NodeAlgorithm(
            leaders.reduce, _reduced_and_passed_on, _reducing_chain, True, False, again=_reduced_passing
        ),
    },
}


@lru_cache(maxsize=4096)
def choose(
    operation: str,
    nbytes: int,
    sizes: tuple[int, ...],
    commutative: bool = True,
    ordered: bool = True,
    model: Model = Model(),  # noqa: B008  it is immutable
) -> tuple[str, int]:
    """Choose the algorithm of the least predicted time, and its sections; arguments as in `costs`."""
    predicted = costs(operation, nbytes, sizes, commutative, ordered, model)
    name = min(predicted, key=lambda name: predicted[name][0])
    return name, predicted[name][1]


def costs(
    operation: str,
    nbytes: int,
    sizes: tuple[int, ...],
    commutative: bool = True,
    ordered: bool = True,
    model: Model = Model(),  # noqa: B008  it is immutable
) -> dict[str, tuple[float, int]]:
    """Predict the time of every algorithm that can do an operation.

    Args:
        operation: a key of `ALGORITHMS`.
        nbytes: of the whole vector; of all blocks, for operations that have blocks.
        sizes: ranks of each node. Where there are several, every message of a flat algorithm is taken to leave its
            node, except those between neighbours; nodes are taken to be as large as the largest.
        commutative: whether the operator is.
        ordered: whether ranks are numbered through the nodes.
        model: what messages and reductions cost.

    Returns:
        Seconds and sections, by the algorithm's name: in `NODE_ALGORITHMS` if it is "hierarchical" or "leaders", else
        in `ALGORITHMS`, with one section.
    """
    ranks, nodes, most = sum(sizes), len(sizes), max(sizes)

    def flat(neighbours: bool) -> Model:
        return model if nodes == 1 else model.across(1 if neighbours and ordered else most)

    predicted = {
        name: (algorithm.seconds(flat(algorithm.neighbours), nbytes, ranks), 1)
        for name, algorithm in ALGORITHMS[operation].items()
        if (commutative or not algorithm.commutative) and (ranks == power_below(ranks) or not algorithm.powers)
    }
    if nodes > 1 and operation in NODE_ALGORITHMS:
        name = "hierarchical" if len(set(sizes)) == 1 else "leaders"
        algorithm = NODE_ALGORITHMS[operation][name]
        if commutative or not algorithm.commutative:
            predicted[name] = algorithm.best(model, nbytes, most, nodes)
    return predicted
