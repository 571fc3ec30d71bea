"""Which way an operation's device buffers go, and why. Pure functions over agreed facts.

Every rank holds the same `Capabilities` (those of the weakest rank), so every rank
answers alike.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field

from gdcomm.errors import NoPathError
from gdcomm.operations import Operation

__all__ = ["PATHS", "Capabilities", "Paths", "agree", "choose", "path_from_environment"]

PATHS = ("auto", "direct", "mpi", "staged", "host")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What one rank's MPI can do with device memory.

    Args:
        groups: operation groups that may be handed device pointers: "p2p", "copy", "move", "reduce"
            (see `operations.Operation`) and "nonblocking" (I- and persistent collectives).
        reason: where that knowledge comes from, in words.
    """

    groups: frozenset[str] = frozenset()
    reason: str = "nothing is known about this MPI"


@dataclass(frozen=True, slots=True)
class Paths:
    """What a communicator decides by: the path asked for, and what every rank's MPI can do."""

    path: str = "auto"
    can: Capabilities = Capabilities()
    chosen: dict[str, str] = field(default_factory=dict, compare=False, repr=False)  # by operation name

    def transport(self, operation: Operation) -> str:
        """The transport of the operation's device buffers: "mpi" or "staged"; remembered.

        Raises:
            NoPathError: the path asked for can't do it.
        """
        found = self.chosen.get(operation.name)
        if found is None:
            found, _ = choose(self.path, operation.group, operation.form, operation.name, self.can)
            self.chosen[operation.name] = found
        return found


def agree(all_ranks: Iterable[Capabilities]) -> Capabilities:
    """The capabilities that every rank has, with the reason of the rank that has fewest."""
    ranks = list(all_ranks)
    weakest = min(ranks, key=lambda c: len(c.groups))
    return Capabilities(frozenset.intersection(*(c.groups for c in ranks)), weakest.reason)


def path_from_environment(path: str) -> str:
    """The path asked for: GDCOMM_TRANSPORT goes before the argument."""
    asked = os.environ.get("GDCOMM_TRANSPORT", "").strip().lower() or path
    if asked not in PATHS:
        raise ValueError(f"path: {asked!r} is not one of {', '.join(PATHS)}")
    return asked


def choose(path: str, group: str, form: str, name: str, can: Capabilities) -> tuple[str, str]:
    """Choose the transport of an operation's device buffers.

    Returns:
        "mpi" or "staged", and the reason.

    Raises:
        NoPathError: `path` demands what this MPI can't do.
    """
    needs = {group} if group in ("p2p", "copy") or form == "blocking" else {group, "nonblocking"}
    capable = needs <= can.groups
    if path == "host":
        raise NoPathError(
            f"{name}: path 'host' takes host arrays only; use path='auto', or copy the array to the host"
        )
    if path == "staged":
        return "staged", "asked for"
    if capable:
        return "mpi", can.reason
    why = f"MPI is not known to do {name} on device memory ({can.reason})"
    if path in ("direct", "mpi"):
        raise NoPathError(
            f"{name}: no direct path: {why}. Use path='auto' (or 'staged'), or declare what your MPI can do "
            "in GDCOMM_MPI_DEVICE_OPS"
        )
    return "staged", why
