"""Point-to-point methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from mpi4py import MPI

from gdcomm.execution import execute, plain
from gdcomm.operations import OPERATIONS

if TYPE_CHECKING:
    from gdcomm.paths import Paths

    _Comm = MPI.Comm
else:  # mixins: the communicator class brings the MPI base
    _Comm = object

Spec: TypeAlias = Any  # a buffer argument as mpi4py takes it, or a device array in its place
Stream: TypeAlias = Any  # None, or anything with __cuda_stream__, .ptr or .cuda_stream


class PointToPoint(_Comm):
    """Send, receive, and both; device arrays in place of host ones."""

    _paths: Paths

    def Send(self, buf: Spec, dest: int, tag: int = 0, *, stream: Stream = None) -> None:
        """Send; returns when the array may be overwritten."""
        if plain(buf):
            MPI.Comm.Send(self, buf, dest, tag)
        else:
            execute(self, self._paths, OPERATIONS["Send"], (buf, dest, tag), stream)

    def Bsend(self, buf: Spec, dest: int, tag: int = 0, *, stream: Stream = None) -> None:
        """Send in buffered mode."""
        if plain(buf):
            MPI.Comm.Bsend(self, buf, dest, tag)
        else:
            execute(self, self._paths, OPERATIONS["Bsend"], (buf, dest, tag), stream)

    def Ssend(self, buf: Spec, dest: int, tag: int = 0, *, stream: Stream = None) -> None:
        """Send in synchronous mode: returns once the receive has started."""
        if plain(buf):
            MPI.Comm.Ssend(self, buf, dest, tag)
        else:
            execute(self, self._paths, OPERATIONS["Ssend"], (buf, dest, tag), stream)

    def Rsend(self, buf: Spec, dest: int, tag: int = 0, *, stream: Stream = None) -> None:
        """Send in ready mode: the receive must be posted."""
        if plain(buf):
            MPI.Comm.Rsend(self, buf, dest, tag)
        else:
            execute(self, self._paths, OPERATIONS["Rsend"], (buf, dest, tag), stream)

    def Recv(
        self,
        buf: Spec,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
        *,
        stream: Stream = None,
    ) -> None:
        """Receive; a message may be shorter than the array, never longer."""
        if plain(buf):
            MPI.Comm.Recv(self, buf, source, tag, status)
        else:
            execute(self, self._paths, OPERATIONS["Recv"], (buf, source, tag, status), stream)

    def Sendrecv(
        self,
        sendbuf: Spec,
        dest: int,
        sendtag: int = 0,
        recvbuf: Spec = None,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
        *,
        stream: Stream = None,
    ) -> None:
        """Send and receive at once, without deadlock."""
        if plain(sendbuf) and plain(recvbuf):
            MPI.Comm.Sendrecv(self, sendbuf, dest, sendtag, recvbuf, source, recvtag, status)
        else:
            execute(
                self, self._paths, OPERATIONS["Sendrecv"], (sendbuf, dest, sendtag, recvbuf, source, recvtag, status), stream
            )

    def Sendrecv_replace(
        self,
        buf: Spec,
        dest: int,
        sendtag: int = 0,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
        *,
        stream: Stream = None,
    ) -> None:
        """Send an array and receive into the same one."""
        if plain(buf):
            MPI.Comm.Sendrecv_replace(self, buf, dest, sendtag, source, recvtag, status)
        else:
            execute(
                self, self._paths, OPERATIONS["Sendrecv_replace"], (buf, dest, sendtag, source, recvtag, status), stream
            )

    def Isend(self, buf: Spec, dest: int, tag: int = 0, *, stream: Stream = None) -> MPI.Request:
        """Nonblocking Send."""
        if plain(buf):
            return MPI.Comm.Isend(self, buf, dest, tag)
        return execute(self, self._paths, OPERATIONS["Isend"], (buf, dest, tag), stream)

    def Ibsend(self, buf: Spec, dest: int, tag: int = 0, *, stream: Stream = None) -> MPI.Request:
        """Nonblocking Bsend."""
        if plain(buf):
            return MPI.Comm.Ibsend(self, buf, dest, tag)
        return execute(self, self._paths, OPERATIONS["Ibsend"], (buf, dest, tag), stream)

    def Issend(self, buf: Spec, dest: int, tag: int = 0, *, stream: Stream = None) -> MPI.Request:
        """Nonblocking Ssend."""
        if plain(buf):
            return MPI.Comm.Issend(self, buf, dest, tag)
        return execute(self, self._paths, OPERATIONS["Issend"], (buf, dest, tag), stream)

    def Irsend(self, buf: Spec, dest: int, tag: int = 0, *, stream: Stream = None) -> MPI.Request:
        """Nonblocking Rsend."""
        if plain(buf):
            return MPI.Comm.Irsend(self, buf, dest, tag)
        return execute(self, self._paths, OPERATIONS["Irsend"], (buf, dest, tag), stream)

    def Irecv(
        self, buf: Spec, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, *, stream: Stream = None
    ) -> MPI.Request:
        """Nonblocking Recv."""
        if plain(buf):
            return MPI.Comm.Irecv(self, buf, source, tag)
        return execute(self, self._paths, OPERATIONS["Irecv"], (buf, source, tag), stream)

    def Isendrecv(
        self,
        sendbuf: Spec,
        dest: int,
        sendtag: int = 0,
        recvbuf: Spec = None,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        *,
        stream: Stream = None,
    ) -> MPI.Request:
        """Nonblocking Sendrecv."""
        if plain(sendbuf) and plain(recvbuf):
            return MPI.Comm.Isendrecv(self, sendbuf, dest, sendtag, recvbuf, source, recvtag)
        return execute(
            self, self._paths, OPERATIONS["Isendrecv"], (sendbuf, dest, sendtag, recvbuf, source, recvtag), stream
        )

    def Isendrecv_replace(
        self,
        buf: Spec,
        dest: int,
        sendtag: int = 0,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        *,
        stream: Stream = None,
    ) -> MPI.Request:
        """Nonblocking Sendrecv_replace."""
        if plain(buf):
            return MPI.Comm.Isendrecv_replace(self, buf, dest, sendtag, source, recvtag)
        return execute(
            self, self._paths, OPERATIONS["Isendrecv_replace"], (buf, dest, sendtag, source, recvtag), stream
        )

    def Send_init(self, buf: Spec, dest: int, tag: int = 0, *, stream: Stream = None) -> MPI.Prequest:
        """Persistent Send; start it by Start."""
        if plain(buf):
            return MPI.Comm.Send_init(self, buf, dest, tag)
        return execute(self, self._paths, OPERATIONS["Send_init"], (buf, dest, tag), stream)

    def Bsend_init(self, buf: Spec, dest: int, tag: int = 0, *, stream: Stream = None) -> MPI.Prequest:
        """Persistent Bsend; start it by Start."""
        if plain(buf):
            return MPI.Comm.Bsend_init(self, buf, dest, tag)
        return execute(self, self._paths, OPERATIONS["Bsend_init"], (buf, dest, tag), stream)

    def Ssend_init(self, buf: Spec, dest: int, tag: int = 0, *, stream: Stream = None) -> MPI.Prequest:
        """Persistent Ssend; start it by Start."""
        if plain(buf):
            return MPI.Comm.Ssend_init(self, buf, dest, tag)
        return execute(self, self._paths, OPERATIONS["Ssend_init"], (buf, dest, tag), stream)

    def Rsend_init(self, buf: Spec, dest: int, tag: int = 0, *, stream: Stream = None) -> MPI.Prequest:
        """Persistent Rsend; start it by Start."""
        if plain(buf):
            return MPI.Comm.Rsend_init(self, buf, dest, tag)
        return execute(self, self._paths, OPERATIONS["Rsend_init"], (buf, dest, tag), stream)

    def Recv_init(
        self, buf: Spec, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, *, stream: Stream = None
    ) -> MPI.Prequest:
        """Persistent Recv; start it by Start."""
        if plain(buf):
            return MPI.Comm.Recv_init(self, buf, source, tag)
        return execute(self, self._paths, OPERATIONS["Recv_init"], (buf, source, tag), stream)
