"""The budget of page-locked memory and the placement of pages, from fake /proc and /sys trees."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import gdcomm
from gdcomm.memory import budget, pages
from gdcomm.memory.budget import VARIABLE, Budget

GIB = 1 << 30


def tree(root: Path, **files: str) -> Path:
    """Files whose names have __ for / and _DOT_ for a dot."""
    for name, text in files.items():
        path = root / name.replace("_DOT_", ".").replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def meminfo(total_gib: int, available_gib: int) -> str:
    return f"MemTotal: {total_gib << 20} kB\nMemFree: 1 kB\nMemAvailable: {available_gib << 20} kB\n"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    return tree(tmp_path, proc__meminfo=meminfo(64, 40))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1000", 1000),
        ("8G", 8 * GIB),
        ("512m", 512 << 20),
        ("1.5GiB", 3 * GIB // 2),
        ("3 KB", 3072),
        ("25%", 16 * GIB),
        ("0", 0),
        ("", 32 * GIB),
    ],
)
def test_the_limit_is_bytes_or_a_share(machine: Path, text: str, expected: int) -> None:
    assert budget.limit({VARIABLE: text}, machine) == expected


@pytest.mark.parametrize("text", ["much", "-3", "5X", "%", "1e9", "8G8"])
def test_a_limit_that_is_no_amount_is_refused(machine: Path, text: str) -> None:
    with pytest.raises(gdcomm.BufferSpecError, match=VARIABLE):
        budget.limit({VARIABLE: text}, machine)


def test_ranks_of_a_node_share_the_default_only(machine: Path) -> None:
    assert budget.limit({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, machine) == 8 * GIB
    assert budget.limit({"MPI_LOCALNRANKS": "2"}, machine) == 16 * GIB
    assert budget.limit({"OMPI_COMM_WORLD_LOCAL_SIZE": "4", VARIABLE: "8G"}, machine) == 8 * GIB
    assert budget.limit({"SLURM_NTASKS_PER_NODE": "8(x2)"}, machine) == 32 * GIB


def test_a_cgroup_of_version_2_bounds_the_memory(machine: Path) -> None:
    tree(
        machine,
        proc__self__cgroup="0::/job/step\n",
        sys__fs__cgroup__job__memory_DOT_max=str(16 * GIB),
        sys__fs__cgroup__job__memory_DOT_current=str(10 * GIB),
        sys__fs__cgroup__job__memory_DOT_stat=f"anon 5\ninactive_file {3 * GIB}\n",
        sys__fs__cgroup__job__step__memory_DOT_max="max\n",
    )
    assert budget.memory(machine) == 16 * GIB
    assert budget.limit({}, machine) == 8 * GIB
    assert budget.available(machine) == 9 * GIB, "page cache can go"


def test_a_cgroup_of_version_1_bounds_the_memory(machine: Path) -> None:
    tree(
        machine,
        proc__self__cgroup="5:cpu:/a\n4:memory:/gone/in/a/container\n0::/\n",
        sys__fs__cgroup__memory__memory_DOT_limit_in_bytes=str(8 * GIB),
        sys__fs__cgroup__memory__memory_DOT_usage_in_bytes=str(1 * GIB),
    )
    assert budget.memory(machine) == 8 * GIB
    assert budget.available(machine) == 7 * GIB


def test_limits_that_are_none_count_as_none(machine: Path) -> None:
    tree(
        machine,
        proc__self__cgroup="4:memory:/\n0::/\n",
        sys__fs__cgroup__memory__memory_DOT_limit_in_bytes="9223372036854771712\n",
        sys__fs__cgroup__memory_DOT_max="max\n",
    )
    assert budget.memory(machine) == 64 * GIB
    assert budget.available(machine) == 40 * GIB


def test_without_proc_the_system_call_tells(tmp_path: Path) -> None:
    assert budget.memory(tmp_path) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert budget.available(tmp_path) is None
    Budget(GIB, tmp_path).reserve(GIB)


def test_the_real_machine_has_memory() -> None:
    assert 0 < budget.limit({}) < budget.memory()
    assert budget.of_process() is budget.of_process()


def test_reservations_add_up_to_the_limit(machine: Path) -> None:
    counted = Budget(1000, machine)
    counted.reserve(600)
    with pytest.raises(gdcomm.PinnedMemoryError, match=r"401 bytes .* 600 bytes of 1000 bytes"):
        counted.reserve(401)
    counted.reserve(400)
    counted.refund(600)
    counted.releaser()(100)
    assert counted.used == 300


def test_memory_that_the_system_lacks_is_not_asked_for(machine: Path) -> None:
    counted = Budget(100 * GIB, machine)
    with pytest.raises(MemoryError, match="only 40 GiB left"):
        counted.reserve(50 * GIB)
    assert counted.used == 0
    counted.reserve(50 * GIB, new=False)  # it exists already
    assert counted.used == 50 * GIB


def test_nodes_have_cpus(tmp_path: Path) -> None:
    root = str(
        tree(
            tmp_path,
            sys__devices__system__node__node0__cpulist="0-3,8\n",
            sys__devices__system__node__node1__cpulist="4-7\n",
            sys__devices__system__node__node2__cpulist="\n",
        )
    )
    assert pages.node_cpus(0, root) == {0, 1, 2, 3, 8}
    assert pages.node_cpus(1, root) == {4, 5, 6, 7}
    with pytest.raises(gdcomm.BufferSpecError, match=r"no NUMA node 3; its nodes are \[0, 1, 2\]"):
        pages.node_cpus(3, root)
    with pytest.raises(gdcomm.BufferSpecError, match="no CPUs"):
        pages.node_cpus(2, root)


def test_one_node_needs_no_placement(tmp_path: Path) -> None:
    assert pages.node_cpus(0, str(tmp_path)) is None
    with pytest.raises(gdcomm.BufferSpecError, match="no NUMA node 1"):
        pages.node_cpus(1, str(tmp_path))


def test_pages_are_touched_on_the_cpus_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = os.sched_getaffinity(0)
    cpus, seen = frozenset([min(mine)]), []
    monkeypatch.setattr(pages, "node_cpus", lambda node: cpus)
    monkeypatch.setattr(pages, "_touch", lambda part: seen.append((os.sched_getaffinity(0), part.nbytes)))
    pages.Pages(4 << 20, 0, threads=2)
    assert seen == [({min(mine)}, 2 << 20)] * 2
    assert os.sched_getaffinity(0) == mine, "the caller stays where it was"


def test_cpus_that_are_not_ours_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "node_cpus", lambda node: frozenset([5000]))
    with pytest.raises(gdcomm.BufferSpecError, match="wider CPU set"):
        pages.Pages(4 << 20, 0)


@pytest.mark.parametrize("threads", [None, 1, 3])
def test_pages_are_zero_aligned_and_undone_before_they_go(threads: int | None) -> None:
    nbytes, undone = 5 << 20, []
    mapping = pages.Pages(nbytes, threads=threads)
    block = mapping.array()
    mapping.undo = lambda: undone.append(int(view[0]))
    del mapping
    assert (block.nbytes, block.ctypes.data % pages.HUGE, block.any()) == (nbytes, 0, False)
    block[...] = 7
    view = block[5:10].view()
    keep = [view]
    del block, view
    assert undone == []
    view = keep[0].copy()
    keep.clear()
    assert undone == [7]


def test_filling_by_threads_leaves_no_byte() -> None:
    block = np.zeros((70 << 20) + 5, np.uint8)
    pages.fill(block, 3)
    assert (block == 3).all()
    pages.fill(block[:0], 3)


def test_many_small_allocations_do_not_slip_past_the_system(machine: Path) -> None:
    counted = Budget(1000 * GIB, machine)
    for _ in range(63):
        counted.reserve(1 << 20)
    tree(machine, proc__meminfo="MemTotal: 67108864 kB\nMemAvailable: 100 kB\n")
    with pytest.raises(MemoryError, match="left"):
        counted.reserve(1 << 20)
    with pytest.raises(MemoryError, match="left"):
        counted.reserve(1 << 20)
    assert counted.used == 63 << 20


def test_threads_share_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "_made", {})
    first = budget.of_process.__wrapped__()  # as two threads would that came at once
    assert budget.of_process.__wrapped__() is first
