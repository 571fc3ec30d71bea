"""Nonblocking collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from mpi4py import MPI

from gdcomm.execution import execute, number, plain
from gdcomm.operations import OPERATIONS

if TYPE_CHECKING:
    from gdcomm.paths import Paths

    _Comm = MPI.Comm
    _Intracomm = MPI.Intracomm
else:  # mixins: the communicator class brings the MPI base
    _Comm = _Intracomm = object

Spec: TypeAlias = Any  # a buffer argument as mpi4py takes it, or a device array in its place
Stream: TypeAlias = Any  # None, or anything with __cuda_stream__, .ptr or .cuda_stream


class NonblockingCollectives(_Comm):
    """The I-forms of the collectives."""

    _paths: Paths

    def Ibcast(self, buf: Spec, root: int = 0, *, stream: Stream = None) -> MPI.Request:
        """Nonblocking Bcast."""
        if plain(buf):
            return MPI.Comm.Ibcast(self, buf, root)
        return execute(self, self._paths, OPERATIONS["Ibcast"], (buf, root), stream)

    def Igather(self, sendbuf: Spec, recvbuf: Spec, root: int = 0, *, stream: Stream = None) -> MPI.Request:
        """Nonblocking Gather."""
        if plain(sendbuf) and plain(recvbuf):
            return MPI.Comm.Igather(self, sendbuf, recvbuf, root)
        return execute(self, self._paths, OPERATIONS["Igather"], (sendbuf, recvbuf, root), stream)

    def Igatherv(self, sendbuf: Spec, recvbuf: Spec, root: int = 0, *, stream: Stream = None) -> MPI.Request:
        """Nonblocking Gatherv."""
        if plain(sendbuf) and plain(recvbuf):
            return MPI.Comm.Igatherv(self, sendbuf, recvbuf, root)
        return execute(self, self._paths, OPERATIONS["Igatherv"], (sendbuf, recvbuf, root), stream)

    def Iscatter(self, sendbuf: Spec, recvbuf: Spec, root: int = 0, *, stream: Stream = None) -> MPI.Request:
        """Nonblocking Scatter."""
        if plain(sendbuf) and plain(recvbuf):
            return MPI.Comm.Iscatter(self, sendbuf, recvbuf, root)
        return execute(self, self._paths, OPERATIONS["Iscatter"], (sendbuf, recvbuf, root), stream)

    def Iscatterv(self, sendbuf: Spec, recvbuf: Spec, root: int = 0, *, stream: Stream = None) -> MPI.Request:
        """Nonblocking Scatterv."""
        if plain(sendbuf) and plain(recvbuf):
            return MPI.Comm.Iscatterv(self, sendbuf, recvbuf, root)
        return execute(self, self._paths, OPERATIONS["Iscatterv"], (sendbuf, recvbuf, root), stream)

    def Iallgather(self, sendbuf: Spec, recvbuf: Spec, *, stream: Stream = None) -> MPI.Request:
        """Nonblocking Allgather."""
        if plain(sendbuf) and plain(recvbuf):
            return MPI.Comm.Iallgather(self, sendbuf, recvbuf)
        return execute(self, self._paths, OPERATIONS["Iallgather"], (sendbuf, recvbuf), stream)

    def Iallgatherv(self, sendbuf: Spec, recvbuf: Spec, *, stream: Stream = None) -> MPI.Request:
        """Nonblocking Allgatherv."""
        if plain(sendbuf) and plain(recvbuf):
            return MPI.Comm.Iallgatherv(self, sendbuf, recvbuf)
        return execute(self, self._paths, OPERATIONS["Iallgatherv"], (sendbuf, recvbuf), stream)

    def Ialltoall(self, sendbuf: Spec, recvbuf: Spec, *, stream: Stream = None) -> MPI.Request:
        """Nonblocking Alltoall."""
        if plain(sendbuf) and plain(recvbuf):
            return MPI.Comm.Ialltoall(self, sendbuf, recvbuf)
        return execute(self, self._paths, OPERATIONS["Ialltoall"], (sendbuf, recvbuf), stream)

    def Ialltoallv(self, sendbuf: Spec, recvbuf: Spec, *, stream: Stream = None) -> MPI.Request:
        """Nonblocking Alltoallv."""
        if plain(sendbuf) and plain(recvbuf):
            return MPI.Comm.Ialltoallv(self, sendbuf, recvbuf)
        return execute(self, self._paths, OPERATIONS["Ialltoallv"], (sendbuf, recvbuf), stream)

    def Ialltoallw(self, sendbuf: Spec, recvbuf: Spec, *, stream: Stream = None) -> MPI.Request:
        """Nonblocking Alltoallw."""
        if plain(sendbuf) and plain(recvbuf):
            return MPI.Comm.Ialltoallw(self, sendbuf, recvbuf)
        return execute(self, self._paths, OPERATIONS["Ialltoallw"], (sendbuf, recvbuf), stream)

    def Ireduce(
        self, sendbuf: Spec, recvbuf: Spec, op: MPI.Op = MPI.SUM, root: int = 0, *, stream: Stream = None
    ) -> MPI.Request:
        """Nonblocking Reduce."""
        if number(sendbuf) and number(recvbuf):
            return MPI.Comm.Ireduce(self, sendbuf, recvbuf, op, root)
        return execute(self, self._paths, OPERATIONS["Ireduce"], (sendbuf, recvbuf, op, root), stream)

    def Iallreduce(
        self, sendbuf: Spec, recvbuf: Spec, op: MPI.Op = MPI.SUM, *, stream: Stream = None
    ) -> MPI.Request:
        """Nonblocking Allreduce."""
        if number(sendbuf) and number(recvbuf):
            return MPI.Comm.Iallreduce(self, sendbuf, recvbuf, op)
        return execute(self, self._paths, OPERATIONS["Iallreduce"], (sendbuf, recvbuf, op), stream)

    def Ireduce_scatter_block(
        self, sendbuf: Spec, recvbuf: Spec, op: MPI.Op = MPI.SUM, *, stream: Stream = None
    ) -> MPI.Request:
        """Nonblocking Reduce_scatter_block."""
        if number(sendbuf) and number(recvbuf):
            return MPI.Comm.Ireduce_scatter_block(self, sendbuf, recvbuf, op)
        return execute(self, self._paths, OPERATIONS["Ireduce_scatter_block"], (sendbuf, recvbuf, op), stream)

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
        if number(sendbuf) and number(recvbuf):
            return MPI.Comm.Ireduce_scatter(self, sendbuf, recvbuf, recvcounts, op)
        return execute(
            self, self._paths, OPERATIONS["Ireduce_scatter"], (sendbuf, recvbuf, recvcounts, op), stream
        )


class NonblockingScans(_Intracomm):
    """The I-forms of the scans."""

    _paths: Paths

    def Iscan(
        self, sendbuf: Spec, recvbuf: Spec, op: MPI.Op = MPI.SUM, *, stream: Stream = None
    ) -> MPI.Request:
        """Nonblocking Scan."""
        if number(sendbuf) and number(recvbuf):
            return MPI.Intracomm.Iscan(self, sendbuf, recvbuf, op)
        return execute(self, self._paths, OPERATIONS["Iscan"], (sendbuf, recvbuf, op), stream)

    def Iexscan(
        self, sendbuf: Spec, recvbuf: Spec, op: MPI.Op = MPI.SUM, *, stream: Stream = None
    ) -> MPI.Request:
        """Nonblocking Exscan."""
        if number(sendbuf) and number(recvbuf):
            return MPI.Intracomm.Iexscan(self, sendbuf, recvbuf, op)
        return execute(self, self._paths, OPERATIONS["Iexscan"], (sendbuf, recvbuf, op), stream)
