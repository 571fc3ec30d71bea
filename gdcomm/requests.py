"""Requests of operations that have work to do after MPI is done: copy to the device, give memory back.

Such a request is an MPI *generalized request*: a real handle, so code that calls mpi4py's own
`MPI.Request.Waitall` on it works. It completes when the data is in place. Whoever waits
drives it; besides, a thread does where MPI was initialised with MPI_THREAD_MULTIPLE (mpi4py's
default). With less than that, complete such requests through their own Wait/Test or through
`gdcomm.Request.Waitall` and its relatives.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from mpi4py import MPI

from gdcomm.arguments import ArgumentError
from gdcomm.devices.base import Event
from gdcomm.memory.pages import in_child
from gdcomm.patience import Patience, moved

__all__ = ["Pending", "Prequest", "Request", "completed"]

_MPIRequest = MPI.Request  # kept: a program may bind the name in mpi4py.MPI to ours

# Seconds. MPI completes a send whose request was freed, however late its receiver comes, and MPI_Finalize waits for
# other processes anyway; so this is long. It must end: the receiver may have died, or never come.
QUIET_AT_END_S = 60.0
# Seconds that the progress thread leaves a request to the program, and how often it lets them pass before it sleeps.
_NAP_S, _NAPS = 5e-4, 10
_HANDLE = MPI._sizeof(MPI.Request)


class Work(Protocol):
    """What surrounds MPI's part of an operation (see `execution.Plan`)."""

    @property
    def sends(self) -> bool:
        """Whether it only sends: a receiver counts on it, also if the program does not."""

    def begin(self) -> None:
        """Prepare what MPI sees; blocks until it may look."""

    def end(self, nbytes: int | None) -> list[Event]:
        """Queue the result of `nbytes` received bytes; the events that tell when it is in place."""

    def total(self, nbytes: int) -> int:
        """Bytes received in all, of which MPI's own request counted `nbytes`; when everything is in place."""

    def close(self) -> None:
        """Give resources back."""

    def here(self) -> AbstractContextManager[Any]:
        """The context in which another thread may run `end`."""


class Pending:
    """One started operation: an MPI request, then device events, then done.

    Args:
        inner: the MPI request that moves host (or MPI-visible) memory.
        work: what follows; held until the end, and with it the user's arrays.
        close: whether to close `work` then.
    """

    def __init__(self, inner: MPI.Request, work: Work, close: bool = True) -> None:
        self.inner = inner
        self._work: Work | None = work
        self._close = close
        self._here = work.here()
        self._events: list[Event] | None = None
        self._lock = threading.Lock()
        self._status = MPI.Status()
        self.cancelled = False
        self._nbytes = 0
        self.error: BaseException | None = None
        self.done = False
        self.since = time.monotonic()
        self.grequest = MPI.Grequest.Start(self._query, None, self._cancel)

    @property
    def sends(self) -> bool:
        """Whether a message is still to be sent."""
        work = self._work
        return work is not None and work.sends

    def poll(self) -> bool:
        """Advance without waiting; True when the operation is complete."""
        if self.done or not self._lock.acquire(blocking=False):
            return self.done
        try:
            if not self.done:
                self._advance()
        finally:
            self._lock.release()
        return self.done

    def _advance(self) -> None:
        try:
            if self._events is None:
                if not self.inner.Test(self._status):
                    return
                moved()
                self.cancelled = self._status.Is_cancelled()
                if not self.cancelled:  # a collective's status counts nothing: it may read "undefined"
                    self._nbytes = max(0, self._status.Get_elements(MPI.BYTE))
            assert self._work is not None
            with self._here:
                if self._events is None:
                    self._events = self._work.end(self._nbytes)
                if not all(event.query() for event in self._events):  # one may be a transfer in chunks: it goes on
                    return
            self._nbytes = self._work.total(self._nbytes)
        except BaseException as error:  # handed to whoever waits, never lost in a thread
            self.error = error
        self._finish()

    def _finish(self) -> None:
        try:
            if self._close and self._work is not None:
                self._work.close()
        except BaseException as error:
            self.error = self.error or error
        self._work, self._events = None, []  # they hold the user's arrays
        self.grequest.Complete()
        self.done = True  # last: whoever sees it may complete the handle
        progress.forget(self)

    def _query(self, status: MPI.Status) -> None:
        status.source, status.tag = self._status.source, self._status.tag
        status.Set_elements(MPI.BYTE, self._nbytes)
        status.Set_cancelled(self.cancelled)
        if isinstance(self.error, MPI.Exception):
            raise MPI.Exception(self.error.Get_error_code())
        if self.error is not None:
            raise MPI.Exception(MPI.ERR_OTHER)

    def _cancel(self, completed: bool) -> None:
        if not completed and not self.done:
            self.inner.Cancel()


class _Progress:
    """The thread that completes requests while nobody waits for them."""

    def __init__(self) -> None:
        self._pending: dict[Pending, None] = {}  # in the order in which they were started
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._begun = self._stop = False
        self._drivers: list[None] = []  # one for each thread that polls: the thread then need not
        self._local = threading.local()

    @contextmanager
    def driven(self) -> Iterator[None]:
        """While the calling thread polls again and again."""
        self._drivers.append(None)
        try:
            yield
        finally:
            self._drivers.pop()

    def watch(self, pending: Pending) -> None:
        """See to it that a request that was started comes to its end."""
        moved()
        with self._wake:
            self._pending[pending] = None
            if not self._begun:
                self._begun = True
                self._begin()
            self._wake.notify()

    def forget(self, pending: Pending) -> None:
        """It has come to its end."""
        self._pending.pop(pending, None)

    def _begin(self) -> None:
        atexit.register(self.stop)
        # MPI_Finalize deletes the attributes of COMM_SELF first of all, while MPI still works.
        MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=lambda *_: self.stop()), True)
        in_child(self._forget_all)
        if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            self._thread = threading.Thread(target=self._run, name="gdcomm-progress", daemon=True)
            self._thread.start()

    def _forget_all(self) -> None:
        """In a forked child: the requests are the parent's."""
        self._wake = threading.Condition()  # the other may be held by a thread that does not exist here
        self._pending, self._thread, self._stop = {}, None, True

    def poll(self) -> None:
        """Advance everything pending once; used by whoever waits. What is polled may ask for this again: in vain."""
        if getattr(self._local, "polling", False):
            return
        self._local.polling = True
        try:
            for pending in list(self._pending):
                pending.poll()
        finally:
            self._local.polling = False

    def _run(self) -> None:
        """Look after what is pending.

        Most requests are waited for by the program soon after they were started, and the thread would only be in its
        way. So it looks when the oldest one is of some age; nor does it sleep in earnest, to be woken by the next
        request, before there was none for a while.
        """
        patience = Patience(looks=0, longest=1e-3)  # the program has work of its own for this core
        naps = _NAPS
        while not self._stop:
            if naps == _NAPS:
                with self._wake:
                    while not self._pending and not self._stop:
                        self._wake.wait()
                naps = 0
            oldest = next(iter(tuple(self._pending)), None)
            if oldest is not None and not self._drivers and time.monotonic() - oldest.since > _NAP_S:
                naps = 0
                self.poll()
                patience.pause()
            else:
                naps = 0 if oldest is not None else naps + 1
                time.sleep(_NAP_S)

    def stop(self) -> None:
        """The program ends: complete the sends that it left alone, and let go of the rest."""
        with self._wake:
            if self._stop:
                return
            self._stop = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(timeout=5)
        # After an error that nobody caught, who knows what others wait for.
        if not hasattr(sys, "last_value"):
            self._complete_sends()

    def _complete_sends(self) -> None:
        patience = Patience()
        quiet_since = time.monotonic()
        while sends := sum(pending.sends for pending in list(self._pending)):
            if patience.news:
                quiet_since = time.monotonic()
            elif time.monotonic() - quiet_since > QUIET_AT_END_S:
                warnings.warn(f"gdcomm: {sends} sends were not received for {QUIET_AT_END_S:g} s", stacklevel=2)
                return
            patience.pause()
            self.poll()


progress = _Progress()


def _copy_handle(target: MPI.Request, source: MPI.Request) -> None:
    # mpi4py has no public way to set a handle from Python; its documented low-level one is this.
    ctypes.memmove(MPI._addressof(target), MPI._addressof(source), _HANDLE)


class _Driven:
    """Completion methods of both request classes: drive our part, then let MPI complete the handle."""

    _pending: Pending | None = None

    def _drive(self) -> None:
        pending = self._pending
        if pending is None or pending.poll():
            return
        patience = Patience()
        with progress.driven():
            while not pending.poll():
                progress.poll()  # a peer may wait for another of our requests
                patience.pause()

    def _check(self) -> None:
        pending = self._pending
        if pending is not None and pending.done:
            self._pending = None
            if pending.error is not None:
                raise pending.error

    def Wait(self, status: MPI.Status | None = None) -> Any:
        """Wait until the operation is complete and its data is in place."""
        self._drive()
        try:
            return super().Wait(status)  # type: ignore[misc]
        finally:
            self._check()

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Tell whether the operation is complete and its data is in place."""
        progress.poll()
        if self._pending is not None and not self._pending.poll():
            return False
        try:
            return bool(super().Test(status))  # type: ignore[misc]
        finally:
            self._check()

    def Get_status(self, status: MPI.Status | None = None) -> bool:
        """Tell whether the operation is complete without completing the request."""
        progress.poll()
        return bool(super().Get_status(status))  # type: ignore[misc]


def _drive_all(requests: Sequence[MPI.Request]) -> None:
    for request in requests:
        if isinstance(request, _Driven):
            request._drive()


class Request(_Driven, MPI.Request):  # type: ignore[misc]
    """A request whose completion includes copies to and from the device."""

    _work: Work | None = None

    @classmethod
    def _plain(cls, inner: MPI.Request, work: Work) -> Request:
        """A request that is complete when MPI's is."""
        self = cls(inner)
        self._work = work  # holds the user's arrays
        return self

    @classmethod
    def Waitall(cls, requests: Sequence[MPI.Request], statuses: list[MPI.Status] | None = None) -> Any:
        """Wait for all requests, gdcomm's and mpi4py's alike."""
        _drive_all(requests)
        return _MPIRequest.Waitall(requests, statuses)  # type: ignore[arg-type]

    @classmethod
    def Waitany(cls, requests: Sequence[MPI.Request], status: MPI.Status | None = None) -> int:
        """Wait until any request is complete; return its index."""
        patience = Patience()
        with progress.driven():
            while True:
                index, done = cls.Testany(requests, status)
                if done:
                    return index
                patience.pause()

    @classmethod
    def Testany(cls, requests: Sequence[MPI.Request], status: MPI.Status | None = None) -> tuple[int, bool]:
        """Test whether any request is complete."""
        progress.poll()
        return _MPIRequest.Testany(requests, status)  # type: ignore[arg-type]

    @classmethod
    def Testall(cls, requests: Sequence[MPI.Request], statuses: list[MPI.Status] | None = None) -> bool:
        """Test whether all requests are complete."""
        progress.poll()
        return _MPIRequest.Testall(requests, statuses)  # type: ignore[arg-type]

    @classmethod
    def Waitsome(
        cls, requests: Sequence[MPI.Request], statuses: list[MPI.Status] | None = None
    ) -> list[int] | None:
        """Wait until some requests are complete; return their indices."""
        patience = Patience()
        with progress.driven():
            while True:
                found = cls.Testsome(requests, statuses)
                if found is None or found:
                    return found
                patience.pause()

    @classmethod
    def Testsome(
        cls, requests: Sequence[MPI.Request], statuses: list[MPI.Status] | None = None
    ) -> list[int] | None:
        """Return the indices of the requests that are complete."""
        progress.poll()
        return _MPIRequest.Testsome(requests, statuses)  # type: ignore[arg-type]


def start_request(pending: Pending) -> Request:
    """The request of a started operation."""
    request = Request()
    _copy_handle(request, pending.grequest)
    request._pending = pending
    progress.watch(pending)
    return request


def completed(report: Callable[[MPI.Status], None]) -> Request:
    """A request that is complete; `report` fills in its status."""
    grequest = MPI.Grequest.Start(report, None, None)
    grequest.Complete()
    request = Request()
    _copy_handle(request, grequest)
    return request


class Prequest(_Driven, MPI.Prequest):  # type: ignore[misc]
    """A persistent request on device memory. Start it by `Start` or `gdcomm.Prequest.Startall`.

    Args:
        inner: MPI's own persistent request on the memory that MPI sees.
        work: prepares that memory at each start, takes the result out of it, gives it back at `Free`.
    """

    _plan: tuple[MPI.Prequest, Any] | None = None  # the second is its `Work`

    @classmethod
    def _make(cls, inner: MPI.Prequest, work: Work) -> Prequest:
        self = cls()
        self._plan = (inner, work)
        return self

    def __eq__(self, other: object) -> bool:
        # Between two starts there is no handle, yet the request is not null until it is freed.
        if self._plan is not None and isinstance(other, _MPIRequest):
            return self is other
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = MPI.Prequest.__hash__

    def __bool__(self) -> bool:
        return self._plan is not None or super().__bool__()

    def Start(self) -> None:
        """Start the operation: as the nonblocking call would at this point of the stream."""
        if self._plan is None:
            super().Start()
            return
        inner, work = self._plan
        if self._pending is not None and _MPIRequest.__ne__(self, MPI.REQUEST_NULL):
            raise ArgumentError(MPI.ERR_REQUEST, "Start: the request is active; complete it by Wait or Test first")
        work.begin()
        inner.Start()
        pending = Pending(inner, work, close=False)
        _copy_handle(self, pending.grequest)
        self._pending = pending
        progress.watch(pending)

    @classmethod
    def Startall(cls, requests: Sequence[MPI.Prequest]) -> None:
        """Start all requests, gdcomm's and mpi4py's alike."""
        for request in requests:
            request.Start()

    def Free(self) -> None:
        """Release MPI's request and the memory behind it."""
        if self._plan is None:
            super().Free()
            return
        inner, work = self._plan
        self._drive()
        if self != MPI.REQUEST_NULL and _MPIRequest.__ne__(self, MPI.REQUEST_NULL):
            super().Wait()
        self._plan = None
        inner.Free()
        work.close()
