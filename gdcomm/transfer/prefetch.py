"""Batches move between host and device while the caller computes on earlier ones."""

from __future__ import annotations

import atexit
import threading
import types
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from gdcomm import devices
from gdcomm.devices.base import Buffer, Device, Event
from gdcomm.devices.kernels import Loan
from gdcomm.errors import BufferSpecError, DeviceError
from gdcomm.memory.arrays import pinned_empty
from gdcomm.transfer.leaves import fill_from, host_view, library_of, map_leaves, moves, need_device

__all__ = ["Offload", "Prefetch", "offload", "prefetch"]

_JOIN_S = 5.0  # how long a worker that is inside the source's code is waited for


def prefetch(iterable: Iterable[Any], *, depth: int = 2, device: int | None = None, stream: Any = None) -> Prefetch:
    """Iterate over batches on the device, the next ones being copied while you compute on this one.

    ```python
    for images, labels in gdcomm.prefetch(loader):      # NumPy arrays or CPU tensors in, device arrays out
        step(images, labels)                            # meanwhile the next two are copied
    ```

    A batch is an array, or tuples, lists, dicts, named tuples and dataclasses of arrays. NumPy arrays become CuPy
    arrays, PyTorch CPU tensors become CUDA tensors (without gradients), all in C order. Everything else (numbers, text,
    arrays of objects, arrays that are on the device already) passes through.

    A thread takes batches from the source, so the source's code runs there (its current stream is the default
    one). Copies have a stream of their own; your current stream waits for the copies of a batch when you get it, the
    host does not. Each batch is new memory, which is yours as long as you keep it; when
    you drop it, work that you have queued on your stream still sees it. The source may use the memory of a
    batch again when it is asked for the next one. Source memory that is page-locked is copied fastest.

    Args:
        iterable: batches: a generator, a list, a `torch.utils.data.DataLoader`, ...
        depth: batches copied ahead; as many, and those you hold, are in device memory.
        device: the GPU's number; it must be the current one (None).
        stream: the stream that you use the batches on; None is the one that is current (in the batch's library)
            when you get each batch.

    Returns:
        An iterator, with `len` if the source has it. It starts at the first `next`. `close`, leaving a `with` block, or
        dropping it (a `break`) stops the thread; a generator as source is closed then. What the source raises is
        raised in place of its batch.

    Raises:
        BufferSpecError: `depth` is no positive integer, or `iterable` can't be iterated.
        DeviceError: there is no GPU, or `device` is not the current one.
    """
    return Prefetch(iterable, depth, device, stream)


def offload(iterable: Iterable[Any], *, depth: int = 2, stream: Any = None, snapshot: bool = True) -> Offload:
    """Iterate over batches in host memory, copied from the device while the source goes on computing.

    ```python
    for result in gdcomm.offload(simulate()):           # a generator of CuPy arrays
        file.write(result)                              # a NumPy array; the next ones are computed and copied
    ```

    The source runs in your thread, `depth` batches ahead of what you get. Batches are as in `prefetch`; their device
    arrays become NumPy arrays in page-locked memory of `pinned_empty`, new ones each time. A batch
    is complete when you get it.

    Args:
        iterable: batches with device arrays, ordered on the stream that is current in their library.
        depth: batches that are on their way.
        stream: orders the source's arrays instead of the current stream.
        snapshot: copy each array on the device first, which takes a hundredth of the time of the way to the host: the
            source may then write to its arrays again at once. False saves that device memory, where each batch
            is new memory that nobody writes to.

    Returns:
        An iterator, with `len` if the source has it, and with `close`.

    Raises:
        BufferSpecError: `depth` is no positive integer, or `iterable` can't be iterated.
        DeviceError: there is no GPU.
    """
    return Offload(iterable, depth, stream, snapshot)


class _Batch(NamedTuple):
    """A batch with `_Slot`s in the place of its arrays, and the end of the copies to them."""

    item: Any
    event: Event


class _Slot:
    """A leaf on its way: memory lent for a copy, or a device array of the source and what it waits for."""

    __slots__ = ("array", "event", "loan")

    def __init__(self, array: Any, loan: Loan | None, event: Event | None) -> None:
        self.array, self.loan, self.event = array, loan, event


class _End(NamedTuple):
    error: BaseException | None


class _Pipe:
    """What worker and iterator share. It knows nothing of the iterator, whose end therefore stops the worker."""

    def __init__(self, device: Device, iterable: Iterable[Any], depth: int) -> None:
        self.device, self.iterable, self.depth = device, iterable, depth
        self.changed = threading.Condition()
        self.ready: deque[_Batch | _End] = deque()
        self.stopped = False
        self.thread = threading.Thread(target=self.run, args=(device.here(),), name="gdcomm-prefetch", daemon=True)

    def stop(self) -> None:
        """Make the worker end soon. Never blocks for long: it may be called by the collector."""
        self.stopped = True
        if self.changed.acquire(blocking=False):  # else the holder looks at `stopped` before it sleeps
            self.changed.notify_all()
            self.changed.release()

    def take(self) -> _Batch | _End:
        """The next batch, for the consumer; waits for the worker."""
        with self.changed:
            while not self.ready:
                self.changed.wait()
            found = self.ready.popleft()
            self.changed.notify_all()
            return found

    # -- the worker --------------------------------------------------------------------------

    def run(self, here: Any) -> None:
        end = _End(None)
        with here:
            try:
                self._move_all()
            except BaseException as error:  # whatever it is, it belongs to the consumer
                end = _End(error)
        self._put(end)

    def _move_all(self) -> None:
        stream = self.device.borrow_stream()
        source = iter(self.iterable)
        reuses = not _lasting(self.iterable)
        held: deque[tuple[Event, Any]] = deque()  # batches whose memory copies still read
        try:
            while self._room():
                try:
                    item = next(source)
                except StopIteration:
                    return
                batch = self._move(item, stream)
                if reuses:
                    batch.event.synchronize()
                else:
                    held.append((batch.event, item))
                del item
                while held and held[0][0].query():
                    held.popleft()
                self._put(batch)
                del batch
        finally:
            self.device.record(stream).synchronize()  # before `held` goes
            self.device.return_stream(stream)
            if isinstance(source, types.GeneratorType):
                source.close()

    def _room(self) -> bool:
        with self.changed:
            while len(self.ready) >= self.depth and not self.stopped:
                self.changed.wait(0.5)  # a time, since `stop` may not get the lock
            return not self.stopped

    def _put(self, batch: _Batch | _End) -> None:
        with self.changed:
            self.ready.append(batch)
            self.changed.notify_all()

    def _move(self, item: Any, stream: Any) -> _Batch:
        moved = map_leaves(item, lambda leaf: self._leaf(leaf, stream))
        return _Batch(moved, self.device.record(stream))

    def _leaf(self, leaf: Any, stream: Any) -> Any:
        host = host_view(leaf)
        if host is None:
            found = devices.find(_plain(leaf))
            return leaf if found is None else _Slot(leaf, None, self.device.record(found.stream))
        if not moves(host):
            return leaf
        try:
            loan = self.device.lend(library_of(leaf), host.shape, host.dtype, stream)
        except ImportError as error:
            raise DeviceError(f"prefetch: a {type(leaf).__name__} can't go to the device: {error}") from error
        found = self.device.find(loan.array, stream)
        if found is not None:
            fill_from(host, found)
        return _Slot(loan.array, loan, None)


class Prefetch(Iterator[Any]):
    """What `prefetch` returns."""

    def __init__(self, iterable: Iterable[Any], depth: int, device: int | None, stream: Any) -> None:
        _check("prefetch", iterable, depth)
        here = need_device("prefetch")
        if device is not None and device != here.properties().index:
            raise DeviceError(
                f"prefetch: device {device} is not the current GPU ({here.properties().index}); select it first "
                f"(cupy.cuda.Device({device}).use())"
            )
        self._device, self._iterable, self._stream = here, iterable, stream
        self._pipe = _Pipe(here, iterable, depth)
        self._started = self._ended = False
        self._finalizer = weakref.finalize(self, self._pipe.stop)
        self._finalizer.atexit = False

    def __len__(self) -> int:
        return len(self._iterable)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        if not self._started:
            self._started = True
            _live.add(self._pipe)
            self._pipe.thread.start()
        batch = self._pipe.take()
        if isinstance(batch, _Batch):
            return self._hand_over(batch)
        self.close()
        if batch.error is not None:
            raise batch.error
        raise StopIteration

    def __enter__(self) -> Prefetch:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop: no more batches come. Waits until the thread is done with the source's code, but not for long."""
        self._ended = True
        self._pipe.stop()
        if self._started and self._pipe.thread is not threading.current_thread():
            self._pipe.thread.join(_JOIN_S)
        self._pipe.ready.clear()

    def _hand_over(self, batch: _Batch) -> Any:
        """Order the batch on the consumer's stream, and its memory's end on that stream too."""
        device, waiting = self._device, set()

        def arrive(leaf: Any) -> Any:
            if not isinstance(leaf, _Slot):
                return leaf
            found = device.find(_plain(leaf.array), self._stream)
            if found is None:
                return leaf.array
            if leaf.loan is not None:
                leaf.loan.use_on(found.stream, self._stream, device.current_stream())
                if found.stream not in waiting:
                    waiting.add(found.stream)
                    device.wait_event(found.stream, batch.event)
            elif leaf.event is not None:
                device.wait_event(found.stream, leaf.event)
            return leaf.array

        return map_leaves(batch.item, arrive)


class Offload(Iterator[Any]):
    """What `offload` returns."""

    def __init__(self, iterable: Iterable[Any], depth: int, stream: Any, snapshot: bool) -> None:
        _check("offload", iterable, depth)
        self._iterable = iterable
        self._batches = _offloaded(need_device("offload"), iterable, depth, stream, snapshot)

    def __len__(self) -> int:
        return len(self._iterable)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        return next(self._batches)

    def __enter__(self) -> Offload:  # noqa: PYI034
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop: waits for copies that are on their way, and closes the source if it is a generator."""
        self._batches.close()


def _offloaded(
    device: Device, iterable: Iterable[Any], depth: int, stream: Any, snapshot: bool
) -> Generator[Any, None, None]:
    copies = device.borrow_stream()
    pending: deque[tuple[Any, Event, list[Buffer]]] = deque()  # the arrays are kept until the copy is done
    source = iter(iterable)
    try:
        for item in source:
            pending.append(_send(device, item, copies, stream, snapshot))
            del item
            if len(pending) > depth:
                yield _arrived(pending)
        while pending:
            yield _arrived(pending)
    finally:
        for _, event, _ in pending:  # the copies write to memory that goes now
            event.synchronize()
        device.return_stream(copies)
        if isinstance(source, types.GeneratorType):
            source.close()


def _arrived(pending: deque[tuple[Any, Event, list[Buffer]]]) -> Any:
    pending[0][1].synchronize()
    return pending.popleft()[0]


def _send(device: Device, item: Any, copies: Any, stream: Any, snapshot: bool) -> tuple[Any, Event, list[Buffer]]:
    kept: list[Buffer] = []

    def leave(leaf: Any) -> Any:
        buffer = devices.find(leaf, stream)
        if buffer is None:
            return leaf
        if snapshot or not buffer.contiguous:
            buffer = device.snapshot(buffer)
        kept.append(buffer)
        block = _host_memory(buffer)
        device.wait_event(copies, device.record(buffer.stream))
        if buffer.nbytes:
            device.copy(block.ctypes.data, buffer.ptr, buffer.nbytes, copies)
        return block

    made = map_leaves(item, leave)
    return made, device.record(copies), kept


def _host_memory(buffer: Buffer) -> np.ndarray[Any, Any]:
    try:
        return pinned_empty(buffer.shape, buffer.dtype)
    except MemoryError:  # over the budget for page-locked memory; the copy then waits
        return np.empty(buffer.shape, buffer.dtype)


def _plain(leaf: Any) -> Any:
    """A leaf as `find` takes it: what is passed through may record gradients."""
    return leaf.detach() if library_of(leaf) == "torch" else leaf


def _lasting(iterable: Iterable[Any]) -> bool:
    """Whether the batches of a source stay as they are when the next one is asked for."""
    return isinstance(iterable, (Sequence, np.ndarray)) or any(
        kind.__module__.startswith("torch.utils.data") for kind in type(iterable).__mro__
    )


def _check(operation: str, iterable: Any, depth: int) -> None:
    if not hasattr(type(iterable), "__iter__") and not hasattr(type(iterable), "__getitem__"):
        raise BufferSpecError(f"{operation}: a {type(iterable).__name__} can't be iterated over; give batches")
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise BufferSpecError(f"{operation}: depth is {depth!r}; give a positive integer")


_live: weakref.WeakSet[_Pipe] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """A thread that copies must not outlive the interpreter's memory."""
    pipes = list(_live)
    for pipe in pipes:
        pipe.stop()
    for pipe in pipes:
        pipe.thread.join(_JOIN_S)
