"""Nonblocking collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from mpi4py import MPI
from numpy import ndarray

from gdcomm.arguments import UNSERVED, freed, unserved
from gdcomm.collectives import Limits, asks
from gdcomm.execution import execute, plain, reducible
from gdcomm.nonblocking import nonblocking
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
_Iallgather = MPI.Comm.Iallgather
_Iallgatherv = MPI.Comm.Iallgatherv
_Iallreduce = MPI.Comm.Iallreduce
_Ialltoall = MPI.Comm.Ialltoall
_Ialltoallv = MPI.Comm.Ialltoallv
_Ialltoallw = MPI.Comm.Ialltoallw
_Ibcast = MPI.Comm.Ibcast
_Igather = MPI.Comm.Igather
_Igatherv = MPI.Comm.Igatherv
_Ireduce = MPI.Comm.Ireduce
_Ireduce_scatter = MPI.Comm.Ireduce_scatter
_Ireduce_scatter_block = MPI.Comm.Ireduce_scatter_block
_Iscatter = MPI.Comm.Iscatter
_Iscatterv = MPI.Comm.Iscatterv
_Iexscan = MPI.Intracomm.Iexscan
_Iscan = MPI.Intracomm.Iscan


class NonblockingCollectives(_Comm):
    """The I-forms of the collectives."""

    _paths: Paths
    _limits: Limits

    def Ibcast(self, buf: Spec, root: int = 0, *, stream: Stream = None) -> MPI.Request:
        """Nonblocking Bcast."""
        if type(buf) is ndarray and (buf.ndim < 2 or buf.flags.c_contiguous) and buf.nbytes < self._limits.move:
            try:
                return _Ibcast(self, buf, root)
            except UNSERVED as error:
                unserved(error, self, "Ibcast", (buf, root))
        return nonblocking(self, OPERATIONS["Ibcast"], (buf, root), stream)

    def Igather(self, sendbuf: Spec, recvbuf: Spec, root: int = 0, *, stream: Stream = None) -> MPI.Request:
        """Nonblocking Gather."""
        if plain(sendbuf) and plain(recvbuf) and not asks(self, "Gather", (sendbuf, recvbuf, root)):
            try:
                return _Igather(self, sendbuf, recvbuf, root)
            except UNSERVED as error:
                unserved(error, self, "Igather", (sendbuf, recvbuf, root))
        return nonblocking(self, OPERATIONS["Igather"], (sendbuf, recvbuf, root), stream)

    def Igatherv(self, sendbuf: Spec, recvbuf: Spec, root: int = 0, *, stream: Stream = None) -> MPI.Request:
        """Nonblocking Gatherv."""
        if plain(sendbuf) and plain(recvbuf) and not asks(self, "Gatherv", (sendbuf, recvbuf, root)):
            try:
                return _Igatherv(self, sendbuf, recvbuf, root)
            except UNSERVED as error:
                unserved(error, self, "Igatherv", (sendbuf, recvbuf, root))
        return nonblocking(self, OPERATIONS["Igatherv"], (sendbuf, recvbuf, root), stream)

    def Iscatter(self, sendbuf: Spec, recvbuf: Spec, root: int = 0, *, stream: Stream = None) -> MPI.Request:
        """Nonblocking Scatter."""
        if plain(sendbuf) and plain(recvbuf) and not asks(self, "Scatter", (sendbuf, recvbuf, root)):
            try:
                return _Iscatter(self, sendbuf, recvbuf, root)
            except UNSERVED as error:
                unserved(error, self, "Iscatter", (sendbuf, recvbuf, root))
        return nonblocking(self, OPERATIONS["Iscatter"], (sendbuf, recvbuf, root), stream)

    def Iscatterv(self, sendbuf: Spec, recvbuf: Spec, root: int = 0, *, stream: Stream = None) -> MPI.Request:
        """Nonblocking Scatterv."""
        if plain(sendbuf) and plain(recvbuf) and not asks(self, "Scatterv", (sendbuf, recvbuf, root)):
            try:
                return _Iscatterv(self, sendbuf, recvbuf, root)
            except UNSERVED as error:
                unserved(error, self, "Iscatterv", (sendbuf, recvbuf, root))
        return nonblocking(self, OPERATIONS["Iscatterv"], (sendbuf, recvbuf, root), stream)

    def Iallgather(self, sendbuf: Spec, recvbuf: Spec, *, stream: Stream = None) -> MPI.Request:
        """Nonblocking Allgather."""
        if not self:
            raise freed(self, "Iallgather")
        if plain(sendbuf) and plain(recvbuf) and not asks(self, "Allgather", (sendbuf, recvbuf)):
            try:
                return _Iallgather(self, sendbuf, recvbuf)
            except UNSERVED as error:
                unserved(error, self, "Iallgather", (sendbuf, recvbuf))
        return nonblocking(self, OPERATIONS["Iallgather"], (sendbuf, recvbuf), stream)

    def Iallgatherv(self, sendbuf: Spec, recvbuf: Spec, *, stream: Stream = None) -> MPI.Request:
        """Nonblocking Allgatherv."""
        if plain(sendbuf) and plain(recvbuf) and not asks(self, "Allgatherv", (sendbuf, recvbuf)):
            try:
                return _Iallgatherv(self, sendbuf, recvbuf)
            except UNSERVED as error:
                unserved(error, self, "Iallgatherv", (sendbuf, recvbuf))
        return nonblocking(self, OPERATIONS["Iallgatherv"], (sendbuf, recvbuf), stream)

    def Ialltoall(self, sendbuf: Spec, recvbuf: Spec, *, stream: Stream = None) -> MPI.Request:
        """Nonblocking Alltoall."""
        if plain(sendbuf) and plain(recvbuf) and not asks(self, "Alltoall", (sendbuf, recvbuf)):
            try:
                return _Ialltoall(self, sendbuf, recvbuf)
            except UNSERVED as error:
                unserved(error, self, "Ialltoall", (sendbuf, recvbuf))
        return nonblocking(self, OPERATIONS["Ialltoall"], (sendbuf, recvbuf), stream)

    def Ialltoallv(self, sendbuf: Spec, recvbuf: Spec, *, stream: Stream = None) -> MPI.Request:
        """Nonblocking Alltoallv."""
        if plain(sendbuf) and plain(recvbuf) and not asks(self, "Alltoallv", (sendbuf, recvbuf)):
            try:
                return _Ialltoallv(self, sendbuf, recvbuf)
            except UNSERVED as error:
                unserved(error, self, "Ialltoallv", (sendbuf, recvbuf))
        return nonblocking(self, OPERATIONS["Ialltoallv"], (sendbuf, recvbuf), stream)

    def Ialltoallw(self, sendbuf: Spec, recvbuf: Spec, *, stream: Stream = None) -> MPI.Request:
        """Nonblocking Alltoallw."""
        if plain(sendbuf) and plain(recvbuf):
            try:
                return _Ialltoallw(self, sendbuf, recvbuf)
            except UNSERVED as error:
                unserved(error, self, "Ialltoallw", (sendbuf, recvbuf))
        return execute(self, self._paths, OPERATIONS["Ialltoallw"], (sendbuf, recvbuf), stream)

    def Ireduce(
        self, sendbuf: Spec, recvbuf: Spec, op: MPI.Op = MPI.SUM, root: int = 0, *, stream: Stream = None
    ) -> MPI.Request:
        """Nonblocking Reduce."""
        if reducible(sendbuf, recvbuf, self._limits.reduce):
            try:
                return _Ireduce(self, sendbuf, recvbuf, op, root)
            except UNSERVED as error:
                unserved(error, self, "Ireduce", (sendbuf, recvbuf, op, root))
        return nonblocking(self, OPERATIONS["Ireduce"], (sendbuf, recvbuf, op, root), stream)

    def Iallreduce(
        self, sendbuf: Spec, recvbuf: Spec, op: MPI.Op = MPI.SUM, *, stream: Stream = None
    ) -> MPI.Request:
        """Nonblocking Allreduce."""
        if reducible(sendbuf, recvbuf, self._limits.reduce):
            try:
                return _Iallreduce(self, sendbuf, recvbuf, op)
            except UNSERVED as error:
                unserved(error, self, "Iallreduce", (sendbuf, recvbuf, op))
        return nonblocking(self, OPERATIONS["Iallreduce"], (sendbuf, recvbuf, op), stream)

    def Ireduce_scatter_block(
        self, sendbuf: Spec, recvbuf: Spec, op: MPI.Op = MPI.SUM, *, stream: Stream = None
    ) -> MPI.Request:
        """Nonblocking Reduce_scatter_block."""
        if reducible(sendbuf, recvbuf, self._limits.reduce):
            try:
                return _Ireduce_scatter_block(self, sendbuf, recvbuf, op)
            except UNSERVED as error:
                unserved(error, self, "Ireduce_scatter_block", (sendbuf, recvbuf, op))
        return nonblocking(self, OPERATIONS["Ireduce_scatter_block"], (sendbuf, recvbuf, op), stream)

    def Ireduce_scatter(
        self,
        sendbuf: Spec,
        recvbuf: Spec,
        recvcounts: Sequence[int] | None = None,
        op: MPI.Op = MPI.SUM,
        *,
        stream: Stream = None,
    ) -> MPI.Request:
        """Nonblocking Reduce_scatter."""
        if reducible(sendbuf, recvbuf, self._limits.reduce):
            try:
                return _Ireduce_scatter(self, sendbuf, recvbuf, recvcounts, op)
            except UNSERVED as error:
                unserved(error, self, "Ireduce_scatter", (sendbuf, recvbuf, recvcounts, op))
        return nonblocking(self, OPERATIONS["Ireduce_scatter"], (sendbuf, recvbuf, recvcounts, op), stream)


class NonblockingScans(_Intracomm):
    """The I-forms of the scans."""

    _limits: Limits

    def Iscan(
        self, sendbuf: Spec, recvbuf: Spec, op: MPI.Op = MPI.SUM, *, stream: Stream = None
    ) -> MPI.Request:
        """Nonblocking Scan."""
        if reducible(sendbuf, recvbuf, self._limits.reduce):
            try:
                return _Iscan(self, sendbuf, recvbuf, op)
            except UNSERVED as error:
                unserved(error, self, "Iscan", (sendbuf, recvbuf, op))
        return nonblocking(self, OPERATIONS["Iscan"], (sendbuf, recvbuf, op), stream)

    def Iexscan(
        self, sendbuf: Spec, recvbuf: Spec, op: MPI.Op = MPI.SUM, *, stream: Stream = None
    ) -> MPI.Request:
        """Nonblocking Exscan."""
        if reducible(sendbuf, recvbuf, self._limits.reduce):
            try:
                return _Iexscan(self, sendbuf, recvbuf, op)
            except UNSERVED as error:
                unserved(error, self, "Iexscan", (sendbuf, recvbuf, op))
        return nonblocking(self, OPERATIONS["Iexscan"], (sendbuf, recvbuf, op), stream)
