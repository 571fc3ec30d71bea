"""Copies of whole arrays: by kind of memory and size, both directions at once, short ones, and to new arrays."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

import gdcomm
from gdcomm.bench.transfer.data import Array, page_aligned, spoil
from gdcomm.bench.transfer.hosts import KINDS, Host, hosts, wrong_in
from gdcomm.bench.transfer.kits import Kit
from gdcomm.bench.transfer.timing import Figure, Row, Way, measure

__all__ = ["both", "host", "kinds", "small"]

_SMALL = (8, 64, 512, 4096)
_WAYS = ("gdcomm", "bare", "kernel")


def host(kit: Kit) -> Iterator[list[Figure]]:
    """Host to host: what memory and CPU can do, and what gdcomm.copy makes of it."""
    for nbytes in (kit.medium, kit.fit(kit.large, pageable=3)):
        if not nbytes:
            continue
        source, dst = kit.truth(nbytes), page_aligned(nbytes)
        wrong, fill = partial(_wrong_here, kit, dst), partial(spoil, dst)
        ways: dict[str, Way | str] = {
            "gdcomm": Way(partial(gdcomm.copy, dst, source), wrong, fill),
            "numpy": Way(partial(np.copyto, dst, source), wrong, fill),
        }
        yield measure(kit, Row("host", "pageable to pageable", nbytes, ways))


# -- kinds -------------------------------------------------------------------------------------------


def kinds(kit: Kit) -> Iterator[list[Figure]]:
    """Each kind of memory, each direction, each size: by the copy engine through gdcomm and bare, by a kernel."""
    sizes = sorted({*kit.sizes, kit.medium, kit.large})
    for kind in KINDS:
        count = 1 + len(_WAYS)
        need = {"pageable": count} if kind == "pageable" else {"locked": count}
        room = kit.fit(kit.large, device=count, **need)
        try:
            yield from _kind(kit, kind, count, [nbytes for nbytes in sizes if nbytes <= room])
        except (MemoryError, gdcomm.DeviceError) as error:
            kit.notes.append(f"kinds, {kind}: {error}")
        if room < kit.large:
            kit.notes.append(f"kinds, {kind}: only up to {room} bytes, of {kit.large}, fit in memory")
        kit.free()


def _kind(kit: Kit, kind: str, count: int, sizes: list[int]) -> Iterator[list[Figure]]:
    """All sizes of one kind. Its memory goes with this function's variables."""
    if not sizes:
        return
    with hosts(kind, sizes[-1], count) as (source, *targets):
        yield from _sizes(kit, kind, source, targets, sizes)


def _sizes(kit: Kit, kind: str, source: Host, targets: list[Host], sizes: list[int]) -> Iterator[list[Figure]]:
    np.copyto(source.array[: sizes[-1]], kit.truth(sizes[-1]))
    near, *ends = kit.near(sizes[-1]), *(kit.empty(sizes[-1]) for _ in _WAYS)
    for nbytes in sizes:
        from_host, from_near = source.first(nbytes), near[:nbytes]
        up = _ways(kit, kind, [(end[:nbytes], from_host) for end in ends])
        yield measure(kit, Row("kinds", f"{kind} H2D", nbytes, up, queued=kind != "pageable"))
        down = _ways(kit, kind, [(target.first(nbytes), from_near) for target in targets])
        yield measure(kit, Row("kinds", f"{kind} D2H", nbytes, down, queued=kind != "pageable"))


def _ways(kit: Kit, kind: str, pairs: list[tuple[Any, Any]]) -> dict[str, Way | str]:
    """Destination and source of each way. Host memory is a `Host`."""
    locked = kind != "pageable"
    found: dict[str, Way | str] = {}
    for name, (dst, src) in zip(_WAYS, pairs, strict=True):
        if name == "kernel" and kind != "mapped":
            continue
        if name == "gdcomm":
            call = gdcomm_call(kit, dst, src, locked)
        elif name == "bare":
            call = bare_call(kit, dst, src, locked)
        else:
            call = partial(kit.kernel_copy, _view(dst), _view(src))
        found[name] = Way(call, *_checks(kit, kind, dst))
    return found


def gdcomm_call(kit: Kit, dst: Any, src: Any, locked: bool, stream: Any = None) -> Any:
    """`gdcomm.copy` on a stream (None: the kit's, for page-locked memory, which does not block)."""
    to, source = _array(dst), _array(src)
    if locked:
        return partial(gdcomm.copy, to, source, stream=kit.stream if stream is None else stream, block=False)
    return partial(gdcomm.copy, to, source, block=True)


def bare_call(kit: Kit, dst: Any, src: Any, locked: bool, stream: Any = None) -> Any:
    """One cudaMemcpyAsync between the same two; for pageable memory on the current stream, and waited for."""
    assert kit.device is not None
    where = (kit.stream if stream is None else stream) if locked else kit.device.handle(None)
    call = partial(kit.device.copy, _address(kit, dst), _address(kit, src), _array(dst).nbytes, where)
    return call if locked else waiting(kit, call)


def waiting(kit: Kit, call: Any) -> Any:
    """The same with a synchronisation of the current stream in each call."""
    assert kit.device is not None
    finish, stream = kit.device.synchronize, kit.device.handle(None)

    def run() -> None:
        call()
        finish(stream)

    return run


def _array(side: Any) -> Any:
    return side.array if isinstance(side, Host) else side


def _view(side: Any) -> Any:
    return side.view if isinstance(side, Host) else side


def _address(kit: Kit, side: Any) -> int:
    array = _array(side)
    return int(array.ctypes.data) if isinstance(array, np.ndarray) else kit.address(array)


def _checks(kit: Kit, kind: str, dst: Any) -> tuple[Any, Any]:
    """How to find wrong bytes in a destination, and how to make them wrong."""
    if isinstance(dst, Host):
        return partial(_wrong_host, kit, kind, dst.array), partial(spoil, dst.array)
    return partial(_wrong_there, kit, dst), partial(kit.fill, dst)


def _wrong_host(kit: Kit, kind: str, array: Array, _: Any) -> int:
    return wrong_in(kit, kind, array)


def _wrong_here(kit: Kit, array: Array, _: Any) -> int:
    return kit.wrong_here(array)


def _wrong_there(kit: Kit, array: Any, _: Any) -> int:
    return kit.wrong_there(array)


# -- both directions ---------------------------------------------------------------------------------


def both(kit: Kit) -> Iterator[list[Figure]]:
    """Pinned memory up on one stream and down on another at once; the bandwidth is that of both together."""
    assert kit.device is not None
    room = kit.fit(kit.large, locked=3, device=3)
    if not room:
        kit.notes.append("both: no two arrays fit in page-locked memory")
        return
    other = kit.device.borrow_stream()
    note = "" if room == kit.large else f"{kit.large} bytes do not fit in memory"
    with hosts("pinned", room, 3) as (source, *targets):
        np.copyto(source.array, kit.truth(room))
        near, ends = kit.near(room), [kit.empty(room) for _ in targets]
        for nbytes in sorted({min(kit.medium, room), room}):
            ways: dict[str, Way | str] = {}
            for name, target, end in zip(("gdcomm", "bare"), targets, ends, strict=True):
                make = gdcomm_call if name == "gdcomm" else bare_call
                up = make(kit, end[:nbytes], source.first(nbytes), True)
                down = make(kit, target.first(nbytes), near[:nbytes], True, other)
                ways[name] = _pair(kit, (up, down), end[:nbytes], target.array[:nbytes])
            row = Row("both", "pinned H2D + D2H at once", nbytes, ways, True, (other,), 2 * nbytes, note=note)
            yield measure(kit, row)
    kit.device.return_stream(other)


def _pair(kit: Kit, calls: tuple[Any, Any], end: Any, target: Array) -> Way:
    up, down = calls

    def call() -> None:
        up()
        down()

    def wrong(_: Any) -> int:
        return kit.wrong_there(end) + kit.wrong_here(target)

    def fill() -> None:
        kit.fill(end)
        spoil(target)

    return Way(call, wrong, fill)


# -- short ones --------------------------------------------------------------------------------------


def small(kit: Kit) -> Iterator[list[Figure]]:
    """Pageable NumPy memory and the device, a few bytes, copied and waited for."""
    for nbytes in [nbytes for nbytes in _SMALL if min(kit.sizes) <= nbytes <= kit.large]:
        source, near = kit.truth(nbytes).copy(), kit.near(nbytes)
        end, target = kit.empty(nbytes), np.empty(nbytes, np.uint8)
        up: dict[str, Way | str] = {
            "gdcomm": Way(gdcomm_call(kit, end, source, False), *_checks(kit, "pageable", end)),
            "bare": Way(bare_call(kit, end, source, False), *_checks(kit, "pageable", end)),
        }
        down: dict[str, Way | str] = {
            "gdcomm": Way(gdcomm_call(kit, target, near, False), *_checks(kit, "pageable", Host(target))),
            "bare": Way(bare_call(kit, target, near, False), *_checks(kit, "pageable", Host(target))),
        }
        if kit.name == "cuda":
            up["cupy"] = Way(waiting(kit, partial(end.set, source)), *_checks(kit, "pageable", end))
            down["cupy"] = Way(waiting(kit, partial(near.get, out=target)), *_checks(kit, "pageable", Host(target)))
        yield measure(kit, Row("small", "NumPy H2D", nbytes, up))
        yield measure(kit, Row("small", "NumPy D2H", nbytes, down))
