"""prefetch and offload on a GPU, with CuPy, PyTorch and its DataLoader."""

from __future__ import annotations

import gc
import threading
import time

import numpy as np
import pytest
from gpu import cupy

import gdcomm

pytestmark = pytest.mark.gpu

N = 2_000_000  # 16 MB
SLOW = cupy.RawKernel(
    r"""
extern "C" __global__ void slow(const double* x, double* out, long long n, long long cycles) {
    long long end = clock64() + cycles;
    while (clock64() < end) {}
    double lowest = 1e300, highest = -1e300;
    for (long long i = threadIdx.x; i < n; i += blockDim.x) {
        lowest = fmin(lowest, x[i]); highest = fmax(highest, x[i]);
    }
    atomicAdd(out, lowest); atomicAdd(out + 1, highest);
}
""",
    "slow",
)


def consume(x, out, stream):
    """Keep the stream busy for a millisecond, then look at all of x."""
    with stream:
        SLOW((1,), (256,), (x, out, np.int64(x.size), np.int64(2_000_000)))


def pinned(i):
    array = gdcomm.pinned_empty(N)
    array[:] = i
    return array


SOURCES = {
    "pageable": lambda n: (np.full(N, float(i)) for i in range(n)),
    "pinned": lambda n: (pinned(i) for i in range(n)),
    "list": lambda n: [pinned(i) for i in range(n)],
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", ["null", "blocking", "non-blocking"])
@pytest.mark.parametrize("depth", [1, 3])
def test_a_slow_consumer_that_never_waits_sees_whole_batches(source, kind, depth):
    stream = {"null": lambda: cupy.cuda.Stream.null, "blocking": cupy.cuda.Stream}.get(
        kind, lambda: cupy.cuda.Stream(non_blocking=True)
    )()
    results = []
    with stream:
        for x in gdcomm.prefetch(SOURCES[source](12), depth=depth):
            assert isinstance(x, cupy.ndarray)
            out = cupy.zeros(2)
            consume(x, out, stream)
            results.append(out)
        del x
    stream.synchronize()
    for i, out in enumerate(results):
        np.testing.assert_array_equal(out.get(), [256 * i, 256 * i])


def test_a_reused_buffer_is_copied_before_it_changes():
    def source(buffer):
        for i in range(10):
            buffer[:] = i
            yield buffer
            buffer[:] = -1

    for buffer in (np.empty(N), gdcomm.pinned_empty(N)):
        means = [x.mean() for x in gdcomm.prefetch(source(buffer))]
        assert [float(mean) for mean in means] == list(range(10))


def test_memory_stays_bounded():
    list(gdcomm.prefetch(np.zeros(N) for _ in range(3)))
    gc.collect()
    pool = cupy.get_default_memory_pool()
    before = pool.total_bytes()
    stream = cupy.cuda.Stream(non_blocking=True)
    out = cupy.zeros(2)
    for x in gdcomm.prefetch([pinned(1)] * 60):
        consume(x, out, stream)
    stream.synchronize()
    assert pool.total_bytes() - before <= 8 * N * 8


def test_batches_that_are_kept_stay_whole():
    kept = list(gdcomm.prefetch(np.full(N, float(i)) for i in range(8)))
    assert [(float(x.min()), float(x.max())) for x in kept] == [(i, i) for i in range(8)]


def test_structures_dtypes_and_layouts():
    base = np.arange(24.0).reshape(4, 6)
    arrays = [np.asfortranarray(base), base[::-1, ::2], np.array(5.0), np.zeros((0, 3)), base.astype("e"), base > 3]
    item = {"all": tuple(arrays), "text": "t", "on": cupy.arange(3)}
    (found,) = gdcomm.prefetch([item])
    assert found["text"] == "t"
    assert found["on"] is not item["on"]  # a copy: the source may write to its own again
    np.testing.assert_array_equal(found["on"].get(), [0, 1, 2])
    for expected, x in zip(arrays, found["all"], strict=True):
        assert x.dtype == expected.dtype
        np.testing.assert_array_equal(x.get(), expected)


def test_device_arrays_of_the_source_are_ordered():
    def source():
        for i in range(5):
            with cupy.cuda.Stream(non_blocking=True) as side:
                x = cupy.zeros(N)
                busy = cupy.ones((2000, 2000), "f")
                for _ in range(4):
                    busy = busy @ busy * 1e-4
                x += i
                keep.append((side, x))
                yield x

    keep = []
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        means = [x.mean() for x in gdcomm.prefetch(source())]
        assert [float(mean) for mean in means] == list(range(5))


def test_threads_end():
    for _ in gdcomm.prefetch(np.zeros(N) for _ in range(10**6)):
        break
    gc.collect()
    deadline = time.monotonic() + 10
    while any(t.name == "gdcomm-prefetch" for t in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(t.name == "gdcomm-prefetch" for t in threading.enumerate())


@pytest.mark.parametrize("snapshot", [True, False])
def test_offload(snapshot):
    def source():
        x = cupy.zeros(N)
        for i in range(8):
            if snapshot:
                x *= 0
                x += i
            else:
                x = cupy.full(N, float(i))
            yield x, x[::3], i

    for i, (whole, part, number) in enumerate(gdcomm.offload(source(), snapshot=snapshot)):
        assert number == i
        assert isinstance(whole, np.ndarray)
        assert (whole == i).all()
        assert (part == i).all()


def test_there_and_back():
    def work():
        for x in gdcomm.prefetch(np.full(N, float(i)) for i in range(10)):
            yield x * 2

    for i, y in enumerate(gdcomm.offload(work())):
        assert (y == 2 * i).all()


def test_torch():
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    stream = torch.cuda.Stream()
    cpu = [torch.full((500, 400), float(i)) for i in range(6)]
    items = [
        (x.pin_memory(), {"label": torch.tensor([i, i + 1]), "half": x.to(torch.bfloat16)}) for i, x in enumerate(cpu)
    ]
    with torch.cuda.stream(stream):
        results = []
        for x, more in gdcomm.prefetch(items):
            assert x.is_cuda
            assert (more["label"].dtype, more["half"].dtype) == (torch.int64, torch.bfloat16)
            results.append((x.sum(), more["label"].sum(), more["half"].float().mean()))
    stream.synchronize()
    for i, (total, label, half) in enumerate(results):
        assert (float(total), int(label), float(half)) == (i * 200_000, 2 * i + 1, i)
    parameter = torch.ones(3, requires_grad=True)
    on_gpu = torch.ones(3, device="cuda", requires_grad=True)
    (found,) = gdcomm.prefetch([(parameter, on_gpu, torch.zeros(0, 3), torch.tensor(True))])
    assert found[0].is_cuda
    assert not found[0].requires_grad
    assert found[1] is not on_gpu and not found[1].requires_grad
    assert found[1].is_cuda and bool((found[1] == 1).all())
    assert tuple(found[2].shape) == (0, 3)
    assert bool(found[3])
    back = list(gdcomm.offload(x.cuda() + 1 for x in cpu))
    assert all((y == i + 1).all() for i, y in enumerate(back))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("pin", [False, True])
def test_torch_data_loader(workers, pin):
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    data = torch.arange(40_000, dtype=torch.float32).reshape(400, 100)
    labels = torch.arange(400)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(data, labels),
        batch_size=32,
        num_workers=workers,
        pin_memory=pin,
        multiprocessing_context="spawn" if workers else None,  # never fork after CUDA
    )
    iterator = gdcomm.prefetch(loader)
    assert len(iterator) == 13
    seen = []
    for x, y in iterator:
        assert x.is_cuda
        assert y.is_cuda
        seen.append((x.sum(), y.sum(), len(x)))
    assert sum(n for _, _, n in seen) == 400
    assert sum(float(total) for total, _, _ in seen) == float(data.double().sum())
    assert sum(int(total) for _, total, _ in seen) == int(labels.sum())
