"""The command `gdcomm bench transfer`: options in, tables, JSON and plot out."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from typing import Any

import click
from rich.console import Console

from gdcomm.bench.transfer.kits import Kit, kit_of
from gdcomm.bench.transfer.plot import plot
from gdcomm.bench.transfer.report import print_results, print_section
from gdcomm.bench.transfer.sections import SECTIONS, crossovers, ratios, run, speedups
from gdcomm.bench.transfer.timing import Figure
from gdcomm.memory.budget import available, of_process

__all__ = ["LARGEST", "refuse_ranks", "transfer"]

LARGEST = {"none": 1 << 30, "cuda": 1 << 30, "emulated": 64 << 10}  # bytes, where the user says nothing
_RANKS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "PALS_SIZE")
_FACTS_S = 60


def transfer(device: str, sizes: list[int], options: dict[str, Any]) -> int:
    """Measure, print, write. Returns how many bytes were wrong and sections ended early.

    Args:
        device: "none", "emulated" or "cuda".
        sizes: bytes of the sweep.
        options: of the command line: seconds, only, json_path, plot_path.
    """
    started = time.perf_counter()
    kit = kit_of(device, sizes, options["seconds"])
    console = Console(width=220, force_terminal=False)
    figures: list[Figure] = []
    errors: dict[str, str] = {}
    names = [name for name in SECTIONS if not options["only"] or name in options["only"]]
    for name, rows in run(kit, names, errors):
        figures += [figure for row in rows for figure in row]
        if rows:
            print_section(name, rows, console)
    result = _result(kit, figures, errors)
    result["seconds"] = time.perf_counter() - started
    print_results(result, console)
    if options["json_path"]:
        options["json_path"].write_text(json.dumps({**result, "facts": _facts()}, indent=1))
    if options["plot_path"]:
        plot(result, options["plot_path"], f"gdcomm bench transfer, device: {device}, {result['properties']['name']}")
        console.print(f"plot: {options['plot_path']}", highlight=False)
    return sum(figure.wrong for figure in figures) + len(errors)


def refuse_ranks(environment: dict[str, str] | None = None) -> None:
    """Raise where a launcher started several ranks, which would measure each other's noise."""
    found = os.environ if environment is None else environment
    for name in _RANKS:
        if found.get(name, "").isdigit() and int(found[name]) > 1:
            raise click.UsageError(
                f"transfer measures one process and one GPU, and {name} says that {found[name]} ranks were started; "
                "run `gdcomm bench transfer` without mpirun, or with -n 1"
            )


def _result(kit: Kit, figures: list[Figure], errors: dict[str, str]) -> dict[str, Any]:
    properties = kit.device.properties() if kit.device is not None else None
    return {
        "command": " ".join(sys.argv),
        "date": datetime.datetime.now().astimezone().isoformat(),
        "device": kit.name,
        "properties": {"name": "no device"} if properties is None else properties._asdict(),
        "versions": {name: _version(name) for name in ("numpy", "cupy", "torch", "jax")},
        "memory": {"available": available(), "pinned_limit": of_process().limit, "used": of_process().used},
        "sizes": kit.sizes,
        "figures": [figure.as_dict() for figure in figures],
        "ratios": ratios(figures),
        "crossovers": crossovers(figures),
        "overlap": speedups(figures),
        "notes": kit.notes,
        "errors": errors,
    }


def _version(name: str) -> str:
    """Of a library that may not be loaded, and that has several packages."""
    for package in (name, f"{name}-cuda13x", f"{name}-cuda12x"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return str(getattr(sys.modules.get(name), "__version__", "not installed"))


def _facts() -> dict[str, Any]:
    """What `gdcomm info` says, in a process of its own: it starts MPI, which has no place in this one."""
    command = [sys.executable, "-m", "gdcomm", "info", "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_FACTS_S, check=True)
        found: dict[str, Any] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return {"error": f"`gdcomm info --json` failed: {error}"}
    return found
