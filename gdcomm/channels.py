"""Which communicators have a channel for envelopes. It lives with MPI's communicator, however often that is wrapped."""

from __future__ import annotations

import os
from typing import NamedTuple, cast

from mpi4py import MPI

from gdcomm import devices
from gdcomm.arenas import Address, here, once, visible
from gdcomm.envelopes import Channel, Shadow

__all__ = ["channel_of", "facts", "open_channel"]


class _Facts(NamedTuple):
    threads: bool  # MPI may be called from any thread: large messages go on while the program is elsewhere
    devices: bool  # device arrays can exist here
    secret: bytes
    arena: Address | None  # memory that others on this node can share


def facts() -> _Facts:
    """What this rank brings to the agreement about envelopes."""
    return _Facts(MPI.Query_thread() == MPI.THREAD_MULTIPLE, devices.possible(), os.urandom(16), here())


@once
def _key() -> int:
    return MPI.Comm.Create_keyval()


def _known(comm: MPI.Comm) -> Channel | None:
    return cast("Channel | None", comm.Get_attr(_key()))


def open_channel(comm: MPI.Intracomm, everyone: list[_Facts]) -> Channel | None:
    """The channel of a communicator whose ranks said `everyone`; collective. None: no envelopes here."""
    # Looked up first: whether it was opened before is the same on all ranks.
    known = _known(comm)
    if known is not None:
        return known
    if not (all(rank.threads for rank in everyone) and any(rank.devices for rank in everyone)):
        return None
    seen = visible([rank.arena for rank in everyone])
    shown = MPI.Intracomm.alltoall(comm, seen)  # who sees mine
    near = [rank.arena if a and b else None for rank, a, b in zip(everyone, seen, shown, strict=True)]
    names = [rank.arena.node if rank.arena else str(i) for i, rank in enumerate(everyone)]
    shadow = Shadow(MPI.Intracomm(comm).Dup(), everyone[0].secret, near, [names.index(name) for name in names])
    return _remember(comm, Channel(shadow, None, [], len(everyone), {}))


def channel_of(comm: MPI.Comm, parent: Channel | None) -> Channel | None:
    """The channel of a communicator made from one whose channel is `parent`; local."""
    known = _known(comm)
    if known is not None or parent is None or comm.Is_inter():
        return known
    return _remember(comm, parent.derive(comm))


def _remember(comm: MPI.Comm, channel: Channel) -> Channel:
    comm.Set_attr(_key(), channel)
    return channel
