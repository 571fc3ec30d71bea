"""Random sequences of local copies on random streams, compared byte for byte with NumPy.

The caller of gdcomm does here what the contract allows and no more: it orders its own work by events, overwrites a
host array as soon as the call returned (with `block=False` once the copy says that it is done) and drops arrays
at any time. Nothing else waits, so whatever gdcomm does not wait for itself leaves a stale byte.
"""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from checks import Produced, WrongError

import gdcomm
from gdcomm import devices
from gdcomm.devices.emulated import EmulatedDevice, EmulatedEvent
from gdcomm.memory import pinned
from gdcomm.memory.pages import PAGE
from gdcomm.transfer import batch, crew, rows, staging

__all__ = ["Sequence", "StrictDevice", "install", "locked", "on_own_pages"]

TINY = {"threads": 3, "smallest": 4096, "largest": 4096, "slots": 4}  # so that short arrays take many turns
SHAPES = [(20, 12), (100, 90)]  # below and above what goes through a thread's own slot


class StrictDevice(EmulatedDevice):
    """It also refuses what NumPy's copies forgive: overlaps, gaps, memory that is no longer page-locked.

    Attributes:
        patience: how often each event says "not yet"; None: some times, as usual.
    """

    patience: int | None = None

    def record(self, stream: Any) -> EmulatedEvent:
        event = super().record(stream)
        if self.patience is not None:
            event._patience = self.patience
        return event

    def _write(self, target: Any, source: Any, locked: list[int]) -> None:
        assert not np.may_share_memory(target, source), "a copy of the device's overlaps itself"
        super()._write(target, source, locked)

    def copy_strided(self, dst: Any, src: Any) -> None:
        assert not np.may_share_memory(self._view(dst), self._view(src)), "a copy of the device's overlaps itself"
        super().copy_strided(dst, src)

    def gather(self, out: Any, table: Any, index: Any, mode: str, fill: int) -> None:
        assert out.contiguous and index.contiguous
        self._look_at(table, out.stream)
        self._apart(table, out)
        assert not np.may_share_memory(self._view(out), self._view(index)), "indices are written"
        super().gather(out, table, index, mode, fill)

    def scatter(self, table: Any, index: Any, values: Any, mode: str, unique: bool) -> None:
        assert index.contiguous and values.contiguous
        self._look_at(table, values.stream)
        self._apart(table, values)
        self._apart(table, index)
        super().scatter(table, index, values, mode, unique)

    def _look_at(self, table: Any, stream: Any) -> None:
        address = table.address

        def look() -> None:
            assert self.owns(address) or self.is_pinned(address), "a table was freed or unlocked under a kernel"

        stream._push(look)

    def _apart(self, table: Any, buffer: Any) -> None:
        if table.length and buffer.nbytes:
            span = (table.length - 1) * table.stride
            low, end = table.address + min(span, 0), table.address + max(span, 0) + table.nbytes
            assert end <= buffer.ptr or buffer.ptr + buffer.nbytes <= low, "a kernel writes to what it reads"


def install(device: EmulatedDevice) -> None:
    """Make it the device of this process, with short pieces, and as many threads on every machine."""
    devices._installed[:] = [device]
    staging.plan = staging.Plan(**TINY)
    rows.SLOT_NBYTES, rows.THREADS = 2048, 3
    batch._BLOCK = 16 << 10
    if not crew._crews or crew._crews[0]._count != 2:
        crew._crews[:] = [crew.Crew(2)]


def locked(device: EmulatedDevice, values: Any) -> Any:
    """Page-locked memory that is no pool's: it goes with its array, whoever still uses it."""
    values = np.asarray(values)
    block = device.pinned(values.nbytes).view(values.dtype).reshape(values.shape)
    block[...] = values
    return block


def on_own_pages(values: Any) -> Any:
    """Pageable memory that shares no page with other arrays, whose registration would page-lock it too."""
    values = np.asarray(values)
    room = -(-values.nbytes // PAGE) * PAGE
    block = np.empty(room + PAGE, np.uint8)
    made = block[-block.ctypes.data % PAGE :][: values.nbytes].view(values.dtype).reshape(values.shape)
    made[...] = values
    return made


@dataclass
class Item:
    """An array, what it must hold, and (of device arrays) the stream that it is used on."""

    array: Any
    model: Any
    kind: str
    stream: Any = None
    busy: list[Any] = field(default_factory=list)  # what must be over before the host touches it
    parts: list[Any] = field(default_factory=list)

    @property
    def on_device(self) -> bool:
        return self.stream is not None


class Sequence:
    """The state of one random sequence. `draw` is a `random.Random` or something alike."""

    KINDS = ("pageable", "strided", "pinned", "registered", "memmap", "device", "device", "device strided")
    STEPS = (
        *["copy"] * 5, *["kernel", "overwrite", "read", "drop"] * 2, "to_device", "to_host", "copy_many", "take", "put",
        "prefetch", "offload", "signal", "register",
    )  # fmt: skip

    def __init__(self, device: EmulatedDevice, draw: Any) -> None:
        self.device, self.draw = device, draw
        self.streams = [device.Stream() for _ in range(3)]
        self.shape = SHAPES[draw.randrange(len(SHAPES))]
        self.count = 0
        self.grave: list[Any] = []  # device arrays that queued work of the caller still uses
        self.log: list[str] = []
        self.items = [self.new(kind) for kind in self.KINDS]

    def run(self, steps: int) -> None:
        """Take steps, and compare everything at the end."""
        for _ in range(steps):
            step = self.STEPS[self.draw.randrange(len(self.STEPS))]
            self.log.append(step)
            getattr(self, step)()
        for i in range(len(self.items)):
            self.compare(self.items[i])
            self.release(self.items[i])
        self.items.clear()

    # -- arrays ------------------------------------------------------------------------------

    def values(self, shape: tuple[int, ...] | None = None) -> Any:
        """Numbers that no other array holds or held."""
        self.count += 1
        shape = self.shape if shape is None else shape
        return self.count * 1e6 + np.arange(float(np.prod(shape))).reshape(shape)

    def new(self, kind: str) -> Item:
        model = self.values()
        if kind.startswith("device"):
            return self.new_on_device(kind, model)
        if kind == "pageable":
            array = np.asfortranarray(model) if self.chance(0.3) else on_own_pages(model)
        elif kind == "strided":
            array = np.full((2 * self.shape[0], self.shape[1] + 3), -1.0)[::2, 1:-2]
        elif kind == "pinned":
            array = gdcomm.pinned_empty(self.shape, order="F" if self.chance(0.3) else "C")
        elif kind == "registered":
            array = on_own_pages(model)
            gdcomm.register(array)
        else:
            with tempfile.TemporaryFile() as file:
                array = np.memmap(file, float, "w+", shape=self.shape)
        array[...] = model
        return Item(array, model, kind)

    def new_on_device(self, kind: str, model: Any) -> Item:
        stream = self.any_stream()
        if kind == "device strided":
            array = self.device.empty((2 * self.shape[0], self.shape[1]))[::2]
        else:
            array = self.device.empty(self.shape, order="F" if self.chance(0.2) else "C")
        values = model.copy()
        self.device.launch(stream, lambda view: np.copyto(view, values), array)
        return Item(array, model, kind, stream)

    def replace(self, item: Item, new: Item) -> None:
        """The old array goes: at once, unless it is device memory that the caller's own kernels use."""
        self.release(item)
        self.items[next(i for i, other in enumerate(self.items) if other is item)] = new

    def release(self, item: Item) -> None:
        if item.kind == "registered" and self.chance(0.5):
            gdcomm.unregister(item.array)  # else its owner's end does so
        if item.on_device:
            self.grave.append(item.array)
        item.busy = []

    # -- choices -----------------------------------------------------------------------------

    def chance(self, share: float) -> bool:
        return bool(self.draw.randrange(100) < 100 * share)

    def any_stream(self) -> Any:
        return self.streams[self.draw.randrange(len(self.streams))]

    def pick(self, *, device: bool | None = None, other: Item | None = None) -> Item:
        found = [i for i in self.items if i is not other and device in (None, i.on_device)]
        return found[self.draw.randrange(len(found))]

    def idle(self, *items: Item) -> None:
        """Before the host (or a copy by the host's order) uses arrays of copies that may be under way."""
        for item in items:
            for copying in item.busy:
                if self.chance(0.5):
                    copying.synchronize()
                polls = 0
                while not copying.query():
                    polls += 1
                    if polls > 9:
                        self.device.nudge()  # streams that wait for signals need the others to go on
            item.busy = []

    def handed(self, item: Item, stream: Any) -> Any:
        """The array as an argument; without a stream of the call its own one orders it."""
        return Produced(item.array, item.stream) if item.on_device else item.array

    def after(self, stream: Any, *items: Item) -> None:
        """The caller's own order: later work on the arrays' streams runs after that of the call's stream."""
        for item in items:
            if item.on_device and stream is not None and item.stream is not stream:
                self.device.wait_event(item.stream, self.device.record(stream))

    # -- steps -------------------------------------------------------------------------------

    def copy(self) -> None:
        dst = self.pick()
        src = self.pick(other=dst)
        self.idle(dst, src)
        block = (None, True, False)[self.draw.randrange(3)]
        stream = self.any_stream() if self.chance(0.5) else None
        under_way = gdcomm.copy(self.handed(dst, stream), self.handed(src, stream), stream=stream, block=block)
        self.after(stream, dst, src)
        dst.model = src.model.copy()
        self.log[-1] += f" {src.kind} -> {dst.kind}, block {block}"
        if block is False:
            for item in (dst, src):
                if not item.on_device and item.kind in ("pinned", "registered"):
                    item.busy.append(under_way)
        elif not src.on_device:
            self.scribble(src)

    def kernel(self) -> None:
        item = self.pick(device=True)
        self.device.launch(item.stream, lambda view: np.add(view, 0.5, view), item.array)
        item.model = item.model + 0.5

    def overwrite(self) -> None:
        item = self.pick(device=False)
        self.idle(item)
        self.scribble(item)

    def scribble(self, item: Item) -> None:
        item.model = self.values()
        item.array[...] = item.model

    def read(self) -> None:
        self.compare(self.pick())

    def compare(self, item: Item) -> None:
        self.idle(item)
        found = self.device.asnumpy(item.array, item.stream) if item.on_device else np.asarray(item.array)
        if found.tobytes() != item.model.tobytes():
            bad = np.argwhere(found != item.model)
            first = tuple(bad[0])
            raise WrongError(
                f"{item.kind} array: {len(bad)} stale of {found.size}, first {found[first]} for {item.model[first]} "
                f"at {first}, after {self.log[-12:]}"
            )

    def drop(self) -> None:
        item = self.pick()
        kinds = [kind for kind in self.KINDS if kind.startswith("device") == item.on_device]
        self.replace(item, self.new(kinds[self.draw.randrange(len(kinds))]))

    def to_device(self) -> None:
        src, old, stream = self.pick(device=False), self.pick(device=True), self.any_stream()
        self.idle(src)
        with stream if self.chance(0.5) else nullcontext():
            array = gdcomm.to_device(src.array, stream=stream)
        self.replace(old, Item(array, src.model.copy(), old.kind, stream))
        self.scribble(src)

    def to_host(self) -> None:
        src, old = self.pick(device=True), self.pick(device=False)
        array = gdcomm.to_host(self.handed(src, None))
        pooled = pinned.block_at(array.ctypes.data) is not None
        made = Item(array, src.model.copy(), "pinned" if pooled else "pageable")
        self.compare(made)
        self.replace(old, made)

    def copy_many(self) -> None:
        pairs: list[tuple[Item, Item]] = []
        left = list(self.items)
        for _ in range(1 + self.draw.randrange(3)):
            dst = left.pop(self.draw.randrange(len(left)))
            pairs.append((dst, left.pop(self.draw.randrange(len(left)))))
        stream = self.any_stream() if self.chance(0.5) else None
        dsts, srcs = [], []
        for dst, src in pairs:
            self.idle(dst, src)
            for row in range(self.shape[0]):
                for item, arrays in ((dst, dsts), (src, srcs)):
                    part = item.array[row]
                    arrays.append(Produced(part, item.stream) if item.on_device and stream is None else part)
            dst.model = src.model.copy()
        if stream is not None:  # plain arrays name no stream
            for item in (item for pair in pairs for item in pair if item.on_device):
                self.device.wait_event(stream, self.device.record(item.stream))
        gdcomm.copy_many(dsts, srcs, stream=stream)
        for dst, src in pairs:
            self.after(stream, dst, src)
            if not src.on_device:
                self.scribble(src)

    def rows(self) -> Any:
        return np.array([self.draw.randrange(self.shape[0]) for _ in range(self.shape[0])])

    def indices(self, index: Any, stream: Any) -> Any:
        if self.chance(0.5):
            return index
        wide = self.device.empty((index.size, 2), np.int64)
        self.device.launch(stream, lambda view: np.copyto(view, index[:, None]), wide)
        self.grave.append(wide)
        return wide[:, 0] if self.chance(0.5) else Produced(wide[:, 1], stream)

    def table(self) -> Item:
        found = [item for item in self.items if not item.on_device or item.array._view.flags.c_contiguous]
        return found[self.draw.randrange(len(found))]

    def take(self) -> None:
        table, stream, index = self.table(), self.any_stream(), self.rows()
        old = self.pick(device=True, other=table)
        self.idle(table)
        method = ("auto", "gather", "copy")[self.draw.randrange(3)]
        array = gdcomm.take(
            self.handed(table, stream), self.indices(index, stream), stream=stream, method=method, mode="clip"
        )
        self.after(stream, table)
        if not table.on_device:
            table.busy.append(_Passed(self.device.record(stream)))
        self.replace(old, Item(array, table.model[index], "device", stream))

    def put(self) -> None:
        table, stream = self.table(), self.any_stream()
        values = self.pick(device=True, other=table)
        self.idle(table)
        index = np.array(self.draw.sample(range(self.shape[0]), self.shape[0] // 2))
        block = self.chance(0.5)
        model = table.model.copy()
        model[index] = values.model[: index.size]
        part = Produced(values.array[: index.size], values.stream)
        chosen = self.indices(index, stream)
        gdcomm.put(self.handed(table, stream), chosen, part, stream=stream, mode="clip", block=block)
        self.after(stream, table, values)
        table.model = model
        if not block and not table.on_device:
            table.busy.append(_Passed(self.device.record(stream)))

    def prefetch(self) -> None:
        lasting, stream = self.chance(0.5), self.any_stream()
        sources = [self.pick(device=None if lasting else False) for _ in range(3)]
        self.idle(*sources)
        model = [item.model.copy() for item in sources]
        if lasting:
            batches: Any = [self.handed(item, None) for item in sources]
        else:
            block = gdcomm.pinned_empty(self.shape)  # used for one batch after the other

            def refill() -> Any:
                for values in model:
                    block[...] = values
                    yield block

            batches = refill()
        arrived = []
        with stream:
            for array in gdcomm.prefetch(batches, depth=1 + self.draw.randrange(2)):
                total = self.device.empty(self.shape)
                self.device.launch(stream, lambda a, b: np.copyto(b, a), array, total)
                arrived.append(Item(total, model[len(arrived)], "device", stream))
                del array
        self.replace(self.pick(device=True), arrived[self.draw.randrange(len(arrived))])
        self.grave += [item.array for item in arrived]

    def offload(self) -> None:
        sources, old = [self.pick(device=True) for _ in range(3)], self.pick(device=False)
        snapshot = self.chance(0.7)

        def batches() -> Any:
            for item in sources:
                yield self.handed(item, None)
                if snapshot:
                    self.device.launch(item.stream, lambda view: np.add(view, 0.5, view), item.array)
                    item.model = item.model + 0.5

        expected: list[Any] = []
        for item in sources:  # the same array twice: later batches hold what its kernels left
            expected.append(item.model + (0.5 * sum(item is other for other in sources[: len(expected)]) * snapshot))
        made = [Item(a, expected[i], "pinned") for i, a in enumerate(gdcomm.offload(batches(), snapshot=snapshot))]
        for item in made:
            self.compare(item)
        self.replace(old, made[self.draw.randrange(len(made))])

    def signal(self) -> None:
        """One stream after another, by a value in memory instead of an event."""
        first, second = self.any_stream(), self.any_stream()
        if first is second:
            return
        signal = gdcomm.Signal()
        signal.stream_set(first, 1)
        signal.stream_wait(second, 1)
        self.grave.append(signal)

    def register(self) -> None:
        """Memory changes its kind, also while copies that were told to use it are under way."""
        item = self.pick(device=False)
        if item.kind == "registered":
            gdcomm.unregister(item.array)
            item.kind = "pageable"
        elif item.kind == "pageable" and item.array.ctypes.data % PAGE == 0:
            gdcomm.register(item.array)
            item.kind = "registered"


class _Passed:
    """A point of a stream, in the words of a copy under way."""

    def __init__(self, event: Any) -> None:
        self.query, self.synchronize = event.query, event.synchronize
