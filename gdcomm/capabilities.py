"""What the MPI of this process can do with device memory, found without risking the process.

Query functions, libraries mapped into the process and the user's word; never a trial.
Whatever is unknown is left out, and such operations are staged.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

from mpi4py import MPI

from gdcomm import devices
from gdcomm.paths import Capabilities

__all__ = ["local_capabilities"]

ALL = frozenset({"p2p", "copy", "move", "reduce", "nonblocking"})
VARIABLE = "GDCOMM_MPI_DEVICE_OPS"


def local_capabilities() -> Capabilities:
    """This rank's capabilities; cheap after the first call."""
    declared = os.environ.get(VARIABLE)
    if declared is not None:
        return _declared(declared)
    if any(device.kind == "emulated" for device in devices.installed()):
        return Capabilities(ALL, "emulated device memory is host memory to MPI")
    return _probed()


def _declared(text: str) -> Capabilities:
    names = {name.strip().lower() for name in text.split(",") if name.strip()} - {"none"}
    if "all" in names:
        names = set(ALL)
    if not names <= ALL:
        raise ValueError(
            f"{VARIABLE}={text!r}: {', '.join(sorted(names - ALL))} unknown; "
            f"give 'none', 'all' or a comma-separated list of {', '.join(sorted(ALL))}"
        )
    return Capabilities(frozenset(names), f"declared in {VARIABLE}")


@functools.cache
def _probed() -> Capabilities:
    vendor, version = MPI.get_vendor()
    maps = _mapped_libraries()
    if vendor == "Open MPI":
        if _query(maps, "MPIX_Query_cuda_support"):
            # Reductions on device memory broke in 4.1 builds whose Send/Recv were fine;
            # nonblocking reductions still crash in libnbc.
            groups = {"p2p", "move", "reduce"} if version >= (5, 0, 0) else {"p2p"}
            return Capabilities(frozenset(groups), "Open MPI reports CUDA support")
        if os.environ.get("OMPI_MCA_pml") == "ucx" and any("libuct_cuda" in path for path in maps):
            # Send/Recv go through UCX, which reads device memory; collectives, buffered sends and
            # Sendrecv_replace copy it with the CPU (seen: SIGSEGV).
            return Capabilities(frozenset({"p2p"}), "Open MPI without CUDA over a UCX with CUDA (pml ucx)")
        return Capabilities(frozenset(), "Open MPI reports no CUDA support")
    if vendor == "MPICH":
        if _query(maps, "MPIX_Query_cuda_support"):
            return Capabilities(frozenset({"p2p", "move", "reduce"}), "MPICH reports CUDA support")
        return Capabilities(frozenset(), "MPICH reports no CUDA support")
    return Capabilities(frozenset(), f"{vendor}: unknown MPI; {VARIABLE} declares what it can do")


def _mapped_libraries() -> list[str]:
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:  # not Linux
        return []
    return sorted({line.split()[-1] for line in lines if ".so" in line})


def _query(maps: list[str], function: str) -> bool:
    """Call an MPI library's own int f(void), if one of the mapped libraries has it."""
    for path in maps:
        if Path(path).name.startswith(("libmpi.so", "libmpi_abi.so", "libmpich.so")):
            try:
                return bool(getattr(ctypes.CDLL(path), function)())
            except (OSError, AttributeError):
                continue
    return False
