"""When to gather rows from host memory, and when to copy the whole table. A pure function of sizes.

The constants are fitted to one H200 on PCIe 5 x16 (`bench/results/`); what matters is their ratio.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Crossover", "crossover"]

# Page-locked table: a kernel reads rows over the link, in sectors, each with the overhead of its own request.
GATHER_US = 12.0  # launch, and the first round trip
GATHER_BYTES_PER_US = 50_000.0
SECTOR_NBYTES = 32  # a kernel reads no less
ROW_OVERHEAD_NBYTES = 32  # of the link's capacity, for each row

# Pageable table: CPU threads gather rows into pinned slots, which are copied.
CPU_GATHER_US = 60.0
CPU_ROW_US = 0.02  # cache and translation misses, over all threads
CPU_BYTES_PER_US = 30_000.0

# The whole table, then a gather in device memory.
COPY_US = 25.0
COPY_BYTES_PER_US = {"page-locked": 54_000.0, "pageable": 42_000.0}
DEVICE_BYTES_PER_US = 3_000_000.0


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
    """
    if page_locked:
        fixed = GATHER_US
        sectors = -(-row_nbytes // SECTOR_NBYTES) * SECTOR_NBYTES
        each = (sectors + ROW_OVERHEAD_NBYTES) / GATHER_BYTES_PER_US
    else:
        fixed = CPU_GATHER_US
        each = CPU_ROW_US + row_nbytes / CPU_BYTES_PER_US
    whole = COPY_US + table_nbytes / COPY_BYTES_PER_US["page-locked" if page_locked else "pageable"]
    on_device = 2 * row_nbytes / DEVICE_BYTES_PER_US
    gather_us, copy_us = fixed + rows * each, whole + rows * on_device
    meet = max(0, int((whole - fixed) / (each - on_device)) + 1)
    return Crossover("gather" if gather_us <= copy_us else "copy", gather_us, copy_us, meet)
