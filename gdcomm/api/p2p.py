"""Point-to-point methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from mpi4py import MPI
from numpy import ndarray

from gdcomm.arguments import UNSERVED, unserved
from gdcomm.early import plain_only, receive
from gdcomm.execution import execute, plain
from gdcomm.operations import OPERATIONS

if TYPE_CHECKING:
    from gdcomm.envelopes import Channel
    from gdcomm.paths import Paths

    _Comm = MPI.Comm
else:  # mixins: the communicator class brings the MPI base
    _Comm = object

Spec: TypeAlias = Any  # a buffer argument as mpi4py takes it, or a device array in its place
Stream: TypeAlias = Any  # None, or anything with __cuda_stream__, .ptr or .cuda_stream


# Bound once: a method call then costs little more than mpi4py's own.
_Bsend = MPI.Comm.Bsend
_Bsend_init = MPI.Comm.Bsend_init
_Ibsend = MPI.Comm.Ibsend
_Irecv = MPI.Comm.Irecv
_Irsend = MPI.Comm.Irsend
_Isend = MPI.Comm.Isend
_Isendrecv = MPI.Comm.Isendrecv
_Isendrecv_replace = MPI.Comm.Isendrecv_replace
_Issend = MPI.Comm.Issend
_Recv = MPI.Comm.Recv
_Recv_init = MPI.Comm.Recv_init
_Rsend = MPI.Comm.Rsend
_Rsend_init = MPI.Comm.Rsend_init
_Send = MPI.Comm.Send
_Send_init = MPI.Comm.Send_init
_Sendrecv = MPI.Comm.Sendrecv
_Sendrecv_replace = MPI.Comm.Sendrecv_replace
_Ssend = MPI.Comm.Ssend
_Ssend_init = MPI.Comm.Ssend_init


class PointToPoint(_Comm):
    """Send, receive, and both; device arrays in place of host ones."""

    _paths: Paths
    _channel: Channel | None = None

    def Send(self, buf: Spec, dest: int, tag: int = 0, *, stream: Stream = None) -> None:
        """Send; returns when the array may be overwritten."""
        if type(buf) is ndarray and (buf.ndim < 2 or buf.flags.c_contiguous):
            try:
                return _Send(self, buf, dest, tag)
            except UNSERVED as error:
                unserved(error, self, "Send", (buf, dest, tag))
        execute(self, self._paths, OPERATIONS["Send"], (buf, dest, tag), stream)

    def Bsend(self, buf: Spec, dest: int, tag: int = 0, *, stream: Stream = None) -> None:
        """Send in buffered mode."""
        if type(buf) is ndarray and (buf.ndim < 2 or buf.flags.c_contiguous):
            try:
                return _Bsend(self, buf, dest, tag)
            except UNSERVED as error:
                unserved(error, self, "Bsend", (buf, dest, tag))
        execute(self, self._paths, OPERATIONS["Bsend"], (buf, dest, tag), stream)

    def Ssend(self, buf: Spec, dest: int, tag: int = 0, *, stream: Stream = None) -> None:
        """Send in synchronous mode: returns once the receive has started."""
        if type(buf) is ndarray and (buf.ndim < 2 or buf.flags.c_contiguous):
            try:
                return _Ssend(self, buf, dest, tag)
            except UNSERVED as error:
                unserved(error, self, "Ssend", (buf, dest, tag))
        execute(self, self._paths, OPERATIONS["Ssend"], (buf, dest, tag), stream)

    def Rsend(self, buf: Spec, dest: int, tag: int = 0, *, stream: Stream = None) -> None:
        """Send in ready mode: the receive must be posted."""
        if type(buf) is ndarray and (buf.ndim < 2 or buf.flags.c_contiguous):
            try:
                return _Rsend(self, buf, dest, tag)
            except UNSERVED as error:
                unserved(error, self, "Rsend", (buf, dest, tag))
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
        if (
            type(buf) is ndarray
            and (buf.ndim < 2 or buf.flags.c_contiguous)
            and (self._channel is None or plain_only(self._channel, buf))
        ):
            try:
                return _Recv(self, buf, source, tag, status)
            except UNSERVED as error:
                unserved(error, self, "Recv", (buf, source, tag, status))
        receive(self, "Recv", (buf, source, tag, status), stream)

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
        if plain(sendbuf) and plain(recvbuf) and (self._channel is None or plain_only(self._channel, recvbuf)):
            try:
                return _Sendrecv(self, sendbuf, dest, sendtag, recvbuf, source, recvtag, status)
            except UNSERVED as error:
                unserved(error, self, "Sendrecv", (sendbuf, dest, sendtag, recvbuf, source, recvtag, status))
        receive(
            self,
            "Sendrecv",
            (sendbuf, dest, sendtag, recvbuf, source, recvtag, status),
            stream,
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
        if (
            type(buf) is ndarray
            and (buf.ndim < 2 or buf.flags.c_contiguous)
            and (self._channel is None or plain_only(self._channel, buf))
        ):
            try:
                return _Sendrecv_replace(self, buf, dest, sendtag, source, recvtag, status)
            except UNSERVED as error:
                unserved(error, self, "Sendrecv_replace", (buf, dest, sendtag, source, recvtag, status))
        receive(self, "Sendrecv_replace", (buf, dest, sendtag, source, recvtag, status), stream)

    def Isend(self, buf: Spec, dest: int, tag: int = 0, *, stream: Stream = None) -> MPI.Request:
        """Nonblocking Send."""
        if type(buf) is ndarray and (buf.ndim < 2 or buf.flags.c_contiguous):
            try:
                return _Isend(self, buf, dest, tag)
            except UNSERVED as error:
                unserved(error, self, "Isend", (buf, dest, tag))
        return execute(self, self._paths, OPERATIONS["Isend"], (buf, dest, tag), stream)

    def Ibsend(self, buf: Spec, dest: int, tag: int = 0, *, stream: Stream = None) -> MPI.Request:
        """Nonblocking Bsend."""
        if type(buf) is ndarray and (buf.ndim < 2 or buf.flags.c_contiguous):
            try:
                return _Ibsend(self, buf, dest, tag)
            except UNSERVED as error:
                unserved(error, self, "Ibsend", (buf, dest, tag))
        return execute(self, self._paths, OPERATIONS["Ibsend"], (buf, dest, tag), stream)

    def Issend(self, buf: Spec, dest: int, tag: int = 0, *, stream: Stream = None) -> MPI.Request:
        """Nonblocking Ssend."""
        if type(buf) is ndarray and (buf.ndim < 2 or buf.flags.c_contiguous):
            try:
                return _Issend(self, buf, dest, tag)
            except UNSERVED as error:
                unserved(error, self, "Issend", (buf, dest, tag))
        return execute(self, self._paths, OPERATIONS["Issend"], (buf, dest, tag), stream)

    def Irsend(self, buf: Spec, dest: int, tag: int = 0, *, stream: Stream = None) -> MPI.Request:
        """Nonblocking Rsend."""
        if type(buf) is ndarray and (buf.ndim < 2 or buf.flags.c_contiguous):
            try:
                return _Irsend(self, buf, dest, tag)
            except UNSERVED as error:
                unserved(error, self, "Irsend", (buf, dest, tag))
        return execute(self, self._paths, OPERATIONS["Irsend"], (buf, dest, tag), stream)

    def Irecv(
        self, buf: Spec, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, *, stream: Stream = None
    ) -> MPI.Request:
        """Nonblocking Recv."""
        if (
            type(buf) is ndarray
            and (buf.ndim < 2 or buf.flags.c_contiguous)
            and (self._channel is None or plain_only(self._channel, buf))
        ):
            try:
                return _Irecv(self, buf, source, tag)
            except UNSERVED as error:
                unserved(error, self, "Irecv", (buf, source, tag))
        return receive(self, "Irecv", (buf, source, tag), stream)

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
        if plain(sendbuf) and plain(recvbuf) and (self._channel is None or plain_only(self._channel, recvbuf)):
            try:
                return _Isendrecv(self, sendbuf, dest, sendtag, recvbuf, source, recvtag)
            except UNSERVED as error:
                unserved(error, self, "Isendrecv", (sendbuf, dest, sendtag, recvbuf, source, recvtag))
        return receive(self, "Isendrecv", (sendbuf, dest, sendtag, recvbuf, source, recvtag), stream)

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
        if (
            type(buf) is ndarray
            and (buf.ndim < 2 or buf.flags.c_contiguous)
            and (self._channel is None or plain_only(self._channel, buf))
        ):
            try:
                return _Isendrecv_replace(self, buf, dest, sendtag, source, recvtag)
            except UNSERVED as error:
                unserved(error, self, "Isendrecv_replace", (buf, dest, sendtag, source, recvtag))
        return receive(self, "Isendrecv_replace", (buf, dest, sendtag, source, recvtag), stream)

    def Send_init(self, buf: Spec, dest: int, tag: int = 0, *, stream: Stream = None) -> MPI.Prequest:
        """Persistent Send; start it by Start."""
        if type(buf) is ndarray and (buf.ndim < 2 or buf.flags.c_contiguous):
            try:
                return _Send_init(self, buf, dest, tag)
            except UNSERVED as error:
                unserved(error, self, "Send_init", (buf, dest, tag))
        return execute(self, self._paths, OPERATIONS["Send_init"], (buf, dest, tag), stream)

    def Bsend_init(self, buf: Spec, dest: int, tag: int = 0, *, stream: Stream = None) -> MPI.Prequest:
        """Persistent Bsend; start it by Start."""
        if type(buf) is ndarray and (buf.ndim < 2 or buf.flags.c_contiguous):
            try:
                return _Bsend_init(self, buf, dest, tag)  # type: ignore[return-value]
            except UNSERVED as error:
                unserved(error, self, "Bsend_init", (buf, dest, tag))
        return execute(self, self._paths, OPERATIONS["Bsend_init"], (buf, dest, tag), stream)

    def Ssend_init(self, buf: Spec, dest: int, tag: int = 0, *, stream: Stream = None) -> MPI.Prequest:
        """Persistent Ssend; start it by Start."""
        if type(buf) is ndarray and (buf.ndim < 2 or buf.flags.c_contiguous):
            try:
                return _Ssend_init(self, buf, dest, tag)  # type: ignore[return-value]
            except UNSERVED as error:
                unserved(error, self, "Ssend_init", (buf, dest, tag))
        return execute(self, self._paths, OPERATIONS["Ssend_init"], (buf, dest, tag), stream)

    def Rsend_init(self, buf: Spec, dest: int, tag: int = 0, *, stream: Stream = None) -> MPI.Prequest:
        """Persistent Rsend; start it by Start."""
        if type(buf) is ndarray and (buf.ndim < 2 or buf.flags.c_contiguous):
            try:
                return _Rsend_init(self, buf, dest, tag)  # type: ignore[return-value]
            except UNSERVED as error:
                unserved(error, self, "Rsend_init", (buf, dest, tag))
        return execute(self, self._paths, OPERATIONS["Rsend_init"], (buf, dest, tag), stream)

    def Recv_init(
        self, buf: Spec, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, *, stream: Stream = None
    ) -> MPI.Prequest:
        """Persistent Recv; start it by Start."""
        if (
            type(buf) is ndarray
            and (buf.ndim < 2 or buf.flags.c_contiguous)
            and (self._channel is None or plain_only(self._channel, buf))
        ):
            try:
                return _Recv_init(self, buf, source, tag)
            except UNSERVED as error:
                unserved(error, self, "Recv_init", (buf, source, tag))
        return execute(self, self._paths, OPERATIONS["Recv_init"], (buf, source, tag), stream)
