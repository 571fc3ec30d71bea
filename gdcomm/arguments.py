"""MPI's terse errors about arguments, told in terms of the call that was made."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from gdcomm.errors import GdcommError

__all__ = ["REFUSED", "UNSERVED", "ArgumentError", "explain", "freed", "unserved"]

# What mpi4py raises for a dtype or layout that it can't describe, and what MPI raises.
UNSERVED = (KeyError, BufferError, OverflowError, MPI.Exception)
# What MPI says of arguments that it looks at before it sends anything.
REFUSED = frozenset(
    (MPI.ERR_ARG, MPI.ERR_BUFFER, MPI.ERR_COMM, MPI.ERR_COUNT, MPI.ERR_OP, MPI.ERR_RANK, MPI.ERR_ROOT, MPI.ERR_TYPE)
)


class ArgumentError(GdcommError, MPI.Exception):
    """MPI refused an argument. It is the `MPI.Exception` of the same class, with the reason in words."""

    def __init__(self, code: int, text: str = "") -> None:
        super().__init__(code)
        self._text = text

    def __str__(self) -> str:
        return self._text


def unserved(error: Exception, comm: Any, name: str, arguments: tuple[Any, ...]) -> None:
    """Return if gdcomm may serve the call that mpi4py did not; raise the explained error if not."""
    if isinstance(error, MPI.Exception) and error.Get_error_class() != MPI.ERR_ARG:  # ERR_ARG: count over 2**31
        raise explain(error, comm, name, arguments) from None


def explain(error: MPI.Exception, comm: Any, name: str, arguments: tuple[Any, ...]) -> MPI.Exception:
    """The error that says which argument is wrong; `error` itself if it is not about an argument."""
    say = _SAY.get(error.Get_error_class())
    if say is None or isinstance(error, ArgumentError):
        return error
    scalars = ", ".join(repr(item) for item in arguments if isinstance(item, int) and not isinstance(item, bool))
    text = say.format(size=_size(comm), scalars=scalars, upper=_tag_limit())
    return ArgumentError(error.Get_error_code(), f"{name}: {text} [{error}]")


def freed(comm: Any, name: str) -> MPI.Exception:
    """The error of a null communicator. Open MPI's allgathers raise none: they go on, and may crash."""
    return explain(MPI.Exception(MPI.ERR_COMM), comm, name, ())


def _size(comm: Any) -> str:
    try:
        return str(comm.Get_remote_size() if comm.Is_inter() else comm.Get_size())
    except (MPI.Exception, AttributeError):
        return "unknown"


def _tag_limit() -> Any:
    return MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)


_SAY = {
    MPI.ERR_RANK: "a rank argument (dest, source or root) among ({scalars}) is not one of this "
    "communicator's {size} ranks; give 0 to {size} - 1, or MPI.PROC_NULL",
    MPI.ERR_ROOT: "root among ({scalars}) is not one of this communicator's {size} ranks; give 0 to {size} - 1",
    MPI.ERR_TAG: "a tag among ({scalars}) is negative or too large; give 0 to {upper}",
    MPI.ERR_COUNT: "a count is negative or larger than this MPI can take",
    MPI.ERR_OP: "this MPI has no such reduction for this dtype; use another op or dtype, or MPI.Op.Create",
    MPI.ERR_TYPE: "the datatype of a buffer is not usable (not committed, or null)",
    MPI.ERR_COMM: "the communicator is null: it was freed, or this rank is not in it",
    MPI.ERR_TRUNCATE: "the message is longer than the receive buffer; part of it is lost. "
    "Give a larger buffer, or ask Probe for the size first",
}
