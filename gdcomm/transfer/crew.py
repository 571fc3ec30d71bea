"""Threads that help a caller with one piece of work: no start-up time, no wait for those that came too late."""

from __future__ import annotations

import functools
import math
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

from gdcomm.topology import cpu_quota

__all__ = ["Crew", "cpu_count", "crew"]


@functools.cache
def cpu_count() -> int:
    """Processors that this process may use at a time: by its affinity, and by its cgroup (containers)."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:
        count = os.cpu_count() or 1
    return min(count, max(math.floor(cpu_quota() or count), 1))


class _Job:
    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._active = 0
        self._closed = False
        self.error: BaseException | None = None

    def help(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._active += 1
        try:
            self._work()
        except BaseException as error:
            self.error = self.error or error
        finally:
            with self._lock:
                self._active -= 1
                self._idle.notify_all()

    def close(self) -> None:
        """Let no more helpers in, and wait for those within."""
        with self._lock:
            self._closed = True
            while self._active:
                self._idle.wait()


class Crew:
    """Threads, started on first need, that stay.

    Args:
        count: threads at most.
    """

    def __init__(self, count: int) -> None:
        self._count, self._started = count, 0
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[_Job] = SimpleQueue()

    def run(self, work: Callable[[], None], helpers: int) -> None:
        """Run `work` in the calling thread and in up to `helpers` others at once; return when all ended.

        `work` shares its pieces out itself. The caller never waits for a helper that has not begun,
        so nothing depends on a free thread.

        Raises:
            BaseException: the first that any of them raised.
        """
        job = _Job(work)
        helpers = min(helpers, self._count)
        self._start(helpers)
        for _ in range(helpers):
            self._jobs.put(job)
        try:
            job.help()
        finally:
            job.close()
        if job.error is not None:
            raise job.error

    def _start(self, count: int) -> None:
        if self._started >= count:
            return
        with self._lock:
            while self._started < count:
                self._started += 1
                threading.Thread(target=self._serve, name=f"gdcomm-copy-{self._started}", daemon=True).start()

    def _serve(self) -> None:
        while True:
            self._jobs.get().help()


_crews: list[Crew] = []


def crew() -> Crew:
    """The threads of this process that copy host memory."""
    if not _crews:
        _crews.append(Crew(max(cpu_count() - 1, 1)))
    return _crews[0]


os.register_at_fork(after_in_child=_crews.clear)  # threads do not survive a fork
