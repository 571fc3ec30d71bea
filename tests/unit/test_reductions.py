"""Reductions of the emulated device agree with exact arithmetic and with MPI, and are ordered on their stream."""

from __future__ import annotations

import gc
import operator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from gdcomm import reductions
from gdcomm.devices.base import Buffer
from gdcomm.devices.emulated import EmulatedDevice
from gdcomm.devices.memory import DeviceProperties
from gdcomm.errors import BufferSpecError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
INTEGERS = [np.dtype(code) for code in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")]
HALVES = [np.dtype("f2"), BFLOAT16]
FLOATS = [*HALVES, np.dtype("f4"), np.dtype("f8")]
COMPLEX = [np.dtype("c8"), np.dtype("c16")]
BOOL = np.dtype("?")
DTYPES = [BOOL, *INTEGERS, *FLOATS, *COMPLEX]
OPS = ["SUM", "PROD", "MAX", "MIN", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR"]
# Written out, not taken from the code: + where there is a kernel.
TABLE = """
            SUM PROD MAX MIN LAND LOR LXOR BAND BOR BXOR
bool         +   +    +   +   +    +   +    +    +   +
int8         +   +    +   +   +    +   +    +    +   +
int16        +   +    +   +   +    +   +    +    +   +
int32        +   +    +   +   +    +   +    +    +   +
int64        +   +    +   +   +    +   +    +    +   +
uint8        +   +    +   +   +    +   +    +    +   +
uint16       +   +    +   +   +    +   +    +    +   +
uint32       +   +    +   +   +    +   +    +    +   +
uint64       +   +    +   +   +    +   +    +    +   +
float16      +   +    +   +   +    +   +    -    -   -
bfloat16     +   +    +   +   +    +   +    -    -   -
float32      +   +    +   +   +    +   +    -    -   -
float64      +   +    +   +   +    +   +    -    -   -
complex64    +   +    -   -   -    -   -    -    -   -
complex128   +   +    -   -   -    -   -    -    -   -
"""
KERNELS = {
    (op, words[0]): words[1 + i] == "+"
    for words in (line.split() for line in TABLE.strip().splitlines()[1:])
    for i, op in enumerate(OPS)
}
CASES = [(op, dtype) for dtype in DTYPES for op in OPS if KERNELS[op, dtype.name]]
OTHERS = [">i4", ">f2", ">c8", "m8[s]", "M8[s]", "S4", "U1", "V2", "O", "g", "G", [("a", "f4")], ml_dtypes.float8_e5m2]

EXACT: dict[str, Any] = {
    "SUM": operator.add,
    "PROD": operator.mul,
    "MAX": lambda a, b: a if np.isnan(a) or (not np.isnan(b) and a >= b) else b,
    "MIN": lambda a, b: a if np.isnan(a) or (not np.isnan(b) and a <= b) else b,
    "LAND": lambda a, b: bool(a) and bool(b),
    "LOR": lambda a, b: bool(a) or bool(b),
    "LXOR": lambda a, b: bool(a) != bool(b),
    "BAND": operator.and_,
    "BOR": operator.or_,
    "BXOR": operator.xor,
}
TRUTH = {
    **{op: lambda a, b: a or b for op in ("SUM", "MAX", "LOR", "BOR")},
    **{op: lambda a, b: a and b for op in ("PROD", "MIN", "LAND", "BAND")},
    **{op: lambda a, b: a != b for op in ("LXOR", "BXOR")},
}
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 65504, 2**-24, -(2**-24), 1e-40, 3e38, -3e38, 1e-45]


@pytest.fixture
def device() -> EmulatedDevice:
    return EmulatedDevice(seed=5)


def content(dtype: np.dtype[Any], count: int, seed: int, special: bool = True) -> np.ndarray[Any, Any]:
    random = np.random.default_rng([seed, count])
    if dtype == BOOL:
        return random.integers(0, 2, count).astype(bool)
    if dtype in INTEGERS:
        found = random.integers(0, 256, (count, dtype.itemsize), np.uint8).view(dtype).reshape(count)
        return np.where(random.random(count) < 0.2, dtype.type(0), found)
    values = random.standard_normal(count) * 3
    if dtype in COMPLEX:
        return (values + 1j * random.standard_normal(count)).astype(dtype)
    if special:
        values = np.where(random.random(count) < 0.5, random.choice(SPECIAL, count), values)
    with np.errstate(all="ignore"):
        return values.astype(dtype)


def expected(op: str, lower: np.ndarray[Any, Any], higher: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """In Python's integers, or in float64 with one rounding."""
    dtype = lower.dtype
    if dtype == BOOL:
        return np.array([TRUTH[op](a, b) for a, b in zip(lower.tolist(), higher.tolist(), strict=True)], bool)
    if dtype in INTEGERS:
        bits = 8 * dtype.itemsize
        exact = [int(EXACT[op](a, b)) for a, b in zip(lower.tolist(), higher.tolist(), strict=True)]
        return np.array([number % 2**bits for number in exact], f"u{dtype.itemsize}").view(dtype)
    wide = np.complex128 if dtype in COMPLEX else np.float64
    with np.errstate(all="ignore"):
        pairs = zip(lower.astype(wide), higher.astype(wide), strict=True)
        return np.array([EXACT[op](a, b) for a, b in pairs], wide).astype(dtype)


def same(found: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> bool:
    """Equal values, and NaN where NaN is wanted."""
    if found.dtype in COMPLEX:
        return bool(np.allclose(found, wanted, rtol=1e-6, atol=1e-6))
    with np.errstate(all="ignore"):  # ml_dtypes' NaN
        return bool(((found == wanted) | ((found != found) & (wanted != wanted))).all())


def described(device: EmulatedDevice, array: Any, stream: Any = None) -> Buffer:
    buffer = device.find(array, stream)
    assert buffer is not None
    return buffer


def at_offset(device: EmulatedDevice, values: np.ndarray[Any, Any], offset: int) -> Any:
    """A device array whose address is `offset` beyond a multiple of 256, and the bytes around it."""
    block = np.full(values.nbytes + offset + 32, 0xEE, np.uint8)
    block[offset : offset + values.nbytes] = values.view(np.uint8)
    whole = device.array(block)
    return whole, part(device, whole, offset, values.dtype, len(values))


def part(device: EmulatedDevice, whole: Any, offset: int, dtype: np.dtype[Any], count: int) -> Buffer:
    buffer = described(device, whole)
    return buffer._replace(ptr=buffer.ptr + offset, nbytes=count * dtype.itemsize, dtype=dtype, shape=(count,))


def slot(device: EmulatedDevice, values: np.ndarray[Any, Any], like: Buffer) -> tuple[np.ndarray[Any, Any], Buffer]:
    """Values in page-locked memory, and their description."""
    memory = device.pinned(values.nbytes)[: values.nbytes].view(values.dtype)
    memory[...] = values
    return memory, like._replace(ptr=memory.ctypes.data, owner=None)


def test_the_table_is_complete_and_the_same_whatever_the_device(device: EmulatedDevice) -> None:
    for op in OPS:
        for dtype in DTYPES:
            assert device.reduces(op, dtype) is KERNELS[op, dtype.name], (op, dtype)
        for other in OTHERS:
            assert device.reduces(op, np.dtype(other)) is False, (op, other)
    assert len(KERNELS) == len(OPS) * len(DTYPES)
    for op in ("", "REPLACE", "MINLOC", "sum"):
        assert not any(device.reduces(op, dtype) for dtype in DTYPES)
    for code in "bhilqBHILQ":  # types of one size under two names
        assert device.reduces("SUM", np.dtype(code))


@pytest.mark.parametrize(("op", "dtype"), CASES, ids=str)
def test_values_agree_with_exact_arithmetic(device: EmulatedDevice, op: str, dtype: np.dtype[Any]) -> None:
    for count in (1, 3, 17, 257):
        lower, higher = content(dtype, count, 1), content(dtype, count, 2)
        for steps in ((0, 0, 0), (0, 0, dtype.itemsize // dtype.alignment), (1, 7, 13), (5, 5, 5), (8, 4, 2)):
            offsets = [step * dtype.alignment for step in steps]
            buffers = [at_offset(device, v, o) for v, o in zip((lower, higher, lower), offsets, strict=True)]
            for out, wanted in ((2, expected(op, lower, higher)), (1, None), (0, None)):
                whole, target = buffers[out]
                now = [device.asnumpy(w)[o : o + lower.nbytes].view(dtype) for (w, _), o in zip(buffers, offsets)]  # noqa: B905
                wanted = expected(op, now[0], now[1]) if wanted is None else wanted
                device.reduce(op, target, buffers[0][1], buffers[1][1])
                found, offset = device.asnumpy(whole), offsets[out]
                assert same(found[offset : offset + lower.nbytes].view(dtype), wanted)
                assert (found[:offset] == 0xEE).all() and (found[offset + lower.nbytes :] == 0xEE).all()
    whole, both = at_offset(device, lower, 0)
    device.reduce(op, both, both, both)
    assert same(device.asnumpy(whole)[: lower.nbytes].view(dtype), expected(op, lower, lower))


# MPI has no logical operators for floats.
@pytest.mark.parametrize(
    ("op", "dtype"), [(op, dtype) for op, dtype in CASES if op[0] != "L" or dtype not in FLOATS[2:]], ids=str
)
def test_values_agree_with_what_gdcomm_reduces_on_the_host(device: EmulatedDevice, op: str, dtype: Any) -> None:
    known = reductions.substitute(dtype, getattr(MPI, op))
    # Of NaN MPI's own MAX and MIN keep what the order of the operands leaves.
    lower, higher = (content(dtype, 501, seed, special=known is not None) for seed in (3, 4))
    if dtype in INTEGERS:  # no overflow: Open MPI's sums of small integers saturate
        lower, higher = lower % 11, higher % 11
    wire = reductions.wire_dtype(dtype) or dtype
    result = higher.copy()
    (known or getattr(MPI, op)).Reduce_local(lower.view(wire), result.view(wire))
    array = device.array(lower)
    device.reduce(op, described(device, array), described(device, array), described(device, device.array(higher)))
    assert same(device.asnumpy(array), result)


def test_nan_and_overflow(device: EmulatedDevice) -> None:
    for dtype in FLOATS:
        nan = np.array([np.nan, 1, np.nan], dtype), np.array([1, np.nan, np.nan], dtype)
        for op in ("SUM", "PROD", "MAX", "MIN"):
            out, a, b = (device.array(v) for v in (nan[0], *nan))
            device.reduce(op, *(described(device, x) for x in (out, a, b)))
            assert np.isnan(device.asnumpy(out).astype("f8")).all()
        out, a, b = (device.array(v) for v in (nan[0], *nan))
        device.reduce("LAND", *(described(device, x) for x in (out, a, b)))
        assert device.asnumpy(out).astype("f8").tolist() == [1, 1, 1]
    for half, large in zip(HALVES, (65504, 3e38), strict=True):
        x = device.array(np.array([large, -large], half))
        device.reduce("SUM", *[described(device, x)] * 3)
        assert device.asnumpy(x).astype("f8").tolist() == [np.inf, -np.inf]
    x = device.array(np.array([127, -128], "i1"))
    device.reduce("SUM", *[described(device, x)] * 3)
    assert device.asnumpy(x).tolist() == [-2, 0]


def test_halves_are_rounded_once_to_nearest_even(device: EmulatedDevice) -> None:
    for half, ulp in zip(HALVES, (2**-10, 2**-7), strict=True):
        a, b = np.array([1, 1 + ulp, 1, 1], half), np.array([ulp / 2, ulp / 2, ulp * 0.50390625, ulp / 4], half)
        x = device.array(a)
        device.reduce("SUM", described(device, x), described(device, x), described(device, device.array(b)))
        assert device.asnumpy(x).astype("f8").tolist() == [1, 1 + 2 * ulp, 1 + ulp, 1]


def test_nothing_is_done_for_nothing(device: EmulatedDevice) -> None:
    x = described(device, device.empty(0))
    device.reduce("SUM", x, x, x)
    assert "reduce" not in device.stats


def test_every_contiguous_shape(device: EmulatedDevice) -> None:
    for shape in ((), (1,), (3, 4), (2, 1, 5)):
        values = np.random.default_rng(1).standard_normal(shape)
        x = device.array(values)
        device.reduce("SUM", *[described(device, x)] * 3)
        assert (device.asnumpy(x) == 2 * values).all()
    flat, square = device.array(np.arange(4.0)), device.array(np.ones((2, 2)))
    device.reduce("PROD", described(device, square), described(device, flat), described(device, square))
    assert device.asnumpy(square).tolist() == [[0, 1], [2, 3]]


def test_work_is_late_and_ordered_on_the_stream_of_out_alone(device: EmulatedDevice) -> None:
    one, two = device.Stream(), device.Stream()
    for wait in (False, True):
        a, b, out = device.zeros(100), device.zeros(100), device.zeros(100)
        device.synchronize(None)
        device.fill(a, 3, one)
        device.fill(b, 4, two)
        if wait:
            device.wait_event(two, device.record(one))
        device.reduce("SUM", described(device, out, two), described(device, a, one), described(device, b, one))
        assert not out._view.any(), "nothing runs before somebody waits"
        device.fill(b, 9, two)
        assert set(device.asnumpy(out, two).tolist()) == {7 if wait else 4}
        device.synchronize(one)


def test_a_slot_in_the_hosts_memory_is_read_and_written_when_the_stream_gets_there(device: EmulatedDevice) -> None:
    x = device.array(np.arange(33, dtype="f4"))
    buffer = described(device, x)
    memory, filled = slot(device, np.zeros(33, "f4"), buffer)
    device.reduce("SUM", buffer, buffer, filled)
    memory[...] = 5
    assert device.asnumpy(x).tolist() == [i + 5 for i in range(33)]
    device.reduce("PROD", filled, filled, buffer)
    device.synchronize(None)
    assert memory.tolist() == [5 * (i + 5) for i in range(33)]


def test_memory_that_kernels_can_not_reach_is_refused(device: EmulatedDevice) -> None:
    x = device.array(np.arange(8.0))
    buffer = described(device, x)
    pageable = np.ones(8)
    wrong = buffer._replace(ptr=pageable.ctypes.data, owner=pageable)
    for arguments in ((wrong, buffer, buffer), (buffer, wrong, buffer), (buffer, buffer, wrong)):
        with pytest.raises(BufferSpecError, match="can't reach"):
            device.reduce("SUM", *arguments)
    memory, filled = slot(device, np.ones(8), buffer)
    with pytest.raises(BufferSpecError, match="can't reach"):
        device.reduce("SUM", buffer, buffer, filled._replace(ptr=filled.ptr + 8))
    inside = described(device, device.array(np.ones(16)))
    with pytest.raises(BufferSpecError, match="beyond"):
        device.reduce("SUM", buffer, filled, inside._replace(ptr=inside.ptr + 72, nbytes=64, shape=(8,)))
    device.reduce("SUM", buffer, buffer, filled)
    del memory
    gc.collect()
    with pytest.raises(BufferSpecError, match="freed"):
        device.synchronize(None)
    device.emulated_properties = DeviceProperties(
        pageable_memory_access=True, pageable_memory_access_uses_host_page_tables=True
    )
    device.reduce("SUM", buffer, buffer, wrong)
    assert device.asnumpy(x).tolist() == [i + 1 for i in range(8)]


def test_device_memory_freed_after_the_call_lives_until_the_kernel_ran(device: EmulatedDevice) -> None:
    x, y = device.array(np.ones(100)), device.array(np.full(100, 2.0))
    device.synchronize(None)
    device.reduce("SUM", described(device, x), described(device, x), described(device, y))
    del y
    gc.collect()
    assert set(device.asnumpy(x).tolist()) == {3.0}


def test_arrays_that_do_not_fit_together_are_refused(device: EmulatedDevice) -> None:
    whole = device.array(np.arange(32.0))
    x, y = described(device, whole[:8]), described(device, whole[16:24])
    for other, why in (
        (described(device, whole[4:12]), "share a part"),
        (described(device, whole[:9]), "72 bytes of float64"),
        (y._replace(dtype=np.dtype("i8")), "64 bytes of int64"),
        (described(device, whole[8:24:2]), "not contiguous"),
        (y._replace(ptr=y.ptr + 4), "not aligned to 8 bytes"),
    ):
        for lower, higher in ((other, y), (y, other)):
            with pytest.raises(BufferSpecError, match=why):
                device.reduce("SUM", x, lower, higher)
    for op in ("BAND", "REPLACE", ""):
        with pytest.raises(BufferSpecError, match=f"no kernel reduces float64 by {op}"):
            device.reduce(op, x, x, y)
    device.reduce("SUM", x, y, described(device, whole[18:26]))  # inputs may overlap: nobody writes there
    assert device.asnumpy(whole)[:3].tolist() == [34, 36, 38]
