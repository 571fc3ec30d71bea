"""Copies between every two kinds of memory on a real GPU, through every library that is installed."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest
from gpu import cupy, slow

import gdcomm

pytestmark = pytest.mark.gpu

SIZES = [0, 1, 7, 1000, 8193, 300_001, 5_000_003]  # float64: to 40 MB, several slots
DTYPES = ["?", "i1", "u2", "i4", "e", "f", "d", "F", "D"]


def values(n, dtype="d"):
    base = np.arange(n) * 7 % 251
    return (base % 2 == 0) if np.dtype(dtype) == bool else base.astype(dtype)


def managed(n, dtype="d"):
    """Managed memory as a NumPy array."""
    dtype = np.dtype(dtype)
    memory = cupy.cuda.malloc_managed(max(n, 1) * dtype.itemsize)
    raw = (ctypes.c_ubyte * (n * dtype.itemsize)).from_address(memory.ptr)
    raw.memory = memory
    return np.frombuffer(raw, dtype)


HOST = {
    "pageable": lambda n, dtype: np.empty(n, dtype),
    "pinned": lambda n, dtype: gdcomm.pinned_empty(n, dtype),
    "write-combined": lambda n, dtype: gdcomm.pinned_empty(n, dtype, write_combined=True),
    "cupyx pinned": lambda n, dtype: pytest.importorskip("cupyx").empty_pinned(n, dtype),
    "managed": managed,
}


@pytest.mark.parametrize("kind", HOST)
@pytest.mark.parametrize("n", SIZES)
def test_host_kinds_both_ways(kind, n):
    for dtype in DTYPES if n < 100_000 else ["f", "d"]:
        host, out = HOST[kind](n, dtype), HOST[kind](n, dtype)
        host[...] = values(n, dtype)
        out[...] = 0
        x = cupy.zeros(n, dtype)
        gdcomm.copy(x, host)
        host[...] = 0  # allowed from now on
        np.testing.assert_array_equal(x.get(), values(n, dtype))
        gdcomm.copy(out, x)
        np.testing.assert_array_equal(out, values(n, dtype))


@pytest.mark.parametrize("n", [1000, 5_000_003])
def test_registered_memory_and_its_seams(n):
    host, x = values(n), cupy.zeros(n)
    page = 512 * 100
    with gdcomm.registered(host[: n // 2]):
        gdcomm.copy(x, host)
        np.testing.assert_array_equal(x.get(), values(n))
        with gdcomm.registered(host):
            x *= 2
            gdcomm.copy(host, x)
            np.testing.assert_array_equal(host, 2 * values(n))
            handle = gdcomm.copy(x[page:], host[:-page] if n > page else host[:0], block=False) if n > page else None
    if handle is not None:
        handle.synchronize()
        np.testing.assert_array_equal(x[page:].get(), 2 * values(n)[:-page])


def test_memory_mapped_file(tmp_path):
    values(3_000_000).tofile(tmp_path / "data")
    x = gdcomm.to_device(np.memmap(tmp_path / "data", np.float64, "r"))
    np.testing.assert_array_equal(x.get(), values(3_000_000))
    x += 1
    target = np.memmap(tmp_path / "data", np.float64, "r+")
    gdcomm.copy(target, x)
    target.flush()
    np.testing.assert_array_equal(np.fromfile(tmp_path / "data"), values(3_000_000) + 1)


LAYOUTS = [
    lambda a: a,
    lambda a: a.T,
    lambda a: a[1::2],
    lambda a: a[:, 1::2],
    lambda a: a[:, :-5],
    lambda a: a[::-1, ::-1],
    lambda a: a.T[::-1, 1:],
]


@pytest.mark.parametrize("dtype", ["u1", "f", "D"])
@pytest.mark.parametrize("shape", [(6, 40), (200, 803)])
@pytest.mark.parametrize("pin", [False, True])
def test_every_layout_keeps_the_logical_content(shape, dtype, pin):
    rng = np.random.default_rng(0)
    whole = (rng.random(shape) * 200).astype(dtype)
    host = gdcomm.pinned_array(whole) if pin else whole
    for of in LAYOUTS:
        for to in LAYOUTS:
            source = of(whole)
            big = tuple(2 * n + 12 for n in source.shape)
            if to in (LAYOUTS[1], LAYOUTS[6]):
                big = big[::-1]
            cut = tuple(slice(n) for n in source.shape)
            expected = np.zeros(big, dtype)
            to(expected)[cut] = source
            up, across, down = cupy.zeros(big, dtype), cupy.zeros(big, dtype), np.zeros(big, dtype)
            gdcomm.copy(to(up)[cut], of(host))
            np.testing.assert_array_equal(up.get(), expected)
            gdcomm.copy(to(across)[cut], of(cupy.asarray(whole)))
            np.testing.assert_array_equal(across.get(), expected)
            if pin:
                down = gdcomm.pinned_array(down)
            gdcomm.copy(to(down)[cut], to(up)[cut])
            np.testing.assert_array_equal(down, expected)


def test_overlapping_device_arrays():
    x = cupy.arange(100_000.0)
    gdcomm.copy(x[1:], x[:-1])
    np.testing.assert_array_equal(x.get(), np.r_[0, np.arange(99_999.0)])
    gdcomm.copy(x, x[::-1])
    np.testing.assert_array_equal(x.get(), np.r_[0, np.arange(99_999.0)][::-1])


@pytest.mark.parametrize("kind", ["pageable", "pinned"])
@pytest.mark.parametrize("n", [5, 2_000_000])
def test_a_copy_is_ordered_on_its_stream(kind, n):
    for stream in (cupy.cuda.Stream(), cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream.null):
        host, out = HOST[kind](n, "d"), HOST[kind](n, "d")
        host[...] = values(n)
        with stream:
            x = cupy.empty(n)
        cupy.cuda.Stream.null.synchronize()
        with stream:
            kept = slow()
            x.fill(-1)  # must not come after the copy
        gdcomm.copy(x, host, stream=stream)
        host[...] = 9
        with stream:
            kept = slow()
            x += 1
        gdcomm.copy(out, x, stream=stream)
        with stream:
            x.fill(3)  # must not be seen
        np.testing.assert_array_equal(out, values(n) + 1)
        del kept


def test_block_false_tells_when_it_is_done():
    n = 4_000_000
    host, out = gdcomm.pinned_array(values(n)), gdcomm.pinned_zeros(n)
    x = cupy.zeros(n)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        kept = slow()
        up = gdcomm.copy(x, host, stream=stream, block=False)
        down = gdcomm.copy(out, x, stream=stream, block=False)
        down.synchronize()
        assert up.query() and down.query()
    np.testing.assert_array_equal(out, values(n))
    del kept


def test_torch():
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch can't use the GPU: install a build for CUDA")
    for n in (3, 3_000_000):
        for kind in (torch.float32, torch.bfloat16, torch.int64):
            cpu = (torch.arange(n) % 100).to(kind)
            for source in (cpu, cpu.pin_memory()):
                x = gdcomm.to_device(source)
                assert (x.is_cuda, x.dtype) == (True, kind)
                out = torch.zeros_like(cpu)
                assert gdcomm.to_host(x, out=out) is out
                assert torch.equal(out, cpu)
            if kind != torch.bfloat16:
                y = cupy.zeros(n, cpu.numpy().dtype)
                gdcomm.copy(y, x)
                assert (gdcomm.to_host(y) == cpu.numpy()).all()
                gdcomm.copy(x, gdcomm.to_host(y) + 1)
                assert torch.equal(x.cpu(), cpu + 1)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        t = torch.zeros(1000, 2000, device="cuda")
        for _ in range(20):
            t += 1
        host = gdcomm.to_host(t.t())
    assert host.shape == (2000, 1000)
    assert (host == 20).all()
    with pytest.raises(gdcomm.BufferSpecError, match="detach"):
        gdcomm.to_device(torch.ones(3, requires_grad=True))


def test_jax_and_numba():
    jax = pytest.importorskip("jax", reason="needs JAX")
    x = jax.numpy.arange(100_000, dtype="float32") * 2
    np.testing.assert_array_equal(gdcomm.to_host(x), np.arange(100_000, dtype="f") * 2)
    y = cupy.zeros(100_000, "f")
    gdcomm.copy(y, x)
    np.testing.assert_array_equal(y.get(), np.arange(100_000, dtype="f") * 2)
    with pytest.raises(gdcomm.BufferSpecError, match="read-only"):
        if next(iter(x.devices())).platform == "cpu":
            raise gdcomm.BufferSpecError("a JAX without GPU support is read-only too")
        gdcomm.copy(x, y)
    cuda = pytest.importorskip("numba.cuda", reason="needs Numba")
    z = cuda.device_array(100_000, np.float32)
    gdcomm.copy(z, y)
    np.testing.assert_array_equal(z.copy_to_host(), y.get())


def test_new_arrays():
    for n in SIZES:
        host = values(n).reshape(1, n)
        x = gdcomm.to_device(host)
        assert isinstance(x, cupy.ndarray)
        back = gdcomm.to_host(x)
        np.testing.assert_array_equal(back, host)
        back[...] = 5  # it is ours
        del back
    f = gdcomm.to_device(np.asfortranarray(values(600_000).reshape(1000, 600)))
    assert f.flags.f_contiguous
    assert gdcomm.to_host(f).flags.f_contiguous
    np.testing.assert_array_equal(gdcomm.to_host(f), values(600_000).reshape(1000, 600))
    stream = cupy.cuda.Stream(non_blocking=True)
    y = gdcomm.to_device(values(2_000_000), stream=stream)
    with stream:
        y += 1
    np.testing.assert_array_equal(gdcomm.to_host(y, stream=stream), values(2_000_000) + 1)


def test_disagreement_is_refused():
    x = cupy.zeros((3, 4))
    for source in (np.zeros((4, 3)), np.zeros((3, 4), "f")):
        with pytest.raises(gdcomm.BufferSpecError, match="dst has"):
            gdcomm.copy(x, source)


def test_threads_may_copy_at_once():
    wrong = []

    def work(seed):
        with cupy.cuda.Stream(non_blocking=True):
            for i in range(4):
                expected = values(1_500_000) + seed + i
                x = gdcomm.to_device(expected)
                out = np.empty_like(expected)
                gdcomm.copy(out, x)
                if not ((out == expected).all() and (gdcomm.to_host(x) == expected).all()):
                    wrong.append((seed, i))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("nbytes", [1, 6, 100, 4096, 100_000])
@pytest.mark.parametrize("kinds", ["pageable up", "pinned up", "pageable down", "pinned down", "across"])
def test_batches(kinds, nbytes):
    rng = np.random.default_rng(0)
    count = 300
    content = rng.integers(0, 255, (count, nbytes), "u1")
    whole = np.zeros((count, nbytes + 3), "u1")  # rows at odd addresses
    if "pinned" in kinds:
        content, whole = gdcomm.pinned_array(content), gdcomm.pinned_array(whole)
    device = cupy.zeros((count, nbytes), "u1")
    slow()
    if "up" in kinds:
        gdcomm.copy_many(list(device), list(content[::-1]))
        got = device.get()
    elif "down" in kinds:
        gdcomm.copy_many(list(whole[:, 1:-2]), list(cupy.asarray(content[::-1])))
        got = whole[:, 1:-2]
        assert not whole[:, 0].any() and not whole[:, -2:].any()
    else:
        source = cupy.asarray(content)
        gdcomm.copy_many(list(device), list(source[::-1]))
        source.fill(0)
        got = device.get()
    np.testing.assert_array_equal(got, np.asarray(content)[::-1])


def test_a_mixture():
    rng = np.random.default_rng(1)
    kept = [rng.random(n) for n in (1, 17, 1000, 70_000, 2_000_000)]
    dsts, srcs, expected = [], [], []
    for v in kept:
        pin = gdcomm.pinned_array(v)
        near = cupy.asarray(v)
        for make, source in ((cupy.zeros, v), (cupy.zeros, pin), (np.zeros, near), (cupy.zeros, near)):
            dsts += [make(v.shape), make(v[::3].shape), make((2 * v.size,))[::2]]
            srcs += [source, source[::3], source]
            expected += [v, v[::3], v]
    gdcomm.copy_many(dsts, srcs)
    for dst, v in zip(dsts, expected, strict=True):
        np.testing.assert_array_equal(cupy.asnumpy(dst), v)


@pytest.mark.skipif(cupy.cuda.runtime.getDeviceCount() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("n", [10, 3_000_000])
def test_between_gpus(n):
    x = gdcomm.to_device(values(n))
    with cupy.cuda.Device(1):
        y, strided = cupy.zeros(n), cupy.zeros(2 * n)
    gdcomm.copy(y, x)
    gdcomm.copy(strided[::2], y)
    x.fill(0)
    gdcomm.copy(x[::-1], strided[::2])
    np.testing.assert_array_equal(x.get(), values(n)[::-1])
    np.testing.assert_array_equal(gdcomm.to_host(y), values(n))
    out = np.zeros(n)
    gdcomm.copy(out, y)
    np.testing.assert_array_equal(out, values(n))
    gdcomm.copy_many([x, y], [y, gdcomm.to_host(x)])
    np.testing.assert_array_equal(x.get(), values(n))
