"""Reductions on a GPU agree with NumPy bit by bit, at every alignment, and are ordered on their stream."""

from __future__ import annotations

import numpy as np
import pytest
from gpu import cupy, slow

import gdcomm
from gdcomm import devices
from gdcomm.errors import BufferSpecError

pytestmark = pytest.mark.gpu

ml_dtypes = pytest.importorskip("ml_dtypes", reason="needs ml_dtypes, for bfloat16")

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
INTEGERS = [np.dtype(code) for code in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")]
HALVES = [np.dtype("f2"), BFLOAT16]
FLOATS = [*HALVES, np.dtype("f4"), np.dtype("f8")]
COMPLEX = [np.dtype("c8"), np.dtype("c16")]
BOOL = np.dtype("?")
DTYPES = [BOOL, *INTEGERS, *FLOATS, *COMPLEX]
ARITHMETIC, ORDER, LOGICAL, BITS = ("SUM", "PROD"), ("MAX", "MIN"), ("LAND", "LOR", "LXOR"), ("BAND", "BOR", "BXOR")
CASES = [
    *((op, dtype) for dtype in (BOOL, *INTEGERS) for op in (*ARITHMETIC, *ORDER, *LOGICAL, *BITS)),
    *((op, dtype) for dtype in FLOATS for op in (*ARITHMETIC, *ORDER, *LOGICAL)),
    *((op, dtype) for dtype in COMPLEX for op in ARITHMETIC),
]
NUMPY = {
    "SUM": lambda a, b: a + b,
    "PROD": lambda a, b: a * b,
    "MAX": lambda a, b: np.where((a >= b) | (a != a), a, b),
    "MIN": lambda a, b: np.where((a <= b) | (a != a), a, b),
    "LAND": lambda a, b: (a != 0) & (b != 0),
    "LOR": lambda a, b: (a != 0) | (b != 0),
    "LXOR": lambda a, b: (a != 0) ^ (b != 0),
    "BAND": lambda a, b: a & b,
    "BOR": lambda a, b: a | b,
    "BXOR": lambda a, b: a ^ b,
}
TRUTH = {"SUM": "LOR", "MAX": "LOR", "BOR": "LOR", "PROD": "LAND", "MIN": "LAND", "BAND": "LAND", "BXOR": "LXOR"}
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 65504, 2**-24, -(2**-24), 1e-40, 3e38, -3e38, 1e-45, 5e-324]


@pytest.fixture
def device():
    return devices.cuda_device()


def content(dtype, count, seed):
    """Random bits, and for floats also special and middling values."""
    random = np.random.default_rng([seed, count])
    if dtype == BOOL:
        return random.integers(0, 2, count).astype(bool)
    bits = random.integers(0, 256, count * dtype.itemsize, np.uint8).view(dtype)
    if dtype in INTEGERS:
        return np.where(random.random(count) < 0.2, dtype.type(0), bits)
    with np.errstate(all="ignore"):
        middling = random.standard_normal(count) * 3
        if dtype in COMPLEX:
            return (middling + 1j * random.standard_normal(count)).astype(dtype)
        kinds = random.integers(0, 3, count)
        special = random.choice(SPECIAL, count).astype(dtype)
        return np.where(kinds == 0, bits, np.where(kinds == 1, special, middling.astype(dtype)))


def expected(op, lower, higher):
    dtype = lower.dtype
    if dtype == BOOL:
        op = TRUTH.get(op, op)
    if dtype in HALVES:
        lower, higher = lower.astype("f4"), higher.astype("f4")
    with np.errstate(all="ignore"):
        if dtype in COMPLEX and op == "PROD":  # in real numbers, so that every rounding is known
            result = np.empty_like(lower)
            result.real = lower.real * higher.real - lower.imag * higher.imag
            result.imag = lower.real * higher.imag + lower.imag * higher.real
            return result
        return NUMPY[op](lower, higher).astype(dtype)


def require_same(found, wanted, *about):
    """The same bits, but any NaN will do."""
    found, wanted = found.reshape(-1), wanted.reshape(-1)
    if found.dtype in COMPLEX:
        found, wanted = (x.view(f"f{x.itemsize // 2}") for x in (found, wanted))
    word = f"u{found.itemsize}"
    different = found.view(word) != wanted.view(word)
    if found.dtype in FLOATS:
        with np.errstate(all="ignore"):
            different &= (found == found) | (wanted == wanted)
    assert not different.any(), (*about, np.flatnonzero(different)[:5], found[different][:5], wanted[different][:5])


class Place:
    """Elements at an offset from a multiple of 16 bytes, in device or page-locked memory, with guards around."""

    def __init__(self, device, values, offset=0, pinned=False):
        self.values, self.start, nbytes = values, 256 + offset, values.nbytes
        filled = np.full(nbytes + 544, 0xEE, np.uint8)
        filled[self.start : self.start + nbytes] = values.view(np.uint8)
        if pinned:
            self.memory = gdcomm.pinned_empty(filled.nbytes, np.uint8)
            self.memory[...] = filled
            address = device.kernel_address(self.memory.ctypes.data, filled.nbytes)
        else:
            self.memory = cupy.asarray(filled)
            address = self.memory.data.ptr
        assert address % 16 == 0
        whole = device.find(self.memory if not pinned else cupy.empty(1, np.uint8))
        self.buffer = whole._replace(
            ptr=address + self.start, nbytes=nbytes, dtype=values.dtype, shape=values.shape, owner=self.memory
        )

    def read(self):
        """The elements now; nothing beside them was written."""
        cupy.cuda.get_current_stream().synchronize()
        filled = cupy.asnumpy(self.memory)
        end = self.start + self.values.nbytes
        assert (filled[: self.start] == 0xEE).all()
        assert (filled[end:] == 0xEE).all()
        return filled[self.start : end].view(self.values.dtype)


@pytest.mark.parametrize(("op", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("pinned", [False, True], ids=["device", "pinned"])
def test_reduce_agrees_with_numpy(device, op, dtype, pinned):
    assert device.reduces(op, dtype)
    for count in (0, 1, 3, 1000, (1 << 20) + 7):
        lower, higher = content(dtype, count, 1), content(dtype, count, 2)
        wanted = expected(op, lower, higher)
        offsets = (0, dtype.itemsize) if count > 1000 else (0, dtype.itemsize, dtype.alignment, 8)
        for offset in offsets:
            a, b = Place(device, lower), Place(device, higher, offset, pinned)
            out = Place(device, np.zeros_like(lower))
            device.reduce(op, out.buffer, a.buffer, b.buffer)
            require_same(out.read(), wanted, count, offset)
            device.reduce(op, a.buffer, a.buffer, b.buffer)
            require_same(a.read(), wanted, count, offset, "in place of the lower")
            require_same(b.read(), higher, count, offset, "not written")
            a = Place(device, lower)
            device.reduce(op, b.buffer, a.buffer, b.buffer)
            require_same(b.read(), wanted, count, offset, "in place of the higher")
            device.reduce(op, a.buffer, a.buffer, a.buffer)
            require_same(a.read(), expected(op, lower, lower), count, offset, "all one")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pinned", [False, True], ids=["device", "pinned"])
def test_every_alignment(device, dtype, pinned):
    for count in (5, 333):
        lower, higher = content(dtype, count, 3), content(dtype, count, 4)
        wanted = expected("SUM", lower, higher)
        for first in range(0, 16, dtype.alignment):
            for second in range(0, 16, dtype.alignment):
                a, b = Place(device, lower, first), Place(device, higher, second, pinned)
                out = Place(device, np.zeros_like(lower), (first + (second if count == 5 else 0)) % 16)
                device.reduce("SUM", out.buffer, a.buffer, b.buffer)
                require_same(out.read(), wanted, count, first, second)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("op", [*ARITHMETIC, *ORDER])
def test_every_half_is_computed_in_float32_and_rounded_once(device, dtype, op):
    every = np.arange(1 << 16, dtype=np.uint16)
    for seed in range(16):
        lower, higher = every.view(dtype), np.random.default_rng(seed).permutation(every).view(dtype)
        a, b = Place(device, lower), Place(device, higher)
        device.reduce(op, a.buffer, a.buffer, b.buffer)
        require_same(a.read(), expected(op, lower, higher), seed)


def test_bytes_that_are_no_truth_values_count_as_true(device):
    strange = np.array([0, 1, 2, 255, 128], np.uint8)
    a, b = Place(device, strange.view(bool)), Place(device, np.zeros(5, bool))
    for op in ("LOR", "BXOR", "SUM"):
        out = Place(device, np.zeros(5, bool))
        device.reduce(op, out.buffer, a.buffer, b.buffer)
        assert out.read().view(np.uint8).tolist() == [0, 1, 1, 1, 1]


def test_the_call_is_ordered_on_the_stream_of_out_and_does_not_wait(device):
    x = cupy.zeros(1 << 20, np.float32)
    x += 3  # compiled, and so is the next
    device.reduce("SUM", *[device.find(x)] * 3)
    for stream in (cupy.cuda.Stream(), cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream.null):
        with stream:
            x, y = cupy.zeros(1 << 20, np.float32), cupy.zeros(1 << 20, np.float32)
            out = cupy.zeros(1 << 20, np.float32)
            stream.synchronize()
            slow()
            x += 3
            y += 4
        device.reduce("SUM", *(device.find(array, stream) for array in (out, x, y)))
        assert not stream.done
        with stream:
            x *= 0
            result = out + 1
        stream.synchronize()
        assert (result.get() == 8).all()


def test_many_streams_at_once(device):
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(8)]
    values = [content(np.dtype("i4"), 100_003, seed) for seed in range(8)]
    arrays, slots = [], []
    for stream, value in zip(streams, values, strict=True):
        with stream:
            arrays.append(cupy.asarray(value))
        slots.append(gdcomm.pinned_empty(value.shape, value.dtype))
        slots[-1][...] = value[::-1]
    for _ in range(5):
        for stream, array, slot in zip(streams, arrays, slots, strict=True):
            buffer = device.find(array, stream)
            address = device.kernel_address(slot.ctypes.data, slot.nbytes)
            device.reduce("SUM", buffer, buffer, buffer._replace(ptr=address, owner=slot))
    for stream, array, value in zip(streams, arrays, values, strict=True):
        stream.synchronize()
        np.testing.assert_array_equal(array.get(), value + 5 * value[::-1])


def test_a_captured_call_can_be_replayed(device):
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x, y = cupy.ones(1000, np.float64), cupy.full(1000, 2.0)
    buffers = device.find(x, stream), device.find(x, stream), device.find(y, stream)
    device.reduce("SUM", *buffers)  # compiled
    stream.synchronize()
    with stream:
        stream.begin_capture()
        device.reduce("SUM", *buffers)
        graph = stream.end_capture()
        for _ in range(3):
            graph.launch(stream)
    stream.synchronize()
    assert (x.get() == 9).all()


def test_more_elements_than_32_bits_count(device):
    count = (1 << 32) + 5
    if device.free_bytes() < 6 * count:
        pytest.skip("needs 24 GiB of free device memory")
    for shift in (0, 1):  # wide words and single bytes
        x, y = cupy.full(count + 1, 250, np.uint8), cupy.full(count + 1, 9, np.uint8)
        y[-1] = y[0] = 4
        x_buffer, y_buffer = device.find(x[:count]), device.find(y[shift : shift + count])
        device.reduce("SUM", x_buffer, x_buffer, y_buffer)
        y += 250  # wraps
        assert bool((x[:count] == y[shift : shift + count]).all())
        assert int(x[-1]) == 250
        del x, y, x_buffer, y_buffer
        cupy.get_default_memory_pool().free_all_blocks()


def test_what_does_not_fit_together_is_refused(device):
    x = cupy.arange(32, dtype=np.float32)
    whole, part = device.find(x[:8]), device.find(x[4:12])
    with pytest.raises(BufferSpecError, match="share a part"):
        device.reduce("SUM", whole, whole, part)
    odd = whole._replace(ptr=whole.ptr + 2)
    with pytest.raises(BufferSpecError, match="not aligned to 4 bytes"):
        device.reduce("SUM", odd, odd, odd)
    with pytest.raises(BufferSpecError, match="no kernel reduces float32 by BAND"):
        device.reduce("BAND", whole, whole, whole)
