"""Counts over 2**31 - 1 on an MPI whose counts are C ints (every MPI before version 4).

Moved as one derived datatype; reduced in pieces. Counts agree on all ranks, so every rank
takes the same turn here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from gdcomm.operations import BLOCKING, Operation

__all__ = ["LIMIT", "blocks", "call"]

LIMIT = 2**31 - 1 if MPI.Get_version() < (4, 0) else 2**63 - 1
_PIECE = 2**30  # elements

# Positions whose array is one block for each rank.
_BLOCKS = {"Gather": (1,), "Scatter": (0,), "Allgather": (1,), "Alltoall": (0, 1)}


def call(operation: Operation, comm: Any, arguments: list[Any]) -> Any:
    """Call the operation on host arguments, however large."""
    positions = [p for p in (operation.send, operation.recv, operation.both) if p >= 0]
    if all(_elements(arguments[p]) <= LIMIT for p in positions):
        return operation.call(comm, *arguments)
    if operation.group == "reduce":
        return _in_pieces(operation, comm, arguments)
    types: list[MPI.Datatype] = []
    arguments = list(arguments)
    for p in positions:
        array = arguments[p]
        if isinstance(array, np.ndarray):
            count = comm.Get_size() if p in blocks(operation.name) else 1
            types.append(_block_type(array.nbytes // count))
            arguments[p] = [array.view(np.uint8), 1, types[-1]]
    try:
        return operation.call(comm, *arguments)
    finally:
        for datatype in types:  # MPI keeps it until pending operations are done
            datatype.Free()


def blocks(name: str) -> tuple[int, ...]:
    """The positions whose array is one block for each rank, by method name."""
    family = name.removesuffix("_init")
    return _BLOCKS.get(family if family in _BLOCKS else family.removeprefix("I").capitalize(), ())


def _elements(spec: Any) -> int:
    return spec.size if isinstance(spec, np.ndarray) else 0


def _block_type(nbytes: int) -> MPI.Datatype:
    """One element of `nbytes` bytes."""
    pieces, rest = divmod(nbytes, _PIECE)
    piece = MPI.BYTE.Create_contiguous(_PIECE)
    made = MPI.Datatype.Create_struct([pieces, rest], [0, pieces * _PIECE], [piece, MPI.BYTE])
    piece.Free()
    return made.Commit()


def _in_pieces(operation: Operation, comm: Any, arguments: list[Any]) -> None:
    if operation.form != BLOCKING or operation.name.startswith("Reduce_scatter"):
        raise NotImplementedError(
            f"{operation.name}: this MPI takes at most {LIMIT} elements; use the blocking Reduce, Allreduce, "
            "Scan or Exscan (done in pieces), or an MPI 4 library"
        )
    count = max(_elements(arguments[operation.send]), _elements(arguments[operation.recv]))
    for start in range(0, count, _PIECE):
        piece = list(arguments)
        for p in (operation.send, operation.recv):
            if isinstance(piece[p], np.ndarray):
                piece[p] = piece[p].reshape(-1)[start : start + _PIECE]
        operation.call(comm, *piece)
