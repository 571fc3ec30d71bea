"""How much memory this process may page-lock. Page-locked memory can't be swapped out, so too much ends processes.

`GDCOMM_PINNED_LIMIT` sets the limit: bytes ("8589934592"), with a suffix of 1024s ("8G", "512MiB") or a share of
the memory ("25%"). The default is half the memory, divided by the ranks that the launcher started on this
node. *The memory* is the smaller of the machine's RAM and the limits of the process's cgroups (v1 and v2).

`RLIMIT_MEMLOCK` (`ulimit -l`) does not bind here: the CUDA driver page-locks without charging it, for
cudaHostAlloc and for cudaHostRegister. It binds RDMA libraries and mlock, so errors of the system quote it.
"""

from __future__ import annotations

import functools
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from gdcomm.errors import BufferSpecError, PinnedMemoryError
from gdcomm.memory.pages import in_child

__all__ = ["VARIABLE", "Budget", "available", "limit", "memory", "of_process"]

VARIABLE = "GDCOMM_PINNED_LIMIT"
_SHARE = 0.5
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE", "PALS_LOCAL_SIZE")
_LARGE = 64 << 20  # bytes allocated since the last look at what the system has left


class Budget:
    """Counts the page-locked bytes of this process. Thread-safe.

    Args:
        limit_bytes: the most that may be held at a time.
        root: where /proc and /sys are found.
    """

    def __init__(self, limit_bytes: int, root: str | Path = "/") -> None:
        self.limit = limit_bytes
        self._root = root
        self._lock = threading.Lock()
        self._used = self._unchecked = 0
        self._freed: deque[int] = deque()
        in_child(self._forget)

    @property
    def used(self) -> int:
        """Bytes held now."""
        with self._lock:
            return self._settle()

    def reserve(self, nbytes: int, *, new: bool = True) -> None:
        """Count `nbytes` as page-locked, before they are.

        Args:
            new: the memory is yet to be allocated, so the system must have it.

        Raises:
            PinnedMemoryError: that is more than the limit leaves, or than the system has.
        """
        with self._lock:
            used = self._settle()
            if used + nbytes > self.limit:
                raise PinnedMemoryError(
                    f"{_text(nbytes)} of page-locked memory are asked for, {_text(used)} of {_text(self.limit)} are in "
                    f"use; free some, or raise the limit ({VARIABLE}=8G, or 50%)"
                )
            self._used = used + nbytes
            if not new:
                return
            self._unchecked += nbytes
            check = self._unchecked >= _LARGE
        if check:
            left = available(self._root)
            if left is not None and nbytes > left:
                self.refund(nbytes)
                raise PinnedMemoryError(
                    f"{_text(nbytes)} of page-locked memory are asked for, and the system (or the cgroup of this "
                    f"process) has only {_text(left)} left; free some, or give the job more memory"
                )
            self._unchecked = 0

    def refund(self, nbytes: int) -> None:
        """Count `nbytes` as free again."""
        self._freed.append(nbytes)

    def releaser(self) -> Callable[[int], None]:
        """`refund` for finalizers: it takes no lock, and does nothing in a forked child."""
        return self._freed.append

    def _settle(self) -> int:
        while self._freed:
            self._used -= self._freed.popleft()
        return self._used

    def _forget(self) -> None:
        """In a forked child, which holds nothing."""
        self._lock = threading.Lock()
        self._used = self._unchecked = 0
        self._freed = deque()


@functools.cache
def of_process() -> Budget:
    """The budget that all pools and registrations of this process share.

    Raises:
        BufferSpecError: GDCOMM_PINNED_LIMIT is no amount.
    """
    return _made.setdefault("process", Budget(limit()))  # the cache alone lets two threads make two


_made: dict[str, Budget] = {}


def limit(environment: Mapping[str, str] = os.environ, root: str | Path = "/") -> int:
    """The bytes that this process may page-lock; see the module's text.

    Raises:
        BufferSpecError: GDCOMM_PINNED_LIMIT is no amount.
    """
    given = environment.get(VARIABLE, "").strip()
    if not given:
        return int(memory(root) * _SHARE) // _local_ranks(environment)
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:(%)|([KMGT]?)(?:i?B)?)", given, re.IGNORECASE)
    if not found:
        raise BufferSpecError(f"{VARIABLE}: {given!r} is no amount of memory; give bytes (8G, 512M) or a share (25%)")
    number, percent, unit = found.groups()
    return int(memory(root) * float(number) / 100 if percent else float(number) * _UNITS[unit.upper()])


def memory(root: str | Path = "/") -> int:
    """Bytes of memory that this process can have: RAM, or less where a cgroup says so."""
    ram = _meminfo(root, "MemTotal")
    if ram is None:
        ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([ram, *(most for most, _ in _cgroups(root))])


def available(root: str | Path = "/") -> int | None:
    """Bytes that can be allocated now without swapping or reaching a cgroup's limit; None if nothing tells."""
    free = _meminfo(root, "MemAvailable")
    rooms = [most - used for most, used in _cgroups(root)]
    found = [*rooms, *([] if free is None else [free])]
    return max(min(found), 0) if found else None


def _local_ranks(environment: Mapping[str, str]) -> int:
    for name in _LOCAL_RANKS:
        value = environment.get(name, "")
        if value.isdigit() and int(value):
            return int(value)
    return 1


def _meminfo(root: str | Path, field: str) -> int | None:
    found = re.search(rf"^{field}:\s*(\d+) kB", _read(Path(root, "proc/meminfo")), re.MULTILINE)
    return int(found[1]) << 10 if found else None


def _cgroups(root: str | Path) -> Iterator[tuple[int, int]]:
    """Limit and use, without page cache that can go, of each memory cgroup that this process is in."""
    for line in _read(Path(root, "proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _chain(Path(root, "sys/fs/cgroup"), path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = Path(root, "sys/fs/cgroup/memory")
            yield from _chain(top, path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _chain(top: Path, path: str, limit_file: str, use_file: str, cache: str) -> Iterator[tuple[int, int]]:
    group = top / path.strip("/")  # in a container it may not be there: then the top is the process's own
    for folder in (group, *group.parents):
        most = _read(folder / limit_file).strip()
        if most.isdigit() and int(most) < 1 << 60:  # otherwise "max"
            used = _read(folder / use_file).strip()
            can_go = re.search(rf"^{cache} (\d+)$", _read(folder / "memory.stat"), re.MULTILINE)
            yield int(most), max(int(used or 0) - (int(can_go[1]) if can_go else 0), 0)
        if folder == top:
            return


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _text(nbytes: int) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024  # type: ignore[assignment]
    return f"{nbytes:.4g} GiB"
