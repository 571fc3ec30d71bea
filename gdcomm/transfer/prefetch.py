"""Batches move between host and device while the caller computes on earlier ones."""

from __future__ import annotations

import atexit
import operator
import os
import threading
import types
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from gdcomm import devices
from gdcomm.devices.base import Buffer, Device, Event
from gdcomm.devices.kernels import Loan
from gdcomm.errors import BufferSpecError, DeviceError
from gdcomm.memory.arrays import pinned_empty
from gdcomm.transfer.copy import move
from gdcomm.transfer.leaves import fill_from, host_view, map_leaves, moves, need_device
from gdcomm.transfer.sides import library_of

__all__ = ["Offload", "Prefetch", "offload", "prefetch"]

_JOIN_S = 5.0  # how long a worker that is inside the source's code is waited for


def prefetch(iterable: Iterable[Any], *, depth: int = 2, device: int | None = None, stream: Any = None) -> Prefetch:
    """Iterate over batches on the device, the next ones being copied while you compute on this one.

    ```python
    for images, labels in gdcomm.prefetch(loader):      # NumPy arrays or CPU tensors in, device arrays out
        step(images, labels)                            # meanwhile the next two are copied
    ```

    A batch is an array, or tuples, lists, dicts, named tuples and dataclasses of arrays. NumPy arrays become CuPy
    arrays, PyTorch CPU tensors become CUDA tensors (without gradients), all in C order. Arrays that are on the device
    already are copied there. Everything else (numbers, text, arrays of objects, text or dates, masked arrays, JAX
    arrays) passes through.

    A thread takes batches from the source, so the source's code runs there (its current stream is the default
    one). Copies have a stream of their own; your current stream waits for the copies of a batch when you get it, the
    host does not. Each batch is new memory, which is yours as long as you keep it; when
    you drop it, work that you have queued on your stream still sees it. The source may use the memory of a
    batch again when it is asked for the next one (a list, a tuple, or an array that is iterated over, must stay as it
    is). Source memory that is page-locked is copied fastest.

    Args:
        iterable: batches: a generator, a list, a `torch.utils.data.DataLoader`, ...
        depth: batches copied ahead; as many, and those you hold, are in device memory.
        device: the GPU's number; it must be the current one (None).
        stream: the stream that you use the batches on; None is the one that is current (in the batch's library)
            when you get each batch.

    Returns:
        An iterator, with `len` if the source has it. It starts at the first `next`. `close`, leaving a `with` block, or
        dropping it (a `break`) stops the thread; a generator, `prefetch` or `offload` as source is closed then.
        What the source raises is raised in place of its batch. Several threads may share it: each batch comes once.

    Raises:
        BufferSpecError: `depth` is no positive integer, `iterable` can't be iterated, or `stream` is none; in place
            of a batch: an array has the other byte order, or a mapping can't be copied.
        DeviceError: there is no GPU, or `device` is not the current one; at `next`: this is a forked child.
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
        An iterator, with `len` if the source has it. `close`, leaving a `with` block, or dropping it waits for
        copies that are on their way; a generator, `prefetch` or `offload` as source is closed then. What the source
        raises is raised in place of its batch.

    Raises:
        BufferSpecError: `depth` is no positive integer, `iterable` can't be iterated, or `stream` is none.
        DeviceError: there is no GPU.
    """
    return Offload(iterable, depth, stream, snapshot)


class _Batch(NamedTuple):
    """A batch with loans in the place of its arrays, and the end of the copies to them."""

    item: Any
    event: Event


class _End(NamedTuple):
    error: BaseException | None


class _Pipe:
    """What worker and iterator share. It knows nothing of the iterator, whose end therefore stops the worker.

    The `_End` is the last that comes, and stays, for all threads that wait.
    """

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
            found = self.ready[0]
            if isinstance(found, _Batch):
                self.ready.popleft()
            self.changed.notify_all()
            return found

    def empty(self) -> None:
        """Give the memory of batches back that nobody took; who still waits for one learns that this is the end."""
        with self.changed:
            self.ready.clear()
            self.ready.append(_End(None))
            self.changed.notify_all()

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
            _close(source)

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
        source = devices.find(_plain(leaf)) if host is None else None
        if source is not None and library_of(leaf) != "jax":
            side: Any = source
        elif host is not None and moves(host):
            side = host
        else:
            return leaf
        if not side.dtype.isnative:
            raise BufferSpecError(f"prefetch: dtype {side.dtype} has the other byte order; convert it with astype")
        try:
            loan = self.device.lend(library_of(leaf), side.shape, side.dtype, stream)
        except ImportError as error:
            raise DeviceError(f"prefetch: a {type(leaf).__name__} can't go to the device: {error}") from error
        target = self.device.find(loan.array, stream)
        if target is not None and target.nbytes:
            if source is None:
                fill_from(side, target)
            else:
                move(target, source, None, None)
        return loan


class Prefetch(Iterator[Any]):
    """What `prefetch` returns."""

    def __init__(self, iterable: Iterable[Any], depth: int, device: int | None, stream: Any) -> None:
        here, depth = _checked("prefetch", iterable, depth, stream)
        if device is not None and device != here.properties().index:
            raise DeviceError(
                f"prefetch: device {device!r} is not the current GPU ({here.properties().index}); select it first "
                f"(cupy.cuda.Device({device}).use())"
            )
        self._device, self._iterable, self._stream = here, iterable, stream
        self._pipe = _Pipe(here, iterable, depth)
        self._lock = threading.Lock()
        self._started = self._ended = False
        self._process = os.getpid()
        weakref.finalize(self, self._pipe.stop).atexit = False

    def __len__(self) -> int:
        return len(self._iterable)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        if os.getpid() != self._process:
            raise DeviceError("prefetch: a forked child has neither the thread nor the GPU; make it after the fork")
        if self._ended:
            raise StopIteration
        with self._lock:
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
        if os.getpid() != self._process:
            return
        if self._started and self._pipe.thread is not threading.current_thread():
            self._pipe.thread.join(_JOIN_S)
        self._pipe.empty()

    def _hand_over(self, batch: _Batch) -> Any:
        """Order the batch on the consumer's stream, and its memory's end on that stream too."""
        device, waiting = self._device, set()

        def arrive(leaf: Any) -> Any:
            if not isinstance(leaf, Loan):
                return leaf
            array = leaf.array
            found = device.find(array, self._stream)
            if found is not None:
                leaf.use_on(found.stream, self._stream, device.current_stream())
                if found.stream not in waiting:
                    waiting.add(found.stream)
                    device.wait_event(found.stream, batch.event)
            return array

        return map_leaves(batch.item, arrive)


class Offload(Iterator[Any]):
    """What `offload` returns."""

    def __init__(self, iterable: Iterable[Any], depth: int, stream: Any, snapshot: bool) -> None:
        device, depth = _checked("offload", iterable, depth, stream)
        self._iterable = iterable
        self._batches = _offloaded(device, iterable, depth, stream, snapshot)

    def __len__(self) -> int:
        return len(self._iterable)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        return next(self._batches)

    def __enter__(self) -> Offload:  # noqa: PYI034
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop: waits for copies that are on their way, and closes the source; see `offload`."""
        self._batches.close()


def _offloaded(
    device: Device, iterable: Iterable[Any], depth: int, stream: Any, snapshot: bool
) -> Generator[Any, None, None]:
    copies = device.borrow_stream()
    pending: deque[tuple[Any, Event, list[Buffer]]] = deque()  # the arrays are kept until the copy is done
    source = iter(iterable)
    late: Exception | None = None
    try:
        while True:
            try:
                item = next(source)
                pending.append(_send(device, item, copies, stream, snapshot))
                del item
            except StopIteration:
                break
            except Exception as error:  # comes in its place: behind the batches before it
                late = error
                break
            if len(pending) > depth:
                yield _arrived(pending)
        while pending:
            yield _arrived(pending)
        if late is not None:
            raise late
    finally:
        late = None  # its traceback holds this frame
        for _, event, _ in pending:  # the copies write to memory that goes now
            event.synchronize()
        device.return_stream(copies)
        _close(source)


def _close(source: Any) -> None:
    if isinstance(source, (types.GeneratorType, Prefetch, Offload)):
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
    except (MemoryError, DeviceError):  # over the budget for page-locked memory, or there is no more: the copy waits
        return np.empty(buffer.shape, buffer.dtype)


def _plain(leaf: Any) -> Any:
    """A leaf as `find` takes it: what is passed through may record gradients."""
    return leaf.detach() if library_of(leaf) == "torch" else leaf


def _lasting(iterable: Iterable[Any]) -> bool:
    """Whether the batches of a source stay as they are when the next one is asked for."""
    return isinstance(iterable, (list, tuple, np.ndarray)) or any(
        kind.__module__ == "torch.utils.data.dataloader" for kind in type(iterable).__mro__
    )


def _checked(operation: str, iterable: Any, depth: Any, stream: Any) -> tuple[Device, int]:
    if not hasattr(type(iterable), "__iter__") and not hasattr(type(iterable), "__getitem__"):
        raise BufferSpecError(f"{operation}: a {type(iterable).__name__} can't be iterated over; give batches")
    try:
        count = 0 if isinstance(depth, bool) else operator.index(depth)
    except TypeError:
        count = 0
    if count < 1:
        raise BufferSpecError(f"{operation}: depth is {depth!r}; give a positive integer")
    device = need_device(operation)
    if stream is not None:
        device.handle(stream)
    return device, count


_live: weakref.WeakSet[_Pipe] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """A thread that copies must not outlive the interpreter's memory."""
    pipes = list(_live)
    for pipe in pipes:
        pipe.stop()
    for pipe in pipes:
        pipe.thread.join(_JOIN_S)
