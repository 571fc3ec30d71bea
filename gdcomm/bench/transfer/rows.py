"""Rows of a table in host memory: gathered by the GPU, after a copy of it all, or by the CPU; and where these cross."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

import gdcomm
from gdcomm.bench.transfer.data import Array, pattern
from gdcomm.bench.transfer.hosts import hosts
from gdcomm.bench.transfer.kits import Kit
from gdcomm.bench.transfer.timing import Figure, Row, Way, measure

__all__ = ["ROW_NBYTES", "rows"]

ROW_NBYTES = 512
_WORDS = ROW_NBYTES // 8
_SHARES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 100.0)  # per cent


def rows(kit: Kit) -> Iterator[list[Figure]]:
    """1 % of a table eight times the largest size, then shares of one of the largest size."""
    yield from _one_per_cent(kit)
    kit.free()
    for kind in ("pinned", "pageable"):
        yield from _sweep(kit, kind)
        kit.free()


def _one_per_cent(kit: Kit) -> Iterator[list[Figure]]:
    asked = max(8 * kit.large // ROW_NBYTES, 1) * ROW_NBYTES
    nbytes = kit.fit(asked, locked=1, device=1.2) // ROW_NBYTES * ROW_NBYTES
    if not nbytes:
        kit.notes.append("rows: the table does not fit in page-locked memory")
        return
    note = "" if nbytes == asked else f"{asked} bytes do not fit in memory"
    with hosts("pinned", nbytes, 1) as (host,):
        table = _table(pattern(host.array))
        index = _indices(len(table), 1.0)
        picked = np.take(table, index, axis=0)
        expected, near = kit.array(picked), kit.array(index)
        whole = kit.empty(table.shape, np.uint64)
        ways: dict[str, Way | str] = {}
        for name, make in _ONE.items():
            out = kit.empty(picked.shape, np.uint64)
            call = partial(make, kit, table, index, near, whole, out)
            ways[name] = Way(call, partial(_wrong, kit, out, expected), partial(kit.fill, out))
        what = f"1 % of {len(table)} pinned rows of {ROW_NBYTES} B H2D"
        yield measure(kit, Row("rows", what, picked.nbytes, ways, note=note))


def _take(kit: Kit, table: Array, index: Array, near: Any, whole: Any, out: Any) -> None:
    gdcomm.take(table, near, out=out)


def _copy_all(kit: Kit, table: Array, index: Array, near: Any, whole: Any, out: Any) -> None:
    gdcomm.copy(whole, table)
    kit.pick(out, whole, near)


def _by_cpu(kit: Kit, table: Array, index: Array, near: Any, whole: Any, out: Any) -> None:
    gdcomm.copy(out, np.take(table, index, axis=0))


_ONE = {"gdcomm": _take, "copy all": _copy_all, "by NumPy": _by_cpu}


def _sweep(kit: Kit, kind: str) -> Iterator[list[Figure]]:
    asked = max(kit.large // ROW_NBYTES, 1) * ROW_NBYTES
    need = {"pageable": 2.0} if kind == "pageable" else {"locked": 1.0, "pageable": 1.0}
    nbytes = kit.fit(asked, device=4, **need) // ROW_NBYTES * ROW_NBYTES
    if not nbytes:
        kit.notes.append(f"rows: a {kind} table does not fit in memory")
        return
    note = "" if nbytes == asked else f"{asked} bytes do not fit in memory"
    with hosts(kind, nbytes, 1) as (host,):
        table = _table(pattern(host.array))
        near = kit.array(table)
        done: set[int] = set()
        for share in _SHARES:
            index = _indices(len(table), share)
            if len(index) in done:
                continue
            done.add(len(index))
            yield _share(kit, kind, table, near, index, note)
        del near


def _share(kit: Kit, kind: str, table: Array, near: Any, index: Array, note: str) -> list[Figure]:
    there = kit.array(index)
    out, expected = (kit.empty((len(index), _WORDS), np.uint64) for _ in range(2))
    kit.pick(expected, near, there)
    kit.finish()
    chosen: Any = there if kind == "pinned" else index  # the CPU, which gathers from pageable memory, needs them
    wrong, fill = partial(_wrong, kit, out, expected), partial(kit.fill, out)
    ways: dict[str, Way | str] = {
        method: Way(partial(gdcomm.take, table, chosen, out=out, method=method), wrong, fill)
        for method in ("gather", "copy", "auto")
    }
    share = 100 * len(index) / len(table)
    what = f"{kind} H2D, {share:.3g} % of {len(table)} rows"
    return measure(kit, Row("rows", what, len(index) * ROW_NBYTES, ways, share=share, note=note))


def _table(block: Array) -> Array:
    return block.view(np.uint64).reshape(-1, _WORDS)


def _indices(length: int, share: float) -> Array:
    """So many per cent of the row numbers, at random, none twice."""
    count = max(1, round(length * share / 100))
    return np.random.default_rng(count).choice(length, count, replace=False).astype(np.int32)


def _wrong(kit: Kit, out: Any, expected: Any, _: Any) -> int:
    return kit.differ(out, expected)
