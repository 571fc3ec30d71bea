"""Element-wise reductions on CUDA devices."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np

from gdcomm.devices.reductions import BOOL, Reductions, require_reducible

if TYPE_CHECKING:
    from gdcomm.devices.base import Buffer

__all__ = ["CudaReductions"]

_THREADS = 256
_BLOCKS = 132 * 16  # enough bytes in flight for any memory; a thread walks on with this stride
_WIDEST = 16  # bytes of a word

# All accesses are words of WIDTH bytes, and those of neighbouring threads are neighbours, so that they coalesce:
# reads of the host's memory fill whole packets. A chunk is a word, or an element where those are larger (they
# are not aligned then). What `out` shares with an input is the chunk itself, which its thread has read by then.
_REDUCE = r"""
typedef unsigned long long u64;

// float whose small numbers stay as they are: CuPy has kernels compiled so that `float` ones become zero.
struct Single {
    float x;
    Single() = default;
    __device__ Single(int whole) : x(whole) {}
};
#define COMPUTE(SIGN, NAME) \
    __device__ Single operator SIGN(Single a, Single b) { \
        Single result; \
        asm(NAME ".rn.f32 %0, %1, %2;" : "=f"(result.x) : "f"(a.x), "f"(b.x)); \
        return result; \
    }
COMPUTE(+, "add")
COMPUTE(-, "sub")
COMPUTE(*, "mul")
#define COMPARE(SIGN, NAME) \
    __device__ bool operator SIGN(Single a, Single b) { \
        int result; \
        asm("{\n.reg .pred is;\nsetp." NAME ".f32 is, %1, %2;\nselp.s32 %0, 1, 0, is;\n}" \
            : "=r"(result) : "f"(a.x), "f"(b.x)); \
        return result; \
    }
COMPARE(>=, "ge")
COMPARE(<=, "le")
COMPARE(!=, "neu")

struct Half { unsigned short bits; };
struct Bfloat { unsigned short bits; };
template <typename Real> struct Complex { Real re, im; };

template <typename T> __device__ Complex<T> operator+(Complex<T> a, Complex<T> b) {
    Complex<T> sum = {a.re + b.re, a.im + b.im};
    return sum;
}
template <typename T> __device__ Complex<T> operator*(Complex<T> a, Complex<T> b) {
    Complex<T> product = {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
    return product;
}

template <typename T> __device__ T widen(T x) { return x; }
__device__ Single widen(Half half) {
    Single wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide.x) : "h"(half.bits));
    return wide;
}
__device__ Single widen(Bfloat x) {
    Single wide;
    wide.x = __uint_as_float((unsigned int)x.bits << 16);
    return wide;
}

template <typename T> __device__ void narrow(T& to, T wide) { to = wide; }
__device__ void narrow(Half& to, Single wide) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(wide.x));
    to.bits = bits;
}
__device__ void narrow(Bfloat& to, Single wide) {
    unsigned int bits = __float_as_uint(wide.x);
    to.bits = wide != wide ? bits >> 16 | 0x40 : bits + 0x7fff + (bits >> 16 & 1) >> 16;
}

__device__ ELEMENT combine(ELEMENT lower, ELEMENT higher) {
    VALUE a = widen(lower), b = widen(higher);
    ELEMENT result;
    narrow(result, (VALUE)(OPERATION));
    return result;
}

template <int BYTES> struct Word;
template <> struct Word<16> { typedef uint4 type; };
template <> struct Word<8> { typedef uint2 type; };
template <> struct Word<4> { typedef unsigned int type; };
template <> struct Word<2> { typedef unsigned short type; };
template <> struct Word<1> { typedef unsigned char type; };

template <int WIDTH> struct Chunk {
    static const int BYTES = WIDTH > sizeof(ELEMENT) ? WIDTH : sizeof(ELEMENT);
    static const int WORDS = BYTES / WIDTH, ELEMENTS = BYTES / sizeof(ELEMENT);
    typedef typename Word<WIDTH>::type word;
    union { word words[WORDS]; ELEMENT elements[ELEMENTS]; };

    __device__ void load(const char* from) {
        #pragma unroll
        for (int w = 0; w < WORDS; ++w) words[w] = ((const word*)from)[w];
    }
    __device__ void store(char* to) const {
        #pragma unroll
        for (int w = 0; w < WORDS; ++w) ((word*)to)[w] = words[w];
    }
    __device__ void combine_with(const Chunk& higher) {
        #pragma unroll
        for (int e = 0; e < ELEMENTS; ++e) elements[e] = combine(elements[e], higher.elements[e]);
    }
};

template <int WIDTH, int TOGETHER>
__device__ void some(char* out, const char* lower, const char* higher, u64 at, u64 step) {
    Chunk<WIDTH> a[TOGETHER], b[TOGETHER];
    const u64 BYTES = Chunk<WIDTH>::BYTES;
    #pragma unroll
    for (int k = 0; k < TOGETHER; ++k) {
        a[k].load(lower + (at + k * step) * BYTES);
        b[k].load(higher + (at + k * step) * BYTES);
    }
    #pragma unroll
    for (int k = 0; k < TOGETHER; ++k) {
        a[k].combine_with(b[k]);
        a[k].store(out + (at + k * step) * BYTES);
    }
}

// Elements before `head` come before the first whole word.
template <int WIDTH> __device__ void reduce(char* out, const char* lower, const char* higher, u64 count, u64 head) {
    const int TOGETHER = WIDTH == 16 ? 2 : 4, EACH = Chunk<WIDTH>::ELEMENTS;
    u64 first = blockIdx.x * (u64)blockDim.x + threadIdx.x, step = gridDim.x * (u64)blockDim.x;
    u64 chunks = (count - head) / EACH, skip = head * sizeof(ELEMENT), i = first;
    for (; i + (TOGETHER - 1) * step < chunks; i += TOGETHER * step)
        some<WIDTH, TOGETHER>(out + skip, lower + skip, higher + skip, i, step);
    for (; i < chunks; i += step) some<WIDTH, 1>(out + skip, lower + skip, higher + skip, i, step);
    for (i = first; i < head + (count - head) % EACH; i += step) {
        u64 e = i < head ? i : i + chunks * EACH;
        ((ELEMENT*)out)[e] = combine(((const ELEMENT*)lower)[e], ((const ELEMENT*)higher)[e]);
    }
}

#define KERNEL(WIDTH) \
    extern "C" __global__ void __launch_bounds__(256) \
    reduce##WIDTH(char* out, const char* lower, const char* higher, u64 count, u64 head) { \
        reduce<WIDTH>(out, lower, higher, count, head); \
    }
KERNEL(1)
KERNEL(2)
KERNEL(4)
KERNEL(8)
KERNEL(16)
"""

# Elements as they lie in memory, as they are computed with, and what sums and products are made in: unsigned
# integers, which wrap by the rules of the language (signed ones, also those that small types become, do not).
_TYPES = {
    "bool": ("unsigned char", "unsigned char", "unsigned int"),
    "int8": ("signed char", "signed char", "unsigned int"),
    "int16": ("short", "short", "unsigned int"),
    "int32": ("int", "int", "unsigned int"),
    "int64": ("long long", "long long", "unsigned long long"),
    "uint8": ("unsigned char", "unsigned char", "unsigned int"),
    "uint16": ("unsigned short", "unsigned short", "unsigned int"),
    "uint32": ("unsigned int", "unsigned int", "unsigned int"),
    "uint64": ("unsigned long long", "unsigned long long", "unsigned long long"),
    "float16": ("Half", "Single", "Single"),
    "bfloat16": ("Bfloat", "Single", "Single"),
    "float32": ("Single", "Single", "Single"),
    "float64": ("double", "double", "double"),
    "complex64": ("Complex<Single>", "Complex<Single>", "Complex<Single>"),
    "complex128": ("Complex<double>", "Complex<double>", "Complex<double>"),
}
_OPERATIONS = {
    "SUM": "(WIDE)a + (WIDE)b",
    "PROD": "(WIDE)a * (WIDE)b",
    "MAX": "a >= b || a != a ? a : b",
    "MIN": "a <= b || a != a ? a : b",
    "LAND": "(a != 0) & (b != 0)",
    "LOR": "(a != 0) | (b != 0)",
    "LXOR": "(a != 0) ^ (b != 0)",
    "BAND": "a & b",
    "BOR": "a | b",
    "BXOR": "a ^ b",
}


class CudaReductions(Reductions):
    """Kernels of the current GPU, compiled when an operator first meets a dtype."""

    def reduce(self, op: str, out: Buffer, lower: Buffer, higher: Buffer) -> None:
        require_reducible(op, out, lower, higher)
        itemsize = out.dtype.itemsize
        count = out.nbytes // itemsize
        if not count:
            return
        width, head = _layout(itemsize, out.ptr, lower.ptr, higher.ptr)
        head = min(head, count)
        chunks = (count - head) * itemsize // max(width, itemsize)
        blocks = min(max(-(-chunks // _THREADS), 1), _BLOCKS)
        arguments = (
            np.uint64(out.ptr), np.uint64(lower.ptr), np.uint64(higher.ptr), np.uint64(count), np.uint64(head)
        )  # fmt: skip
        kernel = _kernel(op, out.dtype, width)
        kernel((blocks,), (_THREADS,), arguments, stream=SimpleNamespace(ptr=out.stream))


@functools.cache
def _kernel(op: str, dtype: np.dtype[Any], width: int) -> Any:
    # CuPy compiles a source once for each GPU, whichever of its kernels is wanted. Without fused operations
    # complex products are the same on every GPU and in NumPy.
    return cupy.RawKernel(_source(op, dtype.name), f"reduce{width}", options=("--fmad=false",))


def _source(op: str, name: str) -> str:
    element, value, wide = _TYPES[name]
    operation = _OPERATIONS[BOOL[op] if name == "bool" else op]
    macros = {"ELEMENT": element, "VALUE": value, "WIDE": wide, "OPERATION": operation}
    return "".join(f"#define {macro} {text}\n" for macro, text in macros.items()) + _REDUCE


def _layout(itemsize: int, out: int, lower: int, higher: int) -> tuple[int, int]:
    """The widest words that suit all three addresses, in bytes, and the elements before the first of them."""
    together = out | lower | higher
    if together % itemsize:  # words within elements
        return together & -together, 0
    apart = (out ^ lower) | (out ^ higher) | _WIDEST
    width = apart & -apart
    return width, -out % width // itemsize
