"""Signals between hosts, streams and kernels of a GPU."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from gpu import cupy

import gdcomm

pytestmark = pytest.mark.gpu

STREAMS = {
    "null": lambda: cupy.cuda.Stream.null,
    "blocking": cupy.cuda.Stream,
    "non-blocking": lambda: cupy.cuda.Stream(non_blocking=True),
    "per-thread": lambda: cupy.cuda.Stream.ptds,
}


@pytest.fixture(params=[32, 64])
def signal(request):
    return gdcomm.Signal(bits=request.param)


@pytest.fixture(params=list(STREAMS))
def stream(request):
    return STREAMS[request.param]()


def test_the_host_waits_for_a_stream(signal, stream):
    memory = gdcomm.pinned_zeros(1_000_000)
    with stream:
        busy = cupy.ones((3000, 3000), "f")
        for _ in range(8):
            busy = busy @ busy * 1e-4
        x = cupy.full(1_000_000, 3.0)
        cupy.cuda.runtime.memcpyAsync(memory.ctypes.data, x.data.ptr, x.nbytes, 2, stream.ptr)
    signal.stream_set(stream, 1)
    assert signal.wait(1, timeout=20) == 1
    assert (memory == 3).all(), "what came before the signal is seen with it"
    stream.synchronize()


def test_a_stream_waits_for_the_host(signal, stream):
    source = gdcomm.pinned_zeros(1_000_000)
    x = cupy.zeros(1_000_000)
    cupy.cuda.Device().synchronize()
    signal.stream_wait(stream, 2, timeout=30)
    cupy.cuda.runtime.memcpyAsync(x.data.ptr, source.ctypes.data, x.nbytes, 1, stream.ptr)
    event = cupy.cuda.Event()
    event.record(stream)
    time.sleep(0.02)
    assert not event.done
    source[:] = 5
    signal.set(1)
    time.sleep(0.02)
    assert not event.done
    signal.set(2)
    event.synchronize()
    assert bool((x == 5).all())


def test_streams_wait_for_each_other_and_for_other_threads(signal):
    one, two = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    x = cupy.zeros(100_000)
    x[:] = 1
    warm = x + 1  # the first launch of a kernel may wait for streams
    cupy.cuda.Device().synchronize()

    def produce():  # a thread whose first CUDA call this is
        signal.stream_wait(one, 1, timeout=30)
        with one:
            x[:] = 4
        signal.stream_set(one, 2)

    thread = threading.Thread(target=produce)
    thread.start()
    signal.stream_wait(two, 2, compare="==", timeout=30)
    with two:
        y = cupy.add(x, 1, out=warm)
    signal.set(1)
    thread.join()
    two.synchronize()
    assert bool((y == 5).all())


def test_a_kernel_sets_the_value(signal):
    kind = {4: "unsigned int", 8: "unsigned long long"}[signal.device.dtype.itemsize]
    kernel = cupy.RawKernel(
        f'extern "C" __global__ void finish(volatile {kind}* signal) {{ __threadfence_system(); *signal = 9; }}',
        "finish",
    )
    kernel((1,), (1,), (signal.device,))
    assert signal.wait(9, compare="==", timeout=20) == 9


def test_comparison_is_cyclic(signal):
    stream = cupy.cuda.Stream(non_blocking=True)
    top = np.iinfo(signal.device.dtype).max
    signal.set(3)
    signal.stream_wait(stream, int(top), timeout=30)
    stream.synchronize()
    assert signal.wait(int(top), timeout=1) == 3


def test_time_outs(signal):
    stream = cupy.cuda.Stream(non_blocking=True)
    with pytest.raises(gdcomm.CommTimeoutError):
        signal.wait(1, timeout=0.01)
    begin = time.monotonic()
    signal.stream_wait(stream, 1, timeout=0.1)
    signal.stream_wait(stream, 8, compare="==", timeout=30)
    stream.synchronize()
    assert time.monotonic() - begin >= 0.1
    with pytest.raises(TimeoutError, match="released"):
        signal.check()


def test_torch_streams():
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    signal, stream = gdcomm.Signal(), torch.cuda.Stream()
    signal.stream_wait(stream, 1, timeout=30)
    signal.stream_set(stream, 2)
    signal.set(1)
    assert signal.wait(2, timeout=20) == 2
