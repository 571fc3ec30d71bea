"""Tables of transfers. It never measures."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from gdcomm.bench.transfer.sections import SECTIONS, ratios
from gdcomm.bench.transfer.timing import Figure

__all__ = ["print_results", "print_section"]


def print_section(name: str, rows: list[list[Figure]], console: Console) -> None:
    """One table: a line a row; time and bandwidth a column; how many times as long as gdcomm; what was left out."""
    for columns in dict.fromkeys(tuple(figure.column for figure in row) for row in _widest_first(rows)):
        some = [row for row in rows if _columns_for(row, rows) == columns]
        if some:
            _print_rows(f"{name}: {SECTIONS[name].title}", columns, some, name == "alloc", console)
    figures = [figure for row in rows for figure in row]
    for note in dict.fromkeys(f"{f.what}, {f.column}: {f.why}" for f in figures if f.why):
        console.print(f"  {note}", highlight=False)
    for note in dict.fromkeys(f"{f.what}, {f.nbytes} bytes: {f.note}" for f in figures if f.note):
        console.print(f"  {note}", highlight=False)


def _widest_first(rows: list[list[Figure]]) -> list[list[Figure]]:
    return sorted(rows, key=len, reverse=True)


def _columns_for(row: list[Figure], rows: list[list[Figure]]) -> tuple[str, ...]:
    """The columns of the table that a row goes into: the widest one that has all of its own."""
    own = {figure.column for figure in row}
    for other in _widest_first(rows):
        columns = tuple(figure.column for figure in other)
        if own <= set(columns):
            return columns
    return tuple(figure.column for figure in row)


def _print_rows(title: str, columns: tuple[str, ...], rows: list[list[Figure]], costs: bool, console: Console) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column("what")
    table.add_column("bytes", justify="right")
    for column in columns:
        table.add_column(f"{column}\nus (p10-p90)", justify="right")
        table.add_column("ms/GiB" if costs else "GB/s", justify="right")
    compared = [
        ", ".join(f"{ratio['peer'].removeprefix('emu-')} {ratio['times_gdcomm']:.2f}" for ratio in ratios(row))
        for row in rows
    ]
    if any(compared):
        table.add_column("times as long\nas gdcomm", justify="right")
    table.add_column("clock")
    table.add_column("wrong", justify="right")
    for row, text in zip(rows, compared, strict=True):
        found = {figure.column: figure for figure in row}
        cells = [row[0].what, f"{row[0].nbytes}"]
        for column in columns:
            cells += _cells(found.get(column), costs)
        clock = next((figure.clock for figure in row if figure.clock), "")
        table.add_row(*cells, *([text] if any(compared) else []), clock, str(sum(figure.wrong for figure in row)))
    console.print(table)


def _cells(figure: Figure | None, costs: bool) -> tuple[str, str]:
    """Time, and bandwidth or cost."""
    if figure is None:
        return "", ""
    if figure.us is None:
        return "wrong" if figure.wrong else "-", "-"
    rate = figure.ms_per_gib if costs else figure.gbps
    return f"{_us(figure.us)} ({_us(figure.low_us)}-{_us(figure.high_us)})", _short(rate or 0.0)


def _us(us: float | None) -> str:
    return "" if us is None else f"{us:.1f}" if us < 1e4 else f"{us:.0f}"


def _short(rate: float) -> str:
    return f"{rate:.2f}" if rate >= 0.1 else f"{rate:.2g}"


def print_results(result: dict[str, Any], console: Console) -> None:
    """What follows from the figures, and what was left out."""
    for found in result["crossovers"]:
        measured, predicted = (
            "none up to 100 %" if found[key] is None else f"{found[key]:.2g} % of the rows"
            for key in ("measured_percent", "predicted_percent")
        )
        console.print(
            f"{found['memory']} table of {found['rows']} rows of {found['row_nbytes']} B: copying all is faster than "
            f"gathering from {measured} on (predicted: {predicted})",
            highlight=False,
        )
    for found in result["overlap"]:
        console.print(
            f"{found['what']}: copy {_us(found['copy_us'])} us, work {_us(found['compute_us'])} us a batch; one after "
            f"the other {_us(found['serial_us'])} us, overlapped {_us(found['gdcomm_us'])} us: {found['speedup']:.2f} "
            f"times as fast (best possible {found['best_possible']:.2f})",
            highlight=False,
        )
    for note in result["notes"]:
        console.print(f"note: {note}", highlight=False)
    for name, text in result["errors"].items():
        console.print(f"section {name} ended early:\n{text}", highlight=False, markup=False)
