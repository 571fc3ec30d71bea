"""Neighbourhood collectives on topologies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from mpi4py import MPI

from gdcomm.arguments import UNSERVED, freed, unserved
from gdcomm.execution import execute, plain
from gdcomm.operations import OPERATIONS

if TYPE_CHECKING:
    from gdcomm.paths import Paths

    _Topocomm = MPI.Topocomm
else:  # mixins: the communicator class brings the MPI base
    _Topocomm = object

Spec: TypeAlias = Any  # a buffer argument as mpi4py takes it, or a device array in its place
Stream: TypeAlias = Any  # None, or anything with __cuda_stream__, .ptr or .cuda_stream


# Bound once: a method call then costs little more than mpi4py's own.
_Ineighbor_allgather = MPI.Topocomm.Ineighbor_allgather
_Ineighbor_allgatherv = MPI.Topocomm.Ineighbor_allgatherv
_Ineighbor_alltoall = MPI.Topocomm.Ineighbor_alltoall
_Ineighbor_alltoallv = MPI.Topocomm.Ineighbor_alltoallv
_Ineighbor_alltoallw = MPI.Topocomm.Ineighbor_alltoallw
_Neighbor_allgather = MPI.Topocomm.Neighbor_allgather
_Neighbor_allgather_init = MPI.Topocomm.Neighbor_allgather_init
_Neighbor_allgatherv = MPI.Topocomm.Neighbor_allgatherv
_Neighbor_allgatherv_init = MPI.Topocomm.Neighbor_allgatherv_init
_Neighbor_alltoall = MPI.Topocomm.Neighbor_alltoall
_Neighbor_alltoall_init = MPI.Topocomm.Neighbor_alltoall_init
_Neighbor_alltoallv = MPI.Topocomm.Neighbor_alltoallv
_Neighbor_alltoallv_init = MPI.Topocomm.Neighbor_alltoallv_init
_Neighbor_alltoallw = MPI.Topocomm.Neighbor_alltoallw
_Neighbor_alltoallw_init = MPI.Topocomm.Neighbor_alltoallw_init


class Neighbors(_Topocomm):
    """Exchange with the neighbours of a grid or graph; absent neighbours' blocks stay as they were."""

    _paths: Paths

    def Neighbor_allgather(self, sendbuf: Spec, recvbuf: Spec, *, stream: Stream = None) -> None:
        """Collect equal blocks of the neighbours."""
        if not self:
            raise freed(self, "Neighbor_allgather")
        if plain(sendbuf) and plain(recvbuf):
            try:
                return _Neighbor_allgather(self, sendbuf, recvbuf)
            except UNSERVED as error:
                unserved(error, self, "Neighbor_allgather", (sendbuf, recvbuf))
        execute(self, self._paths, OPERATIONS["Neighbor_allgather"], (sendbuf, recvbuf), stream)

    def Neighbor_allgatherv(self, sendbuf: Spec, recvbuf: Spec, *, stream: Stream = None) -> None:
        """Collect blocks of different sizes of the neighbours."""
        if plain(sendbuf) and plain(recvbuf):
            try:
                return _Neighbor_allgatherv(self, sendbuf, recvbuf)
            except UNSERVED as error:
                unserved(error, self, "Neighbor_allgatherv", (sendbuf, recvbuf))
        execute(self, self._paths, OPERATIONS["Neighbor_allgatherv"], (sendbuf, recvbuf), stream)

    def Neighbor_alltoall(self, sendbuf: Spec, recvbuf: Spec, *, stream: Stream = None) -> None:
        """Exchange a block with each neighbour."""
        if plain(sendbuf) and plain(recvbuf):
            try:
                return _Neighbor_alltoall(self, sendbuf, recvbuf)
            except UNSERVED as error:
                unserved(error, self, "Neighbor_alltoall", (sendbuf, recvbuf))
        execute(self, self._paths, OPERATIONS["Neighbor_alltoall"], (sendbuf, recvbuf), stream)

    def Neighbor_alltoallv(self, sendbuf: Spec, recvbuf: Spec, *, stream: Stream = None) -> None:
        """Exchange blocks of different sizes with the neighbours."""
        if plain(sendbuf) and plain(recvbuf):
            try:
                return _Neighbor_alltoallv(self, sendbuf, recvbuf)
            except UNSERVED as error:
                unserved(error, self, "Neighbor_alltoallv", (sendbuf, recvbuf))
        execute(self, self._paths, OPERATIONS["Neighbor_alltoallv"], (sendbuf, recvbuf), stream)

    def Neighbor_alltoallw(self, sendbuf: Spec, recvbuf: Spec, *, stream: Stream = None) -> None:
        """Exchange blocks with sizes, byte displacements and datatypes per neighbour."""
        if plain(sendbuf) and plain(recvbuf):
            try:
                return _Neighbor_alltoallw(self, sendbuf, recvbuf)
            except UNSERVED as error:
                unserved(error, self, "Neighbor_alltoallw", (sendbuf, recvbuf))
        execute(self, self._paths, OPERATIONS["Neighbor_alltoallw"], (sendbuf, recvbuf), stream)

    def Ineighbor_allgather(self, sendbuf: Spec, recvbuf: Spec, *, stream: Stream = None) -> MPI.Request:
        """Nonblocking Neighbor_allgather."""
        if not self:
            raise freed(self, "Ineighbor_allgather")
        if plain(sendbuf) and plain(recvbuf):
            try:
                return _Ineighbor_allgather(self, sendbuf, recvbuf)
            except UNSERVED as error:
                unserved(error, self, "Ineighbor_allgather", (sendbuf, recvbuf))
        return execute(self, self._paths, OPERATIONS["Ineighbor_allgather"], (sendbuf, recvbuf), stream)

    def Ineighbor_allgatherv(self, sendbuf: Spec, recvbuf: Spec, *, stream: Stream = None) -> MPI.Request:
        """Nonblocking Neighbor_allgatherv."""
        if plain(sendbuf) and plain(recvbuf):
            try:
                return _Ineighbor_allgatherv(self, sendbuf, recvbuf)
            except UNSERVED as error:
                unserved(error, self, "Ineighbor_allgatherv", (sendbuf, recvbuf))
        return execute(self, self._paths, OPERATIONS["Ineighbor_allgatherv"], (sendbuf, recvbuf), stream)

    def Ineighbor_alltoall(self, sendbuf: Spec, recvbuf: Spec, *, stream: Stream = None) -> MPI.Request:
        """Nonblocking Neighbor_alltoall."""
        if plain(sendbuf) and plain(recvbuf):
            try:
                return _Ineighbor_alltoall(self, sendbuf, recvbuf)
            except UNSERVED as error:
                unserved(error, self, "Ineighbor_alltoall", (sendbuf, recvbuf))
        return execute(self, self._paths, OPERATIONS["Ineighbor_alltoall"], (sendbuf, recvbuf), stream)

    def Ineighbor_alltoallv(self, sendbuf: Spec, recvbuf: Spec, *, stream: Stream = None) -> MPI.Request:
        """Nonblocking Neighbor_alltoallv."""
        if plain(sendbuf) and plain(recvbuf):
            try:
                return _Ineighbor_alltoallv(self, sendbuf, recvbuf)
            except UNSERVED as error:
                unserved(error, self, "Ineighbor_alltoallv", (sendbuf, recvbuf))
        return execute(self, self._paths, OPERATIONS["Ineighbor_alltoallv"], (sendbuf, recvbuf), stream)

    def Ineighbor_alltoallw(self, sendbuf: Spec, recvbuf: Spec, *, stream: Stream = None) -> MPI.Request:
        """Nonblocking Neighbor_alltoallw."""
        if plain(sendbuf) and plain(recvbuf):
            try:
                return _Ineighbor_alltoallw(self, sendbuf, recvbuf)
            except UNSERVED as error:
                unserved(error, self, "Ineighbor_alltoallw", (sendbuf, recvbuf))
        return execute(self, self._paths, OPERATIONS["Ineighbor_alltoallw"], (sendbuf, recvbuf), stream)

    def Neighbor_allgather_init(
        self, sendbuf: Spec, recvbuf: Spec, info: MPI.Info = MPI.INFO_NULL, *, stream: Stream = None
    ) -> MPI.Prequest:
        """Persistent Neighbor_allgather; start it by Start."""
        if not self:
            raise freed(self, "Neighbor_allgather_init")
        if plain(sendbuf) and plain(recvbuf):
            try:
                return _Neighbor_allgather_init(self, sendbuf, recvbuf, info)
            except UNSERVED as error:
                unserved(error, self, "Neighbor_allgather_init", (sendbuf, recvbuf, info))
        return execute(
            self, self._paths, OPERATIONS["Neighbor_allgather_init"], (sendbuf, recvbuf, info), stream
        )

    def Neighbor_allgatherv_init(
        self, sendbuf: Spec, recvbuf: Spec, info: MPI.Info = MPI.INFO_NULL, *, stream: Stream = None
    ) -> MPI.Prequest:
        """Persistent Neighbor_allgatherv; start it by Start."""
        if plain(sendbuf) and plain(recvbuf):
            try:
                return _Neighbor_allgatherv_init(self, sendbuf, recvbuf, info)
            except UNSERVED as error:
                unserved(error, self, "Neighbor_allgatherv_init", (sendbuf, recvbuf, info))
        return execute(
            self, self._paths, OPERATIONS["Neighbor_allgatherv_init"], (sendbuf, recvbuf, info), stream
        )

    def Neighbor_alltoall_init(
        self, sendbuf: Spec, recvbuf: Spec, info: MPI.Info = MPI.INFO_NULL, *, stream: Stream = None
    ) -> MPI.Prequest:
        """Persistent Neighbor_alltoall; start it by Start."""
        if plain(sendbuf) and plain(recvbuf):
            try:
                return _Neighbor_alltoall_init(self, sendbuf, recvbuf, info)
            except UNSERVED as error:
                unserved(error, self, "Neighbor_alltoall_init", (sendbuf, recvbuf, info))
        return execute(
            self, self._paths, OPERATIONS["Neighbor_alltoall_init"], (sendbuf, recvbuf, info), stream
        )

    def Neighbor_alltoallv_init(
        self, sendbuf: Spec, recvbuf: Spec, info: MPI.Info = MPI.INFO_NULL, *, stream: Stream = None
    ) -> MPI.Prequest:
        """Persistent Neighbor_alltoallv; start it by Start."""
        if plain(sendbuf) and plain(recvbuf):
            try:
                return _Neighbor_alltoallv_init(self, sendbuf, recvbuf, info)
            except UNSERVED as error:
                unserved(error, self, "Neighbor_alltoallv_init", (sendbuf, recvbuf, info))
        return execute(
            self, self._paths, OPERATIONS["Neighbor_alltoallv_init"], (sendbuf, recvbuf, info), stream
        )

    def Neighbor_alltoallw_init(
        self, sendbuf: Spec, recvbuf: Spec, info: MPI.Info = MPI.INFO_NULL, *, stream: Stream = None
    ) -> MPI.Prequest:
        """Persistent Neighbor_alltoallw; start it by Start."""
        if plain(sendbuf) and plain(recvbuf):
            try:
                return _Neighbor_alltoallw_init(self, sendbuf, recvbuf, info)
            except UNSERVED as error:
                unserved(error, self, "Neighbor_alltoallw_init", (sendbuf, recvbuf, info))
        return execute(
            self, self._paths, OPERATIONS["Neighbor_alltoallw_init"], (sendbuf, recvbuf, info), stream
        )
