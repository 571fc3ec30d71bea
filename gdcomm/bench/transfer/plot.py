"""The plot of transfers, from their figures as in the JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["plot"]

_COLOURS = {
    "pageable": "tab:red", "pinned": "tab:blue", "registered": "tab:green", "mapped": "tab:orange",
    "write-combined": "tab:purple",
}  # fmt: skip
_STYLES = {"gdcomm": "o-", "bare": "x:", "kernel": "^--"}


def plot(result: dict[str, Any], path: Path, title: str) -> None:
    """Write all panels as PNG (or what the name's ending says)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figures = [
        {**figure, "column": figure["column"].removeprefix("emu-")}
        for figure in result["figures"]
        if figure["us"] is not None
    ]
    canvas, axes = pyplot.subplots(3, 4, figsize=(21, 13))
    panels = iter(axes.flat)
    _kinds(next(panels), figures, "H2D")
    _kinds(next(panels), figures, "D2H")
    _bars(next(panels), figures, "both", "GB/s, both directions together")
    _bars(next(panels), figures, "arrays", "GB/s")
    _bars(next(panels), figures, "rows", "us")
    _share(next(panels), figures, "pinned", result)
    _share(next(panels), figures, "pageable", result)
    _bars(next(panels), figures, "overlap", "us a batch")
    _bars(next(panels), figures, "cpu", "GB/s, one thread")
    _bars(next(panels), figures, "pieces", "us for all")
    _bars(next(panels), figures, "alloc", "us")
    _bars(next(panels), figures, "small", "us")
    canvas.suptitle(title, fontsize=10)
    canvas.tight_layout()
    canvas.savefig(path, dpi=110)
    pyplot.close(canvas)


def _kinds(panel: Any, figures: list[dict[str, Any]], direction: str) -> None:
    """Bandwidth against size."""
    for kind, colour in _COLOURS.items():
        for column, style in _STYLES.items():
            points = [
                (figure["nbytes"], figure["gbps"])
                for figure in figures
                if figure["section"] == "kinds"
                and figure["what"] == f"{kind} {direction}"
                and figure["column"] == column
            ]
            if points:
                label = kind if column == "gdcomm" else f"{kind}, {column}" if column == "kernel" else None
                width = 1.0 if column == "bare" else 1.5
                panel.loglog(
                    *zip(*points, strict=True), style, color=colour, label=label, markersize=4, linewidth=width
                )
    panel.set(title=f"{direction} by kind (dotted: bare copies)", xlabel="bytes", ylabel="GB/s")
    _finish(panel)


def _share(panel: Any, figures: list[dict[str, Any]], kind: str, result: dict[str, Any]) -> None:
    """Time against the share of rows, and where the curves meet."""
    for method, style in {"gather": "o-", "copy": "s-", "auto": "k:"}.items():
        points = [
            (figure["share"], figure["us"])
            for figure in figures
            if figure["share"] is not None and figure["what"].startswith(kind) and figure["column"] == method
        ]
        if points:
            panel.loglog(*zip(*points, strict=True), style, label=method, markersize=4)
    for found in result["crossovers"]:
        for key, line in (("measured_percent", "-"), ("predicted_percent", "--")):
            if found["memory"] == kind and found[key] is not None:
                name = key.partition("_")[0]
                panel.axvline(found[key], color="grey", linestyle=line, label=f"meet, {name}: {found[key]:.2g} %")
    panel.set(title=f"rows of a {kind} table", xlabel="% of the rows", ylabel="us")
    _finish(panel)


def _bars(panel: Any, figures: list[dict[str, Any]], section: str, unit: str) -> None:
    """A group of bars for each row, a colour for each column; bandwidths or times, as the unit says."""
    mine = [figure for figure in figures if figure["section"] == section and figure["share"] is None]
    value = "gbps" if unit.startswith("GB/s") else "us"
    places = list(dict.fromkeys((figure["what"], figure["nbytes"]) for figure in mine))
    if section == "arrays":  # the largest size alone
        largest = max((nbytes for _, nbytes in places), default=0)
        places = [place for place in places if place[1] == largest]
    columns = list(dict.fromkeys(figure["column"] for figure in mine))
    width = 0.8 / max(len(columns), 1)
    for i, column in enumerate(columns):
        heights = {(f["what"], f["nbytes"]): f[value] for f in mine if f["column"] == column}
        at = [n + (i - (len(columns) - 1) / 2) * width for n, place in enumerate(places) if place in heights]
        panel.bar(at, [heights[place] for place in places if place in heights], width, label=column)
    labels = [f"{_folded(what)}\n{_size(nbytes)}" for what, nbytes in places]
    panel.set_xticks(range(len(places)), labels, fontsize=6)
    panel.set(title=section, ylabel=unit, yscale="log" if section in ("alloc", "rows") else "linear")
    _finish(panel)


def _size(nbytes: int) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):.4g} {unit}"
    return f"{nbytes} B"


def _folded(text: str) -> str:
    words, lines = text.split(" "), [""]
    for word in words:
        if len(lines[-1]) + len(word) > 14 and lines[-1]:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip(" ")
    return "\n".join(lines)


def _finish(panel: Any) -> None:
    panel.grid(alpha=0.3)
    if panel.get_legend_handles_labels()[1]:
        panel.legend(fontsize=7)
    else:
        panel.text(0.5, 0.5, "not measured", ha="center", transform=panel.transAxes, color="grey")
