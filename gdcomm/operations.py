"""What each MPI operation is: which arguments are buffers, and what is written when.

One table serves the blocking, the nonblocking (I...) and the persistent (..._init)
form, and every transport. Nothing here looks at an array.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mpi4py import MPI

__all__ = ["OPERATIONS", "Operation", "operation"]

BLOCKING, REQUEST, PERSISTENT = "blocking", "request", "persistent"


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of the MPI API.

    Args:
        name: method name.
        call: the mpi4py method that does it on host memory, unbound.
        group: capability class: "p2p", "copy" (point-to-point in which MPI itself copies the buffer:
            buffered sends and the replacing exchanges), "move" (collectives that only move bytes)
            or "reduce".
        form: "blocking", "request" or "persistent".
        send, recv, both: positions of the buffers that are read, written, or both (-1: none).
        op: position of the reduction operator (-1: none).
        root: position of the root rank (-1: none); `root_side` is the buffer that only the root has.
        partial: the receive buffer may be written in part only, even as a plain array.
        status: position of the status argument (-1: none).
        counted: the status tells how many bytes were written. (Not so for Isendrecv: MPICH's
            may count the sent ones.)
        buffers: the positions of all of them.
        simple: blocking, and writes its buffers whole or says how far (see `short`).
    """

    name: str
    call: Callable[..., Any]
    group: str
    form: str
    send: int = -1
    recv: int = -1
    both: int = -1
    op: int = -1
    root: int = -1
    root_side: str = ""
    partial: bool = False
    status: int = -1
    counted: bool = False
    buffers: tuple[int, ...] = ()
    simple: bool = False

    def reads(self, comm: MPI.Comm, position: int, arguments: Sequence[Any], in_place: bool) -> bool:
        """Whether the content of the buffer at `position` counts on this rank."""
        if self.root >= 0 and comm.Is_inter():  # which buffers count differs by rank: keep what is there
            return True
        if self.both >= 0 and self.root >= 0:  # Bcast: only the root's
            return bool(arguments[self.root] == comm.Get_rank())
        return position != self.recv or in_place

    def writes(self, comm: MPI.Comm, position: int, arguments: Sequence[Any]) -> bool:
        """Whether the buffer at `position` receives data on this rank."""
        if self.both >= 0 and self.root >= 0:  # Bcast: not the root's
            return bool(arguments[self.root] != (MPI.ROOT if comm.Is_inter() else comm.Get_rank()))
        return position != self.send

    def spare(self, comm: MPI.Comm, arguments: Sequence[Any]) -> int:
        """The position of the buffer that only the root has, on other ranks of an intracommunicator; else -1."""
        if not self.root_side or comm.Is_inter() or arguments[self.root] == comm.Get_rank():
            return -1
        return self.recv if self.root_side == "recv" else self.send

    def complete(self, arguments: Sequence[Any]) -> list[Any]:
        """Arguments with those that are left out by default: no buffers, MPI.SUM, root 0."""
        defaults = {self.op: MPI.SUM, self.root: 0}
        length = max(*self.buffers, self.op, self.root) + 1
        return [*arguments, *(defaults.get(position) for position in range(len(arguments), length))]

    def receipt(self, arguments: list[Any]) -> MPI.Status | None:
        """The status argument, put in where the user gave none; None if the operation has none."""
        if self.status < 0:
            return None
        if arguments[self.status] is None:
            arguments[self.status] = MPI.Status()
        status: MPI.Status = arguments[self.status]
        return status


OPERATIONS: dict[str, Operation] = {}


def _add(owner: type, name: str, group: str, form: str, **fields: Any) -> None:
    call = getattr(owner, name, None)
    if call is not None:  # an mpi4py without this method: then neither have we
        OPERATIONS[name] = operation(name, call, group, form, **fields)


def operation(name: str, call: Callable[..., Any], group: str, form: str, **fields: Any) -> Operation:
    """An operation with what follows from its fields."""
    buffers = tuple(fields[key] for key in ("send", "recv", "both") if key in fields)
    whole = fields.get("counted", False) or not fields.get("partial", False)
    simple = form == BLOCKING and whole
    return Operation(name, call, group, form, buffers=buffers, simple=simple, **fields)


def _family(name: str, group: str, owner: type = MPI.Comm, **fields: Any) -> None:
    _add(owner, name, group, BLOCKING, **fields)
    _add(owner, "I" + name[0].lower() + name[1:], group, REQUEST, **fields)
    _add(owner, name + "_init", group, PERSISTENT, **fields)


for _mode in ("", "b", "s", "r"):
    _group = "copy" if _mode == "b" else "p2p"
    _add(MPI.Comm, (_mode + "send").capitalize(), _group, BLOCKING, send=0)
    _add(MPI.Comm, "I" + _mode + "send", _group, REQUEST, send=0)
    _add(MPI.Comm, (_mode + "send_init").capitalize(), _group, PERSISTENT, send=0)
_add(MPI.Comm, "Recv", "p2p", BLOCKING, recv=0, status=3, partial=True, counted=True)
_add(MPI.Comm, "Irecv", "p2p", REQUEST, recv=0, partial=True, counted=True)
_add(MPI.Comm, "Recv_init", "p2p", PERSISTENT, recv=0, partial=True, counted=True)
_add(MPI.Comm, "Sendrecv", "p2p", BLOCKING, send=0, recv=3, status=6, partial=True, counted=True)
_add(MPI.Comm, "Isendrecv", "p2p", REQUEST, send=0, recv=3, partial=True)
_add(MPI.Comm, "Sendrecv_replace", "copy", BLOCKING, both=0, status=5)
_add(MPI.Comm, "Isendrecv_replace", "copy", REQUEST, both=0)

_family("Bcast", "move", both=0, root=1)
_family("Gather", "move", send=0, recv=1, root=2, root_side="recv")
_family("Gatherv", "move", send=0, recv=1, root=2, root_side="recv")
_family("Scatter", "move", send=0, recv=1, root=2, root_side="send")
_family("Scatterv", "move", send=0, recv=1, root=2, root_side="send")
for _name in ("Allgather", "Allgatherv", "Alltoall", "Alltoallv", "Alltoallw"):
    _family(_name, "move", send=0, recv=1)
for _name in ("Neighbor_allgather", "Neighbor_allgatherv", "Neighbor_alltoall", "Neighbor_alltoallv",
              "Neighbor_alltoallw"):  # fmt: skip
    # Blocks of absent neighbours (the rim of a grid) stay as they were.
    _family(_name, "move", MPI.Topocomm, send=0, recv=1, partial=True)
_family("Reduce", "reduce", send=0, recv=1, op=2, root=3, root_side="recv")
_family("Allreduce", "reduce", send=0, recv=1, op=2)
_family("Reduce_scatter_block", "reduce", send=0, recv=1, op=2)
_family("Reduce_scatter", "reduce", send=0, recv=1, op=3)
_family("Scan", "reduce", MPI.Intracomm, send=0, recv=1, op=2)
_family("Exscan", "reduce", MPI.Intracomm, send=0, recv=1, op=2, partial=True)  # rank 0: untouched
