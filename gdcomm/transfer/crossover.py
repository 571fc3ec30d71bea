"""When to gather rows from host memory, and when to copy the whole table. A pure function of sizes.

The constants are fitted to one H200 on PCIe 5 x16 (`bench/results/`); what matters is their ratio.
"""

from __future__ import annotations

import math
import sys
from typing import NamedTuple

import numpy as np

from gdcomm.errors import BufferSpecError

__all__ = ["Crossover", "crossover"]

# Page-locked table: a kernel reads rows over the link, which carries so many requests, or so many bytes.
GATHER_US = 70.0  # with the launch and the first round trip
GATHER_BYTES_PER_US = 50_000.0
GATHER_ROW_US = 0.0096

# Pageable table: CPU threads gather rows into pinned slots, which are copied.
CPU_GATHER_US = 60.0
CPU_ROW_US = 0.014  # cache and translation misses, and the index itself, over all threads
CPU_BYTES_PER_US = 20_000.0

# The whole table, then a gather in device memory.
COPY_US = 85.0
COPY_BYTES_PER_US = {"page-locked": 54_000.0, "pageable": 42_000.0}
DEVICE_BYTES_PER_US = 3_000_000.0
INDEX_US = {"page-locked": 0.0001, "pageable": 0.014}  # of an index; one from the host is checked and copied


class Crossover(NamedTuple):
    """What `take` decides, and why.

    Args:
        method: "gather" or "copy".
        gather_us: predicted time of gathering the rows from host memory.
        copy_us: predicted time of copying the whole table and gathering on the device.
        rows: the number of rows from which on copying is faster, for this table.
    """

    method: str
    gather_us: float
    copy_us: float
    rows: int


def crossover(row_nbytes: int, rows: int, table_nbytes: int, *, page_locked: bool = True) -> Crossover:
    """Say whether gathering `rows` rows from host memory beats copying the whole table.

    Args:
        row_nbytes: bytes of one row.
        rows: rows asked for.
        table_nbytes: bytes of the table.
        page_locked: whether the device reads the table itself (pinned, registered or mapped memory); else CPU
            threads gather.

    Returns:
        The faster method, both predicted times in microseconds, and the number of rows where they meet.

    Raises:
        BufferSpecError: a number is negative, or none.
    """
    for name, number in (("row_nbytes", row_nbytes), ("rows", rows), ("table_nbytes", table_nbytes)):
        if not isinstance(number, (int, float, np.integer)) or not 0 <= number < math.inf:
            raise BufferSpecError(f"crossover: {name} is {number!r}; give a number from 0 on")
    if page_locked:
        fixed = GATHER_US
        each = max(row_nbytes / GATHER_BYTES_PER_US, GATHER_ROW_US)
    else:
        fixed = CPU_GATHER_US
        each = CPU_ROW_US + row_nbytes / CPU_BYTES_PER_US
    kind = "page-locked" if page_locked else "pageable"
    whole = COPY_US + table_nbytes / COPY_BYTES_PER_US[kind]
    on_device = 2 * row_nbytes / DEVICE_BYTES_PER_US + INDEX_US[kind]
    gather_us, copy_us = fixed + rows * each, whole + rows * on_device
    # Where a row costs more on the device, the copy is never ahead for having fewer rows.
    meet = max(0, int((whole - fixed) / (each - on_device)) + 1) if each > on_device else sys.maxsize
    return Crossover("gather" if gather_us <= copy_us else "copy", gather_us, copy_us, meet)
