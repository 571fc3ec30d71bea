"""Start ranks with the mpirun that belongs to mpi4py's MPI."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

__all__ = ["command", "environment", "find_mpirun"]


def find_mpirun() -> str | None:
    """The launcher beside this Python (an MPI from PyPI), else the one on PATH."""
    for name in ("mpirun", "mpiexec"):
        beside = Path(sys.executable).parent / name
        if beside.exists():
            return str(beside)
    return shutil.which("mpirun") or shutil.which("mpiexec")


def command(mpirun: str, ranks: int, arguments: list[str]) -> list[str]:
    """The command line that runs this Python with `arguments` on `ranks` ranks."""
    return [mpirun, "-n", str(ranks), sys.executable, *arguments]


def environment() -> dict[str, str]:
    """This environment, with what Open MPI wants to be told to run as root and on few cores."""
    found = dict(os.environ)
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        found.setdefault("OMPI_ALLOW_RUN_AS_ROOT", "1")
        found.setdefault("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    found.setdefault("PRTE_MCA_rmaps_default_mapping_policy", "slot:oversubscribe")  # Open MPI 5
    found.setdefault("OMPI_MCA_rmaps_base_oversubscribe", "1")  # Open MPI 4
    return found
