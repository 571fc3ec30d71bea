"""What `gdcomm bench transfer` measures, in this order, and the results that follow from the figures."""

from __future__ import annotations

import gc
import math
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from gdcomm.bench.transfer import arrays, copies, memory, overlap, pieces, rows
from gdcomm.bench.transfer.kits import Kit
from gdcomm.bench.transfer.timing import Figure
from gdcomm.transfer.crossover import crossover

__all__ = ["SECTIONS", "Section", "crossovers", "ratios", "run", "speedups"]


class Section(NamedTuple):
    """Rows of one subject.

    Args:
        measure: yields them, one list of figures each.
        title: says what is measured.
        hostly: whether it makes sense without a device.
    """

    measure: Callable[[Kit], Iterator[list[Figure]]]
    title: str
    hostly: bool = False


# Other libraries last: once PyTorch runs, a stream is made current for it too, which costs each call a little.
SECTIONS = {
    "host": Section(copies.host, "Host memory to host memory", True),
    "kinds": Section(copies.kinds, "One copy, by kind of host memory and size"),
    "both": Section(copies.both, "Both directions at once, two streams"),
    "small": Section(copies.small, "A few bytes, copied and waited for"),
    "pieces": Section(pieces.pieces, "Many short pieces"),
    "alloc": Section(memory.alloc, "Page-locked memory: allocation and registration"),
    "cpu": Section(memory.cpu, "One CPU thread on each kind of memory", True),
    "rows": Section(rows.rows, "Rows of a table in host memory"),
    "overlap": Section(overlap.overlap, "Copies and work at once, for each batch"),
    "arrays": Section(arrays.arrays, "NumPy arrays to the device and back in one call"),
}


def run(kit: Kit, names: list[str], errors: dict[str, str]) -> Iterator[tuple[str, list[list[Figure]]]]:
    """Measure sections one after the other; what one of them raises goes to `errors`, and the next goes on."""
    for name in names:
        section, found = SECTIONS[name], []
        if kit.device is None and not section.hostly:
            kit.notes.append(f"{name}: needs a device")
            continue
        try:
            for row in section.measure(kit):
                found.append(row)
        except Exception:  # an hour's figures are not lost for the fault of one section
            errors[name] = traceback.format_exc()
        gc.collect()
        kit.free()
        yield name, found


def ratios(figures: list[Figure]) -> list[dict[str, Any]]:
    """How many times as long as gdcomm each other way takes, of all rows that have a column gdcomm."""
    found = []
    ours = {_place(figure): figure for figure in figures if figure.column.removeprefix("emu-") == "gdcomm"}
    for figure in figures:
        mine = ours.get(_place(figure))
        if mine is None or mine is figure or figure.us is None or not mine.us:
            continue
        found.append(
            {"section": figure.section, "what": figure.what, "nbytes": figure.nbytes, "peer": figure.column,
             "times_gdcomm": figure.us / mine.us}
        )  # fmt: skip
    return found


def _place(figure: Figure) -> tuple[str, str, int]:
    return figure.section, figure.what, figure.nbytes


def crossovers(figures: list[Figure]) -> list[dict[str, Any]]:
    """From which share of a table's rows on copying it all is faster than gathering them: measured, and predicted."""
    found = []
    for kind in ("pinned", "pageable"):
        swept = [f for f in figures if f.share is not None and f.what.startswith(kind)]
        if not swept:
            continue
        times = {
            method: {f.share: f.us for f in swept if f.column.endswith(method) and f.us is not None}
            for method in ("gather", "copy")
        }
        row_nbytes = rows.ROW_NBYTES
        length = max(round(f.nbytes / row_nbytes / (f.share or 1) * 100) for f in swept)
        predicted = crossover(row_nbytes, 1, row_nbytes * length, page_locked=kind == "pinned").rows
        found.append(
            {"memory": kind, "row_nbytes": row_nbytes, "rows": length, "measured_percent": _meet(times),
             "predicted_percent": 100 * predicted / length if predicted <= length else None}
        )  # fmt: skip
    return found


def _meet(times: dict[str, dict[Any, Any]]) -> float | None:
    """The share at which two curves of time meet, by straight lines between their points; None if they don't."""
    shares = sorted(set(times["gather"]) & set(times["copy"]))
    lead = [math.log(times["gather"][share] / times["copy"][share]) for share in shares]
    for i in range(1, len(shares)):
        if lead[i - 1] < 0 <= lead[i]:
            low, high = math.log(shares[i - 1]), math.log(shares[i])
            return math.exp(low + (high - low) * lead[i - 1] / (lead[i - 1] - lead[i]))
    return None


def speedups(figures: list[Figure]) -> list[dict[str, Any]]:
    """Of work that overlaps with copies: over one after the other, and the best that their lengths allow."""
    found = []
    for what in dict.fromkeys(f.what for f in figures if f.section == "overlap"):
        us = {f.column.removeprefix("emu-"): f.us for f in figures if f.section == "overlap" and f.what == what}
        copy, compute, serial, ours = (us.get(name) for name in ("copy", "compute", "serial", "gdcomm"))
        if copy is None or compute is None or serial is None or ours is None:
            continue
        best = (copy + compute) / max(copy, compute)
        hidden = 100 * (copy + compute - ours) / min(copy, compute)
        found.append(
            {"what": what, "copy_us": copy, "compute_us": compute, "serial_us": serial, "gdcomm_us": ours,
             "speedup": serial / ours, "best_possible": best, "hidden_percent": hidden}
        )  # fmt: skip
    return found
