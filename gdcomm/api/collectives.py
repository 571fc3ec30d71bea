"""Blocking collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from mpi4py import MPI
from numpy import ndarray

from gdcomm.arguments import UNSERVED, freed, unserved
from gdcomm.collectives import Limits, asks, collective
from gdcomm.execution import execute, plain, reducible
from gdcomm.operations import OPERATIONS

if TYPE_CHECKING:
    from gdcomm.paths import Paths

    _Comm = MPI.Comm
    _Intracomm = MPI.Intracomm
else:  # mixins: the communicator class brings the MPI base
    _Comm = _Intracomm = object

Spec: TypeAlias = Any  # a buffer argument as mpi4py takes it, or a device array in its place
Stream: TypeAlias = Any  # None, or anything with __cuda_stream__, .ptr or .cuda_stream


# Bound once: a method call then costs little more than mpi4py's own.
_Allgather = MPI.Comm.Allgather
_Allgatherv = MPI.Comm.Allgatherv
_Allreduce = MPI.Comm.Allreduce
_Alltoall = MPI.Comm.Alltoall
_Alltoallv = MPI.Comm.Alltoallv
_Alltoallw = MPI.Comm.Alltoallw
_Bcast = MPI.Comm.Bcast
_Gather = MPI.Comm.Gather
_Gatherv = MPI.Comm.Gatherv
_Reduce = MPI.Comm.Reduce
_Reduce_scatter = MPI.Comm.Reduce_scatter
_Reduce_scatter_block = MPI.Comm.Reduce_scatter_block
_Scatter = MPI.Comm.Scatter
_Scatterv = MPI.Comm.Scatterv
_Exscan = MPI.Intracomm.Exscan
_Scan = MPI.Intracomm.Scan


class Collectives(_Comm):
    """Collectives of intra- and intercommunicators."""

    _paths: Paths
    _limits: Limits

    def Bcast(self, buf: Spec, root: int = 0, *, stream: Stream = None) -> None:
        """Copy the root's array to every rank."""
        if type(buf) is ndarray and (buf.ndim < 2 or buf.flags.c_contiguous) and buf.nbytes < self._limits.move:
            try:
                return _Bcast(self, buf, root)
            except UNSERVED as error:
                unserved(error, self, "Bcast", (buf, root))
        collective(self, OPERATIONS["Bcast"], (buf, root), stream)

    def Gather(self, sendbuf: Spec, recvbuf: Spec, root: int = 0, *, stream: Stream = None) -> None:
        """Collect equal blocks at the root, in rank order."""
        if plain(sendbuf) and plain(recvbuf) and not asks(self, "Gather", (sendbuf, recvbuf, root)):
            try:
                return _Gather(self, sendbuf, recvbuf, root)
            except UNSERVED as error:
                unserved(error, self, "Gather", (sendbuf, recvbuf, root))
        collective(self, OPERATIONS["Gather"], (sendbuf, recvbuf, root), stream)

    def Gatherv(self, sendbuf: Spec, recvbuf: Spec, root: int = 0, *, stream: Stream = None) -> None:
        """Collect blocks of different sizes at the root."""
        if plain(sendbuf) and plain(recvbuf) and not asks(self, "Gatherv", (sendbuf, recvbuf, root)):
            try:
                return _Gatherv(self, sendbuf, recvbuf, root)
            except UNSERVED as error:
                unserved(error, self, "Gatherv", (sendbuf, recvbuf, root))
        collective(self, OPERATIONS["Gatherv"], (sendbuf, recvbuf, root), stream)

    def Scatter(self, sendbuf: Spec, recvbuf: Spec, root: int = 0, *, stream: Stream = None) -> None:
        """Hand equal blocks of the root's array out, in rank order."""
        if plain(sendbuf) and plain(recvbuf) and not asks(self, "Scatter", (sendbuf, recvbuf, root)):
            try:
                return _Scatter(self, sendbuf, recvbuf, root)
            except UNSERVED as error:
                unserved(error, self, "Scatter", (sendbuf, recvbuf, root))
        collective(self, OPERATIONS["Scatter"], (sendbuf, recvbuf, root), stream)

    def Scatterv(self, sendbuf: Spec, recvbuf: Spec, root: int = 0, *, stream: Stream = None) -> None:
        """Hand blocks of different sizes out."""
        if plain(sendbuf) and plain(recvbuf) and not asks(self, "Scatterv", (sendbuf, recvbuf, root)):
            try:
                return _Scatterv(self, sendbuf, recvbuf, root)
            except UNSERVED as error:
                unserved(error, self, "Scatterv", (sendbuf, recvbuf, root))
        collective(self, OPERATIONS["Scatterv"], (sendbuf, recvbuf, root), stream)

    def Allgather(self, sendbuf: Spec, recvbuf: Spec, *, stream: Stream = None) -> None:
        """Collect equal blocks on every rank."""
        if not self:
            raise freed(self, "Allgather")
        if plain(sendbuf) and plain(recvbuf) and not asks(self, "Allgather", (sendbuf, recvbuf)):
            try:
                return _Allgather(self, sendbuf, recvbuf)
            except UNSERVED as error:
                unserved(error, self, "Allgather", (sendbuf, recvbuf))
        collective(self, OPERATIONS["Allgather"], (sendbuf, recvbuf), stream)

    def Allgatherv(self, sendbuf: Spec, recvbuf: Spec, *, stream: Stream = None) -> None:
        """Collect blocks of different sizes on every rank."""
        if plain(sendbuf) and plain(recvbuf) and not asks(self, "Allgatherv", (sendbuf, recvbuf)):
            try:
                return _Allgatherv(self, sendbuf, recvbuf)
            except UNSERVED as error:
                unserved(error, self, "Allgatherv", (sendbuf, recvbuf))
        collective(self, OPERATIONS["Allgatherv"], (sendbuf, recvbuf), stream)

    def Alltoall(self, sendbuf: Spec, recvbuf: Spec, *, stream: Stream = None) -> None:
        """Send block i to rank i; receive one block from each rank."""
        if plain(sendbuf) and plain(recvbuf) and not asks(self, "Alltoall", (sendbuf, recvbuf)):
            try:
                return _Alltoall(self, sendbuf, recvbuf)
            except UNSERVED as error:
                unserved(error, self, "Alltoall", (sendbuf, recvbuf))
        collective(self, OPERATIONS["Alltoall"], (sendbuf, recvbuf), stream)

    def Alltoallv(self, sendbuf: Spec, recvbuf: Spec, *, stream: Stream = None) -> None:
        """Alltoall with blocks of different sizes."""
        if plain(sendbuf) and plain(recvbuf) and not asks(self, "Alltoallv", (sendbuf, recvbuf)):
            try:
                return _Alltoallv(self, sendbuf, recvbuf)
            except UNSERVED as error:
                unserved(error, self, "Alltoallv", (sendbuf, recvbuf))
        collective(self, OPERATIONS["Alltoallv"], (sendbuf, recvbuf), stream)

    def Alltoallw(self, sendbuf: Spec, recvbuf: Spec, *, stream: Stream = None) -> None:
        """Alltoall with sizes, byte displacements and datatypes per rank."""
        if plain(sendbuf) and plain(recvbuf):
            try:
                return _Alltoallw(self, sendbuf, recvbuf)
            except UNSERVED as error:
                unserved(error, self, "Alltoallw", (sendbuf, recvbuf))
        execute(self, self._paths, OPERATIONS["Alltoallw"], (sendbuf, recvbuf), stream)

    def Reduce(
        self, sendbuf: Spec, recvbuf: Spec, op: MPI.Op = MPI.SUM, root: int = 0, *, stream: Stream = None
    ) -> None:
        """Reduce elementwise over the ranks; the root has the result."""
        if reducible(sendbuf, recvbuf, self._limits.reduce):
            try:
                return _Reduce(self, sendbuf, recvbuf, op, root)
            except UNSERVED as error:
                unserved(error, self, "Reduce", (sendbuf, recvbuf, op, root))
        collective(self, OPERATIONS["Reduce"], (sendbuf, recvbuf, op, root), stream)

    def Allreduce(self, sendbuf: Spec, recvbuf: Spec, op: MPI.Op = MPI.SUM, *, stream: Stream = None) -> None:
        """Reduce elementwise over the ranks; every rank has the result."""
        if reducible(sendbuf, recvbuf, self._limits.reduce):
            try:
                return _Allreduce(self, sendbuf, recvbuf, op)
            except UNSERVED as error:
                unserved(error, self, "Allreduce", (sendbuf, recvbuf, op))
        collective(self, OPERATIONS["Allreduce"], (sendbuf, recvbuf, op), stream)

    def Reduce_scatter_block(
        self, sendbuf: Spec, recvbuf: Spec, op: MPI.Op = MPI.SUM, *, stream: Stream = None
    ) -> None:
        """Reduce, then hand equal blocks of the result out."""
        if reducible(sendbuf, recvbuf, self._limits.reduce):
            try:
                return _Reduce_scatter_block(self, sendbuf, recvbuf, op)
            except UNSERVED as error:
                unserved(error, self, "Reduce_scatter_block", (sendbuf, recvbuf, op))
        collective(self, OPERATIONS["Reduce_scatter_block"], (sendbuf, recvbuf, op), stream)

    def Reduce_scatter(
        self,
        sendbuf: Spec,
        recvbuf: Spec,
        recvcounts: Sequence[int] | None = None,
        op: MPI.Op = MPI.SUM,
        *,
        stream: Stream = None,
    ) -> None:
        """Reduce, then hand blocks of `recvcounts` elements out."""
        if reducible(sendbuf, recvbuf, self._limits.reduce):
            try:
                return _Reduce_scatter(self, sendbuf, recvbuf, recvcounts, op)
            except UNSERVED as error:
                unserved(error, self, "Reduce_scatter", (sendbuf, recvbuf, recvcounts, op))
        collective(self, OPERATIONS["Reduce_scatter"], (sendbuf, recvbuf, recvcounts, op), stream)


class Scans(_Intracomm):
    """Collectives that need an order of ranks."""

    _limits: Limits

    def Scan(self, sendbuf: Spec, recvbuf: Spec, op: MPI.Op = MPI.SUM, *, stream: Stream = None) -> None:
        """Reduce over ranks 0 to this one."""
        if reducible(sendbuf, recvbuf, self._limits.reduce):
            try:
                return _Scan(self, sendbuf, recvbuf, op)
            except UNSERVED as error:
                unserved(error, self, "Scan", (sendbuf, recvbuf, op))
        collective(self, OPERATIONS["Scan"], (sendbuf, recvbuf, op), stream)

    def Exscan(self, sendbuf: Spec, recvbuf: Spec, op: MPI.Op = MPI.SUM, *, stream: Stream = None) -> None:
        """Reduce over ranks 0 to the one before; rank 0's array stays as it was."""
        if reducible(sendbuf, recvbuf, self._limits.reduce):
            try:
                return _Exscan(self, sendbuf, recvbuf, op)
            except UNSERVED as error:
                unserved(error, self, "Exscan", (sendbuf, recvbuf, op))
        collective(self, OPERATIONS["Exscan"], (sendbuf, recvbuf, op), stream)
