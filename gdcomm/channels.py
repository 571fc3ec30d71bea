"""Which communicators have a channel for envelopes. It lives with MPI's communicator, however often that is wrapped."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import Counter
from typing import NamedTuple, cast

import numpy as np
from mpi4py import MPI

from gdcomm import devices
from gdcomm.arenas import Address, here, once, visible
from gdcomm.envelopes import Channel, Shadow

__all__ = ["channel_of", "facts", "free_after", "free_unused", "open_channel"]


class _Facts(NamedTuple):
    threads: bool  # MPI may be called from any thread: large messages go on while the program is elsewhere
    devices: bool  # device arrays can exist here
    secret: bytes
    arena: Address | None  # memory that others on this node can share
    ports: int  # of the network, that ranks of this node share


def facts() -> _Facts:
    """What this rank brings to the agreement about envelopes."""
    return _Facts(MPI.Query_thread() == MPI.THREAD_MULTIPLE, devices.possible(), os.urandom(16), here(), _ports())


def _ports() -> int:
    """InfiniBand devices and their like, each a port as a rule; without them, an Ethernet port."""
    with contextlib.suppress(OSError):
        return len(os.listdir("/sys/class/infiniband")) or 1
    return 1


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
    free_unused(comm)
    seen = visible([rank.arena for rank in everyone])
    shown = MPI.Intracomm.alltoall(comm, seen)  # who sees mine
    near = [rank.arena if a and b else None for rank, a, b in zip(everyone, seen, shown, strict=True)]
    names = [rank.arena.node if rank.arena else str(i) for i, rank in enumerate(everyone)]
    nodes, ports = [names.index(name) for name in names], min(rank.ports for rank in everyone)
    # Not Dup: what the program has attached to its communicator is not for the hidden one.
    hidden, secret = MPI.Intracomm(MPI.Intracomm.Split(comm)), everyone[0].secret
    shadow = Shadow(hidden, secret, near, nodes, ports)
    free_after(shadow, secret, hidden)
    return _remember(comm, Channel(shadow, None, [], len(everyone), {}))


def channel_of(comm: MPI.Comm, parent: Channel | None) -> Channel | None:
    """The channel of a communicator made from one whose channel is `parent`; local."""
    known = _known(comm)
    if known is not None or parent is None or comm.Is_inter():
        return known
    return _remember(comm, parent.derive(comm))


# Hidden communicators, by their secrets, whose owners nobody in this process can reach any more. Channels refer to a
# shadow, and MPI's communicators to channels; so do transfers and kept messages, which may outlive a communicator. The
# other owners are what nonblocking collectives share.
_unused: dict[bytes, MPI.Intracomm] = {}


def free_after(owner: object, secret: bytes, hidden: MPI.Intracomm) -> None:
    """Let a hidden communicator be freed when its ranks come together after `owner` has gone on all of them.

    Args:
        owner: uses it.
        secret: the same on all its ranks, and no other one's.
        hidden: the communicator.
    """
    weakref.finalize(owner, _unused.__setitem__, secret, hidden).atexit = False


def free_unused(comm: MPI.Intracomm) -> None:
    """Free the hidden communicators that none of their ranks uses any more, if these are all here; collective.

    To free one is collective. But the family's last communicator may be one of fewer ranks, a transfer may outlive it,
    and Python's garbage collection is no common event at all. So it is done where ranks come together anyway: whenever
    they make a communicator.
    """
    mine: dict[bytes, MPI.Intracomm] = {}
    while _unused:  # taken out: other threads do this with other communicators
        mine.update([_unused.popitem()])
    try:
        most = np.zeros(1, np.int64)
        MPI.Intracomm.Allreduce(comm, np.array([len(mine)], np.int64), most, MPI.MAX)
        if not most[0]:
            return
        named = Counter(secret for each in MPI.Intracomm.allgather(comm, list(mine)) for secret in each)
        for secret in sorted(mine):
            if named[secret] == mine[secret].Get_size():
                mine.pop(secret).Free()
    finally:
        _unused.update(mine)


def _remember(comm: MPI.Comm, channel: Channel) -> Channel:
    comm.Set_attr(_key(), channel)
    return channel
