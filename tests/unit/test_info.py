"""`gdcomm info` on machines made of files: links, NUMA nodes and limits, and no false alarms."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gdcomm import topology
from gdcomm.devices.memory import DeviceProperties
from gdcomm.probe import readable, transfers

GPU = "0000:01:00.0"
GEN = {1: "2.5 GT/s PCIe", 3: "8.0 GT/s PCIe", 4: "16.0 GT/s PCIe", 5: "32.0 GT/s PCIe", 0: "Unknown"}


class Tree:
    """A root folder with /proc and /sys."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal: {64 << 20} kB\nMemAvailable: {60 << 20} kB\n")
        self.write("proc/self/cgroup", "0::/job\n")
        self.write("proc/self/limits", "Limit  Soft  Hard  Units\nMax locked memory  8388608  8388608  bytes\n")
        self.write("proc/cpuinfo", "processor : 0\nflags\t\t: fpu sse2\n")
        self.write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
        self.process("0-15")
        self.node(0, "0-15")

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def process(self, cpus: str, memory: str = "0") -> None:
        self.write("proc/self/status", f"Name:\tpython\nCpus_allowed_list:\t{cpus}\nMems_allowed_list:\t{memory}\n")

    def node(self, number: int, cpus: str) -> None:
        self.write(f"sys/devices/system/node/node{number}/cpulist", f"{cpus}\n")

    def device(self, path: str, now: tuple[int, int], most: tuple[int, int], **files: str) -> None:
        """A PCI device at the end of a path of bridges, with generation and width."""
        folder = f"sys/devices/pci0000:00/{path}"
        for when, (generation, width) in (("current", now), ("max", most)):
            self.write(f"{folder}/{when}_link_speed", GEN[generation])
            self.write(f"{folder}/{when}_link_width", str(width))
        for name, text in files.items():
            self.write(f"{folder}/{name}", text)
        link = self.root / "sys/bus/pci/devices" / Path(path).name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(self.root / folder, link.parent))

    def gpu(self, path: str, now: tuple[int, int], most: tuple[int, int], node: str = "-1") -> None:
        files = {"vendor": "0x10de\n", "numa_node": f"{node}\n"}
        self.device(path, now, most, **files, **{"class": "0x030200\n"})

    def facts(self, smi: str = "", properties: DeviceProperties | None = None, **environment: str) -> dict[str, Any]:
        found = transfers(self.root, smi, properties, environment)
        assert json.loads(json.dumps(found)) == found  # machine-readable, and no key that JSON changes
        return found


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def text(found: dict[str, Any]) -> str:
    lines = readable({"machine": "x", "transfers": found})
    return "\n".join(
        f"{name}: {line}" for name, part in lines.items() for line in ([part] if type(part) is str else part)
    )


def test_a_desktop(tree):
    tree.device("0000:00:01.0", (5, 16), (5, 16))
    tree.gpu(f"0000:00:01.0/{GPU}", (5, 16), (5, 16))
    found = tree.facts()
    (gpu,) = found["gpus"]
    assert (gpu["pci_bus_id"], gpu["numa_node"], gpu["coherent"]) == (GPU, None, None)
    assert gpu["link_gbs"] == pytest.approx(63.0, abs=0.02)
    assert gpu["practical_gbs"] == pytest.approx(54.8, abs=0.1)
    assert gpu["limit"] == "the link, gen 5 x16: about 55 GB/s each way"
    assert found["findings"] == []
    assert found["pinned"] == {
        "limit_bytes": 32 << 30, "used_bytes": found["pinned"]["used_bytes"], "source": "half of 64 GiB of RAM",
        "numa_node": 0, "numa_reason": "the only one",
    }  # fmt: skip
    assert (found["memlock_bytes"], found["huge_pages"], found["virtual"]) == (8 << 20, "madvise", None)
    assert "63 GB/s each way, of which about 55 are had" in text(found)


def test_an_idle_gpu_is_no_finding(tree):
    tree.device("0000:00:01.0", (1, 16), (5, 16))
    tree.gpu(f"0000:00:01.0/{GPU}", (1, 16), (4, 16))
    found = tree.facts()
    assert found["findings"] == []
    assert found["gpus"][0]["practical_gbs"] == pytest.approx(27.4, abs=0.1)
    assert "gen 1 now, as idle GPUs do: look again while it copies" in text(found)


@pytest.mark.parametrize(("port", "why"), [(16, "sits well"), (8, "its slot has 8")])
def test_a_gpu_on_half_of_its_lanes(tree, port, why):
    tree.device("0000:00:01.0", (4, 8), (4, port))
    tree.gpu(f"0000:00:01.0/{GPU}", (4, 8), (5, 16))
    found = tree.facts()
    (gpu,) = found["gpus"]
    assert gpu["link_gbs"] == pytest.approx(15.75, abs=0.01)  # generation 4 is all that the port can do
    assert gpu["limit"].startswith("link width, x8 of x16: about 14 GB/s")
    (finding,) = found["findings"]
    assert "GPU 0 runs on 8 of its 16 PCIe lanes" in finding
    assert why in finding


def test_a_narrow_bridge_upstream(tree):
    tree.device("0000:00:01.0", (3, 4), (4, 16))
    tree.device("0000:00:01.0/0000:01:00.0", (3, 4), (3, 4))  # a switch, whose other end is narrow
    tree.device("0000:00:01.0/0000:01:00.0/0000:02:00.0", (4, 16), (4, 16))
    tree.gpu("0000:00:01.0/0000:01:00.0/0000:02:00.0/0000:03:00.0", (4, 16), (4, 16))
    found = tree.facts()
    (gpu,) = found["gpus"]
    assert [bridge["pci_bus_id"] for bridge in gpu["bridges"]] == ["0000:02:00.0", "0000:01:00.0", "0000:00:01.0"]
    assert gpu["practical_gbs"] == pytest.approx(3.94 * 0.87, abs=0.01)
    (finding,) = found["findings"]
    assert "gen 3 x4, slower than the GPU's own gen 4 x16" in finding


def test_a_virtual_machine_that_hides_speeds(tree):
    tree.write("sys/class/dmi/id/sys_vendor", "QEMU\n")
    tree.write("sys/class/dmi/id/product_name", "Standard PC\n")
    tree.device("0000:00:05.0", (1, 1), (1, 1))  # made up by the hypervisor
    tree.gpu("0000:00:05.0/0000:0f:00.0", (0, 255), (0, 255))
    nothing = tree.facts()
    assert nothing["gpus"][0]["limit"].startswith("unknown")
    assert nothing["gpus"][0]["link_gbs"] is None
    assert "(not told)" in text(nothing)
    found = tree.facts("0, 00000000:0F:00.0, 5, 16, 5, 16, NVIDIA H200\n")
    (gpu,) = found["gpus"]
    assert (gpu["name"], gpu["pci_bus_id"]) == ("NVIDIA H200", "0000:0f:00.0")
    assert gpu["limit"].startswith("the link, gen 5 x16: about 55 GB/s")
    assert found["findings"] == []
    assert found["virtual"] == "QEMU Standard PC"


def test_nvidia_smi_that_does_not_know(tree):
    found = tree.facts("0, 00000000:0F:00.0, [N/A], [N/A], [Not Supported], [N/A], GPU, with a comma\nrubbish\n")
    (gpu,) = found["gpus"]
    assert (gpu["name"], gpu["link_gbs"], gpu["practical_gbs"]) == ("GPU, with a comma", None, None)


def two_nodes(tree: Tree) -> None:
    tree.node(0, "0-7,16-23")
    tree.node(1, "8-15,24-31")
    tree.gpu("0000:01:00.0", (5, 16), (5, 16), node="0")
    tree.gpu("0000:02:00.0", (5, 16), (5, 16), node="1")


def test_a_process_on_the_wrong_numa_node(tree):
    two_nodes(tree)
    tree.process("0-7", "0-1")
    found = tree.facts(properties=DeviceProperties(pci_bus_id="0000:02:00.0", numa_node=1))
    assert [gpu["current"] for gpu in found["gpus"]] == [False, True]
    assert found["process_nodes"] == [0]
    assert found["numa_nodes"] == {"0": 16, "1": 16}
    assert (found["pinned"]["numa_node"], found["pinned"]["numa_reason"]) == (1, "the GPU's")
    (finding,) = found["findings"]
    assert "runs on NUMA node 0, GPU 1 is at node 1" in finding
    assert "numactl --cpunodebind=1 --membind=1" in finding
    assert "GPU 1 is at node 1" in text(found)


@pytest.mark.parametrize(("cpus", "pci"), [("0-31", "0000:02:00.0"), ("0-7", "0000:01:00.0")])
def test_a_process_on_the_right_numa_node(tree, cpus, pci):
    two_nodes(tree)
    tree.process(cpus, "0-1")
    assert tree.facts(properties=DeviceProperties(pci_bus_id=pci))["findings"] == []


def test_the_pool_can_not_reach_the_node(tree):
    two_nodes(tree)
    tree.process("0-7", "0-1")
    tree.write("sys/fs/cgroup/job/cpuset.cpus.effective", "0-7\n")
    current = DeviceProperties(pci_bus_id="0000:02:00.0")
    pinned = tree.facts(properties=current)["pinned"]
    assert pinned["numa_node"] is None
    assert pinned["numa_reason"] == "not node 1, the GPU's, of which this process may use no CPU"
    tree.write("sys/fs/cgroup/job/cpuset.cpus.effective", "0-31\n")
    tree.process("0-7", "0")
    assert "memory nodes" in tree.facts(properties=current)["pinned"]["numa_reason"]
    assert tree.facts()["pinned"]["numa_reason"] == "that of the thread that takes it"  # no GPU is the current one


@pytest.mark.parametrize("quota", [False, True])
def test_few_cpus(tree, quota):
    tree.gpu(GPU, (5, 16), (5, 16))
    if quota:
        tree.write("sys/fs/cgroup/job/cpu.max", "250000 100000\n")
    else:
        tree.process("4-5")
    found = tree.facts()
    assert "2 CPU threads, at most 16 GB/s" in found["gpus"][0]["limit"]
    assert len(found["findings"]) == 1
    assert "docs/memory.md" in found["findings"][0]
    assert ("2.5 of them at a time" in text(found)) is quota


def test_a_coherent_machine(tree):
    tree.node(1, "")  # the GPU's memory
    tree.gpu(GPU, (4, 1), (5, 16), node="1")
    tree.process("0-1")
    coherent = DeviceProperties(
        pci_bus_id=GPU, pageable_memory_access=True, pageable_memory_access_uses_host_page_tables=True
    )
    found = tree.facts(properties=coherent)
    assert found["gpus"][0]["limit"].startswith("coherent")
    assert found["findings"] == []


def test_the_budget(tree):
    tree.write("sys/fs/cgroup/job/memory.max", str(16 << 30))
    tree.write("sys/fs/cgroup/job/memory.current", "0")
    tree.write("sys/fs/cgroup/job/memory.stat", "")
    pinned = tree.facts(OMPI_COMM_WORLD_LOCAL_SIZE="4")["pinned"]
    assert pinned["limit_bytes"] == 2 << 30
    assert pinned["source"] == "half of 16 GiB that the cgroup allows, shared by 4 ranks"
    pinned = tree.facts(GDCOMM_PINNED_LIMIT="3G")["pinned"]
    assert (pinned["limit_bytes"], pinned["source"]) == (3 << 30, "GDCOMM_PINNED_LIMIT=3G")
    found = tree.facts(GDCOMM_PINNED_LIMIT="lots")
    assert "GDCOMM_PINNED_LIMIT" in found["findings"][0]
    assert found["pinned"]["limit_bytes"] is None


def test_huge_pages_off(tree):
    tree.write("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n")
    assert tree.facts()["findings"] == []  # no GPU, no advice
    tree.gpu(GPU, (5, 16), (5, 16))
    assert "huge pages are off" in tree.facts()["findings"][0]


def test_no_gpu(tree):
    tree.device("0000:00:02.0", (3, 8), (3, 8), vendor="0x8086\n", **{"class": "0x030000\n"})
    found = tree.facts()
    assert found["gpus"] == []
    assert "no NVIDIA GPU is seen" in text(found)
    assert "no GPU, no transfers" in text(found)


def test_a_system_that_tells_nothing(tmp_path):
    found = transfers(tmp_path, environment={})
    assert (found["gpus"], found["findings"], found["huge_pages"]) == ([], [], None)
    assert text(found)


def test_bandwidths():
    assert topology.bandwidth(3, 16) == pytest.approx(15.75, abs=0.01)
    assert topology.bandwidth(1, 1) == 0.25
    assert topology.bandwidth(6, 16) == pytest.approx(121, abs=0.1)
    assert topology.bandwidth(None, 16) is topology.bandwidth(7, 16) is None


@pytest.mark.parametrize("option", [[], ["--json"]])
def test_the_command(option):
    done = subprocess.run([sys.executable, "-m", "gdcomm", "info", *option], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    if option:
        assert {"gpus", "pinned", "findings"} <= json.loads(done.stdout)["transfers"].keys()
    else:
        assert {"links", "numa", "pinned", "limits"} <= {line.partition(" ")[0] for line in done.stdout.splitlines()}
