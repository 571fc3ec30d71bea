"""NumPy arrays to the GPU and back as programs write it: one call, beside what CuPy, PyTorch and JAX have for it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

import gdcomm
from gdcomm.bench.transfer.data import Array, page_aligned, spoil
from gdcomm.bench.transfer.hosts import hosts
from gdcomm.bench.transfer.kits import Kit
from gdcomm.bench.transfer.peers import Peer, peers
from gdcomm.bench.transfer.timing import Figure, Row, Way, measure
from gdcomm.memory.pinned import pool_of

__all__ = ["arrays"]


def arrays(kit: Kit) -> Iterator[list[Figure]]:
    """Pageable memory to the device and back, to new arrays and to given ones; `pinned` is the DMA alone."""
    room = kit.fit(kit.large, locked=4, pageable=5, device=12)
    if not room:
        kit.notes.append("arrays: none fits in memory")
        return
    note = "" if room == kit.large else f"{kit.large} bytes do not fit in memory"
    for nbytes in sorted({min(kit.medium, room), room}):
        yield from _of_size(kit, nbytes, note)
        kit.free()


def _of_size(kit: Kit, nbytes: int, note: str) -> Iterator[list[Figure]]:
    others = peers(kit, kit.truth(nbytes))
    with hosts("pinned", nbytes, 1) as (lock,):
        for what, make in _ROWS.items():
            yield measure(kit, Row("arrays", what, nbytes, make(kit, nbytes, lock.array, others), note=note))
            kit.free()


def _to_new(kit: Kit, nbytes: int, lock: Array, others: dict[str, Peer]) -> dict[str, Way | str]:
    source, end = kit.truth(nbytes), kit.empty(nbytes)
    ways: dict[str, Way | str] = {
        "gdcomm": Way(partial(gdcomm.to_device, source), kit.wrong_there),
        "pinned": _dma(kit, end, lock, up=True),
    }
    for name, peer in others.items():
        ways[name] = Way(partial(peer.upload, source), partial(_wrong_of_peer, kit, peer))
    return ways


def _to_given(kit: Kit, nbytes: int, lock: Array, others: dict[str, Peer]) -> dict[str, Way | str]:
    source = kit.truth(nbytes)
    calls: dict[str, Any] = {
        "gdcomm": lambda end: partial(gdcomm.copy, end, source, block=True),
        "bare": lambda end: _bare(kit, kit.address(end), source.ctypes.data, nbytes),
    }
    if "cupy" in others:
        calls["cupy"] = lambda end: partial(end.set, source)
    ways: dict[str, Way | str] = {}
    for name, make in calls.items():
        end = kit.empty(nbytes)
        ways[name] = Way(make(end), partial(_wrong_there, kit, end), partial(kit.fill, end))
    ways["pinned"] = _dma(kit, kit.empty(nbytes), lock, up=True)
    return ways


def _from_new(kit: Kit, nbytes: int, lock: Array, others: dict[str, Peer]) -> dict[str, Way | str]:
    near = kit.near(nbytes)
    ways: dict[str, Way | str] = {
        "gdcomm": Way(partial(gdcomm.to_host, near), kit.wrong_here),
        "pinned": _dma(kit, near, lock, up=False),
    }
    for name, peer in others.items():
        wrong = partial(_wrong_on_host, kit, peer)
        ways[name] = Way(peer.download, wrong, before=peer.refresh if name == "jax" else None)
    return ways


def _from_first(kit: Kit, nbytes: int, lock: Array, others: dict[str, Peer]) -> dict[str, Way | str]:
    ways: dict[str, Way | str] = {
        "gdcomm": Way(partial(gdcomm.to_host, kit.near(nbytes)), kit.wrong_here, before=partial(_trim, kit))
    }
    if "cupy" in others:
        ways["cupy"] = Way(others["cupy"].download, partial(_wrong_on_host, kit, others["cupy"]))
    return ways


def _from_given(kit: Kit, nbytes: int, lock: Array, others: dict[str, Peer]) -> dict[str, Way | str]:
    near = kit.near(nbytes)
    calls: dict[str, Any] = {
        "gdcomm": lambda target: partial(gdcomm.copy, target, near, block=True),
        "bare": lambda target: _bare(kit, target.ctypes.data, kit.address(near), nbytes),
    }
    if "cupy" in others:
        calls["cupy"] = lambda target: partial(near.get, out=target)
    ways: dict[str, Way | str] = {}
    for name, make in calls.items():
        target = page_aligned(nbytes)
        ways[name] = Way(make(target), partial(_wrong_here, kit, target), partial(spoil, target))
    ways["pinned"] = _dma(kit, near, lock, up=False)
    return ways


_ROWS = {
    "NumPy H2D to a new array": _to_new,
    "NumPy H2D to a given array": _to_given,
    "D2H to a new NumPy array": _from_new,
    "D2H to a new NumPy array, pool empty": _from_first,
    "D2H to a given NumPy array": _from_given,
}


def _dma(kit: Kit, end: Any, lock: Array, up: bool) -> Way:
    """A bare copy of pinned memory, which nothing can beat."""
    if up:
        np.copyto(lock, kit.truth(lock.nbytes))
        call = _bare(kit, kit.address(end), lock.ctypes.data, lock.nbytes)
        return Way(call, partial(_wrong_there, kit, end), partial(kit.fill, end))
    call = _bare(kit, lock.ctypes.data, kit.address(end), lock.nbytes)
    return Way(call, partial(_wrong_here, kit, lock), partial(spoil, lock))


def _bare(kit: Kit, dst: int, src: int, nbytes: int) -> Any:
    assert kit.device is not None
    return partial(kit.device.copy, dst, src, nbytes, kit.device.handle(None))


def _trim(kit: Kit) -> None:
    """The next array is new page-locked memory."""
    if kit.device is not None:
        kit.finish()
        pool_of(kit.device).trim()


def _wrong_of_peer(kit: Kit, peer: Peer, array: Any) -> int:
    return kit.wrong_there(peer.on_device(array))


def _wrong_on_host(kit: Kit, peer: Peer, array: Any) -> int:
    return kit.wrong_here(peer.on_host(array))


def _wrong_there(kit: Kit, end: Any, _: Any) -> int:
    return kit.wrong_there(end)


def _wrong_here(kit: Kit, target: Array, _: Any) -> int:
    return kit.wrong_here(target)
