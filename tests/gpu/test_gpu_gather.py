"""take and put on a GPU, from and to every kind of memory."""

from __future__ import annotations

import numpy as np
import pytest
from gpu import cupy, slow

import gdcomm

pytestmark = pytest.mark.gpu

RECORD = np.dtype([("a", "i1"), ("b", "<f8"), ("c", "S3")])
DTYPES = ["?", "i1", "<i4", "<f8", "<c16", "<f2"]
KINDS = ["pinned", "mapped", "registered", "pageable", "device"]


def content(dtype, shape):
    raw = np.random.default_rng(3).integers(0, 2 if dtype == "?" else 100, (*shape, np.dtype(dtype).itemsize), np.uint8)
    return raw.view(dtype).reshape(shape)


@pytest.fixture(params=KINDS)
def place(request):
    """A function that puts values into memory of one kind."""
    registered = []

    def put(values):
        if request.param == "pageable":
            return values.copy()
        if request.param == "device":
            return cupy.asarray(values)
        if request.param == "mapped":
            made = gdcomm.mapped_empty(values.shape, values.dtype)
            made.host[...] = values
            return made
        if request.param == "pinned":
            made = gdcomm.pinned_empty(values.shape, values.dtype)
            made[...] = values
            return made
        made = np.empty(values.nbytes + 8192, np.uint8)[4096 - 4096 % 64 :][: values.nbytes].view(values.dtype)
        made = made.reshape(values.shape)
        made[...] = values
        gdcomm.register(made)
        registered.append(made)
        return made

    yield put
    cupy.cuda.get_current_stream().synchronize()
    for array in registered:
        gdcomm.unregister(array)


def host(table):
    return cupy.asnumpy(table) if isinstance(table, cupy.ndarray) else getattr(table, "host", table)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row", [(), (1,), (3,), (16,), (128,), (2, 1000)])
def test_take_and_put_agree_with_numpy(place, dtype, row):
    values = content(dtype, (257, *row))
    table = place(values)
    index = np.random.default_rng(1).integers(-257, 257, (40, 7))
    for chosen in (index, index.astype("i4"), cupy.asarray(index), cupy.asarray(index.astype("i4"))):
        for method in ("auto", "gather", "copy"):
            found = gdcomm.take(table, chosen, method=method)
            assert isinstance(found, cupy.ndarray)
            np.testing.assert_array_equal(found.get(), values[index])
    for mode in ("clip", "wrap"):
        found = gdcomm.take(table, cupy.asarray(index * 2), mode=mode)
        np.testing.assert_array_equal(found.get(), np.take(values, index * 2, axis=0, mode=mode))
    new = content(dtype, (280, *row))[::-1].reshape(40, 7, *row)
    expected = values.copy()
    expected[index] = new
    gdcomm.put(table, cupy.asarray(index), cupy.asarray(np.ascontiguousarray(new)))
    np.testing.assert_array_equal(host(table), expected)
    gdcomm.put(table, index[0], cupy.asarray(values[5]), unique_indices=True)
    expected[index[0]] = values[5]
    np.testing.assert_array_equal(host(table), expected)


@pytest.mark.parametrize("kind", ["pinned", "pageable"])
def test_rows_out_of_range(kind):
    values = np.arange(12, dtype="f4").reshape(4, 3)
    table = values.copy()
    if kind == "pinned":
        table = gdcomm.pinned_empty((4, 3), "f4")
        table[...] = values
    index = cupy.asarray([0, 4, -5, -1, 2**40, -(2**40)])
    found = gdcomm.take(table, index).get()
    assert np.isnan(found[[1, 2, 4, 5]]).all()
    np.testing.assert_array_equal(found[[0, 3]], values[[0, 3]])
    with pytest.raises(IndexError, match="out of range"):
        gdcomm.take(table, index, mode="raise")
    with pytest.raises(IndexError, match="out of range"):
        gdcomm.take(table, [4])
    gdcomm.put(table, index, cupy.full((6, 3), -1, "f4"))
    np.testing.assert_array_equal(table[:, 0], [-1, 3, 6, -1])


def test_records_and_unaligned_rows():
    block = gdcomm.pinned_empty(5000, np.uint8)
    block[:] = np.arange(5000) % 251
    for offset, width, stride in ((1, 7, 7), (3, 16, 17), (16, 32, 48), (8, 24, 24), (4, 12, 20)):
        rows = np.lib.stride_tricks.as_strided(block[offset:], (100, width), (stride, 1))
        np.testing.assert_array_equal(gdcomm.take(rows, [0, 99, 50]).get(), rows[[0, 99, 50]])
        np.testing.assert_array_equal(gdcomm.take(rows[::-1], [0, 99, 50]).get(), rows[::-1][[0, 99, 50]])
    table = gdcomm.pinned_empty(10, RECORD)
    table[...] = content(RECORD, (10,))
    raw = table.view(np.uint8).reshape(10, -1)
    np.testing.assert_array_equal(gdcomm.take(raw, [9, 1]).get(), raw[[9, 1]])


def test_the_call_is_ordered_on_its_stream():
    table = gdcomm.pinned_empty(1_000_000)
    table[:] = np.arange(1_000_000)
    for stream in (cupy.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)):
        with stream:
            busy = cupy.ones((3000, 3000), "f")
            index = cupy.zeros(100_000, np.int64)
            stream.synchronize()
            for _ in range(8):
                busy = busy @ busy * 1e-4
            index += 7
        found = gdcomm.take(table, index, stream=stream)
        with stream:
            index *= 0
            result = found * 2
        stream.synchronize()
        assert (result.get() == 14).all()
        target = gdcomm.pinned_zeros(10)
        with stream:
            for _ in range(8):
                busy = busy @ busy * 1e-4
            values = cupy.full(2, 5.0)
            gdcomm.put(target, [1, 2], values)
        np.testing.assert_array_equal(target[:4], [0, 5, 5, 0])


def test_torch():
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    table = torch.arange(3000, dtype=torch.float32).reshape(1000, 3)
    for source in (table, table.pin_memory(), table.cuda()):
        index = torch.tensor([[5, 999], [-1, 0]], device="cuda")
        found = gdcomm.take(source, index)
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found.cpu(), table[index.cpu()])
        assert torch.equal(torch.as_tensor(gdcomm.take(source, [3, 4])).cpu(), table[3:5])
    half = table.to(torch.bfloat16).pin_memory()
    assert torch.equal(gdcomm.take(half, torch.tensor([7], device="cuda")).cpu(), half[7:8])
    stream = torch.cuda.Stream()
    pinned = table.pin_memory()
    with torch.cuda.stream(stream):
        found = gdcomm.take(pinned, torch.tensor([2], device="cuda")) + 1
        gdcomm.put(pinned, torch.tensor([0], device="cuda"), found)
    assert torch.equal(pinned[0], table[2] + 1)


def test_a_large_memory_mapped_file(tmp_path):
    np.save(tmp_path / "rows.npy", np.arange(2_000_000, dtype="f4").reshape(-1, 100))
    table = np.load(tmp_path / "rows.npy", mmap_mode="r")
    index = np.random.default_rng(0).integers(0, len(table), 15_000)
    np.testing.assert_array_equal(gdcomm.take(table, index).get(), table[index])
    np.testing.assert_array_equal(gdcomm.take(table, index, method="copy").get(), table[index])


@pytest.mark.parametrize("block", [True, False])
def test_host_values_may_be_overwritten_after_the_call(block):
    count = 1 << 20
    values = gdcomm.pinned_empty(count, np.float32)
    values[...] = np.arange(count)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        table = cupy.zeros(count, np.float32)
        slow()
        gdcomm.put(table, np.arange(count), values, stream=stream, block=block)
        values[...] = -1
        np.testing.assert_array_equal(table.get(), np.arange(count))
