"""Tables and plots of figures. It never measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gdcomm.bench.engine import Figure

__all__ = ["plot", "print_table"]


def print_table(rows: list[list[Figure]], title: str, console: Console) -> None:
    """One table of one operation: a line a size; median time and bus bandwidth a column; then what was left out."""
    table = Table(title=title, title_justify="left")
    table.add_column("bytes", justify="right")
    names = [figure.column for figure in rows[0]]
    for name in names:
        table.add_column(f"{name}\nus", justify="right")
        table.add_column("busbw\nGB/s", justify="right")
    table.add_column("wrong", justify="right")
    notes: dict[str, str] = {}
    for row in rows:
        cells = [f"{row[0].nbytes}"]
        for figure in row:
            if figure.us is None:
                cells += ["wrong" if figure.wrong else "-", "-"]
                if figure.why:
                    notes[figure.column] = figure.why
            else:
                cells += [f"{figure.us:.1f}", f"{figure.busbw:.3f}"]
        table.add_row(*cells, str(sum(figure.wrong for figure in row)))
    console.print(table)
    for column, why in notes.items():
        console.print(f"  {column}: {why}", highlight=False)


def plot(figures: list[dict[str, Any]], path: Path, title: str) -> None:
    """Time against size, a panel an operation, written as PNG (or what the name's ending says)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    operations = list(dict.fromkeys(figure["operation"] for figure in figures))
    columns = list(dict.fromkeys(figure["column"] for figure in figures))
    across = min(4, len(operations))
    down = -(-len(operations) // across)
    canvas, axes = pyplot.subplots(down, across, figsize=(4 * across, 3.2 * down), squeeze=False)
    styles = ["o-", "s--", "^-", "v--", "d:", "x-.", "+:"]
    for panel, operation in zip(axes.flat, operations, strict=False):
        for column, style in zip(columns, styles, strict=False):
            points = [
                (figure["nbytes"], figure["us"])
                for figure in figures
                if figure["operation"] == operation and figure["column"] == column and figure["us"] is not None
            ]
            if points:
                panel.loglog(*zip(*points, strict=True), style, label=column, markersize=4)
        panel.set(title=operation, xlabel="bytes", ylabel="us")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7)
    for panel in list(axes.flat)[len(operations) :]:
        panel.axis("off")
    canvas.suptitle(title, fontsize=9)
    canvas.tight_layout()
    canvas.savefig(path, dpi=120)
    pyplot.close(canvas)
