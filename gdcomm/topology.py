"""What the system says of this machine: GPUs and their PCIe links, NUMA nodes, and what this process may use.

All is read from files below a `root` folder (procfs and sysfs); nothing here calls CUDA.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["PRACTICAL", "SMI_FIELDS", "Bridge", "Gpu", "Link", "Machine", "bandwidth", "cpu_quota", "gpus", "machine"]

SMI_FIELDS = (  # those of `Link` in its order; the name last: it may hold anything
    "index,pci.bus_id,pcie.link.gen.current,pcie.link.width.current,pcie.link.gen.max,pcie.link.width.max,name"
)
PRACTICAL = 0.87  # of a link's bytes are data in long copies; the rest are headers of packets (measured: 0.86 to 0.88)
_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}  # by GT/s of a lane
_LANE_GBS = {  # GB/s each way, after coding: 8b/10b, from generation 3 on 128b/130b, from 6 on 242 of 256 bytes
    1: 2.5 * 8 / 10 / 8,
    2: 5 * 8 / 10 / 8,
    3: 8 * 128 / 130 / 8,
    4: 16 * 128 / 130 / 8,
    5: 32 * 128 / 130 / 8,
    6: 64 * 242 / 256 / 8,
}
_WIDTHS = (1, 2, 4, 8, 12, 16, 32)  # what else sysfs says (0, 255) is no width
_PCI = "sys/bus/pci/devices"
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_NVIDIA, _DISPLAYS = "0x10de", ("0x0300", "0x0302")  # vendor; classes: VGA and 3D controllers
_VIRTUAL = ("QEMU", "KVM", "VMware", "Xen", "Virtual Machine", "Google Compute Engine", "VirtualBox")


class Link(NamedTuple):
    """A PCIe link as one of its ends tells it; None is unknown.

    Args:
        generation, width: as it runs now. An idle GPU lowers the generation.
        generation_max, width_max: what that end can do.
    """

    generation: int | None = None
    width: int | None = None
    generation_max: int | None = None
    width_max: int | None = None

    @property
    def now_gbs(self) -> float | None:
        """GB/s each way as the link runs now."""
        return bandwidth(self.generation, self.width)

    @property
    def gbs(self) -> float | None:
        """GB/s each way under load: at the width that the link has, and the best generation."""
        return bandwidth(self.generation_max or self.generation, self.width or self.width_max)

    @property
    def best_gbs(self) -> float | None:
        """GB/s each way at the best width and generation."""
        return bandwidth(self.generation_max or self.generation, self.width_max or self.width)

    def __str__(self) -> str:
        generation = self.generation_max or self.generation
        return f"gen {generation or '?'} x{self.width or self.width_max or '?'}"


class Bridge(NamedTuple):
    """A bridge between a GPU and the CPU."""

    pci_bus_id: str
    link: Link


class Gpu(NamedTuple):
    """A GPU as the system sees it.

    Args:
        number: nvidia-smi's, which need not be CUDA's.
        name: of the product, or "".
        pci_bus_id: as in /sys/bus/pci/devices.
        link: its own.
        bridges: on the way to the CPU, the nearest first; that one is the other end of `link`.
        numa_node: None where the system does not tell.
        iommu: how the IOMMU treats it ("DMA-FQ", "identity", ...), or None.
    """

    number: int
    name: str
    pci_bus_id: str
    link: Link
    bridges: tuple[Bridge, ...]
    numa_node: int | None
    iommu: str | None


class Machine(NamedTuple):
    """What this process has.

    Args:
        nodes: CPUs of each NUMA node.
        cpus: that this process may run on (its affinity).
        reachable_cpus: that its threads may move to (its cpuset).
        memory_nodes: that it may take memory from.
        cpu_quota: CPUs' worth of time that its cgroup may use, or None.
        ram: bytes, or None.
        memlock: RLIMIT_MEMLOCK in bytes, None if there is no limit (or none is told).
        huge_pages: the setting of transparent huge pages ("always", "madvise", "never"), or None.
        virtual: what kind of virtual machine this is, None if it is none.
    """

    nodes: dict[int, frozenset[int]]
    cpus: frozenset[int]
    reachable_cpus: frozenset[int]
    memory_nodes: frozenset[int]
    cpu_quota: float | None
    ram: int | None
    memlock: int | None
    huge_pages: str | None
    virtual: str | None

    @property
    def process_nodes(self) -> list[int]:
        """NUMA nodes whose CPUs this process may run on."""
        return sorted(node for node, cpus in self.nodes.items() if cpus & self.cpus)


def bandwidth(generation: int | None, width: int | None) -> float | None:
    """GB/s each way of a PCIe link, before the headers of packets; None if a figure is unknown."""
    lane = _LANE_GBS.get(generation or 0)
    return lane * width if lane and width else None


def gpus(root: str | Path = "/", smi: str = "", virtual: bool = False) -> list[Gpu]:
    """The GPUs that nvidia-smi tells of, or, where it tells of none, NVIDIA's in sysfs.

    Args:
        root: where /proc and /sys are found.
        smi: what `nvidia-smi --query-gpu=SMI_FIELDS --format=csv,noheader,nounits` answers.
        virtual: this is a virtual machine, where bridges are made up and their links say nothing.
    """
    rows = [[cell.strip() for cell in line.split(",", 6)] for line in smi.splitlines()]
    rows = [row for row in rows if len(row) == 7 and row[0].isdigit()]
    if not rows:
        rows = [[str(i), bus, *[""] * 4, _model(root, bus)] for i, bus in enumerate(_nvidia(root))]
    return [_gpu(root, row, virtual) for row in rows]


def machine(root: str | Path = "/") -> Machine:
    """What this process has; see `Machine`."""
    status = _text(root, "proc/self/status")
    nodes = {
        int(folder.name[4:]): _numbers(_text(folder, "cpulist"))
        for folder in sorted(Path(root, "sys/devices/system/node").glob("node[0-9]*"))
    }
    cpus = _numbers(_field(status, r"Cpus_allowed_list:\s*(\S+)"))
    locked = _field(_text(root, "proc/self/limits"), r"Max locked memory\s+(\S+)")
    kib = _field(_text(root, "proc/meminfo"), r"MemTotal:\s*(\d+)")
    return Machine(
        nodes=nodes,
        cpus=cpus,
        reachable_cpus=_cpuset(root) or cpus.union(*nodes.values()),
        memory_nodes=_numbers(_field(status, r"Mems_allowed_list:\s*(\S+)")) or frozenset(nodes),
        cpu_quota=cpu_quota(root),
        ram=int(kib) << 10 if kib else None,
        memlock=int(locked) if locked.isdigit() else None,
        huge_pages=_field(_text(root, "sys/kernel/mm/transparent_hugepage/enabled"), r"\[(\w+)\]") or None,
        virtual=_virtual(root),
    )


# -- GPUs ----------------------------------------------------------------------------------------


def _gpu(root: str | Path, row: list[str], virtual: bool) -> Gpu:
    number, bus, *told, name = row
    bus = _canonical(bus)
    folder = Path(root, _PCI, bus)
    bridges = () if virtual else tuple(_bridges(folder))
    own, smi = _link(folder), Link(*(_count(cell) for cell in told))
    generations = [own.generation_max, smi.generation_max, *(bridge.link.generation_max for bridge in bridges[:1])]
    link = Link(
        own.generation or smi.generation,
        own.width or smi.width,
        min((each for each in generations if each), default=None),  # the lesser of the two ends
        own.width_max or smi.width_max,
    )
    node = _text(folder, "numa_node")
    return Gpu(
        number=int(number),
        name=name,
        pci_bus_id=bus,
        link=link,
        bridges=bridges,
        numa_node=int(node) if node.isdigit() else None,
        iommu=_text(folder, "iommu_group/type") or None,
    )


def _canonical(bus: str) -> str:
    """A PCI address as sysfs has it; nvidia-smi gives the domain eight digits."""
    domain, _, rest = bus.lower().partition(":")
    try:
        return f"{int(domain, 16):04x}:{rest}"
    except ValueError:
        return bus.lower()


def _bridges(folder: Path) -> Iterator[Bridge]:
    """The real path of a device goes through its bridges."""
    for parent in folder.resolve().parents:
        if not _ADDRESS.fullmatch(parent.name):
            return
        yield Bridge(parent.name, _link(parent))


def _link(folder: Path) -> Link:
    speeds = [_generation(_text(folder, f"{when}_link_speed")) for when in ("current", "max")]
    widths = [_count(_text(folder, f"{when}_link_width")) for when in ("current", "max")]
    widths = [width if width in _WIDTHS else None for width in widths]
    return Link(speeds[0], widths[0], speeds[1], widths[1])


def _generation(speed: str) -> int | None:
    """Of "32.0 GT/s PCIe"; None of "Unknown"."""
    found = re.match(r"(\d+(?:\.\d+)?) GT/s", speed)
    return _GENERATIONS.get(float(found[1])) if found else None


def _count(text: str) -> int | None:
    return int(text) if text.isdigit() and int(text) else None


def _nvidia(root: str | Path) -> list[str]:
    return sorted(
        folder.name
        for folder in Path(root, _PCI).glob("*")
        if _text(folder, "vendor") == _NVIDIA and _text(folder, "class").startswith(_DISPLAYS)
    )


def _model(root: str | Path, bus: str) -> str:
    return _field(_text(root, f"proc/driver/nvidia/gpus/{bus}/information"), r"Model:\s*(.+)").strip()


# -- the process ---------------------------------------------------------------------------------


def _cpuset(root: str | Path) -> frozenset[int]:
    for folder in _cgroups(root, "cpuset"):
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus"):
            cpus = _numbers(_text(folder, name))
            if cpus:
                return cpus
    return frozenset()


def cpu_quota(root: str | Path = "/") -> float | None:
    """CPUs' worth of time that the cgroup of this process may use; None if there is no limit."""
    found = []
    for folder in _cgroups(root, "cpu"):
        most, _, period = _text(folder, "cpu.max").partition(" ")
        if not most:
            most, period = _text(folder, "cpu.cfs_quota_us"), _text(folder, "cpu.cfs_period_us")
        if most.isdigit() and period.isdigit() and int(period):  # else "max" or -1
            found.append(int(most) / int(period))
    return min(found, default=None)


def _cgroups(root: str | Path, controller: str) -> Iterator[Path]:
    """The process's cgroups (v1 and v2) that have a say, each with its parents."""
    for line in _text(root, "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = Path(root, "sys/fs/cgroup", controller if controllers else "")
        group = top / path.strip("/")  # in a container it may not be there: then the top is the process's own
        for folder in (group, *group.parents):
            yield folder
            if folder == top:
                break


def _virtual(root: str | Path) -> str | None:
    vendor, product = (_text(root, f"sys/class/dmi/id/{name}") for name in ("sys_vendor", "product_name"))
    told = f"{vendor} {product}".strip()
    flagged = re.search(r"^flags\s*:.*\bhypervisor\b", _text(root, "proc/cpuinfo"), re.MULTILINE)
    return told or "of an unknown kind" if flagged or any(word in told for word in _VIRTUAL) else None


# -- files ---------------------------------------------------------------------------------------


def _text(root: str | Path, name: str) -> str:
    try:
        return Path(root, name).read_text(errors="replace").strip()
    except OSError:  # missing, or not ours to read
        return ""


def _field(text: str, pattern: str) -> str:
    found = re.search(pattern, text)
    return found[1] if found else ""


def _numbers(text: str) -> frozenset[int]:
    """Of "0-3,8"."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if first.isdigit() and (last or first).isdigit():
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
