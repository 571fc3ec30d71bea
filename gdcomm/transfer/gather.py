"""Rows of a large table in host memory, read and written by the GPU without copying it all."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gdcomm import devices
from gdcomm.devices.base import Buffer, Device
from gdcomm.devices.kernels import Rows
from gdcomm.errors import BufferSpecError
from gdcomm.memory.pinned import note_use
from gdcomm.memory.registered import pieces
from gdcomm.transfer.crossover import Crossover, crossover
from gdcomm.transfer.leaves import fetch, fill_from, host_view, need_device
from gdcomm.transfer.rows import gather_by_cpu
from gdcomm.transfer.sides import library_of, share_memory, span_of

__all__ = ["Crossover", "crossover", "put", "take"]

_Array = np.ndarray[Any, Any]
_METHODS = ("auto", "gather", "copy")


class _Table(NamedTuple):
    """A table's rows: `host` or `buffer` is set; `rows` is None if kernels can't read it."""

    host: _Array | None
    buffer: Buffer | None
    rows: Rows | None
    length: int
    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def row_nbytes(self) -> int:
        return int(np.prod(self.row_shape, dtype=np.int64)) * self.dtype.itemsize


def take(
    table: Any,
    indices: Any,
    *,
    out: Any = None,
    stream: Any = None,
    mode: str | None = None,
    method: str = "auto",
) -> Any:
    """Gather rows (axis 0) of a table into device memory.

    The GPU reads the rows from page-locked host memory (`pinned_empty`, `registered`, `mapped_empty`) by a kernel.
    From pageable memory (also `np.memmap`) CPU threads gather them into pinned slots, which are copied meanwhile. Where
    most of a table is asked for it is faster to copy it all: `gdcomm.transfer.gather.crossover` decides, and shows why.

    Args:
        table: NumPy array, PyTorch CPU tensor, object of `mapped_empty`, or device array; any dtype but objects. At
            least 1-d. Page-locked memory is read when the stream gets there: do not write to it until then.
        indices: integers of any shape, on the host (any integer dtype) or the device (int32 or int64). Negative ones
            count from the end, as in NumPy.
        out: C-contiguous device array of shape `indices.shape + table.shape[1:]` and the table's dtype. None: a new
            array of the library of `indices` if that is a device array, else of the table's (PyTorch), else CuPy's.
        stream: orders the call; None is the current stream of the library of `out`, else `indices`, else CuPy.
        mode: what happens to indices out of range. "raise": IndexError, nothing is written; device indices are
            copied to the host for it, which waits for the stream. "fill": the row is NaN if floating point,
            else zero. "clip" (negative ones are 0) and "wrap": as `numpy.take`. None: "raise" for host indices, "fill"
            for device indices. Foreign memory is never read.
        method: "gather", "copy" (the whole table first, which needs as much device memory), or "auto".

    Returns:
        `out`, or the new array. It is ordered on the stream; nothing waits for the GPU, except for "raise", and for
        device indices of a pageable table.

    Raises:
        IndexError: see `mode`.
        BufferSpecError: an argument that can't be used; says which and why.
        DeviceError: there is no GPU.
    """
    device = need_device("take")
    if method not in _METHODS:
        raise BufferSpecError(f"take: method {method!r} is none of {', '.join(_METHODS)}")
    handle = _order(device, stream, out, indices, table)
    source = _table("take", device, table, handle)
    if not source.dtype.isnative:
        raise BufferSpecError(f"take: table has dtype {source.dtype}, of the other byte order, which GPUs don't know")
    chosen = _Indices("take", indices, handle, source, mode, "fill", on_host=source.rows is None)
    shape, fill = chosen.shape + source.row_shape, 0xFF if _has_nan(source.dtype) else 0

    def write(buffer: Buffer) -> None:
        _gather(device, buffer._replace(stream=handle), source, chosen, method, fill)

    if out is not None:
        buffer = _check_out(out, handle, shape, source.dtype)
        if buffer.nbytes:
            if source.rows is not None and _overlap(source.rows, buffer):
                raise BufferSpecError("take: out shares memory with table; give another array")
            chosen.keep_from(device, buffer)
            write(buffer)
        return out
    with device.on(handle):
        library = library_of(indices) if devices.find(indices, handle) is not None else library_of(table)
        return device.build(library, shape, source.dtype, "C", write)


def put(
    table: Any,
    indices: Any,
    values: Any,
    *,
    stream: Any = None,
    mode: str | None = None,
    unique_indices: bool = False,
    block: bool = True,
) -> None:
    """Scatter rows into a table (axis 0): `table[indices] = values`.

    Device values go to page-locked host memory by a kernel, to pageable memory by a copy and the CPU. Host
    values are written to a host table by the CPU at once, without a GPU.

    Args:
        table: as in `take`; writable.
        indices: as in `take`. Where one occurs twice, the last row wins, as in NumPy.
        values: array of shape `indices.shape + table.shape[1:]`, or one row for all; a device array has the
            table's dtype, a host one is converted, and may be overwritten once the call returned.
        stream: orders the call; None is the current stream of the library of `values`, else `indices`, else CuPy.
        mode: "raise", "clip" or "wrap" as in `take`; "drop": rows out of range are left out. None: "raise" for host
            indices, "drop" for device indices.
        unique_indices: your word that no index occurs twice; it saves a pass over 8 bytes for each row of the table
            on the device. If it is not true, rows of equal index may be mixed.
        block: wait until a host table has the rows. False: it has them once the stream got there.

    Raises:
        IndexError: see `mode`.
        BufferSpecError: an argument that can't be used; says which and why.
        DeviceError: an array is on a GPU which can't be reached.
    """
    device = devices.current()
    handle = None if device is None else _order(device, stream, values, indices, table)
    target = _table("put", device, table, handle)
    new = devices.find(values, handle)
    by_cpu = target.rows is None or (new is None and target.buffer is None)
    chosen = _Indices("put", indices, handle, target, mode, "drop", on_host=by_cpu)
    if new is not None:
        _check_values(new.shape, chosen.shape, target, new.dtype)
    if device is None or target.rows is None or by_cpu:
        _put_by_cpu(target, chosen, values if new is None else fetch(new))
        return
    with device.on(handle):
        if new is None:
            new = _upload_values(device, handle, values, chosen, target)
        if not (new.nbytes and chosen.count):
            return
        if not new.contiguous or _overlap(target.rows, new):
            new = device.snapshot(new)
        if target.buffer is not None:
            chosen.keep_from(device, target.buffer)
        device.scatter(target.rows, chosen.on_device(device, handle), new, chosen.mode, unique_indices)
    _note_use(device, target, handle)
    if block and target.host is not None:
        device.record(handle).synchronize()


# -- arguments ---------------------------------------------------------------------------------


def _order(device: Device, stream: Any, *arrays: Any) -> Any:
    """The stream that the call is ordered on: as given, or the current one of the first device array's library."""
    for array in arrays if stream is None else ():
        buffer = None if array is None else devices.find(array)
        if buffer is not None:
            return buffer.stream
    return device.handle(stream)


def _table(operation: str, device: Device | None, table: Any, handle: Any) -> _Table:
    buffer = devices.find(table, handle)
    host = _plain_view(operation, "table", table) if buffer is None else None
    found: Any = host if buffer is None else buffer
    if found is None:
        raise BufferSpecError(
            f"{operation}: table is a {type(table).__name__}; give a NumPy array, a CPU tensor, an object of "
            "mapped_empty, or a device array"
        )
    if not found.shape:
        raise BufferSpecError(f"{operation}: table has no axis; rows are taken along axis 0")
    if found.dtype.hasobject:
        raise BufferSpecError(f"{operation}: table holds Python objects ({found.dtype}); give numbers or plain records")
    if operation == "put":
        if buffer is not None:
            buffer.require_writable("put", "table")
        elif not found.flags.writeable:
            raise BufferSpecError("put: table is read-only; give a writable array")
    made = _Table(host, buffer, None, found.shape[0], tuple(found.shape[1:]), found.dtype)
    rows = _rows(device, made)
    if rows is None and buffer is not None:
        raise BufferSpecError(
            f"{operation}: table is a device array whose rows have gaps (strides {buffer.strides}); "
            "give a copy in C order"
        )
    return made._replace(rows=rows)


def _plain_view(operation: str, name: str, obj: Any) -> _Array | None:
    view = host_view(obj)
    if isinstance(view, np.ma.MaskedArray):
        raise BufferSpecError(f"{operation}: {name} is a masked array, which has two parts; give .data, or .filled()")
    return view


def _overlap(rows: Rows, buffer: Buffer) -> bool:
    """Whether an array that is not empty may have bytes in common with a table."""
    if not (rows.length and rows.nbytes):
        return False
    span = (rows.length - 1) * rows.stride
    first, end = span_of(buffer)
    return first < rows.address + max(span, 0) + rows.nbytes and rows.address + min(span, 0) < end


def _rows(device: Device | None, table: _Table) -> Rows | None:
    """The table as kernels see it, or None if they can't."""
    owner: Any = table.host if table.host is not None else table.buffer
    itemsize, expected = table.dtype.itemsize, table.dtype.itemsize
    strides = owner.strides
    if strides is None:
        strides = (max(table.row_nbytes, itemsize), *(0,) * len(table.row_shape))
    else:
        for extent, step in zip(reversed(table.row_shape), reversed(strides[1:]), strict=True):
            if extent > 1 and step != expected:
                return None
            expected *= extent
    length, nbytes, stride = table.length, table.row_nbytes, int(strides[0])
    if table.buffer is not None:
        return Rows(table.buffer.ptr, length, nbytes, stride, table.buffer.owner)
    if device is None or not (length and nbytes):
        return None
    address, span = owner.ctypes.data, (length - 1) * stride
    lowest = _kernel_address(device, address + min(span, 0), abs(span) + nbytes)
    return None if lowest is None else Rows(lowest - min(span, 0), length, nbytes, stride, owner)


def _kernel_address(device: Device, address: int, nbytes: int) -> int | None:
    """The address by which kernels reach all of this memory: between two registrations there may be a gap."""
    first = device.kernel_address(address, nbytes)
    if first is not None:
        parts = pieces(address, nbytes)
        if len(parts) > 1 and any(device.kernel_address(at, n) != first + at - address for at, n in parts):
            return None
    return first


class _Indices:
    """Indices on the host (resolved, `host`) or the device (`buffer`)."""

    def __init__(
        self, operation: str, indices: Any, handle: Any, table: _Table, mode: str | None, lenient: str, on_host: bool
    ) -> None:
        self.buffer = devices.find(indices, handle)
        modes = ("raise", lenient, "clip", "wrap")
        if mode is None:
            mode = lenient if self.buffer is not None else "raise"
        if mode not in modes:
            raise BufferSpecError(f"{operation}: mode {mode!r} is none of {', '.join(modes)}")
        self.host: _Array | None = None
        self.mode = "fill" if mode in ("raise", lenient) else mode
        if self.buffer is not None:
            if self.buffer.dtype not in (np.int32, np.int64):
                raise BufferSpecError(
                    f"{operation}: indices on the device have dtype {self.buffer.dtype}; give int32 or int64"
                )
            self.shape = self.buffer.shape
            if on_host or mode == "raise":
                self._resolve(operation, fetch(self.buffer), table.length, mode)
        else:
            self._resolve(operation, _integers(operation, indices), table.length, mode)
        self.count = int(np.prod(self.shape, dtype=np.int64))

    def _resolve(self, operation: str, index: _Array, count: int, mode: str) -> None:
        """Row numbers of the table; `count` stands for those that are out of range."""
        self.shape = index.shape
        if mode == "clip" and count:
            self.host = np.asarray(np.clip(index, 0, count - 1), np.int64)
        elif mode == "wrap" and count:
            self.host = np.asarray(index % count, np.int64)
        else:
            bad = (index >= count) | (index < -count)
            if mode != "fill" and mode != "drop" and bad.any():
                raise IndexError(
                    f"{operation}: index {index[bad].reshape(-1)[0]} is out of range for a table of {count} rows"
                )
            self.host = np.asarray(np.where(bad, count, np.where(index < 0, index + count, index)), np.int64)

    def keep_from(self, device: Device, written: Buffer) -> None:
        """Copy indices that lie in memory which the call writes to."""
        if self.host is None and self.buffer is not None and self.buffer.nbytes and share_memory(self.buffer, written):
            self.buffer = device.snapshot(self.buffer)

    def on_device(self, device: Device, handle: Any) -> Buffer:
        """Contiguous device indices for a kernel, ordered on the stream."""
        if self.host is None:
            assert self.buffer is not None
            return self.buffer if self.buffer.contiguous else device.snapshot(self.buffer)
        narrow = self.host.size == 0 or self.host.max() < 1 << 31
        return _upload(device, handle, np.asarray(self.host, np.int32 if narrow else np.int64))


def _integers(operation: str, indices: Any) -> _Array:
    index = _plain_view(operation, "indices", indices)
    if index is None:
        try:
            index = np.asarray(indices)
        except ValueError as error:
            raise BufferSpecError(f"{operation}: indices make no array ({error})") from None
    if not index.size:
        return np.empty(index.shape, np.int64)
    if index.dtype.kind not in "iu":
        hint = "; numpy.flatnonzero makes indices of a mask" if index.dtype.kind == "b" else ""
        raise BufferSpecError(f"{operation}: indices have dtype {index.dtype}; give integers{hint}")
    if index.dtype.kind == "u":
        index = np.minimum(index, np.iinfo(np.int64).max, dtype=index.dtype)  # far out of range anyway
    return index.astype(np.int64)


def _check_out(out: Any, handle: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Buffer:
    buffer = devices.find(out, handle)
    if buffer is None:
        raise BufferSpecError(
            f"take: out is a {type(out).__name__} in host memory; give a device array (numpy.take gathers to the host)"
        )
    buffer.require_writable("take", "out")
    if buffer.shape != shape or buffer.dtype != dtype:
        raise BufferSpecError(
            f"take: out has shape {buffer.shape} and dtype {buffer.dtype}; the rows have {shape} and {dtype}"
        )
    if not buffer.contiguous:
        raise BufferSpecError("take: out is not C-contiguous; give a contiguous array")
    return buffer


def _check_values(shape: tuple[int, ...], index_shape: tuple[int, ...], table: _Table, dtype: np.dtype[Any]) -> None:
    if shape not in (index_shape + table.row_shape, table.row_shape) or dtype != table.dtype:
        raise BufferSpecError(
            f"put: values have shape {shape} and dtype {dtype}; give {index_shape + table.row_shape}, or one row "
            f"{table.row_shape}, of {table.dtype}"
        )


def _has_nan(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "fc" or dtype.name == "bfloat16"


# -- the ways ----------------------------------------------------------------------------------


def _gather(device: Device, out: Buffer, table: _Table, chosen: _Indices, method: str, fill: int) -> None:
    rows = table.rows
    if method == "auto":
        method = _choose(device, table, chosen.count)
    if table.host is not None and method == "copy" and table.length:
        whole = _upload(device, out.stream, table.host)
        rows = Rows(whole.ptr, table.length, table.row_nbytes, table.row_nbytes, whole.owner)
    if rows is not None:
        device.gather(out, rows, chosen.on_device(device, out.stream), chosen.mode, fill)
        _note_use(device, table, out.stream)
    elif table.host is not None and chosen.host is not None:
        gather_by_cpu(out, table.host, chosen.host.reshape(-1), fill)


def _note_use(device: Device, table: _Table, stream: Any) -> None:
    """Page-locked memory of ours is not used for other things before the kernel is done."""
    if table.host is not None:
        first, end = span_of(table.host)
        note_use(first, end - first, device.record(stream))


def _choose(device: Device, table: _Table, rows: int) -> str:
    """By the measured crossover; a table that takes more than half of the free device memory is not copied."""
    if table.host is None:
        return "gather"
    nbytes = table.length * table.row_nbytes
    method = crossover(table.row_nbytes, rows, nbytes, page_locked=table.rows is not None).method
    return method if method == "gather" or nbytes <= device.free_bytes() // 2 else "gather"


def _upload(device: Device, handle: Any, source: _Array, read: bool = False) -> Buffer:
    """A device copy of a host array, made on the stream; `read` as in `fill_from`."""
    made: list[Buffer] = []

    def fill(buffer: Any) -> None:
        made.append(buffer._replace(stream=handle, dtype=source.dtype, shape=source.shape))
        fill_from(source, made[0], read)

    with device.on(handle):  # as bytes: CuPy has not every dtype
        owner = device.build("cupy", (source.nbytes,), np.dtype(np.uint8), "C", fill)
    if not made:
        fill(device.find(owner, handle))  # of no bytes
    return made[0]


def _upload_values(device: Device, handle: Any, values: Any, chosen: _Indices, table: _Table) -> Buffer:
    return _upload(device, handle, np.ascontiguousarray(_host_values(values, chosen, table)), read=True)


def _host_values(values: Any, chosen: _Indices, table: _Table) -> _Array:
    shape = chosen.shape + table.row_shape
    viewed = _plain_view("put", "values", values)
    try:
        return np.broadcast_to(np.asarray(values if viewed is None else viewed, table.dtype), shape)
    except (ValueError, TypeError) as error:
        raise BufferSpecError(f"put: values can't become {table.dtype} of shape {shape}: {error}") from None


def _put_by_cpu(table: _Table, chosen: _Indices, values: Any) -> None:
    assert table.host is not None and chosen.host is not None
    new = _host_values(values, chosen, table)
    index = chosen.host.reshape(-1)
    rows = new.reshape(index.size, *table.row_shape)
    kept = index < table.length
    table.host[index[kept]] = rows if kept.all() else rows[kept]
