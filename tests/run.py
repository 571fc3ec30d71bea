"""Run all tests: unit, under mpirun with both MPIs, and mpi4py's own suite.

    .venv/bin/python tests/run.py [--mpich-python PY] [--only WORD]

Each step has a time-out that ends its whole process group; the output of a failing step is shown.
The last line counts what rank 0 of each step reports.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"
SUITE = [
    *("test_cco_buf", "test_cco_vec", "test_cco_nb_buf", "test_cco_nb_vec", "test_cco_pr_buf", "test_cco_pr_vec"),
    *("test_cco_ngh_buf", "test_p2p_buf", "test_p2p_buf_matched"),
]
SUITE_MORE = [
    *("test_msgspec", "test_msgzero", "test_comm", "test_comm_topo", "test_subclass", "test_p2p_obj", "test_cco_obj"),
]
SUITE_PARTITIONED = ["test_p2p_buf_part"]  # MPICH alone has it; Open MPI skips its tests
SUITE_HOST = ["test_rma", "test_rma_nb"]  # windows are mpi4py's own, so on host arrays only


def environment() -> dict[str, str]:
    """As root and with more ranks than cores, which Open MPI wants to be told."""
    return {
        **os.environ,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }


def mpirun(python: str, ranks: int) -> list[str]:
    """The mpirun of that Python's own MPI wheel."""
    return [str(Path(python).parent / "mpirun"), "-n", str(ranks), python]


class Totals:
    """Counts over all steps."""

    passed = failed = skipped = 0
    lines: list[str] = []

    def run(self, name: str, command: list[str], timeout: float = 300) -> None:
        start = time.monotonic()
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=timeout)
            code = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            output += f"\ntime-out after {timeout} s\n"
            code = 124
        passed, failed, skipped = counts(output)
        if code and not failed:
            failed = 1
        if not code and not passed:
            failed, code = 1, 1
            output += "\nno test ran\n"
        self.passed += passed
        self.failed += failed
        self.skipped += skipped
        state = "FAILED" if code or failed else "ok"
        line = f"{state:7}{name:58}{passed:6} passed {time.monotonic() - start:6.1f} s"
        self.lines.append(line)
        print(line, flush=True)
        if state == "FAILED":
            print(output[-20000:], flush=True)


def counts(output: str) -> tuple[int, int, int]:
    """Passed, failed and skipped of one rank, from pytest's or unittest's closing lines."""

    def number(pattern: str, text: str) -> int:
        found = re.search(pattern, text)
        return int(found.group(1)) if found else 0

    pytest = re.findall(r"^(?:=+ )?(\d+ (?:passed|failed|skipped|error).*) in [\d.]+s", output, re.M)
    if pytest:
        line = max(pytest, key=lambda text: number(r"(\d+) failed", text) + number(r"(\d+) error", text))
        return (
            number(r"(\d+) passed", line),
            number(r"(\d+) failed", line) + number(r"(\d+) error", line),
            number(r"(\d+) skipped", line),
        )
    ran = number(r"Ran (\d+) tests?", output)
    failures = re.findall(r"^FAILED.*", output, re.M)
    bad = max((sum(map(int, re.findall(r"(?:failures|errors)=(\d+)", line))) for line in failures), default=0)
    skipped = number(r"skipped=(\d+)", output)
    return max(0, ran - bad - skipped), bad, skipped


def suite_sources(python: str) -> Path | None:
    """mpi4py's sdist of the installed version, downloaded once; None if that fails."""
    version = subprocess.run(
        [python, "-c", "import mpi4py; print(mpi4py.__version__)"], text=True, capture_output=True, check=True
    ).stdout.strip()
    folder = CACHE / f"mpi4py-{version}"
    if not folder.exists():
        CACHE.mkdir(exist_ok=True)
        got = subprocess.run(
            [python, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", str(CACHE),
             f"mpi4py=={version}"], capture_output=True, text=True,
        )  # fmt: skip
        archive = CACHE / f"mpi4py-{version}.tar.gz"
        if got.returncode or not archive.exists():
            print(got.stderr[-2000:])
            return None
        with tarfile.open(archive) as tar:
            tar.extractall(CACHE, filter="data") if hasattr(tarfile, "data_filter") else tar.extractall(CACHE)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mpich-python")
    parser.add_argument("--only", default="", help="run the steps whose name has this word")
    options = parser.parse_args()
    # absolute(), not resolve(): a virtual environment's python is a link out of it
    pythons = {"openmpi": str(Path(sys.executable).absolute())}
    if options.mpich_python:
        pythons["mpich"] = str(Path(options.mpich_python).absolute())
    totals = Totals()

    def step(name: str, command: list[str], timeout: float = 300) -> None:
        if options.only in name:
            totals.run(name, command, timeout)

    step("unit", [pythons["openmpi"], "-m", "pytest", "-q", "--color=no", "tests/unit"])
    for mpi, python in pythons.items():
        for ranks in (1, 2, 3, 4):
            # pytest-mpi, if it is there, would skip the whole folder for its name
            tests = ["-m", "pytest", "-q", "--color=no", "-p", "no:pytest_mpi", "tests/mpi"]
            step(f"{mpi} tests/mpi, {ranks} ranks", [*mpirun(python, ranks), *tests])
    check = subprocess.run([str(ROOT / "launch/nodes"), "check"], text=True, capture_output=True)
    if check.returncode:
        print(f"simulated nodes not tested: {check.stderr.strip()}")
        totals.skipped += 1
    else:
        tests = ["-m", "pytest", "-q", "--color=no", "-p", "no:pytest_mpi", "tests/cluster"]
        for mpi, python in pythons.items():
            for nodes in (2, 4):
                run = [str(ROOT / "launch/nodes"), "run", str(nodes), "-n", "4", python]
                step(f"{mpi} tests/cluster, {nodes} simulated nodes, 4 ranks", [*run, *tests])
        shaped = [str(ROOT / "launch/nodes"), "run", "2", "--rate", "1gbit", "--delay", "200us", "-n", "4"]
        few = [*tests, "-k", "wire or large and chosen"]
        for mpi, python in pythons.items():
            step(f"{mpi} tests/cluster, 2 nodes, 1 Gbit/s, 200 us, 4 ranks", [*shaped, python, *few])
    step("mutation: each wait taken out is noticed", [pythons["openmpi"], "tests/mutation/mutate.py"], 900)
    sources = suite_sources(pythons["openmpi"])
    if sources is None:
        print("mpi4py's own suite not run: its sdist could not be downloaded; check pip's access to PyPI")
        totals.skipped += 1
    else:
        for mpi, python in pythons.items():
            partitioned = SUITE_PARTITIONED if mpi == "mpich" else []
            host = SUITE + SUITE_MORE + partitioned + (SUITE_HOST if mpi == "mpich" else [])
            runner = ["tests/suites/run_mpi4py.py", "--source", str(sources), "--array"]
            step(f"{mpi} mpi4py's suite, NumPy", [*mpirun(python, 2), *runner, "numpy", *host])
            for path in ("staged", "direct"):
                extra = ["emulated", "--path", path, *SUITE, *SUITE_MORE, *partitioned]
                for ranks in (2, 3) if path == "staged" else (2,):
                    name = f"{mpi} mpi4py's suite, emulated {path}, {ranks} ranks"
                    step(name, [*mpirun(python, ranks), *runner, *extra])
    print("\n".join(["", *totals.lines, ""]))
    print(f"{totals.passed} passed, {totals.failed} failed, {totals.skipped} skipped")
    return 1 if totals.failed else 0


if __name__ == "__main__":
    sys.exit(main())
