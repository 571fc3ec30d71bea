"""Nonblocking collectives of device arrays by our own algorithms, step by step while the program computes.

A nonblocking call must not wait for other ranks. So it only posts the question whether all ranks bring device arrays
(see `collectives`), on the communicator itself: there MPI sees collectives in the order of the calls. All that follows
happens later, in whatever thread polls the request, and takes place on a *hidden* communicator of the same ranks. There
nothing meets what the program does meanwhile.

A communicator's nonblocking collectives take turns, in the order of the calls, as on a stream. So all ranks use the
hidden communicator in the same order, be it for an algorithm or, where the answer is no, for MPI's own collective.

The hidden communicator is made when the first answer is there, by a thread, since that waits for the other ranks.
MPI_Comm_idup would not do: in Open MPI its parts get mixed up with other collectives of the communicator.
"""

from __future__ import annotations

import operator
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from mpi4py import MPI

from gdcomm import devices
from gdcomm.algorithms.link import Requests
from gdcomm.algorithms.steps import Flight, Steps
from gdcomm.arguments import explain
from gdcomm.channels import free_after
from gdcomm.collectives import asks, job
from gdcomm.devices.base import Device
from gdcomm.envelopes import Channel
from gdcomm.errors import BufferSpecError
from gdcomm.execution import Plan, execute, prepare, start
from gdcomm.express import Express
from gdcomm.links import DeviceLink, Hidden
from gdcomm.operations import OPERATIONS, Operation
from gdcomm.patience import moved
from gdcomm.requests import Pending, start_request
from gdcomm.transports.base import split_spec
from gdcomm.vectors import Call
from gdcomm.ways import BLOCKING_FORMS, WAYS, answer, question

__all__ = ["nonblocking"]


def nonblocking(comm: Any, operation: Operation, arguments: tuple[Any, ...], stream: Any) -> MPI.Request:
    """Start a nonblocking collective: by our own algorithm if all ranks can, else by MPI."""
    blocking = OPERATIONS[BLOCKING_FORMS[operation.name]]
    if not asks(comm, blocking.name, arguments) or not _has_root(comm, blocking, arguments):
        found: MPI.Request = execute(comm, comm._paths, operation, arguments, stream)
        return found
    try:
        work = _Collective(comm, operation, blocking, arguments, stream)
        try:
            return start_request(Pending(work.ask(comm), work))
        except BaseException:
            work.close()
            raise
    except MPI.Exception as error:
        raise explain(error, comm, operation.name, arguments) from None


def _has_root(comm: Any, operation: Operation, arguments: tuple[Any, ...]) -> bool:
    """Whether the root is a rank; if not, MPI says so at once."""
    try:
        return operation.root < 0 or 0 <= operator.index(arguments[operation.root]) < comm._channel.size
    except TypeError:
        return False


class _Until(Flight):
    """Something to be waited for.

    Args:
        test: tells whether it is there.
    """

    def __init__(self, test: Callable[[], bool]) -> None:
        self._test = test

    def test(self) -> bool:
        return self._test()


class _Queue:
    """What the nonblocking collectives of a communicator share.

    Args:
        channel: the communicator's.

    Attributes:
        works: those that have not had their turn, in the order of the calls.
        number: this rank's proposal for a number of the hidden communicator; the largest is taken.
        express: for messages between ranks of a node, once they are needed.
    """

    def __init__(self, channel: Channel) -> None:
        # Without what refers to this queue, and without the messages of the program.
        self.channel = channel._replace(notes={}, early=[])
        self.works: deque[_Collective] = deque()
        self.number = channel.shadow.number()
        self.express: Express | None = None
        self._comm: MPI.Intracomm | None = None
        self._begun = False
        self._error: BaseException | None = None

    @property
    def comm(self) -> MPI.Intracomm:
        """The hidden communicator, once it is open."""
        assert self._comm is not None
        return self._comm

    def open(self, number: int) -> Flight:
        """Until the hidden communicator is there.

        Args:
            number: the same on all ranks.
        """
        if not self._begun:
            self._begun = True
            threading.Thread(target=self._make, args=(number,), name="gdcomm-hidden", daemon=True).start()
        return _Until(self._opened)

    def _make(self, number: int) -> None:
        channel = self.channel
        try:
            secret, comm = channel.shadow.join([channel.peer(rank) for rank in range(channel.size)], number)
            free_after(self, secret, comm)
            self._comm = comm
        except BaseException as error:
            self._error = error
        moved()

    def _opened(self) -> bool:
        if self._error is not None:
            raise self._error
        return self._comm is not None


class _Collective:
    """One nonblocking collective. To a request it is what follows the question, and one event: the end.

    The algorithm runs on a stream of its own, which waits for what is queued on the user's streams at the call.

    Args:
        comm: the communicator.
        operation: what is called.
        blocking: its blocking form.
        arguments: of the method, all of them.
        stream: the user's stream or None.
    """

    sends = False

    def __init__(
        self, comm: Any, operation: Operation, blocking: Operation, arguments: tuple[Any, ...], stream: Any
    ) -> None:
        channel: Channel = comm._channel
        self._operation, self._arguments, self._paths = operation, arguments, comm._paths
        self._least = getattr(comm._limits, blocking.group)
        self._question, self._answer = np.zeros((2, 5), np.int64)  # held here: mpi4py's Iallreduce does not
        self._flight: Flight | None = None
        self._device: Device | None = None
        self._side: Any = None
        self._plan: Plan | None = None
        self._call: Call | None = None
        try:
            self._borrow(comm, blocking, stream)
            if self._device is not None:
                self._call = Call(blocking, arguments, self._side, channel.size, comm.Get_rank(), operation.name)
            self._way = None if self._call is None else WAYS[blocking.name](self._call)
            if self._way is None:  # it will be MPI's: what is wrong with it is to be said now
                self._plan = prepare(comm, comm._paths, operation, arguments, self._side)
        except BaseException:
            self._give_back()
            raise
        self._queue: _Queue = channel.notes.get("queue") or channel.notes.setdefault("queue", _Queue(channel))
        self._steps = self._run()

    def _borrow(self, comm: Any, blocking: Operation, stream: Any) -> None:
        """Borrow a stream that comes after the user's."""
        spare = blocking.spare(comm, self._arguments)
        arrays = [split_spec(self._arguments[position])[0] for position in blocking.buffers if position != spare]
        found = [buffer for array in arrays if array is not None and (buffer := devices.find(array, stream))]
        if found:
            self._device = device = found[0].device
            self._side = device.borrow_stream()
            for buffer in found:
                device.wait_event(self._side, device.record(buffer.stream))

    def ask(self, comm: Any) -> MPI.Request:
        """Ask the other ranks, and get in line."""
        self._question[:] = *question(self._call, self._way), -self._queue.number
        asked = MPI.Intracomm.Iallreduce(comm, self._question, self._answer, MPI.MIN)
        self._queue.works.append(self)
        return asked

    def begin(self) -> None:
        """Nothing: see `ask`."""

    def end(self, nbytes: int | None) -> list[Any]:
        """The answer is there."""
        return [self]

    def query(self) -> bool:
        """Go on as far as that needs no waiting; True when the data is in place."""
        while self._flight is None or self._flight.test():
            self._flight = next(self._steps, None)
            moved()
            if self._flight is None:
                return True
        return False

    def synchronize(self) -> None:
        """Go on until the data is in place."""
        _Until(self.query).wait()

    def total(self, nbytes: int) -> int:
        """MPI's requests of collectives count nothing."""
        return nbytes

    def here(self) -> AbstractContextManager[Any]:
        """The context in which another thread may go on."""
        return nullcontext() if self._device is None else self._device.here()

    def close(self) -> None:
        """Leave the queue, and give everything back."""
        self._steps.close()
        if self in self._queue.works:  # an error came between
            self._queue.works.remove(self)
        self._give_back()

    def _give_back(self) -> None:
        if self._plan is not None:
            self._plan.close()
            self._plan = None
        if self._device is not None:
            self._device.return_stream(self._side)
            self._device = None

    def _run(self) -> Steps:
        """Everything after the answer."""
        queue = self._queue
        if self._device is not None:  # no thread is to block on what the program has queued
            yield _Until(self._device.record(self._side).query)
        yield _Until(lambda: queue.works[0] is self)
        *said, number = self._answer.tolist()
        yield queue.open(-number)
        nbytes = answer(*said)
        if self._call is None or self._way is None or nbytes < self._least:
            request = self._by_mpi()
            queue.works.popleft()  # MPI keeps apart what comes after
            yield _Until(request.Test)
        else:
            yield from self._by_algorithm(self._call, nbytes)
            queue.works.popleft()

    def _by_mpi(self) -> MPI.Request:
        hidden = Hidden(self._queue.comm, self._queue.channel, self._paths)
        plan = self._plan or prepare(hidden, self._paths, self._operation, self._arguments, self._side)
        self._plan = None  # it closes itself
        request: MPI.Request = start(hidden, plan)
        return request

    def _by_algorithm(self, call: Call, nbytes: int) -> Steps:
        queue, device = self._queue, self._device
        assert self._way is not None
        assert device is not None
        express = None
        if self._paths.transport(OPERATIONS["Isend"]) == "staged":
            if queue.express is None:
                made, heard = Express(queue.channel, device), np.zeros(call.ranks, np.int64)
                yield Requests([MPI.Intracomm.Ialltoall(queue.comm, np.array(made.told, np.int64), heard)])
                made.hear(heard.tolist())
                queue.express = made
            express = queue.express
        link = DeviceLink(queue.channel, self._paths, 0, call.rank, call.op, express, queue.comm)
        try:
            yield from self._way.work(job(queue.comm, queue.channel, call, nbytes, link))
            yield _Until(link.settled)
            yield _Until(device.record(self._side).query)
        except BufferSpecError:  # raised on all ranks before anything was sent
            raise
        except BaseException:
            queue.express = None  # messages may be half through its boxes
            raise
        finally:
            link.close()
