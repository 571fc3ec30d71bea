"""The communicators: mpi4py's, with device arrays wherever mpi4py takes a buffer."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from mpi4py import MPI

from gdcomm import devices
from gdcomm.api.collectives import Collectives, Scans
from gdcomm.api.neighbors import Neighbors
from gdcomm.api.nonblocking import NonblockingCollectives, NonblockingScans
from gdcomm.api.objects import NeighborObjects, Objects
from gdcomm.api.p2p import PointToPoint
from gdcomm.api.persistent import PersistentCollectives, PersistentScans
from gdcomm.capabilities import local_capabilities
from gdcomm.channels import channel_of, facts, free_unused, open_channel
from gdcomm.collectives import NEVER, Limits, chosen, limits
from gdcomm.envelopes import Channel
from gdcomm.errors import BufferSpecError
from gdcomm.messages import Matching
from gdcomm.operations import OPERATIONS
from gdcomm.paths import Paths, agree, choose, path_from_environment
from gdcomm.transports.base import is_in_place, split_spec

__all__ = [
    "CartCommunicator",
    "Communicator",
    "DistGraphCommunicator",
    "GraphCommunicator",
    "InterCommunicator",
    "wrap",
]

if TYPE_CHECKING:
    _Comm = MPI.Comm
else:  # a mixin: the communicator class brings the MPI base
    _Comm = object

_PREDEFINED = {"COMM_WORLD": MPI.COMM_WORLD, "COMM_SELF": MPI.COMM_SELF}

_pickled: weakref.WeakValueDictionary[tuple[str, Paths], Any] = weakref.WeakValueDictionary()

_C = TypeVar("_C", bound=MPI.Comm)


class _Derives(_Comm):
    """Communicators made from one of ours are ours, and inherit what was agreed: their ranks were there."""

    _paths: Paths = Paths()
    _channel: Channel | None = None
    _limits: Limits = NEVER

    @property
    def path(self) -> str:
        """The path asked for: "auto", "direct", "mpi", "staged" or "host"."""
        return self._paths.path

    def explain(self, operation: str, *arguments: Any) -> str:
        """Say which way a call goes on this rank, and why.

        Args:
            operation: a method name such as "Allreduce".
            arguments: what the method is given, from the first argument on; what is left out is as it would be by
                default, and blocks of other ranks as long as this one's. None at all: some device array.

        Raises:
            ValueError: no such operation.
        """
        if operation not in OPERATIONS:
            raise ValueError(
                f"operation: {operation!r} is unknown; give a method name, one of {', '.join(OPERATIONS)}"
            )
        found = OPERATIONS[operation]
        given = found.complete(arguments)
        spare = found.spare(self, given)
        if spare >= 0:
            given[spare] = None
        arrays = [split_spec(given[position])[0] for position in found.buffers]
        arrays = [array for array in arrays if not is_in_place(array)]
        buffers = [buffer for buffer in map(devices.find, arrays) if buffer is not None]
        way = chosen(self, found, given, buffers)
        if arrays and not buffers:
            asked = ", after the ranks asked each other" if way else ""
            return f"{operation}: host (host memory goes to MPI as it is{asked})"
        kind = f"{buffers[0].device.kind} array of {buffers[0].nbytes} bytes" if buffers else "device array"
        contiguous = all(buffer.contiguous for buffer in buffers)
        if way and contiguous and len(buffers) == len(arrays):
            return f"{operation}: {kind} {way}"
        transport, reason = choose(self._paths.path, found.group, found.form, operation, self._paths.can)
        if transport == "mpi" and not contiguous:
            transport, reason = "staged", "a strided array is packed on the device and staged; MPI would use the CPU"
        return f"{operation}: {kind} by {transport} ({reason})"

    def __enter__(self: _C) -> _C:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error other ranks may not arrive at a collective Free: leave it to them.
        if kind is None and self not in (MPI.COMM_NULL, *_PREDEFINED.values()):
            self.Free()

    def __reduce__(self) -> tuple[Any, ...]:
        for name, known in _PREDEFINED.items():
            if self == known:
                _pickled[name, self._paths] = self
                return _unpickle, (name, self._paths)
        return super().__reduce__()  # type: ignore[return-value]

    def _wrap(self, comm: Any, everyone: bool = True) -> Any:
        """Wrap a communicator made of this one.

        Args:
            comm: the communicator.
            everyone: all ranks of this one have come to make it.
        """
        if everyone and self._channel is not None:
            free_unused(self)  # type: ignore[arg-type]  # intercommunicators have no channel
        return wrap(comm, self._paths, self._channel)

    def Free(self) -> None:
        """Free the communicator; collective. What MPI and gdcomm have under way on it comes to its end."""
        super().Free()
        self._channel, self._limits = None, NEVER

    def Disconnect(self) -> None:
        """Free the communicator when MPI has nothing under way on it; collective."""
        super().Disconnect()
        self._channel, self._limits = None, NEVER

    def Dup(self, info: MPI.Info | None = None) -> Any:
        """Duplicate; collective."""
        return self._wrap(super().Dup(info))

    def Clone(self) -> Any:
        """Clone; collective."""
        return self._wrap(super().Clone())

    def Dup_with_info(self, info: MPI.Info) -> Any:
        """Duplicate with other hints; collective."""
        return self._wrap(super().Dup_with_info(info))

    def Idup(self, info: MPI.Info | None = None) -> Any:
        """Nonblocking duplicate: the communicator and a request."""
        comm, request = super().Idup(info)
        return self._wrap(comm, everyone=False), request

    def Idup_with_info(self, info: MPI.Info) -> Any:
        """Nonblocking duplicate with other hints."""
        comm, request = super().Idup_with_info(info)
        return self._wrap(comm, everyone=False), request

    def Create(self, group: MPI.Group) -> Any:
        """Communicator of a group; collective over this one."""
        return self._wrap(super().Create(group))

    def Split(self, color: int = 0, key: int = 0) -> Any:
        """One communicator per colour; collective."""
        return self._wrap(super().Split(color, key))

    def Split_type(self, split_type: int, key: int = 0, info: MPI.Info = MPI.INFO_NULL) -> Any:
        """One communicator per node (MPI.COMM_TYPE_SHARED) or other resource; collective."""
        return self._wrap(super().Split_type(split_type, key, info))

    def Shrink(self) -> Any:
        """Communicator of the ranks that live (where MPI can tell)."""
        return self._wrap(super().Shrink(), everyone=False)


class Communicator(
    _Derives,
    Matching,
    Objects,
    PointToPoint,
    Collectives,
    NonblockingCollectives,
    PersistentCollectives,
    Scans,
    NonblockingScans,
    PersistentScans,
    MPI.Intracomm,
):
    """An `MPI.Intracomm` whose methods take device arrays too.

    The handle is shared with `comm`, not duplicated: message matching is MPI's own, and
    freeing one frees the other. Construction is collective over `comm`: the ranks agree on what
    their MPI can do with device memory. Communicators derived from this one (Dup, Split,
    Create_cart, ...) inherit the agreement and are of this class, or its topology variants.

    Args:
        comm: an intracommunicator; None means MPI.COMM_WORLD.
        path: how device buffers travel. "auto": handed to MPI where that is known to be right,
            else staged. "staged": always through pinned memory. "direct" or "mpi": handed to MPI or
            NoPathError. "host": host arrays only. GDCOMM_TRANSPORT in the environment goes first.

    Raises:
        ValueError: unknown path.
        TypeError: `comm` is not an intracommunicator.
    """

    def __new__(cls, comm: MPI.Intracomm | None = None, *, path: str = "auto") -> Any:
        # mpi4py itself calls this without arguments and then sets the handle (Dup, Clone).
        # Named, not super(): CPython wants the first C base here, also in the topology classes.
        return MPI.Intracomm.__new__(cls, _PREDEFINED["COMM_WORLD"] if comm is None else comm)

    def __init__(self, comm: MPI.Intracomm | None = None, *, path: str = "auto") -> None:
        asked = path_from_environment(path)
        if self == MPI.COMM_NULL:
            return
        everyone = MPI.Intracomm.allgather(self, (asked, local_capabilities(), facts()))
        paths = {p for p, _, _ in everyone}
        if len(paths) > 1:
            raise ValueError(f"path: ranks ask for different paths ({', '.join(sorted(paths))}); give one on all")
        self._paths = Paths(asked, agree(can for _, can, _ in everyone))
        self._channel = open_channel(self, [fact for _, _, fact in everyone])
        self._limits = limits(self._channel, self._paths)

    def Create_group(self, group: MPI.Group, tag: int = 0) -> Any:
        """Communicator of a group; collective over the group only."""
        return self._wrap(super().Create_group(group, tag), everyone=False)

    def Create_cart(
        self, dims: Sequence[int], periods: Sequence[bool] | None = None, reorder: bool = False
    ) -> Any:
        """Communicator with a grid; collective."""
        return self._wrap(super().Create_cart(dims, periods, reorder))

    def Create_graph(self, index: Sequence[int], edges: Sequence[int], reorder: bool = False) -> Any:
        """Communicator with a graph that every rank knows; collective."""
        return self._wrap(super().Create_graph(index, edges, reorder))

    def Create_dist_graph_adjacent(self, *args: Any, **kwargs: Any) -> Any:
        """Communicator with a graph of which each rank gives its own edges; collective. As mpi4py's."""
        return self._wrap(super().Create_dist_graph_adjacent(*args, **kwargs))

    def Create_dist_graph(self, *args: Any, **kwargs: Any) -> Any:
        """Communicator with a graph of which any rank gives any edges; collective. As mpi4py's."""
        return self._wrap(super().Create_dist_graph(*args, **kwargs))

    def Create_intercomm(
        self, local_leader: int, peer_comm: MPI.Intracomm, remote_leader: int, tag: int = 0
    ) -> Any:
        """Communicator between this group and another; collective over both."""
        return self._wrap(super().Create_intercomm(local_leader, peer_comm, remote_leader, tag))


class CartCommunicator(Neighbors, NeighborObjects, Communicator, MPI.Cartcomm):
    """A communicator with a grid."""

    def Sub(self, remain_dims: Sequence[bool]) -> Any:
        """Grids of fewer dimensions; collective."""
        return self._wrap(super().Sub(remain_dims))


class GraphCommunicator(Neighbors, NeighborObjects, Communicator, MPI.Graphcomm):
    """A communicator with a graph."""


class DistGraphCommunicator(Neighbors, NeighborObjects, Communicator, MPI.Distgraphcomm):
    """A communicator with a distributed graph."""


class InterCommunicator(
    _Derives,
    Matching,
    Objects,
    PointToPoint,
    Collectives,
    NonblockingCollectives,
    PersistentCollectives,
    MPI.Intercomm,
):
    """A communicator between two groups."""

    def Merge(self, high: bool = False) -> Any:
        """Communicator of both groups; collective."""
        return self._wrap(super().Merge(high))


_CLASSES: tuple[tuple[type[MPI.Comm], type[MPI.Comm]], ...] = (
    (MPI.Cartcomm, CartCommunicator),
    (MPI.Graphcomm, GraphCommunicator),
    (MPI.Distgraphcomm, DistGraphCommunicator),
    (MPI.Intercomm, InterCommunicator),
    (MPI.Intracomm, Communicator),
)


def wrap(comm: Any, paths: Paths, parent: Channel | None = None) -> Any:
    """Give `comm` the gdcomm class that suits it, with `paths`; not collective. COMM_NULL stays itself.

    Args:
        comm: a communicator.
        paths: what was agreed.
        parent: the channel of the communicator that it was made from.
    """
    if comm == MPI.COMM_NULL:
        return comm
    if not isinstance(comm, _Derives):
        for base, ours in _CLASSES:
            if isinstance(comm, base):
                comm = ours.__new__(ours, comm)
                break
        else:
            raise BufferSpecError(f"comm: {type(comm).__name__} is no communicator")
    comm._paths = paths
    comm._channel = channel_of(comm, parent)
    comm._limits = limits(comm._channel, paths)
    return comm


def _unpickle(name: str, paths: Paths) -> Any:
    """The very object where it lives, else one like it: as mpi4py's own COMM_WORLD."""
    found = _pickled.get((name, paths))
    return wrap(_PREDEFINED[name], paths) if found is None else found
