"""Which algorithm, by a cost model: pure functions of what is equal on all ranks, so that all ranks choose alike.

A message of m bytes takes alpha + m / bandwidth, to and fro at the same time; reducing it takes m / gamma. Nobody
stands in anybody's way: without contention a ring never wins, which on real machines it may.
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
from gdcomm.algorithms.parts import power_below, rounds

__all__ = ["ALGORITHMS", "NODE_ALGORITHMS", "Algorithm", "Model", "NodeAlgorithm", "choose", "costs"]


class Model(NamedTuple):
    """What messages and reductions cost. The defaults are for staged slots between GPUs of one node.

    Args:
        alpha: seconds to begin a message.
        bandwidth: bytes/s of a rank's messages, each way.
        gamma: bytes/s that a GPU reduces.
        alpha_across, bandwidth_across: the same between nodes, where all ranks of a node send at once. Not measured:
            a 200 Gbit/s port for each rank is assumed.
    """

    alpha: float = 20e-6
    bandwidth: float = 40e9
    gamma: float = 1e12
    alpha_across: float = 20e-6
    bandwidth_across: float = 24e9

    def across(self) -> Model:
        """The model where every message leaves its node."""
        return self._replace(alpha=self.alpha_across, bandwidth=self.bandwidth_across)

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
    """

    run: Callable[..., None]
    seconds: Cost
    commutative: bool = False
    powers: bool = False


class NodeAlgorithm(NamedTuple):
    """A collective algorithm for several nodes, with links inside and across.

    Args:
        run: the function; it takes the two links instead of one.
        seconds: its time by a model, for n bytes, on g ranks on each of N nodes.
        commutative: whether the operator must commute.
    """

    run: Callable[..., None]
    seconds: Callable[[Model, float, int, int], float]
    commutative: bool = False


def _fold(m: Model, n: float, p: int) -> float:
    return 0.0 if p == power_below(p) else m.steps(2, 2 * n, n)


def _once(m: Model, n: float, p: int) -> float:
    """Every block to or from somewhere, in lg p messages: half of a reduce-scatter and allgather, without reduction."""
    return m.steps(rounds(p), (p - 1) / p * n)


def _linear(m: Model, n: float, p: int) -> float:
    return m.steps(p - 1, (p - 1) / p * n)


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


def _reducing_chain(m: Model, n: float, p: int) -> float:
    segments = bcast.segments(int(n), p)
    return 0.0 if p == 1 else (p - 2 + segments) * m.steps(1, n / segments, n / segments)


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
        "ring": Algorithm(allreduce.ring, _reducing(lambda m, n, p: 2 * _linear(m, n, p)), commutative=True),
    },
    "reduce_scatter": {
        "halving": Algorithm(reduce_scatter.halving, _folded(_reducing(_once)), commutative=True),
        "circulant": Algorithm(reduce_scatter.circulant, _reducing(_once), commutative=True),
        "ring": Algorithm(reduce_scatter.ring, _reducing(_linear), commutative=True),
        "tree": Algorithm(reduce_scatter.tree, lambda m, n, p: _reducing_tree(m, n, p) + _once(m, n, p)),
        "pairwise": Algorithm(reduce_scatter.pairwise, _reducing(_linear)),
    },
    "allgather": {
        "doubling": Algorithm(allgather.doubling, _once, powers=True),
        "bruck": Algorithm(allgather.bruck, _once),
        "ring": Algorithm(allgather.ring, _linear),
    },
    "bcast": {
        "binomial": Algorithm(bcast.binomial, _tree),
        "scatter_allgather": Algorithm(bcast.scatter_allgather, _twice),
        "chain": Algorithm(bcast.chain, _chain),
    },
    "reduce": {
        "binomial": Algorithm(reduce.binomial, _reducing_tree),
        "rabenseifner": Algorithm(reduce.rabenseifner, _reducing(_twice), commutative=True),
        "chain": Algorithm(reduce.chain, _reducing_chain, commutative=True),
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


def _shares(inside: Cost, across: Cost) -> Callable[[Model, float, int, int], float]:
    """The cost of `hierarchical`: all data inside, a share of it across."""
    return lambda m, n, g, nodes: inside(m, n, g) + across(m.across(), n / g, nodes)


def _whole(inside: Cost, across: Cost) -> Callable[[Model, float, int, int], float]:
    """The cost of `leaders`: all data inside, all of it across."""
    return lambda m, n, g, nodes: inside(m, n, g) + across(m.across(), n, nodes)


def _four_times(m: Model, n: float, p: int) -> float:
    return 2 * _twice(m, n, p)


def _thrice(m: Model, n: float, p: int) -> float:
    return 3 * _once(m, n, p)


NODE_ALGORITHMS: Mapping[str, Mapping[str, NodeAlgorithm]] = {
    "allreduce": {
        "hierarchical": NodeAlgorithm(hierarchical.allreduce, _shares(_reducing(_twice), _reducing(_twice)), True),
        "leaders": NodeAlgorithm(leaders.allreduce, _whole(_reducing(_four_times), _reducing(_twice)), True),
    },
    "reduce_scatter": {
        "hierarchical": NodeAlgorithm(hierarchical.reduce_scatter, _shares(_reducing(_once), _reducing(_once)), True),
        "leaders": NodeAlgorithm(leaders.reduce_scatter, _whole(_reducing(_thrice), _reducing(_once)), True),
    },
    "allgather": {
        "hierarchical": NodeAlgorithm(hierarchical.allgather, _shares(_once, _once)),
        "leaders": NodeAlgorithm(leaders.allgather, _whole(_thrice, _once)),
    },
    "bcast": {
        "hierarchical": NodeAlgorithm(hierarchical.bcast, _shares(_twice, _chain)),
        "leaders": NodeAlgorithm(leaders.bcast, _whole(_four_times, _chain)),
    },
    "reduce": {
        "hierarchical": NodeAlgorithm(hierarchical.reduce, _shares(_reducing(_twice), _reducing_chain), True),
        "leaders": NodeAlgorithm(leaders.reduce, _whole(_reducing(_four_times), _reducing_chain), True),
    },
}


@lru_cache(maxsize=4096)
def choose(
    operation: str,
    nbytes: int,
    ranks: int,
    nodes: int = 1,
    commutative: bool = True,
    even: bool = True,
    model: Model = Model(),  # noqa: B008  it is immutable
) -> str:
    """Choose the algorithm of the least predicted time; arguments as in `costs`."""
    predicted = costs(operation, nbytes, ranks, nodes, commutative, even, model)
    return min(predicted, key=predicted.__getitem__)


def costs(
    operation: str,
    nbytes: int,
    ranks: int,
    nodes: int = 1,
    commutative: bool = True,
    even: bool = True,
    model: Model = Model(),  # noqa: B008  it is immutable
) -> dict[str, float]:
    """Predict the time of every algorithm that can do an operation.

    Args:
        operation: a key of `ALGORITHMS`.
        nbytes: of the whole vector; of all blocks, for operations that have blocks.
        ranks: how many, on all nodes.
        nodes: how many. Where there are several, every message of a flat algorithm is taken to leave its node.
        commutative: whether the operator is.
        even: whether all nodes have the same number of ranks.
        model: what messages and reductions cost.

    Returns:
        Seconds, by the algorithm's name: in `NODE_ALGORITHMS` if it is "hierarchical" or "leaders", else in
        `ALGORITHMS`.
    """
    flat = model if nodes == 1 else model.across()
    predicted = {
        name: algorithm.seconds(flat, nbytes, ranks)
        for name, algorithm in ALGORITHMS[operation].items()
        if (commutative or not algorithm.commutative) and (ranks == power_below(ranks) or not algorithm.powers)
    }
    if nodes > 1 and operation in NODE_ALGORITHMS:
        name = "hierarchical" if even else "leaders"
        algorithm = NODE_ALGORITHMS[operation][name]
        if commutative or not algorithm.commutative:
            predicted[name] = algorithm.seconds(model, nbytes, -(-ranks // nodes), nodes)
    return predicted
