"""Blocking collectives."""

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


class Collectives(_Comm):
    """Collectives of intra- and intercommunicators."""

    _paths: Paths

    def Bcast(self, buf: Spec, root: int = 0, *, stream: Stream = None) -> None:
        """Copy the root's array to every rank."""
        if plain(buf):
            MPI.Comm.Bcast(self, buf, root)
        else:
            execute(self, self._paths, OPERATIONS["Bcast"], (buf, root), stream)

    def Gather(self, sendbuf: Spec, recvbuf: Spec, root: int = 0, *, stream: Stream = None) -> None:
        """Collect equal blocks at the root, in rank order."""
        if plain(sendbuf) and plain(recvbuf):
            MPI.Comm.Gather(self, sendbuf, recvbuf, root)
        else:
            execute(self, self._paths, OPERATIONS["Gather"], (sendbuf, recvbuf, root), stream)

    def Gatherv(self, sendbuf: Spec, recvbuf: Spec, root: int = 0, *, stream: Stream = None) -> None:
        """Collect blocks of different sizes at the root."""
        if plain(sendbuf) and plain(recvbuf):
            MPI.Comm.Gatherv(self, sendbuf, recvbuf, root)
        else:
            execute(self, self._paths, OPERATIONS["Gatherv"], (sendbuf, recvbuf, root), stream)

    def Scatter(self, sendbuf: Spec, recvbuf: Spec, root: int = 0, *, stream: Stream = None) -> None:
        """Hand equal blocks of the root's array out, in rank order."""
        if plain(sendbuf) and plain(recvbuf):
            MPI.Comm.Scatter(self, sendbuf, recvbuf, root)
        else:
            execute(self, self._paths, OPERATIONS["Scatter"], (sendbuf, recvbuf, root), stream)

    def Scatterv(self, sendbuf: Spec, recvbuf: Spec, root: int = 0, *, stream: Stream = None) -> None:
        """Hand blocks of different sizes out."""
        if plain(sendbuf) and plain(recvbuf):
            MPI.Comm.Scatterv(self, sendbuf, recvbuf, root)
        else:
            execute(self, self._paths, OPERATIONS["Scatterv"], (sendbuf, recvbuf, root), stream)

    def Allgather(self, sendbuf: Spec, recvbuf: Spec, *, stream: Stream = None) -> None:
        """Collect equal blocks on every rank."""
        if plain(sendbuf) and plain(recvbuf):
            MPI.Comm.Allgather(self, sendbuf, recvbuf)
        else:
            execute(self, self._paths, OPERATIONS["Allgather"], (sendbuf, recvbuf), stream)

    def Allgatherv(self, sendbuf: Spec, recvbuf: Spec, *, stream: Stream = None) -> None:
        """Collect blocks of different sizes on every rank."""
        if plain(sendbuf) and plain(recvbuf):
            MPI.Comm.Allgatherv(self, sendbuf, recvbuf)
        else:
            execute(self, self._paths, OPERATIONS["Allgatherv"], (sendbuf, recvbuf), stream)

    def Alltoall(self, sendbuf: Spec, recvbuf: Spec, *, stream: Stream = None) -> None:
        """Send block i to rank i; receive one block from each rank."""
        if plain(sendbuf) and plain(recvbuf):
            MPI.Comm.Alltoall(self, sendbuf, recvbuf)
        else:
            execute(self, self._paths, OPERATIONS["Alltoall"], (sendbuf, recvbuf), stream)

    def Alltoallv(self, sendbuf: Spec, recvbuf: Spec, *, stream: Stream = None) -> None:
        """Alltoall with blocks of different sizes."""
        if plain(sendbuf) and plain(recvbuf):
            MPI.Comm.Alltoallv(self, sendbuf, recvbuf)
        else:
            execute(self, self._paths, OPERATIONS["Alltoallv"], (sendbuf, recvbuf), stream)

    def Alltoallw(self, sendbuf: Spec, recvbuf: Spec, *, stream: Stream = None) -> None:
        """Alltoall with sizes, byte displacements and datatypes per rank."""
        if plain(sendbuf) and plain(recvbuf):
            MPI.Comm.Alltoallw(self, sendbuf, recvbuf)
        else:
            execute(self, self._paths, OPERATIONS["Alltoallw"], (sendbuf, recvbuf), stream)

    def Reduce(
        self, sendbuf: Spec, recvbuf: Spec, op: MPI.Op = MPI.SUM, root: int = 0, *, stream: Stream = None
    ) -> None:
        """Reduce elementwise over the ranks; the root has the result."""
        if number(sendbuf) and number(recvbuf):
            MPI.Comm.Reduce(self, sendbuf, recvbuf, op, root)
        else:
            execute(self, self._paths, OPERATIONS["Reduce"], (sendbuf, recvbuf, op, root), stream)

    def Allreduce(self, sendbuf: Spec, recvbuf: Spec, op: MPI.Op = MPI.SUM, *, stream: Stream = None) -> None:
        """Reduce elementwise over the ranks; every rank has the result."""
        if number(sendbuf) and number(recvbuf):
            MPI.Comm.Allreduce(self, sendbuf, recvbuf, op)
        else:
            execute(self, self._paths, OPERATIONS["Allreduce"], (sendbuf, recvbuf, op), stream)

    def Reduce_scatter_block(
        self, sendbuf: Spec, recvbuf: Spec, op: MPI.Op = MPI.SUM, *, stream: Stream = None
    ) -> None:
        """Reduce, then hand equal blocks of the result out."""
        if number(sendbuf) and number(recvbuf):
            MPI.Comm.Reduce_scatter_block(self, sendbuf, recvbuf, op)
        else:
            execute(self, self._paths, OPERATIONS["Reduce_scatter_block"], (sendbuf, recvbuf, op), stream)

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
        if number(sendbuf) and number(recvbuf):
            MPI.Comm.Reduce_scatter(self, sendbuf, recvbuf, recvcounts, op)
        else:
            execute(
                self, self._paths, OPERATIONS["Reduce_scatter"], (sendbuf, recvbuf, recvcounts, op), stream
            )


class Scans(_Intracomm):
    """Collectives that need an order of ranks."""

    _paths: Paths

    def Scan(self, sendbuf: Spec, recvbuf: Spec, op: MPI.Op = MPI.SUM, *, stream: Stream = None) -> None:
        """Reduce over ranks 0 to this one."""
        if number(sendbuf) and number(recvbuf):
            MPI.Intracomm.Scan(self, sendbuf, recvbuf, op)
        else:
            execute(self, self._paths, OPERATIONS["Scan"], (sendbuf, recvbuf, op), stream)

    def Exscan(self, sendbuf: Spec, recvbuf: Spec, op: MPI.Op = MPI.SUM, *, stream: Stream = None) -> None:
        """Reduce over ranks 0 to the one before; rank 0's array stays as it was."""
        if number(sendbuf) and number(recvbuf):
            MPI.Intracomm.Exscan(self, sendbuf, recvbuf, op)
        else:
            execute(self, self._paths, OPERATIONS["Exscan"], (sendbuf, recvbuf, op), stream)
