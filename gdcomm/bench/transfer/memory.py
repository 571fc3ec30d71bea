"""What page-locked memory costs: allocation and registration, and what the CPU makes of each kind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

import gdcomm
from gdcomm.bench.transfer.data import Array, page_aligned, spoil
from gdcomm.bench.transfer.hosts import KINDS, hosts, wrong_in
from gdcomm.bench.transfer.kits import Kit
from gdcomm.bench.transfer.timing import Figure, Row, Way, measure
from gdcomm.devices.memory import address_of
from gdcomm.memory.pages import PAGE
from gdcomm.memory.pinned import pool_of

__all__ = ["alloc", "cpu"]

_HIT = 4096  # bytes of a short allocation


def alloc(kit: Kit) -> Iterator[list[Figure]]:
    """New page-locked memory, memory from the pool, and memory locked in place."""
    room = kit.fit(kit.large, locked=2, pageable=1)
    if not room:
        kit.notes.append("alloc: no page-locked memory to be had")
        return
    note = "" if room == kit.large else f"{kit.large} bytes do not fit in memory"
    kit.free()
    yield measure(kit, Row("alloc", "new page-locked memory", room, _new(kit, room, False), note=note))
    kit.free()
    yield measure(kit, Row("alloc", "new page-locked memory, and freed", room, _new(kit, room, True), note=note))
    kit.free()
    for nbytes in sorted({min(_HIT, kit.medium), min(kit.medium, room)}):
        yield measure(kit, Row("alloc", "from the pool, and given back", nbytes, _hit(kit, nbytes), note=note))
        kit.free()
    yield measure(kit, Row("alloc", "touched memory registered, and undone", room, _register(kit, room), note=note))


def _new(kit: Kit, nbytes: int, freed: bool) -> dict[str, Way | str]:
    assert kit.device is not None
    pool, allocate = pool_of(kit.device), kit.device.host_allocate

    def ours() -> Any:
        made: Array | None = gdcomm.pinned_empty(nbytes, np.uint8)
        if freed:
            made = None
            pool.trim()
        return made

    def bare() -> Any:
        made: Array | None = allocate(nbytes)
        if freed:
            made = None  # the last view frees it
        return made

    def before() -> None:
        kit.finish()
        pool.trim()

    return {
        "gdcomm": Way(ours, partial(_not_locked, kit), before=before),
        "bare": Way(bare, partial(_not_locked, kit), before=before),
    }


def _not_locked(kit: Kit, made: Array | None) -> int:
    """Bytes that are not page-locked, or don't keep what is written there."""
    if made is None:
        return 0
    assert kit.device is not None
    address = address_of(made)
    locked = kit.device.is_pinned(address) and kit.device.is_pinned(address + made.nbytes - 1)
    np.copyto(made, kit.truth(made.nbytes))
    return kit.wrong_here(made) if locked else made.nbytes


def _hit(kit: Kit, nbytes: int) -> dict[str, Way | str]:
    assert kit.device is not None
    allocate = kit.device.host_allocate

    def ours() -> None:
        gdcomm.pinned_empty(nbytes, np.uint8)

    def bare() -> None:
        allocate(nbytes)

    ways: dict[str, Way | str] = {"gdcomm": Way(ours, _nothing_wrong), "bare": Way(bare, _nothing_wrong)}
    if kit.name == "cuda":
        import cupy

        def pooled() -> None:
            cupy.cuda.alloc_pinned_memory(nbytes)

        ways["cupy"] = Way(pooled, _nothing_wrong)
    return ways


def _nothing_wrong(_: Any) -> int:
    return 0


def _register(kit: Kit, nbytes: int) -> dict[str, Way | str]:
    assert kit.device is not None
    if not kit.device.properties().host_register_supported:
        return {"gdcomm": "this device can't register memory"}
    array = page_aligned(nbytes)
    spoil(array)
    whole = -(-nbytes // PAGE) * PAGE
    register, unregister, address = kit.device.host_register, kit.device.host_unregister, address_of(array)

    def ours() -> None:
        gdcomm.register(array)
        gdcomm.unregister(array)

    def bare() -> None:
        register(address, whole)
        unregister(address)

    return {"gdcomm": Way(ours, _nothing_wrong), "bare": Way(bare, _nothing_wrong)}


# -- the CPU's side ------------------------------------------------------------------------------------


def cpu(kit: Kit) -> Iterator[list[Figure]]:
    """One CPU thread writing to and reading from each kind of memory; the other side is pageable."""
    kinds = KINDS if kit.device is not None else ("pageable", "pinned")
    room = kit.fit(kit.medium, locked=len(kinds), pageable=2)
    if not room:
        kit.notes.append("cpu: no page-locked memory to be had")
        return
    note = "" if room == kit.medium else f"{kit.medium} bytes do not fit in memory"
    with ExitStack() as stack:
        memory = {kind: stack.enter_context(hosts(kind, room, 1))[0].array for kind in kinds}
        yield measure(kit, Row("cpu", "CPU writes", room, _writes(kit, memory), note=note))
        for array in memory.values():
            np.copyto(array, kit.truth(room))
        yield measure(kit, Row("cpu", "CPU reads", room, _reads(kit, memory), note=note))


def _writes(kit: Kit, memory: dict[str, Array]) -> dict[str, Way | str]:
    return {
        kind: Way(
            partial(np.copyto, array, kit.truth(array.nbytes)),
            partial(_wrong_in, kit, kind, array),
            partial(spoil, array),
        )
        for kind, array in memory.items()
    }


def _reads(kit: Kit, memory: dict[str, Array]) -> dict[str, Way | str]:
    target = page_aligned(max(array.nbytes for array in memory.values()))
    wrong, fill = partial(_wrong_here, kit, target), partial(spoil, target)
    return {kind: Way(partial(np.copyto, target, array), wrong, fill) for kind, array in memory.items()}


def _wrong_in(kit: Kit, kind: str, array: Array, _: Any) -> int:
    return wrong_in(kit, kind, array)


def _wrong_here(kit: Kit, array: Array, _: Any) -> int:
    return kit.wrong_here(array)
