"""Rows of a table in a file: only the rows asked for go to the GPU, however large the file is.

Run it: python memmap_rows.py (needs a GPU and CuPy).
"""

import tempfile
from pathlib import Path

import numpy as np

import gdcomm

ROWS, COLUMNS = 20_000, 64  # 5 MB here; the file may be larger than the GPU's memory


def write(path):
    table = np.memmap(path, np.float32, "w+", shape=(ROWS, COLUMNS))
    table[:] = np.arange(ROWS)[:, None] + np.arange(COLUMNS) / 100
    table.flush()


def main():
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder, "table"))
        # "c": changes stay in memory. Not every system page-locks "r" (read-only) or "r+" (shared with the file).
        table = np.memmap(Path(folder, "table"), np.float32, "c", shape=(ROWS, COLUMNS))
        wanted = np.random.default_rng(0).integers(0, ROWS, 500)

        # Pageable: CPU threads collect the rows. The file is read where they lie, and nowhere else.
        rows = gdcomm.take(table, wanted)
        assert np.array_equal(gdcomm.to_host(rows), table[wanted])

        # Page-locked: the GPU collects them. That reads the whole file into memory, so it pays for many calls.
        with gdcomm.registered(table):
            assert gdcomm.memory_kind(table).page_locked
            rows = gdcomm.take(table, wanted)
            assert np.array_equal(gdcomm.to_host(rows), table[wanted])
        assert gdcomm.memory_kind(table) == "pageable"


if __name__ == "__main__":
    main()
