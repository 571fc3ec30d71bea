"""Fixtures of all tests. A test that hangs ends the process with every thread's stack, naming itself."""

from __future__ import annotations

import faulthandler
import os
import sys

import pytest

# Several ranks share the GPU: JAX must not take three quarters of its free memory for each.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    print(f"\n{item.nodeid}", file=sys.__stderr__) if item.config.option.verbose > 1 else None
    faulthandler.dump_traceback_later(90, exit=True)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Under mpirun a rank that fails must not leave the others in a collective: it ends the job."""
    report = yield
    if report.failed and "mpi4py.MPI" in sys.modules and item.path.parent.name in ("mpi", "gpu", "cluster"):
        from mpi4py import MPI

        if MPI.COMM_WORLD.Get_size() > 1:
            text = f"\nrank {MPI.COMM_WORLD.Get_rank()}: {item.nodeid} failed\n{report.longreprtext}\n1 failed in 0s\n"
            item.config.pluginmanager.getplugin("capturemanager").suspend_global_capture(in_=True)
            sys.__stdout__.write(text)
            sys.__stdout__.flush()
            MPI.COMM_WORLD.Abort(1)
    return report
