"""Persistent collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from mpi4py import MPI
from numpy import ndarray

from gdcomm.arguments import UNSERVED, freed, unserved
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
_Allgather_init = MPI.Comm.Allgather_init
_Allgatherv_init = MPI.Comm.Allgatherv_init
_Allreduce_init = MPI.Comm.Allreduce_init
_Alltoall_init = MPI.Comm.Alltoall_init
_Alltoallv_init = MPI.Comm.Alltoallv_init
_Alltoallw_init = MPI.Comm.Alltoallw_init
_Bcast_init = MPI.Comm.Bcast_init
_Gather_init = MPI.Comm.Gather_init
_Gatherv_init = MPI.Comm.Gatherv_init
_Reduce_init = MPI.Comm.Reduce_init
_Reduce_scatter_block_init = MPI.Comm.Reduce_scatter_block_init
_Reduce_scatter_init = MPI.Comm.Reduce_scatter_init
_Scatter_init = MPI.Comm.Scatter_init
_Scatterv_init = MPI.Comm.Scatterv_init
_Exscan_init = MPI.Intracomm.Exscan_init
_Scan_init = MPI.Intracomm.Scan_init


class PersistentCollectives(_Comm):
    """The _init-forms of the collectives."""

    _paths: Paths

    def Bcast_init(
        self, buf: Spec, root: int = 0, info: MPI.Info = MPI.INFO_NULL, *, stream: Stream = None
    ) -> MPI.Prequest:
        """Persistent Bcast; start it by Start."""
        if type(buf) is ndarray and (buf.ndim < 2 or buf.flags.c_contiguous):
            try:
                return _Bcast_init(self, buf, root, info)
            except UNSERVED as error:
                unserved(error, self, "Bcast_init", (buf, root, info))
        return execute(self, self._paths, OPERATIONS["Bcast_init"], (buf, root, info), stream)

    def Gather_init(
        self,
        sendbuf: Spec,
        recvbuf: Spec,
        root: int = 0,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        stream: Stream = None,
    ) -> MPI.Prequest:
        """Persistent Gather; start it by Start."""
        if plain(sendbuf) and plain(recvbuf):
            try:
                return _Gather_init(self, sendbuf, recvbuf, root, info)
            except UNSERVED as error:
                unserved(error, self, "Gather_init", (sendbuf, recvbuf, root, info))
        return execute(self, self._paths, OPERATIONS["Gather_init"], (sendbuf, recvbuf, root, info), stream)

    def Gatherv_init(
        self,
        sendbuf: Spec,
        recvbuf: Spec,
        root: int = 0,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        stream: Stream = None,
    ) -> MPI.Prequest:
        """Persistent Gatherv; start it by Start."""
        if plain(sendbuf) and plain(recvbuf):
            try:
                return _Gatherv_init(self, sendbuf, recvbuf, root, info)
            except UNSERVED as error:
                unserved(error, self, "Gatherv_init", (sendbuf, recvbuf, root, info))
        return execute(self, self._paths, OPERATIONS["Gatherv_init"], (sendbuf, recvbuf, root, info), stream)

    def Scatter_init(
        self,
        sendbuf: Spec,
        recvbuf: Spec,
        root: int = 0,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        stream: Stream = None,
    ) -> MPI.Prequest:
        """Persistent Scatter; start it by Start."""
        if plain(sendbuf) and plain(recvbuf):
            try:
                return _Scatter_init(self, sendbuf, recvbuf, root, info)
            except UNSERVED as error:
                unserved(error, self, "Scatter_init", (sendbuf, recvbuf, root, info))
        return execute(self, self._paths, OPERATIONS["Scatter_init"], (sendbuf, recvbuf, root, info), stream)

    def Scatterv_init(
        self,
        sendbuf: Spec,
        recvbuf: Spec,
        root: int = 0,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        stream: Stream = None,
    ) -> MPI.Prequest:
        """Persistent Scatterv; start it by Start."""
        if plain(sendbuf) and plain(recvbuf):
            try:
                return _Scatterv_init(self, sendbuf, recvbuf, root, info)
            except UNSERVED as error:
                unserved(error, self, "Scatterv_init", (sendbuf, recvbuf, root, info))
        return execute(self, self._paths, OPERATIONS["Scatterv_init"], (sendbuf, recvbuf, root, info), stream)

    def Allgather_init(
        self, sendbuf: Spec, recvbuf: Spec, info: MPI.Info = MPI.INFO_NULL, *, stream: Stream = None
    ) -> MPI.Prequest:
        """Persistent Allgather; start it by Start."""
        if not self:
            raise freed(self, "Allgather_init")
        if plain(sendbuf) and plain(recvbuf):
            try:
                return _Allgather_init(self, sendbuf, recvbuf, info)
            except UNSERVED as error:
                unserved(error, self, "Allgather_init", (sendbuf, recvbuf, info))
        return execute(self, self._paths, OPERATIONS["Allgather_init"], (sendbuf, recvbuf, info), stream)

    def Allgatherv_init(
        self, sendbuf: Spec, recvbuf: Spec, info: MPI.Info = MPI.INFO_NULL, *, stream: Stream = None
    ) -> MPI.Prequest:
        """Persistent Allgatherv; start it by Start."""
        if plain(sendbuf) and plain(recvbuf):
            try:
                return _Allgatherv_init(self, sendbuf, recvbuf, info)
            except UNSERVED as error:
                unserved(error, self, "Allgatherv_init", (sendbuf, recvbuf, info))
        return execute(self, self._paths, OPERATIONS["Allgatherv_init"], (sendbuf, recvbuf, info), stream)

    def Alltoall_init(
        self, sendbuf: Spec, recvbuf: Spec, info: MPI.Info = MPI.INFO_NULL, *, stream: Stream = None
    ) -> MPI.Prequest:
        """Persistent Alltoall; start it by Start."""
        if plain(sendbuf) and plain(recvbuf):
            try:
                return _Alltoall_init(self, sendbuf, recvbuf, info)
            except UNSERVED as error:
                unserved(error, self, "Alltoall_init", (sendbuf, recvbuf, info))
        return execute(self, self._paths, OPERATIONS["Alltoall_init"], (sendbuf, recvbuf, info), stream)

    def Alltoallv_init(
        self, sendbuf: Spec, recvbuf: Spec, info: MPI.Info = MPI.INFO_NULL, *, stream: Stream = None
    ) -> MPI.Prequest:
        """Persistent Alltoallv; start it by Start."""
        if plain(sendbuf) and plain(recvbuf):
            try:
                return _Alltoallv_init(self, sendbuf, recvbuf, info)
            except UNSERVED as error:
                unserved(error, self, "Alltoallv_init", (sendbuf, recvbuf, info))
        return execute(self, self._paths, OPERATIONS["Alltoallv_init"], (sendbuf, recvbuf, info), stream)

    def Alltoallw_init(
        self, sendbuf: Spec, recvbuf: Spec, info: MPI.Info = MPI.INFO_NULL, *, stream: Stream = None
    ) -> MPI.Prequest:
        """Persistent Alltoallw; start it by Start."""
        if plain(sendbuf) and plain(recvbuf):
            try:
                return _Alltoallw_init(self, sendbuf, recvbuf, info)
            except UNSERVED as error:
                unserved(error, self, "Alltoallw_init", (sendbuf, recvbuf, info))
        return execute(self, self._paths, OPERATIONS["Alltoallw_init"], (sendbuf, recvbuf, info), stream)

    def Reduce_init(
        self,
        sendbuf: Spec,
        recvbuf: Spec,
        op: MPI.Op = MPI.SUM,
        root: int = 0,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        stream: Stream = None,
    ) -> MPI.Prequest:
        """Persistent Reduce; start it by Start."""
        if reducible(sendbuf, recvbuf):
            try:
                return _Reduce_init(self, sendbuf, recvbuf, op, root, info)
            except UNSERVED as error:
                unserved(error, self, "Reduce_init", (sendbuf, recvbuf, op, root, info))
        return execute(
            self, self._paths, OPERATIONS["Reduce_init"], (sendbuf, recvbuf, op, root, info), stream
        )

    def Allreduce_init(
        self,
        sendbuf: Spec,
        recvbuf: Spec,
        op: MPI.Op = MPI.SUM,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        stream: Stream = None,
    ) -> MPI.Prequest:
        """Persistent Allreduce; start it by Start."""
        if reducible(sendbuf, recvbuf):
            try:
                return _Allreduce_init(self, sendbuf, recvbuf, op, info)
            except UNSERVED as error:
                unserved(error, self, "Allreduce_init", (sendbuf, recvbuf, op, info))
        return execute(self, self._paths, OPERATIONS["Allreduce_init"], (sendbuf, recvbuf, op, info), stream)

    def Reduce_scatter_block_init(
        self,
        sendbuf: Spec,
        recvbuf: Spec,
        op: MPI.Op = MPI.SUM,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        stream: Stream = None,
    ) -> MPI.Prequest:
        """Persistent Reduce_scatter_block; start it by Start."""
        if reducible(sendbuf, recvbuf):
            try:
                return _Reduce_scatter_block_init(self, sendbuf, recvbuf, op, info)
            except UNSERVED as error:
                unserved(error, self, "Reduce_scatter_block_init", (sendbuf, recvbuf, op, info))
        return execute(
            self, self._paths, OPERATIONS["Reduce_scatter_block_init"], (sendbuf, recvbuf, op, info), stream
        )

    def Reduce_scatter_init(
        self,
        sendbuf: Spec,
        recvbuf: Spec,
        recvcounts: Sequence[int] | None = None,
        op: MPI.Op = MPI.SUM,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        stream: Stream = None,
    ) -> MPI.Prequest:
        """Persistent Reduce_scatter; start it by Start."""
        if reducible(sendbuf, recvbuf):
            try:
                return _Reduce_scatter_init(self, sendbuf, recvbuf, recvcounts, op, info)
            except UNSERVED as error:
                unserved(error, self, "Reduce_scatter_init", (sendbuf, recvbuf, recvcounts, op, info))
        return execute(
            self, self._paths, OPERATIONS["Reduce_scatter_init"], (sendbuf, recvbuf, recvcounts, op, info), stream
        )


class PersistentScans(_Intracomm):
    """The _init-forms of the scans."""

    _paths: Paths

    def Scan_init(
        self,
        sendbuf: Spec,
        recvbuf: Spec,
        op: MPI.Op = MPI.SUM,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        stream: Stream = None,
    ) -> MPI.Prequest:
        """Persistent Scan; start it by Start."""
        if reducible(sendbuf, recvbuf):
            try:
                return _Scan_init(self, sendbuf, recvbuf, op, info)
            except UNSERVED as error:
                unserved(error, self, "Scan_init", (sendbuf, recvbuf, op, info))
        return execute(self, self._paths, OPERATIONS["Scan_init"], (sendbuf, recvbuf, op, info), stream)

    def Exscan_init(
        self,
        sendbuf: Spec,
        recvbuf: Spec,
        op: MPI.Op = MPI.SUM,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        stream: Stream = None,
    ) -> MPI.Prequest:
        """Persistent Exscan; start it by Start."""
        if reducible(sendbuf, recvbuf):
            try:
                return _Exscan_init(self, sendbuf, recvbuf, op, info)
            except UNSERVED as error:
                unserved(error, self, "Exscan_init", (sendbuf, recvbuf, op, info))
        return execute(self, self._paths, OPERATIONS["Exscan_init"], (sendbuf, recvbuf, op, info), stream)
