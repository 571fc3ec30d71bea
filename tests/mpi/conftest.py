"""Kinds of arrays and paths that every test here runs over."""

from __future__ import annotations

import time

import numpy as np
import pytest
from mpi4py import MPI

import gdcomm
import gdcomm.testing

DEVICE = gdcomm.testing.emulate(seed=7)


def completes(request):
    """Whether the request completes by gdcomm's thread alone: mpi4py's own method drives nothing."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if MPI.Request.Get_status(request):
            return True
        time.sleep(1e-3)
    return False


class Host:
    """NumPy arrays on the host path."""

    name, path = "host", "auto"

    def make(self, values, order="C"):
        return np.array(values, order=order)

    def read(self, array):
        return np.array(array)


class Emulated:
    """Device arrays that are lazy on purpose."""

    def __init__(self, path):
        self.name = self.path = path

    def make(self, values, order="C"):
        return DEVICE.array(np.asarray(values), order=order)

    def read(self, array):
        return DEVICE.asnumpy(array)


@pytest.fixture(params=[Host(), Emulated("staged"), Emulated("direct")], ids=lambda kind: kind.name)
def kind(request):
    return request.param


@pytest.fixture
def comm(kind):
    return gdcomm.Communicator(path=kind.path)


@pytest.fixture
def device():
    return DEVICE
